"""The host's part of a replica's cache: which generations it holds, which move, and how fast they can be. Pure.

A generation lies in the accelerator's cache or in the host's, never in both. It is admitted to the accelerator if there
is room, else to the host. It moves, with all its blocks,

    to the host          if it would have to wait for a block of the accelerator's cache
    to the accelerator   if that has room that nobody else needs, up to 95 % of its blocks

(NEO's second step, arXiv:2411.01142, Section 3.2; the 95 % are in its code).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from deployments.generation.scheduler.block_manager import BlockManager
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.forecast import HostShare
from deployments.generation.scheduler.hybrid.planner import HybridPlan, HybridPlanner
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.sequences import Generation, Row
from deployments.generation.scheduler.state import ACCELERATOR, MODES, PIPELINED, HostState
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from deployments.generation.scheduler.work import ComputeSeconds, Copy

_FILLED = 0.95  # of the accelerator's blocks: moves leave the rest to growing rows
_LEAST_LEARNED_S = 0.02  # seconds of the host's attention from which its slowdown is learned
_FORGOTTEN = 0.002  # of the slowdown, forgotten with each step without the host: it may be fast again
_AVERAGED = 0.05  # weight of the latest step in the mean
_SLOWER = 4.0  # the largest increase of the slowdown by one step, which may have been a hiccup
_PASSED = 4  # the most pipelined steps in a row, which no parked row joins, while no row is urgent


class ParkedRows(dict[int, Row]):
    """Rows whose next token takes several steps (`planner`), by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._called_off: list[int] = []
        self._numbers = 0

    def park(self, row: Row) -> None:
        """Park a row: its next token comes in a later step."""
        self._numbers += 1
        row.parked, row.coming = self._numbers, 1
        self[self._numbers] = row

    def arrive(self, numbers: Collection[int]) -> list[Row]:
        """Take out rows whose tokens are there. Numbers that were called off are ignored. Returns the rows."""
        rows = [self.pop(number) for number in numbers if number in self]
        for row in rows:
            row.parked, row.coming = None, 0
        return rows

    def call_off(self, row: Row) -> None:
        """Call off a row, if it is parked, because its token is not wanted any more."""
        if row.parked is not None:
            del self[row.parked]
            self._called_off.append(row.parked)
            row.parked = None

    def called_off(self) -> list[int]:
        """Numbers of rows that were called off since the last call."""
        numbers, self._called_off = self._called_off, []
        return numbers


