"""Keeps short queries from starving long ones. Pure.

Under overload a short query fits into the little room that becomes free, and a long one does not. So while a device
has lately admitted less than `_AIM` times as large a share of the long queries' work as of all work, it reserves room
for one of them: it admits a shorter query only if a long one would have room as well. Over 20 s and more, at any load,
long queries then get `SHARE` of what all get of the work that they ask for, if an idle device would admit them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SHARE = 0.5  # of all work's admitted share: so much at least of the long queries' work is admitted
_AIM = 0.72  # below it room is kept: it takes a while to tell
_LONG = 2.0  # of the mean cost: more is long
_MEMORY_S = 10.0  # how long a query is remembered
_FADE_EVERY = 0.01  # of the memory: oftener would only cost
_FEW = 3.0  # long ones that must be remembered before they have a say
_MEAN, _LONG_MEAN = 0.02, 0.1  # of the way to a query's cost: how far it moves the mean, and that of long ones


@dataclass(slots=True)
class _Work:
    """Device seconds that were offered, and those of them that were admitted."""

    offered_s: float = 0.0
    admitted_s: float = 0.0

    def count(self, offered_s: float, admitted_s: float) -> None:
        self.offered_s += offered_s
        self.admitted_s += admitted_s

    def fade(self, share: float) -> None:
        self.offered_s *= share
        self.admitted_s *= share


@dataclass(slots=True)
class LongQueries:
    """Remembers what was offered and admitted, by cost. `mean_s`: the mean cost of an offered query."""

    mean_s: float
    long_s: float = 0.0  # mean cost of the long ones
    _all: _Work = field(default_factory=_Work)
    _long: _Work = field(default_factory=_Work)
    _at: float = 0.0

    @property
    def reserve_s(self) -> float:
        """Planned device seconds that admission keeps for a long query; 0 while they get their share. A shorter query
        is admitted only if at least so much room is free.
        """
        work, long = self._all, self._long
        starve = long.admitted_s * work.offered_s < _AIM * work.admitted_s * long.offered_s
        return self.long_s if starve and long.offered_s >= _FEW * self.long_s else 0.0

    def offered(self, now: float, cost_s: float, *, refused: bool, count: int = 1) -> None:
        """So many queries of that cost were admitted, or refused for want of room."""
        long = self._long_of(cost_s, count)
        self.mean_s = _towards(cost_s, self.mean_s, _MEAN, count)
        if now - self._at > _FADE_EVERY * _MEMORY_S:
            fade = math.exp((self._at - now) / _MEMORY_S)
            self._at = now
            self._all.fade(fade)
            self._long.fade(fade)
        self._all.count(count * cost_s, 0.0 if refused else count * cost_s)
        if long:
            self._long.count(long * cost_s, 0.0 if refused else long * cost_s)
            self.long_s = _towards(cost_s, self.long_s or cost_s, _LONG_MEAN, long)

    def _long_of(self, cost_s: float, count: int) -> int:
        """How many of them are long: few, as each moves the mean towards itself."""
        long = 0
        while long < count and cost_s > _LONG * _towards(cost_s, self.mean_s, _MEAN, long + 1):
            long += 1
        return long


def _towards(cost_s: float, mean_s: float, share: float, count: int) -> float:
    """The mean after so many queries of that cost."""
    return cost_s + (mean_s - cost_s) * (1 - share) ** count
