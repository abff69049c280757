"""`python -m benchmarks.costs.decode_attention [part ...]` measures a step's attention to the cache on a CPU.

All is in bfloat16 and counts the process's CPU time, so that other processes disturb little (OMP_WAIT_POLICY=passive:
waiting costs none). GB/s are those of one core. Prints JSON.

- `answers`: 32 answers of 100 to 2,048 tokens each get one more token. GB/s of keys and values read, with torch's
  operations and with each form of the kernel, in bfloat16, float16 and float32.
- `one`: the same of a single answer of 4,096 to 1,048,576 tokens, with the best form.
- `contiguous`: the same of 1 to 32 answers in blocks anywhere, and of answers that lie in one piece.
- `prompts`: seconds for a layer's attention of a prompt's last 2,048 tokens, with torch's operations
  and with the best forms of the kernel.

`sum` is a plain sum over the same memory. The ways take turns; the medians are printed.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.tensors import Place
from deployments.generation.engine.cache import CachedAttention, Ways
from deployments.generation.engine.packed_step import StepLayout
from deployments.generation.kernels import native, prompt_kernel
from deployments.generation.kernels.decode_kernel import DecodeKernel, forms
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.work import Chunk

_MODELS = {"14/2 x 64": HeadLayout(14, 2, 64), "32/8 x 128": HeadLayout(32, 8, 128)}
_CPU = torch.device("cpu")
_HALF = Place(_CPU, torch.bfloat16)
_BYTES = 2**26  # of keys and values, at least, over all layers: more than the processor's caches hold
_TURN_S, _TURNS = 0.05, 5

Way = Callable[[int], object]  # computes a layer


def _layout(lengths: Sequence[int], place: Place, block_size: int) -> StepLayout:
    """Answers that get one more token, in blocks anywhere."""
    bounds = np.cumsum([0, *(blocks_of(length, block_size) for length in lengths)])
    anywhere = np.random.default_rng(0).permutation(int(bounds[-1])).tolist()
    chunks = [
        Chunk(np.zeros(1, np.int32), length - 1, tuple(anywhere[first:last]))
        for length, first, last in zip(lengths, bounds, bounds[1:], strict=False)
    ]
    return StepLayout.of_chunks(chunks, place, block_size)


def _rate(pass_over: Way, layers: int, number: float) -> float:
    """GB/s of repeated passes over all layers; `number` bytes are read of each layer."""
    started, passes = time.process_time(), 0
    while (seconds := time.process_time() - started) < _TURN_S or not passes:
        for layer in range(layers):
            pass_over(layer)
        passes += 1
    return passes * layers * number / seconds / 1e9


def _medians(ways: dict[str, tuple[Way, int, float]]) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TURNS):
        for name, way in ways.items():
            rates[name].append(_rate(*way))
    return {name: round(statistics.median(all_of), 2) for name, all_of in rates.items()}


def _ways(
    heads: HeadLayout, lengths: Sequence[int], place: Place, block_size: int, kernels: dict[str, DecodeKernel | None]
) -> dict[str, tuple[Way, int, float]]:
    """The kernels (None: torch) and the sum, over the same memory."""
    layout = _layout(lengths, place, block_size)
    blocks = sum(blocks_of(length, block_size) for length in lengths)
    of_token = 2 * heads.groups * heads.size * place.dtype.itemsize
    layers = -(-_BYTES // (of_token * sum(lengths)))
    some = torch.randn(2**20).to(place.dtype)
    stored = native.empty((layers, 2, blocks, heads.groups, block_size, heads.size), place.dtype)  # as the cache
    flat = stored.view(-1)
    for start in range(0, len(flat), len(some)):
        flat[start : start + len(some)] = some[: len(flat) - start]
    qkv = torch.randn(layout.tokens, heads.total, heads.size, dtype=place.dtype)
    qkv[:, : heads.heads] *= heads.size**-0.5

    def attend(kernel: DecodeKernel | None) -> Way:
        by_layer = [CachedAttention(heads, *layer, ways=Ways(kernel)) for layer in stored]
        return lambda layer: by_layer[layer].attend(qkv, layout)

    as_integers = stored.view(torch.int64)
    found: dict[str, tuple[Way, int, float]] = {
        name: (attend(kernel), layers, of_token * sum(lengths)) for name, kernel in kernels.items()
    }
    return found | {"sum": (lambda layer: as_integers[layer].sum(), layers, of_token * blocks * block_size)}


def answers() -> dict[str, dict[str, float]]:
    lengths = np.random.default_rng(0).integers(100, 2048, 32, endpoint=True).tolist()
    return {
        f"{name}, {str(dtype).removeprefix('torch.')}": _medians(
            _ways(
                heads, lengths, Place(_CPU, dtype), BLOCK,
                {"torch": None} | {form: DecodeKernel(form, heads) for form in forms()},
            )
        )
        for name, heads in _MODELS.items()
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }  # fmt: skip


def one() -> dict[str, dict[str, float]]:
    return {
        f"{name}, {tokens} tokens": _medians(
            _ways(heads, [tokens], _HALF, BLOCK, {"kernel": DecodeKernel(forms()[0], heads)})
        )
        for name, heads in _MODELS.items()
        for tokens in (2**12, 2**15, 2**17, 2**20)
    }


def contiguous() -> dict[str, dict[str, float]]:
    found = {}
    for name, heads in _MODELS.items():
        for count, tokens in ((1, 2**10), (1, 2**13), (1, 2**17), (8, 2**13), (32, 2**10), (32, 2**13)):
            kernel: dict[str, DecodeKernel | None] = {"kernel": DecodeKernel(forms()[0], heads)}
            ways = {
                named: _ways(heads, [tokens] * count, _HALF, size, kernel)["kernel"]
                for named, size in (("blocks", BLOCK), ("contiguous", tokens))
            }
            found[f"{name}, {count} of {tokens} tokens"] = _medians(ways)
    return found


def prompts() -> dict[str, dict[str, float]]:
    found = {}
    for name, heads in _MODELS.items():
        kernels = {"torch": None} | {
            form: prompt_kernel.PromptKernel(form, heads) for form in prompt_kernel.forms(heads, torch.bfloat16)[:2]
        }
        for tokens in (128, 2**11, 2**13, 2**15):
            blocks = tuple(np.random.default_rng(0).permutation(blocks_of(tokens, BLOCK)).tolist())
            keys, values = torch.randn(2, len(blocks), heads.groups, BLOCK, heads.size).bfloat16()
            ids = np.zeros(min(tokens, 2**11), np.int32)
            layout = StepLayout.of_chunks([Chunk(ids, tokens - len(ids), blocks)], _HALF, BLOCK)
            qkv = (torch.randn(layout.tokens, heads.total, heads.size) * heads.size**-0.5).bfloat16()
            seconds = {}
            for way, kernel in kernels.items():
                attention = CachedAttention(heads, keys, values, ways=Ways(prompts=kernel))
                if tokens <= 2**11:
                    attention.attend(qkv, layout)  # for oneDNN, which prepares its products
                before = time.process_time()
                attention.attend(qkv, layout)
                seconds[way] = time.process_time() - before
            found[f"{name}, {tokens} tokens"] = {way: round(total, 4) for way, total in seconds.items()}
    return found


PARTS = {"answers": answers, "one": one, "contiguous": contiguous, "prompts": prompts}


def main(parts: Sequence[str]) -> None:
    found = {part: PARTS[part]() for part in parts or PARTS}
    print(json.dumps({"threads": torch.get_num_threads(), **found}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
