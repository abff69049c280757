"""What one device has to do: generations whose prompt waits, answers that run, and the steps in flight. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.generation.scheduler.block_manager import BlockManager
from deployments.generation.scheduler.hybrid.host_cache import HostCache, ParkedRows
from deployments.generation.scheduler.hybrid.planner import HybridPlan
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.sequences import Generation, Row, ScheduledChunk
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepLoad, StepTime


@dataclass(slots=True, eq=False)
class CountedStep:
    """A step that counts as ended, until `StepScheduler.ended` tells what it took. `is_alone`: it is of one prompt that
    nobody else was beside. `begun`: generations whose first token comes of it.
    """

    planned_s: float
    plan: HybridPlan | None
    is_alone: bool
    begun: list[Generation] = field(default_factory=list)


@dataclass(slots=True, repr=False, eq=False)
class StepQueue:
    """`StepScheduler` changes it; `StepAdmission` and `HostStrategy` read it; admission notes where it is `crowded`.

    `model`: the time of a step; `block_count`: of the accelerator's cache. `caches`: the accelerator's and, with a
    `host`, the host's, so that `caches[generation.on_host]` is where a generation lies. `planned_s`: that the step
    takes which was composed last, by the model, without what was learned.
    """

    model: StepTime
    policy: StepPolicy
    block_count: int
    learning: Learning = field(default_factory=Learning)
    scatter: Learning = field(default_factory=Learning)  # of single steps: only its margin counts
    host: HostCache | None = None
    steps: int = 0  # since the start
    load: StepLoad = field(default_factory=StepLoad)  # of the step that was composed last
    planned_s: float = 0.0
    room: BlockManager = field(init=False)
    caches: Sequence[BlockManager] = field(init=False)
    parked: ParkedRows = field(init=False)
    waiting: list[Generation] = field(default_factory=list)  # by `Generation.order`
    running: list[Row] = field(default_factory=list)
    step: list[ScheduledChunk] = field(default_factory=list)  # that was composed last; empty once it counts as ended
    counted: CountedStep | None = None  # it runs
    began: float = 0.0  # the step that was composed last
    since: float = 0.0  # the end of the last one
    lent_until: float = 0.0  # to a step of nobody's
    stalled: Sequence[Row] = ()  # rows that wait for a block in the step that was composed last
    crowded: bool = False  # since then somebody who was offered found no room on the accelerator

    def __post_init__(self) -> None:
        self.room = BlockManager(self.block_count)
        self.caches, self.parked = (self.room,), ParkedRows()
        if self.host is not None:
            self.host.room.lengths = self.room.lengths
            self.caches, self.parked = (self.room, self.host.room), self.host.parked

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.step or self.counted)

    @property
    def ends_at(self) -> float:
        """When the step ends, as far as is known now, that was composed last."""
        return self.began + self.learning.slowdown * self.planned_s

    def until_free(self, now: float) -> float:
        """Seconds until all steps end that are composed, and one of nobody's."""
        ends_at = self.ends_at if self.step or self.counted else now
        return max(0.0, ends_at - now, self.lent_until - now)

    def lend(self, now: float, load: StepLoad) -> None:
        """A step of nobody's, with this load, comes behind those that are composed."""
        self.lent_until = now + self.until_free(now) + self.learning.slowdown * self.model.seconds(load)
