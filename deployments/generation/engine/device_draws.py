"""Draws many tokens at once on a device: the tensor operations of `device_sampling`, which describes the steps.

A `DrawBatch` holds draws that are computed in the same way. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deployments.generation.text.sampling import Sampler

ARGMAX, ALL, SORTED = range(3)  # the ways to draw


class Draw(NamedTuple):
    """A token to draw from the logits of a `row`. `top_k`: the vocabulary's size if all tokens may come. `random`: in
    [0, 1). `logprobs`: how many alternatives to report; None: not even the token's own logprob.
    """

    row: int
    temperature: float
    top_k: int
    top_p: float
    random: float
    way: int
    logprobs: int | None

    @classmethod
    def of(cls, row: int, sampler: Sampler, logprobs: int | None, vocabulary: int) -> Draw:
        """The next draw of a sampler. Uses its next random number, unless the temperature is 0."""
        asked = sampler.asked
        if asked.temperature == 0:
            return cls(row, 0.0, 1, 1.0, 0.0, ARGMAX, logprobs)
        top_k = asked.top_k if 0 < asked.top_k < vocabulary else vocabulary
        way = ALL if top_k == vocabulary and asked.top_p >= 1 else SORTED
        return cls(row, asked.temperature, top_k, asked.top_p, sampler.random(), way, logprobs)

    @property
    def kind(self) -> tuple[int, bool]:
        """(way, whether logprobs are wanted). Draws of one kind are computed together."""
        return self.way, self.logprobs is not None


class DrawBatch(NamedTuple):
    """Draws of one kind, on the device. `logits`: those of each draw's row, float32 [draws, vocabulary]. All other
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

    @classmethod
    def of(cls, logits: torch.Tensor, draws: Sequence[Draw], floats: torch.dtype) -> DrawBatch:
        """Copy the draws to the device. `logits`: those of all rows."""
        asked = torch.tensor([draw[:5] for draw in draws], dtype=floats)
        asked = asked.to(logits.device, non_blocking=logits.is_cuda)
        rows, temperature, top_k, top_p, random = torch.split(asked, 1, 1)
        own = logits[rows[:, 0].long()]
        largest, likeliest = own.max(1, keepdim=True)
        return cls(own, largest, likeliest, largest.isfinite(), temperature, top_k.long(), top_p, random)

    def shares(self) -> torch.Tensor:
        """Each token's unnormalized probability, [draws, vocabulary]; the largest is 1."""
        floats = self.temperature.dtype
        temperature = self.temperature.clamp(min=torch.finfo(floats).tiny)  # float32 may have rounded it to 0
        return self.logits.sub(self.largest.to(floats)).div_(temperature).exp_()


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
