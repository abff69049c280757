"""`engine: auto`: the fastest installed engine, by a short race on this machine, whose winner is remembered."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from deployments.engines import Engine
from deployments.engines.torch_engine import LARGE, TorchEngine
from deployments.errors import SettingsError
from deployments.hardware.device_detector import cpu_model
from deployments.models.disk_cache import KeptFile, state_of_files
from deployments.models.model_files import ModelCard
from deployments.settings import EngineSettings

logger = logging.getLogger("ray.serve")

_TORCH = "torch"  # as EngineInfo names it
_LIBRARIES = ("torch", "transformers", "openvino", "numpy")
KEPT_S = 30 * 24 * 3600.0  # a month
_WINS = 2  # wins in a row that are needed: the machine may have been busy during one race


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

    results = RaceCache(card, settings, threads)
    known = results.last()
    if known is None or known.wins < _WINS:
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


@dataclass(frozen=True, slots=True)
class Result:
    """`told`: the result in words. `raced`: when, Unix time, s. `wins`: how many in a row."""

    winner: str
    told: str
    raced: float
    wins: int = 1

    @property
    def day(self) -> str:
        return time.strftime("%Y-%m-%d", time.localtime(self.raced))


class RaceCache:
    """The remembered result of one model on this machine, by everything that may change who wins."""

    def __init__(self, card: ModelCard, settings: EngineSettings, threads: int) -> None:
        code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))))
        about = {
            "cpu": cpu_model(),
            "threads": threads,
            "settings": settings.model_dump(mode="json"),
            "model": [str(card.folder.resolve()), card.revision, repr(card)],
            "files": state_of_files(card.root or card.folder),
            "libraries": {name: _version(name) for name in _LIBRARIES},
            "code": code.hexdigest(),
        }
        self._kept = KeptFile("races", about)
        self.file = self._kept.path

    def last(self) -> Result | None:
        """The latest result, if it is not too old."""
        try:
            found = Result(**self._kept.read())
            return found if 0 <= time.time() - found.raced <= KEPT_S else None
        except TypeError:  # nothing stored, or another format
            return None

    def keep(self, winner: str, told: str) -> None:
        before = self.last()
        wins = before.wins + 1 if before is not None and before.winner == winner else 1
        try:
            self._kept.write(asdict(Result(winner, told, time.time(), wins)))
        except OSError as error:
            logger.info("cannot save the fastest engine in %s (%s); the next start compares again", self.file, error)


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
