"""Planned runs: computations of a known size that a calibration has a replica time on its own device, under a lease.

A call renews the lease of its `holder`. While a lease is in force the replica admits nothing, and says so to Routers,
which use others or answer busy. What was admitted before ends first. A calibration that is killed renews nothing, so
the replica admits again by itself a few seconds later. Imports neither ray nor torch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from deployments.errors import Unavailable

W = TypeVar("W")

LEASE_S = 5.0  # between two calls of a calibration
_DRAINS_S = 10.0  # the longest wait for admitted work to end before planned runs
_TIMED_S = 5.0  # after this time no further planned run of a call begins
_SOONEST_S = 0.02  # the shortest pause that a replica under a lease reports


class Timed(NamedTuple):
    """The time of a planned run, and of the host's attention in it."""

    seconds: float
    host_s: float = 0.0


class Worker(Protocol):
    """What runs the engine for Routers (`sessions.RouterSessions`)."""

    now: Callable[[], float]

    async def drained(self) -> None: ...
    def report_to_all(self) -> None: ...


class PlannedRuns(Generic[W]):
    """A replica's planned runs. While the lease `is_on`, nothing is admitted. `time_one` runs one in the engine's
    thread, as it runs any other.
    """

    def __init__(self, loop: Worker, time_one: Callable[[W], Awaitable[Timed]]) -> None:
        self._loop, self._time_one = loop, time_one
        self._holder, self._until, self._in_call = "", -math.inf, False

    @property
    def is_on(self) -> bool:
        return self._in_call or self._until > self._loop.now()

    @property
    def left_s(self) -> float:
        """Seconds until the replica admits again, as far as is known. 0: now."""
        return max(_SOONEST_S, self._until - self._loop.now()) if self.is_on else 0.0

    async def time(
        self, works: Iterable[W | None], times: int, *, holder: str = "", lease_s: float = 0.0, warm_up: bool = True
    ) -> list[list[Timed] | None]:
        """Time each of these up to `times` times, after a warm-up of each; None for None. The lease then holds for
        `lease_s` more.

        It waits until all admitted work has ended. After `_TIMED_S` the remaining ones are left out, but at least one
        is timed. The scheduler learns nothing from them. A generating replica's cache loses its contents.

        Raises EngineFailed; and Unavailable if the device does not become free, or another calibration holds it.
        """
        if self._in_call or (self.is_on and holder != self._holder):
            raise Unavailable("another calibration is measuring this replica; try again later")
        self._in_call, self._holder = True, holder
        try:
            self._renew(_DRAINS_S + _TIMED_S)
            try:
                async with asyncio.timeout(_DRAINS_S):
                    await self._loop.drained()
            except TimeoutError:
                raise Unavailable(
                    f"this replica's admitted requests did not end within {_DRAINS_S:g} s; try again later"
                ) from None
            self._renew(_TIMED_S)
            return await self._timed(works, times, warm_up=warm_up)
        finally:
            self._in_call = False
            self._renew(lease_s)

    def _renew(self, seconds: float) -> None:
        self._until = self._loop.now() + seconds
        self._loop.report_to_all()

    async def _timed(self, works: Iterable[W | None], times: int, *, warm_up: bool) -> list[list[Timed] | None]:
        ends, found = self._loop.now() + _TIMED_S, list[list[Timed] | None]()
        for work in works:
            if work is None:
                found.append(None)
                continue
            if any(found) and self._loop.now() > ends:
                break
            if warm_up:
                await self._time_one(work)
            took = [await self._time_one(work)]
            while len(took) < times and self._loop.now() < ends:
                took.append(await self._time_one(work))
            found.append(took)
        return found
