"""Predicts when a replica would return a first token, from its last state and what the Router has sent since. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.generation.scheduler.state import StepState
from deployments.serving.replica_view import ReplicaView


@dataclass(slots=True, eq=False)
class GenerationView(ReplicaView[StepState]):
    """One generating replica as a Router sees it. Its unseen work is in prompt tokens."""

    routers: int = 1  # connected to it, including this one

    def first_s(self, now: float, tokens: int) -> float:
        """Seconds until a prompt of `tokens` tokens would have its first token there, if it were sent now."""
        if self.state is None:
            return math.inf
        waits_s = max(0.0, self.heard_at + self.state.first_s - now)
        return waits_s + self.state.prompt_token_s * (self._unseen_work + tokens)

    def opens_s(self, now: float) -> float:
        """Seconds until it would admit a typical generation, by its last state. 0: now."""
        return 0.0 if self.state is None else max(0.0, self.heard_at + self.state.opens_s - now)
