"""The work of one device: waiting prompts, running answers, and the steps in flight. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from deployments.generation.scheduler.block_manager import BlockManager
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.hybrid.host_cache import HostCache, ParkedRows
from deployments.generation.scheduler.hybrid.planner import HybridPlan
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.sequences import Generation, Row, ScheduledChunk
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepLoad, StepTime


@dataclass(slots=True, eq=False)
class CountedStep:
    """A running step that already counts as ended, until `StepScheduler.ended` reports its time. `is_alone`: it
    computes one prompt, with nothing else at the device. `begun`: generations whose first token it yields. `filled`:
    the blocks that its rows fill (`BlockManager.filled`).
    """

    planned_s: float
    plan: HybridPlan | None
    is_alone: bool
    begun: list[Generation] = field(default_factory=list)
    filled: list[tuple[Row, list[tuple[int, bytes]]]] = field(default_factory=list)


@dataclass(slots=True, repr=False, eq=False)
class StepQueue:
    """Only `StepScheduler` changes it. `StepAdmission` and `host_part` read it.

    `model`: the time of a step; `block_count`: blocks of the accelerator's cache, of `block_size` tokens each.
    `caches`: the accelerator's and, with a `host`, the host's, so that `caches[generation.on_host]` holds a generation.
    `planned_s`: the time of the last composed step by the model, without what was learned.
    """

    model: StepTime
    policy: StepPolicy
    block_count: int
    learning: Learning = field(default_factory=Learning)
    scatter: Learning = field(default_factory=Learning)  # learns from single steps; only its margin is used
    host: HostCache | None = None
    block_size: int = BLOCK
    steps: int = 0  # since the start
    load: StepLoad = field(default_factory=StepLoad)  # of the last composed step
    planned_s: float = 0.0
    room: BlockManager = field(init=False)
    caches: Sequence[BlockManager] = field(init=False)
    parked: ParkedRows = field(init=False)
    waiting: list[Generation] = field(default_factory=list)  # sorted by `Generation.order`
    running: list[Row] = field(default_factory=list)
    preempted: list[Row] = field(default_factory=list)  # begun rows whose tokens must be computed again (`preemption`)
    preemptions: int = 0  # since the start, how often a row has lost its blocks
    admitted: int = 0  # generations, since the start
    step: list[ScheduledChunk] = field(default_factory=list)  # the last composed step; empty once it counts as ended
    counted: CountedStep | None = None  # the running step, if it counts as ended
    began: float = 0.0  # when the last composed step begins
    since: float = 0.0  # when the last step ended
    lent_until: float = 0.0  # when a step that belongs to no generation ends
    stalled: Sequence[Row] = ()  # rows that wait for a block in the last composed step
    crowded: bool = False  # since then an offered generation has found no room on the accelerator

    def __post_init__(self) -> None:
        self.room = BlockManager(self.block_count, block_size=self.block_size)
        self.caches, self.parked = (self.room,), ParkedRows()
        if self.host is not None:
            self.host.room.lengths = self.room.lengths
            self.caches, self.parked = (self.room, self.host.room), self.host.parked

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.preempted or self.step or self.counted)

    @property
    def uncomputed(self) -> list[Row]:
        """The rows whose tokens are computed in chunks, before they get their next one: those of prompts, and preempted
        ones. Sorted by `Row.order`.
        """
        prompts = [one.rows[0] for one in self.waiting]
        return sorted([*prompts, *self.preempted], key=attrgetter("order")) if self.preempted else prompts

    @property
    def ends_at(self) -> float:
        """When the last composed step will end, as far as is known."""
        return self.began + self.learning.slowdown * self.planned_s

    def until_free(self, now: float) -> float:
        """Seconds until all composed steps have ended, and one that belongs to no generation."""
        ends_at = self.ends_at if self.step or self.counted else now
        return max(0.0, ends_at - now, self.lent_until - now)

    def lend(self, now: float, load: StepLoad) -> None:
        """Note a step with this load that belongs to no generation. It runs after the composed steps."""
        self.lent_until = now + self.until_free(now) + self.learning.slowdown * self.model.seconds(load)
