"""`engine: auto`: the quickest of the engines that are installed, by a short race on the machine at hand."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging

from deployments.engines import Engine
from deployments.engines.torch_engine import LARGE, TorchEngine
from deployments.errors import SettingsError
from deployments.models.model_files import ModelCard
from deployments.settings import AcceleratorSettings, CpuSettings

logger = logging.getLogger("ray.serve")


def auto_select(
    torch: TorchEngine, card: ModelCard, settings: AcceleratorSettings | CpuSettings, threads: int
) -> Engine:
    """`torch`, or OpenVINO where that is installed and quicker; its `info.why` tells both figures. A large model stays
    with torch: OpenVINO's is built from float32.
    """
    if importlib.util.find_spec("openvino") is None or card.parameters > LARGE:
        return torch
    from deployments.engines.openvino_engine import OpenVinoEngine

    try:
        openvino = OpenVinoEngine(card, settings, threads)
    except SettingsError as error:
        logger.info("openvino is no choice: %s", error)
        return torch
    engines: list[tuple[float, TorchEngine | OpenVinoEngine]] = [
        (engine.info.queries_per_s or 0.0, engine) for engine in (torch, openvino)
    ]
    (_, chosen), (_, other) = sorted(engines, key=lambda one: one[0], reverse=True)
    compared = f"{chosen.info.why}; {other.info.engine}: {other.info.why}"
    chosen.info = dataclasses.replace(chosen.info, why=compared)
    return chosen
