"""Remembers who won a race on this machine, in the user's cache, because races take much of a start. No torch here."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deployments.hardware.device_detector import cpu_model
from deployments.models.disk_cache import KeptFile, state_of_files
from deployments.models.model_files import ModelCard
from deployments.settings import EngineSettings

logger = logging.getLogger("ray.serve")

_LIBRARIES = ("torch", "transformers", "openvino", "numpy")
KEPT_S = 30 * 24 * 3600.0  # a month
_WINS = 2  # wins in a row that are needed: the machine may have been busy during one race


@dataclass(frozen=True, slots=True)
class Result:
    """`told`: the result in words. `seconds`: the winner's. `raced`: when, Unix time, s. `wins`: how many in a row."""

    winner: str
    told: str
    raced: float
    seconds: Sequence[float] = ()
    wins: int = 1

    @property
    def day(self) -> str:
        return time.strftime("%Y-%m-%d", time.localtime(self.raced))


class RaceCache:
    """The remembered results of one model on this machine."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        """`about`: everything that may change who wins, as JSON."""
        self._kept = KeptFile("races", about)
        self.file = self._kept.path

    @classmethod
    def of(cls, race: str, card: ModelCard, settings: EngineSettings, threads: int) -> RaceCache:
        """The cache for a model. `race`: what raced, and on which device."""
        return cls({"race": race, **_about(card, settings, threads)})

    def recall(self) -> Result | None:
        """The result if someone has won twice in a row, and not too long ago; else None."""
        found = self._read()
        return found if found is not None and found.wins >= _WINS else None

    def _read(self) -> Result | None:
        try:
            found = Result(**self._kept.read())
            return found if 0 <= time.time() - found.raced <= KEPT_S else None
        except TypeError:  # nothing stored, or another format
            return None

    def keep(self, winner: str, told: str, seconds: Sequence[float] = ()) -> None:
        before = self._read()
        wins = before.wins + 1 if before is not None and before.winner == winner else 1
        try:
            self._kept.write(asdict(Result(winner, told, time.time(), seconds, wins)))
        except OSError as error:
            logger.info("cannot save the fastest engine in %s (%s); the next start compares again", self.file, error)


def _about(card: ModelCard, settings: EngineSettings, threads: int) -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "threads": threads,
        "settings": settings.model_dump(mode="json"),
        "model": [str(card.folder.resolve()), card.revision, repr(card)],
        "files": state_of_files(card.root or card.folder),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "code": _digest(Path(__file__).parent),
    }


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(folder: Path) -> str:
    """The SHA-256 of the engines' own code."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()
