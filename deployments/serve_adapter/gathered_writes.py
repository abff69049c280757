"""Sends the head and the body of an HTTP answer in one segment.

uvicorn writes them apart, and asyncio sends each write at once: two system calls of the Router, and two reads of
HAProxy, for each answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_AT_ONCE = 65_536  # bytes: from here on, copying them together costs more than a system call


class GatheredWrites:
    """A transport that collects what is written in one turn of the event loop, and sends it at the turn's end."""

    __slots__ = ("_loop", "_parts", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)
        if len(data) >= _AT_ONCE:
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send(self) -> None:
        if self._parts:
            data, self._parts = b"".join(self._parts), []
            self._transport.write(data)


class GatheringProtocol(HttpToolsProtocol):
    def connection_made(self, transport):
        super().connection_made(transport)
        self.transport = GatheredWrites(transport)


def install() -> None:
    from uvicorn.config import HTTP_PROTOCOLS

    HTTP_PROTOCOLS["auto"] = f"{__name__}:GatheringProtocol"
