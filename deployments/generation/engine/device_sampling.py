"""Draws tokens on the device of the logits, with the same results as `text.sampling` on the host. Imports torch.

What `TorchLogits.pick` does with a row of logits, [vocabulary]:

1. On the host, each answer that continues from the row becomes a `Draw`: its request's options, and the answer's next
   random number.
2. Draws that are computed in the same way go to the device together, as a `DrawBatch`, each with its row's logits. A
   token's share is `exp((logit - largest logit) / temperature)`.
   - `ARGMAX`, at a temperature of 0: the token with the largest logit.
   - `ALL`, without `top_k` and `top_p`: shares are summed in the vocabulary's order. The token is the one at which the
     sum exceeds the random number times the total.
   - `SORTED`: the `LIKELIEST` tokens are sorted. `top_k` and then `top_p` determine the last one that may come. The
     token is found among these in the same way.
3. If logprobs are wanted, those of the token and of the likeliest tokens are looked up.
4. Each draw yields one line of numbers (`_FINITE` and so on). All lines are copied to the host at once. Only here does
   the host wait for the device.
5. Draws whose line says `_TOO_FEW` repeat steps 2 to 4 with the whole vocabulary sorted.
6. Each line becomes a `Picked`. A row whose largest logit is not finite becomes None.

Rows whose answers change logits by rules (`Sampler.alters`) are copied to the host, and drawn there
(`kernels.draw_kernel`).

It is tried on made-up logits when a replica starts. If it fails or draws other tokens, logits are copied to the host
instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from deployments.errors import first_line
from deployments.generation.engine.steps import DeviceLogits
from deployments.generation.kernels.draw_kernel import HostLogits
from deployments.generation.text.sampling import LIKELIEST, Picked, RowSamplers, Sampler, Sampling, pick

logger = logging.getLogger("ray.serve")

_AT_ONCE = 2**22  # shares that are computed at once, to limit memory: 32 rows of 128,000 tokens
_TRIED = (
    Sampling(0.0), Sampling(seed=1), Sampling(0.7, seed=2, min_p=0.1), Sampling(1.0, 40, 0.9, 3),
    Sampling(9.0, 0, 0.9, 4),
)  # fmt: skip

ARGMAX, ALL, SORTED = range(3)  # the ways to draw
_FINITE, _TOO_FEW, _TOKEN, _LOGPROB, _ALTERNATIVES = range(5)  # indices in a line: then alternatives and their logprobs


def logits_of(device: torch.device) -> Callable[[torch.Tensor], DeviceLogits]:
    """How a step on this device returns its logits, float32 [rows, vocabulary]. They come in the host's memory on a
    CPU, and if tokens cannot be drawn on the device.
    """
    if device.type == "cpu":
        return lambda logits: HostLogits(logits.numpy())
    try:
        problem = _problem(device)
    except Exception as error:  # noqa: BLE001 - whatever it is, the host can draw instead
        problem = first_line(error)
    if problem is None:
        return TorchLogits
    logger.warning("sampling tokens on the host, not on %s: %s", device, problem)
    return lambda logits: HostLogits(logits.cpu().numpy())


def _problem(device: torch.device) -> str | None:
    """Draw from made-up logits on the device and in numpy. Returns a problem or None. Raises what the device raises."""
    rows = np.random.default_rng(1).standard_normal((len(_TRIED), 4 * LIKELIEST)).astype(np.float32) * 3
    here, there = (
        [RowSamplers([Sampler(asked, answer) for answer in range(4)], 2) for asked in _TRIED] for _ in range(2)
    )
    found = TorchLogits(torch.from_numpy(rows).to(device)).pick(there)
    for picked, row, samplers in zip(found, rows, here, strict=True):
        if picked is None or [_ids(one) for one in picked] != [_ids(one) for one in pick(row, samplers) or []]:
            return "it draws other tokens"
    return None


def _ids(picked: Picked) -> list[int]:
    return [picked.id, *(token for token, _ in picked.alternatives)]


class TorchLogits:
    """`steps.DeviceLogits`: logits, float32 [rows, vocabulary], on their device.

    `floats`: the dtype for shares and their sums. It is float64, as in numpy, if the device has it (CUDA). Otherwise it
    is float32 (NPU), which occasionally draws a neighbor of the token that float64 would draw.
    """

    def __init__(self, logits: torch.Tensor, floats: torch.dtype | None = None) -> None:
        self._logits = logits
        self._floats = floats or (torch.float64 if logits.device.type in {"cpu", "cuda"} else torch.float32)

    @torch.inference_mode()
    def pick(self, samplers: Sequence[RowSamplers]) -> list[list[Picked] | None]:
        """See `sampling.pick`. Copies to the host once, or twice if the `LIKELIEST` were too few.

        Raises ValueError unless there is one of `samplers` per row.
        """
        if len(samplers) != len(self._logits):
            raise ValueError(f"{len(self._logits)} rows of logits, and how to draw from {len(samplers)}")
        vocabulary = self._logits.shape[1]
        altered = [row for row, of in enumerate(samplers) if of.alters]
        draws = [
            Draw.of(row, sampler, of.logprobs, vocabulary)
            for row, of in enumerate(samplers)
            if row not in altered
            for sampler in of.samplers
        ]
        lines = self._lines(draws, min(LIKELIEST, vocabulary))
        again = [at for at, line in enumerate(lines) if line[_TOO_FEW]]
        for at, line in zip(again, self._lines([draws[at] for at in again], vocabulary), strict=True):
            lines[at] = line
        picked: list[list[Picked] | None] = [[] for _ in samplers]
        for draw, line in zip(draws, lines, strict=True):
            if (row := picked[draw.row]) is None or not line[_FINITE]:
                picked[draw.row] = None
            else:
                row.append(_picked(draw, line))
        if altered:
            on_host = HostLogits(self._logits[altered].cpu().numpy())
            for at, row in zip(altered, on_host.pick([samplers[at] for at in altered]), strict=True):
                picked[at] = row
        return picked

    def _lines(self, draws: Sequence[Draw], sort: int) -> list[list[float]]:
        """The line of each draw, in the host's memory. `sort`: how many of the likeliest tokens to sort."""
        if not draws:
            return []
        vocabulary = self._logits.shape[1]
        named = min(vocabulary, max(draw.logprobs or 0 for draw in draws))
        at_once = max(1, _AT_ONCE // vocabulary)
        order = sorted(range(len(draws)), key=lambda at: draws[at].way)
        parts = []
        for _, places in groupby(order, lambda at: draws[at].way):
            alike = [draws[at] for at in places]
            starts = range(0, len(alike), at_once)
            parts += [self._batch_lines(alike[start : start + at_once], sort, named) for start in starts]
        lines = torch.cat(parts).tolist()
        return [line for _, line in sorted(zip(order, lines, strict=True))]

    def _batch_lines(self, draws: Sequence[Draw], sort: int, named: int) -> torch.Tensor:
        """The lines of draws in one way, on the device, [draws, `_ALTERNATIVES` + 2 `named`]. `named`: the number of
        alternatives in a line.
        """
        way, with_logprobs = draws[0].way, any(draw.logprobs is not None for draw in draws)
        batch = DrawBatch.of(self._logits, draws, self._floats)
        vocabulary, tokens, too_few = self._logits.shape[1], batch.likeliest, torch.zeros_like(batch.finite)
        if way == SORTED or (with_logprobs and named):
            best, ids = likeliest(batch.logits, max(sort, named))
        if way == ALL:
            tokens = drawn_of_all(batch)
        elif way == SORTED:
            tokens, too_few = drawn_of_sorted(batch, best, ids)
        logprobs = []
        if with_logprobs:
            of_all = log_shares(batch)
            logprobs = [of_all.gather(1, tokens)]
            if named:
                logprobs += [ids[:, :named], of_all.gather(1, ids[:, :named])]
                if best.shape[1] < vocabulary:
                    too_few = too_few | (best[:, named - 1 : named] == best[:, -1:])  # as in `drawn_of_sorted`
        lines = torch.cat([each.to(self._floats) for each in (batch.finite, too_few, tokens, *logprobs)], 1)
        return functional.pad(lines, (0, _ALTERNATIVES + 2 * named - lines.shape[1]))


def _picked(draw: Draw, line: Sequence[float]) -> Picked:
    token = int(line[_TOKEN])
    if draw.logprobs is None:
        return Picked(token)
    named = (len(line) - _ALTERNATIVES) // 2
    ids, logprobs = line[_ALTERNATIVES:][:named], line[_ALTERNATIVES + named :]
    pairs = zip(map(int, ids[: draw.logprobs]), logprobs[: draw.logprobs], strict=True)
    return Picked(token, line[_LOGPROB], tuple(pairs))


class Draw(NamedTuple):
    """A token to draw from the logits of a `row`. `top_k`: the vocabulary's size if all tokens may come. `random`: in
    [0, 1). `below`: see `Sampling`. `logprobs`: how many alternatives to report; None: not even the token's own
    logprob.
    """

    row: int
    temperature: float
    top_k: int
    top_p: float
    random: float
    below: float
    way: int
    logprobs: int | None

    @classmethod
    def of(cls, row: int, sampler: Sampler, logprobs: int | None, vocabulary: int) -> Draw:
        """The next draw of a sampler. Uses its next random number, unless the temperature is 0."""
        asked = sampler.asked
        if asked.temperature == 0:
            return cls(row, 0.0, 1, 1.0, 0.0, -math.inf, ARGMAX, logprobs)
        top_k = asked.top_k if 0 < asked.top_k < vocabulary else vocabulary
        way = ALL if top_k == vocabulary and asked.top_p >= 1 else SORTED
        return cls(row, asked.temperature, top_k, asked.top_p, sampler.random(), asked.below, way, logprobs)


class DrawBatch(NamedTuple):
    """Draws in one way, on the device. `logits`: those of each draw's row, float32 [draws, vocabulary]. All other
    fields are [draws, 1]: the `largest` logit, its token (`likeliest`), whether it is `finite`, and the fields of the
    `Draw`, in the floats in which shares are computed.
    """

    logits: torch.Tensor
    largest: torch.Tensor
    likeliest: torch.Tensor
    finite: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    random: torch.Tensor
    below: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, draws: Sequence[Draw], floats: torch.dtype) -> DrawBatch:
        """Copy the draws to the device. `logits`: those of all rows."""
        asked = torch.tensor([draw[:6] for draw in draws], dtype=floats)
        asked = asked.to(logits.device, non_blocking=logits.is_cuda)
        rows, temperature, top_k, top_p, random, below = torch.split(asked, 1, 1)
        own = logits[rows[:, 0].long()]
        largest, likeliest = own.max(1, keepdim=True)
        return cls(own, largest, likeliest, largest.isfinite(), temperature, top_k.long(), top_p, random, below)

    def shares(self) -> torch.Tensor:
        """Each token's unnormalized probability, [draws, vocabulary]; the largest is 1."""
        floats = self.temperature.dtype
        temperature = self.temperature.clamp(min=torch.finfo(floats).tiny)  # float32 may have rounded it to 0
        shares = self.logits.sub(self.largest.to(floats)).div_(temperature).exp_()
        return shares.masked_fill_(self.logits < self.largest + self.below.float(), 0)


