"""The generations of one device: which it admits, and what each of its steps computes.

Pure: it imports neither ray nor torch and reads no clock; the time is an argument. One `StepSchedule` belongs to one
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
                that has no room in the step, and host rows (below).
    ended       None of its rows is left. A row ends when it has all tokens that it may get, when `ended` names it, or
                when `remove` is called. Its blocks are free then.

Promises. The first token of a generation comes by `due`. The tokens of each answer come at its pace: the n-th at
`first_at + (n - 1) tpot_s` or before, however many there will be. So an answer that was quick has slack, and one that
was slow has none. A generation is admitted if

    all promises hold        with it (`forecast`), taking each answer to become as long as it may
    its blocks will be free  by what has been learned of the lengths of answers (`block_manager`)

and if beside it those would still be admitted that would starve otherwise (`reserve`): a long prompt, and tenants
that have not had their share.

Bulk generations have no pace and no deadline. They are admitted while they take at most `bulk_share` of the blocks, and
are computed behind all others, in steps that they make no longer than `bulk_share` of the longest.

With a `host` each generation is on the accelerator or on the host, with all its rows, and may move between two steps
(`host_cache`). A host row is in the steps in which it yields most (`planner`) and in those that its pace asks for.
One of a bulk generation may park in a step, and get its token in a later one; it is in no other step meanwhile.

A step lasts as long as the row with the least slack allows, at most `longest_step_s`. It holds all rows of the
accelerator, chunks of prompts for the rest of that time, and host rows beside them. A step that ends a prompt is over
by the time its first token is due.

The factor is learned from all steps. The margin of admission is learned from the time of steps in a row, that of a step
from single steps: what scatters evens out over several.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from deployments.admission.fair_share import Account
from deployments.admission.learning import Learning
from deployments.generation.scheduler.block_manager import CacheRoom
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.composer import ComposedStep, by_pace
from deployments.generation.scheduler.forecast import NO_HOST, Forecast, HostShare, Outlook, Pace, Prompt
from deployments.generation.scheduler.hybrid.host_cache import Host
from deployments.generation.scheduler.hybrid.planner import ACCELERATOR, PIPELINED, HybridPlan
from deployments.generation.scheduler.policy import StepPolicy
from deployments.generation.scheduler.reserve import KeptRoom
from deployments.generation.scheduler.sequences import PARKING, Generation, Part, Row
from deployments.generation.scheduler.state import StepState
from deployments.generation.scheduler.step import UNTIMED, ComputeSeconds, Copy
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime

_LEAST_LEARNED = 0.05  # of `ttft_s`: the least planned seconds that the factor is learned from
_IN_A_ROW = 0.1  # of `ttft_s`: so long are the steps in a row that the margin is learned from
_FIRST_PROBE, _LAST_PROBE = 1.0, 8.0  # times `ttft_s` that a device rests before it tries whether it is still slow
_AVERAGED = 0.05  # of the way to the latest one: the mean gap
_COPIES = 0.1  # of the longest step: what moves to the accelerator take at most, but where all have slack for more
_HELPED = 0.7  # of the time to its first token: who needs more of an idle device gets no help


@dataclass(slots=True, eq=False)
class _Counted:
    """A step that counts as ended, until `ended` tells what it took. `rests`: it was a prompt that nobody else was
    beside. `begun`: generations whose first token comes of it.
    """

    planned_s: float
    plan: HybridPlan | None = None
    begun: list[Generation] = field(default_factory=list)
    rests: bool = False


@dataclass(slots=True, repr=False, eq=False)
class StepSchedule:
    """`offer` admits, `next_step` composes, `ended` learns. `model`: the time of a step; `block_count`: the cache's."""

    model: StepTime
    policy: StepPolicy
    block_count: int
    learning: Learning = field(default_factory=Learning)
    scatter: Learning = field(default_factory=Learning)  # of single steps: only its margin counts
    host: Host | None = None
    steps: int = 0  # since the start
    load: StepLoad = field(default_factory=StepLoad)  # of the step that was composed last
    planned_s: float = 0.0  # that it takes by the model, without what was learned
    room: CacheRoom = field(init=False)
    _waiting: list[Generation] = field(default_factory=list)  # in the order of `_order`
    _running: list[Row] = field(default_factory=list)
    _copies: list[Copy] = field(default_factory=list)
    _step: list[Part] = field(default_factory=list)  # that was composed last; empty once it counts as ended
    _counted: _Counted | None = None  # a step that counts as ended, and runs
    _stalled: list[Row] = field(default_factory=list)  # that had to wait for a block
    _crowded: bool = False  # since the last step: somebody found no room on the accelerator
    _in_a_row: tuple[float, float, float] = (0.0, 0.0, 1.0)  # seconds that steps were to take, and took; factor before
    _began: float = 0.0
    _since: float = 0.0  # the end of the last one
    _probe_after: float = _FIRST_PROBE
    _refused_full: int = 0
    _refused_never: int = 0
    _mean_gap_s: float = 0.0  # between the ends of two generations
    _kept: KeptRoom = field(default_factory=KeptRoom)
    _last_end: float = 0.0  # of one, or when the device has begun to work since

    def __post_init__(self) -> None:
        self.room = CacheRoom(self.block_count)
        if self.host is not None:
            self.host.room.lengths = self.room.lengths

    # --- admission ----------------------------------------------------------------------------------------------------

    def offer(self, now: float, generation: Generation) -> bool:
        """Admit it, or refuse it: then it has changed nothing, and knows `opens_s`."""
        self._kept.offered(generation)
        if self.never(generation, generation.due - now):
            self._refused_never += 1
            return False
        account = self._kept.account(now, generation)
        kept = self._kept_beside(now, generation, account)
        outlook, admitted = self._look(now, generation, kept)
        if outlook is None:
            self._crowded = True
            if self.host is not None:
                generation.on_host = True
                outlook, admitted = self._look(now, generation, kept)
                generation.on_host = admitted
        if not generation.bulk:
            helped = partial(self._helped, now, generation)
            self._kept.decided(now, generation, account, self._cost_s(generation), helped, admitted=admitted)
        if outlook is None or not admitted:
            self._refused_full += 1
            generation.opens_s = self._opens_s(now, generation, outlook)
            return False
        if self._rests:
            self._last_end = now  # what comes between ends counts from here
        self._admit(generation, outlook)
        return True

    def _look(self, now: float, generation: Generation, kept: Sequence[Generation]) -> tuple[Outlook | None, bool]:
        """What admitting it would be like, None where there is no room; and whether it is admitted."""
        if not self._fits(generation, kept):
            return None, False
        outlook = self._outlook(now, generation, kept)
        return outlook, generation.bulk or outlook.kept or self._may_probe(now, generation)

    @property
    def _rests(self) -> bool:
        return not (self._waiting or self._running or self._step or self._counted)

    def _room_of(self, generation: Generation) -> CacheRoom:
        return self.host.room if self.host is not None and generation.on_host else self.room

    def never(self, generation: Generation, left_s: float) -> bool:
        """An idle device, as quick as it is known to be, would not have its first token in `left_s`, or not keep its
        pace; or its answers do not fit into the whole cache.
        """
        share = self.policy.bulk_share if generation.bulk else 1.0
        if generation.most_blocks > share * self._largest_cache or generation.answers > self.policy.step_tokens:
            return True
        slow = min(1.0, self.learning.factor)
        return not generation.bulk and not self._alone(generation, left_s, slow).kept

    @property
    def _largest_cache(self) -> int:
        """Blocks of the accelerator's, or of the host's if that is larger."""
        return self.block_count if self.host is None else max(self.block_count, self.host.block_count)

    def longest_prompt(self, left_s: float) -> int:
        """Tokens of the longest prompt whose first token comes in `left_s` on an idle device; 0: none does."""
        from_tokens, to_tokens = 0, self._largest_cache * BLOCK + 1
        while to_tokens - from_tokens > 1:
            middle = (from_tokens + to_tokens) // 2
            generation = Generation(middle, 1, left_s)
            fits = not self.never(generation, left_s)
            from_tokens, to_tokens = (middle, to_tokens) if fits else (from_tokens, middle)
        return from_tokens

    def _alone(self, generation: Generation, left_s: float, slow: float) -> Outlook:
        prompts = [_prompt(generation, left_s)]
        return Forecast(self.model, slow, 0.0, self.policy.longest_step_s, [], prompts).look()

    def _kept_beside(self, now: float, generation: Generation, account: Account | None = None) -> list[Generation]:
        waits, rests = bool(self._waiting), self._rests
        return self._kept.beside(now, generation, self.policy, account, waits=waits, rests=rests)

    def _helped(self, now: float, generation: Generation) -> bool:
        """Its prompt leaves an idle device some of the time that it has."""
        slow = self.learning.factor * (1 + self.learning.margin)
        return self._alone(generation, _HELPED * (generation.due - now), slow).kept

    def _cost_s(self, generation: Generation) -> float:
        """Planned device seconds of it, beside others."""
        prompt, model = generation.prompt_tokens, self.model
        token_s = model.beta_s / max(1, len(self._running)) + model.kv_token_s * prompt
        answers_s = generation.answers * self.room.lengths.mean(generation.most_tokens) * token_s
        return model.prompt_token_s * prompt + model.pair_s * prompt**2 / 2 + answers_s

    def _fits(self, generation: Generation, kept: Sequence[Generation]) -> bool:
        rows = len(self._running) + sum(one.answers for one in self._waiting) + generation.answers
        beside = () if generation.on_host else kept
        return rows <= self.policy.step_tokens and self._room_of(generation).fits(
            generation, beside, self.policy.bulk_share
        )

    def _may_probe(self, now: float, generation: Generation) -> bool:
        """A device that rests tries now and then whether it is still as slow, or scatters as much, as it did."""
        if not self._rests or now - self._since < self._probe_after * self.policy.ttft_s:
            return False
        self._probe_after = min(2 * self._probe_after, _LAST_PROBE)
        return self._alone(generation, generation.due - now, min(1.0, self.learning.factor)).kept

    def _outlook(self, now: float, generation: Generation, kept: Sequence[Generation]) -> Outlook:
        """With it among the others, and with those that room is `kept` for."""
        waiting = [one for one in self._waiting if not one.bulk]
        for one in (generation, *kept):
            insort(waiting, one, key=_order)
        slow = self.learning.factor * (1 + self.learning.margin)
        prompts = [_prompt(one, one.due - now) for one in waiting]
        forecast = Forecast(
            self.model,
            slow,
            self._until_free(now),
            self.policy.longest_step_s,
            self._paces(now),
            [prompt for prompt in prompts if prompt.tokens],
        )
        for share in self._host_shares(generation):
            outlook = replace(forecast, host=share).look()
            if outlook.kept:
                break
        at = waiting.index(generation) - sum(not prompt.tokens for prompt in prompts[: waiting.index(generation)])
        return Outlook(outlook.first_s[at:], outlook.kept)

    def _host_shares(self, generation: Generation) -> Sequence[HostShare]:
        """With it among those that run."""
        if self.host is None or not (generation.on_host or self.host.room.reserved):
            return [NO_HOST]
        rows = [(row.generation.on_host, row.length) for row in self._running]
        rows += [(generation.on_host, generation.prompt_tokens)] * generation.answers
        return self.host.shares(self.model, rows, max(1, generation.row_blocks))

    def _paces(self, now: float) -> list[Pace]:
        """Of the rows that run, and of those whose prompt the running step ends."""
        free_s = self._until_free(now)
        found = []
        for row in self._running:
            generation, pace_s = row.generation, row.generation.pace_s
            picked = row.picked + row.coming
            if generation.bulk or picked >= generation.most_tokens:
                continue
            assert generation.first_at is not None
            left, length = generation.most_tokens - picked, row.length + row.coming
            last_s = generation.first_at + (picked - 1) * (pace_s or 0) - now
            found.append(Pace.of(last_s, pace_s, left, length, on_host=generation.on_host))
        for generation in self._waiting:
            if not generation.bulk and _prompt_left(generation) == 0:
                found += _prompt(generation, 0.0).paces(free_s)
        return found

    def _until_free(self, now: float) -> float:
        """Seconds until all steps end that are composed."""
        return max(0.0, self.ends_at - now) if self._step or self._counted else 0.0

    def _admit(self, generation: Generation, outlook: Outlook) -> None:
        generation.rows = [Row(generation, number) for number in range(generation.answers)]
        generation.rows[0].length = generation.prompt_tokens
        generation.predicted_s = float(outlook.first_s[0])
        self._room_of(generation).admit(generation)
        insort(self._waiting, generation, key=_order)

    # --- steps --------------------------------------------------------------------------------------------------------

    def next_step(self, now: float) -> list[Part]:
        """What the next step computes, each row once at most; their tables have grown to hold it. Empty where there is
        nothing to do. `now`: when it begins, later than the true time where one runs.
        """
        if self._step:
            self._count(now)
        stalls = self.room.stalls
        copied_s = 0.0 if self.host is None else self._move(now, self.host)
        there = [row for row in self._running if row.generation.on_host and row.parked is None]
        composed = self._composed(now, there)
        self.planned_s = self.model.seconds(composed.load)
        if self.host is not None:
            planned_s = composed.add_host_rows(self.host, self.host.planner(self.model), self._waiting)
            if composed.was_short_in_vain:
                composed = self._composed(now, ())
                planned_s = composed.add_host_rows(self.host, self.host.planner(self.model), self._waiting)
            self.planned_s = planned_s and planned_s + copied_s / self.learning.factor
        self.load, self._began = composed.load, now
        for row, _, tokens, _, _ in composed.parts:
            row.coming = tokens
        self._step = composed.parts
        if self.room.stalls > stalls:
            self.room.doubt()
        return self._step

    def _composed(self, now: float, on_host: Sequence[Row]) -> ComposedStep:
        """The accelerator's part of a step that leaves room for rows `on_host`."""
        composed = ComposedStep(
            self.model, self.policy, self.learning.factor * (1 + self.scatter.margin), now, self._take
        )
        here = [row for row in self._running if not row.generation.on_host]
        composed.add_rows([row for row in here if not row.generation.bulk], on_host)
        composed.add_chunks([one for one in self._waiting if not one.bulk])
        composed.leave_room()
        composed.add_bulk_rows([row for row in here if row.generation.bulk])
        composed.add_chunks([one for one in self._waiting if one.bulk])
        return composed

    def _take(self, row: Row, tokens: int) -> bool:
        """See `CacheRoom.take`."""
        taken = self._room_of(row.generation).take(row, tokens)
        if not taken:
            self._stalled.append(row)
        return taken

    def _move(self, now: float, host: Host) -> float:
        """Move generations between the caches; the seconds that it takes."""
        before = len(self._copies)
        waited = any(not row.generation.on_host for row in self._stalled)
        self._copies += host.to_host(self._stalled, self.room, self.policy.bulk_share)
        if not (self._crowded or waited):
            longest_s = self.policy.longest_step_s
            ordered = sorted(self._running, key=by_pace)
            waits = any(not one.bulk for one in self._waiting)
            slack_s = by_pace(ordered[0])[1] - now - longest_s if ordered and not waits else 0.0
            within_s = min(longest_s, max(_COPIES * longest_s, slack_s))
            self._copies += host.to_accelerator(ordered, self.room, self.policy.bulk_share, within_s)
        self._stalled, self._crowded = [], False
        return (len(self._copies) - before) * BLOCK * host.time.copy_token_s

    @property
    def ends_at(self) -> float:
        """When the step ends, as far as is known now, that was composed last."""
        return self._began + self.learning.factor * self.planned_s

    def copies(self) -> list[Copy]:
        """Blocks that are to be copied before the step that `next_step` has composed."""
        copies, self._copies = self._copies, []
        return copies

    @property
    def mode(self) -> str:
        """Of the step that `next_step` has composed, see `planner`."""
        plan = None if self.host is None else self.host.plan
        return ACCELERATOR if plan is None else plan.mode

    @property
    def joins(self) -> bool:
        """Parked rows join the step, though it may have nothing else to do."""
        return self.host is not None and bool(self.host.parked) and self.mode != PIPELINED

    @property
    def parked(self) -> Mapping[int, Row]:
        """Rows that are parked, by their numbers."""
        return {} if self.host is None else self.host.parked

    def called_off(self) -> list[int]:
        """Numbers of rows that were parked and that nobody wants any more."""
        return [] if self.host is None else self.host.called_off()

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
        those with the numbers `arrived`, too; the `finished` ones have ended. `compute_s`: see `chunk.Computed`. A step
        that failed, not `whole`, teaches nothing.
        """
        if self._counted is None:
            self._count(now)
        counted, self._counted = self._counted, None
        assert counted is not None
        for generation in counted.begun:
            generation.first_at = now
        if whole and counted.planned_s > 0:
            self._learn(seconds, counted)
        ends = list(finished)
        if self.host is not None:
            rows = self.host.arrive(arrived)
            for row in rows:
                self._goes_on(row, 1)
            ends += [row for row in rows if row.picked >= row.generation.most_tokens]
            self.host.ended(counted.plan, seconds, compute_s, len(rows), whole=whole)
        self._began = self._since = now
        self.steps += 1
        ended = set(map(id, ends))
        self._end(now, [row for row in self._running if id(row) in ended] if ended else ())

    def _count(self, now: float) -> None:
        """The step that was composed last counts as ended."""
        assert self._counted is None, "two steps run"
        counted = self._counted = _Counted(self.planned_s, rests=not self._running and len(self._waiting) == 1)
        if self.host is not None:
            counted.plan, self.host.plan = self.host.plan, None
        for row, _, tokens, wanted, batch in self._step:
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
        self._step = []
        self._end(now, [row for row in self._running if row.picked >= row.generation.most_tokens])

    def _goes_on(self, row: Row, tokens: int, *, picked: bool = True) -> None:
        """So many tokens more of it are in the cache, and one more is `picked`."""
        row.computed += tokens
        if picked:
            row.length += 1
            self.room.goes_on(row)

    def remove(self, now: float, generation: Generation, *, cut_off: bool = False) -> None:
        """Nobody wants it any more. Its blocks are free for the next step; one that runs ends first. `cut_off`: by an
        error, which says nothing of how long answers become.
        """
        if generation in self._waiting:
            self._waiting.remove(generation)
        self._end(now, list(generation.rows), cut_off=cut_off)

    def follow(self, model: StepTime, host: HostTime | None = None, *, calibrated: bool) -> None:
        """Plan by this model, and this time of the `host`, if it is told. What was learned of another one is forgotten;
        the step that runs is planned anew, and teaches nothing if the host has a part in it. `calibrated`: the margin
        is narrower until it is learned.
        """
        if self.host is not None and host is not None and host != self.host.time:
            self.host.time, self.host.learning = host, Learning(calibrated)
        if (model, calibrated) != (self.model, self.learning.calibrated):
            self.model, self.learning, self.scatter = model, Learning(calibrated), Learning(calibrated)
            self._in_a_row, self._probe_after = (0.0, 0.0, 1.0), _FIRST_PROBE
            if self.host is not None:
                self.host.accelerator_factor = 1.0
            self.planned_s = 0.0 if self.mode == PIPELINED else model.seconds(self.load)
            if self._counted is not None:
                self._counted.planned_s = 0.0

    def clear(self) -> None:
        """Nothing waits, runs or is reserved any more, and no step runs."""
        self.room.clear()
        if self.host is not None:
            self.host.clear()
        self._stalled = []
        self._waiting, self._running, self._copies, self._step, self._counted = [], [], [], [], None

    def _begins(self, now: float, generation: Generation) -> None:
        """The first token of each answer is picked."""
        generation.first_at = now
        self._waiting.remove(generation)
        first, *others = generation.rows
        tokens = generation.prompt_tokens
        for row in others:
            full = tokens // BLOCK
            there = generation.on_host
            self._copies += (Copy(*one, there, there) for one in zip(first.table[full:], row.table[full:], strict=True))
            row.computed = tokens
        for row in generation.rows:
            row.length = tokens + 1
        self._running += generation.rows

    def _end(self, now: float, rows: Iterable[Row], *, cut_off: bool = False) -> None:
        """These rows' blocks are free."""
        for row in rows:
            generation = row.generation
            generation.rows.remove(row)
            if row in self._running:
                self._running.remove(row)
            if self.host is not None:
                self.host.call_off(row)
            self._room_of(generation).end(row, cut_off=cut_off)
            if not generation.rows:
                self._mean_gap_s += _AVERAGED * (now - self._last_end - self._mean_gap_s)
                self._last_end = now

    def _learn(self, seconds: float, step: _Counted) -> None:
        planned_s, ttft_s, factor = step.planned_s, self.policy.ttft_s, self.learning.factor
        self.scatter.factor = factor
        self.scatter.answered(factor * planned_s, seconds, factor)
        predicted_s, took_s, before = self._in_a_row if self._in_a_row[0] else (0.0, 0.0, factor)
        predicted_s, took_s = predicted_s + before * planned_s, took_s + seconds
        self._in_a_row = predicted_s, took_s, before
        probe = step.rests and self._probe_after > _FIRST_PROBE
        self.learning.worked(planned_s, seconds, least_s=_LEAST_LEARNED * ttft_s, probe=probe)
        if predicted_s >= _IN_A_ROW * ttft_s:
            self.learning.answered(predicted_s, took_s, before)
            self._in_a_row = 0.0, 0.0, factor
        if not step.rests:
            self._probe_after = _FIRST_PROBE

    # --- what Routers are told ----------------------------------------------------------------------------------------

    def _opens_s(self, now: float, generation: Generation, outlook: Outlook | None) -> float:
        """Until this one, which is refused, would be admitted: one generation ends before, or as many as hold the
        blocks that are missing, and the first token is in time.
        """
        late_s = 0.0 if outlook is None else float(outlook.first_s[0]) - (generation.due - now)
        missing = min(generation.most_blocks, generation.most_blocks - (self.block_count - self.room.reserved))
        each = max(1, self.room.reserved // max(1, len(self._running) + len(self._waiting)))
        return max(late_s, math.ceil(max(1, missing) / each) * self._mean_gap_s, self.model.beta_s)

    def state(self, now: float) -> StepState:
        """What the device is like now."""
        typical = self._kept.typical(now, self.policy)
        kept = self._kept_beside(now, typical)
        outlook = self._outlook(now, typical, kept)
        admitted = outlook.kept and self._fits(typical, kept)
        if self.host is not None and not self._fits(typical, kept):
            typical.on_host = True
            outlook = self._outlook(now, typical, kept)
            admitted = outlook.kept and self._fits(typical, kept)
        first_s = float(outlook.first_s[0])
        prompt_token_s = self.learning.factor * self.model.prompt_token_s
        opens_s = 0.0 if admitted else self._opens_s(now, typical, outlook)
        return StepState(
            opens_s, max(0.0, first_s - prompt_token_s * typical.prompt_tokens), prompt_token_s,
            max(0, self.block_count - self.room.reserved), self.block_count, len(self._running), len(self._waiting),
            self.steps, self.model.as_tuple(), self.learning.factor, self.learning.margin,
            (self._refused_full, self._refused_never),
            None if self.host is None else self.host.state(sum(row.generation.on_host for row in self._running)),
        )  # fmt: skip


def _order(generation: Generation) -> tuple[bool, float]:
    """Bulk behind all others, the earliest due first."""
    return generation.bulk, generation.due


def _prompt_left(generation: Generation) -> int:
    """Tokens of its prompt that no step has computed or computes."""
    row = generation.rows[0] if generation.rows else None
    return generation.prompt_tokens - (row.computed + row.coming if row else 0)


def _prompt(generation: Generation, due_s: float) -> Prompt:
    tokens, whole = _prompt_left(generation), generation.prompt_tokens
    done = whole - tokens
    return Prompt(
        due_s,
        tokens,
        tokens * (done + tokens / 2),
        whole,
        generation.answers,
        generation.most_tokens,
        generation.pace_s,
        generation.on_host,
    )
