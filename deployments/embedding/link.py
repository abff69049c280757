"""A Router's connection to one embedding replica, and what it sends there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deployments.admission.fair_share import Tenant
from deployments.embedding.channel import Channel, PendingOffer
from deployments.embedding.frames import Offer, Report
from deployments.embedding.view import View
from deployments.serving.replica_link import ReplicaLink, learned

if TYPE_CHECKING:
    from deployments.embedding.pool import Pool

_ANSWERS_S = 0.5  # a replica that takes longer for its state is shown by its last


class Link(ReplicaLink[View, Channel]):
    """A query whose replica was lost is offered again: it must not run twice at the same time (see the base)."""

    view_type = View
    may_run_on = True
    at_work = "the query was on it"

    _pool: Pool

    def __init__(self, pool: Pool, replica: str, about: Mapping[str, Any], rank: tuple[bool, int]) -> None:
        super().__init__(pool, replica, about, rank)
        self.answered = 0  # queries
        self.bulk_parts = 0  # of bulk requests, there now
        self.bulk_again_at = 0.0  # it had no room for bulk queries, and is not asked before
        self._asking: list[asyncio.Future[None]] = []

    def offer(self, offer: Offer) -> PendingOffer:
        """Send the offer. Only while `is_live`."""
        assert self._channel is not None
        pending = self._channel.offer(offer)
        cost_s = self.view.model.work_s(map(len, offer.queries))
        self.view.sent(self._channel.frames, len(offer.queries), cost_s)
        if not self._watching:
            self._watch()
        return pending

    def call_off(self, pending: PendingOffer) -> None:
        """As the base does; nobody looks at its outcome."""
        pending.forget()
        if self._channel is not None:
            self._channel.call_off(pending)

    def confirm(self, pending: PendingOffer) -> None:
        """All parts of its request are admitted: the replica may run the queries that it holds."""
        if self._channel is not None:
            self._channel.confirm(pending)

    def refuse_here(self, work_s: float, tenant: Tenant | None) -> None:
        """A query of so much work is refused without asking the replica, which is told with the next frame."""
        if self._channel is not None:
            self._channel.note_refused(work_s, tenant)

    def describe(self) -> dict[str, Any]:
        """As `/info` shows it."""
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

    async def ask_state(self) -> None:
        """Return when the replica has told how it is, or does not answer."""
        if self._channel is not None:
            self._channel.ask()
            heard = asyncio.get_running_loop().create_future()
            self._asking.append(heard)
            await asyncio.wait([heard], timeout=_ANSWERS_S)

    def _hear(self, report: Report) -> None:
        super()._hear(report)
        self._pool.heard(self)
        self.answered += len(report.answered)
        for heard in self._asking:
            if not heard.done():
                heard.set_result(None)
        self._asking.clear()
