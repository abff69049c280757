"""Starts servers for a measurement, windve's and others, waits for them, and stops them with all their processes."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from calibration.devices import child

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
_ANSWER_TIMEOUT_S = 120.0
_PORTS = range(18100, 18200)  # below those that the system gives to clients


def running(
    command: Sequence[str], ready: Callable[[str], bool], environment: Mapping[str, str], folder: Path = ROOT
) -> AbstractContextManager[str]:
    """`child.running` with this tree's modules."""
    return child.running(command, ready, {"PYTHONPATH": python_path(), **environment}, folder)


def python_path() -> str:
    """PYTHONPATH for the processes of a measurement: this tree first, then the caller's."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError(f"no port in {_PORTS} is free")


def answers(url: str, body: bytes | None = None) -> bool:
    """Whether the URL answers 200 to a GET, or to a POST of `body` as JSON."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            answer.read()
            return bool(answer.status == 200)
    except OSError:
        return False


def wait_until_answered(url: str, payload: Any, times: int = 5) -> None:
    """Wait until `times` POSTs in a row got 200, because a proxy may not know the routes yet. Raises RuntimeError."""
    body = json.dumps(payload).encode()
    ends = time.monotonic() + _ANSWER_TIMEOUT_S
    while not all(answers(url, body) for _ in range(times)):
        if time.monotonic() > ends:
            raise RuntimeError(f"{url} does not answer")
        time.sleep(0.5)


def settled(read: Callable[[], T], quiet_s: float) -> T:
    """The value of `read()` once it has not changed for `quiet_s`: a service publishes its counters with a delay."""
    told, since = read(), time.monotonic()
    while time.monotonic() < since + quiet_s:
        time.sleep(0.5)
        before, told = told, read()
        if told != before:
            since = time.monotonic()
    return told


@dataclass(frozen=True, slots=True)
class Service:
    """A running windve. `environment`: the variables that Ray's clients need. `metrics`: the URL that Prometheus
    scrapes.
    """

    url: str
    dashboard: str
    metrics: str
    environment: Mapping[str, str]

    def calibrate(self, out: Path, *words: str) -> dict[str, Any]:
        """Run `windve calibrate` and return its report. Raises RuntimeError with the reason if it fails."""
        command = [sys.executable, "-m", "serve_app", "calibrate", "--dashboard", self.dashboard, *words]
        command += ["--out", str(out)]
        done = subprocess.run(  # noqa: S603 - our own command
            command, cwd=ROOT, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
        return report


@contextmanager
def serving(config: Mapping[str, Any], **environment: str) -> Iterator[Service]:
    """`windve serve` on this Serve config until the block ends. Raises RuntimeError if it does not start."""
    port = free_port()
    here = {"http_options": {"host": "127.0.0.1", "port": port}, "grpc_options": {}}  # HTTP is what is measured
    with tempfile.TemporaryDirectory(prefix="windve-bench-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump({**config, **here}), encoding="utf-8")
        command = [sys.executable, "-m", "serve_app", "serve", str(file)]
        with running(command, lambda told: "curl -s" in told, {"COLUMNS": "200", **environment}) as told:
            lines = told.splitlines()
            words = next(line for line in lines if "serve deploy CONFIG" in line).split()
            metrics = next(line for line in lines if "for Prometheus" in line).split()[-1]
            token = dict(word.split("=", 1) for word in words if word.startswith("RAY_"))
            yield Service(f"http://127.0.0.1:{port}", words[-1], metrics, token)


def application(args: Mapping[str, Any], router: Mapping[str, Any]) -> dict[str, Any]:
    """The windve application of a Serve config, with these `args` and this `user_config` of the Router."""
    return {
        "name": "windve",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": dict(args),
        "deployments": [{"name": "Router", "user_config": dict(router)}],
        "logging_config": {"enable_access_log": False},
    }


def config_of(*applications: Mapping[str, Any]) -> dict[str, Any]:
    return {"proxy_location": "EveryNode", "applications": list(applications)}


def shipped(name: str) -> dict[str, Any]:
    """A Serve config of `serve_app/`."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_app" / name).read_text(encoding="utf-8"))
    return config
