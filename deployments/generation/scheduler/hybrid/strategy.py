"""How a host takes part in its accelerator's steps: not at all, or by computing the attention of its rows. Pure.

`StepScheduler` and `StepAdmission` use a `HostStrategy`, and know nothing else about the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

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


class EndedStep(NamedTuple):
    """A step with that `plan` that took `seconds`. `arrived`: numbers of parked rows; for the others see
    `StepScheduler.ended`.
    """

    plan: HybridPlan | None
    seconds: float
    compute_s: ComputeSeconds
    arrived: Collection[int]
    whole: bool


Compose = Callable[[Sequence[Row]], StepComposer]
"""Begins a step: composes the accelerator's part, with room left for these host rows."""


class HostStrategy:
    """What depends on the host. Only `move` changes the `queue`: the cache in which a generation lies. This one has no
    host: the accelerator computes everything by itself.
    """

    def shares(self, queue: StepQueue, generation: Generation) -> Sequence[HostShare]:  # noqa: ARG002
        """What a forecast may assume for answers on the host, with this generation running. Promises that hold with any
        one of these are kept.
        """
        return (NO_HOST,)

    def move(self, now: float, queue: StepQueue) -> tuple[list[Copy], float]:  # noqa: ARG002
        """Move generations between the caches. Returns the copies, and the seconds that they take."""
        return [], 0.0

    def compose(self, begin: Compose, queue: StepQueue) -> ComposedStep:  # noqa: ARG002
        """Compose a step with host rows. Changes nothing."""
        return begin(()).alone()

    def ended(self, step: EndedStep) -> list[Row]:  # noqa: ARG002
        """Learn from a step. Returns the parked rows that have arrived with a token."""
        return []

    def configure(self, time: HostTime | None, *, calibrated: bool, other_model: bool) -> None:
        """Use this time of the host, if given. `other_model`: the accelerator's model has changed, too."""

    def state(self, queue: StepQueue) -> HostState | None:  # noqa: ARG002
        """The host's state, as reported to Routers."""
        return None


class HybridHost(HostStrategy):
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
        return self._cache.shares(queue.model, rows, max(1, generation.row_blocks(BLOCK)))

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

    def ended(self, step: EndedStep) -> list[Row]:
        rows = self._cache.parked.arrive(step.arrived)
        self._cache.ended(step.plan, step.seconds, step.compute_s, len(rows), whole=step.whole)
        return rows

    def configure(self, time: HostTime | None, *, calibrated: bool, other_model: bool) -> None:
        if time is not None and time != self._cache.time:
            self._cache.time, self._cache.learning = time, Learning(calibrated)
        if other_model:
            self._cache.accelerator_slowdown = 1.0

    def state(self, queue: StepQueue) -> HostState:
        return self._cache.state(sum(row.generation.on_host for row in queue.running))
