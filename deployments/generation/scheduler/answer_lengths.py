"""How long answers become, learned from those that have ended, and how many blocks those that run will hold. Pure.

Nobody knows when an answer ends before it has all that it may get. But most end long before, and not all at once. So
the blocks that n answers need together are far fewer than n times the most of one.

Lengths are learned as survival times are: an answer that was cut off at its most tokens says only that it would have
become longer (Kaplan, Meier: Nonparametric estimation from incomplete observations, JASA 53, 1958). While few answers
have ended, each is taken to become as long as it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deployments.generation.scheduler.block_pool import BLOCK

Numbers = npt.NDArray[np.float64]

_BIN = 32  # tokens: lengths are told apart so finely
_BINS = 128  # longer answers than these are taken to become as long as they may
_REMEMBERED = 100.0  # answers: the latest count most
_DOUBT = 20.0  # answers that are thought to have gone on, in each bin, beside those that were seen
_AHEAD = np.array([0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096])  # tokens from now
_SURE = 3.5  # standard deviations that are kept beside the mean


@dataclass(slots=True)
class AnswerLengths:
    """Learns from each answer, as it goes on and as it ends."""

    _reached: Numbers = field(default_factory=lambda: np.zeros(_BINS))  # answers that came to this bin's end, or ended
    _ended: Numbers = field(default_factory=lambda: np.zeros(_BINS))  # in this bin
    _lives: Numbers = field(default_factory=lambda: np.ones(_BINS + 1))  # share that becomes longer than so many bins

    def goes_on(self, tokens: int) -> None:
        """An answer that has not ended has so many tokens now."""
        if tokens % _BIN == 0 and tokens <= _BINS * _BIN:
            self._reached[tokens // _BIN - 1] += 1
            self._learn()

    def ended(self, tokens: int, most_tokens: int) -> None:
        """An answer has ended after so many tokens, of so many that it might have."""
        fade = 1 - 1 / _REMEMBERED
        self._reached *= fade
        self._ended *= fade
        at = tokens // _BIN
        if tokens < most_tokens and at < _BINS:
            self._reached[at] += 1
            self._ended[at] += 1
        self._learn()

    def _learn(self) -> None:
        self._lives[1:] = np.cumprod(1 - self._ended / (self._reached + _DOUBT))

    def mean(self, most_tokens: int) -> float:
        """Tokens of an answer that may have so many."""
        known = np.interp(np.arange(0, most_tokens, _BIN), np.arange(_BINS + 1) * _BIN, self._lives)
        return min(float(most_tokens), _BIN * float(known.sum()))

    def most_blocks(self, tokens: Sequence[int], lefts: Sequence[int], lengths: Sequence[int]) -> float:
        """Blocks that these answers hold when they hold most, nearly for sure. They have so many `tokens`, may get so
        many more (`lefts`), and read so many with their prompts (`lengths`). Each step gives each one a token.
        """
        picked, left, length = (np.array(one, np.float64)[:, None] for one in (tokens, lefts, lengths))
        lives = np.interp(picked + _AHEAD[:-1], np.arange(_BINS + 1) * _BIN, self._lives)
        lives = np.where(left > _AHEAD[:-1], lives / np.interp(picked, np.arange(_BINS + 1) * _BIN, self._lives), 0.0)
        blocks = np.ceil((length + np.minimum(_AHEAD[1:], left)) / BLOCK)  # at the end of each time ahead
        mean = (lives * blocks).sum(axis=0)
        spread = np.sqrt((lives * (1 - lives) * blocks**2).sum(axis=0))
        return float((mean + _SURE * spread).max())
