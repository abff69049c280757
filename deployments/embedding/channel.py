"""A Router's end of a connection to an embedding replica, and what became of each offer. Pure asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.admission.fair_share import Tenant
from deployments.embedding.frames import Answered, Offer, Offers, Report
from deployments.serving.channel import RouterChannel
from deployments.serving.frames import CUT_BYTES, failure_of

_LONGEST_TURN_S = 0.002  # a burst keeps a Router's loop busy for long: a replica must not take that for a pause


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica has no room; `never`: such a query would not end in time there on an idle device either."""

    never: bool = False


class Overdue(Exception):
    """The replica hangs; the offer stands."""


class PendingOffer:
    """What became of an offer.

    `outcome`: a future of the answers of the admitted queries, in the order of the offer, or of `Refused`; it raises
    EngineFailed or ReplicaLost. `admitted`: of a `partial` offer, a future of how many of its first queries the replica
    admitted (0 where it refused or failed); None of any other offer. `sent_at`, `settled_at`: loop time, s. `overdue`:
    the replica hangs; then `outcome` is another future, and the one before has raised Overdue.
    """

    __slots__ = (
        "_answers", "_left", "admitted", "number", "outcome", "overdue", "sent_at", "settled_at", "size", "waits"
    )  # fmt: skip

    def __init__(self, offer: Offer, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self.size = offer.number, len(offer.queries)
        self.sent_at = self.settled_at = loop.time()
        self.outcome: asyncio.Future[list[Answered] | Refused] = loop.create_future()
        self.admitted: asyncio.Future[int] | None = loop.create_future() if offer.partial else None
        self.overdue, self.waits = False, offer.bulk or offer.trial  # such an offer is in no hurry
        self._answers: list[Answered | None] = [None] * self.size
        self._left = self.size

    @property
    def never(self) -> bool:
        """It is refused, and would be on an idle device, too."""
        if not self.outcome.done() or self.outcome.cancelled() or self.outcome.exception() is not None:
            return False
        outcome = self.outcome.result()
        return isinstance(outcome, Refused) and outcome.never

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
        """The replica hangs, and has admitted it."""
        self.overdue = True
        before, self.outcome = self.outcome, self.outcome.get_loop().create_future()
        before.set_exception(Overdue())
        before.exception()  # seen: perhaps nobody looks at it just now

    def forget(self) -> None:
        """Nobody looks at its outcome."""
        if not self.outcome.cancel() and not self.outcome.cancelled():
            self.outcome.exception()  # seen, so that asyncio does not complain

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
            return  # nobody waits any more
        self.settled_at = self.outcome.get_loop().time()
        if isinstance(outcome, Exception):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class Channel(RouterChannel[Offers, PendingOffer, Report]):
    """As its base says. A turn of the event loop that takes longer than 2 ms, or sends more than 16 MiB, is cut into
    several frames. What is pending when the connection ends may still run on the replica.
    """

    outgoing, incoming = Offers, Report

    def offer(self, offer: Offer) -> PendingOffer:
        """Send it, with a number of its own."""
        self._numbers += 1
        offer.number = self._numbers
        pending = self.pending[self._numbers] = PendingOffer(offer, self._loop)
        self._outgoing().offers.append(offer)
        self._out_bytes += sum(query.nbytes for query in offer.queries)
        if pending.sent_at > self._out_since + _LONGEST_TURN_S or self._out_bytes > CUT_BYTES:
            self._flush()
        return pending

    def confirm(self, pending: PendingOffer) -> None:
        """The rest of its request is admitted, too."""
        if self.pending.get(pending.number) is pending:
            self._outgoing().confirmed.append(pending.number)

    def note_refused(self, work_s: float, tenant: Tenant | None = None, lengths: Sequence[int] = ()) -> None:
        """With the next frame: so much work of that tenant was refused here without asking, in queries of so many
        tokens each.
        """
        out = self._out
        out.refused_s[tenant] = out.refused_s.get(tenant, 0.0) + work_s
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
        for one in report.answered:
            if (pending := self.pending.get(one.number)) is not None:
                pending.answer(one)
                self._drop_ended(pending)

    def _drop_ended(self, pending: PendingOffer) -> None:
        if pending.ended:
            self.pending.pop(pending.number, None)
