"""A TCP connection between each Router and each replica, in place of calls through Serve's handle.

A call through the handle costs both processes about a millisecond of a core. That is thirty times the cost
of a frame of one query here, and three times where 32 queries share it.

    Router: RouterChannel  ── offers ──▶  replica: RouterConnection, one for each Router; Server accepts them
                     ◀─ reports ──

Serve tells the Routers which replicas live, their ports and their secrets. A Router's first frame is the secret. Until
then the replica reads no more bytes than a secret has, and it keeps at most 64 such connections. Imports no ray.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from deployments.serving.frames import HEAD, LARGEST_FRAME, SIZE

logger = logging.getLogger("ray.serve")

_CONNECT_TIMEOUT_S = 5.0
_SECRET_BYTES = 32
_MOST_UNAUTHENTICATED = 64  # connections without the secret: a Router shows it at once, so the oldest gives way
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 6_000}  # s, s, times, ms


class Peer(asyncio.Protocol):
    """Either end: cuts what arrives into frames."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.largest = LARGEST_FRAME

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has no such base class
        _keep_alive(transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= SIZE.size:
            (size,) = SIZE.unpack_from(buffer)
            if not HEAD.size <= size <= self.largest:
                self.transport.abort()  # not one of ours
                return
            if len(buffer) < size:
                return
            with memoryview(buffer) as view:
                frame = bytes(view[:size])
            del buffer[:size]
            self._received(frame)
            if self.transport.is_closing():
                return

    def _received(self, frame: bytes) -> None:
        """The other end's fault and ours are told apart. Both end the connection: nobody waits for what was lost."""
        try:
            message = self.decode(frame)
        except (ValueError, TypeError, LookupError, struct.error) as error:
            logger.warning("a frame of %d bytes is damaged (%s): the connection is closed", len(frame), error)
            self.transport.abort()
            return
        try:
            self.hear(message)
        except Exception:
            logger.exception("a good frame of %d bytes was not handled: the connection is closed", len(frame))
            self.transport.abort()

    def decode(self, frame: bytes) -> Any:
        """Raises ValueError, TypeError, LookupError or struct.error where it is not what it says."""
        raise NotImplementedError

    def hear(self, message: Any) -> None:
        """Act on what `decode` gave."""
        raise NotImplementedError


P = TypeVar("P", bound=Peer)


async def reach(make: Callable[[], P], address: tuple[str, int], secret: str) -> P:
    """Connect to a replica and show its secret; `make` makes the Router's end. Raises OSError or TimeoutError."""
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        _, end = await asyncio.get_running_loop().create_connection(make, *address)
    shown = secret.encode()
    end.transport.writelines([HEAD.pack(HEAD.size + len(shown), 0), shown])
    return end


class Frames(Protocol):
    """What a replica sends: `encode` gives the buffers of each frame."""

    def encode(self) -> list[list[bytes]]: ...


class RouterConnection(Peer):
    """One Router's connection, as the replica sees it."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server, self._known = server, False
        self.largest = HEAD.size + 2 * _SECRET_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.add_unauthenticated(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._server.remove_unauthenticated(self)
        if self._known:
            self._server.on_gone(self)

    def decode(self, frame: bytes) -> Any:
        return self._server.decode(frame) if self._known else frame[HEAD.size :]

    def hear(self, message: Any) -> None:
        if self._known:
            self._server.on_offers(self, message)
        elif hmac.compare_digest(message, self._server.secret.encode()):
            self._known, self.largest = True, LARGEST_FRAME
            self._server.remove_unauthenticated(self)
        else:
            self.transport.abort()

    def hang_up(self) -> None:
        self._server.remove_unauthenticated(self)
        self._known = False
        self.transport.abort()

    def send(self, report: Frames) -> None:
        """Never waits."""
        if not self.transport.is_closing():
            for frame in report.encode():
                self.transport.writelines(frame)

    @property
    def unsent(self) -> int:
        """Bytes that wait until the Router reads."""
        return self.transport.get_write_buffer_size()


@dataclass(slots=True, eq=False)
class Server:
    """A replica's end. `secret` and what `start` returns are what a Router must know. `on_offers` gets what `decode`
    makes of a Router's frame.
    """

    host: str
    on_offers: Callable[[RouterConnection, Any], None]
    on_gone: Callable[[RouterConnection], None]
    decode: Callable[[bytes], Any]
    secret: str = field(default_factory=lambda: secrets.token_hex(_SECRET_BYTES))
    _server: asyncio.Server | None = None
    _unauthenticated: dict[RouterConnection, None] = field(default_factory=dict)  # in the order in which they came

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.get_running_loop().create_server(lambda: RouterConnection(self), self.host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def add_unauthenticated(self, stranger: RouterConnection) -> None:
        self._unauthenticated[stranger] = None
        if len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            self.remove_unauthenticated(oldest)
            oldest.transport.abort()

    def remove_unauthenticated(self, stranger: RouterConnection) -> None:
        """It has shown the secret, or has gone."""
        self._unauthenticated.pop(stranger, None)


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """A connection that swallows all is found out by the kernel within seconds."""
    raw = transport.get_extra_info("socket")
    if raw is None or raw.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
