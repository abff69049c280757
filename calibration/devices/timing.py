"""Times an engine's calls, and the products that give a device's peak. Imports torch only when called."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from calibration.devices.shapes import BertShape
from deployments.engines.torch_engine import import_torch

_WARM_UP = 3
_FEWEST = 5  # calls or products that a figure is made of

Product = tuple[int, int, int]  # [rows, inner] by [inner, columns]


def products(shape: BertShape, square: int, rows: int) -> Iterator[tuple[str, Product]]:
    """A large square one, and those of the model's layers for `rows` tokens."""
    hidden, intermediate = shape.hidden, shape.intermediate
    yield "square", (square, square, square)
    yield "query, key, value", (rows, hidden, 3 * hidden)
    yield "attention's output", (rows, hidden, hidden)
    yield "up", (rows, hidden, intermediate)
    yield "down", (rows, intermediate, hidden)


def product_speed(product: Product, device: str, least_s: float, dtype: str = "bfloat16") -> dict[str, Any]:
    """TFLOP/s of one product, laid out as a model's layer has it: many in a row, several times."""
    torch = import_torch(device)
    rows, inner, columns = product
    with torch.inference_mode():
        x = torch.randn(rows, inner, device=device, dtype=getattr(torch, dtype))
        weight = torch.randn(columns, inner, device=device, dtype=getattr(torch, dtype))

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.nn.functional.linear(x, weight)

        multiply(_WARM_UP)
        once = device_seconds(lambda: multiply(_FEWEST), device) / _FEWEST
        times = max(_FEWEST, round(least_s / _FEWEST / once)) if once else _FEWEST
        seconds = [device_seconds(lambda: multiply(times), device) / times for _ in range(_FEWEST)]
    return {"tflops": 2 * rows * inner * columns / statistics.median(seconds) / 1e12, "seconds": seconds}


def device_seconds(call: Callable[[], object], device: str) -> float:
    """Seconds that the device works on the call: between two events on an accelerator, by the clock on a CPU."""
    torch = import_torch(device)
    kind = torch.device(device).type
    if kind == "cpu":
        started = perf_counter()
        call()
        return perf_counter() - started
    backend = getattr(torch, kind)
    with backend.device(device):
        begins, ends = (backend.Event(enable_timing=True) for _ in range(2))
        begins.record()
        call()
        ends.record()
        ends.synchronize()
    return float(begins.elapsed_time(ends)) / 1000


def seconds_of(call: Callable[[], object], least_s: float) -> list[float]:
    """Seconds of each call, repeated for `least_s`. A call must return only when its result is in the host's memory."""
    started, seconds = perf_counter(), list[float]()
    for _ in range(_WARM_UP):
        call()
        if perf_counter() - started > least_s:
            break
    while len(seconds) < _FEWEST or sum(seconds) < least_s:
        started = perf_counter()
        call()
        seconds.append(perf_counter() - started)
    return seconds


def rates(seconds: Sequence[float], batch: int, tokens: int, operations: int) -> dict[str, Any]:
    """Figures of calls that each took `batch` queries of `tokens` tokens. `operations`: FLOPs of one query."""
    rate = batch * len(seconds) / sum(seconds)
    return {
        "queries_s": rate,
        "tokens_s": rate * tokens,
        "tflops": rate * operations / 1e12,
        "p50_ms": statistics.median(seconds) * 1000,
        "seconds": list(seconds),
    }
