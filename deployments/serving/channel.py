"""A Router's end of a connection to one replica: its outgoing frame and its pending offers. Pure asyncio."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from deployments.serving.connections import Peer


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
P = TypeVar("P", bound=Pending)  # its offers
R = TypeVar("R")  # the replica's reports


class RouterChannel(Peer, Generic[F, P, R]):
    """Sends offers to one replica and receives its reports. Everything sent in one turn of the event loop goes into one
    frame.

    It calls `on_report` with each report, before the pending offers get the report's contents. When the connection
    ends, it calls `on_lost` with the offers that are still pending.
    """

    outgoing: type[F]
    incoming: Any  # R's class; its `decode` reads one

    def __init__(self, on_report: Callable[[R], None], on_lost: Callable[[list[P]], None]) -> None:
        super().__init__()
        self._on_report, self._on_lost = on_report, on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers = 0  # offers so far
        self._out = self.outgoing()
        self._out_bytes, self._out_since = 0, 0.0
        self.pending: dict[int, P] = {}
        self.frames = 0  # sent or being filled

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def decode(self, frame: bytes) -> R:
        report: R = self.incoming.decode(frame)
        return report

    def call_off(self, pending: P) -> None:
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
