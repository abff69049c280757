"""A Router's connection to one replica, and what became of what was sent there."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

from deployments.admission.fair_share import Tenant
from deployments.embedding.channel import Channel, PendingOffer
from deployments.embedding.frames import Offer, Report
from deployments.embedding.view import QUIET_S, View
from deployments.errors import ReplicaLost
from deployments.serving.replica_set import FIRST_RETRY_S, LAST_RETRY_S, connected

if TYPE_CHECKING:
    from deployments.embedding.pool import Pool

_HUNG_S = 1.5  # in which a replica that is counted out gives its state, if it lives
_ANSWERS_S = 0.5  # a replica that takes longer for its state is shown by its last


class Link:
    """A Router's connection to one replica. It reconnects until Serve says that the replica has gone.

    When a connection breaks, its pending offers become suspect: they may still run on the replica. A suspect offer
    fails with ReplicaLost when one of these is known, and not before, so that no query runs twice at the same time:

    - the replica is reached again and reports: it has then dropped the offers of the old connection
    - nothing listens at the replica's port: its process is dead
    - Serve says that the replica is dead
    """

    def __init__(self, pool: Pool, replica: str, about: Mapping[str, Any], rank: tuple[bool, int]) -> None:
        self.view = View(replica, rank)
        self.about = about
        self.answered = 0  # queries
        self.bulk_parts = 0  # of bulk requests, there now
        self.bulk_again_at = 0.0  # it had no room for bulk queries, and is not asked before
        self._pool = pool
        self._channel: Channel | None = None
        self._suspect: list[PendingOffer] = []
        self._asking: list[asyncio.Future[None]] = []
        self._watching = False
        self._wait_s = 0.0  # before the next attempt to connect
        self._task = pool.spawn(self._connect())

    @property
    def is_live(self) -> bool:
        """It is connected, and the replica has reported its state."""
        return self._channel is not None and self.view.state is not None

    def offer(self, offer: Offer) -> PendingOffer:
        """Send the offer. Only while `is_live`."""
        assert self._channel is not None
        pending = self._channel.offer(offer)
        cost_s = self.view.model.work_s(map(len, offer.queries))
        self.view.sent(self._channel.frames, len(offer.queries), cost_s)
        if not self._watching:
            self._watch()
        return pending

    def _watch(self) -> None:
        """Ask for its state while it says nothing of what it was sent."""
        self._watching = self._channel is not None and not self.view.has_read_all
        if self._channel is None or not self._watching:
            return
        loop = asyncio.get_running_loop()
        if self.view.should_be_asked(loop.time()):
            self.view.asked(loop.time())
            self._channel.ask()
        loop.call_later(QUIET_S, self._watch, context=contextvars.Context())

    def call_off(self, pending: PendingOffer) -> None:
        """Nobody wants its outcome any more: the replica frees its room. Does nothing to an offer that has ended."""
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

    def configure(self) -> None:
        """Send the pool's policy to the replica."""
        if self._channel is not None:
            self._channel.configure(self._pool.policy)

    def describe(self) -> dict[str, Any]:
        """As `/info` shows it; the channel's secret stays here."""
        state = self.view.state
        assert state is not None
        return {
            **self.about,
            "channel": f"port {self.about['channel']['port']}",
            "queries": self.answered,
            "in_flight": state.in_flight,
            "waiting": state.waiting,
            "most_in_flight": state.most,
            "runs": state.runs,
            "opens_s": state.opens_s if math.isfinite(state.opens_s) else None,
            "factor": round(state.factor, 4),
            "margin": round(state.margin, 4),
            "refusals": dict(zip(("full", "never", "closed"), state.refusals, strict=True)),
        }

    async def ask_state(self) -> None:
        """Return when the replica has told how it is, or does not answer."""
        if self._channel is not None:
            self._channel.ask()
            heard = asyncio.get_running_loop().create_future()
            self._asking.append(heard)
            await asyncio.wait([heard], timeout=_ANSWERS_S)

    def end(self) -> None:
        """Serve says that the replica has gone: dead, or drained."""
        self._task.cancel()
        if self._channel is not None:
            left, self._channel.pending = list(self._channel.pending.values()), {}
            self._channel.close()
            self._channel = None
            self._suspect += left
        self._lose_suspect()

    def drain(self) -> bool:
        """Serve counts it out; it may still answer what it has: the connection ends with the replica. False where it
        has nothing, and the link has ended. One that says nothing any more is hung: Serve takes a while to end it.
        """
        if self._channel is None or not self._channel.pending:
            self.end()
            return False
        loop = asyncio.get_running_loop()
        self.view.asked(loop.time())
        self._channel.ask()
        loop.call_later(_HUNG_S, self._end_if_hung, context=contextvars.Context())
        return True

    def _end_if_hung(self) -> None:
        if self.view.is_silent(asyncio.get_running_loop().time()) and self._pool.drained(self):
            self.end()

    def _on_report(self, report: Report) -> None:
        first = self.view.state is None
        assert report.state is not None  # whoever sends a report sets it
        self.view.hear(asyncio.get_running_loop().time(), report.state, report.seen)
        self.answered += len(report.answered)
        for heard in self._asking:
            if not heard.done():
                heard.set_result(None)
        self._asking.clear()
        if first:
            self._wait_s = 0.0
            self._lose_suspect()  # it has dropped them
            self._pool.changed()

    def _on_lost(self, left: list[PendingOffer]) -> None:
        if self._channel is None:
            return
        self._channel = None
        self.view.forget()
        self._suspect += left
        self._pool.changed()
        if self._pool.links.get(self.view.replica) is self:
            self._task = self._pool.spawn(self._connect())
        else:
            self._pool.drained(self)  # and has ended
            self._lose_suspect()

    def _lose_suspect(self) -> None:
        lost, self._suspect = self._suspect, []
        for pending in lost:
            pending.fail(
                ReplicaLost(
                    f"the {self._pool.name} pool lost replica {self.view.replica} while the query was on it; "
                    "please try again"
                )
            )

    async def _connect(self) -> None:
        """Until it is reached; its first report ends the wait."""
        at = self.about["channel"]
        await asyncio.sleep(self._wait_s)  # 0, unless the last connection broke before its first report
        self._wait_s = min(max(2 * self._wait_s, FIRST_RETRY_S), LAST_RETRY_S)

        def attempt() -> Awaitable[Channel]:
            return self._pool.open_channel((at["host"], at["port"]), at["secret"], self._on_report, self._on_lost)

        who = f"the {self._pool.name} pool's replica {self.view.replica} at {at['host']}:{at['port']}"
        self._channel = await connected(attempt, who, self._lose_suspect)
        self._channel.configure(self._pool.policy)
        self._channel.ask()
