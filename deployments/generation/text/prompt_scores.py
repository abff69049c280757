"""Log probabilities of a prompt's tokens. Pure."""

from __future__ import annotations

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

    def followed_by(self, other: PromptScores, at: int) -> PromptScores:
        """Its first `at` tokens, then the other's. A prompt that is computed again is scored again."""
        if not other.tokens:  # its bytes do not say how many alternatives there are
            return self
        return PromptScores(
            np.concatenate([self.ids[:at], other.ids]),
            np.concatenate([self.logprobs[:at], other.logprobs]),
            np.concatenate([self.ranks[:at], other.ranks]),
        )
