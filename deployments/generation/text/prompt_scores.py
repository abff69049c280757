"""Log probabilities of a prompt's tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """How likely some consecutive tokens of a prompt are, each behind the tokens before it. Never its first token.

    - `ids`: int32 [tokens, 1 + alternatives]: the token itself, then the likeliest ones, sorted.
    - `logprobs`: the natural logarithms of their probabilities, before all sampling options, float32, likewise.
    - `ranks`: int32 [tokens]: 1 for the likeliest token.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    @classmethod
    def of_bytes(cls, ids: bytes, logprobs: bytes, ranks: bytes) -> Self:
        """From the arrays' bytes. Raises ValueError if their lengths do not add up."""
        shape = (len(ranks) // 4, len(ids) // len(ranks) if ranks else 1)
        each = np.frombuffer(ids, np.int32).reshape(shape), np.frombuffer(logprobs, np.float32).reshape(shape)
        return cls(*each, np.frombuffer(ranks, np.int32))

    @property
    def tokens(self) -> int:
        return len(self.ranks)

    def part(self, start: int, end: int, alternatives: int) -> PromptScores:
        """Its tokens from `start` to `end`, with at most so many alternatives."""
        at = slice(start, end), slice(1 + alternatives)
        return PromptScores(self.ids[at], self.logprobs[at], self.ranks[start:end])

    @classmethod
    def joined(cls, parts: Iterable[tuple[int, PromptScores]]) -> PromptScores:
        """All of these, at least one, as one. Each has the index of its first token. A later one replaces what came
        before from there on: a prompt that is computed again is scored again.
        """
        kept: list[tuple[int, PromptScores]] = []
        for start, one in parts:
            while kept and kept[-1][0] >= start:
                kept.pop()
            if kept:
                first, last = kept[-1]
                kept[-1] = first, last.part(0, start - first, last.ids.shape[1])
            kept.append((start, one))
        some = [one for _, one in kept if one.tokens] or [kept[-1][1]]  # an empty one may have too few alternatives
        each = zip(*((one.ids, one.logprobs, one.ranks) for one in some), strict=True)
        return cls(*map(np.concatenate, each))
