"""Keeps short queries from starving long ones. Pure.

Under overload, a short query fits into the little room that becomes free, and a long one does not. So the device
compares two ratios: the admitted share of the long queries' work, and that of all work. While the first is less than
`_AIM` times the second, the device reserves room for a long query: it admits a shorter one only if a long one would
have room as well. Over 20 s and more, at any load, this keeps the first ratio at `SHARE` of the second or above.

No room is reserved for a query that costs more than `_HELPED` of what an idle device admits: it would take too much
from the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SHARE = 0.5  # the least ratio between the admitted shares of long queries' work and of all work
_AIM = 0.72  # the ratio below which room is reserved; above SHARE because it takes effect with a delay
_LONG = 2.0  # times the mean cost: a query that costs more is long
_MEMORY_S = 10.0  # how long a query is remembered
_FADE_EVERY = 0.01  # of the memory: fading more often would be a waste
_FEW = 3.0  # long queries that must be remembered before room is reserved
_HELPED = 0.6  # of what an idle device admits: no room is reserved for a query that costs more
_MEAN, _LONG_MEAN = 0.02, 0.1  # how far one query moves a mean, and the mean cost of long queries, towards its own


@dataclass(slots=True)
class _Work:
    """Device seconds that were offered, and how many of them were admitted."""

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
    """Remembers the offered and admitted work, of all and of long queries. `mean_s`: the mean cost of a query."""

    mean_s: float
    long_s: float = 0.0  # the mean cost of long queries
    _all: _Work = field(default_factory=_Work)
    _long: _Work = field(default_factory=_Work)
    _at: float = 0.0

    @property
    def reserve_s(self) -> float:
        """Planned device seconds that admission reserves for a long query; 0 while long queries get their share. A
        shorter query is admitted only if at least this much room is free.
        """
        work, long = self._all, self._long
        starve = long.admitted_s * work.offered_s < _AIM * work.admitted_s * long.offered_s
        return self.long_s if starve and long.offered_s >= _FEW * self.long_s else 0.0

    def offered(self, now: float, cost_s: float, *, refused: bool, count: int = 1, most_s: float = math.inf) -> None:
        """Count `count` queries of that cost, all admitted or all refused for lack of room. `most_s`: the largest cost
        that an idle device admits within the SLO.
        """
        is_huge = cost_s > _HELPED * most_s
        self.mean_s = _towards(cost_s, self.mean_s, _MEAN, count)
        is_long = cost_s > _LONG * self.mean_s
        if refused and is_long and is_huge:
            return
        if now - self._at > _FADE_EVERY * _MEMORY_S:
            fade = math.exp((self._at - now) / _MEMORY_S)
            self._at = now
            self._all.fade(fade)
            self._long.fade(fade)
        self._all.count(count * cost_s, 0.0 if refused else count * cost_s)
        if is_long and not is_huge:
            self._long.count(count * cost_s, 0.0 if refused else count * cost_s)
            self.long_s = _towards(cost_s, self.long_s or cost_s, _LONG_MEAN, count)


def _towards(value: float, mean: float, share: float, count: int) -> float:
    """The mean after `count` queries with that value."""
    return value + (mean - value) * (1 - share) ** count
