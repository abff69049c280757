"""Says when refused clients should return, and keeps room for those that do. Pure: the time is an argument."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_LONGEST = 30.0  # SLOs: the longest wait; no room is kept for those that are told it, who would come together
_STEPS = 8  # of a search for the time of a place; it is then right to a 256th
# The share of the devices' time that goes to the line; the rest is for newcomers, who would otherwise all be refused
# once. It is large if newcomers come in bursts, and small if they come all the time. `_AT_ONCE`: at least so much of a
# device that opens once in a run, since few newcomers come at that moment.
_BETWEEN_BURSTS, _IN_A_STREAM, _AT_ONCE = 0.9, 0.3, 0.85
_NEAR, _STEADY = 0.4, 1.0  # SLOs between refusals of a stream; over which newcomers' time is averaged
_AHEAD, _GRACE = 0.08, 0.05  # SLOs before and after a client's time in which room is kept for it
_AGAIN = 0.15  # SLOs: the least wait of a client that came in time and was refused
_ROUNDED_S = 1.0  # clients that only read whole seconds return this much later
_EARLY_S = 1e-3  # a timer may fire this much too early
_LEARN = 0.01  # how much one client moves the share that returns
_MOST = 10_000  # places in the line; later clients get a time but no room is kept for them


class Supply(NamedTuple):
    """What a replica can take: nothing before `opens_s`, then `requests_s` requests like this one per second. If
    `cycle_s` is not 0, it opens only once in that time, for as many as it answers in it. `queries_s`: how many queries
    of 75 tokens it answers in a second.
    """

    opens_s: float
    requests_s: float
    cycle_s: float = 0.0
    queries_s: float = 1.0

    def until(self, time_s: float, share: float) -> float:
        """How many requests it can take until then, of which `share` is for the line."""
        open_s = time_s - self.opens_s
        if open_s < 0:
            return 0.0
        if not self.cycle_s:
            return share * self.requests_s * open_s
        return max(share, _AT_ONCE) * self.requests_s * self.cycle_s * (open_s // self.cycle_s + 1)


def _all_until(time_s: float, supplies: Sequence[Supply], share: float) -> float:
    total = 0.0
    for one in supplies:
        total += one.until(time_s, share)
    return total


def _surely_s(opening: Sequence[Supply], ahead: float, share: float) -> float:
    """When the replicas will have taken so many requests, or before. `opening`: in the order in which they open."""
    last_s, requests_s, surely_s = 0.0, 0.0, math.inf
    for one in opening:  # without those that open later
        last_s, requests_s = max(last_s, one.opens_s + one.cycle_s), requests_s + one.requests_s
        surely_s = min(surely_s, last_s + ahead / max(1e-9, share * requests_s))
    return surely_s


@dataclass(slots=True, eq=False)
class Place:
    """A refused client's place in the line. `work`: its part of the line; `room`: what is kept for it now. Both are 0
    once it has returned or is late.
    """

    due: float
    work: float
    key: Hashable
    again: bool
    deferrable: bool
    room: float = 0.0
    returned: bool = False

    def __lt__(self, other: Place) -> bool:
        return self.due < other.due


@dataclass(slots=True)
class RetryLine:
    """A Router's virtual line of refused clients. Each is told to return when the devices can have taken all those
    before it. Room is kept for it at that time: newcomers are refused first. So a client that does what Retry-After
    says is nearly always admitted.

    A client is recognised by its key, which is made of what it sends. How many of those that were told return is
    learned (`returning`): if few do, the line is short and little room is kept.

    Work is in queries of 75 tokens, and so does not change when replicas come or go.
    """

    returning: float = 1.0
    _refused_at: float = -math.inf
    _stream: float = 0.0  # the share of the time in which newcomers are refused; between bursts nobody is
    _coming: list[Place] = field(default_factory=list)  # a heap
    _due: deque[Place] = field(default_factory=deque)  # those for whom room is kept
    _late: deque[Place] = field(default_factory=deque)  # those that are recognised, but whose room is given away
    _work: float = 0.0  # in the line
    _again_work: float = 0.0  # of those that came in time and were refused
    _room: float = 0.0  # kept for all that are due
    _queries_s: float = 1.0  # that all devices together answer
    _places: dict[Hashable, list[Place]] = field(default_factory=dict)  # each by due
    _slo_s: float = 1.0

    def __bool__(self) -> bool:
        return bool(self._places)

    def join(
        self,
        now: float,
        key: Hashable,
        supplies: Sequence[Supply],
        *,
        slo_s: float,
        routers: int = 1,
        again: bool = False,
        deferrable: bool = False,
    ) -> float:
        """Seconds until a refused client should return.

        `routers`: how many share the devices. `again`: it had come in time, but there was no room. It waits behind
        others like it, and before the rest. `deferrable`: newcomers come before it, so no room is kept.
        """
        self._slo_s = slo_s
        self._advance(now)
        share = 1.0 if again else self._share(now)
        ahead = self._again_work if again else self._work * min(1.0, self.returning * routers)
        if supplies:
            self._queries_s = sum([one.queries_s for one in supplies])
        requests_s = sum([one.requests_s for one in supplies])
        wait_s = self._wait_s(supplies, routers * ahead * requests_s / self._queries_s, share)
        if again:
            wait_s = max(wait_s, _AGAIN * slo_s)
        if requests_s and wait_s < _LONGEST * slo_s and len(self._coming) < _MOST:
            place = Place(now + wait_s, self._queries_s / requests_s, key, again, deferrable)
            heapq.heappush(self._coming, place)
            bisect.insort(self._places.setdefault(key, []), place)
            self._count(place, 1)
        return wait_s

    def _share(self, now: float) -> float:
        """The line's share of the devices' time."""
        gap_s, slo_s = now - self._refused_at, self._slo_s
        self._refused_at = now
        if gap_s > 0:
            weight = -math.expm1(-gap_s / (_STEADY * slo_s))
            self._stream += weight * (min(1.0, _NEAR * slo_s / gap_s) - self._stream)
        return _BETWEEN_BURSTS - (_BETWEEN_BURSTS - _IN_A_STREAM) * self._stream

    def _wait_s(self, supplies: Sequence[Supply], ahead: float, share: float) -> float:
        """Seconds until the devices can have taken so many requests, and open for one more."""
        opening = [one for one in supplies if one.opens_s < math.inf]
        if not opening:
            return self._slo_s
        early_s = min([one.opens_s for one in opening])
        if not ahead or _all_until(early_s, opening, share) >= ahead:
            return early_s
        late_s = _surely_s(sorted(opening), ahead, share)
        for _ in range(_STEPS):
            middle_s = (early_s + late_s) / 2
            if _all_until(middle_s, opening, share) >= ahead:
                late_s = middle_s
            else:
                early_s = middle_s
        return min(late_s, _LONGEST * self._slo_s)

    def claim(self, now: float, key: Hashable) -> bool:
        """Whether this is a client whose time has come. It then leaves the line."""
        self._advance(now)
        places = self._places.get(key)
        if places is None or places[0].due > now + _EARLY_S:
            return False
        place = places.pop(0)
        if not places:
            del self._places[key]
        place.returned = True
        self._leave(place)
        return True

    def kept_s(self, now: float) -> float:
        """The room that newcomers must leave to those whose time has come."""
        self._advance(now)
        return self._room / self._queries_s * self.returning

    def _advance(self, now: float) -> None:
        slo_s, window_s = self._slo_s, (_AHEAD + _GRACE) * self._slo_s
        while self._coming and self._coming[0].due <= now + _AHEAD * slo_s:
            place = heapq.heappop(self._coming)
            if not place.deferrable:
                place.room = min(place.work, window_s * self._queries_s)  # no more comes in that time
                self._room += place.room
            self._due.append(place)
        while self._due and self._due[0].due < now - _GRACE * slo_s:
            self._leave(self._due[0])
            self._late.append(self._due.popleft())
        while self._late and self._late[0].due < now - _GRACE * slo_s - _ROUNDED_S:
            self._forget(self._late.popleft())
        if not self._due:
            self._room = 0.0  # without what was lost by rounding
            if not self._coming:
                self._work = self._again_work = 0.0

    def _count(self, place: Place, sign: int) -> None:
        self._work += sign * place.work
        self._again_work += sign * place.work * place.again

    def _leave(self, place: Place) -> None:
        """Keep no more room for one that was due."""
        self._count(place, -1)
        self._room -= place.room
        place.work = place.room = 0.0

    def _forget(self, place: Place) -> None:
        self.returning += _LEARN * (place.returned - self.returning)
        if not place.returned:
            places = self._places[place.key]
            places.remove(place)
            if not places:
                del self._places[place.key]
