"""What is promised, and how long a step may be. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from deployments.generation.scheduler.hybrid.planner import MODES


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """The promise, and the bounds of a step. `step_tokens`: the most that the engine computes in one, rows included.
    `modes`: in which host rows may take part.
    """

    ttft_s: float
    tpot_s: float
    step_tokens: int = 2048
    bulk_share: float = 0.5
    modes: Collection[str] = MODES

    @property
    def longest_step_s(self) -> float:
        """What arrives while a step runs waits for its end."""
        return max(self.tpot_s, self.ttft_s / 8)
