"""A TCP connection between each Router and each replica, in place of calls through Serve's handle.

A call through the handle costs both processes about a millisecond of a core. That is thirty times the cost
of a frame of one query here, and three times where 32 queries share it.

    Router: Channel  ── offers ──▶  replica: RouterConnection, one for each Router; Server accepts them
                     ◀─ reports ──

Serve tells the Routers which replicas live, their ports and their secrets. A Router's first frame is the secret. Until
then the replica reads no more bytes than a secret has, and it keeps at most 64 such connections. Imports no ray.
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
from typing import Any, Protocol, TypeVar, cast

from deployments.errors import EngineFailed
from deployments.queueing.shares import Tenant
from deployments.transport.frames import CUT_BYTES, HEAD, LARGEST_FRAME, SIZE, Answered, Offer, Offers, Report

logger = logging.getLogger("ray.serve")

_CONNECT_TIMEOUT_S = 5.0
_SECRET_BYTES = 32
_MOST_UNAUTHENTICATED = 64  # connections without the secret: a Router shows it at once, so the oldest gives way
_LONGEST_TURN_S = 0.002  # a burst keeps a Router's loop busy for long: a replica must not take that for a pause
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
            try:
                self.frame_received(frame)
            except (ValueError, TypeError, LookupError, ArithmeticError, StopIteration, struct.error) as error:
                logger.warning("a frame of %d bytes is damaged (%s): the connection is closed", size, error)
                self.transport.abort()
            if self.transport.is_closing():
                return

    def frame_received(self, frame: bytes) -> None:
        """Raises ValueError, TypeError, LookupError or struct.error where it is not what it says."""
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

    def frame_received(self, frame: bytes) -> None:
        if self._known:
            self._server.on_offers(self, self._server.decode(frame))
        elif hmac.compare_digest(frame[HEAD.size :], self._server.secret.encode()):
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
    decode: Callable[[bytes], Any] = Offers.decode
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
        """One has connected."""
        self._unauthenticated[stranger] = None
        if len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            self.remove_unauthenticated(oldest)
            oldest.transport.abort()

    def remove_unauthenticated(self, stranger: RouterConnection) -> None:
        """It has shown the secret, or has gone."""
        self._unauthenticated.pop(stranger, None)


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica has no room; `never`: such a query would not end in time there on an idle device either."""

    never: bool = False


