"""How many requests a Router takes at once: what passes its door.

Requests that wait in sockets before a busy Router are read first in, first out. When their turn comes, their time is
nearly over, and reading a request costs as much as answering it. So HAProxy asks each Router how many requests it takes
(`serving/haproxy_agent.py`), and refuses the others itself, which costs it much less. A Router takes

    in flight + room    room = min(what its replicas have room for, what it reads within `READ` of the SLO) - in hand

"In hand" are requests that need the Router now: it reads, checks or tokenizes them. All others in flight wait for a
replica, for the client's upload or in the bulk queue, and cost it nothing meanwhile. A few places more are for other
API keys than the one that sends most (`SPARE`). Without a door, one Router before an emulated device of 9,000 queries/s
answered nothing in time at 1.5 times its capacity (657ef73, two cores of an EPYC).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

READ = 0.2  # of the SLO: the longest time that a request waits to be read
SPARE = 1 / 15  # places beyond those, for each of them: HAProxy keeps them for other keys than the one with the most
_READ_S = 0.0005  # what a request costs a Router until that has been measured
_SHORT = 0.5  # of what it reads in time: with fewer in hand, the Router is not what is short, and nothing is learned
_ENOUGH = 8  # requests for one measurement
_LEARNING = 0.3  # weight of the newest measurement
_LOOK_S = 1.0  # a measurement ends then, however few requests it has
_QUIET_S = 2.0  # a proxy that has sent nothing for so long, as one that was replaced, leaves its share to others
MOST_SOURCES = 1000  # of more, those without requests are forgotten: HAProxies are replaced, and clients may lie
HOLD_S = 0.05  # half of the usual time between two checks of a HAProxy

Source = Hashable
"""Where a request came from: the protocol, and the host and process of the HAProxy that sent it."""


@dataclass(slots=True, eq=False)
class Visits:
    """Counts the requests that are in a process.

    - `in_flight`, `entered`: now, and since the start, by source.
    - `total`: all in flight.
    - `waiting`: how many of them wait for their client.
    """

    in_flight: Counter[Source] = field(default_factory=Counter)
    entered: Counter[Source] = field(default_factory=Counter)
    total: int = 0
    waiting: int = 0

    @contextmanager
    def visit(self, source: Source = None) -> Iterator[None]:
        """Count a request while the block runs."""
        if source not in self.entered and len(self.entered) >= MOST_SOURCES:
            self._forget()
        self.in_flight[source] += 1
        self.entered[source] += 1
        self.total += 1
        try:
            yield
        finally:
            self.total -= 1
            self.in_flight[source] -= 1

    def _forget(self) -> None:
        """Add up the sources that have no requests here."""
        for source in [source for source in self.entered if source is not None and not self.in_flight[source]]:
            count = self.entered.pop(source)
            self.entered[None] += count
            del self.in_flight[source]

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count a request that waits for its client while the block runs."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def hold(self, source: Source) -> None:
        """Delay a refusal. Its request counts as gone, but HAProxy still counts it, and so sends no other in its place.
        If its place were free at once, HAProxy would send every further request through it, to be refused here.
        """
        self.total -= 1
        self.in_flight[source] -= 1
        try:
            await asyncio.sleep(HOLD_S)
        finally:
            self.total += 1
            self.in_flight[source] += 1


VISITS = Visits()  # this process's


@dataclass(slots=True, eq=False)
class Door:
    """The door of one Router. Times are on any clock, in s."""

    visits: Visits
    read_s: float = _READ_S  # what a request costs this Router
    _has_learned: bool = False
    _measured: tuple[float, float, int] | None = None  # when the last measurement ended: time, CPU s, requests handled
    _sent: dict[Source, tuple[int, float]] = field(default_factory=dict)  # requests so far, and when that last rose

    def in_hand(self, placed: int) -> int:
        """Requests that need the Router now. `placed`: how many it has given to replicas, or to the bulk queue."""
        return max(0, self.visits.total - self.visits.waiting - placed)

    def measure(self, now: float, cpu_s: float, *, placed: int, slo_s: float) -> None:
        """Learn what a request costs from the CPU seconds that the Router has used since its start."""
        in_hand = self.in_hand(placed)
        handled = self.visits.entered.total() - in_hand
        then, cpu_then_s, handled_then = self._measured or (-math.inf, cpu_s, handled)
        count = handled - handled_then
        if count < _ENOUGH and now < then + _LOOK_S:
            return
        self._measured = now, cpu_s, handled
        if count > 0 and in_hand >= _SHORT * self.reads(slo_s):
            self.read_s += _LEARNING * ((cpu_s - cpu_then_s) / count - self.read_s)
            self._has_learned = True

    def describe(self, *, placed: int, room: float, slo_s: float) -> dict[str, Any]:
        """The door as `/info` and the metrics show it. Empty if no HAProxy has asked: then there is none. `read_s` is
        not there until it has been measured.
        """
        if self._measured is None:
            return {}
        free = math.floor(self.free(placed=placed, room=room, slo_s=slo_s))
        learned = {"read_s": round(self.read_s, 6)} if self._has_learned else {}
        return {"in_hand": self.in_hand(placed), "free": free, **learned}

    def reads(self, slo_s: float) -> float:
        """How many requests it reads within `READ` of the SLO."""
        return max(1.0, READ * slo_s / self.read_s)

    def takes(self, source: Source, now: float, *, placed: int, room: float, slo_s: float) -> int:
        """How many requests of that source may be at this Router at once, at least 1.

        Each proxy keeps what it has here; those that sent something lately share the rest evenly. `room`: for how many
        more requests the replicas have room, `inf` if a device is idle.
        """
        if len(self._sent) > MOST_SOURCES:  # most of them were replaced; the others are back with their next check
            self._sent.clear()
        entered = self.visits.entered[source]
        if entered != self._sent.get(source, (0, now))[0]:
            self._sent[source] = entered, now
        others = sum(at > now - _QUIET_S for one, (_, at) in self._sent.items() if one != source)
        free = self.free(placed=placed, room=room, slo_s=slo_s)
        return max(1, self.visits.in_flight[source] + math.floor(free / (1 + others)))

    def free(self, *, placed: int, room: float, slo_s: float) -> float:
        """How many more requests it takes, of all sources together."""
        in_hand, room = self.in_hand(placed), min(room, self.reads(slo_s))
        spare = math.ceil(SPARE * (self.visits.total - in_hand + room))
        return max(0.0, room + spare - in_hand)
