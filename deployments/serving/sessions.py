"""A replica's sessions with its Routers: what each has there, and one report to each per turn of the event loop."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from deployments.serving.planned_runs import PlannedRuns

PROBE_TIMEOUT_S = 5.0  # an engine that is well has computed by then what only tells whether it is


class Connection(Protocol):
    """The interface of a Router's connection (`connections.RouterConnection`) that a replica needs."""

    @property
    def unsent(self) -> int: ...
    def send(self, report: Any) -> None: ...
    def hang_up(self) -> None: ...


@dataclass(slots=True, eq=False)
class RouterSession:
    """One Router's connection, and the report that goes to it next."""

    connection: Connection
    name: str = ""  # the Router's replica id, from its settings
    seen: int = 0  # frames read
    outbox: Any = None  # the report that is sent at the end of this turn of the event loop
    reported_opens_at: float = 0.0  # when there is room again, as last reported; the replica's clock
    asks: bool = False  # the Router waits for a report


S = TypeVar("S", bound=RouterSession)
R = TypeVar("R")


class RouterSessions(ABC, Generic[S, R]):
    """The connections of a replica's Routers. All methods are called on the event loop.

    A Router may reconnect before the replica notices that its old connection is broken. The replica then recognizes the
    Router by its name and drops the old connection (`gone`).
    """

    session_type: type[S]
    report_type: type[R]
    planned: PlannedRuns[Any]  # a calibration's
    problem: str | None = None  # why the engine fails on every input, if it does

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self._sessions: dict[Connection, S] = {}
        self._flushing = False
        self._idle = asyncio.Event()  # set when something has ended, or a Router has left

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether anything that Routers sent has not ended."""

    @abstractmethod
    def state(self) -> Any:
        """The replica's state now, as it reports it to Routers."""

    @abstractmethod
    def gone(self, connection: Connection) -> None:
        """A Router's connection has ended: drop what it had offered."""

    @abstractmethod
    def _should_report(self, session: S, opens_at: float) -> bool:
        """Whether to report to a Router that has no news about its offers. `opens_at`: when there is room."""

    def report_to_all(self) -> None:
        """Report the state to all Routers: what they know is outdated."""
        for session in self._sessions.values():
            session.asks = True
        self.report_soon()

    async def drained(self) -> None:
        """Wait until all admitted work has ended."""
        while self.is_busy:
            self._idle.clear()
            await self._idle.wait()

    async def released(self) -> None:
        """Wait until every Router has disconnected: it has all its answers, and does not need the replica any more
        (`ReplicaSet`). Serve's `graceful_shutdown_timeout_s` ends the wait.
        """
        while self._sessions:
            self._idle.clear()
            await self._idle.wait()

    def _session(self, connection: Connection) -> S:
        if (session := self._sessions.get(connection)) is None:
            session = self._sessions[connection] = self.session_type(connection)
        return session

    def _identify(self, session: S, name: str) -> None:
        """Take a Router's name, and drop its older connection, which only the Router knows to be broken."""
        session.name = name
        for connection, other in list(self._sessions.items()):
            if other is not session and other.name == name:
                self.gone(connection)
                connection.hang_up()  # nothing more is read from it

    def _tell(self, session: S) -> R:
        """The report that the Router gets at the end of this turn of the event loop. The caller adds to it."""
        self.report_soon()
        if session.outbox is None:
            session.outbox = self.report_type()
        report: R = session.outbox
        return report

    def report_soon(self) -> None:
        """Send the pending reports at the end of this turn of the event loop."""
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
    """`call_later` in an empty context, so that the callback is not tied to the current call."""
    return asyncio.get_running_loop().call_later(delay_s, callback, context=contextvars.Context())
