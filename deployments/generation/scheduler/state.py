"""What a device that generates promises, and what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deployments.generation.scheduler.hybrid.host_cache import HostState
from deployments.generation.scheduler.hybrid.planner import MODES


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """The promise, and the bounds of a step. `max_num_batched_tokens`: the most that the engine computes in one, rows
    included. `modes`: in which host rows may take part.
    """

    ttft_s: float
    tpot_s: float
    max_num_batched_tokens: int = 2048
    bulk_share: float = 0.5
    modes: Collection[str] = MODES

    @property
    def longest_step_s(self) -> float:
        """What arrives while a step runs waits for its end."""
        return max(self.tpot_s, self.ttft_s / 8)


class StepState(NamedTuple):
    """What Routers go by until they hear again: seconds from now, and counts.

    `opens_s`: until a generation of the mean prompt and answer would be admitted (0: now). A prompt of p
    tokens would have its first token in about `first_s + p prompt_token_s`. `free_blocks`: that nobody may need.
    """

    opens_s: float
    first_s: float
    prompt_token_s: float
    free_blocks: int
    blocks: int
    rows: int  # that run
    waiting: int  # generations whose prompt is not computed yet
    steps: int  # since the start
    model: Sequence[float]  # of `StepTime`, in the order of its fields
    slowdown: float
    margin: float
    refusals: Sequence[int]  # full, never
    host: HostState | None = None  # where it has a part of the cache
