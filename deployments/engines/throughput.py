"""Measures how fast an engine computes typical traffic, to choose engines and forms at start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.engines import Engine, TokenBatch, embed
from deployments.models.model_files import ModelCard

# Three kinds of traffic with about as many tokens each, so that none outweighs the others.
_SHORT = (16,) * 64  # search queries
_EQUAL = (75,) * 16  # the paper's queries
_MIXED = (11, 87, 24, 198, 36, 56, 18, 121, 42, 323, 30, 65, 75, 49, 150, 102)  # sentences, and some passages
_TIMES = 3  # the first run includes one-time preparations
_ENOUGH_S = 1.0  # longer runs are not repeated, since preparations are a small part of them


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a batch of each kind. `queries_per_s`: for queries of 75 tokens, 16 at once."""

    short_s: float
    equal_s: float
    mixed_s: float

    @property
    def seconds(self) -> float:
        return self.short_s + self.equal_s + self.mixed_s

    @property
    def queries_per_s(self) -> float:
        return len(_EQUAL) / self.equal_s

    def __str__(self) -> str:
        equal, mixed = (f"{float(f'{one:.3g}'):,g}" for one in (self.queries_per_s, len(_MIXED) / self.mixed_s))
        return f"{equal} queries/s of 75 tokens and {mixed} of mixed lengths"


def measured_throughput(
    engine: Engine, card: ModelCard, queries: int | None = None, clock: Callable[[], float] = time.perf_counter
) -> Speed:
    """Measure the fastest of a few runs for each kind. Lengths are cut to the model's limit. If `queries` is given,
    only the first `queries` of each batch run, and the time is extrapolated.
    """

    def seconds(lengths: Sequence[int]) -> float:
        within = [min(length, card.max_tokens) for length in lengths[:queries]]
        batch = TokenBatch.random(card.vocab_size, within, 1, card.outputs_for(card.kind))
        taken: list[float] = []
        while len(taken) < _TIMES and sum(taken) < _ENOUGH_S:
            started = clock()
            embed(engine, batch, threading.Event())
            taken.append(clock() - started)
        return min(taken) * len(lengths) / len(within)

    return Speed(seconds(_SHORT), seconds(_EQUAL), seconds(_MIXED))
