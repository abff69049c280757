"""A TCP connection between each Router and each replica, in place of calls through Serve's handle.

A call through the handle costs the two processes about a millisecond of a core. That is 30 times the cost of a frame
with one query here, or 3 times if 32 queries share the call.

    Router: RouterChannel  ── offers ──▶  replica: RouterConnection, one for each Router; Server accepts them
                     ◀─ reports ──

Serve tells the Routers which replicas are alive, with their ports and secrets. A Router's first frame is the secret.
Before that, the replica reads no more bytes than a secret takes, and keeps at most 64 such connections. Does not import
ray.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from deployments.serving.frames import HEAD, LARGEST_FRAME, SIZE

logger = logging.getLogger("ray.serve")

_CONNECT_TIMEOUT_S = 5.0
_SECRET_BYTES = 32
_MOST_UNAUTHENTICATED = 64  # beyond it the oldest is closed: a real Router sends the secret at once
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 6_000}  # s, s, times, ms


class Peer(asyncio.Protocol):
    """Either end of a connection: cuts the incoming bytes into frames."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.largest = LARGEST_FRAME

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's lacks this base class
        _keep_alive(transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= SIZE.size:
            (size,) = SIZE.unpack_from(buffer)
            if not HEAD.size <= size <= self.largest:
                self.transport.abort()  # not a frame of windve's
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
        """Decode and handle a frame. A bad frame and a bug of ours are logged differently. Either one closes the
        connection, so that nobody waits for what was lost.
        """
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
        """Decode a frame. Raises ValueError, TypeError, LookupError or struct.error if it is malformed."""
        raise NotImplementedError

    def hear(self, message: Any) -> None:
        """Handle a message that `decode` returned."""
        raise NotImplementedError


class Outgoing(Protocol):
    """A Router's frame that is being filled. It is truthy once it holds anything that must be sent now."""

    called_off: list[int]
    settings: dict[str, Any] | None
    asks: bool

    def __bool__(self) -> bool: ...
    def encode(self) -> list[bytes]: ...


class Pending(Protocol):
    """An offer without an outcome. `fail` ends it."""

    number: int

    def fail(self, error: Exception) -> None: ...


F = TypeVar("F", bound=Outgoing)  # its frames
OfferT = TypeVar("OfferT", bound=Pending)  # its offers
R = TypeVar("R")  # the replica's reports


class RouterChannel(Peer, Generic[F, OfferT, R]):
    """Sends offers to one replica and receives its reports. Everything sent in one turn of the event loop goes into one
    frame.

    It calls `on_report` with each report, before the pending offers get the report's contents. When the connection
    ends, it calls `on_lost` with the offers that are still pending.
    """

    outgoing: type[F]
    incoming: Any  # R's class; its `decode` reads one

    def __init__(self, on_report: Callable[[R], None], on_lost: Callable[[list[OfferT]], None]) -> None:
        super().__init__()
        self._on_report, self._on_lost = on_report, on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers = 0  # offers so far
        self._out = self.outgoing()
        self._out_bytes, self._out_since = 0, 0.0
        self.pending: dict[int, OfferT] = {}
        self.frames = 0  # sent or being filled

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def decode(self, frame: bytes) -> R:
        report: R = self.incoming.decode(frame)
        return report

    def call_off(self, pending: OfferT) -> None:
        """Cancel an offer. Does nothing if it has ended."""
        if self.pending.get(pending.number) is pending:  # not an offer of an earlier connection
            del self.pending[pending.number]
            self._outgoing().called_off.append(pending.number)

    def configure(self, settings: dict[str, Any]) -> None:
        self._outgoing().settings = settings

    def ask(self) -> None:
        """Ask the replica to report its state at once."""
        self._outgoing().asks = True

    def close(self) -> None:
        self.transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        left, self.pending = list(self.pending.values()), {}
        self._on_lost(left)

    def _outgoing(self) -> F:
        if not self._out:
            self.frames += 1
            self._out_since = self._loop.time()
            self._loop.call_soon(self._flush, context=contextvars.Context())
        return self._out

    def _flush(self) -> None:
        if not self._out:
            return  # it was cut short and sent already
        out, self._out, self._out_bytes = self._out, self.outgoing(), 0
        if not self.transport.is_closing():
            self.transport.writelines(out.encode())


P = TypeVar("P", bound=Peer)


async def reach(make: Callable[[], P], address: tuple[str, int], secret: str) -> P:
    """Connect to a replica and send its secret. `make` creates the Router's end. Raises OSError or TimeoutError."""
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        _, end = await asyncio.get_running_loop().create_connection(make, *address)
    shown = secret.encode()
    end.transport.writelines([HEAD.pack(HEAD.size + len(shown), 0), shown])
    return end


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

    def send(self, report: Any) -> None:
        """Send a report without waiting. Its `encode` returns the buffers of each frame."""
        if not self.transport.is_closing():
            for frame in report.encode():
                self.transport.writelines(frame)

    @property
    def unsent(self) -> int:
        """Bytes that the Router has not read yet."""
        return self.transport.get_write_buffer_size()


@dataclass(slots=True, eq=False)
class Server:
    """A replica's end. To connect, a Router needs `secret` and the port that `start` returns. `on_offers` gets each
    frame of a Router as `decode` returns it.
    """

    host: str
    on_offers: Callable[[RouterConnection, Any], None]
    on_gone: Callable[[RouterConnection], None]
    decode: Callable[[bytes], Any]
    secret: str = field(default_factory=lambda: secrets.token_hex(_SECRET_BYTES))
    _server: asyncio.Server | None = None
    _unauthenticated: dict[RouterConnection, None] = field(default_factory=dict)  # oldest first

    async def start(self) -> int:
        """Listen. Returns the port."""
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
        """Forget a connection that has sent the secret or has closed."""
        self._unauthenticated.pop(stranger, None)


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """Let the kernel detect a dead connection within seconds."""
    raw = transport.get_extra_info("socket")
    if raw is None or raw.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