class PendingOffer:
    """What became of an offer.

    `outcome`: a future of the answers of the admitted queries, in the order of the offer, or of `Refused`; it raises
    EngineFailed or ReplicaLost. `admitted`: of a `partial` offer, a future of how many of its first queries the replica
    admitted (0 where it refused or failed); None of any other offer. `sent_at`, `settled_at`: loop time, s.
    """

    __slots__ = ("_answers", "_left", "admitted", "number", "outcome", "sent_at", "settled_at", "size")

    def __init__(self, offer: Offer, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self.size = offer.number, len(offer.queries)
        self.sent_at = self.settled_at = loop.time()
        self.outcome: asyncio.Future[list[Answered] | Refused] = loop.create_future()
        self.admitted: asyncio.Future[int] | None = loop.create_future() if offer.partial else None
        self._answers: list[Answered | None] = [None] * self.size
        self._left = self.size

    @property
    def never(self) -> bool:
        """It is refused, and would be on an idle device, too."""
        if not self.outcome.done() or self.outcome.cancelled() or self.outcome.exception() is not None:
            return False
        outcome = self.outcome.result()
        return isinstance(outcome, Refused) and outcome.never

    def refuse(self, *, never: bool = False) -> None:
        self._settle(Refused(never), admitted=0)

    def admit(self, count: int) -> None:
        if not count:
            self.refuse()
            return
        self._left -= self.size - count
        del self._answers[count:]
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(count)
        self._look()

    def answer(self, one: Answered) -> None:
        if self._answers[one.query] is None:
            self._answers[one.query] = one
            self._left -= 1
        self._look()

    def fail(self, error: Exception) -> None:
        self._settle(error, admitted=0)

    def forget(self) -> None:
        """Nobody looks at its outcome."""
        if not self.outcome.cancel() and not self.outcome.cancelled():
            self.outcome.exception()  # seen, so that asyncio does not complain

    @property
    def ended(self) -> bool:
        return self.outcome.done()

    def _look(self) -> None:
        if not self._left:
            self._settle([answer for answer in self._answers if answer is not None], admitted=len(self._answers))

    def _settle(self, outcome: list[Answered] | Refused | Exception, admitted: int) -> None:
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(admitted)
        if self.outcome.done():
            return  # nobody waits any more
        self.settled_at = self.outcome.get_loop().time()
        if isinstance(outcome, Exception):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class Channel(Peer):
    """A Router's end of a connection. All that one turn of the event loop sends goes in one frame; a turn that takes
    longer than 2 ms, or sends more than 16 MiB, is cut into several.

    It calls `on_report` with each report, before the report's contents resolve the pending offers. It calls `on_lost`
    when the connection ends, with the offers that are not resolved: they may still run on the replica.
    """

    def __init__(self, on_report: Callable[[Report], None], on_lost: Callable[[list[PendingOffer]], None]) -> None:
        super().__init__()
        self._on_report, self._on_lost = on_report, on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._out = Offers()
        self._out_bytes = 0
        self._out_since = 0.0
        self.pending: dict[int, PendingOffer] = {}
        self.frames = 0  # sent, and in the making

    @classmethod
    async def open(
        cls,
        address: tuple[str, int],
        secret: str,
        on_report: Callable[[Report], None],
        on_lost: Callable[[list[PendingOffer]], None],
    ) -> Channel:
        """Raises OSError or TimeoutError."""
        return await reach(lambda: cls(on_report, on_lost), address, secret)

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def offer(self, offer: Offer) -> PendingOffer:
        """Send it, with a number of its own."""
        self._numbers += 1
        offer = offer._replace(number=self._numbers)
        pending = self.pending[self._numbers] = PendingOffer(offer, self._loop)
        self._outgoing().offers.append(offer)
        self._out_bytes += sum(query.nbytes for query in offer.queries)
        if pending.sent_at > self._out_since + _LONGEST_TURN_S or self._out_bytes > CUT_BYTES:
            self._flush()
        return pending

    def call_off(self, pending: PendingOffer) -> None:
        """Nobody waits for it any more."""
        if self.pending.get(pending.number) is pending:  # not of a connection before this one
            del self.pending[pending.number]
            self._outgoing().called_off.append(pending.number)

    def confirm(self, pending: PendingOffer) -> None:
        """The rest of its request is admitted, too."""
        if self.pending.get(pending.number) is pending:
            self._outgoing().confirmed.append(pending.number)

    def configure(self, settings: dict[str, object]) -> None:
        self._outgoing().settings = settings

    def ask(self) -> None:
        """Ask the replica to report its state at once."""
        self._outgoing().asks = True

    def note_refused(self, work_s: float, tenant: Tenant | None = None) -> None:
        """With the next frame: so much work of that tenant was refused here without asking."""
        self._out.refused_s[tenant] = self._out.refused_s.get(tenant, 0.0) + work_s

    def close(self) -> None:
        self.transport.close()

    def _outgoing(self) -> Offers:
        if not self._out:
            self.frames += 1
            self._out_since = self._loop.time()
            self._loop.call_soon(self._flush, context=contextvars.Context())
        return self._out

    def _flush(self) -> None:
        if not self._out:
            return
        out, self._out, self._out_bytes = self._out, Offers(), 0
        if not self.transport.is_closing():
            self.transport.writelines(out.encode())

    def frame_received(self, frame: bytes) -> None:
        self.hear(Report.decode(frame))

    def hear(self, report: Report) -> None:
        self._on_report(report)
        for number, never in report.refused:
            if (pending := self.pending.pop(number, None)) is not None:
                pending.refuse(never=never)
        for number, count in report.admitted:
            if (pending := self.pending.get(number)) is not None:
                pending.admit(count)
                self._drop_ended(pending)
        for number, problem in report.failed:
            if (pending := self.pending.pop(number, None)) is not None:
                pending.fail(EngineFailed(problem))
        for one in report.answered:
            if (pending := self.pending.get(one.number)) is not None:
                pending.answer(one)
                self._drop_ended(pending)

    def _drop_ended(self, pending: PendingOffer) -> None:
        if pending.ended:
            self.pending.pop(pending.number, None)

    def connection_lost(self, _: Exception | None) -> None:
        left, self.pending = list(self.pending.values()), {}
        self._on_lost(left)


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
