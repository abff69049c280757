"""windve's engine on an NVIDIA GPU, against the card's peak and against sentence-transformers in float16. The model has
bge-large's shape. For what the CPU adds, run a calibration of the service.

TFLOP/s counts, per token, 2 for each weight of the layers, plus 4 * tokens * hidden for each layer's attention.
"""

import gc
import importlib.util
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.bench import Bench, Found, NotAvailable, all_of, median, values_of
from benchmarks.kit.cpu_time import CpuTime
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.shapes import bge_large_folder
from benchmarks.kit.sheet import Sheet, table
from calibration.devices.shapes import BERT_LARGE, BertShape, text_of
from calibration.devices.timing import product_speed, products, rates, seconds_of
from deployments.engines import TokenBatch, Vectors, embed
from deployments.engines.torch_engine import TorchEngine, import_torch
from deployments.errors import WindveError
from deployments.models.model_files import read_model_card
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Tokenizer
from deployments.settings import AcceleratorSettings, ModelSettings

WINDVE, WINDVE_IDS = "windve", "windve, from token ids"
PEER, PEER_WHOLE, PEER_FORWARD = (
    "sentence-transformers, batches of 32",
    "sentence-transformers, one batch",
    "sentence-transformers, forward alone",
)
OURS, PEERS = (WINDVE, WINDVE_IDS), (PEER, PEER_WHOLE, PEER_FORWARD)
CONTESTANTS = (*OURS, *PEERS)
PEAK = "peak"  # the other part, for --only
LENGTHS = (75, 512)
BATCHES = (1, 8, 32, 128, 256)

_PEER_BATCH = 32  # what sentence-transformers' encode takes unless told otherwise
_PASS_TOKENS = 16_384  # of a pass of windve's engine, and so the rows of the model's products
_SQUARE = 8192
_AGREEMENT = 0.99

Call = Callable[[], Vectors]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and on which device. A sample lasts at least `least_s`."""

    device: str
    dtype: str  # sentence-transformers'; windve chooses its own
    rounds: int
    least_s: float
    lengths: Sequence[int] = LENGTHS
    batches: Sequence[int] = BATCHES
    square: int = _SQUARE
    rows: int = _PASS_TOKENS


def run(bench: Bench) -> None:
    torch = import_torch("cuda")
    if not torch.cuda.is_available():
        raise NotAvailable(f"no CUDA device: PyTorch {torch.__version__} sees none")
    plan = Plan("cuda:0", "float16", *((1, 0.2) if bench.quick else (3, 0.5)))
    bench.found["gpu"] = _describe(torch, plan.device)
    with bench.turn():
        folder = bge_large_folder()
        measure(bench, plan, BERT_LARGE, folder)


def _describe(torch: Any, device: str) -> dict[str, Any]:
    told = torch.cuda.get_device_properties(device)
    return {
        "name": told.name,
        "memory_gib": round(told.total_memory / 2**30, 1),
        "capability": f"{told.major}.{told.minor}",
        "multiprocessors": told.multi_processor_count,
        "cuda": torch.version.cuda,
        "count": torch.cuda.device_count(),
    }


def measure(bench: Bench, plan: Plan, shape: BertShape, folder: Path) -> None:
    """Measure the products and the contestants, interleaved. Frees the device at the end."""
    torch = import_torch(plan.device)
    contestants = _load(bench, plan, folder)
    agree(bench, plan, contestants)
    cells = [(tokens, batch) for tokens in plan.lengths for batch in plan.batches]
    with bench.steps(plan.rounds * (1 + len(cells))) as step:
        for number in range(plan.rounds):
            step("products")
            if bench.wants(PEAK):
                _products(bench, plan, shape, number)
            for tokens, batch in cells:
                step(f"{batch} queries of {tokens} tokens")
                _compare(bench, plan, contestants, shape.operations(tokens), (tokens, batch, number))
    contestants.clear()
    gc.collect()
    if torch.device(plan.device).type == "cuda":
        torch.cuda.empty_cache()


def _products(bench: Bench, plan: Plan, shape: BertShape, number: int) -> None:
    for name, shapes in products(shape, plan.square, plan.rows):
        about = {"what": "product", "product": name, "size": " x ".join(map(str, shapes)), "round": number}
        try:
            told = product_speed(shapes, plan.device, plan.least_s)
        except RuntimeError as error:
            bench.missing(f"product, {name}", str(error))
            continue
        bench.sample(about, told, f"{told['tflops']:.1f} TFLOP/s")


class Windve:
    """The accelerator's engine with default settings: packed, in the dtype that it chooses."""

    def __init__(self, folder: Path, device: str) -> None:
        card = read_model_card(ModelSettings(id=str(folder)))
        self.tokenizer = Tokenizer(card)
        self.engine = TorchEngine(card, AcceleratorSettings(), device, 1)

    def calls(self, texts: Sequence[str]) -> dict[str, Call]:
        """Calls from texts to vectors, as in a replica but without Router and HTTP; and from token ids to vectors."""
        ready = TokenBatch.pack(self.tokenizer.encode(texts, Cuts(truncate=True)))
        never = threading.Event()

        def whole() -> Vectors:
            batch = TokenBatch.pack(self.tokenizer.encode(texts, Cuts(truncate=True)))
            return _unit(embed(self.engine, batch, never))

        return {WINDVE: whole, WINDVE_IDS: lambda: embed(self.engine, ready, never)}


