"""The steps under way at a generating replica: one runs in the engine, and the next waits there."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deployments.errors import EngineFailed
from deployments.generation.offered import offered
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import FIRST, PARKING, SECOND, ScheduledChunk
from deployments.generation.scheduler.work import Chunk, Work
from deployments.generation.step_work import Compute, Found, StepWork
from deployments.generation.text.sampling import RowSamplers
from deployments.serving.planned_runs import Timed

_AVERAGED = 0.1  # weight of the latest step in the mean time to compose one
_WAKES_S = 0.0015  # the most by which an idle event loop's timers are late


@dataclass(slots=True, eq=False)
class Step:
    """A step that runs, or waits for the engine.

    - `wanted`: chunks that yield a token; `parked`: rows that may yield one, by their numbers.
    - `tell`: set for a probe or a planned step, which belongs to no generation; called with its time.
    - `found`: its result, once it has ended.
    - `forgotten`: ignore the result, because the generations were lost meanwhile.
    """

    chunks: Sequence[ScheduledChunk]
    work: StepWork
    began: float
    planned_s: float
    wanted: Sequence[ScheduledChunk] = ()
    parked: Mapping[int, ScheduledChunk] = field(default_factory=dict)
    tell: Callable[[Timed | EngineFailed], None] | None = None
    found: Found | BaseException | None = None
    forgotten: bool = False

    @classmethod
    def of(cls, schedule: StepScheduler, chunks: Sequence[ScheduledChunk], at: float) -> Step:
        """A step of these chunks that begins at `at`, with what the scheduler has to tell the engine."""
        work = Work(
            [_chunk_of(chunk) for chunk in chunks if chunk.batch == FIRST],
            schedule.copies(),
            [_chunk_of(chunk) for chunk in chunks if chunk.batch == SECOND],
            [(chunk.row.parked, _chunk_of(chunk)) for chunk in chunks if chunk.row.parked is not None],
            schedule.called_off(),
            schedule.joins,
        )
        parked_rows = schedule.parked.items()
        parked = {number: ScheduledChunk(row, row.computed, 1, True, PARKING) for number, row in parked_rows}
        wanted = [chunk for chunk in chunks if chunk.wanted and chunk.batch != PARKING]
        samplers = [_samplers_of(chunk) for chunk in wanted]
        parked_samplers = {number: _samplers_of(chunk) for number, chunk in parked.items()}
        planned_s = schedule.planned_s  # without the learned slowdown, so that metrics show drift
        return cls(chunks, StepWork(work, samplers, parked_samplers), at, planned_s, wanted, parked)

    def computed(self, found: Found) -> tuple[list[ScheduledChunk], bool]:
        """The chunks that were computed, and whether the step's time can be compared with its plan, which holds if no
        chunk of a prompt was left out.
        """
        left_out = [chunk for chunk, picked in zip(self.wanted, found.picked, strict=False) if picked == []]
        computed = [chunk for chunk in self.chunks if chunk.batch != PARKING and chunk not in left_out]
        computed += [self.parked[number] for number in found.arrived]
        return computed, not left_out or (bool(computed) and all(chunk.tokens == 1 for chunk in left_out))


def _chunk_of(chunk: ScheduledChunk) -> Chunk:
    """A scheduled chunk in the engine's terms."""
    row = chunk.row
    return Chunk(offered(row).ids(chunk), chunk.start, tuple(row.table), chunk.wanted, row.generation.on_host)


def _samplers_of(chunk: ScheduledChunk) -> RowSamplers:
    """The samplers that draw from a chunk: at the end of a prompt, one for each answer."""
    generation = offered(chunk.row)
    return RowSamplers([answer.sampler for answer in generation.drawn_from(chunk)], generation.offer.logprobs)


class Pipeline:
    """At most two steps: the second is composed shortly before the first ends, so that the engine begins it without a
    pause. All methods are called on the event loop.

    - `compose(at)`: the next step, which begins at `at`, with rows and blocks committed to it. None: there is nothing
      to do, or nothing that can be known while another step runs.
    - `ended(now, step)`: called with each step that has ended, in order, with its `found`.
    - `start_over(error)`: called if one of these has failed, so that the scheduler's state is unknown.
    """

    def __init__(
        self,
        schedule: StepScheduler,
        compute: Compute,
        clock: Callable[[], float],
        *,
        compose: Callable[[float], Step | None],
        ended: Callable[[float, Step], None],
        start_over: Callable[[Exception], None],
    ) -> None:
        self.steps: deque[Step] = deque()
        self._schedule, self._compute, self._now = schedule, compute, clock
        self._compose_next, self._on_end, self._start_over = compose, ended, start_over
        self._compose_s = 0.0  # mean time to compose a step

    def look(self) -> None:
        """Begin the next step if none runs and there is work."""
        if not self.steps:
            self._compose(self._now())

    def begin(self, step: Step) -> None:
        """Hand a step to the engine, which computes it after the one that runs."""

        def ended(found: Found | BaseException) -> None:
            step.found = found
            while self.steps and self.steps[0].found is not None:
                self._ended(self.steps[0])

        def begin() -> None:
            try:
                self._compute(step.work, ended)
            except Exception as error:  # noqa: BLE001 - whatever it is, its generations must end
                asyncio.get_running_loop().call_soon(ended, error)

        self.steps.append(step)
        contextvars.Context().run(begin)  # an empty context, so that the step is not tied to the current call
        if len(self.steps) == 1:
            self._look_ahead_soon(step)

    def _compose(self, at: float) -> None:
        began, step = self._now(), None
        try:
            step = self._compose_next(at)
        except Exception as error:  # noqa: BLE001 - whatever it is, its generations must end
            self._start_over(error)
        if step is not None:
            self.begin(step)
            self._compose_s += _AVERAGED * (self._now() - began - self._compose_s)

    def _look_ahead_soon(self, step: Step) -> None:
        """Compose the next step as late as possible: later offers have to wait for one more step."""
        if step.chunks:
            soon_s = self._schedule.ends_at - self._now() - 2 * self._compose_s - _WAKES_S
            asyncio.get_running_loop().call_later(soon_s, self._look_ahead, step, context=contextvars.Context())

    def _look_ahead(self, step: Step) -> None:
        if len(self.steps) == 1 and self.steps[0] is step and not step.forgotten:
            self._compose(max(self._now(), self._schedule.ends_at))

    def _ended(self, step: Step) -> None:
        now = self._now()
        try:
            self._on_end(now, step)
        except Exception as error:  # noqa: BLE001 - whatever it is, its generations must end
            self._start_over(error)
        self.steps.popleft()
        if self.steps:
            self.steps[0].began = now
            self._look_ahead_soon(self.steps[0])
        self.look()
