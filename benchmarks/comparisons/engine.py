"""Engines alone, each in a separate process: queries/s by batch and length, resident memory, and their share of the
cores' peak multiplication rate.
"""

import multiprocessing
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import psutil

from benchmarks.kit.bench import Bench, Found, median, values_of
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.shapes import bge_large_folder
from benchmarks.kit.sheet import Sheet, table
from benchmarks.kit.texts import model_folder
from deployments.engines import Engine, TokenBatch, create_engine, embed
from deployments.engines.races import quickest_cpu_dtype
from deployments.engines.torch_engine import TorchEngine
from deployments.hardware.affinity import read_cpu_shape
from deployments.hardware.device_detector import quick_cpu_dtype
from deployments.models.model_files import ModelCard, read_model_card
from deployments.settings import CpuSettings, ModelSettings

MINILM, LARGE = "MiniLM-L6", "BERT-large shape"
_BATCHES, _LENGTHS = {MINILM: (1, 8, 32, 128), LARGE: (1, 8)}, {MINILM: (16, 75, 256), LARGE: (75, 512)}
_SOAK_QUERIES, _SOAK_BATCH, _SETTLED_AFTER = 100_000, 100, 0.1
_ALLOWED_GROWTH_MB = 50.0
_PRODUCT = {MINILM: (1200, 384, 1536), LARGE: (1200, 1024, 4096)}  # rows, and a layer's largest weights


@dataclass(frozen=True, slots=True)
class Way:
    """An engine, a number format, and for torch the form: packed, padded, or automatic."""

    engine: str
    dtype: str
    form: str = ""

    def __str__(self) -> str:
        return " ".join(word for word in (self.engine, self.dtype, self.form) if word)


_FORMS = (("torch", "packed"), ("torch", "padded"))
WAYS = tuple(Way(engine, dtype, form) for dtype in ("bfloat16", "float32") for engine, form in _FORMS)


def _plan() -> list[tuple[str, Way]]:
    """MiniLM in both formats, the large shape in the fastest. bfloat16 only if the CPU has instructions for it."""
    narrow, quickest = quick_cpu_dtype()[0], quickest_cpu_dtype()[0]
    ways = [way for way in WAYS if way.dtype in {narrow, "float32"}]
    return [(MINILM, way) for way in ways] + [(LARGE, way) for way in ways if way.dtype == quickest]


def run(bench: Bench) -> None:
    seconds, soak = (0.5, 2_000) if bench.quick else (1.0, _SOAK_QUERIES)
    plan = [(model, way) for model, way in _plan() if bench.wants(str(way))]
    with bench.steps(len(plan) + 1) as step:
        for model, way in plan:
            step(f"{model}, {way}")
            with bench.turn():
                for found in _in_a_process(_measure, model, way, seconds):
                    about = {"model": model, "way": str(way), **found["about"]}
                    bench.sample(about, found["figures"], found["show"])
        step("memory")
        with bench.turn():
            # In the form that the engine chose: a model thrown away for another would leave memory to grow into.
            chosen = Way("torch", quickest_cpu_dtype()[0])
            grown = _in_a_process(_soak, chosen, soak)
            shown = f"{grown['settled_mb']:.0f} MB after the first tenth, {grown['mb']:.0f} MB at the end"
            bench.sample({"way": str(chosen), "queries": soak}, grown, shown)


def _in_a_process(work: Any, *words: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *words).result()


def _load(model: str, way: Way) -> tuple[ModelCard, Engine]:
    folder = model_folder() if model == MINILM else bge_large_folder()
    card = read_model_card(ModelSettings(id=str(folder)))
    settings = CpuSettings.model_validate({"engine": way.engine, "dtype": way.dtype})
    engine = create_engine(card, settings, "cpu", read_cpu_shape().usable)
    if isinstance(engine, TorchEngine) and way.form not in {"", engine.form}:
        engine.use(way.form, way.dtype)
    return card, engine


def _measure(model: str, way: Way, seconds: float) -> list[dict[str, Any]]:
    """Measure the machine's current peak, then each batch and length."""
    before = _resident_mb()
    card, engine = _load(model, way)
    loaded_mb = _resident_mb() - before
    ceiling = _gflops(way.dtype, *_PRODUCT[model])
    found = [
        {
            "about": {"what": "ceiling"},
            "figures": {"gflops": ceiling, "resident_mb": loaded_mb},
            "show": f"{ceiling:.0f} GFLOP/s in one product, {loaded_mb:.0f} MB resident",
        }
    ]
    for length in _LENGTHS[model]:
        for queries in _BATCHES[model]:
            batch = TokenBatch.random(card.vocab_size, [length] * queries, seed=0)
            times = _times(engine, batch, seconds)
            rate = queries / float(np.median(times))
            reached = rate * length * _flops_per_token(card, length) / 1e9
            found.append(
                {
                    "about": {"what": "rate", "tokens": length, "queries": queries},
                    "figures": {"queries_s": rate, "tokens_s": rate * length, "gflops": reached, "times_s": times},
                    "show": f"{rate:.1f} queries/s, {reached:.0f} GFLOP/s ({reached / ceiling:.0%} of the ceiling)",
                }
            )
    return found


