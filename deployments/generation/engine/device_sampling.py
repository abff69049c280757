"""Tokens drawn where the logits are, as `text.sampling` draws them in the host's memory. Imports torch.

Not run yet on any accelerator: no GPU and no NPU was at hand. So it is tried at a replica's start on made-up logits;
where it fails, or draws other tokens, logits are copied to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from deployments.generation.scheduling.chunk import DeviceLogits, Logits
from deployments.generation.text.sampling import LIKELIEST, Drawn, Picked, Sampler, Sampling, pick

logger = logging.getLogger("ray.serve")

_AT_ONCE = 2**22  # shares that are computed at once: 32 rows of 128,000 words, so that they take little memory
_TRIED = (Sampling(0.0), Sampling(seed=1), Sampling(0.7, seed=2), Sampling(1.0, 40, 0.9, 3), Sampling(9.0, 0, 0.9, 4))

_ARGMAX, _ALL, _SORTED = range(3)  # the likeliest; any of the vocabulary, in its order; of the likeliest, in theirs
_FINITE, _SHORT, _TOKEN, _LOGPROB, _NAMED = range(5)  # what comes back of a draw; then the alternatives, their logprobs


def logits_of(device: torch.device) -> Callable[[torch.Tensor], Logits | DeviceLogits]:
    """What a step on this device gives of its logits, float32 [rows, vocabulary]: in the host's memory on a CPU, where
    numpy is quicker, and where tokens cannot be drawn on the device.
    """
    if device.type == "cpu":
        return lambda logits: logits.numpy()
    try:
        problem = _problem(device)
    except Exception as error:  # noqa: BLE001 - whatever it is, there is another way
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    if problem is None:
        return TorchLogits
    logger.warning("Tokens are not drawn on %s but by the host: %s", device, problem)
    return lambda logits: logits.cpu().numpy()


def _problem(device: torch.device) -> str | None:
    rows = np.random.default_rng(1).standard_normal((len(_TRIED), 4 * LIKELIEST)).astype(np.float32) * 3
    found, wanted = ([Drawn([Sampler(asked, answer) for answer in range(4)], 2) for asked in _TRIED] for _ in range(2))
    there = TorchLogits(torch.from_numpy(rows).to(device)).pick(found)
    for one, row, drawn in zip(there, rows, wanted, strict=True):
        if one is None or [_ids(each) for each in one] != [_ids(each) for each in pick(row, drawn) or []]:
            return "it draws other tokens"
    return None


def _ids(picked: Picked) -> list[int]:
    return [picked.id, *(token for token, _ in picked.alternatives)]


class _Draw(NamedTuple):
    """One token that is to be drawn from a row. `random`: in [0, 1). `most`: so many tokens may come, or all."""

    row: int
    temperature: float
    most: int
    top_p: float
    random: float
    logprobs: int | None

    @classmethod
    def of(cls, row: int, sampler: Sampler, logprobs: int | None, vocabulary: int) -> _Draw:
        asked = sampler.asked
        if asked.temperature == 0:
            return cls(row, 0.0, 1, 1.0, 0.0, logprobs)
        most = asked.top_k if 0 < asked.top_k < vocabulary else vocabulary
        return cls(row, asked.temperature, most, asked.top_p, sampler.random(), logprobs)

    def kind(self, vocabulary: int) -> tuple[int, bool]:
        """Which draws are computed together."""
        way = _ALL if self.most == vocabulary and self.top_p >= 1 else _SORTED
        return way if self.temperature else _ARGMAX, self.logprobs is None


class TorchLogits:
    """`chunk.DeviceLogits`: logits, float32 [rows, vocabulary], on their device.

    `floats`: in which shares and their sums are computed. float64 as in numpy, where the device has it (CUDA); else
    float32 (NPU), which now and then draws a neighbour of the token that float64 would.
    """

    def __init__(self, logits: torch.Tensor, floats: torch.dtype | None = None) -> None:
        self._logits = logits
        self._floats = floats or (torch.float64 if logits.device.type in {"cpu", "cuda"} else torch.float32)

    @torch.inference_mode()
    def pick(self, drawn: Sequence[Drawn]) -> list[list[Picked] | None]:
        """See `sampling.pick`. One copy to the host; a second one where more than the `LIKELIEST` had to be sorted.

        Raises ValueError where there are more or fewer rows.
        """
        if len(drawn) != len(self._logits):
            raise ValueError(f"{len(self._logits)} rows of logits, and how to draw from {len(drawn)}")
        vocabulary = self._logits.shape[1]
        draws = [
            _Draw.of(row, sampler, of.logprobs, vocabulary) for row, of in enumerate(drawn) for sampler in of.samplers
        ]
        found = self._found(draws, min(LIKELIEST, vocabulary))
        again = [at for at, one in enumerate(found) if one[_SHORT]]
        for at, one in zip(again, self._found([draws[at] for at in again], vocabulary), strict=True):
            found[at] = one
        picked: list[list[Picked] | None] = [[] for _ in drawn]
        for draw, one in zip(draws, found, strict=True):
            if (row := picked[draw.row]) is None or not one[_FINITE]:
                picked[draw.row] = None
            else:
                row.append(_picked(draw, one))
        return picked

    def _found(self, draws: Sequence[_Draw], count: int) -> list[list[float]]:
        """Of each draw `_FINITE`, `_SHORT` and so on, if so many likeliest tokens are sorted."""
        if not draws:
            return []
        vocabulary = self._logits.shape[1]
        kinds = [draw.kind(vocabulary) for draw in draws]
        order = sorted(range(len(draws)), key=kinds.__getitem__)
        others = min(vocabulary, max(draw.logprobs or 0 for draw in draws))
        lines = max(1, _AT_ONCE // vocabulary)
        parts = [
            self._part(same[start : start + lines], way, count, others)
            for (way, _), places in groupby(order, kinds.__getitem__)
            for same in [[draws[at] for at in places]]
            for start in range(0, len(same), lines)
        ]
        here = torch.cat(parts).tolist()
        return [one for _, one in sorted(zip(order, here, strict=True))]

    def _part(self, draws: Sequence[_Draw], way: int, count: int, others: int) -> torch.Tensor:
        """Of draws of one kind, [draws, `_NAMED` + 2 `others`]."""
        asked = torch.tensor([draw[:5] for draw in draws], dtype=self._floats)
        asked = asked.to(self._logits.device, non_blocking=self._logits.is_cuda)
        logits = self._logits[asked[:, 0].long()]
        largest, tokens = logits.max(1, keepdim=True)
        finite = largest.isfinite()
        short = torch.zeros_like(finite)
        named = draws[0].logprobs is not None
        if way == _SORTED or (named and others):
            best, ids = _likeliest(logits, max(count, others))
        if way == _ALL:
            tokens = self._of_all(logits, largest, asked, tokens)
        elif way == _SORTED:
            tokens, short = self._of_sorted(logits, largest, asked, best, ids)
        known = []
        if named:
            every = _log_shares(logits, largest, self._floats)
            known = [every.gather(1, tokens)]
            if others:
                known += [ids[:, :others], every.gather(1, ids[:, :others])]
                if best.shape[1] < every.shape[1]:
                    short = short | (best[:, others - 1 : others] == best[:, -1:])  # which of them come first?
        found = torch.cat([one.to(self._floats) for one in (finite, short, tokens, *known)], 1)
        return functional.pad(found, (0, _NAMED + 2 * others - found.shape[1]))

    def _shares(self, logits: torch.Tensor, largest: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        """[draws, vocabulary], the largest 1."""
        temperature = asked[:, 1:2].clamp(min=torch.finfo(self._floats).tiny)  # float32 has no smaller one
        return logits.sub(largest.to(self._floats)).div_(temperature).exp_()

    def _of_all(
        self, logits: torch.Tensor, largest: torch.Tensor, asked: torch.Tensor, likeliest: torch.Tensor
    ) -> torch.Tensor:
        """A token of each line, from the whole vocabulary."""
        shares = self._shares(logits, largest, asked)
        upto = shares.cumsum(1)
        found = torch.searchsorted(upto, asked[:, 4:5] * upto[:, -1:], right=True).clamp_(max=upto.shape[1] - 1)
        return torch.where(shares.gather(1, found) > 0, found, likeliest)

    def _of_sorted(
        self, logits: torch.Tensor, largest: torch.Tensor, asked: torch.Tensor, best: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token of each line, from its likeliest, `best`; and whether these are too few to know it."""
        all_shares = self._shares(logits, largest, asked)
        shares = all_shares.gather(1, ids)
        most, top_p, random = asked[:, 2:3].long(), asked[:, 3:4], asked[:, 4:5]
        count, words, upto = ids.shape[1], logits.shape[1], shares.cumsum(1)
        whole = torch.where(most < words, upto.gather(1, most.clamp(max=count) - 1), all_shares.sum(1, True))
        enough = torch.searchsorted(upto, top_p * whole) + 1
        last = torch.where(top_p < 1, enough, most).minimum(most).clamp(max=count) - 1
        found = torch.searchsorted(upto, random * upto.gather(1, last), right=True).minimum(last)
        tokens = torch.where(shares.gather(1, found) > 0, ids.gather(1, found), ids[:, :1])
        if count == words:
            return tokens, torch.zeros_like(most, dtype=torch.bool)
        alike = (best.gather(1, last) == best[:, -1:]) & (shares[:, -1:] > 0)  # which of them come first?
        return tokens, alike | ((most > count) & (most < words))


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many of each line's numbers, or all, the largest first, and where they are; of two alike the one that comes
    first, except that of those as large as the last one any may be there.
    """
    if count >= logits.shape[1]:
        found = logits.sort(dim=1, descending=True, stable=True)
        return found.values, found.indices
    places = logits.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    found = logits.gather(1, places).sort(dim=1, descending=True, stable=True)
    return found.values, places.gather(1, found.indices)


def _log_shares(logits: torch.Tensor, largest: torch.Tensor, floats: torch.dtype) -> torch.Tensor:
    """`sampling.log_shares` of each line."""
    shifted = logits - largest
    return shifted.sub_(shifted.exp().sum(1, keepdim=True, dtype=floats).log().float())


def _picked(draw: _Draw, found: Sequence[float]) -> Picked:
    token = int(found[_TOKEN])
    if draw.logprobs is None:
        return Picked(token)
    others = (len(found) - _NAMED) // 2
    ids, known = found[_NAMED:][:others], found[_NAMED + others :]
    pairs = zip(map(int, ids[: draw.logprobs]), known[: draw.logprobs], strict=True)
    return Picked(token, found[_LOGPROB], tuple(pairs))
