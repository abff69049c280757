"""Text generation on the CPU: windve's steps, transformers' static and continuous batching, openvino-genai, vLLM and
llama.cpp, each in its own environment. The model has Qwen2.5-0.5B's shape, in float32 and bfloat16.

All use the same random weights, and the same number formats of weights, products, keys and values. Prompts have 128
tokens, with bfloat16 also 2,048 and 8,192, and the answers of a batch run together. Reports a batch's tokens per
second, prompts included; those of prompts alone; how fast steps of one token read the weights (time of whole answers
minus that of first tokens); and how fast the same cores sum numbers in memory.
"""

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.kit.bench import Bench, Found, NotAvailable, median
from benchmarks.kit.environments import binaries
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.serving import ROOT
from benchmarks.kit.sheet import Sheet, table
from deployments.engines.torch_engine import import_torch
from deployments.hardware.affinity import read_cpu_shape

_LEAST = {1: 0.9, 8: 0.9, 32: 1.0, 40: 0.9}  # of the best peer, by batch
BATCHES = tuple(_LEAST)
LONG = {2048: (1, 8), 8192: (1,)}  # tokens of a prompt -> batches, in bfloat16
WINDVE = "windve"
LIBRARIES = {  # name -> (in `peers.decoders`, environment)
    WINDVE: ("windve", None),
    "generate": ("generate", None),
    "generate_batch": ("generate_batch", None),
    "openvino-genai": ("openvino", "openvino_genai"),
    "vLLM": ("vllm", "vllm_cpu"),
    "llama.cpp": ("llama_cpp", "llama_cpp"),
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
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
_FEWEST = 5  # the lowest token id in prompts; lower ones are special in some libraries
_STREAM_NUMBERS = 2**26  # of 8 bytes
_STREAMS = 5


def run(bench: Bench) -> None:
    """Contestants are named "windve fp32", "vLLM bf16" and so on."""
    answer = QUICK_ANSWER if bench.quick else ANSWER
    wanted = [(name, dtype) for dtype in DTYPES for name in LIBRARIES if bench.wants(f"{name} {DTYPES[dtype]}")]
    dtypes = {dtype for _, dtype in wanted}
    with (
        bench.turn(),
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        bench.steps(len(wanted)) as step,
    ):
        weights = {dtype: pool.submit(write, SHAPE, dtype, Path(folder, dtype)).result() for dtype in dtypes}
        for name, dtype in wanted:
            contestant = f"{name} {DTYPES[dtype]}"
            step(contestant)
            memory = pool.submit(memory_rate).result()  # before the child loads its model
            try:
                with _Child(name, Path(folder, dtype), dtype) as child:
                    for prompt, batch in _cases(dtype):
                        found = bench.measure(partial(child.measure, prompt, batch, answer, weights[dtype]))
                        found["memory"] = memory
                        about = {"contestant": contestant, "prompt": prompt, "batch": batch, "answer": answer}
                        show = f"{found['rate']:.1f} tokens/s; weights {found['weights']:.1f} GB/s, memory {memory:.1f}"
                        bench.sample(about, found, show)
            except (NotAvailable, OSError, ValueError) as error:
                bench.missing(contestant, str(error) or type(error).__name__)


def _cases(dtype: str) -> list[tuple[int, int]]:
    """(tokens of a prompt, batch)."""
    long = [(prompt, batch) for prompt, batches in LONG.items() for batch in batches]
    return [*((PROMPT, batch) for batch in BATCHES), *(long if dtype == "bfloat16" else ())]


def write(shape: dict[str, Any], dtype: str, folder: Path) -> int:
    """Write a model with random weights. Returns how many bytes of it each step reads."""
    torch = import_torch("cpu")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape)).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


