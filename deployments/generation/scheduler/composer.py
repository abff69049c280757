"""Composes a step: rows by pace, prompts by deadline, bulk behind them, and host rows. Pure.

A step may take as long as the row with the least slack allows, at most `longest_step_s`. It holds all rows of the
accelerator, chunks of prompts for the rest of that time, and host rows. A step that completes a prompt ends before the
prompt's first token is due. A step that does not complete it leaves time for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.hybrid.planner import HostRow, HybridPlan, HybridPlanner
from deployments.generation.scheduler.sequences import FIRST, PARKING, SECOND, Row, ScheduledChunk
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepLoad, StepTime

LEAST_CHUNKS = 0.2  # of the rows' time: always left for chunks, even if rows are late
_FREE = 0.01  # of a step that is too long already: how much it may still grow
# Of a step: how much host rows may lengthen it even if waiting prompts need all the time. Without it, rows for which
# 0.3 ms were missing were left out, and 0.3 % of the answers were late (A10G with a fast host, virtual time; now none).
_GROWS = 0.02
_URGENT = 5.0  # steps of the accelerator alone: a host row that is due earlier is urgent


class ComposedStep(NamedTuple):
    """A composed step. `load`: the accelerator's, without host rows. `planned_s`: its time by the models alone; 0 if it
    has only rows that are parked already, whose time is not predicted. `plan`: of the host rows; None without a host.
    """

    chunks: list[ScheduledChunk]
    load: StepLoad
    planned_s: float
    plan: HybridPlan | None = None


class StepComposer:
    """Composes a step: call `add_all`, then `alone` or `with_host`. It changes no row and no cache. `slow`: how many
    times as long as planned the step may take; `take`: see `BlockPlan.take`.

    `was_short_in_vain`: the step was kept short for host rows that then had to yield to due prompts. Short steps would
    delay these prompts further, and so keep the host rows out of the next step as well. The caller composes the step
    again without them.
    """

    def __init__(
        self,
        model: StepTime,
        policy: StepPolicy,
        slow: float,
        now: float,
        take: Callable[[Row, int], bool],
        *,
        copy_token_s: float = 0.0,
    ) -> None:
        """`copy_token_s`: see `HostTime`."""
        self._model, self._policy, self._slow, self._now, self._take = model, policy, slow, now, take
        self._copy_token_s = copy_token_s
        self._most_s = policy.longest_step_s / slow
        self.load = StepLoad()
        self.chunks: list[ScheduledChunk] = []
        self._room = policy.max_num_batched_tokens
        self._slacks_s: list[float] = []  # until tokens are due: of the accelerator's rows, and of completed prompts
        self._on_host: list[tuple[bool, float, int, Row]] = []  # host rows, sorted by `Row.order`
        self.was_short_in_vain = False
        self._host_slack_s = math.inf  # the least slack of host rows that are not late already
        self._second_s = 0.0  # by how much host rows with a pace may make the step longer

    def add_all(self, running: Sequence[Row], uncomputed: Sequence[Row], on_host: Sequence[Row]) -> None:
        """Add what the accelerator computes, and leave room for the rows `on_host`. `uncomputed`: rows to compute in
        chunks (`StepQueue.uncomputed`).
        """
        here = [row for row in running if not row.generation.on_host]
        self.add_rows([row for row in here if not row.generation.bulk], on_host)
        self.add_chunks([row for row in uncomputed if not row.generation.bulk])
        self.leave_room()
        self.add_bulk_rows([row for row in here if row.generation.bulk])
        self.add_chunks([row for row in uncomputed if row.generation.bulk])

    def alone(self) -> ComposedStep:
        """The step without a host."""
        return ComposedStep(self.chunks, self.load, self._model.seconds(self.load))

    def add_rows(self, rows: Sequence[Row], on_host: Sequence[Row] = ()) -> None:
        """Add all rows that get their blocks. The row with the least slack limits the step. So do the rows `on_host`,
        which `with_host` may add: each of them keeps a slot. For those with a pace, the step leaves time to read the
        weights a second time, and for a prompt token in the place of each.
        """
        added = [row for row in rows if self._add_row(row)]
        self._slacks_s = [(row.order[1] - self._now) / self._slow for row in added]
        self._on_host = sorted((*row.order, number, row) for number, row in enumerate(on_host))
        paced = [due for is_bulk, due, _, _ in self._on_host if not is_bulk]
        in_time = (due for due in paced if due > self._now)
        self._host_slack_s = (min(in_time, default=math.inf) - self._now) / self._slow
        self._room -= len(on_host)
        self._second_s = self._model.beta_s + self._model.prompt_token_s * len(paced) if paced else 0.0
        left_s = min(self._most_s, self._until_due_s()) - self._second_s
        least_s = (1 + LEAST_CHUNKS) * self._model.seconds(self.load)  # some time is always left for chunks
        self._most_s = max(left_s, least_s)

    def add_chunks(self, rows: Iterable[Row]) -> None:
        """Add as many of their tokens as there is room for."""
        rows = list(rows)
        self._leave_time(rows)
        for row in rows:
            left = min(row.to_compute - row.computed, self._room)
            copy_token_s = self._copy_token_s * row.generation.on_host
            within_s, scored = self._within_s(row), row.is_scored
            tokens = self._model.most_tokens(self.load, row.computed, left, within_s, copy_token_s, scored=scored)
            if not self.chunks:  # a device that is too slow for `longest_step_s` must still make progress
                tokens = max(tokens, min(left, 1 + self._model.knee))
            elif not tokens and not copy_token_s:
                tokens = self._free_tokens(row.computed, left, scored=scored)
            if tokens <= 0:
                return
            if not self._take(row, row.computed + tokens):
                continue
            self.load = self.load.with_chunk(row.computed, tokens, copy_token_s, scored=scored)
            self._room -= tokens
            ends = row.computed + tokens == row.to_compute
            self.chunks.append(ScheduledChunk(row, row.computed, tokens, ends))
            if ends and not row.generation.bulk:
                self._slacks_s.append((row.order[1] - self._now) / self._slow)
                self._most_s = min(self._most_s, self._slacks_s[-1])

    def _within_s(self, row: Row) -> float:
        """How long the step may be with a chunk of this row. Each chunk of a prompt on the host also copies the tokens
        before it. That may take the step beyond its limit for chunks, but delays nobody: steps that are too short for
        these copies would never go on with the prompt.
        """
        if not row.generation.on_host:
            return self._most_s
        copied_s = self._copy_token_s * row.computed
        return max(self._most_s, min(self._most_s + copied_s, self._until_due_s() - self._second_s))

    def _until_due_s(self) -> float:
        """How long the step may be until a row of it, or a host row, is due."""
        return min([self._host_slack_s, *self._slacks_s])

    def _free_tokens(self, start: int, left: int, *, scored: bool) -> int:
        """How many of a prompt's tokens can be added to a step that is too long already and hardly lengthen it, because
        they are below the knee. Steps of their own would take as long again.
        """
        spare = min(left, self._model.knee - int(self.load.rows + self.load.prompt_tokens))
        if spare <= 0:
            return 0
        within_s = (1 + _FREE) * self._model.seconds(self.load)
        return self._model.most_tokens(self.load, start, spare, within_s, scored=scored)

    def _leave_time(self, rows: Iterable[Row]) -> None:
        """Shorten this step for prompts that it does not complete: they need another step, of at least `rows_s`, before
        their deadlines. The next step then completes more of them. Prompts that cannot wait still end in this step.
        """
        rows_s, load, least_s = self._model.seconds(self.load), self.load, 0.0
        ends: list[tuple[float, float]] = []  # when each would end; how long this step may be if it ends in the next
        for row in rows:
            if row.generation.bulk:  # neither it nor those behind it have a deadline
                break
            copy_token_s = self._copy_token_s * row.generation.on_host
            load = load.with_chunk(row.computed, row.to_compute - row.computed, copy_token_s)
            end_s, spare_s = self._model.seconds(load), (row.order[1] - self._now) / self._slow - rows_s
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
        """Limit a step before bulk is added: beside other work, bulk fills at most `bulk_share` and delays nobody."""
        if self.chunks:
            share_s = self._policy.bulk_share * self._policy.longest_step_s / self._slow
            self._most_s = min(self._most_s, share_s, self._until_due_s() - self._second_s)

    def add_bulk_rows(self, rows: Sequence[Row]) -> None:
        """Add bulk rows that have room, or at least one if the step is empty."""
        for row in rows:
            fits = not self.chunks or self._model.seconds(self.load.with_row(row.length)) <= self._most_s
            if self._room and fits:
                self._add_row(row)

    def _prompts_slack_s(self, uncomputed: Iterable[Row]) -> float:
        """The longest that the step may take for the `uncomputed` rows to end by their deadlines."""
        model, chunks = self._model, {id(row): tokens for row, _, tokens, _, _ in self.chunks}
        rows_s = model.seconds(StepLoad(self.load.rows, self.load.kv_tokens))
        share = max(LEAST_CHUNKS, 1 - rows_s * self._slow / self._policy.longest_step_s)  # of a step, for chunks
        least_s, work_s = math.inf, 0.0
        for row in uncomputed:
            done = row.computed + chunks.get(id(row), 0)
            left = row.to_compute - done
            if left and not row.generation.bulk:
                work_s += model.prompt_token_s * left + model.pair_s * left * (done + left / 2)
                work_s += self._copy_token_s * row.generation.on_host * row.to_compute
                least_s = min(least_s, (row.order[1] - self._now) / self._slow - rows_s - work_s / share)
        return least_s

    def with_host(self, host: HostCache, planner: HybridPlanner, uncomputed: Iterable[Row]) -> ComposedStep:
        """The step with the rows `on_host` that the plan chooses. The `uncomputed` rows stay in time."""
        alone_s = self._model.seconds(self.load)
        urgent_at = self._now + _URGENT * self._slow * alone_s
        self._room += len(self._on_host)
        there, offered = list[Row](), list[HostRow]()
        for is_bulk, due, _, row in self._on_host[: self._room]:
            if row.computed < len(row.table) * BLOCK or self._take(row, row.computed + 1):
                there.append(row)
                offered.append(HostRow(row.length, due < urgent_at, is_bulk))
        urgent = any(row.urgent for row in offered)
        slacks_s = [slack_s for slack_s in self._slacks_s if slack_s >= alone_s]  # the others will be late anyway
        prompts_s = max(self._prompts_slack_s(uncomputed), (1 + _GROWS) * alone_s)
        plan = planner.choose(
            self.load,
            offered,
            within_s=min([self._policy.longest_step_s / self._slow, prompts_s, *slacks_s]),
            parked=len(host.parked),
            modes=self._policy.modes,
            joins=host.joins(urgent=urgent),
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
