"""The packed form against the model's own code, for each family at the shape of its smallest public model.

Both compute the same queries in turns, in one process and in the number format that this CPU multiplies quickest.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.kit.bench import Bench, Found, median
from benchmarks.kit.family_shapes import SHAPES, FamilyShape, write_family
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.sheet import Sheet
from deployments.engines import TokenBatch, embed
from deployments.engines.product_race import quickest_cpu_dtype
from deployments.engines.torch_engine import TorchEngine, import_torch
from deployments.hardware.affinity import read_cpu_shape
from deployments.models.model_files import read_model_card
from deployments.settings import CpuSettings, ModelSettings

FORMS = ("packed", "padded")
_QUERIES, _TOKENS, _MOST = 16, 75, 300
_LEAST_TURNS = 3
_TIMED = {"75 tokens": [_TOKENS] * _QUERIES}


def _mixed() -> list[int]:
    """Lengths of a mixed batch: a few long queries among many short ones, 58 tokens in the mean."""
    random = np.random.default_rng(0)
    lengths: list[int] = np.clip(random.lognormal(3.7, 0.8, _QUERIES), 4, _MOST).astype(int).tolist()
    return lengths


LOADS = _TIMED | {"mixed": _mixed()}


def run(bench: Bench) -> None:
    seconds = 1.0 if bench.quick else 6.0
    plan = {family: shape for family, shape in SHAPES.items() if bench.wants(family)}
    with bench.steps(len(plan)) as step:
        for family, shape in plan.items():
            step(family)
            with bench.turn(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                for found in pool.submit(measure, shape, seconds).result():
                    gain = found["packed"] / found["padded"]
                    shown = f"packed {found['packed']:.1f} queries/s, own code {found['padded']:.1f} ({gain:.2f} x)"
                    bench.sample({"family": family, "model": shape.model, "load": found.pop("load")}, found, shown)


def measure(shape: FamilyShape, seconds: float) -> list[dict[str, Any]]:
    """Of each load the queries/s of both forms: the quickest turn counts."""
    threads = read_cpu_shape().usable
    import_torch("cpu").set_num_threads(threads)
    dtype, _ = quickest_cpu_dtype()
    with tempfile.TemporaryDirectory() as folder:
        write_family(shape, Path(folder))
        card = read_model_card(ModelSettings(id=folder, pooling=shape.pooling))
        engines = {form: _engine(card, dtype, threads, form) for form in FORMS}
    found = []
    for load, lengths in LOADS.items():
        batch = TokenBatch.random(card.vocab_size, lengths, seed=0)
        best = dict.fromkeys(FORMS, float("inf"))
        turns, ends = 0, time.perf_counter() + seconds
        while turns < _LEAST_TURNS or time.perf_counter() < ends:
            for form, engine in engines.items():
                started = time.perf_counter()
                embed(engine, batch, threading.Event())
                best[form] = min(best[form], time.perf_counter() - started)
            turns += 1
        found.append({"load": load, "dtype": dtype, **{form: len(batch) / best[form] for form in FORMS}})
    return found


def _engine(card: Any, dtype: str, threads: int, form: str) -> TorchEngine:
    engine = TorchEngine(card, CpuSettings.model_validate({"engine": "torch", "dtype": dtype}), "cpu", threads)
    if engine.form != form:
        engine.use(form, dtype)
    return engine


def sheets(found: Found) -> list[Sheet]:
    head = ["family", "shape of", "load", "packed, queries/s", "own code, queries/s", "packed is"]
    rows = []
    for family, shape in SHAPES.items():
        for load in LOADS:
            rates = [median(found, form, family=family, load=load) for form in FORMS]
            gain = ratio(*rates)
            if gain is not None:
                model = f"{shape.model} ({shape.note})" if shape.note else shape.model
                rows.append([family, model, load, *(f"{rate:.1f}" for rate in rates), f"{gain:.2f} x"])
    return [Sheet("Packed against the model's own code, 16 queries at once", head, rows)]


def goals(found: Found) -> list[Goal]:
    return [
        Goal(f"packed against own code, the least of all families, {load}", 1.0, _least(found, load)) for load in LOADS
    ]


def _least(found: Found, load: str) -> float | None:
    gains = (_gain(found, family, load) for family in SHAPES)
    return min((gain for gain in gains if gain is not None), default=None)


def _gain(found: Found, family: str, load: str) -> float | None:
    return ratio(*(median(found, form, family=family, load=load) for form in FORMS))


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    families = [family for family in SHAPES if _gain(found, family, "mixed") is not None]
    for place, load in enumerate(LOADS):
        gains = [_gain(found, family, load) or 0.0 for family in families]
        axes.bar(np.arange(len(families)) + 0.4 * place, gains, 0.38, label=load)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(np.arange(len(families)) + 0.2, families, rotation=40, ha="right")
    axes.set(ylabel="packed, times own code", ylim=(0, None))
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
