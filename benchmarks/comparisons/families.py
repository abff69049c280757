"""The packed form against the model's own code, for each family at the shape of its smallest public model.

Both compute the same queries in one process, on all cores, in the number format that is fastest on this CPU. They take
turns, and alternate who begins. Reports the median over the turns, and the quartiles of the gain per turn.
"""

import copy
import math
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.bench import Bench, Found, median
from benchmarks.kit.goal import Goal
from benchmarks.kit.sheet import Sheet, table
from calibration.devices.shapes import SHAPES, FamilyShape, write_family
from deployments.engines import TokenBatch, embed
from deployments.engines.races import quickest_cpu_dtype
from deployments.engines.torch_engine import TorchEngine, import_torch
from deployments.hardware.affinity import read_cpu_shape
from deployments.models.model_files import ModelCard, read_model_card
from deployments.settings import CpuSettings, ModelSettings

FORMS = ("packed", "padded")
_LEAST_TURNS = 4


def _mixed(queries: int) -> list[int]:
    """Log-normal lengths in random order: a few long ones among many short ones. 16 have 9 to 180 tokens, mean 54."""
    spread = statistics.NormalDist(3.7, 0.8)
    lengths = [round(math.exp(spread.inv_cdf((number + 0.5) / queries))) for number in range(queries)]
    return [lengths[at] for at in np.random.default_rng(0).permutation(queries)]


LOADS: dict[str, Callable[[int], list[int]]] = {  # the lengths of so many queries, in tokens
    "75 tokens": lambda queries: [75] * queries,
    "mixed": _mixed,
}


def run(bench: Bench) -> None:
    seconds = 1.0 if bench.quick else 6.0
    plan = {family: shape for family, shape in SHAPES.items() if bench.wants(family)}
    with bench.steps(len(plan)) as step:
        for family, shape in plan.items():
            step(family)
            with bench.turn(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                told = bench.measure(lambda: {"loads": pool.submit(measure, shape, seconds).result()})  # noqa: B023
            for found in told["loads"]:
                about = {"family": family, "model": shape.model, "load": found.pop("load")}
                rates = f"packed {found['packed']:.1f} queries/s, own code {found['padded']:.1f}"
                shown = f"{rates} ({found['gain']:.2f} x, {found['low']:.2f} to {found['high']:.2f})"
                bench.sample(about, found | {"others": told["others"]}, shown)


def measure(shape: FamilyShape, seconds: float) -> list[dict[str, Any]]:
    """For each load: the rates of both forms, and the seconds of every turn."""
    threads = read_cpu_shape().usable
    import_torch("cpu").set_num_threads(threads)
    dtype, _ = quickest_cpu_dtype()
    with tempfile.TemporaryDirectory() as folder:
        write_family(shape, Path(folder))
        card = read_model_card(ModelSettings(id=folder, pooling=shape.pooling))
        engines = _engines(card, dtype, threads)
    found = []
    for load, lengths_of in LOADS.items():
        lengths = lengths_of(shape.queries)
        turns = _in_turns(engines, TokenBatch.random(card.vocab_size, lengths, seed=0), seconds)
        rates = {form: len(lengths) / statistics.median(taken) for form, taken in turns.items()}
        gains = [padded / packed for packed, padded in zip(*(turns[form] for form in FORMS), strict=True)]
        low, gain, high = statistics.quantiles(gains, n=4)
        found.append(
            {"load": load, "dtype": dtype, "threads": threads, **rates, "gain": gain, "low": low, "high": high}
            | {"seconds": turns}
        )
    return found


def _in_turns(engines: Mapping[str, TorchEngine], batch: TokenBatch, seconds: float) -> dict[str, list[float]]:
    """Seconds of each turn by form, after one warm-up turn."""
    taken: dict[str, list[float]] = {form: [] for form in engines}
    turn, ends = 0, time.perf_counter() + seconds
    while turn <= _LEAST_TURNS or time.perf_counter() < ends:
        for form in list(engines)[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            embed(engines[form], batch, threading.Event())
            if turn:
                taken[form].append(time.perf_counter() - started)
        turn += 1
    return taken


def _engines(card: ModelCard, dtype: str, threads: int) -> dict[str, TorchEngine]:
    """One for each form, on the same threads."""
    first = TorchEngine(card, CpuSettings.model_validate({"engine": "torch", "dtype": dtype}), "cpu", threads)
    engines = {form: copy.copy(first) for form in FORMS}
    for form, engine in engines.items():
        if engine.form != form:
            engine.use(form, dtype)
    return engines


# --- tables and goals ---------------------------------------------------------------------------------------------


def sheets(found: Found) -> list[Sheet]:
    columns = {
        "family": "{family}", "shape of": "{shape}", "at once": "{queries}", "load": "{load}",
        "packed, queries/s": "{packed:.1f}", "own code, queries/s": "{padded:.1f}", "packed is": "{gain:.2f} x",
        "half of the turns": "{low:.2f} to {high:.2f} x",
    }  # fmt: skip
    rows = []
    for (family, shape), load in product(SHAPES.items(), LOADS):
        figures = {key: median(found, key, family=family, load=load) for key in (*FORMS, "gain", "low", "high")}
        if None not in figures.values():
            model = f"{shape.model} ({shape.note})" if shape.note else shape.model
            rows.append({**figures, "family": family, "shape": model, "queries": shape.queries, "load": load})
    dtypes = " and ".join(sorted({sample["dtype"] for sample in found["samples"]}))
    return [table(f"Packed against the model's own code, in {dtypes}", columns, rows)]


def in_words(found: Found, family: str) -> str:
    """How much faster a family's packed form is, as docs/models.md writes it: at 75 tokens, and with mixed lengths."""
    gains = [median(found, "gain", family=family, load=load) for load in LOADS]
    return "not measured" if None in gains else ", ".join(f"{gain:.2f} x" for gain in gains)


def goals(found: Found) -> list[Goal]:
    return [
        Goal(f"packed against own code, the least of all families, {load}", 1.0, _least(found, load)) for load in LOADS
    ]


def _least(found: Found, load: str) -> float | None:
    gains = (median(found, "gain", family=family, load=load) for family in SHAPES)
    return min((gain for gain in gains if gain is not None), default=None)
