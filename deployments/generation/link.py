"""A Router's connection to one generating replica, and what it sends there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deployments.generation.channel import GenerationChannel, PendingGeneration
from deployments.generation.frames import GenerationOffer, GenerationReport, NewToken
from deployments.generation.scheduler.state import MODES, HostState
from deployments.generation.view import GenerationView
from deployments.serving.replica_link import ReplicaLink, learned


class GenerationLink(ReplicaLink[GenerationView, GenerationChannel]):
    """A link to a generating replica. When the connection breaks, its generations fail at once, and the replica drops
    them at its end.
    """

    view_type = GenerationView
    may_run_on = False
    at_work = "it generated this answer"

    @property
    def streams(self) -> int:
        """How many generations of this Router the replica has."""
        return 0 if self._channel is None else len(self._channel.pending)

    def offer(
        self, offer: GenerationOffer, most_unread: int, on_token: Callable[[NewToken], None]
    ) -> PendingGeneration:
        """Send the offer. Call it only while `is_live`."""
        assert self._channel is not None
        pending = self._channel.offer(offer, most_unread, on_token)
        self.view.sent(self._channel.frames, 1, len(offer.ids))
        if not self._watching:
            self._watch()
        return pending

    def stop(self, pending: PendingGeneration, answer: int) -> None:
        """Tell the replica to stop that answer."""
        if self._channel is not None:
            self._channel.stop(pending, answer)

    def describe(self) -> dict[str, Any]:
        """The replica as `/info` shows it."""
        state = self.view.state
        assert state is not None
        return {
            **super().describe(),
            "rows": state.rows,
            "waiting": state.waiting,
            "blocks": state.blocks,
            "free_blocks": state.free_blocks,
            "steps": state.steps,
            **learned(state),
            "refusals": list(state.refusals),
            **({} if state.host is None else {"host": _host(state.host)}),
        }

    def _hear(self, report: GenerationReport) -> None:
        super()._hear(report)
        self.view.routers = report.routers
        self.view.outlier.count(worked=len(report.tokens) + len(report.suspect), failed=len(report.broken))


def _host(host: HostState) -> dict[str, Any]:
    """A replica's host as `/info` shows it."""
    to_accelerator, to_host = host.moved
    share = host.gained_share
    return {
        "rows": host.rows,
        "parked": host.parked,
        "blocks": host.blocks,
        "free_blocks": host.free_blocks,
        "steps": dict(zip(MODES, host.steps, strict=True)),
        "tokens": host.tokens,
        "moved": {"to_accelerator": to_accelerator, "to_host": to_host},
        "gained_tokens": round(host.gained),
        "gained_share": None if share is None else round(share, 4),
        "slowdown": host.slowdown,
    }
