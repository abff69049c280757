"""Which token comes next, by what a request asks for. Pure.

As OpenAI and the transformers library have it: the logits over `temperature`; then the `top_k` likeliest; then the
fewest of them that are as likely as `top_p` together. A temperature of 0 is the likeliest token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LIKELIEST = 1024  # are sorted first: of 150,000 tokens that takes a tenth of the time of all

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` >= 0; `top_k`: 0 is all; `top_p` in (0, 1]; `seed`: the same gives the same answer in any batch."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


class Sampler:
    """One answer's: it has random numbers of its own. `last`: int32 [1], the last token that was drawn, written here
    before anybody else has seen it; `ended`: nobody wants another one.
    """

    def __init__(self, sampling: Sampling, number: int = 0, end_tokens: Collection[int] = ()) -> None:
        """`number`: of the answer, where a request asks for several."""
        self.asked = sampling
        self.last = np.zeros(1, np.int32)  # a token of any vocabulary
        self.ended = False
        self._end_tokens = end_tokens
        self._random = np.random.default_rng(None if sampling.seed is None else [abs(sampling.seed), number])

    def pick(self, logits: Numbers) -> int:
        """The next token. `logits`: float32 [vocabulary]."""
        if self.asked.temperature == 0:
            return int(logits.argmax())
        tokens, shares = candidates(logits, self.asked)
        upto = np.cumsum(shares)
        found = np.searchsorted(upto, self.random() * upto[-1], side="right")
        return int(tokens[min(int(found), len(tokens) - 1)])

    def drew(self, token: int | None) -> None:
        """That is its next token; None: it has none."""
        if token is not None:
            self.last[0] = token
        if token is None or self.ends_with(token):
            self.ended = True

    def ends_with(self, token: int) -> bool:
        """It is an end token: the answer's last one, and no text."""
        return token in self._end_tokens

    def random(self) -> float:
        """The next of its random numbers, in [0, 1): each token takes one, unless the temperature is 0."""
        return self._random.random()


class RowSamplers(NamedTuple):
    """Who draws from a row of logits: the `samplers` of all answers that go on from it. `logprobs`: how many
    alternatives each token names; None: it has no logprob of its own either.
    """

    samplers: Sequence[Sampler]
    logprobs: int | None

    def end(self) -> None:
        """None of them is to draw any more."""
        for sampler in self.samplers:
            sampler.ended = True


@dataclass(frozen=True, slots=True)
class Picked:
    """One token. `logprob`: the natural logarithm of how likely it was, before temperature, top_k and top_p
    (`log_shares`). `alternatives`: (token, its logprob) of the likeliest, the likeliest first.
    """

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


def pick(logits: Numbers, row: RowSamplers) -> list[Picked] | None:
    """One token for each sampler; None where the logits, float32 [vocabulary], are no numbers."""
    if not np.isfinite(logits.max()):
        return None
    tokens = [sampler.pick(logits) for sampler in row.samplers]
    if row.logprobs is None:
        return [Picked(token) for token in tokens]
    known = log_shares(logits)
    best = _likeliest(logits, row.logprobs)
    others = tuple(zip(best.tolist(), known[best].tolist(), strict=True))
    return [Picked(token, float(known[token]), others) for token in tokens]


def candidates(logits: Numbers, asked: Sampling) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The tokens that may come, the likeliest first, and how likely each is; they need not add up to 1."""
    with np.errstate(over="ignore"):  # next to no temperature: all but the likeliest are -inf
        shares = np.exp((logits.astype(np.float64) - logits.max()) / asked.temperature)
    if not 0 < asked.top_k < len(shares) and asked.top_p >= 1:
        return np.arange(len(shares)), shares
    most = asked.top_k if 0 < asked.top_k < len(shares) else len(shares)
    sorted_tokens = _likeliest(logits, min(most, LIKELIEST))
    whole = shares.sum() if most == len(shares) else _likeliest_sum(shares, most)
    if asked.top_p < 1:
        found = _enough(shares[sorted_tokens], asked.top_p * whole)
        if found is None and most > LIKELIEST:
            sorted_tokens = _likeliest(logits, most)
            found = _enough(shares[sorted_tokens], asked.top_p * whole)
        sorted_tokens = sorted_tokens[:found]
    elif most > LIKELIEST:
        sorted_tokens = _likeliest(logits, most)
    return sorted_tokens, shares[sorted_tokens]


def log_shares(logits: Numbers) -> Numbers:
    """float32 [vocabulary]: the logarithm of how likely each token is, whatever was asked for."""
    shifted = logits - logits.max()
    found: Numbers = shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)
    return found


def _likeliest(logits: Numbers, count: int) -> npt.NDArray[np.intp]:
    """So many tokens, or all, the likeliest first; of two alike the one that comes first in the vocabulary."""
    if count == 0:
        return np.zeros(0, np.intp)
    least = np.partition(logits, -count)[-count] if count < len(logits) else -np.inf
    above = np.flatnonzero(logits > least)
    some = np.sort(np.concatenate([above, np.flatnonzero(logits == least)[: max(0, count - len(above))]]))
    return some[np.argsort(-logits[some], kind="stable")]


def _likeliest_sum(shares: npt.NDArray[np.float64], count: int) -> float:
    return float(np.partition(shares, -count)[-count:].sum())


def _enough(shares: npt.NDArray[np.float64], wanted: float) -> int | None:
    """How many of them, from the first, reach `wanted` together; None where all do not."""
    upto = np.cumsum(shares)
    found = int(np.searchsorted(upto, wanted, side="left"))
    return found + 1 if found < len(upto) else None
