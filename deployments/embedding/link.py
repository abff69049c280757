"""A Router's connection to one embedding replica, and what it sends there.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deployments.admission.fair_share import Tenant
from deployments.admission.starvation import UsualTime
from deployments.embedding.channel import Channel, PendingOffer
from deployments.embedding.frames import Offer, Report
from deployments.embedding.view import View
from deployments.errors import ReplicaLost
from deployments.serving.replica_set import ReplicaLink, ReplicaSet, learned
from deployments.serving.replica_view import hangs_after_s

logger = logging.getLogger("ray.serve")


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

    def offer(self, offer: Offer) -> PendingOffer:
        """Send the offer. Call it only while `is_live`."""
        assert self._channel is not None
        is_first = not self._channel.pending
        pending = self._channel.offer(offer)
        cost = self.view.model.work(map(len, offer.queries))
        self.view.sent(self._channel.frames, len(offer.queries), cost)
        if is_first:
            self._note_progress()
        if not pending.waits:
            self._count_time(offer.left_s)
        if not self._watching:
            self._watch()
        return pending

    def call_off(self, pending: PendingOffer) -> None:
        """Cancel an offer, as the base does, and ignore its outcome."""
        pending.forget()
        if self._channel is not None:
            self._channel.call_off(pending)

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
                super().call_off(pending)
                pending.fail(ReplicaLost(f"{who} makes no progress; try again"))
