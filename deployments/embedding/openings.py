"""Which replicas of a pool are open, and when the others open. Pure: the time is an argument.

In a large pool a Router compares only a few replicas for each query. These must be open ones, or it would refuse while
most of the pool is idle. So each report puts its replica, in O(log n), among the open ones or into a heap sorted by
opening time. The Router takes the open ones in turn, so that Routers do not all choose the same one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

L = TypeVar("L")


@dataclass(slots=True, eq=False)
class Openings(Generic[L]):
    """The open replicas of one pool, those that were compared last at the end."""

    _open: OrderedDict[L, None] = field(default_factory=OrderedDict)
    _opens_at: dict[L, float] = field(default_factory=dict)  # replicas that were closed, by their last report
    _next: list[tuple[float, int, L]] = field(default_factory=list)  # a heap; entries unlike `_opens_at` are outdated
    _count: Iterator[int] = field(default_factory=itertools.count)  # tie-breaker: the heap cannot compare replicas

    def put(self, link: L, opens_at: float, now: float) -> None:
        """Note when a replica opens. A time in the past means that it is open."""
        self._advance(now)  # drops past entries even if nobody asks which are open
        if opens_at <= now:
            self._opens_at.pop(link, None)
            self._open.setdefault(link)
        elif self._opens_at.get(link) != opens_at:
            self._open.pop(link, None)
            self._opens_at[link] = opens_at
            if opens_at < math.inf:
                heapq.heappush(self._next, (opens_at, next(self._count), link))

    def keep(self, links: list[L]) -> None:
        """Forget all other replicas."""
        kept = set(links)
        for link in (self._open.keys() | self._opens_at.keys()) - kept:
            self._open.pop(link, None)
            self._opens_at.pop(link, None)

    def some(self, now: float, count: int, suits: Callable[[L], bool]) -> list[L]:
        """At most `count` open replicas that `suits` accepts. The next call begins with others."""
        found, seen = list[L](), list[L]()
        for link in self.open(now):
            seen.append(link)
            if suits(link):
                found.append(link)
                if len(found) == count:
                    break
        for link in seen:
            self._open.move_to_end(link)
        return found

    def open(self, now: float) -> Iterable[L]:
        """All open replicas."""
        self._advance(now)
        return self._open

    def _advance(self, now: float) -> None:
        while self._next and self._next[0][0] <= now:
            opens_at, _, link = heapq.heappop(self._next)
            if self._opens_at.get(link) == opens_at:
                self._open[link] = None
