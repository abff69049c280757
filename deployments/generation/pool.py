"""A pool of generating replicas as a Router sees it: a connection to each, ordered by predicted first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from deployments.generation.channel import GenerationChannel, PendingGeneration
from deployments.generation.frames import GenerationOffer, GenerationReport, NewToken
from deployments.generation.scheduler.block_pool import BLOCK, leading
from deployments.generation.scheduler.state import MODES, HostState
from deployments.generation.view import GenerationView
from deployments.serving.replica_set import ReplicaLink, ReplicaSet, learned

_MOST_HELD = 8192  # blocks that a Router remembers of each replica, about 1 MB


class GenerationLink(ReplicaLink[GenerationView, GenerationChannel]):
    """A link to a generating replica. When the connection breaks, its generations fail at once, and the replica drops
    them at its end.
    """

    view_type = GenerationView
    may_run_on = False
    at_work = "it generated this answer"

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._held: dict[bytes, None] = {}  # keys of blocks of prompts that it got, the least recently sent first

    def likely_cached(self, keys: Sequence[bytes]) -> int:
        """How many tokens of a prompt with these keys its cache likely holds."""
        return BLOCK * leading(keys, self._held)

    def has_got(self, keys: Sequence[bytes]) -> None:
        """Note that it has admitted a prompt with these keys."""
        for key in reversed(keys):  # of what is forgotten, the ends of prompts go first
            self._held.pop(key, None)
            self._held[key] = None
        for key in list(islice(self._held, max(0, len(self._held) - _MOST_HELD))):
            del self._held[key]

    @property
    def streams(self) -> int:
        """How many generations of this Router the replica has."""
        return 0 if self._channel is None else len(self._channel.pending)

    def offer(
        self, offer: GenerationOffer, most_unread: int, on_token: Callable[[NewToken], None], cached: int = 0
    ) -> PendingGeneration:
        """Send the offer, of whose prompt it likely holds `cached` tokens. Call it only while `is_live`."""
        assert self._channel is not None
        pending = self._channel.offer(offer, most_unread, on_token)
        self.view.sent(self._channel.frames, 1, len(offer.ids) - cached)
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


class GenerationPool(ReplicaSet[GenerationLink]):
    """`name` is "accelerator" or "cpu". Call `put_in_force` before `connect`."""

    link_type = GenerationLink
    channel_type = GenerationChannel

    def soonest(self, now: float, tokens: int, keys: Sequence[bytes] = ()) -> Sequence[GenerationLink]:
        """The live replicas: open ones first, and then by predicted first token. One that likely holds the prompt's
        first blocks, by their `keys`, has only the rest to compute. So a conversation returns to it, unless another
        replica would compute everything sooner. Replicas that have stopped or are ejected are left out.
        """

        def order(link: GenerationLink) -> Any:
            return link.view.order(
                link.view.opens_s(now) > 0, link.view.first_s(now, tokens - link.likely_cached(keys))
            )

        return sorted((link for link in self.live if not link.view.is_out(now)), key=order)

    @property
    def in_flight(self) -> int:
        """Running answers and waiting generations of all Routers."""
        states = [link.view.state for link in self.live if link.view.state is not None]
        return sum(state.rows + state.waiting for state in states)

    def describe(self) -> dict[str, Any]:
        """The pool as `/info` shows it."""
        states = [link.view.state for link in self.live if link.view.state is not None]
        return {
            "live_replicas": len(self.live),
            "rows": sum(state.rows for state in states),  # of all Routers
            "waiting": sum(state.waiting for state in states),
            "free_blocks": sum(state.free_blocks for state in states),
            "blocks": min((state.blocks for state in states), default=None),  # of the replica with the fewest
            "replicas": {link.view.replica: link.describe() for link in self.live},
        }


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
