"""Runs a server in a process group of its own, and stops it with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 90.0


@contextmanager
def running(
    command: Sequence[str], ready: Callable[[str], bool], environment: Mapping[str, str], folder: Path
) -> Iterator[str]:
    """Run `command` in its own process group until the block ends: of the same session, because Linux shares the cores
    between sessions first, and nice counts within one. Once `ready` accepts its output, yields the output. Raises
    RuntimeError with the last line of the output, then those before it, if the command does not start.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, process_group=0,
            env={**os.environ, **environment},
        )  # fmt: skip
        try:
            ends = time.monotonic() + _START_TIMEOUT_S
            while not ready(told := _read(log.fileno())):
                if process.poll() is not None or time.monotonic() > ends:
                    *before, last = told.strip().splitlines()[-12:] or ["it said nothing"]
                    raise RuntimeError("\n".join([f"it did not start: {last}", *before]))
                time.sleep(0.1)
            yield told
        finally:
            _stop(process)


def _read(log: int) -> str:
    return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT, as Ctrl-C does. Then kill what is left of the group's processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that outlived it
