"""Algorithm 1 of WindVE: accelerator first, CPU for the overflow, busy when both are full.

Pure: no ray, no torch, no clock, no loop. One `QueueManager` counts what is in flight (waiting or running) on each
pool and grants permits. It never estimates depths, and it never waits. Where several Routers share the pools, it admits
by the places that this one holds, and says `SHORT` where others may hold more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


class Permit:
    """The right of one query to be in flight on `pool`. Released exactly once; a second release is a bug and raises."""

    __slots__ = ("_manager", "_queue", "bulk", "released", "trial")

    def __init__(self, manager: QueueManager, queue: _Queue, bulk: bool) -> None:
        self._manager = manager
        self._queue = queue
        self.bulk = bulk
        self.trial = False
        self.released = False

    @property
    def pool(self) -> str:
        return self._queue.name

    def release(self) -> None:
        """Give the place back. Raises RuntimeError on the second call."""
        if self.released:
            raise RuntimeError(f"a permit of the {self.pool} pool was released twice")
        self.released = True
        self._queue.in_flight -= 1
        if self.bulk:
            self._queue.bulk_in_flight -= 1
        if self.trial:
            self._queue.trial_in_flight -= 1
        if self._manager.on_release is not None:
            self._manager.on_release()


@dataclass(frozen=True, slots=True)
class Full:
    """No decision but busy: `asked` queries did not fit into the `free` places of all pools together."""

    asked: int
    free: int


@dataclass(frozen=True, slots=True)
class Short:
    """No decision yet: the places that this Router holds do not suffice, and it may ask for more."""


SHORT = Short()


@dataclass(slots=True)
class _Queue:
    name: str
    depth: int = 0
    replicas: int = 0
    places: int = sys.maxsize  # that this Router holds, where it shares the pool with others
    limit: int = 0  # the smaller of capacity and places
    more: bool = False  # places that others hold may be had by asking
    exact: bool = False  # no place is used without asking
    ample: int = sys.maxsize  # with more than this in flight, places are running out
    in_flight: int = 0
    bulk_in_flight: int = 0
    trial_depth: int | None = None
    trial_in_flight: int = 0

    def update(self) -> None:
        self.limit = min(self.capacity, self.places)

    @property
    def capacity(self) -> int:
        return self.depth * self.replicas

    @property
    def free(self) -> int:
        return max(0, self.limit - self.in_flight)

    @property
    def trial_capacity(self) -> int:
        return (self.trial_depth or 0) * self.replicas

    @property
    def trial_free(self) -> int:
        return max(0, min(self.trial_capacity, self.places) - self.in_flight)

    @property
    def trial_more(self) -> bool:
        return self.exact and bool(self.trial_depth)


class QueueManager:
    """Admission over pools in order of preference.

    `pools` are the names of the pools that exist, the preferred one first; with heterogeneous computing off, or with
    one kind of device only, that is a single name. Depths and live replicas may change at any time: what is in flight
    stays counted, and nothing is admitted above `depth * replicas`.
    """

    def __init__(
        self,
        pools: Sequence[str],
        on_release: Callable[[], None] | None = None,
        on_low: Callable[[str], None] = lambda _: None,  # places of this pool are running out
    ) -> None:
        if not pools:
            raise ValueError("a queue manager needs at least one pool")
        self._queues = {name: _Queue(name) for name in pools}
        self._order = tuple(self._queues.values())
        self.on_release = on_release
        self._on_low = on_low
        self.bulk_share = 0.5

    def set_depth(self, pool: str, depth: int) -> None:
        """Most queries in flight per live replica of `pool`; 0 closes the pool."""
        if depth < 0:
            raise ValueError(f"the depth of the {pool} pool cannot be {depth}")
        self._queues[pool].depth = depth
        self._queues[pool].update()

    def set_replicas(self, pool: str, replicas: int) -> None:
        """Live replicas of `pool`; 0 closes the pool until one comes back."""
        self._queues[pool].replicas = replicas
        self._queues[pool].update()

    def set_places(
        self, pool: str, places: int | None, *, more: bool = False, exact: bool = False, ample: int = sys.maxsize
    ) -> None:
        """How many places of `pool` this Router holds, where it shares it with others (None: all there are).

        `more`: others hold places that may be had; `exact`: no place may be used without asking, trial depths are in
        force; with more than `ample` in flight, `on_low` is called.
        """
        queue = self._queues[pool]
        queue.places = sys.maxsize if places is None else places
        queue.more, queue.exact, queue.ample = more, exact, ample
        queue.update()

    def has_more(self, pool: str | None = None) -> bool:
        """Asking for places of `pool`, or of any, may help."""
        return any(queue.more for queue in self._order if pool in {None, queue.name})

    def trial_has_more(self, only: str | None = None) -> bool:
        return any(queue.trial_more for queue in self._order if only in {None, queue.name})

    def room(self, pool: str, *, trial: bool = False, claimed: int = 0) -> int:
        """Places that are free without asking. `claimed` ones come on top of those that this Router may use freely,
        and never lift what is in flight above the depth.
        """
        queue = self._queues[pool]
        free, capacity = (queue.trial_free, queue.trial_capacity) if trial else (queue.free, queue.capacity)
        return min(free + claimed, max(0, capacity - queue.in_flight))

    def take(self, queries: int, rooms: Mapping[str, int], *, trial: bool = False) -> list[Permit]:
        """Permits for `queries`, in at most so many places of each pool: those that are free, or were asked for."""
        permits = self._take(queries, ((self._queues[pool], room) for pool, room in rooms.items()), bulk=False)
        return self._mark_trial(permits) if trial else permits

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(self._queues)

    @property
    def capacity(self) -> int:
        """All depths together, over live replicas: the largest request that is not bulk."""
        return sum(queue.capacity for queue in self._order)

    @property
    def free(self) -> int:
        """Places free in all pools together."""
        return sum(queue.free for queue in self._order)

    def capacity_of(self, pool: str) -> int:
        return self._queues[pool].capacity

    def in_flight(self, pool: str) -> int:
        return self._queues[pool].in_flight

    def admit(self, queries: int = 1) -> list[Permit] | Full | Short:
        """One decision for one request of `queries` >= 1 queries: a permit for each, or `Full` and none.

        The accelerator's free places go first, the CPU's take the rest (Algorithm 1, lines 3-14). `SHORT` where more of
        the accelerator's may be had, or more of any are needed.
        """
        if queries == 1:  # the common case, without a list comprehension
            for queue in self._order:
                if queue.in_flight < queue.limit:
                    queue.in_flight += 1
                    if queue.in_flight > queue.ample:
                        self._on_low(queue.name)
                    return [Permit(self, queue, bulk=False)]
                if queue.more:
                    return SHORT
            return Full(1, 0)
        free = 0
        for queue in self._order:
            free += queue.free
            if queries <= free:
                return self._take(queries, ((queue, queue.free) for queue in self._order), bulk=False)
            if queue.more:
                return SHORT
        return Full(queries, free)

    def set_trial(self, depths: Mapping[str, int] | None) -> None:
        """From now on `admit_trial` admits by these `depths` (a pool that is not named is closed). None: by none."""
        for queue in self._order:
            queue.trial_depth = None if depths is None else depths.get(queue.name, 0)

    def admit_trial(self, queries: int = 1, only: str | None = None) -> list[Permit] | Full | Short:
        """As `admit`, by the depths of `set_trial`, in all pools or in one `only`. What is in flight counts for both: a
        trial takes room from the other queries, and never lets one of them in above the depths in force.
        """
        if self.trial_has_more(only):
            return SHORT
        free = self.trial_free(only)
        if queries > free:
            return Full(queries, free)
        rooms = [(queue, queue.trial_free) for queue in self._order if only in {None, queue.name}]
        return self._mark_trial(self._take(queries, rooms, bulk=False))

    def _mark_trial(self, permits: list[Permit]) -> list[Permit]:
        for permit in permits:
            permit.trial = True
            self._queues[permit.pool].trial_in_flight += 1
        return permits

    def trial_free(self, only: str | None = None) -> int:
        """Places free in all pools together, or in one `only`, by the depths of `set_trial`."""
        return sum(queue.trial_free for queue in self._order if only in {None, queue.name})

    def is_full(self, pool: str) -> bool:
        """Nothing more can be admitted to `pool`: what is there may start, since nobody can join it."""
        queue = self._queues[pool]
        if queue.more:
            return False
        depth = queue.depth
        if queue.trial_depth:  # others that are in flight too may be joined up to the depth in force
            only_trial = queue.in_flight == queue.trial_in_flight
            depth = queue.trial_depth if only_trial else max(depth, queue.trial_depth)
        return queue.in_flight >= min(depth * queue.replicas, queue.places)

    def admit_bulk(self, queries: int) -> list[Permit]:
        """Permits for as many of `queries` bulk queries as may enter now, possibly none.

        Bulk may fill at most `bulk_share` of what this Router holds of each pool (of all pools together at least one
        place), so that a single query beside it still finds room.
        """
        rooms = [(queue, min(queue.free, self._bulk_limit(queue) - queue.bulk_in_flight)) for queue in self._order]
        return self._take(queries, rooms, bulk=True)

    def _bulk_limit(self, queue: _Queue) -> int:
        limit = int(queue.limit * self.bulk_share)
        if limit == 0 and queue is self._first_open() and all(int(q.limit * self.bulk_share) == 0 for q in self._order):
            return 1
        return limit

    def _first_open(self) -> _Queue | None:
        return next((queue for queue in self._order if queue.limit > 0), None)

    def _take(self, queries: int, rooms: Iterable[tuple[_Queue, int]], *, bulk: bool) -> list[Permit]:
        permits: list[Permit] = []
        for queue, room in rooms:
            count = min(room, queries - len(permits))
            if count <= 0:
                continue
            queue.in_flight += count
            if bulk:
                queue.bulk_in_flight += count
            permits.extend(Permit(self, queue, bulk) for _ in range(count))
        return permits
