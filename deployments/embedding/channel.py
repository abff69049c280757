"""A Router's end of a connection to an embedding replica, and what became of each offer. Pure asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from deployments.admission.fair_share import Tenant
from deployments.embedding.frames import Answered, Offer, Offers, Report
from deployments.errors import WindveError
from deployments.serving.channel import RouterChannel
from deployments.serving.frames import CUT_BYTES, failure_of

_LONGEST_TURN_S = 0.002  # a burst keeps a Router's loop busy; the replica must not mistake that for the burst's end


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica has no room. `never`: the query would be late there even on an idle device."""

    never: bool = False


class Overdue(Exception):
    """The replica hangs. The offer stands."""


class PendingOffer:
    """An offer that was sent, and its outcome.

    - `outcome`: a future. Its result is the answers of the admitted queries, in the order of the offer, or `Refused`.
      It raises EngineFailed or ReplicaLost.
    - `admitted`: for a `partial` offer, a future of how many of its first queries the replica admitted (0 if it refused
      or failed). None for other offers.
    - `sent_at`, `settled_at`: loop time, s.
    - `overdue`: the replica hangs. The former `outcome` has then raised Overdue, and a new future has replaced it.
    """

    __slots__ = (
        "_answers", "_left", "admitted", "number", "outcome", "overdue", "sent_at", "settled_at", "size", "waits"
    )  # fmt: skip

    def __init__(self, offer: Offer, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self.size = offer.number, len(offer.queries)
        self.sent_at = self.settled_at = loop.time()
        self.outcome: asyncio.Future[list[Answered] | Refused] = loop.create_future()
        self.admitted: asyncio.Future[int] | None = loop.create_future() if offer.partial else None
        self.overdue, self.waits = False, offer.bulk  # such an offer never becomes overdue
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

    def forget(self) -> None:
        """Ignore its outcome."""
        self.outcome.cancel()

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
