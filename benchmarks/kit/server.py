"""A server of somebody else's for a measurement: started, waited for, stopped with all that it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.kit.serving import ROOT, python_path

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0


@contextmanager
def running(
    command: Sequence[str], ready: Callable[[], bool], environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """`command` in a session of its own until the block ends; yields its process id once `ready()`.

    Raises RuntimeError with the end of its output if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="windve-bench-") as folder:
        log = Path(folder) / "log.txt"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(  # noqa: S603 - our own command
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", **(environment or {})},
            )  # fmt: skip
        try:
            _wait(process, ready, log)
            yield process.pid
        finally:
            _stop(process)


def answers(url: str, body: bytes | None = None) -> bool:
    """The URL answers with 200: to a GET, or to a POST of `body` as JSON."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            answer.read()
            return bool(answer.status == 200)
    except OSError:
        return False


def wait_until_answered(url: str, payload: Any, times: int = 5) -> None:
    """Until so many POSTs in a row were answered with 200: a proxy may not know the way yet. Raises RuntimeError."""
    body = json.dumps(payload).encode()
    ends = time.monotonic() + _START_TIMEOUT_S
    while not all(answers(url, body) for _ in range(times)):
        if time.monotonic() > ends:
            raise RuntimeError(f"{url} does not answer")
        time.sleep(0.5)


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    ends = time.monotonic() + _START_TIMEOUT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > ends:
            told = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
            raise RuntimeError("the server did not start:\n" + "\n".join(told))
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT, as Ctrl-C; who does not listen is killed, with all of its session's processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(_STOP_TIMEOUT_S / 2)
            except subprocess.TimeoutExpired:
                continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # workers that outlived it
    except ProcessLookupError:
        return
