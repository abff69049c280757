"""A journal of all bursts, written as they finish, from which an interrupted run resumes."""

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
    """One burst and its outcome. `depths`: per live replica. `latencies_s`: by the pool that answered. `at`: Unix time,
    in seconds.
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
    """A file whose first line describes the run, and each further line one burst. A run with the same description
    replays the bursts in order, as long as each is the one that it asks for. The first mismatch discards the rest.
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
        self._end = len(head)  # bytes of the file that this run uses
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
        """The next burst of the interrupted run, if it has this stage, these depths and this size; else None."""
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
        """Save a burst to disk before the next one is sent."""
        self._replay.clear()
        self._file.truncate(self._end)
        line = orjson.dumps(asdict(burst)) + b"\n"
        self._write(line)
        self._end += len(line)
        self.bursts.append(burst)

    def finish(self) -> None:
        """Delete the file: nothing is left to resume, and the report has the bursts."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())


def _read(path: Path, head: bytes) -> list[tuple[Burst, int]]:
    """The bursts of an interrupted run with the same description, each with the offset of its line's end. A line that
    the interruption cut off is left out.
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
