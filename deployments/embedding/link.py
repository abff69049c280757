"""A Router's connection to one embedding replica: what it sends there, and what becomes of each offer.

A `Link` lasts as long as Serve lists the replica, a `Channel` as long as one connection to it. A `PendingOffer` is an
offer that was sent there.

The link detects a replica that hangs, because its device does not answer or its process was stopped. A replica hangs if
it has begun no run and answered nothing for twice the predicted time for all its work, and for at least half of the
SLO (`replica_view`). Its queries are then overdue (`retries`). The time is predicted from its last state: when the
Router sends it a query and has no other there, and again at each sign of progress. A replica whose connection broke
hangs after the same time, unless it is known by then that it has dropped its queries.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.admission.starvation import UsualTime
from deployments.embedding.frames import Answered, Offer, Offers, Report
from deployments.embedding.view import Ask, View
from deployments.errors import ReplicaLost, WindveError
from deployments.serving.connections import RouterChannel
from deployments.serving.frames import CUT_BYTES, failure_of
from deployments.serving.replica_set import ReplicaLink, ReplicaSet, learned
from deployments.serving.replica_view import hangs_after_s

logger = logging.getLogger("ray.serve")

_LONGEST_TURN_S = 0.002  # a burst keeps a Router's loop busy; the replica must not mistake that for the burst's end


Answers = dict[int, tuple[str, Answered]]
"""By the query's index in its request: the pool that answered, and its answer."""


class Refused(NamedTuple):
    """The replica has no room. `never`: the query would be late there even on an idle device."""

    never: bool = False


class Overdue(Exception):
    """The replica hangs. The offer stands."""


