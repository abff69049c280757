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

Not run on any accelerator yet, because no GPU or NPU was at hand. So it is tried on made-up logits when a replica
starts. If it fails or draws other tokens, logits are copied to the host instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch.nn import functional

from deployments.generation.engine.device_draws import (
    ALL,
    SORTED,
    Draw,
    DrawBatch,
    drawn_of_all,
    drawn_of_sorted,
    likeliest,
    log_shares,
)
from deployments.generation.engine.steps import DeviceLogits, Logits
from deployments.generation.text.sampling import LIKELIEST, Picked, RowSamplers, Sampler, Sampling, pick

logger = logging.getLogger("ray.serve")

_AT_ONCE = 2**22  # shares that are computed at once, to limit memory: 32 rows of 128,000 tokens
_TRIED = (Sampling(0.0), Sampling(seed=1), Sampling(0.7, seed=2), Sampling(1.0, 40, 0.9, 3), Sampling(9.0, 0, 0.9, 4))

_FINITE, _TOO_FEW, _TOKEN, _LOGPROB, _ALTERNATIVES = range(
    5
)  # indices in a line: from the last one on, the alternatives and then their logprobs


def logits_of(device: torch.device) -> Callable[[torch.Tensor], Logits | DeviceLogits]:
    """How a step on this device returns its logits, float32 [rows, vocabulary]. They come in the host's memory on a
    CPU, where numpy is faster, and if tokens cannot be drawn on the device.
    """
    if device.type == "cpu":
        return lambda logits: logits.numpy()
    try:
        problem = _problem(device)
    except Exception as error:  # noqa: BLE001 - whatever it is, the host can draw instead
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    if problem is None:
        return TorchLogits
    logger.warning("sampling tokens on the host, not on %s: %s", device, problem)
    return lambda logits: logits.cpu().numpy()


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
        draws = [
            Draw.of(row, sampler, of.logprobs, vocabulary) for row, of in enumerate(samplers) for sampler in of.samplers
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
        return picked

    def _lines(self, draws: Sequence[Draw], sort: int) -> list[list[float]]:
        """The line of each draw, in the host's memory. `sort`: how many of the likeliest tokens to sort."""
        if not draws:
            return []
        vocabulary = self._logits.shape[1]
        named = min(vocabulary, max(draw.logprobs or 0 for draw in draws))
        at_once = max(1, _AT_ONCE // vocabulary)
        order = sorted(range(len(draws)), key=lambda at: draws[at].kind)
        parts = []
        for _, places in groupby(order, lambda at: draws[at].kind):
            alike = [draws[at] for at in places]
            starts = range(0, len(alike), at_once)
            parts += [self._batch_lines(alike[start : start + at_once], sort, named) for start in starts]
        lines = torch.cat(parts).tolist()
        return [line for _, line in sorted(zip(order, lines, strict=True))]

    def _batch_lines(self, draws: Sequence[Draw], sort: int, named: int) -> torch.Tensor:
        """The lines of draws of one kind, on the device, [draws, `_ALTERNATIVES` + 2 `named`]. `named`: the number of
        alternatives in a line.
        """
        way, with_logprobs = draws[0].kind
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
