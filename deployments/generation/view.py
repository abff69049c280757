"""When one replica that generates would give a first token, by its last state and what it was sent since. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.generation.scheduler.state import StepState
from deployments.serving.replica_view import ReplicaView


@dataclass(slots=True, eq=False)
class GenerationView(ReplicaView[StepState]):
    """One replica that generates as a Router sees it. Its unseen work is in tokens of prompts."""

    routers: int = 1  # that are connected to it, this one among them

    def first_s(self, now: float, tokens: int) -> float:
        """Seconds until a prompt of so many tokens would have its first token there, if it went now."""
        if self.state is None:
            return math.inf
        waits_s = max(0.0, self.heard_at + self.state.first_s - now)
        return waits_s + self.state.prompt_token_s * (self._unseen_work + tokens)

    def opens_s(self, now: float) -> float:
        """Seconds until it admits a usual generation again, by its last state; 0: now."""
        return 0.0 if self.state is None else max(0.0, self.heard_at + self.state.opens_s - now)
