"""Finds the number format in which this CPU multiplies fastest, which need not be one with special instructions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from deployments.hardware.device_detector import quick_cpu_dtype

_EXACT = "float32"
_SHAPE = (256, 768, 3072)  # tokens, and the largest weights of a layer of BERT-base
_ROUNDS = 7


@cache
def quickest_cpu_dtype() -> tuple[str, str]:
    """(dtype, reason), by a race of one product that takes a few tenths of a second, with torch's current threads.

    An Intel Xeon with AVX-512 BF16 and without AMX multiplied float32 1.8 times as fast as bfloat16. An AMD EPYC
    computed bfloat16 nearly twice as fast.
    """
    candidate, reason = quick_cpu_dtype()
    return (candidate, reason) if candidate == _EXACT else choose(candidate, reason, _product_seconds(candidate))


def choose(candidate: str, reason: str, seconds: Callable[[str], float]) -> tuple[str, str]:
    """(dtype, reason): `candidate` if its product takes no longer than float32's. `seconds(dtype)` times one product;
    the best of a few turns counts.
    """
    turns = [(seconds(candidate), seconds(_EXACT)) for _ in range(_ROUNDS)]
    narrow_s, exact_s = map(min, zip(*turns, strict=True))
    times = exact_s / narrow_s
    if times >= 1:
        return candidate, f"{reason}, {times:.1f} times as fast in products as {_EXACT}"
    return _EXACT, f"{reason}, but multiplies {_EXACT} {1 / times:.1f} times as fast"


def _product_seconds(candidate: str) -> Callable[[str], float]:
    import torch

    tokens, width, height = _SHAPE
    inputs = {
        dtype: [torch.ones(shape, dtype=getattr(torch, dtype)) for shape in ((tokens, width), (height, width))]
        for dtype in (candidate, _EXACT)
    }

    def seconds(dtype: str) -> float:
        started = time.perf_counter()
        torch.nn.functional.linear(*inputs[dtype])
        return time.perf_counter() - started

    return seconds
