"""Every burst, written as it lands; a run that was interrupted replays them and goes on where it stopped."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from deployments.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Burst:
    """What was sent and what came back. `depths` for each live replica; latencies in s, by the pool that answered; `at`
    Unix time, s.
    """

    stage: str  # sweep, stress test, fine-tune, verify
    at: float
    depths: dict[str, int]
    sent: int
    busy: int
    failed: int
    latencies_s: dict[str, list[float]]


class Journal:
    """A file of lines: first what the run is about, then its bursts. Bursts are asked for in order: those of an
    interrupted run about the same thing come first, while they are what is asked for.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], *, fresh: bool) -> None:
        self._path = folder / "unfinished.jsonl"
        self.bursts: list[Burst] = []
        old = [] if fresh else _read(self._path, about)
        self._replay = deque(old)
        self.resumed = len(old)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self._path.open("wb")
        except OSError as error:
            raise SettingsError("--out", f"{folder} cannot be written: {error.strerror}") from None
        self._write(dict(about))

    def replayed(self, stage: str, depths: Mapping[str, int], sent: int) -> Burst | None:
        """The next burst of the interrupted run, if it is this one."""
        if not self._replay:
            return None
        burst = self._replay.popleft()
        if (burst.stage, burst.depths, burst.sent) != (stage, dict(depths), sent):
            self._replay.clear()
            return None
        self.add(burst)
        return burst

    def add(self, burst: Burst) -> None:
        """On the disk before the next burst is sent."""
        self.bursts.append(burst)
        self._write(asdict(burst))

    def finish(self) -> None:
        """Nothing is left to resume; the report holds the bursts."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _read(path: Path, about: Mapping[str, Any]) -> list[Burst]:
    """The bursts of an interrupted run about the same thing; a last line that was cut off is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            break
    if not found or found[0] != orjson.loads(orjson.dumps(dict(about))):
        return []
    return [Burst(**line) for line in found[1:]]
