"""The main loop of a generating replica: admits generations that Routers offer, runs step after step, and sends tokens.

`StepScheduler` decides; `compute`, an argument, runs the engine. While a step runs, the loop goes on: it admits offers,
drops what is called off, and composes the next step shortly before the current one ends. Nothing is stored outside the
replica. If it dies, its generations end. If a Router's connection ends, the replica drops the Router's generations.
Imports neither ray nor torch; tests run it in virtual time.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from deployments.errors import EngineFailed
from deployments.generation.failed_steps import FailedSteps
from deployments.generation.frames import GenerationOffer, GenerationOffers, GenerationReport, NewToken, RefusedOffer
from deployments.generation.offer_inbox import OfferInbox
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import Row, ScheduledChunk
from deployments.generation.scheduler.state import StepState
from deployments.generation.scheduler.step import UNTIMED, load_of
from deployments.generation.scheduler.step_time import HostTime, StepTime
from deployments.generation.step import Answer, GenerationSession, OfferedGeneration, Step, offered
from deployments.generation.step_run import Compute, Found, StepWork, probe_work
from deployments.generation.text.sampling import Picked, Sampler
from deployments.serving.frames import FailureKind, add_failure, known
from deployments.serving.planned_runs import PlannedRuns, Timed
from deployments.serving.sessions import Connection, RouterSessions

logger = logging.getLogger("ray.serve")

_MOST_UNSENT = 2**24  # unread bytes after which a Router's connection is closed
_SOONER_S = 0.02  # a Router gets a new report if there is room this much earlier than it was told
_AVERAGED = 0.1  # weight of the latest step in the mean time to compose one
_WAKES_S = 0.0015  # the most by which an idle event loop's timers are late
_PAUSED = "a calibration is measuring this device"
_NO_NUMBERS = "the engine gave no finite numbers"


class StepLoop(RouterSessions[GenerationSession, GenerationReport]):
    """Runs the engine for Routers. All methods are called on the event loop.

    At most two steps are under way: the first runs in the engine; the second, composed shortly before the first ends,
    waits there. `_composed` commits rows and blocks to a step, `_begin` hands it to the engine's thread, and `_ended`
    sends its tokens and frees ended rows. After an error that leaves the scheduler's state unknown, `_start_over` fails
    all generations and ignores the results of these steps.
    """

    session_type = GenerationSession
    report_type = GenerationReport

    def __init__(
        self,
        schedule: StepScheduler,
        compute: Compute,
        *,
        on_step: Callable[[int, int, float, float], None] = lambda *_: None,  # rows, tokens, seconds, planned seconds
        on_failure: Callable[[BaseException], str] = str,  # logs the error; returns the message for clients
        clock: Callable[[], float] = time.monotonic,  # the loop's own clock counts whole milliseconds
    ) -> None:
        super().__init__(clock)
        self.schedule = schedule
        self._measured = schedule.model
        self._measured_host = None if schedule.host is None else schedule.host.time
        self._compute, self._on_step, self._on_failure = compute, on_step, on_failure
        self._steps: deque[Step] = deque()  # under way: the engine begins the second when the first has ended
        self._compose_s = 0.0  # mean time to compose a step
        self._stopped: list[Row] = []  # rows that end with the next step of generations
        self._inbox = OfferInbox(self)
        self.planned = PlannedRuns[StepWork](self, self._time_planned)
        self._failed_steps = FailedSteps(self)

    @property
    def in_flight(self) -> int:
        """How many admitted generations have not ended."""
        return sum(len(session.admitted) for session in self._sessions.values())

    @property
    def running_s(self) -> float:
        """Seconds that the engine has been in its current step; 0 while it is idle."""
        return self.now() - self._steps[0].began if self._steps else 0.0

    def state(self) -> StepState:
        """The replica's state now, as it reports it to Routers."""
        state = self.schedule.state(self.now())
        return state._replace(opens_s=max(state.opens_s, self.planned.left_s))

    @property
    def is_busy(self) -> bool:
        """Whether an offer is undecided, a generation has not ended, or a step runs."""
        return bool(self._inbox or self.in_flight or self._steps)

    # --- frames from Routers ------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, offers: GenerationOffers) -> None:
        """Handle a Router's frame. What it calls off ends at once. Its settings and offers go through the inbox, which
        reads a few milliseconds at a time so that reports can be sent in between.
        """
        session = self._session(connection)
        if offers.called_off:
            self.drop(session.admitted.get(number) for number in offers.called_off)
        for number, answer in offers.stopped:
            self._stop(session.admitted.get(number), answer)
        if offers.asks:
            session.asks = True
            self.report_soon()
        self._inbox.receive(session, offers, self.now())

    def have_read(self) -> None:
        """Called after the inbox has read for a while: begin a step if there is work."""
        self._idle.set()
        self._look()

    def hang_up(self, session: GenerationSession) -> None:
        """Close a Router's connection, and drop its generations."""
        self.gone(session.connection)
        session.connection.hang_up()

    def gone(self, connection: Connection) -> None:
        """A Router's connection has ended: drop its generations."""
        session = self._sessions.pop(connection, None)
        if session is not None:
            session.gone = True
            self.drop(list(session.admitted.values()), cut_off=True)
            self._idle.set()

    def configure(self, session: GenerationSession, settings: dict[str, Any]) -> None:
        """Apply a Router's settings (`GenerationRouterConfig.policy`). Adjacent versions may send more or fewer."""
        self._identify(session, str(settings["router"]))
        bounds = {name: float(str(settings[name])) for name in ("ttft_s", "tpot_s", "bulk_share") if name in settings}
        self.schedule.policy = replace(self.schedule.policy, **bounds)  # type: ignore[arg-type]
        given, host = settings.get("model"), settings.get("host")
        self.schedule.configure(
            known(StepTime, given) if isinstance(given, list) else self._measured,
            known(HostTime, host) if isinstance(host, list) else self._measured_host,
            calibrated=given is not None,
        )
        self.report_soon()

    def take(self, session: GenerationSession, offer: GenerationOffer, came_at: float) -> None:
        now = self.now()
        waited_s = now - came_at
        answers = [Answer(number, Sampler(offer.sampling, number, offer.end_tokens)) for number in range(offer.answers)]
        generation = OfferedGeneration(
            len(offer.ids),
            offer.most_tokens,
            now + offer.left_s - waited_s,
            offer.tpot_s,
            offer.answers,
            offer.bulk,
            offer.tenant,
            session=session,
            offer=offer,
            each_answer=answers,
        )
        if not self.planned.is_on and self.schedule.offer(now, generation):
            session.admitted[offer.number] = generation
            self._tell(session).admitted.append(offer.number)
            return
        # Ignore the wait in the inbox: it must not turn an offer that came in time into one that is never possible.
        never = (self.planned.is_on or generation.never) and self.schedule.admission.never(generation, offer.left_s)
        sure_s = offer.left_s / (1 + self.schedule.learning.margin)  # so that a prompt of `longest` is then admitted
        longest = self.schedule.admission.longest_prompt(sure_s) if never else 0
        opens_s, why = generation.opens_s or waited_s, ""  # if only its wait was too long, the next would wait as long
        if self.planned.is_on:
            opens_s, why = self.planned.left_s, _PAUSED
        self._tell(session).refused.append(RefusedOffer(offer.number, never, longest, opens_s, why))

    def _stop(self, generation: OfferedGeneration | None, number: int) -> None:
        """Stop one answer. Its row ends with the next step."""
        if generation is None or not 0 <= number < generation.answers:
            return
        answer = generation.each_answer[number]
        answer.stopped = answer.sampler.ended = True
        if all(answer.stopped for answer in generation.each_answer):
            self.drop([generation])
        else:
            self._stopped += [row for row in generation.rows if row.number == number]

    def drop(self, generations: Iterable[OfferedGeneration | None], *, cut_off: bool = False) -> None:
        """Drop generations that nobody waits for. Their slots are free at once, except in the current step. `cut_off`:
        an error or a lost Router dropped them, not their clients.
        """
        for generation in list(generations):
            if generation is not None and not generation.gone:
                generation.gone = True
                for answer in generation.each_answer:
                    answer.sampler.ended = True
                generation.session.admitted.pop(generation.offer.number, None)
                generation.session.asks = True  # its Router should learn about the free room
                self.schedule.remove(self.now(), generation, cut_off=cut_off)
        self._idle.set()
        self.report_soon()

    # --- steps --------------------------------------------------------------------------------------------------------

    async def probe(self) -> None:
        """Run a few tokens through the model, if there is room. Raises EngineFailed."""
        if (work := self.probe_work()) is not None:
            await self.time_step(work)

    def probe_work(self) -> StepWork | None:
        """A probe that uses a free block. None if no block is free."""
        block = self.schedule.room.free_block
        return None if block is None else probe_work(block)

    def _look(self) -> None:
        """Begin the next step if none runs and there is work."""
        if not self._steps:
            self._compose(self.now())

    def _look_ahead(self, step: Step) -> None:
        """Compose the next step while this one runs, so that the engine begins it without a pause."""
        if len(self._steps) == 1 and self._steps[0] is step and not step.forgotten:
            self._compose(max(self.now(), self.schedule.ends_at))

    def _compose(self, at: float) -> None:
        """Compose a step that begins at `at`, and hand it to the engine."""
        began = self.now()
        step = None
        try:
            step = self._composed(at)
        except Exception as error:  # noqa: BLE001 - whatever it is, its generations must end
            self._start_over(error)
        if step is not None:
            self._begin(step)
            self._compose_s += _AVERAGED * (self.now() - began - self._compose_s)

    def _composed(self, at: float) -> Step | None:
        """The next step. None if there is nothing to do, or nothing that can be known while another step runs."""
        chunks = self.schedule.next_step(at)
        if not chunks and (self._steps or not self.schedule.joins):
            return None
        return Step.of(self.schedule, chunks, at)

    def _begin(self, step: Step) -> None:
        def ended(found: Found | BaseException) -> None:
            step.found = found
            while self._steps and self._steps[0].found is not None:
                self._ended(self._steps[0], self._steps[0].found)

        def begin() -> None:
            try:
                self._compute(step.work, ended)
            except Exception as error:  # noqa: BLE001 - whatever it is, its generations must end
                asyncio.get_running_loop().call_soon(ended, error)

        self._steps.append(step)
        contextvars.Context().run(begin)  # an empty context, so that the step is not tied to the current call
        if len(self._steps) == 1:
            self._look_ahead_soon(step)

    def _look_ahead_soon(self, step: Step) -> None:
        """Schedule `_look_ahead` as late as possible: later offers have to wait for one more step."""
        if step.chunks:
            soon_s = self.schedule.ends_at - self.now() - 2 * self._compose_s - _WAKES_S
            asyncio.get_running_loop().call_later(soon_s, self._look_ahead, step, context=contextvars.Context())

    def _ended(self, step: Step, found: Found | BaseException) -> None:
        now = self.now()
        try:
            if step.tell is not None:
                step.tell(self._timed(step, found))
            elif not step.forgotten:
                self._account(now, step, found)
        except Exception as error:  # noqa: BLE001 - whatever it is, its generations must end
            self._start_over(error)
        self._steps.popleft()
        if self._steps:
            self._steps[0].began = now
            self._look_ahead_soon(self._steps[0])
        self._idle.set()
        self.report_soon()
        self._look()

    def time_step(self, work: StepWork) -> asyncio.Future[Timed]:
        """Begin a step that belongs to no generation. Returns a future of its time, which may raise EngineFailed."""
        timed: asyncio.Future[Timed] = asyncio.get_running_loop().create_future()

        def tell(found: Timed | EngineFailed) -> None:
            if timed.done():
                pass  # cancelled
            elif isinstance(found, EngineFailed):
                timed.set_exception(found)
            else:
                timed.set_result(found)

        self.run_step(work, tell)
        return timed

    def _time_planned(self, work: StepWork) -> asyncio.Future[Timed]:
        for sampler in chain.from_iterable(row.samplers for row in work.samplers):
            sampler.ended = False  # an earlier draw from meaningless tokens may have ended it
        return self.time_step(work)

    def run_step(self, work: StepWork, tell: Callable[[Timed | EngineFailed], None]) -> None:
        """Begin a step that belongs to no generation. `tell` is called when it has ended."""
        self.schedule.lend(now := self.now(), load_of(work.work.chunks))
        self._begin(Step((), work, now, 0.0, tell=tell))

    def _timed(self, step: Step, found: Found | BaseException) -> Timed | EngineFailed:
        if isinstance(found, BaseException):
            return EngineFailed(self._on_failure(found))
        if None in found.picked:
            return EngineFailed(_NO_NUMBERS)
        return Timed(self.now() - step.began, found.compute_s.host_s)

    def _account(self, now: float, step: Step, found: Found | BaseException) -> None:
        """Send the step's tokens to Routers, end rows, and let the scheduler learn from the step."""
        finished: list[Row] = []
        whole, arrived, compute_s = False, list[ScheduledChunk](), UNTIMED
        numbers: Sequence[int] = ()
        try:
            if isinstance(found, BaseException):
                raise found  # noqa: TRY301 - handled like any failure below
            numbers, compute_s = found.arrived, found.compute_s
            arrived = [step.parked[number] for number in numbers]
            for chunk, picked in zip([*step.wanted, *arrived], found.picked, strict=True):
                finished += self._picked(chunk, picked)
            computed, whole = step.computed(found)
            self._on_step(len(computed), sum(chunk.tokens for chunk in computed), now - step.began, step.planned_s)
            if computed and None not in found.picked:
                self.problem = None
        except BaseException as error:  # noqa: BLE001
            in_step = [offered(chunk.row) for chunk in step.chunks]
            self._failed_steps.add(self._begun(step), in_step, self._on_failure(error))
        stopped, self._stopped = self._stopped, []
        ends = [*finished, *stopped]
        self.schedule.ended(now, now - step.began, ends, whole=whole, arrived=numbers, compute_s=compute_s)
        for row in [*(chunk.row for chunk in [*step.chunks, *arrived]), *stopped]:
            if not (generation := offered(row)).rows:
                generation.session.admitted.pop(generation.offer.number, None)

    def _start_over(self, error: Exception) -> None:
        """The scheduler's state is unreliable: fail all generations, and go on with an empty cache."""
        every = list(chain.from_iterable(session.admitted.values() for session in self._sessions.values()))
        for generation in every:
            generation.rows = []
        for step in self._steps:
            step.forgotten = True
        self.schedule.clear()
        self.fail(every, self._on_failure(error))

    def _picked(self, chunk: ScheduledChunk, picked: list[Picked] | None) -> list[Row]:
        """Send these tokens. Returns the rows that end with them."""
        generation = offered(chunk.row)
        if generation.gone or picked == []:
            return []
        if picked is None:
            self._failed_steps.add([generation], [generation], f"{_NO_NUMBERS} for this prompt")
            return []
        ended = set()
        for answer, one in zip(generation.drawn_from(chunk), picked, strict=True):
            if answer.stopped:
                continue
            finish = generation.take(answer, one.id)
            self._tell(generation.session).tokens.append(NewToken(generation.offer.number, answer.number, one, finish))
            if finish:
                ended.add(answer.number)
        return [row for row in generation.rows if row.number in ended] if ended else []

    def _begun(self, step: Step) -> list[OfferedGeneration]:
        """The generations that the cache holds anything of. After a failed step, its contents are unknown."""
        now = {id(chunk.row.generation) for chunk in step.chunks}
        every = chain.from_iterable(session.admitted.values() for session in self._sessions.values())
        return [one for one in every if id(one) in now or any(row.computed for row in one.rows)]

    def fail(self, generations: Sequence[OfferedGeneration], sentence: str) -> None:
        """End these with an error."""
        self.tell_failed(generations, sentence)
        self.drop(generations, cut_off=True)

    def tell_failed(
        self, generations: Iterable[OfferedGeneration], sentence: str, kind: FailureKind | None = None
    ) -> None:
        """Report to Routers that these failed. `kind`: see `Failures`."""
        sentence = sentence.encode(errors="replace").decode()  # UTF-8 has no lone surrogates
        for generation in generations:
            add_failure(self._tell(generation.session), generation.offer.number, sentence, kind)

    # --- reports to Routers -------------------------------------------------------------------------------------------

    def _should_report(self, session: GenerationSession, opens_at: float) -> bool:
        return session.asks or session.reported_opens_at > opens_at + _SOONER_S

    def _deliver(self, session: GenerationSession, report: GenerationReport) -> None:
        report.routers = len(self._sessions)
        super()._deliver(session, report)
        if session.connection.unsent > _MOST_UNSENT:
            logger.warning("closing the connection to Router %s: it does not read", session.name)
            self.hang_up(session)
