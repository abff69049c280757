"""How a host takes part in the steps of its accelerator: not at all, or with the attention of its rows. Pure.

`StepScheduler` and `StepAdmission` ask a `HostStrategy` and know no more of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.composer import ComposedStep, StepComposer, by_pace
from deployments.generation.scheduler.forecast import NO_HOST, HostShare
from deployments.generation.scheduler.hybrid.host_cache import HostCache, HostState
from deployments.generation.scheduler.hybrid.planner import HybridPlan
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.sequences import Generation, Row
from deployments.generation.scheduler.step import ComputeSeconds, Copy
from deployments.generation.scheduler.step_queue import StepQueue
from deployments.generation.scheduler.step_time import HostTime

_COPIES = 0.1  # of the longest step: what moves to the accelerator take at most, but where all have slack for more

Compose = Callable[[Sequence[Row]], StepComposer]
"""The accelerator's part of a step that leaves room for these rows of the host."""


class HostStrategy(Protocol):
    """What differs with a host. Only `move` changes the `queue`: where its generations lie."""

    def shares(self, queue: StepQueue, generation: Generation, /) -> Sequence[HostShare]:
        """What a forecast may count on for answers on the host, with this generation among those that run. Promises
        that hold by one of these are kept.
        """

    def move(self, now: float, queue: StepQueue, /) -> tuple[list[Copy], float]:
        """Move generations between the caches. Returns the copies, and the seconds that they take."""

    def compose(self, begin: Compose, queue: StepQueue, /) -> ComposedStep:
        """The step that begins so, with host rows. Changes nothing."""

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
        """The step of that `plan` ran in `seconds`. Returns the parked rows that have `arrived` with their token."""

    def configure(self, time: HostTime | None, /, *, calibrated: bool, other_model: bool) -> None:
        """Plan by this time of the host, if it is told. `other_model`: the accelerator's model is another one, too."""

    def state(self, queue: StepQueue, /) -> HostState | None:
        """What Routers are told of the host."""


class NoHost:
    """The accelerator computes all by itself."""

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
    (`host_cache`). A host row is in the steps in which it yields most (`planner`), and in those that its pace asks for.
    One of a bulk generation may park in a step and get its token in a later one; it is in no other step meanwhile.
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
        """To the host goes who waits for a block. To the accelerator comes somebody only while nobody looks for room
        there.
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
