"""`engine: auto`: the fastest installed engine, by a short race on this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import time
from collections.abc import Callable

from deployments.engines import Engine
from deployments.engines.race_cache import RaceCache
from deployments.engines.torch_engine import LARGE, TorchEngine
from deployments.errors import SettingsError
from deployments.models.model_files import ModelCard
from deployments.settings import EngineSettings

logger = logging.getLogger("ray.serve")

_TORCH = "torch"  # as EngineInfo names it


def auto_select(
    load_torch: Callable[[], TorchEngine], card: ModelCard, settings: EngineSettings, threads: int
) -> Engine:
    """The torch engine, or OpenVINO's if that is installed and takes less time for short, equal and mixed lengths in
    all.

    `info.why` reports both times. A large model always runs on torch, because OpenVINO's engine is built from float32
    weights. An engine that has won twice in a row is remembered for a month, and only that is loaded.
    """
    if importlib.util.find_spec("openvino") is None or card.parameters > LARGE:
        return load_torch()
    from deployments.engines.openvino_engine import OpenVinoEngine

    results = RaceCache.of("engines", card, settings, threads)
    known = results.recall()
    if known is None:
        return _race(load_torch(), card, settings, threads, results)
    engine: TorchEngine | OpenVinoEngine
    try:
        engine = load_torch() if known.winner == _TORCH else OpenVinoEngine(card, settings, threads)
    except SettingsError as error:
        if known.winner == _TORCH:
            raise
        logger.info("openvino was fastest on %s, but cannot be used now: %s", known.day, error)
        return load_torch()
    engine.info = dataclasses.replace(engine.info, why=f"{engine.info.why}; {known.told} (on {known.day})")
    logger.info("%s was fastest on %s; delete %s to compare again", engine.info.engine, known.day, results.file)
    return engine


def _race(torch: TorchEngine, card: ModelCard, settings: EngineSettings, threads: int, results: RaceCache) -> Engine:
    from deployments.engines.openvino_engine import OpenVinoEngine

    started = time.perf_counter()
    try:
        openvino = OpenVinoEngine(card, settings, threads)
    except SettingsError as error:
        logger.info("openvino cannot be used: %s", error)
        results.keep(torch.info.engine, f"openvino: {error}")
        return torch
    logger.info("openvino took %.1f s to prepare for the comparison", time.perf_counter() - started)
    engines: list[TorchEngine | OpenVinoEngine] = [torch, openvino]
    chosen, other = sorted(engines, key=lambda engine: engine.speed.seconds)
    lost = f"{other.info.engine}: {other.info.why}"
    results.keep(chosen.info.engine, lost)
    chosen.info = dataclasses.replace(chosen.info, why=f"{chosen.info.why}; {lost}")
    return chosen
