"""Every burst, written as it lands; a run that was interrupted replays them and goes on where it stopped."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

    stage: str  # sweep, stress test, 10 tokens (a length), fine-tune, verify, stream
    at: float
    depths: dict[str, int]
    sent: int
    busy: int
    failed: int
    latencies_s: dict[str, list[float]]


@contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """Of `--out`, which is made if need be. Raises SettingsError where it, or what is written there, cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise SettingsError("--out", f"{folder} cannot be written: {error.strerror}") from None


class Journal:
    """A file of lines: first what the run is about, then its bursts. Bursts are asked for in order: those of an
    interrupted run about the same thing come first, while they are what is asked for; the first that is not cuts off
    the rest.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], *, fresh: bool) -> None:
        self._path = folder / "unfinished.jsonl"
        self.bursts: list[Burst] = []
        head = orjson.dumps(dict(about)) + b"\n"
        with written_into(folder):
            self._file: IO[bytes] = self._path.open("a+b")
        self._lock(folder)
        self._replay = deque([] if fresh else _read(self._path, head))
        self.resumed = len(self._replay)
        self._end = len(head)  # of what this run stands on, in bytes
        if not self._replay:
            self._file.truncate(0)
            self._write(head)

    def _lock(self, folder: Path) -> None:
        """Until it is closed. Raises SettingsError where another run writes this file, which is then left as it is."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise SettingsError(
                "--out", f"another calibration writes into {folder}: wait until it has ended, or name another folder"
            ) from None
        except OSError:
            pass  # a file system without locks

    def replayed(self, stage: str, depths: Mapping[str, int], sent: int) -> Burst | None:
        """The next burst of the interrupted run, if it is this one."""
        if not self._replay:
            return None
        burst, end = self._replay.popleft()
        if (burst.stage, burst.depths, burst.sent) != (stage, dict(depths), sent):
            self._replay.clear()
            return None
        self.bursts.append(burst)
        self._end = end
        return burst

    def add(self, burst: Burst) -> None:
        """On the disk before the next burst is sent."""
        self._replay.clear()
        self._file.truncate(self._end)
        line = orjson.dumps(asdict(burst)) + b"\n"
        self._write(line)
        self._end += len(line)
        self.bursts.append(burst)

    def finish(self) -> None:
        """Nothing is left to resume; the report holds the bursts."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())


def _read(path: Path, head: bytes) -> list[tuple[Burst, int]]:
    """The bursts of an interrupted run about the same thing, each with where its line ends; a line that was cut off by
    the interruption is left out.
    """
    try:
        first, *lines = path.read_bytes().splitlines(keepends=True)
    except (OSError, ValueError):
        return []
    found: list[tuple[Burst, int]] = []
    if first != head:
        return found
    end = len(head)
    for line in lines:
        try:
            burst = Burst(**orjson.loads(line))
        except (orjson.JSONDecodeError, TypeError):  # TypeError: another version's
            break
        end += len(line)
        found.append((burst, end))
    return found
