"""`engine: auto`: the quickest of the engines that are installed, by a short race on the machine at hand."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import time

from deployments.engines import Engine
from deployments.engines.torch_engine import LARGE, TorchEngine
from deployments.errors import SettingsError
from deployments.models.model_files import ModelCard
from deployments.settings import AcceleratorSettings, CpuSettings

logger = logging.getLogger("ray.serve")


def auto_select(
    torch: TorchEngine, card: ModelCard, settings: AcceleratorSettings | CpuSettings, threads: int
) -> Engine:
    """`torch`, or OpenVINO where that is installed and takes less time for short, equal and mixed lengths together; its
    `info.why` tells both. A large model stays with torch: OpenVINO's is built from float32.
    """
    if importlib.util.find_spec("openvino") is None or card.parameters > LARGE:
        return torch
    from deployments.engines.openvino_engine import OpenVinoEngine

    started = time.perf_counter()
    try:
        openvino = OpenVinoEngine(card, settings, threads)
    except SettingsError as error:
        logger.info("openvino is no choice: %s", error)
        return torch
    logger.info("openvino took %.1f s to get ready for the race", time.perf_counter() - started)
    engines: list[TorchEngine | OpenVinoEngine] = [torch, openvino]
    chosen, other = sorted(engines, key=lambda engine: engine.speed.seconds)
    compared = f"{chosen.info.why}; {other.info.engine}: {other.info.why}"
    chosen.info = dataclasses.replace(chosen.info, why=compared)
    return chosen
