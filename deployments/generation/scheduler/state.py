"""The policy of a generating device, and the state that it reports. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ACCELERATOR, PIPELINED, ASYNCHRONOUS = MODES = ("accelerator", "pipelined", "asynchronous")  # see `hybrid/planner`


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


class HostState(NamedTuple):
    """A host's state, as reported. `steps` (in each of `MODES`), `tokens`, `moved`, `gained` and `alone` count from the
    start (see `HostCache`). `slowdown`: how many times slower its attention is now than its model.
    """

    free_blocks: int  # not reserved
    blocks: int
    rows: int  # running rows, parked or not
    parked: int  # how many of them are parked
    steps: Sequence[int]
    tokens: int
    moved: Sequence[int]
    gained: float
    alone: float
    slowdown: float

    @property
    def gained_share(self) -> float | None:
        """`gained` as a share of what the accelerator alone would have generated. None if that is 0."""
        return self.gained / self.alone if self.alone else None


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
