"""`python -m benchmarks.costs.decode_attention` measures how fast a step's attention reads the cache on a CPU.

32 answers of 100 to 2,048 tokens each get one more token. Prints JSON: GB/s of keys and values read, for two models'
heads in bfloat16, float16 and float32, with torch's operations, with each form of the kernel, and for a plain sum over
the same memory. They take turns; the medians are printed.
"""

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.tensors import Place
from deployments.generation.engine.cache import CachedAttention, Ways
from deployments.generation.engine.packed_step import StepLayout
from deployments.generation.kernels.decode_kernel import DecodeKernel, forms
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.work import Chunk

_MODELS = {"14/2 x 64": (HeadLayout(14, 2, 64), 16), "32/8 x 128": (HeadLayout(32, 8, 128), 4)}  # and so many layers
_ANSWERS, _SHORTEST, _LONGEST = 32, 100, 2048
_TURN_S, _TURNS = 0.05, 5


def _layout(place: Place) -> StepLayout:
    random = np.random.default_rng(0)
    lengths = random.integers(_SHORTEST, _LONGEST, _ANSWERS, endpoint=True).tolist()
    bounds = np.cumsum([0, *(blocks_of(length, BLOCK) for length in lengths)])
    anywhere = random.permutation(int(bounds[-1])).tolist()
    return StepLayout.of_chunks(
        [
            Chunk(np.zeros(1, np.int32), length - 1, tuple(anywhere[first:last]))
            for length, first, last in zip(lengths, bounds, bounds[1:], strict=False)
        ],
        place,
        BLOCK,
    )


def _rate(pass_over: Callable[[int], object], layers: int, number: float) -> float:
    """GB/s of repeated passes over all layers; `number` bytes are read of each layer."""
    started, passes = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < _TURN_S or not passes:
        for layer in range(layers):
            pass_over(layer)
        passes += 1
    return passes * layers * number / seconds / 1e9


def measure(heads: HeadLayout, layers: int, place: Place) -> dict[str, float]:
    layout = _layout(place)
    blocks = sum(blocks_of(chunk.end, BLOCK) for chunk in layout.chunks)
    shape = (layers, 2, blocks, heads.groups, BLOCK, heads.size)
    stored = torch.randn(shape, dtype=place.dtype)
    qkv = torch.randn(layout.tokens, heads.total, heads.size, dtype=place.dtype)
    qkv[:, : heads.heads] *= heads.size**-0.5
    of_token = 2 * heads.groups * heads.size * stored.element_size()
    read = of_token * sum(chunk.end for chunk in layout.chunks)

    def attend(kernel: DecodeKernel | None) -> Callable[[int], object]:
        by_layer = [CachedAttention(heads, *layer, ways=Ways(kernel)) for layer in stored]
        return lambda layer: by_layer[layer](qkv, layout)

    as_integers = stored.view(torch.int64)
    ways: dict[str, tuple[Callable[[int], object], float]] = {"torch": (attend(None), read)}
    ways |= {form: (attend(DecodeKernel(form, heads)), read) for form in forms()}
    ways["sum"] = (lambda layer: as_integers[layer].sum(), of_token * blocks * BLOCK)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TURNS):
        for name, (way, number) in ways.items():
            rates[name].append(_rate(way, layers, number))
    return {name: round(statistics.median(all_of), 2) for name, all_of in rates.items()}


def main() -> None:
    found = {
        f"{name}, {str(dtype).removeprefix('torch.')}": measure(heads, layers, Place(torch.device("cpu"), dtype))
        for name, (heads, layers) in _MODELS.items()
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    print(json.dumps({"threads": torch.get_num_threads(), "GB/s": found}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