class PendingOffer:
    """Some queries of a request that were offered to one replica, and the outcome.

    - `link`: to that replica. `indices`: of the queries in their request. `predicted_s`: from the offer to the answer.
    - `others`: the replicas to ask if this one has no room, and what to ask of each. Only for a single query.
    - `outcome`: a future. Its result is the answers of the admitted queries, in the order of the offer, or `Refused`.
      It raises EngineFailed or ReplicaLost.
    - `admitted`: for a `partial` offer, a future of how many of its first queries the replica admitted (0 if it refused
      or failed). None for other offers.
    - `sent_at`, `settled_at`: loop time, s.
    - `overdue`: the replica hangs. The former `outcome` has then raised Overdue, and a new future has replaced it.
    """

    __slots__ = (
        "_answers", "_left", "admitted", "indices", "link", "number", "others", "outcome", "overdue", "predicted_s",
        "sent_at", "settled_at", "size", "waits",
    )  # fmt: skip

    link: Link  # set by `Link.offer`, as are the indices
    indices: list[int]

    def __init__(self, offer: Offer, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self.size = offer.number, len(offer.queries)
        self.sent_at = self.settled_at = loop.time()
        self.outcome: asyncio.Future[list[Answered] | Refused] = loop.create_future()
        self.admitted: asyncio.Future[int] | None = loop.create_future() if offer.partial else None
        self.overdue, self.waits = False, offer.bulk  # such an offer never becomes overdue
        self.others: Candidates | None = None
        self.predicted_s = 0.0
        self._answers: list[Answered | None] = [None] * self.size
        self._left = self.size

    def refuse(self, *, never: bool = False) -> None:
        self._settle(Refused(never), admitted=0)

    def admit(self, count: int) -> None:
        if not count:
            self.refuse()
            return
        self._left -= self.size - count
        del self._answers[count:]
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(count)
        self._look()

    def answer(self, one: Answered) -> None:
        if self._answers[one.query] is None:
            self._answers[one.query] = one
            self._left -= 1
        self._look()

    def fail(self, error: Exception) -> None:
        self._settle(error, admitted=0)

    def hang(self) -> None:
        """Mark it overdue: its replica hangs."""
        self.overdue = True
        before, self.outcome = self.outcome, self.outcome.get_loop().create_future()
        _fail(before, Overdue())

    def call_off(self) -> None:
        """Cancel it, if it has not ended, and ignore its outcome."""
        self.outcome.cancel()
        self.link.call_off(self)

    def collect(self, found: Sequence[Answered], answers: Answers) -> None:
        """Add the answers that were found to those of the request."""
        for index, answer in zip(self.indices, found, strict=True):
            answers[index] = self.link.pool.name, answer

    async def ends(self) -> None:
        """Wait for its outcome, whatever it is, or until it is overdue."""
        try:
            await self.outcome
        except (WindveError, Overdue):
            return

    @property
    def ended(self) -> bool:
        return self.outcome.done()

    def _look(self) -> None:
        if not self._left:
            self._settle([answer for answer in self._answers if answer is not None], admitted=len(self._answers))

    def _settle(self, outcome: list[Answered] | Refused | Exception, admitted: int) -> None:
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(admitted)
        if self.outcome.done():
            return  # called off, or settled before
        self.settled_at = self.outcome.get_loop().time()
        if isinstance(outcome, Exception):
            _fail(self.outcome, outcome)
        else:
            self.outcome.set_result(outcome)


def _fail(outcome: asyncio.Future[Any], error: Exception) -> None:
    outcome.set_exception(error)
    outcome.exception()  # retrieved, so that asyncio does not complain if nobody awaits it


class Channel(RouterChannel[Offers, PendingOffer, Report]):
    """A Router's channel to an embedding replica. A turn of the event loop that takes longer than 2 ms, or sends more
    than 16 MiB, is cut into several frames. Offers that are pending when the connection ends may still run on the
    replica.
    """

    outgoing, incoming = Offers, Report

    def offer(self, offer: Offer) -> PendingOffer:
        """Give the offer a number and send it."""
        self._numbers += 1
        offer.number = self._numbers
        pending = self.pending[self._numbers] = PendingOffer(offer, self._loop)
        self._outgoing().offers.append(offer)
        self._out_bytes += sum(query.nbytes for query in offer.queries)
        if pending.sent_at > self._out_since + _LONGEST_TURN_S or self._out_bytes > CUT_BYTES:
            self._flush()
        return pending

    def confirm(self, pending: PendingOffer) -> None:
        """Tell the replica that the rest of the request is admitted, too."""
        if self.pending.get(pending.number) is pending:
            self._outgoing().confirmed.append(pending.number)

    def note_refused(self, work: float, tenant: Tenant | None = None, lengths: Sequence[int] = ()) -> None:
        """Tell the replica, with the next frame, that the Router refused this much work of that tenant without asking,
        in queries of these lengths.
        """
        out = self._out
        out.refused_s[tenant] = out.refused_s.get(tenant, 0.0) + work
        sizes = out.refused_sizes
        for tokens in lengths:
            sizes[tokens] = sizes.get(tokens, 0) + 1

    def hear(self, report: Report) -> None:
        self._on_report(report)
        for number, never in report.refused:
            if (pending := self.pending.pop(number, None)) is not None:
                pending.refuse(never=never)
        for number, count in report.admitted:
            if (pending := self.pending.get(number)) is not None:
                pending.admit(count)
                self._drop_ended(pending)
        for number, problem in report.failed:
            if (pending := self.pending.pop(number, None)) is not None:
                pending.fail(failure_of(report, number, problem))
        for one in chain(*report.answered):
            if (pending := self.pending.get(one.number)) is not None:
                pending.answer(one)
                self._drop_ended(pending)

    def _drop_ended(self, pending: PendingOffer) -> None:
        if pending.ended:
            self.pending.pop(pending.number, None)


class Link(ReplicaLink[View, Channel]):
    """A link to an embedding replica. Lost queries are offered again, so they must not run twice (see the base)."""

    view_type = View
    may_run_on = True
    at_work = "the query was on it"

    _progress_at: float  # loop time; set with the first report, like the next two
    _needs_s: float
    hangs: bool

    def __init__(self, pool: ReplicaSet[Any], replica: str, about: Mapping[str, Any], rank: tuple[bool, int]) -> None:
        super().__init__(pool, replica, about, rank)
        self.answered = 0  # queries
        self.bulk_parts = 0  # parts of bulk requests that are there now
        self.bulk_again_at = 0.0  # it had no room for bulk queries; do not ask again before
        self._usual = UsualTime()

    @property
    def by_count(self) -> bool:
        """Whether the replica admits by depth (Algorithm 1)."""
        return bool(self.pool.policy.get("admission") == "depth")

    def offer(self, offer: Offer, indices: list[int]) -> PendingOffer:
        """Send the offer, of the queries with these indices. Call it only while `is_live`."""
        assert self._channel is not None
        is_first = not self._channel.pending
        pending = self._channel.offer(offer)
        pending.link, pending.indices = self, indices
        cost = self.view.model.work(map(len, offer.queries))
        self.view.sent(self._channel.frames, len(offer.queries), cost)
        if is_first:
            self._note_progress()
        if not pending.waits:
            self._count_time(offer.left_s)
        if not self._watching:
            self._watch()
        return pending

    def confirm(self, pending: PendingOffer) -> None:
        """Tell the replica that all parts of the request are admitted, so that it need not delay its next run."""
        if self._channel is not None:
            self._channel.confirm(pending)

    def refuse_here(self, lengths: Sequence[int], allowed_s: float, tenant: Tenant | None) -> None:
        """Note that queries of these lengths were refused without asking the replica. The next frame tells it about
        those that it would admit if it were idle, and about their sizes unless they have clearly less time than usual.
        """
        if self._channel is None:
            return
        model, most = self.view.model, math.inf if self.by_count else self.view.idle_room(allowed_s)
        if lengths := [tokens for tokens in lengths if model.cost(tokens) <= most]:
            is_tight = self._count_time(allowed_s)
            self._channel.note_refused(model.work(lengths), tenant, () if is_tight else lengths)

    def _count_time(self, left_s: float) -> bool:
        """Count the time to a deadline, of which no more than the SLO counts. Returns whether it is less than usual."""
        slo_s: float = self.pool.policy["slo_s"]
        return self._usual.count(min(left_s, slo_s))

    def describe(self) -> dict[str, Any]:
        """The replica as `/info` shows it."""
        state = self.view.state
        assert state is not None
        return {
            **super().describe(),
            "queries": self.answered,
            "in_flight": state.in_flight,
            "waiting": state.waiting,
            "most_in_flight": state.most,
            "batches": state.runs,
            **learned(state),
            "refusals": dict(zip(("full", "never", "closed"), state.refusals, strict=True)),
        }

    # --- progress -----------------------------------------------------------------------------------------------------

    def _hear(self, report: Report) -> None:
        runs = self.view.state.runs if self.view.state is not None else None
        super()._hear(report)
        answers = report.answers
        self.answered += answers
        self.view.outlier.count(worked=answers + len(report.suspect), failed=len(report.broken))
        if answers or report.state.runs != runs:
            self._note_progress()

    def _note_progress(self) -> None:
        self._progress_at, self.hangs = asyncio.get_running_loop().time(), False
        self._needs_s = self.view.finish_s(self._progress_at, ())

    @property
    def _is_waiting(self) -> bool:
        return super()._is_waiting or (self._channel is not None and bool(self._channel.pending))

    @property
    def _hangs_at(self) -> float:
        slo_s: float = self.pool.policy["slo_s"]
        return self._progress_at + hangs_after_s(self._needs_s, slo_s)

    def _watch(self) -> None:
        if self._channel is not None and asyncio.get_running_loop().time() > self._hangs_at:
            self._give_up(self._channel.pending.values())
        super()._watch()

    def _on_lost(self, left: list[PendingOffer]) -> None:
        super()._on_lost(left)
        if self._suspect:
            loop = asyncio.get_running_loop()
            loop.call_at(self._hangs_at, self._give_up, left, context=contextvars.Context())

    def _give_up(self, offers: Iterable[PendingOffer]) -> None:
        """The replica hangs: queries that it has admitted become overdue, and undecided ones are lost."""
        if not (left := [one for one in offers if not (one.waits or one.overdue or one.ended)]):
            return
        quiet_s = asyncio.get_running_loop().time() - self._progress_at
        who = f"the {self.pool.name} pool's replica {self.view.replica}"
        if not self.hangs:
            self.hangs = True
            logger.warning(
                "%s has answered nothing for %.1f s, and needed %.1f s: its queries are offered elsewhere",
                who, quiet_s, self._needs_s,
            )  # fmt: skip
        for pending in left:
            if pending.admitted is None or pending.admitted.done():
                pending.hang()
            else:
                self.call_off(pending)
                pending.fail(ReplicaLost(f"{who} makes no progress; try again"))


Candidates = Iterator[tuple[Link, Ask]]
"""The replicas to ask, in order, and what to ask of each."""
