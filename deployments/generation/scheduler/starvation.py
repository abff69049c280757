"""Keeps short prompts from starving long ones. Pure.

Where more is asked for than there is, a short prompt fits into the little room that becomes free, and a long one does
not. So while a device has lately admitted less than `_AIM` times as large a share of long prompts as of all, it keeps
room for a long one: it admits a shorter prompt only if a long one would have its first token in time beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SHARE = 0.5  # of all prompts' admitted share: so much at least of the long ones, where they come one by one
_AIM = 0.72  # below it room is kept: it takes a while to tell
_LONG = 2.0  # of the mean length: more is long
_LEAST_ROOM, _MOST_ROOM = 0.5, 1.0  # of the mean length of long ones: the prompt that room is kept for
_MORE_ROOM = 0.02  # with each long one that is refused while they starve; less with each while they do not
_MEMORY_S = 10.0  # how long a prompt is remembered
_FADE_EVERY = 0.01  # of the memory: oftener would only cost
_FEW = 3.0  # long ones that must be remembered before they have a say
_AVERAGED = 0.02  # of the way to the latest one: the mean length


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
        """Of the prompt that room is kept for; 0: none is."""
        return round(self._room * self._mean_long) if self._starve else 0

    @property
    def _starve(self) -> bool:
        return self._long.offered >= _FEW and self._long.share < _AIM * self._all.share

    def is_long(self, tokens: int) -> bool:
        """A prompt of so many tokens."""
        return tokens > _LONG * self._mean

    def offered(self, now: float, tokens: int, *, admitted: bool) -> None:
        """A prompt was admitted, or refused for want of room."""
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