class Peer:
    """sentence-transformers. Its vectors are copied back to the host too."""

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        from sentence_transformers import SentenceTransformer

        self._torch = import_torch(device)
        wanted = {"dtype": getattr(self._torch, dtype)}
        self._model = SentenceTransformer(str(folder), device=device, model_kwargs=wanted, local_files_only=True)
        self._model.eval()
        self._device = device

    def calls(self, texts: Sequence[str]) -> dict[str, Call]:
        """`encode` as a user calls it, with default batches and with one; and the forward pass on prepared tensors."""
        features = self.features(texts)

        def encode(batch: int) -> Vectors:
            found: Vectors = self._model.encode(list(texts), batch_size=batch, show_progress_bar=False)
            return found

        def forward() -> Vectors:
            with self._torch.inference_mode():
                answer = self._model(dict(features))["sentence_embedding"]
                found: Vectors = answer.cpu().numpy()
            return found

        found: dict[str, Call] = {PEER: lambda: encode(_PEER_BATCH), PEER_FORWARD: forward}
        if len(texts) > _PEER_BATCH:
            found[PEER_WHOLE] = lambda: encode(len(texts))
        return found

    def features(self, texts: Sequence[str]) -> dict[str, Any]:
        """Tensors on the device."""
        made = self._model.preprocess(list(texts))
        return {
            name: value.to(self._device) if isinstance(value, self._torch.Tensor) else value
            for name, value in made.items()
        }


def _unit(vectors: Vectors) -> Vectors:
    found: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


def _load(bench: Bench, plan: Plan, folder: Path) -> dict[str, Windve | Peer]:
    """The contestants that are selected and can be loaded."""
    found: dict[str, Windve | Peer] = {}
    if any(map(bench.wants, OURS)):
        try:
            windve = Windve(folder, plan.device)
            info = windve.engine.info
            bench.found["engine"] = {"dtype": info.dtype, "device": info.device, "why": info.why}
            bench.console.print(f"windve: {info.dtype}; {info.why}")
            found["windve"] = windve
        except (RuntimeError, WindveError, OSError) as error:
            bench.missing("windve", _said(error))
    if any(map(bench.wants, PEERS)):
        if importlib.util.find_spec("sentence_transformers") is None:
            bench.missing("sentence-transformers", "not installed: pip install -c constraints.txt '.[test]'")
            return found
        try:
            found["sentence-transformers"] = Peer(folder, plan.device, plan.dtype)
        except (RuntimeError, ValueError, OSError, TypeError) as error:
            bench.missing("sentence-transformers", _said(error))
    return found


def agree(bench: Bench, plan: Plan, contestants: dict[str, Windve | Peer]) -> None:
    """Drop the peer unless it computes the same vectors from as many tokens, by the smallest cosine."""
    windve, peer = contestants.get("windve"), contestants.get("sentence-transformers")
    if not isinstance(windve, Windve) or not isinstance(peer, Peer):
        return
    for tokens in plan.lengths:
        texts = [text_of(tokens, seed) for seed in range(8)]
        seen = peer.features(texts)["input_ids"].shape[-1]
        ours, theirs = windve.calls(texts)[WINDVE](), _unit(peer.calls(texts)[PEER]().astype(np.float32))
        cosine = float((ours * theirs).sum(axis=1).min())
        figures = {"cosine": cosine, "peer_tokens": seen}
        bench.sample({"what": "agreement", "tokens": tokens}, figures, f"smallest cosine {cosine:.5f}")
        if seen != tokens or not cosine >= _AGREEMENT:  # a NaN disagrees too
            why = f"computes something else: {seen} tokens instead of {tokens}, cosine {cosine:.4f}"
            bench.missing("sentence-transformers", why)
            contestants.pop("sentence-transformers", None)
            return


def _compare(
    bench: Bench, plan: Plan, contestants: Mapping[str, Windve | Peer], operations: int, cell: tuple[int, int, int]
) -> None:
    """Measure all contestants on a batch. Each round begins with another one."""
    tokens, batch, number = cell
    texts = [text_of(tokens, seed) for seed in range(batch)]
    calls: dict[str, Call] = {}
    for name, contestant in contestants.items():
        try:
            calls |= contestant.calls(texts)
        except RuntimeError as error:
            bench.missing(f"{name}, {batch} x {tokens} tokens", _said(error))
    wanted = [name for name in CONTESTANTS if name in calls and bench.wants(name)]
    first = number % max(1, len(wanted))
    for name in wanted[first:] + wanted[:first]:
        try:
            with CpuTime() as cpu:
                seconds = seconds_of(calls[name], plan.least_s)
        except RuntimeError as error:
            bench.missing(f"{name}, {batch} x {tokens} tokens", _said(error))
            continue
        told = rates(seconds, batch, tokens, operations) | {"others": cpu.others}
        about = {"contestant": name, "tokens": tokens, "batch": batch, "round": number}
        shown = f"{told['queries_s']:.1f} queries/s, {told['tflops']:.1f} TFLOP/s, p50 {told['p50_ms']:.2f} ms"
        bench.sample(about, told, shown)


