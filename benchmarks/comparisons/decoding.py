"""Answers of a language model on the CPU, windve's steps against transformers' `generate`: Qwen2.5-0.5B's shape.

The weights are random and the same for both, in the number format that this CPU multiplies quickest, on all cores.
Prompts have 128 tokens and all answers of a batch go on together. What is told is a batch's tokens per second, prompts
included. Beside it stands how quickly windve's steps of one token each read the weights, and how quickly the same cores
sum numbers in memory.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from benchmarks.kit.bench import Bench, Found, median, settle
from benchmarks.kit.cpu_time import CpuTime
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.sheet import Sheet
from deployments.engines.product_race import quickest_cpu_dtype
from deployments.engines.torch_engine import import_torch
from deployments.generation.blocks import blocks_of
from deployments.generation.chunk import Chunk
from deployments.hardware.affinity import read_cpu_shape

BATCHES = (1, 8, 32)
CONTESTANTS = ("windve", "transformers")
PROMPT = ANSWER = 128  # tokens
QUICK_ANSWER = 16
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_STEP_TOKENS = 2048  # of prompts
_STREAM_NUMBERS = 2**26  # of 8 bytes
_STREAMS = 5

Ids = npt.NDArray[np.int32]  # [answers, tokens]


def run(bench: Bench) -> None:
    answer = QUICK_ANSWER if bench.quick else ANSWER
    with bench.turn(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(prepare, SHAPE, max(BATCHES)).result()
        with bench.steps(len(BATCHES)) as step:
            for batch in BATCHES:
                step(f"{batch} at once")
                settle()
                with CpuTime() as cpu:
                    found = pool.submit(measure, batch, answer).result()
                rates = ", ".join(f"{name} {found[name]:.1f}" for name in CONTESTANTS)
                show = f"{rates} tokens/s; weights {found['weights']:.1f} GB/s, memory {found['memory']:.1f}"
                bench.sample({"batch": batch, "answer": answer}, found | {"others": cpu.others}, show)


@dataclass(slots=True)
class _Both:
    """windve's model and transformers', of the same weights."""

    ours: Any
    theirs: Any
    dtype: str
    weight_bytes: int  # that each step reads
    ended: list[float] = field(default_factory=list)  # when each step of `own` ended


_prepared: dict[str, _Both] = {}  # in the process that measures


def prepare(shape: dict[str, Any], most: int) -> None:
    """Make both models, for batches of at most so many answers."""
    torch = import_torch("cpu")
    torch.set_num_threads(read_cpu_shape().usable)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from deployments.engines.packed.tensors import Place, Weights
    from deployments.generation.causal_model import CausalModel

    dtype, _ = quickest_cpu_dtype()
    torch.manual_seed(0)
    config = Qwen2Config(**shape)
    theirs = Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval()
    place = Place(torch.device("cpu"), getattr(torch, dtype))
    ours = CausalModel(config, Weights.of_module(theirs, place), most * blocks_of(PROMPT + ANSWER))
    read = sum(weight.numel() * weight.element_size() for weight in theirs.parameters())
    _prepared["both"] = _Both(ours, theirs, dtype, read)


def measure(batch: int, answer: int) -> dict[str, Any]:
    """Tokens/s of each contestant, the second after a short run that does not count, and GB/s."""
    both = _prepared["both"]
    prompts = np.random.default_rng(batch).integers(5, SHAPE["vocab_size"], (batch, PROMPT)).astype(np.int32)
    prompts %= both.theirs.config.vocab_size
    ways: dict[str, Callable[[int], object]] = {
        "windve": lambda tokens: own(both, prompts, tokens),
        "transformers": lambda tokens: generated(both, prompts, tokens),
    }
    found: dict[str, Any] = {"dtype": both.dtype}
    for name, way in ways.items():
        way(2)
        began = time.perf_counter()
        way(answer)
        found[name] = batch * answer / (time.perf_counter() - began)
        if name == "windve":
            found["weights"] = both.weight_bytes / float(np.median(np.diff(both.ended))) / 1e9
    return found | {"memory": _memory()}


def own(both: _Both, prompts: Ids, answer: int) -> Ids:
    """The greedy tokens, by windve's steps; the prompts in steps of so many tokens as a replica's."""
    count = blocks_of(PROMPT + ANSWER)
    tables = np.arange(len(prompts) * count).reshape(len(prompts), count).tolist()

    def step(ids: Ids, start: int, rows: range) -> Ids:
        chunks = [Chunk(ids[row], start, tables[row]) for row in rows]
        picked: Ids = both.ours.step(chunks).argmax(-1).numpy().astype(np.int32)
        return picked

    tokens = [np.concatenate([step(prompts, 0, rows) for rows in _in_steps(len(prompts))])]
    both.ended = [time.perf_counter()]
    for place in range(PROMPT, PROMPT + answer - 1):
        tokens.append(step(tokens[-1][:, None], place, range(len(prompts))))
        both.ended.append(time.perf_counter())
    return np.stack(tokens, 1)


def generated(both: _Both, prompts: Ids, answer: int) -> Ids:
    """The same by transformers."""
    torch = import_torch("cpu")
    ids = torch.from_numpy(prompts.astype(np.int64))
    with torch.inference_mode():
        found = both.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=answer,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: Ids = found[:, PROMPT:].numpy().astype(np.int32)
    return tokens


def _in_steps(rows: int) -> Iterator[range]:
    most = _STEP_TOKENS // PROMPT
    return (range(first, min(rows, first + most)) for first in range(0, rows, most))


def _memory() -> float:
    """GB/s that all cores reach when they sum numbers, the best of some times."""
    torch = import_torch("cpu")
    numbers = torch.ones(_STREAM_NUMBERS, dtype=torch.int64)
    taken = []
    for _ in range(_STREAMS):
        began = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - began)
    return float(numbers.nbytes) / min(taken) / 1e9


def sheets(found: Found) -> list[Sheet]:
    head = ["at once", "windve, tokens/s", "transformers' generate", "windve is", "weights read, GB/s", "memory, GB/s"]
    rows = []
    for batch in BATCHES:
        values = [median(found, figure, batch=batch) for figure in (*CONTESTANTS, "weights", "memory")]
        if None not in values:
            ours, theirs, weights, memory = (float(value or 0) for value in values)
            figures = f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f} x", f"{weights:.1f}", f"{memory:.1f}"
            rows.append([str(batch), *figures])
    answers = " and ".join(sorted({f"{sample['answer']} in {sample['dtype']}" for sample in found["samples"]}))
    return [Sheet(f"Answers of Qwen2.5-0.5B's shape: prompts of {PROMPT} tokens, answers of {answers}", head, rows)]


def goals(found: Found) -> list[Goal]:
    return [
        Goal(
            f"windve against generate, {batch} at once",
            0.9 if batch == 1 else 1.0,
            ratio(*(median(found, name, batch=batch) for name in CONTESTANTS)),
        )
        for batch in BATCHES
    ]


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(CONTESTANTS):
        rates = [median(found, name, batch=batch) or 0.0 for batch in BATCHES]
        axes.bar(np.arange(len(BATCHES)) + 0.4 * place, rates, 0.38, label=name)
    axes.set_xticks(np.arange(len(BATCHES)) + 0.2, [str(batch) for batch in BATCHES])
    axes.set(xlabel="answers at once", ylabel="tokens/s", ylim=(0, None))
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
