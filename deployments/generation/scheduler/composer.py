"""Composes one step: rows by their pace, prompts by their deadline, bulk behind them, and rows of the host. Pure.

A step lasts as long as the row with the least slack allows, at most `longest_step_s`. It holds all rows of the
accelerator, chunks of prompts for the rest of that time, and host rows beside them. A step that ends a prompt is over
by the time its first token is due. One that does not end it leaves time for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.hybrid.planner import HostRow, HybridPlan, HybridPlanner
from deployments.generation.scheduler.sequences import FIRST, PARKING, SECOND, Generation, Row, ScheduledChunk
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepLoad, StepTime

_LEAST_CHUNKS = 0.2  # of the rows' time: chunks have at least so much of a step, also where rows are late
_FREE = 0.01  # of a step that is too long: what may be added to it
_URGENT = 5.0  # steps of the accelerator alone: a host row that is due before takes part


class ComposedStep(NamedTuple):
    """What a step computes. `load`: of the accelerator, without host rows. `planned_s`: that the step takes, by the
    models alone; 0 where it has nothing but rows that are parked already, which nobody predicts. `plan`: of host rows;
    None without a host.
    """

    chunks: list[ScheduledChunk]
    load: StepLoad
    planned_s: float
    plan: HybridPlan | None = None


class StepComposer:
    """Composes a step by `add_all`, then `alone` or `with_host`. It changes no row and no cache. `slow`: how many times
    as long as planned the step may take; `take`: see `BlockPlan.take`.

    `was_short_in_vain`: rows of the host that the step was kept short for stand back for prompts that are due. Short
    steps make these later still, and so keep those rows out of the next one, too: it is to be composed anew.
    """

    def __init__(
        self, model: StepTime, policy: StepPolicy, slow: float, now: float, take: Callable[[Row, int], bool]
    ) -> None:
        self._model, self._policy, self._slow, self._now, self._take = model, policy, slow, now, take
        self._most_s = policy.longest_step_s / slow
        self.load = StepLoad()
        self.chunks: list[ScheduledChunk] = []
        self._room = policy.max_num_batched_tokens
        self._slacks_s: list[float] = []  # until tokens are due: of the accelerator's rows, and first ones of the step
        self._on_host: list[tuple[bool, float, int, Row]] = []  # rows by their pace (`by_pace`)
        self.was_short_in_vain = False
        self._host_slack_s = math.inf  # of these, the least; but of those that are late already

    def add_all(self, running: Sequence[Row], waiting: Sequence[Generation], on_host: Sequence[Row]) -> None:
        """What the accelerator computes of these; it leaves room for the rows `on_host`."""
        here = [row for row in running if not row.generation.on_host]
        self.add_rows([row for row in here if not row.generation.bulk], on_host)
        self.add_chunks([one for one in waiting if not one.bulk])
        self.leave_room()
        self.add_bulk_rows([row for row in here if row.generation.bulk])
        self.add_chunks([one for one in waiting if one.bulk])

    def alone(self) -> ComposedStep:
        """Without a host."""
        return ComposedStep(self.chunks, self.load, self._model.seconds(self.load))

    def add_rows(self, rows: Sequence[Row], on_host: Sequence[Row] = ()) -> None:
        """All that get the blocks for it. The one with the least slack bounds the step. So do the rows `on_host`, which
        `with_host` may add: a place is left for each with a pace, and time for the weights to be read once more.
        """
        added = [row for row in rows if self._add_row(row)]
        self._slacks_s = [(by_pace(row)[1] - self._now) / self._slow for row in added]
        self._on_host = sorted((*by_pace(row), number, row) for number, row in enumerate(on_host))
        paced = [due for is_bulk, due, _, _ in self._on_host if not is_bulk]
        in_time = (due for due in paced if due > self._now)
        self._host_slack_s = (min(in_time, default=math.inf) - self._now) / self._slow
        self._room -= len(paced)
        left_s = min([self._most_s, self._host_slack_s, *self._slacks_s]) - (self._model.beta_s if paced else 0.0)
        least_s = (1 + _LEAST_CHUNKS) * self._model.seconds(self.load)  # late or not, chunks have some
        self._most_s = max(left_s, least_s)

    def add_chunks(self, generations: Iterable[Generation]) -> None:
        """As many of their tokens as there is room for."""
        generations = list(generations)
        self._leave_time(generations)
        for generation in generations:
            row = generation.rows[0]
            left = min(generation.prompt_tokens - row.computed, self._room)
            tokens = self._model.most_tokens(self.load, row.computed, left, self._most_s)
            if not self.chunks:  # a device that is slower than its steps should be goes on all the same
                tokens = max(tokens, min(left, 1 + self._model.knee))
            elif not tokens:
                tokens = self._free_tokens(row.computed, left)
            if tokens <= 0:
                return
            if not self._take(row, row.computed + tokens):
                continue
            self.load = self.load.with_chunk(row.computed, tokens)
            self._room -= tokens
            ends = row.computed + tokens == generation.prompt_tokens
            self.chunks.append(ScheduledChunk(row, row.computed, tokens, ends))
            if ends and not generation.bulk:
                self._slacks_s.append((generation.due - self._now) / self._slow)
                self._most_s = min(self._most_s, self._slacks_s[-1])

    def _free_tokens(self, start: int, left: int) -> int:
        """So many of a prompt's tokens that the step, which is too long already, takes hardly longer with them: they
        are below the knee. In steps of their own they would each take as long.
        """
        spare = min(left, self._model.knee - int(self.load.rows + self.load.prompt_tokens))
        if spare <= 0:
            return 0
        return self._model.most_tokens(self.load, start, spare, (1 + _FREE) * self._model.seconds(self.load))

    def _leave_time(self, generations: Iterable[Generation]) -> None:
        """Prompts that do not end in this step need another one by their deadlines, of `rows_s` at least. Shorten this
        one to leave time for it; more of them end in the next one then. Those that cannot wait still end in this one.
        """
        rows_s, load, least_s = self._model.seconds(self.load), self.load, 0.0
        ends: list[tuple[float, float]] = []  # when each would end; how long this step may be for it to end in the next
        for generation in generations:
            if generation.bulk:  # it has no deadline, and neither have those behind it
                break
            row = generation.rows[0]
            load = load.with_chunk(row.computed, generation.prompt_tokens - row.computed)
            end_s, spare_s = self._model.seconds(load), (generation.due - self._now) / self._slow - rows_s
            if spare_s > rows_s:
                ends.append((end_s, spare_s))
            elif end_s <= self._most_s:
                least_s = end_s
            if end_s > self._most_s:
                break
        for end_s, spare_s in reversed(ends):
            if end_s > self._most_s:
                self._most_s = max(least_s, min(self._most_s, spare_s))

    def leave_room(self) -> None:
        """Bulk work makes a step with others no longer than its share, and no answer late, nor later."""
        if self.chunks:
            share_s = self._policy.bulk_share * self._policy.longest_step_s / self._slow
            self._most_s = min([self._most_s, share_s, self._host_slack_s, *self._slacks_s])

    def add_bulk_rows(self, rows: Sequence[Row]) -> None:
        """Those that there is room for, and one at least where the step is empty."""
        for row in rows:
            fits = not self.chunks or self._model.seconds(self.load.with_row(row.length)) <= self._most_s
            if self._room and fits:
                self._add_row(row)

    def _prompts_slack_s(self, waiting: Iterable[Generation]) -> float:
        """The most that the step may take, so that the prompts of these still end by their deadlines."""
        model, chunks = self._model, {id(row): tokens for row, _, tokens, _, _ in self.chunks}
        rows_s = model.seconds(StepLoad(self.load.rows, self.load.kv_tokens))
        share = max(_LEAST_CHUNKS, 1 - rows_s * self._slow / self._policy.longest_step_s)  # of a step, for chunks
        least_s, work_s = math.inf, 0.0
        for generation in waiting:
            row = generation.rows[0]
            done = row.computed + chunks.get(id(row), 0)
            left = generation.prompt_tokens - done
            if left and not generation.bulk:
                work_s += model.prompt_token_s * left + model.pair_s * left * (done + left / 2)
                least_s = min(least_s, (generation.due - self._now) / self._slow - rows_s - work_s / share)
        return least_s

    def with_host(self, host: HostCache, planner: HybridPlanner, waiting: Iterable[Generation]) -> ComposedStep:
        """With those rows `on_host` that the plan takes. It leaves the prompts of those `waiting` in time."""
        alone_s = self._model.seconds(self.load)
        urgent_at = self._now + _URGENT * self._slow * alone_s
        self._room += sum(not is_bulk for is_bulk, _, _, _ in self._on_host)
        there, offered = list[Row](), list[HostRow]()
        for is_bulk, due, _, row in self._on_host[: self._room]:
            if row.computed < len(row.table) * BLOCK or self._take(row, row.computed + 1):
                there.append(row)
                offered.append(HostRow(row.length, due < urgent_at, is_bulk))
        urgent = any(row.urgent for row in offered)
        slacks_s = [slack_s for slack_s in self._slacks_s if slack_s >= alone_s]  # the others are late in any case
        plan = planner.choose(
            self.load,
            offered,
            within_s=min([self._policy.longest_step_s / self._slow, self._prompts_slack_s(waiting), *slacks_s]),
            parked=len(host.parked),
            modes=host.modes(self._policy.modes, urgent=urgent),
        )
        self.was_short_in_vain = urgent and not (plan.first or plan.second or plan.parking)
        for batch, numbers in ((FIRST, plan.first), (SECOND, plan.second), (PARKING, plan.parking)):
            self.chunks += [ScheduledChunk(there[at], there[at].computed, 1, True, batch) for at in numbers]
        return ComposedStep(self.chunks, self.load, plan.seconds if self.chunks else 0.0, plan)

    def _add_row(self, row: Row) -> bool:
        if not self._take(row, row.computed + 1):
            return False
        self.load = self.load.with_row(row.length)
        self._room -= 1
        self.chunks.append(ScheduledChunk(row, row.computed, 1, True))
        return True


def by_pace(row: Row) -> tuple[bool, float]:
    """Bulk behind all others, the row whose next token is due first; with the time when it is."""
    generation = row.generation
    if generation.pace_s is None or generation.first_at is None:
        return generation.bulk, math.inf
    return False, generation.first_at + row.picked * generation.pace_s
