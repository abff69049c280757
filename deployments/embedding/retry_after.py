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
_STEPS = 8  # of the search for a client's time: it finds it to a 256th of the range that it searches
# The line's share of the devices' time; newcomers get the rest. A larger share shortens the line, but more newcomers
# are refused. It is `_BETWEEN_BURSTS` if newcomers come in bursts, and falls to `_IN_A_STREAM` if they come all the
# time. A device that opens once in a run gives at least `_AT_ONCE`, since few newcomers come at that moment.
_BETWEEN_BURSTS, _IN_A_STREAM, _AT_ONCE = 0.9, 0.3, 0.85
# Newcomers come in a stream if they are refused at most `_NEAR` SLOs apart, on average over `_STEADY` SLOs.
_NEAR, _STEADY = 0.4, 1.0
# If one request in `_SPARES` or more finds room to spare, all the time is for the line, which was longer than it has to
# be. `_SEEN`: how much one request moves that share.
_SPARES, _SEEN = 2.0, 0.03
# Room is kept so many SLOs before and after a client's time: longer, and newcomers are refused for clients that are not
# there yet or never come; shorter, and newcomers take the room of clients that are a little late.
_AHEAD, _GRACE = 0.05, 0.05
_AGAIN = 0.15  # SLOs: the least wait of a client that came in time and was refused; shorter, and it asks more often
_ROUNDED_S = 1.0  # recognized so long after its time: clients that read only whole seconds return up to this much late
_EARLY_S = 1e-3  # recognized so long before its time: a timer may fire this much too early
_LEARN = 0.01  # how much one client moves the share that returns: larger follows changes sooner, but fluctuates more
_MOST = 10_000  # places in the line; once it is full, refused clients get a time but are not recognized


