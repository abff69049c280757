"""What is timed at start, to choose among ways that compute the same. The fastest of a few turns counts, because the
machine may be busy with something else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

from deployments.hardware.device_detector import quick_cpu_dtype

Clock = Callable[[], float]

_TURNS = 7
_EXACT = "float32"
_PRODUCT = (256, 768, 3072)  # tokens, and the largest weights of a layer of BERT-base


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
