"""Counts the launches of a call: kernels, copies and graphs. `python -m benchmarks.kit.launches` needs no card: on the
`meta` device it counts torch's operations for a pass of BERT-large's shape and for a step of Llama-3.2-1B's.

An operation counts unless it is a view or an allocation. A fused one counts once, as it does on CUDA; one of several
kernels, too.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from deployments.engines import packed
from deployments.engines.packed import attention
from deployments.engines.packed.model import ModelOutput, PackedModel
from deployments.engines.packed.tensors import Place, Weights
from deployments.generation.engine import cache
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.paged_attention import gathered
from deployments.generation.scheduler.work import Chunk

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
_FREE = ("aten::empty", "aten::new_empty", "aten::detach")
_META = Place(torch.device("meta"), torch.bfloat16)
_LARGE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip
_LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that do something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (function.is_view or function.name().startswith(_FREE))
        return function(*args, **(kwargs or {}))


def launches(call: Callable[[], object], device: torch.device) -> int:
    """How many launches `call` takes on that device, without what only its first call does."""
    with torch.inference_mode():
        call()
        if device.type != "cuda":
            with Operations() as operations:
                call()
            return int(operations.count)
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            call()
            torch.cuda.synchronize(device)
    return int(sum(event.count for event in profiled.key_averages() if event.key.startswith(_LAUNCHES)))


def of_pass(shape: dict[str, Any], lengths: list[int]) -> int:
    """Launches of a packed pass of a BERT."""
    with torch.device("meta"):
        own = BertModel(BertConfig(**shape))
    with patch.object(attention, "_quickest", lambda ways: ways.varlen_cuda):
        parts = packed.build(own.config, Weights.of_module(own, _META))
    model = PackedModel(parts, _META, ModelOutput("cls"))
    ids = torch.zeros(sum(lengths), dtype=torch.int32, device="meta")
    return launches(lambda: model(ids, np.array(lengths, np.int32)), _META.device)


def of_step(shape: dict[str, Any], rows: int, *, flash: bool = True) -> int:
    """Launches of a step of a Llama with so many answers. `flash`: a GPU from sm80 on."""
    with torch.device("meta"):
        own = LlamaForCausalLM(LlamaConfig(**shape))
    with patch.object(cache, "paged_attention", lambda *_: gathered if flash else None):
        model = CausalModel(own.config, Weights.of_module(own, _META), blocks=2 * rows)
    chunks = [Chunk(np.zeros(1, np.int32), 130 + row, (2 * row, 2 * row + 1)) for row in range(rows)]
    return launches(lambda: model.step(chunks), _META.device)


def main() -> None:
    for lengths in ([20], [20, 75, 9, 40]):
        print(f"a pass of {lengths} tokens: {of_pass(_LARGE, lengths)}")
    for rows in (1, 32):
        both = (of_step(_LLAMA_1B, rows, flash=flash) for flash in (True, False))
        print("a step of {} rows: {}, without flash attention {}".format(rows, *both))


if __name__ == "__main__":
    main()
