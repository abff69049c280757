"""`python -m benchmarks.costs.decode_products`: how quickly a model's products read their weights on a CPU.

Prints JSON, GB/s of weights read, for the products of Qwen2.5-0.5B's shape and 1 to 512 rows, in bfloat16 and float32:
by torch, by the best form of `decode_products.c`, and a plain sum over as much memory. As many copies of the weights
are read in turn as do not stay in the caches. The ways take turns; the quickest of each one's turns is told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import torch

from deployments.engines.packed.layers import Dense
from deployments.generation.kernels.packed_products import PackedDense, forms

_SHAPES = {"qkv": (1152, 896), "out": (896, 896), "up": (4864, 896), "down": (896, 4864), "head": (151_936, 896)}
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
_BYTES, _FEW_BYTES = 2**29, 2**26  # of all copies, and of those that are multiplied with many rows
_MANY_ROWS = 64
_TURNS = 3


Call = Callable[[torch.Tensor], object]


def _seconds(calls: Sequence[Call], x: torch.Tensor) -> float:
    """The mean."""
    started = time.perf_counter()
    for call in calls:
        call(x)
    return (time.perf_counter() - started) / len(calls)


def _sum_of(weight: torch.Tensor) -> Call:
    as_integers = weight.clone().view(torch.int64)
    return lambda _: as_integers.sum()


def measure(outputs: int, width: int, dtype: torch.dtype) -> dict[str, dict[int, float]]:
    """By way and rows."""
    weight = torch.randn(outputs, width).to(dtype)
    copies = max(1, _BYTES // weight.nbytes)
    ways: dict[str, list[Call]] = {"torch": [Dense(weight) for _ in range(copies)]}
    ways |= {form: [PackedDense(form, weight) for _ in range(copies)] for form in forms(dtype)[:1]}
    ways["sum"] = [_sum_of(weight) for _ in range(copies)]
    found: dict[str, dict[int, float]] = {name: {} for name in ways}
    for rows in _ROWS:
        x = torch.randn(rows, width).to(dtype)
        used = copies if rows < _MANY_ROWS else max(1, _FEW_BYTES // weight.nbytes)
        for _ in range(_TURNS):
            for name, calls in ways.items():
                rate = weight.nbytes / _seconds(calls[:used], x) / 1e9
                found[name][rows] = max(found[name].get(rows, 0.0), round(rate, 2))
    return found


def main() -> None:
    found = {
        f"{name} {outputs} x {width}, {str(dtype).removeprefix('torch.')}": measure(outputs, width, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for name, (outputs, width) in _SHAPES.items()
    }
    print(json.dumps({"threads": torch.get_num_threads(), "GB/s": found}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
