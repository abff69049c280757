"""A pool of generating replicas as a Router sees it: a link to each, ordered by predicted first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.generation.channel import GenerationChannel
from deployments.generation.link import GenerationLink
from deployments.serving.replica_set import ReplicaSet


class GenerationPool(ReplicaSet[GenerationLink]):
    """`name` is "accelerator" or "cpu". Call `put_in_force` before `connect`."""

    link_type = GenerationLink
    channel_type = GenerationChannel

    def soonest(self, now: float, tokens: int) -> Sequence[GenerationLink]:
        """The live replicas: open ones first, and then by predicted first token. Replicas that have stopped or are
        ejected are left out.
        """
        live = [link for link in self.live if not link.view.is_out(now)]
        return sorted(live, key=lambda link: link.view.order(link.view.opens_s(now), link.view.first_s(now, tokens)))

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