class Supply(NamedTuple):
    """What a replica can take: nothing before `opens_s`, then `requests_per_s` requests like this one per second. If
    `cycle_s` is not 0, it opens once in each cycle, for as many as it answers in a cycle. `queries_per_s`: how many
    queries of 75 tokens it answers. Times count from now.
    """

    opens_s: float
    requests_per_s: float
    cycle_s: float = 0.0
    queries_per_s: float = 1.0

    def until(self, time_s: float, share: float) -> float:
        """How many of the line's requests it can take until then, if the line gets this share."""
        open_s = time_s - self.opens_s
        if open_s < 0:
            return 0.0
        if not self.cycle_s:
            return share * self.requests_per_s * open_s
        return max(share, _AT_ONCE) * self.requests_per_s * self.cycle_s * (open_s // self.cycle_s + 1)


def _all_until(time_s: float, supplies: Sequence[Supply], share: float) -> float:
    return sum([one.until(time_s, share) for one in supplies])


def _surely_s(opening: Sequence[Supply], ahead: float, share: float) -> float:
    """When the replicas will have taken so many requests, or before: exactly then if none opens once in a cycle.
    `opening`: in the order in which they open.
    """
    surely_s, requests_per_s, requests = math.inf, 0.0, ahead / share
    for one in opening:  # without those that open later
        requests_per_s += one.requests_per_s
        requests += one.requests_per_s * one.opens_s
        surely_s = min(surely_s, requests / max(1e-9, requests_per_s))
    return surely_s


@dataclass(slots=True, eq=False)
class Place:
    """A refused client's place in the line.

    - `due`: when it should return.
    - `work`: its part of the line; `room`: what is kept for it now. Both are 0 once it has returned or is late.
    - `again`: it had returned in time before, and was refused again.
    - `deferrable`: newcomers come before it, so no room is kept.
    - `returned`: it has returned, and was recognized.
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
    before it. Newcomers leave room for it at that time. So a client that does what Retry-After says is usually
    admitted.

    A client is recognized by its key, which is made of what it sends (`Request.key`). Its place in the line is, in this
    order:

    | place | when | recognized | room is kept |
    |---|---|---|---|
    | coming | until `_AHEAD` before its time | no | no |
    | due | until `_GRACE` after its time | from its time on | yes, until it returns |
    | late | for `_ROUNDED_S` more | yes | no |
    | forgotten | then | no | no |

    `returning` is the share of refused clients that return and are recognized. The line learns it when it forgets a
    place. If few return, the line is short and little room is kept.

    Work is in queries of 75 tokens, and so does not change when replicas come or go.
    """

    slo_s: float = 1.0  # set before each `join`
    returning: float = 1.0
    _refused_at: float = -math.inf
    _spare: float = 0.0  # the share of requests that found room to spare
    _stream: float = 0.0  # the share of the time in which newcomers are refused; between bursts nobody is
    _coming: list[Place] = field(default_factory=list)  # a heap
    _due: deque[Place] = field(default_factory=deque)
    _late: deque[Place] = field(default_factory=deque)
    _work: float = 0.0  # of those coming or due that have not returned
    _again_work: float = 0.0  # the part of it of those that were refused again
    _room: float = 0.0  # kept for all that are due
    _queries_per_s: float = 1.0  # that all devices together answer
    _places: dict[Hashable, list[Place]] = field(default_factory=dict)  # by key: those that have not returned, by due

    def __bool__(self) -> bool:
        """Whether a client may return that would be recognized."""
        return bool(self._places)

    def join(
        self,
        now: float,
        key: Hashable,
        supplies: Sequence[Supply],
        *,
        routers: int = 1,
        again: bool = False,
        deferrable: bool = False,
    ) -> float:
        """Seconds until a refused client should return. It gets a place in the line.

        `routers`: how many share the devices. Each has a line like this one, and sees only its part of the clients that
        return. `again`: the client came in time, and was refused again. It waits only behind others like it.
        `deferrable`: newcomers come before it, so no room is kept.
        """
        self._advance(now)
        share = 1.0 if again else self._share(now)
        ahead = self._again_work if again else self._work * min(1.0, self.returning * routers)
        if supplies:
            self._queries_per_s = sum([one.queries_per_s for one in supplies])
        requests_per_s = sum([one.requests_per_s for one in supplies])
        wait_s = self._wait_s(supplies, routers * ahead * requests_per_s / self._queries_per_s, share)
        if again:
            wait_s = max(wait_s, _AGAIN * self.slo_s)
        if requests_per_s and wait_s < _LONGEST * self.slo_s and len(self._coming) < _MOST:
            place = Place(now + wait_s, self._queries_per_s / requests_per_s, key, again, deferrable)
            heapq.heappush(self._coming, place)
            bisect.insort(self._places.setdefault(key, []), place)
            self._count(place, 1)
        return wait_s

    def _share(self, now: float) -> float:
        """The line's share of the devices' time. Learns from this refusal of a newcomer."""
        gap_s, slo_s = now - self._refused_at, self.slo_s
        self._refused_at = now
        if gap_s > 0:
            weight = -math.expm1(-gap_s / (_STEADY * slo_s))
            self._stream += weight * (min(1.0, _NEAR * slo_s / gap_s) - self._stream)
        share = _BETWEEN_BURSTS - (_BETWEEN_BURSTS - _IN_A_STREAM) * self._stream
        return max(share, min(1.0, _SPARES * self._spare))

    def _wait_s(self, supplies: Sequence[Supply], ahead: float, share: float) -> float:
        """Seconds until the devices can have taken the `ahead` requests before it, and one of them is open. An SLO if
        none will open.
        """
        opening = sorted([one for one in supplies if one.opens_s < math.inf])
        if not opening:
            return self.slo_s
        early_s, late_s = opening[0].opens_s, _surely_s(opening, ahead, share)
        if any(one.cycle_s for one in opening):
            if _all_until(early_s, opening, share) >= ahead:
                return early_s
            for _ in range(_STEPS):
                middle_s = (early_s + late_s) / 2
                if _all_until(middle_s, opening, share) >= ahead:
                    late_s = middle_s
                else:
                    early_s = middle_s
        return min(late_s, _LONGEST * self.slo_s)

    def saw(self, *, spare: bool) -> None:
        """Learn whether there was room to spare when a request came."""
        self._spare += _SEEN * (spare - self._spare)

    def claim(self, now: float, key: Hashable) -> bool:
        """Whether a client with this key is recognized: it was told to return by now. It then leaves the line."""
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
        """Device seconds that newcomers must leave free on each device, for the clients that are due."""
        self._advance(now)
        return self._room / self._queries_per_s * self.returning

    def _advance(self, now: float) -> None:
        """Move places whose time has come from coming to due, to late, and out of the line."""
        slo_s, window_s = self.slo_s, (_AHEAD + _GRACE) * self.slo_s
        while self._coming and self._coming[0].due <= now + _AHEAD * slo_s:
            place = heapq.heappop(self._coming)
            if not place.deferrable:
                place.room = min(place.work, window_s * self._queries_per_s)  # no more comes in that time
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
        """Add a place's work to the line (1), or take it away (-1)."""
        self._work += sign * place.work
        self._again_work += sign * place.work * place.again

    def _leave(self, place: Place) -> None:
        """Keep no more room for a client that has returned or is late."""
        self._count(place, -1)
        self._room -= place.room
        place.work = place.room = 0.0

    def _forget(self, place: Place) -> None:
        """Learn whether the client returned. If not, it is recognized no more."""
        self.returning += _LEARN * (place.returned - self.returning)
        if not place.returned:
            places = self._places[place.key]
            places.remove(place)
            if not places:
                del self._places[place.key]