class _Child:
    """A library in a separate process (`peers.decoders`)."""

    def __init__(self, name: str, folder: Path, dtype: str) -> None:
        """Raises NotAvailable if its environment cannot be created."""
        library, environment = LIBRARIES[name]
        python = sys.executable if environment is None else str(binaries(environment, "--no-deps") / "python")
        words = [python, "-m", "benchmarks.peers.decoders", library, str(folder), dtype]
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until `__exit__`
        self._process = subprocess.Popen(  # noqa: S603 - windve's own words
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def measure(self, prompt: int, batch: int, answer: int, weight_bytes: int) -> dict[str, Any]:
        """Measure after a short warm-up. `rate` in tokens/s, `weights` in GB/s."""
        self._decode(min(prompt, PROMPT), batch, 2)
        first_s, _ = self._decode(prompt, batch, 1)
        seconds, tokens = self._decode(prompt, batch, answer)
        step_s = (seconds - first_s) / (answer - 1)
        return {
            "rate": batch * answer / seconds,
            "prompts": batch * prompt / first_s,
            "first_s": first_s,
            "step_s": step_s,
            "weights": weight_bytes / step_s / 1e9,
            "firsts": [row[0] for row in tokens],
        }

    def _decode(self, prompt: int, batch: int, answer: int) -> tuple[float, list[list[int]]]:
        prompts = np.random.default_rng(batch).integers(_FEWEST, SHAPE["vocab_size"], (batch, prompt)).tolist()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"prompts": prompts, "answer": answer}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise NotAvailable(self._last_words()) from None
        line = self._process.stdout.readline()
        if not line:
            raise NotAvailable(self._last_words())
        found = json.loads(line)
        if [len(row) for row in found["tokens"]] != [answer] * batch:
            raise NotAvailable("its answers have other lengths than they should")
        return found["seconds"], found["tokens"]

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else f"it ended with the status {self._process.returncode}"


def memory_rate() -> float:
    """GB/s at which all cores sum numbers in memory; the best of several runs."""
    torch = import_torch("cpu")
    torch.set_num_threads(read_cpu_shape().usable)
    numbers = torch.ones(_STREAM_NUMBERS, dtype=torch.int64)
    taken = []
    for _ in range(_STREAMS):
        began = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - began)
    return float(numbers.nbytes) / min(taken) / 1e9


# --- tables and goals ---------------------------------------------------------------------------------------------


def sheets(found: Found) -> list[Sheet]:
    return [sheet for dtype, short in DTYPES.items() for sheet in _sheets_of(found, dtype, short)]


def _sheets_of(found: Found, dtype: str, short: str) -> Iterator[Sheet]:
    about = [{"prompt": prompt, "batch": batch} for prompt, batch in _cases(dtype)]
    lengths = " and ".join(sorted({str(sample["answer"]) for sample in found["samples"]}))
    keys = {"prompt": "{prompt:,}", "at once": "{batch}"}
    rates, reads, prompts = [], [], []
    for one in about:
        rate, read = _figures(found, "rate", short, **one), _figures(found, "weights", short, **one)
        if any(rate.values()):
            memory = median(found, "memory")
            rates.append({**rate, **one, "times": _to_best(found, "rate", short, **one)})
            reads.append({**read, **one, "memory": memory, "share": ratio(read[WINDVE], memory)})
            prompted = _figures(found, "prompts", short, **one)
            prompts.append({**prompted, **one, "times": _to_best(found, "prompts", short, **one)})
    if rates:
        each = {name: f"{{{name}:.1f}}" for name in LIBRARIES}
        last = {"windve to the best of them": "{times:.2f} x"}
        yield table(f"{dtype}: answers of {lengths} tokens, tokens/s", {**keys, **each, **last}, rates)
        yield table(f"{dtype}: tokens/s of prompts, to the first token", {**keys, **each, **last}, prompts)
        steps = {**keys, **each, "plain sum of memory": "{memory:.1f}", "windve's share of it": "{share:.0%}"}
        yield table(f"{dtype}: weights read by steps of one token each, GB/s", steps, reads)


def _figures(found: Found, figure: str, short: str, **about: int) -> dict[str, float | None]:
    """The figure of each library, by name."""
    return {name: median(found, figure, contestant=f"{name} {short}", **about) for name in LIBRARIES}


def _to_best(found: Found, figure: str, short: str, **about: int) -> float | None:
    """The tokens/s of windve over those of the fastest peer."""
    rates = _figures(found, figure, short, **about)
    best = max((rate for name, rate in rates.items() if name != WINDVE and rate is not None), default=None)
    return ratio(rates[WINDVE], best)


def goals(found: Found) -> list[Goal]:
    def least(figure: str, cases: Iterable[tuple[int, int]]) -> float | None:
        """The least share of the best peer's."""
        shares = [
            _to_best(found, figure, short, prompt=prompt, batch=batch)
            for prompt, batch in cases
            for short in DTYPES.values()
        ]
        return min((share for share in shares if share is not None), default=None)

    every = _cases("bfloat16")
    of_batch = {batch: [case for case in every if case[1] == batch] for batch in BATCHES}
    return [
        *(
            Goal(
                f"windve against the best of the others, {batch} at once, the least",
                _LEAST[batch],
                least("rate", cases),
            )
            for batch, cases in of_batch.items()
        ),
        Goal("prompts alone, against the best of the others, the least", 1.0, least("prompts", every)),
    ]
