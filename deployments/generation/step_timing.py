"""What planned steps take: a calibration's, run by the replica's own loop while it admits nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from deployments.errors import Unavailable
from deployments.generation.step_run import StepWork

if TYPE_CHECKING:
    from deployments.generation.step_loop import StepLoop

_DRAINS_S = 10.0  # in which what is admitted is to end before planned steps
_TIMED_S = 5.0  # after which no further planned step begins
_SOONEST_S = 0.02  # a replica that is paused says that it is for so long, at least


class Timed(NamedTuple):
    """What a planned step took, and how long the host computed attention in it."""

    seconds: float
    host_s: float


class StepTiming:
    """One replica's. `is_on`: nothing is admitted."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._opens_at: float | None = None  # while nothing is admitted: when something is again, at the latest

    @property
    def is_on(self) -> bool:
        return self._opens_at is not None

    @property
    def paused_s(self) -> float:
        """Seconds until anything is admitted, at most; 0: now."""
        return 0.0 if self._opens_at is None else max(_SOONEST_S, self._opens_at - self._loop.now())

    async def time_steps(self, works: Iterable[StepWork | None], times: int) -> list[list[Timed] | None]:
        """What each of these steps takes, up to `times` times, behind a first one that warms up; None for
        None. It begins once all that is admitted has ended; meanwhile nothing is. After some seconds the rest is left
        out, but for one step. Nothing is learned of them, and whatever lay in the cache is lost.

        Raises Unavailable where the device does not become free, or times steps already, and EngineFailed.
        """
        if self.is_on:
            raise Unavailable("another calibration is measuring this replica; try again later")
        try:
            self._pause(_DRAINS_S + _TIMED_S)
            try:
                async with asyncio.timeout(_DRAINS_S):
                    await self._loop.drained()
            except TimeoutError:
                raise Unavailable(
                    f"this replica's admitted requests did not end within {_DRAINS_S:g} s; try again later"
                ) from None
            self._pause(_TIMED_S)
            return await self._timed(works, times)
        finally:
            self._opens_at = None
            self._loop.report_soon()

    def _pause(self, seconds: float) -> None:
        self._opens_at = self._loop.now() + seconds
        self._loop.report_to_all()

    async def _timed(self, works: Iterable[StepWork | None], times: int) -> list[list[Timed] | None]:
        ends, found = self._loop.now() + _TIMED_S, list[list[Timed] | None]()
        for work in works:
            if work is None:
                found.append(None)
                continue
            if any(found) and self._loop.now() > ends:
                break
            await self._time(work)
            took = [await self._time(work)]
            while len(took) < times and self._loop.now() < ends:
                took.append(await self._time(work))
            found.append(took)
        return found

    async def _time(self, work: StepWork) -> Timed:
        for sampler in chain.from_iterable(row.samplers for row in work.samplers):
            sampler.ended = False  # whatever was in the cache when it drew before
        return await self._loop.time_step(work)
