"""Times a calibration's planned steps. The replica's own loop runs them, and admits nothing meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from deployments.errors import Unavailable
from deployments.generation.step_run import StepWork

if TYPE_CHECKING:
    from deployments.generation.step_loop import StepLoop

_DRAINS_S = 10.0  # the longest wait for admitted generations to end before planned steps
_TIMED_S = 5.0  # after this time no further planned step begins
_SOONEST_S = 0.02  # the shortest pause that a paused replica reports


class Timed(NamedTuple):
    """The time of a planned step, and of the host's attention in it."""

    seconds: float
    host_s: float


class StepTiming:
    """A replica's timing of planned steps. While it `is_on`, nothing is admitted."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._opens_at: float | None = None  # when the replica admits again, at the latest; None: it admits now

    @property
    def is_on(self) -> bool:
        return self._opens_at is not None

    @property
    def paused_s(self) -> float:
        """Seconds until the replica admits again, at the latest. 0: now."""
        return 0.0 if self._opens_at is None else max(_SOONEST_S, self._opens_at - self._loop.now())

    async def time_steps(self, works: Iterable[StepWork | None], times: int) -> list[list[Timed] | None]:
        """Time each of these steps up to `times` times, after a warm-up of each; None for None.

        It waits until all admitted generations have ended, and admits nothing meanwhile. After `_TIMED_S` the remaining
        steps are left out, but at least one is timed. The scheduler learns nothing from them, and the cache's contents
        are lost.

        Raises EngineFailed; and Unavailable if the device does not become free, or is timing steps already.
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
            sampler.ended = False  # an earlier draw from meaningless tokens may have ended it
        return await self._loop.time_step(work)
