"""Keeps short prompts from starving long ones. Pure.

Under overload, a short prompt fits into the little room that becomes free, and a long one does not. So the device
compares the admitted share of long prompts with that of all prompts. While the first is less than `_AIM` times the
second, it keeps room for a long prompt: it admits a shorter one only if a long one beside it would still have its first
token in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SHARE = 0.5  # the least ratio between the admitted shares of long prompts and of all, if long ones come one by one
_AIM = 0.72  # the ratio below which room is kept; above SHARE because it takes effect with a delay
_LONG = 2.0  # times the mean length: a prompt with more tokens is long
_LEAST_ROOM, _MOST_ROOM = 0.5, 1.0  # of the mean length of long prompts: the room that is kept
_MORE_ROOM = 0.02  # added with each long prompt while they starve, subtracted with each while they do not
_MEMORY_S = 10.0  # how long a prompt is remembered
_FADE_EVERY = 0.01  # of the memory: fading more often would be a waste
_FEW = 3.0  # long prompts that must be remembered before room is kept
_AVERAGED = 0.02  # weight of the latest prompt in the mean lengths


@dataclass(slots=True)
class _Kind:
    offered: float = 0.0
    admitted: float = 0.0

    @property
    def share(self) -> float:
        return self.admitted / self.offered if self.offered else 1.0

    def count(self, *, admitted: bool) -> None:
        self.offered += 1
        self.admitted += admitted

    def fade(self, share: float) -> None:
        self.offered *= share
        self.admitted *= share


@dataclass(slots=True)
class LongPrompts:
    """Remembers what was offered and admitted, by length."""

    _mean: float = 0.0  # tokens
    _mean_long: float = 0.0  # of the long ones
    _room: float = _LEAST_ROOM
    _all: _Kind = field(default_factory=_Kind)
    _long: _Kind = field(default_factory=_Kind)
    _at: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the prompt for which room is kept. 0: none."""
        return round(self._room * self._mean_long) if self._starve else 0

    @property
    def _starve(self) -> bool:
        return self._long.offered >= _FEW and self._long.share < _AIM * self._all.share

    def is_long(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens is long."""
        return tokens > _LONG * self._mean

    def offered(self, now: float, tokens: int, *, admitted: bool) -> None:
        """Note a prompt that was admitted, or refused for lack of room."""
        self._mean += (_AVERAGED if self._mean else 1.0) * (tokens - self._mean)
        if now - self._at > _FADE_EVERY * _MEMORY_S:
            fade = math.exp((self._at - now) / _MEMORY_S)
            self._at = now
            self._all.fade(fade)
            self._long.fade(fade)
        self._all.count(admitted=admitted)
        if self.is_long(tokens):
            self._long.count(admitted=admitted)
            more = _MORE_ROOM if self._starve else -_MORE_ROOM
            self._room = min(max(self._room + more, _LEAST_ROOM), _MOST_ROOM)
            self._mean_long += (_AVERAGED if self._mean_long else 1.0) * (tokens - self._mean_long)
