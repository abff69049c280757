"""What the HAProxy of this host counts at the door, for `/info`: a browser cannot read its metrics."""

from __future__ import annotations

import asyncio
import http.client
import math
import re
import time
import urllib.request

from deployments.serve_adapter.local_ray import haproxy_metrics_port

_TIMEOUT_S = 0.5
_EACH_S, _OLD_S = 1.0, 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names
_METRICS = {"waiting": "current_queue", "refused": "requests_denied_total"}


class HAProxyCounts:
    """Reads HAProxy's metrics in a thread while somebody asks, at most once a second."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._read_at = -math.inf
        self._reading: asyncio.Task[None] | None = None

    def newest(self) -> dict[str, int]:
        """Requests `waiting` there now, and `refused` since this HAProxy has (re)started: what was read last, if that
        is no older than `_OLD_S`, and read again for the next call. Empty if it did not answer. Never waits.
        """
        now = time.monotonic()
        known = self._known if now < self._read_at + _OLD_S else {}
        if now > self._read_at + _EACH_S and (self._reading is None or self._reading.done()):
            self._read_at, self._reading = now, asyncio.create_task(self._read())
        return known

    async def _read(self) -> None:
        self._known = await asyncio.to_thread(read_counts, haproxy_metrics_port())


def read_counts(port: int) -> dict[str, int]:
    """The sums over the doors of all applications; empty if they cannot be read."""
    try:
        where = f"http://127.0.0.1:{port}/metrics?scope=backend"
        with _DIRECT.open(where, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    found = {
        key: re.findall(rf'^haproxy_backend_{name}{{proxy="(?:http|grpc)-[^"]*"}} (\S+)$', text, re.MULTILINE)
        for key, name in _METRICS.items()
    }
    return {key: int(sum(map(float, each))) for key, each in found.items()} if all(found.values()) else {}