@dataclass(slots=True, eq=False)
class HostCache:
    """The host's cache. `time`: of its attention; `block_count`: its blocks. It counts since the start.

    - `steps` in each mode, `tokens` of host rows, `moved` generations (to the accelerator, to the host).
    - `alone`: tokens that the accelerator without a host would have generated in the same time.
    - `gained`: tokens that both generated beyond these. Prompts count as `worth` in `planner`.
    """

    time: HostTime
    block_count: int
    learning: Learning = field(default_factory=Learning)
    room: BlockManager = field(init=False)
    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    tokens: int = 0
    moved: list[int] = field(default_factory=lambda: [0, 0])
    gained: float = 0.0
    alone: float = 0.0
    parked: ParkedRows = field(default_factory=ParkedRows)
    _passed: int = 0  # steps since parked rows could last join one
    accelerator_slowdown: float = 1.0  # how many times as long as planned the accelerator itself computes

    def __post_init__(self) -> None:
        self.room = BlockManager(self.block_count)

    def configure(self, time: HostTime | None, *, calibrated: bool, other_model: bool) -> None:
        """Use this time, if given. `other_model`: the accelerator's model has changed, too."""
        if time is not None and time != self.time:
            self.time, self.learning = time, Learning(calibrated)
        if other_model:
            self.accelerator_slowdown = 1.0

    # --- predictions --------------------------------------------------------------------------------------------------

    @property
    def relative_factor(self) -> float:
        """The host's slowdown relative to the accelerator's, since plans are in seconds of the accelerator's model. The
        latter counts the accelerator's own work, not whole steps. Otherwise, after a step that was a little too long
        for any reason, the host would get more to do in the next one, which would be longer still.
        """
        return self.learning.slowdown / self.accelerator_slowdown

    def planner(self, step: StepTime, new_prompts: float = 0.0) -> HybridPlanner:
        """A planner whose times are in seconds of `step`, the accelerator's model. `new_prompts`: see there."""
        return HybridPlanner(step, self.time, self.relative_factor, new_prompts)

    def shares(
        self,
        step: StepTime,
        rows: Iterable[tuple[bool, int]],
        row_blocks: int = 1,
        new_prompts: float = 0.0,
        within_s: float = math.inf,
    ) -> list[HostShare]:
        """What a forecast may assume for answers on the host while these `rows` run: (is on the host, tokens that it
        reads). Promises that hold with any one of these will be kept.

        With one batch, the host can use the time of the accelerator's attention; with two, all of a step's time
        (`HybridPlanner.steady`). Two batches are considered only if they yield more tokens per second once the host is
        full of answers of `row_blocks` blocks. Judged by the few answers at first, reading the weights twice would
        never pay, and the few would never become many.
        """
        load, tokens, count = StepLoad(), 0, 0
        for on_host, length in rows:
            if on_host:
                tokens, count = tokens + length, count + 1
            else:
                load = load.with_row(length)
        most = count + max(0, self.block_count - self.room.reserved) // row_blocks
        planner = self.planner(step, new_prompts)
        found, best = [], -1.0
        for twice in (False, True):
            rate, used = planner.steady(load, most, tokens / max(1, count), whole=twice, twice=twice, within_s=within_s)
            if rate > best:
                stretched = planner.slow / max(used, 1e-3)
                row_s, kv_token_s = stretched * self.time.row_s, stretched * self.time.kv_token_s
                found.append(HostShare(row_s, kv_token_s, twice, self.time.copy_token_s))
                best = rate
        return found

    # --- moves between the caches -------------------------------------------------------------------------------------

    def to_accelerator(self, rows: Sequence[Row], room: BlockManager, bulk_share: float, within_s: float) -> list[Copy]:
        """Move generations of these rows to the accelerator's `room`, in order, up to the first that does not fit.
        Generations whose copies would exceed `within_s` in all are skipped. Returns the copies.
        """
        copies: list[Copy] = []
        for generation in _whole(rows, on_host=True):
            blocks = len(copies) + generation.held_blocks()
            if blocks * BLOCK * self.time.copy_token_s > within_s:
                continue
            if not room.may_move_in(generation, bulk_share, 1 - _FILLED):
                break  # checking each of them would take longer than a plan
            copies += self._move(generation, self.room, room)
        return copies

    def to_host(self, rows: Sequence[Row], room: BlockManager, bulk_share: float) -> list[Copy]:
        """Move generations of these rows, which wait for a block in the accelerator's `room`, to the host if they fit.
        Returns the copies.
        """
        copies: list[Copy] = []
        for generation in _whole(rows, on_host=False):
            if self.room.may_move_in(generation, bulk_share):
                copies += self._move(generation, room, self.room)
        return copies

    def _move(self, generation: Generation, source: BlockManager, target: BlockManager) -> list[Copy]:
        blocks = target.move_in(generation, source)
        generation.on_host = to_host = target is self.room
        self.moved[to_host] += 1
        return [Copy(*pair, from_host=not to_host, to_host=to_host) for pair in blocks.items()]

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self, rows: int) -> HostState:
        """The state that is reported. `rows`: how many of its rows run."""
        return HostState(
            max(0, self.block_count - self.room.reserved), self.block_count, rows, len(self.parked),
            tuple(self.steps[mode] for mode in MODES), self.tokens, tuple(self.moved),
            round(self.gained, 1), round(self.alone, 1), round(self.learning.slowdown, 4),
        )  # fmt: skip

    def joins(self, *, urgent: bool) -> bool:
        """Whether parked rows must be able to join the next step. From time to time they must."""
        return bool(self.parked) and self._passed >= _PASSED and not urgent

    # --- learning -----------------------------------------------------------------------------------------------------

    def ended(
        self, plan: HybridPlan | None, seconds: float, compute_s: ComputeSeconds, arrived: int, *, whole: bool = True
    ) -> None:
        """Learn from a step with that `plan` that took `seconds`, in which `arrived` parked rows got their token. A
        step that is not `whole` is ignored.
        """
        self._passed = self._passed + 1 if self.parked and plan and plan.mode == PIPELINED else 0
        if plan is None or not whole:
            return
        self.steps[plan.mode] += 1
        tokens = len(plan.first) + len(plan.second) + arrived
        self.tokens += tokens
        if compute_s.accelerator_s and (plan.worth or plan.first or plan.second):  # parked rows alone pass few layers
            took = min(compute_s.accelerator_s / plan.accelerator_s, _SLOWER * self.accelerator_slowdown)
            self.accelerator_slowdown += _AVERAGED * (took - self.accelerator_slowdown)
        if plan.mode == ACCELERATOR:
            self.alone += plan.worth
        else:
            alone = plan.worth * seconds / (self.accelerator_slowdown * plan.alone_s)
            self.alone += alone
            self.gained += tokens + plan.worth - alone
        if plan.host_s and compute_s.host_s and self._passed != 1:  # the first also includes parked rows' attention
            self.learning.worked(plan.host_s, compute_s.host_s, least_s=_LEAST_LEARNED_S)
        elif not plan.host_s:
            self.learning.slowdown += _FORGOTTEN * (1 - self.learning.slowdown)


def _whole(rows: Sequence[Row], *, on_host: bool) -> Iterator[Generation]:
    """The generations of these rows that may move: they lie on that side, with no row parked."""
    for generation in {id(row.generation): row.generation for row in rows}.values():
        if generation.on_host is on_host and generation.rows and not any(row.parked for row in generation.rows):
            yield generation
