"""The main loop of a generating replica: admits generations that Routers offer, runs step after step, and sends tokens.

`StepScheduler` decides; `compute`, an argument, runs the engine. While a step runs, the loop admits offers, and drops
what is called off. Shortly before the step ends, it composes the next one, so that the engine begins that without a
pause. Nothing is stored outside the replica. If it dies, its generations end. If a Router's connection ends, the
replica drops the Router's generations.

    a step fails        answers that already have tokens end with its error; a probe runs a few meaningless tokens
                        through the model. The same happens to a generation without finite numbers
    the probe fails,    the engine is broken: Routers offer the prompts elsewhere, once, and the replica's health check
    or hangs            fails until a step succeeds
    the probe succeeds  a prompt was bad; if the step had only one, the prompt ends with the error. Otherwise nobody
                        knows which: Routers offer all of them elsewhere, once, and also the prompts that were not in
                        the step

Imports neither ray nor torch; tests run it in virtual time.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from deployments.errors import EngineFailed
from deployments.generation.engine_thread import Compute, Found, StepWork, probe_work
from deployments.generation.frames import (
    GenerationOffer,
    GenerationOffers,
    GenerationReport,
    NewToken,
    RefusedOffer,
    ScoredPrompt,
)
from deployments.generation.offered import Answer, GenerationSession, OfferedGeneration, Step, offered, sampler_of
from deployments.generation.scheduler.prefix_keys import PrefixKeys
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import Row, ScheduledChunk
from deployments.generation.scheduler.state import StepState
from deployments.generation.scheduler.step_time import HostTime, StepTime
from deployments.generation.scheduler.work import UNTIMED, load_of
from deployments.generation.text.grammar import Grammars
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Picked
from deployments.serving.frames import FailureKind, add_failure, known
from deployments.serving.planned_runs import PlannedRuns, Timed
from deployments.serving.sessions import PROBE_TIMEOUT_S, Connection, RouterSessions, later

logger = logging.getLogger("ray.serve")

_MOST_UNSENT = 2**24  # unread bytes after which a Router's connection is closed
_READS_S = 0.005  # how long it decides on offers at a time; while hundreds wait, steps and reports go on in between
_AVERAGED = 0.1  # weight of the latest step in the mean time to compose one
_WAKES_S = 0.0015  # the most by which an idle event loop's timers are late
_SOONER_S = 0.02  # a Router gets a new report if there is room this much earlier than it was told
_PAUSED = "a calibration is measuring this device"
_NO_NUMBERS = "the engine gave no finite numbers"


class StepLoop(RouterSessions[GenerationSession, GenerationReport]):
    """Runs the engine for Routers. All methods are called on the event loop.

    `_compose` commits rows and blocks to a step, and `_account` sends its tokens and frees ended rows.
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
        grammars: Grammars | None = None,  # compiles those of answers
        clock: Callable[[], float] = time.monotonic,  # the loop's own clock counts whole milliseconds
    ) -> None:
        super().__init__(clock)
        self.schedule = schedule
        self._measured = schedule.model
        self._measured_host = None if schedule.host is None else schedule.host.time
        self._on_step, self._on_failure = on_step, on_failure
        self._compute, self._grammars = compute, grammars
        self._steps: deque[Step] = deque()  # at most two: one runs, and the next waits in the engine
        self._compose_s = 0.0  # mean time to compose a step
        self._secret = secrets.token_bytes(32)  # of the keys of blocks
        self._stopped: list[Row] = []  # rows that end with the next step of generations
        self._inbox: deque[tuple[GenerationSession, Callable[[], None]]] = deque()  # what is left to do for frames
        self.planned = PlannedRuns[StepWork](self, self._time_planned)
        # Prompts without a first token, after a failed step, until the probe has ended: the error, and whether they
        # broke the step, if the engine works.
        self._failed: list[tuple[OfferedGeneration, str, bool]] = []
        self._probe_limit: asyncio.TimerHandle | None = None  # of the probe that runs after a failed step

    @property
    def in_flight(self) -> int:
        """How many admitted generations have not ended."""
        return sum(1 for _ in self._admitted)

    @property
    def _admitted(self) -> Iterable[OfferedGeneration]:
        return chain.from_iterable(session.admitted.values() for session in self._sessions.values())

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
        """Handle a Router's frame. What it calls off ends at once. Its settings and offers wait for those of earlier
        frames.
        """
        session = self._session(connection)
        if offers.called_off:
            self._drop(session.admitted.get(number) for number in offers.called_off)
        for number, answer in offers.stopped:
            self._stop(session.admitted.get(number), answer)
        if offers.asks:
            session.asks = True
            self.report_soon()
        session.called_off.update(offers.called_off)
        todo: list[Callable[[], None]] = [partial(self._take, session, offer, self.now()) for offer in offers.offers]
        if offers.settings is not None:
            todo.insert(0, partial(self._configure, session, offers.settings))
        is_first = not self._inbox
        todo.append(partial(self._have_read, session, offers))
        self._inbox.extend((session, handle) for handle in todo)
        if is_first:  # otherwise `_read` will get to it
            self._read()

    def _read(self) -> None:
        """Decide on what is in the inbox for a while, and begin a step if there is work."""
        ends = time.perf_counter() + _READS_S
        while self._inbox:
            session, handle = self._inbox.popleft()
            try:
                if not session.gone:
                    handle()
            except Exception:
                logger.exception("a Router's frame cannot be read: its connection is closed")
                self._hang_up(session)
            if time.perf_counter() > ends:
                break
        if self._inbox:
            asyncio.get_running_loop().call_soon(self._read, context=contextvars.Context())
        self._idle.set()
        self._look()

    @staticmethod
    def _have_read(session: GenerationSession, offers: GenerationOffers) -> None:
        session.called_off.difference_update(offers.called_off)
        session.seen += 1

    def _hang_up(self, session: GenerationSession) -> None:
        """Close a Router's connection, and drop its generations."""
        self.gone(session.connection)
        session.connection.hang_up()

    def gone(self, connection: Connection) -> None:
        """A Router's connection has ended: drop its generations."""
        session = self._sessions.pop(connection, None)
        if session is not None:
            session.gone = True
            self._drop(list(session.admitted.values()), cut_off=True)
            self._idle.set()

    def _configure(self, session: GenerationSession, settings: dict[str, Any]) -> None:
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

    def _take(self, session: GenerationSession, offer: GenerationOffer, came_at: float) -> None:
        if offer.number in session.called_off:  # nobody waits for a decision
            return
        now = self.now()
        waited_s = now - came_at
        answers = [Answer(number, sampler_of(offer, number, self._grammars)) for number in range(offer.answers)]
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
            scored=offer.prompt_logprobs is not None,
        )
        if offer.cache_scope is not None:
            generation.keys = PrefixKeys(self._secret, offer.cache_scope, self.schedule.block_size, offer.ids)
        if offer.may_shorten:
            self.schedule.admission.shorten(generation, offer.left_s)
        decision = None if self.planned.is_on else self.schedule.offer(now, generation)
        if decision is not None and decision.admitted:
            session.admitted[offer.number] = generation
            self._tell(session).admitted.append(offer.number)
            if generation.cached:
                self._tell(session).cached.append((offer.number, generation.cached))
            return
        # Ignore the wait in the inbox: it must not turn an offer that came in time into one that is never possible.
        never = (decision is None or decision.never) and self.schedule.admission.never(generation, offer.left_s)
        sure_s = offer.left_s / (1 + self.schedule.learning.margin)  # so that a prompt of `longest` is then admitted
        longest = self.schedule.admission.longest_prompt(sure_s) if never else 0
        if decision is None:
            opens_s, why = self.planned.left_s, _PAUSED
        else:  # if only its wait was too long, the next would wait as long
            opens_s, why = decision.opens_s or waited_s, ""
        self._tell(session).refused.append(RefusedOffer(offer.number, never, longest, opens_s, why))

    def _stop(self, generation: OfferedGeneration | None, number: int) -> None:
        """Stop one answer. Its row ends with the next step."""
        if generation is None or not 0 <= number < generation.answers:
            return
        answer = generation.each_answer[number]
        answer.stopped = answer.sampler.ended = True
        if all(answer.stopped for answer in generation.each_answer):
            self._drop([generation])
        else:
            self._stopped += [row for row in generation.rows if row.number == number]

    def _drop(self, generations: Iterable[OfferedGeneration | None], *, cut_off: bool = False) -> None:
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
        if (work := self._probe_work()) is not None:
            await self._time_step(work)

    def _probe_work(self) -> StepWork | None:
        """A probe that uses a free block. None if no block is free."""
        block = self.schedule.room.spare_block()
        return None if block is None else probe_work(block)

    def _time_step(self, work: StepWork) -> asyncio.Future[Timed]:
        """Begin a step that belongs to no generation. Returns a future of its time, which may raise EngineFailed."""
        timed: asyncio.Future[Timed] = asyncio.get_running_loop().create_future()

        def tell(found: Timed | EngineFailed) -> None:
            if timed.done():
                pass  # cancelled
            elif isinstance(found, EngineFailed):
                timed.set_exception(found)
            else:
                timed.set_result(found)

        self._run_step(work, tell)
        return timed

    def _time_planned(self, work: StepWork) -> asyncio.Future[Timed]:
        self.schedule.room.forget_contents()  # the step overwrites any blocks
        for sampler in chain.from_iterable(row.samplers for row in work.samplers):
            sampler.ended = False  # an earlier draw from meaningless tokens may have ended it
        return self._time_step(work)

    def _run_step(self, work: StepWork, tell: Callable[[Timed | EngineFailed], None]) -> None:
        """Begin a step that belongs to no generation. `tell` is called when it has ended."""
        self.schedule.lend(now := self.now(), load_of(work.work.chunks))
        self._begin(Step((), work, now, 0.0, tell=tell))

    def _look(self) -> None:
        """Begin the next step if none runs and there is work."""
        if not self._steps:
            self._compose(self.now())

    def _compose(self, at: float) -> None:
        """Compose the next step, which begins `at`, and hand it to the engine. Does nothing if there is no work, or
        none that is known while another step runs.
        """
        began = self.now()
        try:
            chunks = self.schedule.next_step(at)
            if not chunks and (self._steps or not self.schedule.joins):
                return
            step = Step.of(self.schedule, chunks, at)
        except Exception as error:  # noqa: BLE001 - whatever it is, its generations must end
            self._start_over(error)
            return
        self._begin(step)
        self._compose_s += _AVERAGED * (self.now() - began - self._compose_s)

    def _begin(self, step: Step) -> None:
        """Hand a step to the engine, which computes it after the one that runs."""

        def ended(found: Found | BaseException) -> None:
            step.found = found
            while self._steps and self._steps[0].found is not None:
                self._step_ended(self._steps[0], self._steps[0].found)

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
        """Compose the next step as late as possible: later offers have to wait for one more step."""
        if step.chunks:
            later(self.schedule.ends_at - self.now() - 2 * self._compose_s - _WAKES_S, partial(self._look_ahead, step))

    def _look_ahead(self, step: Step) -> None:
        if len(self._steps) == 1 and self._steps[0] is step and not step.forgotten:
            self._compose(max(self.now(), self.schedule.ends_at))

    def _step_ended(self, step: Step, found: Found | BaseException) -> None:
        now = self.now()
        try:
            if step.tell is not None:
                step.tell(self._timed(step, found))
            elif not step.forgotten:
                self._account(now, step, found)
        except Exception as error:  # noqa: BLE001 - whatever it is, its generations must end
            self._start_over(error)
        self._steps.popleft()
        self._idle.set()
        self.report_soon()
        if self._steps:
            self._steps[0].began = now
            self._look_ahead_soon(self._steps[0])
        self._look()

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
            computed, left_out, whole = step.computed(found)
            for chunk, scores in step.scored(computed, found):  # first: without scores, a prompt gets no token
                self._scored(chunk, scores)
            for chunk, picked in zip([*step.wanted, *arrived], found.picked, strict=True):
                finished += self._picked(chunk, picked)
            self.schedule.left_out(left_out)
            self._on_step(len(computed), sum(chunk.tokens for chunk in computed), now - step.began, step.planned_s)
            if computed and None not in found.picked:
                self.problem = None
        except BaseException as error:  # noqa: BLE001
            in_step = [offered(chunk.row) for chunk in step.chunks]
            self.schedule.room.forget_contents()
            self._step_failed(self._begun(step), in_step, self._on_failure(error))
        stopped, self._stopped = self._stopped, []
        ends = [*finished, *stopped]
        self.schedule.ended(now, now - step.began, ends, whole=whole, arrived=numbers, compute_s=compute_s)
        for row in [*(chunk.row for chunk in [*step.chunks, *arrived]), *stopped]:
            if not (generation := offered(row)).rows:
                generation.session.admitted.pop(generation.offer.number, None)

    def _scored(self, chunk: ScheduledChunk, scores: PromptScores) -> None:
        """Send the scores of a chunk's tokens."""
        generation = offered(chunk.row)
        if generation.gone:
            return
        if np.isnan(scores.logprobs).any():
            self._has_no_numbers(generation)
            return
        self._tell(generation.session).scored.append(ScoredPrompt.of(generation.offer.number, chunk.start, scores))

    def _picked(self, chunk: ScheduledChunk, picked: list[Picked] | None) -> list[Row]:
        """Send these tokens. Returns the rows that end with them."""
        generation = offered(chunk.row)
        if generation.gone or picked == []:
            return []
        if picked is None:
            self._has_no_numbers(generation)
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

    # --- failures -----------------------------------------------------------------------------------------------------

    def _start_over(self, error: Exception) -> None:
        """The scheduler's state is unreliable: fail all generations, and go on with an empty cache."""
        every = list(self._admitted)
        for generation in every:
            generation.rows = []
        for step in self._steps:
            step.forgotten = True
        self.schedule.clear()
        self._fail(every, self._on_failure(error))

    def _begun(self, step: Step) -> list[OfferedGeneration]:
        """The generations that the cache holds anything of. After a failed step, its contents are unknown."""
        now = {id(chunk.row.generation) for chunk in step.chunks}
        return [one for one in self._admitted if id(one) in now or any(row.computed for row in one.rows)]

    def _has_no_numbers(self, generation: OfferedGeneration) -> None:
        """Handle logits from which this generation has no token, perhaps by its own rules. Others stay cached."""
        if not generation.on_host:
            self.schedule.room.forget_contents_of(generation)
        self._step_failed([generation], [generation], f"{_NO_NUMBERS} for this prompt")

    def _step_failed(
        self, generations: Sequence[OfferedGeneration], in_step: Collection[OfferedGeneration], sentence: str
    ) -> None:
        """Handle a failed step. `generations`: all whose contents in the cache are unknown now. Without a free block
        there is no probe; the next step then shows whether the engine works.
        """
        prompts = [one for one in generations if not any(answer.tokens for answer in one.each_answer)]
        self._fail([one for one in generations if one not in prompts], sentence)
        self._drop(prompts, cut_off=True)
        suspects = [one for one in prompts if one in in_step]
        self._failed += [(one, sentence, suspects == [one]) for one in prompts]
        if self._probe_limit is not None:
            return
        if (work := self._probe_work()) is None:
            self._tell_of_prompts(is_broken=False)
        else:
            limit_s = self.schedule.until_free(self.now()) + PROBE_TIMEOUT_S
            slow = EngineFailed(f"the engine has not computed a few tokens within {PROBE_TIMEOUT_S:g} s")
            self._probe_limit = later(limit_s, partial(self._probed, slow))
            self._run_step(work, self._probed)

    def _probed(self, found: Timed | EngineFailed) -> None:
        """The probe has ended, or has taken too long. In the latter case, it may still end later."""
        if self._probe_limit is not None:
            self._probe_limit.cancel()
        self._probe_limit, self.problem = None, str(found) if isinstance(found, EngineFailed) else None
        if self.problem is not None:
            self.schedule.room.forget_contents()
        self._tell_of_prompts(is_broken=self.problem is not None)

    def _tell_of_prompts(self, *, is_broken: bool) -> None:
        failed, self._failed = self._failed, []
        for prompt, sentence, is_bad in failed:
            self._tell_failed([prompt], sentence, "broken" if is_broken else None if is_bad else "suspect")

    def _fail(self, generations: Sequence[OfferedGeneration], sentence: str) -> None:
        """End these with an error."""
        self._tell_failed(generations, sentence)
        self._drop(generations, cut_off=True)

    def _tell_failed(
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
            self._hang_up(session)
