"""Learns how long answers become, and estimates how many blocks the running ones will hold. Pure.

Nobody knows in advance when an answer ends. But most answers end long before their maximum, and not all at once. So n
answers together need far fewer blocks than n times the most of one.

Lengths are estimated like survival times: an answer that was cut off at its maximum shows only that it would have
become longer (Kaplan, Meier: Nonparametric estimation from incomplete observations, JASA 53, 1958). While few answers
have ended, each is assumed to reach its maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

_BIN = 32  # tokens in a bin of lengths
_BINS = 128  # an answer beyond the last bin is assumed to reach its maximum
_REMEMBERED = 100.0  # answers that are remembered; the latest count most
_PRIOR_ANSWERS = 5.0  # prior: additional answers in each bin
_FEW = 20.0  # remembered answers whose lengths count as much as the prior's are trusted
_AHEAD = np.array([0, *np.geomspace(_BIN, _BIN * _BINS, 15)])  # tokens from now
_SURE = 3.5  # standard deviations that are added to the mean


@dataclass(slots=True)
class AnswerLengths:
    """Learns from each answer, as it goes on and as it ends."""

    _reached: Numbers = field(default_factory=lambda: np.zeros(_BINS))  # answers that passed this bin or ended in it
    _ended: Numbers = field(default_factory=lambda: np.zeros(_BINS))  # answers that ended in this bin
    _lives: Numbers = field(default_factory=lambda: np.ones(_BINS + 1))  # share of answers longer than this many bins

    def goes_on(self, tokens: int) -> None:
        """Note that a running answer has `tokens` tokens now."""
        if tokens % _BIN == 0 and tokens <= _BINS * _BIN:
            self._reached[tokens // _BIN - 1] += 1
            self._learn()

    def ended(self, tokens: int, most_tokens: int) -> None:
        """Note that an answer has ended after `tokens` of at most `most_tokens` tokens."""
        fade = 1 - 1 / _REMEMBERED
        self._reached *= fade
        self._ended *= fade
        at = tokens // _BIN
        if tokens < most_tokens and at < _BINS:
            self._reached[at] += 1
            self._ended[at] += 1
        self._learn()

    def _learn(self) -> None:
        known = self._ended.sum()
        ended = self._ended + _PRIOR_ANSWERS * known / (known + _FEW) / np.arange(2, _BINS + 2)
        self._lives[1:] = np.cumprod(1 - ended / (self._reached + _PRIOR_ANSWERS))

    def mean(self, most_tokens: int) -> float:
        """The mean length of an answer that may have `most_tokens` tokens."""
        known = np.interp(np.arange(0, most_tokens, _BIN), np.arange(_BINS + 1) * _BIN, self._lives)
        return min(float(most_tokens), _BIN * float(known.sum()))

    def most_blocks(
        self, tokens: Sequence[int], lefts: Sequence[int], lengths: Sequence[int], block_size: int
    ) -> float:
        """The peak number of blocks that these answers will hold together, with high probability. For each answer:
        `tokens` so far, the most tokens that it may still get (`lefts`), and its tokens with the prompt (`lengths`).
        Each step gives each answer a token.
        """
        picked, left, length = (np.array(one, np.float64)[:, None] for one in (tokens, lefts, lengths))
        lives = np.interp(picked + _AHEAD[:-1], np.arange(_BINS + 1) * _BIN, self._lives)
        lives = np.where(left > _AHEAD[:-1], lives / np.interp(picked, np.arange(_BINS + 1) * _BIN, self._lives), 0.0)
        blocks = np.ceil((length + np.minimum(_AHEAD[1:], left)) / block_size)  # at the end of each time ahead
        mean = (lives * blocks).sum(axis=0)
        spread = np.sqrt((lives * (1 - lives) * blocks**2).sum(axis=0))
        return float((mean + _SURE * spread).max())