def _said(error: Exception) -> str:
    """The first line of an error's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# --- tables and goals ---------------------------------------------------------------------------------------------


def sheets(found: Found) -> list[Sheet]:
    lengths = (_length_sheet(found, tokens) for tokens in LENGTHS)
    return [_products_sheet(found), *lengths, _ratios_sheet(found)]


def _products_sheet(found: Found) -> Sheet:
    gpu = {"name": "a GPU", "memory_gib": "-", "cuda": "-", **found.get("gpu", {})}
    columns = {"product": "{name}", "size": "{size}", "TFLOP/s": "{tflops:.1f}"}
    columns["all rounds"] = "{low:.1f} to {high:.1f}"
    rows = []
    for name, size in {sample["product"]: sample["size"] for sample in all_of(found, what="product")}.items():
        values = values_of(found, "tflops", what="product", product=name)
        row = {"tflops": statistics.median(values), "low": min(values), "high": max(values)}
        rows.append({"name": name, "size": size, **row})
    title = f"bfloat16 products on {gpu['name']} ({gpu['memory_gib']} GiB, CUDA {gpu['cuda']})"
    return table(f"{title}: the largest median is the peak", columns, rows)


def _length_sheet(found: Found, tokens: int) -> Sheet:
    columns = {
        "queries": "{batch}", "": "{name}", "queries/s": "{queries_s:,.1f}", "tokens/s": "{tokens_s:,.0f}",
        "TFLOP/s": "{tflops:,.1f}", "of the peak": "{share:.0%}", "p50, ms": "{p50_ms:,.2f}",
    }  # fmt: skip
    rows = []
    for batch, name in product(BATCHES, CONTESTANTS):
        about = {"contestant": name, "tokens": tokens, "batch": batch}
        row = {key: median(found, key, **about) for key in ("queries_s", "tokens_s", "tflops", "p50_ms")}
        if row["queries_s"] is not None:
            rows.append({**row, "batch": batch, "name": name, "share": ratio(row["tflops"], peak(found))})
    dtype = found.get("engine", {}).get("dtype", "-")
    rounds = len({sample["round"] for sample in found["samples"] if "contestant" in sample})
    title = f"{tokens} tokens; windve in {dtype}, sentence-transformers in float16; medians of {rounds} rounds"
    return table(f"{title}, interleaved", columns, rows)


def _ratios_sheet(found: Found) -> Sheet:
    columns = {
        "tokens": "{tokens}", "queries": "{batch}", "texts to vectors": "{whole:.2f}",
        "token ids to vectors": "{forward:.2f}", "smallest cosine": "{cosine:.5f}",
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for tokens, batch in product(LENGTHS, BATCHES):
        whole, forward = against_encode(found, tokens, batch), against_forward(found, tokens, batch)
        if whole is not None or forward is not None:
            cosine = median(found, "cosine", what="agreement", tokens=tokens)
            rows.append({"tokens": tokens, "batch": batch, "whole": whole, "forward": forward, "cosine": cosine})
    title = "windve is faster than sentence-transformers (the quicker of its batches) by"
    return table(title, columns, rows)


def goals(found: Found) -> list[Goal]:
    tokens, batch = LENGTHS[-1], BATCHES[-1]
    mine = median(found, "tflops", contestant=WINDVE_IDS, tokens=tokens, batch=batch)
    many = f"{batch} queries of {tokens} tokens"
    beside = f"{many}, texts to vectors, against sentence-transformers float16"
    return [
        Goal(f"{many} from token ids, of the measured bfloat16 peak", 0.5, ratio(mine, peak(found)), "of it"),
        Goal(beside, 2.0, against_encode(found, tokens, batch)),
    ]


def peak(found: Found) -> float | None:
    """The largest median of the products, in TFLOP/s."""
    names = {sample["product"] for sample in all_of(found, what="product")}
    return max((median(found, "tflops", what="product", product=name) or 0.0 for name in names), default=None)


def against_encode(found: Found, tokens: int, batch: int) -> float | None:
    """Speed from texts to vectors, tokenization included, over the faster of the two `encode` calls."""
    rates = [_rate(found, name, tokens, batch) for name in (PEER, PEER_WHOLE)]
    return ratio(_rate(found, WINDVE, tokens, batch), max((rate for rate in rates if rate is not None), default=None))


def against_forward(found: Found, tokens: int, batch: int) -> float | None:
    """Speed from token ids to vectors, over the peer's forward pass."""
    return ratio(_rate(found, WINDVE_IDS, tokens, batch), _rate(found, PEER_FORWARD, tokens, batch))


def _rate(found: Found, name: str, tokens: int, batch: int) -> float | None:
    return median(found, "queries_s", contestant=name, tokens=tokens, batch=batch)
