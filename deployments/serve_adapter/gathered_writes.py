"""Sends the head and the body of an HTTP answer in one system call.

uvicorn writes them one after the other, and the event loop sends each write at once. A Router that refused 700 queries
spent a third of its time on that (profiler samples), and HAProxy read each answer twice.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_AT_ONCE = 65_536  # bytes: more is not held back, so that a writer is told to wait for a slow reader


class GatheredWrites:
    """A transport that sends all writes of one turn of the event loop at its end."""

    __slots__ = ("_loop", "_parts", "_size", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it at the end of this turn, or at once if it is much together with what waits."""
        if self._size + len(data) > _AT_ONCE:
            self._send()
            self._pass(data)
            return
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)
        self._size += len(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts:
            self._pass(b"".join(parts))

    def _pass(self, data: bytes) -> None:
        if not self._transport.is_closing():  # uvloop raises an error if the client has gone
            self._transport.write(data)  # `writelines` may not tell a writer to wait (CVE-2024-12254)


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with gathered writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = GatheredWrites(transport)  # type: ignore[assignment]


def install() -> None:
    """Use it for all servers that this process starts from now on."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{GatheringProtocol.__name__}"
