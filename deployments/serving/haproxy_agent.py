"""Tells HAProxy how many requests this Router takes at once, by HAProxy's agent checks.

HAProxy connects to a port of the Router ten times a second, less often with more than eight Routers. It sends its host
and process, and sets the server's `maxconn`
to the number in the reply. `serve_adapter/haproxy.sh` writes the checks into HAProxy's config, and what becomes of a
request that no Router takes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from deployments.admission.door import Door, Visits
from deployments.serve_adapter.replica_process import accept_several, ingress_ports

logger = logging.getLogger("ray.serve")

PORTS = 1500  # the agent's port above the server's: beyond Serve's ports for HTTP, and for gRPC as windve sets them
_LOOK_S = 0.05  # until the servers listen
_LONGEST_NAME = 300  # bytes of a host's name and a process number


class Situation(NamedTuple):
    """What a Router's door depends on. `placed`: see `Door.in_hand`; `room`: see `Door.takes`."""

    placed: int
    room: float
    slo_s: float


class HAProxyAgent:
    """Answers agent checks for one Router. `look`: its situation now."""

    def __init__(self, visits: Visits, look: Callable[[], Situation]) -> None:
        self.door, self._look = Door(visits), look

    async def listen(self, host: str) -> None:
        """Listen at `host` once Serve's servers of this process do, and let its HTTP server accept quickly."""
        while not (ports := ingress_ports()):  # noqa: ASYNC110 - Serve offers no event for it
            await asyncio.sleep(_LOOK_S)
        await accept_several()
        for protocol, port in ports.items():
            where = host, port + PORTS
            try:
                await asyncio.get_running_loop().create_server(partial(_Check, self, protocol), *where)
            except OSError as error:
                logger.warning(
                    "this Router cannot listen on %s:%d (%s), so HAProxy sends it at most 128 requests at once by %s",
                    *where,
                    error,
                    protocol,
                )

    def takes(self, protocol: str, proxy: bytes) -> int:
        """How many requests of that HAProxy the Router takes at once."""
        now, (placed, room, slo_s) = asyncio.get_running_loop().time(), self._look()
        self.door.measure(now, time.thread_time(), placed=placed, slo_s=slo_s)
        return self.door.takes((protocol, proxy), now, placed=placed, room=room, slo_s=slo_s)


class _Check(asyncio.Protocol):
    """One agent check."""

    def __init__(self, agent: HAProxyAgent, protocol: str) -> None:
        self._agent, self._protocol = agent, protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        takes = self._agent.takes(self._protocol, data.strip()[:_LONGEST_NAME])
        self._transport.write(b"maxconn:%d\n" % takes)
        self._transport.close()