def drawn_of_all(batch: DrawBatch) -> torch.Tensor:
    """Draw tokens from the whole vocabulary, [draws, 1]."""
    shares = batch.shares()
    last = torch.full_like(batch.likeliest, shares.shape[1] - 1)
    return _place(shares, shares.cumsum(1), last, batch.random, batch.likeliest)


def drawn_of_sorted(batch: DrawBatch, best: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens with `top_k` and `top_p`. Returns the tokens, and whether too few were sorted to be certain, both
    [draws, 1]. `ids`: the likeliest tokens, sorted, [draws, sorted]; `best`: their logits.
    """
    of_all = batch.shares()
    shares = of_all.gather(1, ids)
    upto, top_k, count, vocabulary = shares.cumsum(1), batch.top_k, ids.shape[1], of_all.shape[1]
    # `top_p` is a part of what `top_k` leaves.
    total = torch.where(top_k < vocabulary, upto.gather(1, top_k.clamp(max=count) - 1), of_all.sum(1, True))
    enough = torch.searchsorted(upto, batch.top_p * total) + 1  # this many tokens reach `top_p` of it
    last = torch.where(batch.top_p < 1, enough, top_k).minimum(top_k).clamp(max=count) - 1
    tokens = ids.gather(1, _place(shares, upto, last, batch.random, torch.zeros_like(last)))
    if count == vocabulary:
        return tokens, torch.zeros_like(batch.finite)
    # If the last token that may come is as likely as the last sorted one, unsorted tokens may be as likely, too. It is
    # then unknown which of them come first in the vocabulary, and whether `top_p` is reached.
    alike = (best.gather(1, last) == best[:, -1:]) & (shares[:, -1:] > 0)
    return tokens, alike | ((top_k > count) & (top_k < vocabulary))


def _place(
    shares: torch.Tensor, upto: torch.Tensor, last: torch.Tensor, random: torch.Tensor, likeliest: torch.Tensor
) -> torch.Tensor:
    """The index, [draws, 1], at which `upto`, the cumulative sum of `shares`, exceeds `random` times its value at index
    `last`. If rounding leads to a token with a share of 0, which cannot come, it is the index of the `likeliest`.
    """
    found = torch.searchsorted(upto, random * upto.gather(1, last), right=True).minimum(last)
    return torch.where(shares.gather(1, found) > 0, found, likeliest)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each draw, or all, sorted; and their tokens. Equal logits keep the vocabulary's
    order, but of those equal to the last one, any may be included.
    """
    if count >= logits.shape[1]:
        found = logits.sort(dim=1, descending=True, stable=True)
        return found.values, found.indices
    places = logits.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    found = logits.gather(1, places).sort(dim=1, descending=True, stable=True)
    return found.values, places.gather(1, found.indices)


def log_shares(batch: DrawBatch) -> torch.Tensor:
    """`sampling.log_shares` for each draw, float32 [draws, vocabulary]."""
    shifted = batch.logits - batch.largest
    return shifted.sub_(shifted.exp().sum(1, keepdim=True, dtype=batch.random.dtype).log().float())
