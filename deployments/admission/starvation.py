"""Keeps short requests from starving long ones. Pure.

Under overload, a short request fits into the little room that becomes free, and a long one does not. So the device
compares two ratios: the admitted share of long requests, and that of all. While the first is less than `_AIM` times the
second, the device keeps room for a long request: it admits a shorter one only if a long one would have room as well.
Over 20 s and more, at any load, this keeps the first ratio at `SHARE` of the second or above.

No room is kept for a request that it does not help. One larger than `_HELPED` of what an idle device admits would take
too much from the others. One whose deadline is clearly earlier than usual would be refused all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SHARE = 0.5  # the least ratio between the admitted shares of long requests and of all
_AIM = 0.72  # the ratio below which room is kept; above SHARE because it takes effect with a delay
_LONG = 2.0  # times the mean size: a request that is larger is long
_MEMORY_S = 10.0  # how long a request is remembered
_FADE_EVERY = 0.01  # of the memory: fading more often would be a waste
_FEW = 3.0  # long requests that must be remembered before room is kept
_HELPED = 0.6  # of what an idle device admits: no room is kept for a larger request
_TIGHT = 0.95  # of the usual time to a deadline: no room is kept for a request with less
_MEAN, _LONG_MEAN = 0.02, 0.1  # how far one request moves the mean size, and that of long requests, towards its own


@dataclass(slots=True)
class _Work:
    """The total size of requests that were offered, and of those of them that were admitted."""

    offered: float = 0.0
    admitted: float = 0.0

    def count(self, size: float, *, refused: bool) -> None:
        self.offered += size
        self.admitted += 0.0 if refused else size

    def fade(self, share: float) -> None:
        self.offered *= share
        self.admitted *= share


@dataclass(slots=True)
class UsualTime:
    """The mean time that requests have to their deadline."""

    mean_s: float = 0.0

    def count(self, left_s: float) -> bool:
        """Count a request with this much time. Returns whether that is clearly less than usual."""
        self.mean_s += _MEAN * (left_s - self.mean_s) if self.mean_s else left_s
        return left_s < _TIGHT * self.mean_s


@dataclass(slots=True)
class LongRequests:
    """Remembers the sizes of all requests and of long ones, in any unit: device seconds of queries, tokens of prompts.

    `mean`: of all sizes; 0: the first request sets it. `long`: of the sizes of long requests; 0: none came.
    """

    mean: float = 0.0
    long: float = 0.0
    usual: UsualTime = field(default_factory=UsualTime)
    _all: _Work = field(default_factory=_Work)
    _long: _Work = field(default_factory=_Work)
    _at: float = 0.0

    @property
    def reserve(self) -> float:
        """The size for which room is kept; 0 while long requests get their share."""
        every, long = self._all, self._long
        starve = long.admitted * every.offered < _AIM * every.admitted * long.offered
        return self.long if starve and long.offered >= _FEW * self.long else 0.0

    def is_long(self, size: float) -> bool:
        return size > _LONG * self.mean

    def offered(
        self,
        now: float,
        size: float,
        *,
        refused: bool,
        count: int = 1,
        most: float = math.inf,
        left_s: float | None = None,
    ) -> None:
        """Count `count` requests of that size, all admitted or all refused for lack of room. `most`: the largest size
        that an idle device admits. `left_s`: the time to the deadline; None: about the usual one.
        """
        is_tight, is_helped = left_s is not None and self.usual.count(left_s), size <= _HELPED * most
        self.mean = _towards(size, self.mean or size, _MEAN, count)
        is_long = self.is_long(size)
        if refused and is_long and (is_tight or not is_helped):
            return
        if now - self._at > _FADE_EVERY * _MEMORY_S:
            fade = math.exp((self._at - now) / _MEMORY_S)
            self._at = now
            self._all.fade(fade)
            self._long.fade(fade)
        self._all.count(count * size, refused=refused)
        if is_long and is_helped:
            self._long.count(count * size, refused=refused)
            self.long = _towards(size, self.long or size, _LONG_MEAN, count)


def _towards(value: float, mean: float, share: float, count: int) -> float:
    """The mean after `count` requests with that value."""
    return value + (mean - value) * (1 - share) ** count
