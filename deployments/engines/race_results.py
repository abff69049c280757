"""What won a race on this machine, kept in the user's cache: races take much of a start. No torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from deployments.hardware.device_detector import cpu_model
from deployments.models.model_files import ModelCard
from deployments.settings import AcceleratorSettings, CpuSettings

logger = logging.getLogger("ray.serve")

_LIBRARIES = ("torch", "transformers", "openvino", "numpy")
KEPT_S = 30 * 24 * 3600.0  # a month
_WINS = 2  # in a row: the machine may have been busy while they raced


@dataclass(frozen=True, slots=True)
class Result:
    """`told`: how it came out, in words. `seconds`: of the winner. `raced`: seconds since 1970. `wins`: in a row."""

    winner: str
    told: str
    raced: float
    seconds: Sequence[float] = ()
    wins: int = 1

    @property
    def day(self) -> str:
        return time.strftime("%Y-%m-%d", time.localtime(self.raced))


class RaceResults:
    """Of one model on this machine, in one file. Where no file can be kept, or it is not ours, there is none."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """`about`: whatever may change who wins, as JSON."""
        key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.file = folder / f"{key}.json"

    @classmethod
    def of(cls, race: str, card: ModelCard, settings: AcceleratorSettings | CpuSettings, threads: int) -> RaceResults:
        """Beside the hub's cache, as what else is kept of a model. `race`: what ran, and on which device."""
        return cls(Path(constants.HF_HOME) / "windve" / "races", {"race": race, **_about(card, settings, threads)})

    def recall(self) -> Result | None:
        """What has won twice in a row, if that is not too old."""
        found = self._read()
        return found if found is not None and found.wins >= _WINS else None

    def _read(self) -> Result | None:
        try:
            with self.file.open(encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    return None
                found = Result(**json.load(file))
                return found if 0 <= time.time() - found.raced <= KEPT_S else None
        except (OSError, ValueError, TypeError):
            return None

    def keep(self, winner: str, told: str, seconds: Sequence[float] = ()) -> None:
        before = self._read()
        wins = before.wins + 1 if before is not None and before.winner == winner else 1
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False, encoding="utf-8") as file:
                json.dump(asdict(Result(winner, told, time.time(), seconds, wins)), file)
            Path(file.name).replace(self.file)
        except OSError as error:
            logger.info("who won the race is not kept in %s (%s); the next start races again", self.file, error)


def _about(card: ModelCard, settings: AcceleratorSettings | CpuSettings, threads: int) -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "threads": threads,
        "settings": settings.model_dump(mode="json"),
        "model": [str(card.folder.resolve()), card.revision, repr(card)],
        "files": [
            (path.name, path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(card.folder.iterdir())
            if path.is_file()
        ],
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "code": _digest(Path(__file__).parent),
    }


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(folder: Path) -> str:
    """Of the engines' own code."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()
