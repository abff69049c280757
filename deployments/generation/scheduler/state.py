"""The policy of a generating device, and the state that it reports. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deployments.generation.scheduler.hybrid.host_cache import HostState
from deployments.generation.scheduler.hybrid.planner import MODES


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """The promise, and the limits of a step. `max_num_batched_tokens`: the most tokens in one step, rows included.
    `modes`: the modes in which host rows may take part.
    """

    ttft_s: float
    tpot_s: float
    max_num_batched_tokens: int = 2048
    bulk_share: float = 0.5
    modes: Collection[str] = MODES

    @property
    def longest_step_s(self) -> float:
        """The longest that a step should take, since new arrivals wait for its end."""
        return max(self.tpot_s, self.ttft_s / 8)


class StepState(NamedTuple):
    """The state that Routers rely on until the next report. Times are seconds from now.

    `opens_s`: until a generation with the mean prompt and answer would be admitted (0: now). A prompt of p tokens would
    have its first token in about `first_s + p * prompt_token_s`. `free_blocks`: blocks that are not reserved.
    """

    opens_s: float
    first_s: float
    prompt_token_s: float
    free_blocks: int
    blocks: int
    rows: int  # running rows
    waiting: int  # generations without a first token
    steps: int  # since the start
    model: Sequence[float]  # the fields of `StepTime`, in order
    slowdown: float
    margin: float
    refusals: Sequence[int]  # full, never
    host: HostState | None = None  # set if the host has a part of the cache
