"""How a host takes part in its accelerator's steps: not at all, or by computing the attention of its rows. Pure.

`StepScheduler` and `StepAdmission` use a `HostStrategy`, and know nothing else about the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.composer import ComposedStep, StepComposer, by_pace
from deployments.generation.scheduler.forecast import NO_HOST, HostShare
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.hybrid.planner import HybridPlan
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.queue import StepQueue
from deployments.generation.scheduler.sequences import Generation, Row
from deployments.generation.scheduler.state import HostState
from deployments.generation.scheduler.step_time import HostTime
from deployments.generation.scheduler.work import ComputeSeconds, Copy

_COPIES = 0.1  # of the longest step: the most time for moves to the accelerator, unless all rows have slack for more

Compose = Callable[[Sequence[Row]], StepComposer]
"""Begins a step: composes the accelerator's part, with room left for these host rows."""


class HostStrategy(Protocol):
    """What depends on the host. Only `move` changes the `queue`: the cache in which a generation lies."""

    def shares(self, queue: StepQueue, generation: Generation, /) -> Sequence[HostShare]:
        """What a forecast may assume for answers on the host, with this generation running. Promises that hold with any
        one of these are kept.
        """

    def move(self, now: float, queue: StepQueue, /) -> tuple[list[Copy], float]:
        """Move generations between the caches. Returns the copies, and the seconds that they take."""

    def compose(self, begin: Compose, queue: StepQueue, /) -> ComposedStep:
        """Compose a step with host rows. Changes nothing."""

    def ended(
        self,
        plan: HybridPlan | None,
        seconds: float,
        compute_s: ComputeSeconds,
        arrived: Collection[int],
        /,
        *,
        whole: bool,
    ) -> list[Row]:
        """The step with that `plan` took `seconds`. Returns the parked rows that have `arrived` with a token."""

    def configure(self, time: HostTime | None, /, *, calibrated: bool, other_model: bool) -> None:
        """Use this time of the host, if given. `other_model`: the accelerator's model has changed, too."""

    def state(self, queue: StepQueue, /) -> HostState | None:
        """The host's state, as reported to Routers."""


class NoHost:
    """The accelerator computes everything by itself."""

    def shares(self, *_: object) -> Sequence[HostShare]:
        return (NO_HOST,)

    def move(self, *_: object) -> tuple[list[Copy], float]:
        return [], 0.0

    def compose(self, begin: Compose, *_: object) -> ComposedStep:
        return begin(()).alone()

    def ended(self, *_: object, **__: object) -> list[Row]:
        return []

    def configure(self, *_: object, **__: object) -> None: ...

    def state(self, *_: object) -> None: ...


class HybridHost:
    """Each generation is on the accelerator or on the host, with all its rows, and may move between two steps
    (`host_cache`). A host row takes part in the steps in which it yields most (`planner`), and in those that its pace
    requires. A row of a bulk generation may park in one step and get its token in a later one. It takes part in no
    other step meanwhile.
    """

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache

    def shares(self, queue: StepQueue, generation: Generation) -> Sequence[HostShare]:
        if not (generation.on_host or self._cache.room.reserved):
            return (NO_HOST,)
        rows = [(row.generation.on_host, row.length) for row in queue.running]
        rows += [(generation.on_host, generation.prompt_tokens)] * generation.answers
        return self._cache.shares(queue.model, rows, max(1, generation.row_blocks))

    def move(self, now: float, queue: StepQueue) -> tuple[list[Copy], float]:
        """Move generations that wait for a block to the host. Move others to the accelerator, but only while nobody
        else needs room there.
        """
        share, longest_s = queue.policy.bulk_share, queue.policy.longest_step_s
        crowded = queue.crowded or any(not row.generation.on_host for row in queue.stalled)
        copies = self._cache.to_host(queue.stalled, queue.room, share)
        if not crowded:
            ordered = sorted(queue.running, key=by_pace)
            waits = any(not one.bulk for one in queue.waiting)
            slack_s = by_pace(ordered[0])[1] - now - longest_s if ordered and not waits else 0.0
            within_s = min(longest_s, max(_COPIES * longest_s, slack_s))
            copies += self._cache.to_accelerator(ordered, queue.room, share, within_s)
        return copies, len(copies) * BLOCK * self._cache.time.copy_token_s

    def compose(self, begin: Compose, queue: StepQueue) -> ComposedStep:
        planner = self._cache.planner(queue.model)
        composer = begin([row for row in queue.running if row.generation.on_host and row.parked is None])
        composed = composer.with_host(self._cache, planner, queue.waiting)
        return begin(()).with_host(self._cache, planner, queue.waiting) if composer.was_short_in_vain else composed

    def ended(
        self,
        plan: HybridPlan | None,
        seconds: float,
        compute_s: ComputeSeconds,
        arrived: Collection[int],
        *,
        whole: bool,
    ) -> list[Row]:
        rows = self._cache.parked.arrive(arrived)
        self._cache.ended(plan, seconds, compute_s, len(rows), whole=whole)
        return rows

    def configure(self, time: HostTime | None, *, calibrated: bool, other_model: bool) -> None:
        if time is not None and time != self._cache.time:
            self._cache.time, self._cache.learning = time, Learning(calibrated)
        if other_model:
            self._cache.accelerator_slowdown = 1.0

    def state(self, queue: StepQueue) -> HostState:
        return self._cache.state(sum(row.generation.on_host for row in queue.running))