def _times(engine: Engine, batch: TokenBatch, seconds: float) -> list[float]:
    times: list[float] = []
    embed(engine, batch, threading.Event())
    ends = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < ends:
        started = time.perf_counter()
        embed(engine, batch, threading.Event())
        times.append(time.perf_counter() - started)
    return times


def _flops_per_token(card: ModelCard, length: int) -> float:
    """FLOPs per token: 2 per weight of the layers (12 h^2 if the intermediate size is 4 h), plus attention's 4 L h."""
    hidden = card.dimension
    return card.layers * (2 * 12 * hidden**2 + 4 * length * hidden)


def _gflops(dtype: str, rows: int, width: int, height: int) -> float:
    """The peak rate of a product on all cores: torch's own, or oneDNN's with weights laid out beforehand."""
    import torch

    torch.set_num_threads(read_cpu_shape().usable)
    left, right = (torch.randn(shape).to(getattr(torch, dtype)) for shape in ((rows, width), (height, width)))
    onednn = torch.ops.mkldnn
    best = float("inf")
    with torch.inference_mode():
        laid_out = onednn._reorder_linear_weight(right, rows)  # noqa: SLF001 - torch's
        for product in (
            lambda: torch.nn.functional.linear(left, right),
            lambda: onednn._linear_pointwise.default(left, laid_out, None, "none", [], ""),  # noqa: SLF001
        ):
            for _ in range(60):
                started = time.perf_counter()
                product()
                best = min(best, time.perf_counter() - started)
    return 2 * rows * width * height / best / 1e9


def _soak(way: Way, queries: int) -> dict[str, Any]:
    """Resident memory while batches of all shapes run."""
    card, engine = _load(MINILM, way)
    random = np.random.default_rng(0)
    curve = []
    for done in range(0, queries, _SOAK_BATCH):
        lengths = random.integers(3, 40, _SOAK_BATCH).tolist()
        embed(engine, TokenBatch.random(card.vocab_size, lengths, seed=done), threading.Event())
        if done % (queries // 20) == 0:
            curve.append(_resident_mb())
    settled = curve[int(len(curve) * _SETTLED_AFTER)]
    return {"settled_mb": settled, "mb": _resident_mb(), "growth_mb": _resident_mb() - settled, "curve_mb": curve}


def _resident_mb() -> float:
    return float(psutil.Process().memory_info().rss / 2**20)


# --- tables and goals ---------------------------------------------------------------------------------------------


def sheets(found: Found) -> list[Sheet]:
    return [_model_sheet(found, model) for model in (MINILM, LARGE)]


def _model_sheet(found: Found, model: str) -> Sheet:
    shapes = list(product(_LENGTHS[model], _BATCHES[model]))
    columns = {"queries/s": "{way}"}
    columns |= {f"{queries} of {length}": f"{{{queries} of {length}:,.1f}}" for length, queries in shapes}
    rows = []
    for way in map(str, WAYS):
        about = {"model": model, "way": way}
        row: dict[str, Any] = {f"{many} of {length}": _rate(found, model, way, length, many) for length, many in shapes}
        if reached := values_of(found, "gflops", what="rate", **about):
            share = ratio(max(reached), median(found, "gflops", what="ceiling", **about))
            memory = median(found, "resident_mb", what="ceiling", **about)
            rows.append({**row, "way": way, "share": share, "memory": memory})
    title = f"{model}: queries/s by batch and tokens of each query"
    return table(title, columns | {"of the ceiling": "{share:.0%}", "MB": "{memory:.0f}"}, rows)


def goals(found: Found) -> list[Goal]:
    rates = {form: _best(found, packed=form == "packed") for form in ("packed", "other")}
    growth = median(found, "growth_mb")
    return [
        Goal("MiniLM, 32 of 75 tokens, packed against the best other way", 1.0, ratio(rates["packed"], rates["other"])),
        Goal("memory growth over 100,000 queries", _ALLOWED_GROWTH_MB, growth, "MB", at_most=True),
    ]


def _best(found: Found, *, packed: bool) -> float | None:
    rates = (_rate(found, MINILM, str(way), 75, 32) for way in WAYS if (way.form == "packed") == packed)
    return max((rate for rate in rates if rate is not None), default=None)


def _rate(found: Found, model: str, way: str, tokens: int, queries: int) -> float | None:
    return median(found, "queries_s", model=model, way=way, tokens=tokens, queries=queries)
