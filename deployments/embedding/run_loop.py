"""The main loop of an embedding replica: admits queries that Routers offer, starts runs, and answers after each pass.

`Scheduler` decides; `compute`, an argument, runs the engine. Nothing is stored outside the replica. If the replica
dies, its queries are lost, and the Routers offer them again elsewhere. If a Router's connection ends, the replica drops
the Router's waiting queries. Imports neither ray nor torch; tests and simulations run it in virtual time.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import numpy as np

from deployments.admission.fair_share import Tenant
from deployments.embedding.frames import Offer, Offers, PassAnswers, Report
from deployments.embedding.run import EngineQuery, Indices, OfferedQuery, QuerySession, Run
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.limits import is_deferrable
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy, ReplicaState
from deployments.engines import Stopped
from deployments.errors import EngineFailed
from deployments.models.outputs import Numbers
from deployments.serving.frames import FailureKind, add_failure, known
from deployments.serving.planned_runs import PlannedRuns, Timed
from deployments.serving.sessions import Connection, RouterSessions, later

logger = logging.getLogger("ray.serve")

_QUICKER = 2.0  # a device this many times as fast as the pool's model ignores that model and its depth
_LATE_S = 0.002  # a timer that fires later than this was delayed by a busy loop

Passed = Callable[[Indices, Iterable[Numbers], Numbers], None]
"""Called on the loop after each pass: the indices of its queries in the run, the numbers of each answer, and the norm
of each vector, float32 [queries]. A norm that is not finite marks numbers that are not all finite."""
Ended = Callable[[BaseException | None], None]
"""Called on the loop when the run has ended, after its passes, with the error if it failed."""
Compute = Callable[[Sequence[EngineQuery], Passed, Ended, threading.Event], None]
"""Begins a run of these queries; the previous run has ended. The event asks the run to stop."""


_NO_NUMBERS = "it gave no finite numbers"
_NO_TIME = "the engine failed at another query of the same batch, and there is no time left to retry this one"


class RunLoop(RouterSessions[QuerySession, Report]):
    """Runs the engine for Routers. All methods are called on the event loop."""

    _answered: EngineQuery | None = None  # the last query that was answered

    session_type = QuerySession
    report_type = Report

    def __init__(
        self,
        schedule: Scheduler[OfferedQuery],
        compute: Compute,
        *,
        on_run: Callable[[int, int, float, float], None] = lambda *_: None,  # queries, tokens, seconds, planned seconds
        on_failure: Callable[[BaseException], str] = str,  # logs the error; returns the message for clients
        on_policy: Callable[[Scheduler[OfferedQuery]], None] = lambda _: None,  # called after a new policy or model
        clock: Callable[[], float] = time.monotonic,  # the loop's own clock counts whole milliseconds
    ) -> None:
        super().__init__(clock)
        self.schedule = schedule
        self._measured = schedule.limits.model
        self._compute, self._on_run, self._on_failure, self._on_policy = compute, on_run, on_failure, on_policy
        self._run: Run | None = None
        self._planned_since: float | None = None  # when the engine began with a planned run
        self.planned = PlannedRuns[Sequence[EngineQuery]](self, self.time_run)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def warmed_up(self, query: EngineQuery) -> None:
        """Note a query that the engine answered during warm-up."""
        self._answered = query

    def state(self) -> ReplicaState:
        """The replica's state now, as it reports it to Routers."""
        state = self.schedule.state(self.now())._replace(routers=len(self._sessions))
        return state.closed_for(self.planned.left_s) if self.planned.is_on else state

    def utilization(self) -> float:
        """How full the queue is, as a share of the SLO or of the depth; may exceed 1."""
        return self.schedule.utilization(self.now())

    @property
    def running_s(self) -> float:
        """Seconds that the engine has been in its current run; 0 while it is idle."""
        since = self._planned_since if self._run is None else self._run.since
        return 0.0 if since is None else self.now() - since

    @property
    def is_busy(self) -> bool:
        """Whether any admitted query is unanswered."""
        return self.schedule.in_flight > 0

    # --- frames from Routers ------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, offers: Offers) -> None:
        """Handle a Router's frame."""
        now = self.now()
        session = self._session(connection)
        session.seen += 1
        if offers.settings is not None:
            self._configure(session, offers.settings)
        for tenant, work in offers.refused_s.items():
            self.schedule.demand.arrives(now, work, tenant)
        for tokens, count in offers.refused_sizes.items():
            self.schedule.demand.refused(now, self.schedule.limits.model.cost(tokens), count)
        called_off = set(offers.called_off)
        if called_off:  # all at once: a client that disconnects may call off thousands
            self._drop([query for number in called_off for query in session.admitted.pop(number, {}).values()])
        for number in offers.confirmed:
            self.schedule.release((session, number))
        if offers.offers:
            # An offer may be made and called off in one turn.
            self._take(session, [offer for offer in offers.offers if offer.number not in called_off], now)
        if offers.asks:
            session.asks = True
            self.report_soon()
        self._look()

    def gone(self, connection: Connection) -> None:
        """A Router's connection has ended: drop its waiting queries. Its running queries end unheard."""
        session = self._sessions.pop(connection, None)
        if session is not None:
            self._drop([query for queries in session.admitted.values() for query in queries.values()])
            session.admitted.clear()
            self._look()
            self._idle.set()

    def _configure(self, session: QuerySession, settings: dict[str, Any]) -> None:
        """Apply a Router's settings. It sends them when it connects and whenever its config changes. A Router of an
        adjacent version may send more or fewer of them.
        """
        self._identify(session, settings["router"])
        policy = Policy(**{name: value for name, value in settings.items() if name in Policy.__match_args__})
        model = None if settings.get("model") is None else known(CostModel, settings["model"])
        if model is not None and policy.admission == "deadline" and self._measured.alpha_s * _QUICKER < model.alpha_s:
            # This device differs from the calibrated ones. A depth of 0 still closes it.
            model, policy = None, replace(policy, depth=policy.depth and None)
        self.schedule.configure(policy, model or self._measured, calibrated=model is not None)
        self._on_policy(self.schedule)
        self._tell_of_room()  # Routers that believe it closed would not ask again

    def _take(self, session: QuerySession, offers: Sequence[Offer], now: float) -> None:
        """Decide on offers in their order: on single queries of one kind together if they surely have room, else on
        each offer.
        """
        if self.planned.is_on:
            self.schedule.refusals.closed += sum(len(offer.queries) for offer in offers)
            self._tell(session).refused += [(offer.number, False) for offer in offers]
            return
        each = [(offer, self._queries(session, offer, now)) for offer in offers]
        for kind, some in groupby(each, _kind):
            alike = list(some)
            if kind is None or not self._decide_each(session, alike, now, again=kind[0]):
                for offer, queries in alike:
                    self._decide(session, offer, queries, now)

    def _queries(self, session: QuerySession, offer: Offer, now: float) -> list[OfferedQuery]:
        policy, due = self.schedule.limits.policy, now + offer.left_s
        deferrable = offer.bulk or is_deferrable(policy.admission, policy.slo_s, offer.left_s)
        return [
            OfferedQuery(
                len(ids),
                due,
                deferrable,
                offer.bulk,
                offer.tenant,
                session=session,
                number=offer.number,
                index=index,
                ids=ids,
                outputs=offer.outputs,
            )
            for index, ids in enumerate(offer.queries)
        ]

    def _decide_each(self, session: QuerySession, offers: Sequence[_Offered], now: float, *, again: bool) -> bool:
        """Admit single queries together. Returns False, and has decided nothing, if they may lack room."""
        try:
            if not self.schedule.offer_each(now, [query for _, (query,) in offers], again=again):
                return False
        except Exception as error:  # noqa: BLE001 - whatever it is, these queries must end
            self._undecided(session, offers, error)
        else:
            session.admitted.update((offer.number, {0: query}) for offer, (query,) in offers)
        return True

    def _decide(self, session: QuerySession, offer: Offer, queries: list[OfferedQuery], now: float) -> None:
        try:
            count = self.schedule.offer(now, queries, partial=offer.partial, again=offer.again)
        except Exception as error:  # noqa: BLE001 - whatever it is, these queries must end
            self._undecided(session, [(offer, queries)], error)
            return
        if count:
            session.admitted[offer.number] = dict(enumerate(queries[:count]))
        if offer.partial and count:
            self._tell(session).admitted.append((offer.number, count))
            if count < len(queries) and not offer.bulk:
                self.schedule.hold(now, (session, offer.number))
        elif not count:
            never = self.schedule.admission.never(max(q.cost for q in queries), offer.left_s)
            self._tell(session).refused.append((offer.number, never))

    def _undecided(self, session: QuerySession, offers: Sequence[_Offered], error: Exception) -> None:
        logger.error("offers could not be decided on", exc_info=error)
        for offer, queries in offers:
            self._drop(queries)
            self._tell(session).failed.append((offer.number, f"the replica failed to decide: {error}"))

    def _drop(self, queries: Sequence[OfferedQuery]) -> None:
        """Drop queries that nobody wants. Waiting ones free their room at once. A run with no others is stopped."""
        for query in queries:
            query.gone = True
            self.schedule.release((query.session, query.number))
        waiting, run = self.schedule.queue.count, self._run
        self.schedule.remove(queries)
        if run is not None and not run.blamed and all(run.queries[index].gone for index in run.left):
            run.stop.set()
        if self.schedule.queue.count < waiting:
            self._tell_of_room()
        self._wake()

    def _tell_of_room(self) -> None:
        """Report to each Router if the replica opens earlier than it was told."""
        now = self.now()
        told = [session for session in self._sessions.values() if session.reported_opens_at > now]
        if told:
            opens_at = now + max(self.planned.left_s, self.schedule.opens_s(now))
            for session in told:
                if session.reported_opens_at > opens_at + _LATE_S:
                    self._tell(session)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Start the next run if it may start now, or set a timer for it."""
        now = self.now()
        wait_s = self.schedule.start_in_s(now)
        if wait_s is None:
            return
        if wait_s > 0:
            if self._timer is None or now + wait_s < self._timer_due:
                self._arm(wait_s)  # calls `_look` again
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        queries = self.schedule.start(now)
        tokens = sum(query.tokens for query in queries)
        run = self._run = Run(queries, now, tokens)
        # An empty context, so that the run is not tied to the current call.
        contextvars.Context().run(self._begin, run, queries)

    def _begin(self, run: Run, queries: Sequence[EngineQuery]) -> None:
        group = np.array(run.group, np.intp) if run.again else None
        check_problem: BaseException | None = None

        def passed(indices: Indices, answers: Iterable[Numbers], norms: Numbers) -> None:
            nonlocal check_problem
            if self._run is run and run.group:
                self._passed(run, indices if group is None else group[indices], answers, norms)
            elif not np.all(np.isfinite(norms)):
                check_problem = RuntimeError(_NO_NUMBERS)

        def ended(problem: BaseException | None) -> None:
            if self._run is run:
                self._ended(run, problem or check_problem)

        try:
            self._compute(queries, passed, ended, run.stop)
        except Exception as error:  # noqa: BLE001 - whatever it is, its queries must end
            asyncio.get_running_loop().call_soon(ended, error)

    async def time_run(self, queries: Sequence[EngineQuery]) -> Timed:
        """Run queries that nobody offered, while nothing else runs. Raises EngineFailed."""
        done: asyncio.Future[Timed] = asyncio.get_running_loop().create_future()
        began = self._planned_since = self.now()
        finite = True

        def passed(_: Indices, __: Iterable[Numbers], norms: Numbers) -> None:
            nonlocal finite
            finite = finite and bool(np.all(np.isfinite(norms)))

        def ended(problem: BaseException | None) -> None:
            self._planned_since = None
            if problem is None and not finite:
                problem = RuntimeError(_NO_NUMBERS)
            if done.done():
                pass  # cancelled
            elif problem is None:
                done.set_result(Timed(self.now() - began))
            else:
                done.set_exception(EngineFailed(self._on_failure(problem)))

        self._compute(queries, passed, ended, threading.Event())
        return await done

    def _arm(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = self.now() + wait_s
        self._timer = later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # A loop that was too busy to fire in time may have unread arrivals in its sockets, so the burst may go on. Look
        # again after they have been read.
        if self.now() - self._timer_due > _LATE_S:
            later(0, self._look)
        else:
            self._look()

    def _ended(self, run: Run, problem: BaseException | None) -> None:
        """The engine has ended the run, or one of the runs that bisect it."""
        if problem is None and run.left and (left := run.waiting(run.group)):
            problem = RuntimeError(f"the engine left {len(left)} of {len(run.group)} queries unanswered")
        if isinstance(problem, Stopped):
            self._over(whole=False)
        elif problem is not None or run.again or run.blamed:
            if problem is not None:
                self._look_into(run, problem)
            elif not run.group:
                self._is_well(run)
            elif run.blamed:
                self._check(run)
            self._run_again(run)
        else:
            try:
                self._on_run(len(run.queries), run.tokens, self.now() - run.began, self.schedule.planned_s)
            except Exception:  # a failure to count a run must not end the loop
                logger.exception("a run was not counted")
            self._over(whole=True)

    def _over(self, *, whole: bool) -> None:
        self._run = None
        self.schedule.ended(self.now(), whole=whole)
        self._tell_of_room()
        self._wake()
        self._look()

    def _look_into(self, run: Run, problem: BaseException) -> None:
        """The run, or a group that ran again, has failed."""
        if not run.group:  # the check
            self.problem = run.sentence = run.sentence or self._sentence(problem)
            run.groups.clear()
        elif (alone := run.split(has_answered=self._answered is not None)) is not None:
            run.blamed[self._sentence(problem)].append(run.queries[alone])
        elif not run.again:
            run.sentence = self._sentence(problem)

    def _check(self, run: Run) -> None:
        """Schedule the check: answers were not finite, and nothing has shown since that the engine works."""
        if self._answered is None:
            run.sentence = self._sentence(RuntimeError(_NO_NUMBERS))
        else:
            run.groups.appendleft(())

    def _is_well(self, run: Run) -> None:
        """The engine has answered something, so the blamed queries fail with their own errors."""
        self.problem = None
        while run.blamed:
            sentence, queries = run.blamed.popitem()
            self._fail(queries, sentence)

    def _run_again(self, run: Run) -> None:
        """Run the next group, or end the run after the last one."""
        if self._gives_way(run):
            run.give_way()
        if run.next_group(now := self.now()):
            run.since = now
            answered = [] if self._answered is None else [self._answered]
            contextvars.Context().run(self._begin, run, [run.queries[index] for index in run.group] or answered)
            return
        left = [*chain(*run.blamed.values()), *(run.queries[index] for index in run.waiting(run.left))]
        is_well = self.problem is None and self._answered is not None
        kind: FailureKind = "suspect" if is_well else "broken"
        self._fail([query for query in left if query.due > now or not is_well], run.sentence, kind)
        self._fail([query for query in left if query.due <= now], _NO_TIME)
        self._over(whole=False)

    def _gives_way(self, run: Run) -> bool:
        """Whether waiting urgent queries would otherwise be late, and are due before everything left in the run."""
        urgent, predictor = self.schedule.queue.urgent, self.schedule.limits.predictor
        if not urgent or self.now() + predictor.seconds(self.schedule.queue.urgent_work) <= urgent[0].due:
            return False
        return all(run.queries[index].due > urgent[0].due for index in run.waiting(run.left))

    def _sentence(self, problem: BaseException) -> str:
        return self._on_failure(problem).encode(errors="replace").decode()  # UTF-8 has no lone surrogates

    def _fail(self, queries: Iterable[OfferedQuery], sentence: str, kind: FailureKind | None = None) -> None:
        """Fail the whole offers of these queries: their other queries are useless now. `kind`: see `Failures`."""
        lost = list[OfferedQuery]()
        for session, number in {(query.session, query.number) for query in queries}:
            if (failed := session.admitted.pop(number, None)) is not None:
                lost += failed.values()
                add_failure(self._tell(session), number, sentence, kind)
        self._drop(lost)

    def _passed(self, run: Run, indices: Indices, answers: Iterable[Numbers], norms: Numbers) -> None:
        now = self.now()
        queries = [run.queries[index] for index in indices]
        run.left.difference_update(indices.tolist())
        self.schedule.passed(now, queries)
        finite = np.isfinite(norms)
        if not finite.all():
            bad = [queries[at] for at in np.flatnonzero(~finite)]
            run.blamed["the engine gave no finite numbers for this input"] += bad
            if not finite.any():
                return
        self._is_well(run)
        wanted: dict[QuerySession, list[int]] = {}
        for at, query in enumerate(queries):
            if not query.gone:
                wanted.setdefault(query.session, []).append(at)
        rows = answers if isinstance(answers, np.ndarray) else list(answers)
        for session, ats in wanted.items():
            found = self._answers(run, now, [queries[at] for at in ats], [rows[at] for at in ats], norms[ats])
            self._tell(session).answered.append(found)

    def _answers(
        self, run: Run, now: float, queries: Sequence[OfferedQuery], rows: Sequence[Numbers], norms: Numbers
    ) -> PassAnswers:
        """The answers to these queries of one session, which end."""
        for query in queries:
            query.gone = True
            left = query.session.admitted[query.number]
            del left[query.index]
            if not left:
                del query.session.admitted[query.number]
        self._answered = queries[-1]
        return PassAnswers(
            [query.number for query in queries],
            [query.index for query in queries],
            norms.tolist(),
            [run.began - query.admitted_at for query in queries],
            list(map(len, rows)), np.concatenate(rows, dtype=np.float32),
            now - run.began, len(run.queries), run.tokens,
        )  # fmt: skip

    # --- reports to Routers -------------------------------------------------------------------------------------------

    def _should_report(self, session: QuerySession, opens_at: float) -> bool:  # noqa: ARG002 - see `_tell_of_room`
        return session.asks and not self._has_orphaned_run(session)

    def _has_orphaned_run(self, session: QuerySession) -> bool:
        """Whether queries from an earlier connection of the same Router still run. Until they end, the replica does not
        answer the Router's `asks`, or the Router would offer them elsewhere.
        """
        return self._run is not None and any(
            query.session is not session and query.session.name == session.name
            for query in (self._run.queries[index] for index in self._run.left)
        )

    def _wake(self) -> None:
        self._idle.set()
        if any(session.asks for session in self._sessions.values()):
            self.report_soon()


_Offered = tuple[Offer, list[OfferedQuery]]


def _kind(offered: _Offered) -> tuple[bool, Tenant | None] | None:
    """What urgent single queries that are decided on together have in common. None: decide on this offer by itself."""
    offer, queries = offered
    by_itself = len(queries) != 1 or queries[0].deferrable or offer.partial
    return None if by_itself else (offer.again, offer.tenant)
