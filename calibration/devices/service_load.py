"""Starts `windve serve` on free loopback ports with one model, and puts loads below and above its capacity on it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibration.devices.child import running
from calibration.devices.shapes import text_of
from calibration.load import Address, Clients, HttpReply, request_bytes
from serve_app.local.ray_environment import LOOPBACK, free_port

LOADS = (0.8, 2.0)  # times the capacity
_SLO_S = 1.0
_TOKENS = 75
_BODIES = 64  # that differ
_ALONE_SHARE = 0.25  # of a load's time, for a lone client
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_OK, _REFUSED = 200, {429, 503, 504}

Figures = dict[str, Any]
Outcome = HttpReply | Exception


def measure(folder: Path, device: str, texts: int, clients: int, seconds: float) -> Figures:
    """The capacity by `clients` in a closed loop, a lone client, and Poisson streams of LOADS times the capacity. A
    request has `texts` texts of 75 tokens, for the lone client one. Raises RuntimeError if the service does not start.
    """
    with _serving(folder, device) as url:
        address = Address.parse(url)
        many, one = _bodies(address, texts), _bodies(address, 1)
        alone, _ = asyncio.run(_with_clients(address, 1, lambda load: _closed(load, one, 1, _ALONE_SHARE * seconds)))
        found, lasted = asyncio.run(_with_clients(address, clients, lambda load: _closed(load, many, clients, seconds)))
        capacity = texts * sum(reply.status == _OK for reply in found) / lasted
        if not capacity:
            raise RuntimeError(f"nothing was answered: {found[0].problem if found else 'no answers'}")
        loads = []
        for share in LOADS:
            arrivals = list(_poisson(share * capacity / texts, seconds, many))
            began = time.process_time()
            outcomes = asyncio.run(_with_clients(address, clients, lambda load: load.stream(arrivals)))  # noqa: B023
            busy = (time.process_time() - began) / seconds
            loads.append({"share": share, **outcome_figures(outcomes, texts, seconds), "client_cores": busy})
    p50_ms = 1000 * statistics.median(reply.seconds for reply in alone)
    return {"texts": texts, "slo_s": _SLO_S, "capacity_s": capacity, "alone_p50_ms": p50_ms, "loads": loads}


def outcome_figures(outcomes: Sequence[Outcome], texts: int, seconds: float) -> Figures:
    """Texts per second of each outcome, and the median and the 99th percentile of answers, in ms; None without any."""
    answered = sorted(one.seconds for one in outcomes if isinstance(one, HttpReply) and one.status == _OK)
    refused = sum(isinstance(one, HttpReply) and one.status in _REFUSED for one in outcomes)
    in_time = sum(taken <= _SLO_S for taken in answered)
    counts = {
        "offered_s": len(outcomes),
        "in_time_s": in_time,
        "late_s": len(answered) - in_time,
        "refused_s": refused,
        "failed_s": len(outcomes) - len(answered) - refused,
    }
    figures: Figures = {name: texts * count / seconds for name, count in counts.items()}
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        figures[name] = 1000 * answered[int(share * (len(answered) - 1))] if answered else None
    return figures


@contextmanager
def _serving(model: Path, device: str) -> Iterator[str]:
    """A service of the model without CPU overflow; yields its URL."""
    port = free_port(18_200, host=LOOPBACK)
    kind = "none" if device == "cpu" else device.partition(":")[0]
    args = {"model": {"id": str(model), "name": "any"}, "cpu_overflow": False, "accelerator": {"device": kind}}
    router = {"name": "Router", "user_config": {"slo_s": _SLO_S}}
    application = {
        "name": "windve", "route_prefix": "/", "import_path": "serve_app.app:build", "args": args,
        "deployments": [router], "logging_config": {"enable_access_log": False},
    }  # fmt: skip
    config = {"proxy_location": "EveryNode", "http_options": {"host": LOOPBACK, "port": port}}
    with tempfile.TemporaryDirectory(prefix="windve-check-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps({**config, "applications": [application]}), encoding="utf-8")  # YAML as well
        command = [sys.executable, "-m", "serve_app", "serve", str(file)]
        with running(command, lambda told: "curl -s" in told, {"COLUMNS": "200", **seen_alone(device)}, Path.cwd()):
            yield f"http://{LOOPBACK}:{port}"


def seen_alone(device: str) -> dict[str, str]:
    """The variable by which a process sees this device alone: "cuda:1" is the second of those that are visible here."""
    kind, _, number = device.partition(":")
    if kind not in _VISIBLE:
        return {}
    visible = os.environ.get(_VISIBLE[kind])
    return {_VISIBLE[kind]: visible.split(",")[int(number or 0)] if visible else number or "0"}


def _bodies(address: Address, texts: int) -> list[bytes]:
    """Requests that differ."""
    made = []
    for number in range(_BODIES):
        inputs = [text_of(_TOKENS, number * texts + index) for index in range(texts)]
        made.append(request_bytes({"input": inputs, "encoding_format": "base64"}, host=address.netloc))
    return made


async def _with_clients(address: Address, count: int, use: Callable[[Clients], Awaitable[Any]]) -> Any:
    clients = Clients(address)
    try:
        await clients.open(count)
        return await use(clients)
    finally:
        clients.hang_up()


async def _closed(
    clients: Clients, bodies: Sequence[bytes], count: int, seconds: float
) -> tuple[list[HttpReply], float]:
    """All replies, and the seconds until the last one."""
    asked, began = itertools.cycle(bodies), time.monotonic()
    replies = await clients.steady(count, lambda: next(asked), seconds)
    return replies, time.monotonic() - began


def _poisson(rate: float, seconds: float, bodies: Sequence[bytes]) -> Iterator[tuple[float, bytes]]:
    """Requests at random times."""
    chance, at_s = random.Random(0), 0.0  # noqa: S311 - repeatable, not a secret
    for body in itertools.cycle(bodies):
        at_s += chance.expovariate(rate)
        if at_s > seconds:
            return
        yield at_s, body
