"""The scheduler of a generating device: it admits generations and composes each step.

Pure: it imports neither ray nor torch and reads no clock; the time is an argument. One `StepScheduler` belongs to one
replica, and one thread calls all its methods:

    offer, remove, state    at any time, also while a step runs
    next_step, copies       to get the next step; with a host also `mode`, `joins`, `parked`, `called_off`
    ended                   when the step has run
    configure               at any time, to set another model of its steps
    clear                   after another method has raised an error: forgets everything

`next_step` may be called once while a step runs, so that the device need not wait between the two. The running step
then counts as ended, with a token more in each of its rows, before these tokens are known. If such a token ends its
row, which only `ended` reports, the row is in one step too many, and the engine's thread leaves it out.

A *generation* is one prompt and its answers. Each answer is a *row* of the cache: a table of blocks, and how many
tokens they hold. A generation goes through these states:

    waits       Its first row computes the prompt in chunks. Prompts that are due first come first. The last chunk's
                logits yield the first token of each answer. The other rows then share the blocks that the prompt fills,
                and copy its last block if that is only partly filled.
    runs        Each of its rows gets a token in every step. Exceptions: rows that wait for a block, bulk rows without
                room in the step, host rows (`host_part`), and rows that lost their blocks and are computed again
                (`preemption`).
    ended       It has no rows left. A row ends when it has all tokens that it may get, when `ended` names it, or when
                `remove` is called. Its blocks are then free.

`admission` decides who is admitted, `composer` what a step holds, and `host_part` what the host computes of it.
`StepComposer` and `BlockPlan` only plan a step. `StepScheduler._commit` carries out the plan, so that rows, caches and
parked rows change in one place.

The slowdown is learned from all steps. The margin for admission is learned from several consecutive steps, over which
the scatter of their times averages out, and the one for composing a step from single steps. In one
scene of virtual time, with 40 ms for a token and steps that scatter by 20 %, one margin for both serves 45 % fewer
tokens in time if it is learned from single steps, and 5 % fewer, some late, if from several.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from deployments.generation.scheduler import host_part
from deployments.generation.scheduler.admission import Decision, StepAdmission
from deployments.generation.scheduler.block_manager import BlockPlan
from deployments.generation.scheduler.composer import ComposedStep, StepComposer
from deployments.generation.scheduler.hybrid.planner import HybridPlan
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.preemption import preempt
from deployments.generation.scheduler.queue import CountedStep, StepQueue
from deployments.generation.scheduler.sequences import PARKING, Generation, Row, ScheduledChunk
from deployments.generation.scheduler.state import ACCELERATOR, PIPELINED, StepState
from deployments.generation.scheduler.step_time import HostTime, StepTime
from deployments.generation.scheduler.work import UNTIMED, ComputeSeconds, Copy

_LEAST_LEARNED = 0.05  # of `ttft_s`: the least planned time from which the slowdown is learned
_IN_A_ROW = 0.1  # of `ttft_s`: the total time of the consecutive steps from which the margin is learned


@dataclass(slots=True, repr=False, eq=False)
class StepScheduler(StepQueue):
    """The scheduler: `offer` admits, `next_step` composes, `ended` learns."""

    admission: StepAdmission = field(init=False)
    _copies: list[Copy] = field(default_factory=list)
    _plan: HybridPlan | None = None  # of the last composed step, until it counts as ended
    # The current consecutive steps: predicted seconds, actual seconds, slowdown before them.
    _in_a_row: tuple[float, float, float] = (0.0, 0.0, 1.0)

    def __post_init__(self) -> None:
        StepQueue.__post_init__(self)
        self.admission = StepAdmission(self)

    def offer(self, now: float, generation: Generation) -> Decision:
        """Admit a generation, or refuse it, which changes nothing else here."""
        decision = self.admission.decide(now, generation)
        self.crowded |= decision.crowds
        if decision.admitted:
            generation.rows = [Row(generation, number) for number in range(generation.answers)]
            generation.on_host, generation.predicted_s = decision.on_host, decision.first_s
            generation.age, self.admitted = self.admitted, self.admitted + 1
            self.caches[generation.on_host].admit(generation)
            insort(self.waiting, generation, key=attrgetter("order"))
        return decision

    def state(self, now: float) -> StepState:
        """The state that is reported to Routers."""
        return self.admission.state(now)

    # --- the next step ------------------------------------------------------------------------------------------------

    def next_step(self, now: float) -> list[ScheduledChunk]:
        """Compose the next step. Returns its chunks, at most one per row, after growing the rows' tables to hold them;
        empty if there is nothing to do. `now`: when the step begins. That is in the future while another step runs.
        """
        if self.step:
            self._count(now)
        copies, copied_s = host_part.move(now, self)
        self._copies += copies
        lost = self._compose(now, copied_s)
        if not self.step and self.stalled and self.counted is None:  # all wait for blocks, and no step will free any
            lost += self._compose(now, copied_s)
        self.preempted += lost  # in a later step: the running one may still draw a token of theirs
        return self.step

    def _compose(self, now: float, copied_s: float) -> list[Row]:
        """Compose a step. Returns the rows that lost their blocks to rows that waited for one before."""
        lost = self._preempt()
        blocks = BlockPlan(self.caches)
        composed = host_part.compose(partial(self._begin, now + copied_s, blocks), self)  # rows wait for the copies
        self._commit(now, composed, blocks, copied_s)
        return lost

    def _preempt(self) -> list[Row]:
        """Free blocks for rows that wait for one. Returns the rows that have tokens and lost their blocks."""
        lost = preempt(self)
        self.preemptions += len(lost)
        begun = [row for row in lost if row.generation.first_at is not None]
        self.running = [row for row in self.running if row not in begun]
        self.preempted = [row for row in self.preempted if row not in begun]
        return begun

    def _begin(self, now: float, blocks: BlockPlan, on_host: Sequence[Row]) -> StepComposer:
        """The accelerator's part of a step, with room left for rows `on_host`."""
        slow = self.learning.slowdown * (1 + self.scatter.margin)
        copy_token_s = 0.0 if self.host is None else self.host.time.copy_token_s
        composer = StepComposer(self.model, self.policy, slow, now, blocks.take, copy_token_s=copy_token_s)
        composer.add_all(self.running, self.uncomputed, on_host)
        return composer

    def _commit(self, now: float, composed: ComposedStep, blocks: BlockPlan, copied_s: float) -> None:
        """Carry out the plan: take blocks, and mark the rows of the step."""
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
        """The block copies that must precede the step that `next_step` has composed."""
        copies, self._copies = self._copies, []
        return copies

    @property
    def mode(self) -> str:
        """The mode of the step that `next_step` has composed. See `planner`."""
        return ACCELERATOR if self._plan is None else self._plan.mode

    @property
    def joins(self) -> bool:
        """Whether parked rows join the step. It may have nothing else to do."""
        return bool(self.parked) and self.mode != PIPELINED

    def called_off(self) -> list[int]:
        """Numbers of parked rows that are not wanted any more, since the last call."""
        return self.parked.called_off()

    # --- the result of a step -----------------------------------------------------------------------------------------

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
        """The earliest running step has ended after `seconds`. Each wanted row has one more token, and so have the
        parked rows with the numbers `arrived`. The `finished` rows have ended. `compute_s`: see `Computed`. If not
        `whole`, nothing is learned from the step.
        """
        if self.counted is None:
            self._count(now)
        counted, self.counted = self.counted, None
        assert counted is not None
        for generation in counted.begun:
            generation.first_at = now
        for row, filled in counted.filled:
            if row.generation.keys:
                self.room.mark_computed(filled)
        if whole and counted.planned_s > 0:
            self._learn(seconds, counted)
        rows = self.parked.arrive(arrived)
        if self.host is not None:
            self.host.ended(counted.plan, seconds, compute_s, len(rows), whole=whole)
        for row in rows:
            self._goes_on(row, 1)
        self.began = self.since = now
        self.steps += 1
        ends = {*finished, *(row for row in rows if row.left <= 0)}
        self._end(now, [row for row in (*self.running, *self.preempted) if row in ends] if ends else ())

    @staticmethod
    def left_out(rows: Iterable[Row]) -> None:
        """The earliest running step computes nothing of these rows, which have ended. Call it before `ended`: nothing
        more of their generations is found again.
        """
        for row in rows:
            row.generation.keys = ()

    def _count(self, now: float) -> None:
        """Count the last composed step as ended, although it still runs."""
        assert self.counted is None, "two steps run"
        is_alone = not (self.running or self.preempted) and len(self.waiting) == 1
        counted = self.counted = CountedStep(self.planned_s, self._plan, is_alone)
        for row, _, tokens, wanted, batch in self.step:
            if batch == PARKING:
                continue
            row.coming, start = 0, row.computed
            if row not in row.generation.rows:  # removed meanwhile
                continue
            if wanted and row in self.preempted:
                self.preempted.remove(row)
                self.running.append(row)
            if wanted and row.generation.first_at is None:
                row.computed += tokens
                self._begins(now, row.generation)
                counted.begun.append(row.generation)
            else:
                self._goes_on(row, tokens, picked=wanted)
            if not row.generation.on_host:
                counted.filled.append((row, self.room.filled(row, start)))
        self.step, self._plan = [], None
        self._end(now, [row for row in self.running if row.left <= 0])

    def _goes_on(self, row: Row, tokens: int, *, picked: bool = True) -> None:
        """Note that `tokens` more tokens of the row are in the cache and, if `picked`, that it has one more token."""
        row.computed += tokens
        if picked:
            row.length += 1
            self.room.goes_on(row)

    def _begins(self, now: float, generation: Generation) -> None:
        """Start its rows: the first token of each answer is picked."""
        generation.first_at = now
        self.waiting.remove(generation)
        first, *others = generation.rows
        tokens, there = generation.prompt_tokens, generation.on_host
        full = tokens // self.block_size
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

    # --- other ends ---------------------------------------------------------------------------------------------------

    def remove(self, now: float, generation: Generation, *, cut_off: bool = False) -> None:
        """Remove a generation that nobody wants any more. The next step may use its blocks. `cut_off`: an error ended
        it, so its length says nothing about how long answers become.
        """
        if generation in self.waiting:
            self.waiting.remove(generation)
        self._end(now, list(generation.rows), cut_off=cut_off)

    def _end(self, now: float, rows: Iterable[Row], *, cut_off: bool = False) -> None:
        """End these rows, and free their blocks."""
        for row in rows:
            generation = row.generation
            generation.rows.remove(row)
            for begun in (self.running, self.preempted):
                if row in begun:
                    begun.remove(row)
            self.parked.call_off(row)
            self.caches[generation.on_host].end(row, cut_off=cut_off)
            if not generation.rows:
                self.admission.ended(now)

    def clear(self) -> None:
        """Forget all generations, reservations and steps."""
        for cache in self.caches:
            cache.clear()
        for row in list(self.parked.values()):
            self.parked.call_off(row)
        self.waiting, self.running, self.preempted, self.stalled, self._copies = [], [], [], [], []
        self.step, self.counted, self._plan = [], None, None

    def configure(self, model: StepTime, host: HostTime | None = None, *, calibrated: bool) -> None:
        """Use this model of a step and, if given, this time of the `host`. `calibrated`: start with a narrower margin.

        What was learned with another model is forgotten. The last composed step is planned again. Nothing is learned
        from it if the host takes part, nor from a step before it that still runs.
        """
        other_model = (model, calibrated) != (self.model, self.learning.calibrated)
        if self.host is not None:
            self.host.configure(host, calibrated=calibrated, other_model=other_model)
        if other_model:
            self.model, self.learning, self.scatter = model, Learning(calibrated), Learning(calibrated)
            self._in_a_row = 0.0, 0.0, 1.0
            self.admission.probe.reset()
            self.planned_s = 0.0 if self.mode == PIPELINED else model.seconds(self.load)
            if self.counted is not None:
                self.counted.planned_s = 0.0
