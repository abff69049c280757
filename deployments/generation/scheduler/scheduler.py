"""The scheduler of a device that generates: it admits generations and composes each step of them.

Pure: it imports neither ray nor torch and reads no clock; the time is an argument. One `StepScheduler` belongs to one
replica, and one thread calls all its methods, in this order:

    offer, remove, state    at any time, also while a step runs
    next_step, copies       what the next one computes; with a host also `mode`, `joins`, `parked`, `called_off`
    ended                   when it has run
    follow                  at any time: another model of its steps
    clear                   where one of the others has raised: all of it is forgotten

`next_step` may be called once while a step runs, so that the device need not wait between the two. The one that runs
then counts as ended, each of its rows with a token more, before anybody knows which. A row that ends with such a token,
as only `ended` tells, is in one step too many: whoever computes it leaves it out.

A *generation* is one prompt and its answers. Each answer is a *row* of the cache: a table of blocks, and how many
tokens they hold. A generation goes through these states:

    waits       Its prompt is computed in chunks by its first row, the earliest due first. The last chunk's logits give
                the first token of each answer. The other rows then share the blocks that the prompt fills, and get a
                copy of the last one where the prompt fills it in part.
    runs        Each of its rows is in every step, and gets a token of it; but for those that wait for a block, bulk
                that has no room in the step, and host rows (`hybrid/strategy`).
    ended       None of its rows is left. A row ends when it has all tokens that it may get, when `ended` names it, or
                when `remove` is called. Its blocks are free then.

`admission` says who is admitted, `composer` what a step holds, `hybrid/strategy` what the host computes of it.
`StepComposer` and `BlockPlan` only plan a step; `StepScheduler._commit` carries the plan out, so that rows, caches and
parked rows change in one place.

The slowdown is learned from all steps. The margin of admission is learned from the time of steps in a row, that of a
step from single steps: what scatters evens out over several.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from deployments.generation.scheduler.admission import StepAdmission
from deployments.generation.scheduler.block_manager import BlockPlan
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.composer import ComposedStep, StepComposer
from deployments.generation.scheduler.hybrid.planner import ACCELERATOR, PIPELINED, HybridPlan
from deployments.generation.scheduler.hybrid.strategy import HostStrategy, HybridHost, NoHost
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.sequences import PARKING, Generation, Row, ScheduledChunk
from deployments.generation.scheduler.state import StepState
from deployments.generation.scheduler.step import UNTIMED, ComputeSeconds, Copy
from deployments.generation.scheduler.step_queue import CountedStep, StepQueue
from deployments.generation.scheduler.step_time import HostTime, StepTime

_LEAST_LEARNED = 0.05  # of `ttft_s`: the least planned seconds that the slowdown is learned from
_IN_A_ROW = 0.1  # of `ttft_s`: so long are the steps in a row that the margin is learned from


@dataclass(slots=True, repr=False, eq=False)
class StepScheduler(StepQueue):
    """`offer` admits, `next_step` composes, `ended` learns."""

    admission: StepAdmission = field(init=False)
    _host_strategy: HostStrategy = field(init=False)
    _copies: list[Copy] = field(default_factory=list)
    _plan: HybridPlan | None = None  # of the step that was composed last, until it counts as ended
    # Seconds that steps were to take, and took; slowdown before.
    _in_a_row: tuple[float, float, float] = (0.0, 0.0, 1.0)

    def __post_init__(self) -> None:
        StepQueue.__post_init__(self)
        self._host_strategy = NoHost() if self.host is None else HybridHost(self.host)
        self.admission = StepAdmission(self, self._host_strategy)

    def offer(self, now: float, generation: Generation) -> bool:
        """Admit it, or refuse it: then it has changed nothing, and knows `opens_s`."""
        prediction = self.admission.decide(now, generation)
        if prediction is None:
            return False
        generation.rows = [Row(generation, number) for number in range(generation.answers)]
        generation.predicted_s = float(prediction.first_s[0])
        self.caches[generation.on_host].admit(generation)
        insort(self.waiting, generation, key=attrgetter("order"))
        return True

    def state(self, now: float) -> StepState:
        """What the device is like now."""
        return self.admission.state(now)

    # --- what the next step computes ----------------------------------------------------------------------------------

    def next_step(self, now: float) -> list[ScheduledChunk]:
        """What the next step computes, each row once at most; their tables have grown to hold it. Empty where there is
        nothing to do. `now`: when it begins, later than the true time where one runs.
        """
        if self.step:
            self._count(now)
        copies, copied_s = self._host_strategy.move(now, self)
        self._copies += copies
        blocks = BlockPlan(self.caches)
        composed = self._host_strategy.compose(partial(self._begin, now, blocks), self)
        self._commit(now, composed, blocks, copied_s)
        return self.step

    def _begin(self, now: float, blocks: BlockPlan, on_host: Sequence[Row]) -> StepComposer:
        """The accelerator's part of a step that leaves room for rows `on_host`."""
        slow = self.learning.slowdown * (1 + self.scatter.margin)
        composer = StepComposer(self.model, self.policy, slow, now, blocks.take)
        composer.add_all(self.running, self.waiting, on_host)
        return composer

    def _commit(self, now: float, composed: ComposedStep, blocks: BlockPlan, copied_s: float) -> None:
        """The step takes its blocks, and its rows are on their way."""
        blocks.commit()
        self.stalled, self.crowded = blocks.stalled, False
        self.step, self.load, self.planned_s, self._plan = composed
        if self.planned_s:
            self.planned_s += copied_s / self.learning.slowdown
        self.began = now
        for row, _, tokens, _, batch in self.step:
            row.coming = tokens
            if batch == PARKING:
                self.parked.park(row)

    def copies(self) -> list[Copy]:
        """Blocks that are to be copied before the step that `next_step` has composed."""
        copies, self._copies = self._copies, []
        return copies

    @property
    def mode(self) -> str:
        """Of the step that `next_step` has composed, see `planner`."""
        return ACCELERATOR if self._plan is None else self._plan.mode

    @property
    def joins(self) -> bool:
        """Parked rows join the step, though it may have nothing else to do."""
        return bool(self.parked) and self.mode != PIPELINED

    def called_off(self) -> list[int]:
        """Numbers of rows that were parked and that nobody wants any more."""
        return self.parked.called_off()

    # --- what has come of a step --------------------------------------------------------------------------------------

    def ended(
        self,
        now: float,
        seconds: float,
        finished: Collection[Row] = (),
        *,
        whole: bool = True,
        arrived: Collection[int] = (),
        compute_s: ComputeSeconds = UNTIMED,
    ) -> None:
        """The step that began first of those that run did so in `seconds`. Each row that was wanted has one token more,
        those with the numbers `arrived`, too; the `finished` ones have ended. `compute_s`: see `step.Computed`. A step
        that failed, not `whole`, teaches nothing.
        """
        if self.counted is None:
            self._count(now)
        counted, self.counted = self.counted, None
        assert counted is not None
        for generation in counted.begun:
            generation.first_at = now
        if whole and counted.planned_s > 0:
            self._learn(seconds, counted)
        rows = self._host_strategy.ended(counted.plan, seconds, compute_s, arrived, whole=whole)
        for row in rows:
            self._goes_on(row, 1)
        self.began = self.since = now
        self.steps += 1
        ends = {*finished, *(row for row in rows if row.left <= 0)}
        self._end(now, [row for row in self.running if row in ends] if ends else ())

    def _count(self, now: float) -> None:
        """The step that was composed last counts as ended."""
        assert self.counted is None, "two steps run"
        is_alone = not self.running and len(self.waiting) == 1
        counted = self.counted = CountedStep(self.planned_s, self._plan, is_alone)
        for row, _, tokens, wanted, batch in self.step:
            if batch == PARKING:
                continue
            row.coming = 0
            if row not in row.generation.rows:  # removed meanwhile
                continue
            if wanted and row.generation.first_at is None:
                row.computed += tokens
                self._begins(now, row.generation)
                counted.begun.append(row.generation)
            else:
                self._goes_on(row, tokens, picked=wanted)
        self.step, self._plan = [], None
        self._end(now, [row for row in self.running if row.left <= 0])

    def _goes_on(self, row: Row, tokens: int, *, picked: bool = True) -> None:
        """So many tokens more of it are in the cache, and one more is `picked`."""
        row.computed += tokens
        if picked:
            row.length += 1
            self.room.goes_on(row)

    def _begins(self, now: float, generation: Generation) -> None:
        """The first token of each answer is picked."""
        generation.first_at = now
        self.waiting.remove(generation)
        first, *others = generation.rows
        tokens, there = generation.prompt_tokens, generation.on_host
        full = tokens // BLOCK
        for row in others:
            self._copies += (Copy(*one, there, there) for one in zip(first.table[full:], row.table[full:], strict=True))
            row.computed = tokens
        for row in generation.rows:
            row.length = tokens + 1
        self.running += generation.rows

    def _learn(self, seconds: float, step: CountedStep) -> None:
        planned_s, ttft_s, slowdown = step.planned_s, self.policy.ttft_s, self.learning.slowdown
        self.scatter.slowdown = slowdown
        self.scatter.answered(slowdown * planned_s, seconds, slowdown)
        predicted_s, took_s, before = self._in_a_row if self._in_a_row[0] else (0.0, 0.0, slowdown)
        predicted_s, took_s = predicted_s + before * planned_s, took_s + seconds
        self._in_a_row = predicted_s, took_s, before
        probe = step.is_alone and self.admission.probe.has_backed_off
        self.learning.worked(planned_s, seconds, least_s=_LEAST_LEARNED * ttft_s, probe=probe)
        if predicted_s >= _IN_A_ROW * ttft_s:
            self.learning.answered(predicted_s, took_s, before)
            self._in_a_row = 0.0, 0.0, slowdown
        if not step.is_alone:
            self.admission.probe.reset()

    # --- what ends otherwise ------------------------------------------------------------------------------------------

    def remove(self, now: float, generation: Generation, *, cut_off: bool = False) -> None:
        """Nobody wants it any more. Its blocks are free for the next step; one that runs ends first. `cut_off`: by an
        error, which says nothing of how long answers become.
        """
        if generation in self.waiting:
            self.waiting.remove(generation)
        self._end(now, list(generation.rows), cut_off=cut_off)

    def _end(self, now: float, rows: Iterable[Row], *, cut_off: bool = False) -> None:
        """These rows' blocks are free."""
        for row in rows:
            generation = row.generation
            generation.rows.remove(row)
            if row in self.running:
                self.running.remove(row)
            self.parked.call_off(row)
            self.caches[generation.on_host].end(row, cut_off=cut_off)
            if not generation.rows:
                self.admission.ended(now)

    def clear(self) -> None:
        """Nothing waits, runs or is reserved any more, and no step runs."""
        for cache in self.caches:
            cache.clear()
        for row in list(self.parked.values()):
            self.parked.call_off(row)
        self.waiting, self.running, self.stalled, self._copies = [], [], [], []
        self.step, self.counted, self._plan = [], None, None

    def configure(self, model: StepTime, host: HostTime | None = None, *, calibrated: bool) -> None:
        """Plan by this model, and this time of the `host`, if it is told. What was learned of another one is forgotten;
        the step that runs is planned anew, and teaches nothing if the host has a part in it. `calibrated`: the margin
        is narrower until it is learned.
        """
        other_model = (model, calibrated) != (self.model, self.learning.calibrated)
        self._host_strategy.configure(host, calibrated=calibrated, other_model=other_model)
        if other_model:
            self.model, self.learning, self.scatter = model, Learning(calibrated), Learning(calibrated)
            self._in_a_row = 0.0, 0.0, 1.0
            self.admission.probe.reset()
            self.planned_s = 0.0 if self.mode == PIPELINED else model.seconds(self.load)
            if self.counted is not None:
                self.counted.planned_s = 0.0
