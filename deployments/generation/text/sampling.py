"""Which token comes next, by what a request asks for. Pure.

As OpenAI and the transformers library have it: the logits over `temperature`; then the `top_k` likeliest; then the
fewest of them that are as likely as `top_p` together. A temperature of 0 is the likeliest token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LIKELIEST = 1024  # are sorted first: of 150,000 words that takes a tenth of the time of all

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` >= 0; `top_k`: 0 is all; `top_p` in (0, 1]; `seed`: the same gives the same answer in any batch."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


class Sampler:
    """One answer's: it has random numbers of its own."""

    def __init__(self, sampling: Sampling, number: int = 0) -> None:
        """`number`: of the answer, where a request asks for several."""
        self._asked = sampling
        self._random = np.random.default_rng(None if sampling.seed is None else [abs(sampling.seed), number])

    def pick(self, logits: Numbers) -> int:
        """The next token. `logits`: float32 [vocabulary]."""
        if self._asked.temperature == 0:
            return int(logits.argmax())
        tokens, shares = candidates(logits, self._asked)
        upto = np.cumsum(shares)
        found = np.searchsorted(upto, self._random.random() * upto[-1], side="right")
        return int(tokens[min(int(found), len(tokens) - 1)])


def candidates(logits: Numbers, asked: Sampling) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The tokens that may come, the likeliest first, and how likely each is; they need not add up to 1."""
    with np.errstate(over="ignore"):  # next to no temperature: all but the likeliest are -inf
        shares = np.exp((logits.astype(np.float64) - logits.max()) / asked.temperature)
    if not 0 < asked.top_k < len(shares) and asked.top_p >= 1:
        return np.arange(len(shares)), shares
    most = asked.top_k if 0 < asked.top_k < len(shares) else len(shares)
    sorted_tokens = _likeliest(shares, min(most, _LIKELIEST))
    whole = shares.sum() if most == len(shares) else _likeliest_sum(shares, most)
    if asked.top_p < 1:
        found = _enough(shares[sorted_tokens], asked.top_p * whole)
        if found is None and most > _LIKELIEST:
            sorted_tokens = _likeliest(shares, most)
            found = _enough(shares[sorted_tokens], asked.top_p * whole)
        sorted_tokens = sorted_tokens[:found]
    elif most > _LIKELIEST:
        sorted_tokens = _likeliest(shares, most)
    return sorted_tokens, shares[sorted_tokens]


def log_shares(logits: Numbers) -> Numbers:
    """float32 [vocabulary]: the logarithm of how likely each token is, whatever was asked for."""
    shifted = logits - logits.max()
    found: Numbers = shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)
    return found


def _likeliest(shares: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """So many tokens, the likeliest first; of two alike the one that comes first in the vocabulary."""
    some = np.arange(len(shares)) if count >= len(shares) else np.sort(np.argpartition(-shares, count - 1)[:count])
    return some[np.argsort(-shares[some], kind="stable")]


def _likeliest_sum(shares: npt.NDArray[np.float64], count: int) -> float:
    return float(np.partition(shares, -count)[-count:].sum())


def _enough(shares: npt.NDArray[np.float64], wanted: float) -> int | None:
    """How many of them, from the first, reach `wanted` together; None where all do not."""
    upto = np.cumsum(shares)
    found = int(np.searchsorted(upto, wanted, side="left"))
    return found + 1 if found < len(upto) else None
