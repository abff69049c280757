"""A replica's end of its Routers' connections: what it has of each, and one report a turn of the event loop."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

PROBE_TIMEOUT_S = 5.0  # an engine that is well has computed by then what only tells whether it is


class Connection(Protocol):
    """What a replica needs of its end of a Router's connection (`wire.RouterConnection`)."""

    @property
    def unsent(self) -> int: ...
    def send(self, report: Any) -> None: ...
    def hang_up(self) -> None: ...


@dataclass(slots=True, eq=False)
class RouterSession:
    """One Router's connection, and the report that goes to it next."""

    connection: Connection
    name: str = ""  # the Router's replica id, from its settings
    seen: int = 0  # frames that were read
    outbox: Any = None  # the report that is sent at the end of this turn of the event loop
    reported_opens_at: float = 0.0  # by the last report: when there is room again, on the replica's clock
    asks: bool = False  # it waits for a report


S = TypeVar("S", bound=RouterSession)
R = TypeVar("R")


class RouterSessions(ABC, Generic[S, R]):
    """The connections of a replica's Routers. All methods are called on the event loop.

    A Router that connects again, before the replica has noticed that the connection before is broken, is known by its
    name: the old connection is `gone` then.
    """

    session_type: type[S]
    report_type: type[R]
    problem: str | None = None  # what the engine fails of, whatever it is given

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self._sessions: dict[Connection, S] = {}
        self._flushing = False
        self._idle = asyncio.Event()  # something has ended

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Something that came has not ended."""

    @abstractmethod
    def state(self) -> Any:
        """What the replica says of itself now."""

    @abstractmethod
    def gone(self, connection: Connection) -> None:
        """A Router's connection has ended: nobody waits for what it had offered."""

    @abstractmethod
    def _should_report(self, session: S, opens_at: float) -> bool:
        """Whether the Router gets a report though nothing became of its offers. `opens_at`: when there is room."""

    async def drained(self) -> None:
        """Until all that was admitted has ended."""
        while self.is_busy:
            self._idle.clear()
            await self._idle.wait()

    def _session(self, connection: Connection) -> S:
        if (session := self._sessions.get(connection)) is None:
            session = self._sessions[connection] = self.session_type(connection)
        return session

    def _identify(self, session: S, name: str) -> None:
        """A Router has said who it is. An older connection of it broke at the other end only."""
        session.name = name
        for connection, other in list(self._sessions.items()):
            if other is not session and other.name == name:
                self.gone(connection)
                connection.hang_up()  # what it still had to say is not heard

    def _tell(self, session: S) -> R:
        """The report that goes to that Router at the end of this turn of the event loop; the caller adds to it."""
        self.report_soon()
        if session.outbox is None:
            session.outbox = self.report_type()
        report: R = session.outbox
        return report

    def report_soon(self) -> None:
        """At the end of this turn of the event loop."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._send, context=contextvars.Context())

    def _send(self) -> None:
        self._flushing = False
        state, now = self.state(), self.now()
        opens_at = now + state.opens_s
        for session in list(self._sessions.values()):
            if self._should_report(session, opens_at):
                session.asks = False
                session.outbox = session.outbox or self.report_type()
            if session.outbox is not None:
                report, session.outbox = session.outbox, None
                session.reported_opens_at = opens_at
                report.state, report.seen = state, session.seen
                self._deliver(session, report)

    def _deliver(self, session: S, report: R) -> None:
        session.connection.send(report)


def later(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    """In an empty context: it must not be tied to whatever call happens to be at hand."""
    return asyncio.get_running_loop().call_later(delay_s, callback, context=contextvars.Context())
