"""What is timed at start, to choose among ways that compute the same. The fastest of a few turns counts, because the
machine may be busy with something else meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from deployments.engines import Engine, TokenBatch, embed
from deployments.hardware.device_detector import quick_cpu_dtype
from deployments.models.model_files import ModelCard

Clock = Callable[[], float]

_TURNS = 7
_EXACT = "float32"
_PRODUCT = (256, 768, 3072)  # tokens, and the largest weights of a layer of BERT-base

# Two kinds of traffic with about as many tokens each.
_EQUAL = (75,) * 16  # the paper's queries
_MIXED = (11, 87, 24, 198, 36, 56, 18, 121, 42, 323, 30, 65, 75, 49, 150, 102)  # sentences, and some passages
_TIMES = 3  # the first run includes one-time preparations
_ENOUGH_S = 1.0  # longer runs are not repeated, since preparations are a small part of them


def fastest_s(*ways: Callable[[], object], clock: Clock = time.perf_counter) -> list[float]:
    """The seconds of the fastest of a few turns of each way."""
    import torch

    seconds = [float("inf")] * len(ways)
    with torch.inference_mode():
        for _ in range(_TURNS):
            for which, run in enumerate(ways):
                started = clock()
                run()
                seconds[which] = min(seconds[which], clock() - started)
    return seconds


def is_quicker(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether `one` takes no longer than `other`."""
    one_s, other_s = fastest_s(one, other)
    return one_s <= other_s


@cache
def quickest_cpu_dtype(clock: Clock = time.perf_counter) -> tuple[str, str]:
    """(dtype, reason): the number format in which this CPU multiplies fastest, which need not be one with special
    instructions, by a race of one product with torch's current threads that takes a few tenths of a second.

    An Intel Xeon with AVX-512 BF16 and without AMX multiplied float32 1.8 times as fast as bfloat16. An AMD EPYC
    computed bfloat16 nearly twice as fast.
    """
    candidate, reason = quick_cpu_dtype()
    if candidate == _EXACT:
        return candidate, reason
    narrow_s, exact_s = fastest_s(*map(_product, (candidate, _EXACT)), clock=clock)
    times = exact_s / narrow_s
    if times >= 1:
        return candidate, f"{reason}, {times:.1f} times as fast in products as {_EXACT}"
    return _EXACT, f"{reason}, but multiplies {_EXACT} {1 / times:.1f} times as fast"


def _product(dtype: str) -> Callable[[], object]:
    import torch

    tokens, width, height = _PRODUCT
    inputs = [torch.ones(shape, dtype=getattr(torch, dtype)) for shape in ((tokens, width), (height, width))]
    return partial(torch.nn.functional.linear, *inputs)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a batch of each kind. `queries_per_s`: for queries of 75 tokens, 16 at once."""

    equal_s: float
    mixed_s: float

    @property
    def queries_per_s(self) -> float:
        return len(_EQUAL) / self.equal_s

    def __str__(self) -> str:
        equal, mixed = (f"{float(f'{one:.3g}'):,g}" for one in (self.queries_per_s, len(_MIXED) / self.mixed_s))
        return f"{equal} queries/s of 75 tokens and {mixed} of mixed lengths"


def measured_throughput(
    engine: Engine, card: ModelCard, queries: int | None = None, clock: Clock = time.perf_counter
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

    return Speed(seconds(_EQUAL), seconds(_MIXED))
