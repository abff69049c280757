"""A windve service of one's own for a measurement, on a free port of loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 90.0
_PORTS = range(18100, 18200)  # below those that the system gives to clients


@dataclass(frozen=True, slots=True)
class Service:
    """A running service. `environment` lets Ray's clients in; `metrics` is where Prometheus reads."""

    url: str
    dashboard: str
    metrics: str
    environment: Mapping[str, str]

    def calibrate(self, out: Path, *words: str) -> dict[str, Any]:
        """Run `python -m calibration` and return its report. Raises RuntimeError with the reason if it is refused."""
        command = [sys.executable, "-m", "calibration", "--dashboard", self.dashboard, "--out", str(out), *words]
        done = subprocess.run(  # noqa: S603 - our own command
            command, cwd=ROOT, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
        return report


def python_path() -> str:
    """PYTHONPATH for what a measurement starts: this very tree before all, then what the caller has there."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def serving(config: Mapping[str, Any], **environment: str) -> Iterator[Service]:
    """`python -m serve_app` on this Serve config until the block ends. Raises RuntimeError if it does not start."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="windve-bench-") as folder:
        file, log = Path(folder) / "config.yaml", Path(folder) / "log.txt"
        here = {"http_options": {"host": "127.0.0.1", "port": port}, "grpc_options": {}}  # HTTP is what is measured
        file.write_text(yaml.safe_dump({**config, **here}), encoding="utf-8")
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "serve_app", str(file)],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "COLUMNS": "200", "PYTHONPATH": python_path(), **environment},
            )  # fmt: skip
        try:
            yield _wait(process, log, port)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait(_STOP_TIMEOUT_S)


def _wait(process: subprocess.Popen[bytes], log: Path, port: int) -> Service:
    ends = time.monotonic() + _START_TIMEOUT_S
    while "curl -s" not in (told := log.read_text(encoding="utf-8")):
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"the service did not start: {told.strip().splitlines()[-1]}")
        time.sleep(0.1)
    lines = told.splitlines()
    words = next(line for line in lines if "serve deploy CONFIG" in line).split()
    metrics = next(line for line in lines if "for Prometheus" in line).split()[-1]
    environment = dict(word.split("=", 1) for word in words if word.startswith("RAY_"))
    return Service(f"http://127.0.0.1:{port}", words[-1], metrics, environment)


def free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError(f"no port in {_PORTS} is free")
