"""A Router's connection to one replica: opened, watched, reopened when it breaks, closed when the replica is gone."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from deployments.errors import ReplicaLost
from deployments.serving.channel import RouterChannel
from deployments.serving.frames import WIRE, speaks
from deployments.serving.replica_view import QUIET_S, ReplicaView

logger = logging.getLogger("ray.serve")

_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0  # between attempts to connect
_ANSWERS_S = 0.5  # `/info` shows the last known state of a replica that takes longer to report
_DONE_S = 0.05  # between looks whether a draining replica has answered all
_HUNG_S = 1.5  # a draining replica that does not report its state within this time hangs

V = TypeVar("V", bound=ReplicaView[Any])
C = TypeVar("C", bound=RouterChannel[Any, Any, Any])


class Members(Protocol):
    """A link's pool (`replica_set.ReplicaSet`)."""

    name: str
    space: str
    policy: dict[str, Any]

    @property
    def links(self) -> Mapping[str, Any]: ...
    async def open_channel(self, *how: Any) -> Any: ...
    def spawn(self, errand: Any) -> asyncio.Task[None]: ...
    def changed(self) -> None: ...
    def drained(self, link: Any) -> bool: ...


class ReplicaLink(Generic[V, C]):
    """A Router's connection to one replica. It reconnects until Serve says that the replica is gone.

    States:

    - `_task` is None: the replica serves another model than this Router, or this Router does not understand its version
      of the frames. Nothing is sent.
    - `_channel` is None: connecting, with retries. Nothing is sent.
    - `_channel` is set, `view.state` is None: the replica was sent its policy and asked for its state.
    - Both are set: `is_live`. When the connection breaks, the link connects again.

    When a connection breaks, its pending offers become suspect: they may still run on the replica. So that nothing runs
    twice at the same time, a suspect offer fails with ReplicaLost only when one of these is known:

    - The replica is reached again and reports. It has then dropped the offers of the old connection.
    - Nothing listens on the replica's port, so its process is dead.
    - Serve says that the replica is dead.

    A service that never offers anything twice sets `may_run_on` to False: its suspect offers fail at once.
    """

    view_type: type[V]
    may_run_on: ClassVar[bool]
    at_work: ClassVar[str]  # completes ReplicaLost's message

    def __init__(self, pool: Members, replica: str, about: Mapping[str, Any], rank: tuple[bool, int]) -> None:
        """`about`: the replica's metadata from Serve, including its `channel`'s address and secret."""
        self.view, self.about = self.view_type(replica, rank), about
        self.pool = pool
        self._channel: C | None = None
        self._suspect: list[Any] = []
        self._asking: asyncio.Future[None] | None = None  # done at its next report
        self._watching = False
        self._wait_s = 0.0  # before the next attempt to connect
        self._task: asyncio.Task[None] | None = None
        space = about.get("space", "")
        if space != pool.space:
            logger.info(
                "the %s pool's replica %s serves another model (space %s, not %s): it gets no requests",
                pool.name, replica, space or "unknown", pool.space,
            )  # fmt: skip
        elif speaks(about):
            self._task = pool.spawn(self._connect())
        else:
            logger.error(
                "the %s pool's replica %s has version %s of the frames, and this Router has %d: it gets no requests; "
                "upgrade through consecutive versions of windve",
                pool.name, replica, about.get("wire", 1), WIRE,
            )  # fmt: skip

    @property
    def is_live(self) -> bool:
        """Whether it is connected and the replica has reported its state."""
        return self._channel is not None and self.view.state is not None

    def call_off(self, pending: Any) -> None:
        """Cancel an offer, so that the replica frees its room. Does nothing if the offer has ended."""
        if self._channel is not None:
            self._channel.call_off(pending)

    def configure(self) -> None:
        """Send the pool's policy to the replica."""
        if self._channel is not None:
            self._channel.configure(self.pool.policy)

    def describe(self) -> dict[str, Any]:
        """What `/info` shows about every replica. The channel's secret is left out."""
        ejected_s = max(0.0, self.view.outlier.until - asyncio.get_running_loop().time())
        return {**self.about, "channel": f"port {self.about['channel']['port']}", "ejected_s": round(ejected_s, 1)}

    # --- what it knows about the replica ------------------------------------------------------------------------------

    async def ask_state(self) -> None:
        """Ask for the replica's state, and wait for it or for `_ANSWERS_S`."""
        if self._channel is not None:
            self._channel.ask()
            self._asking = self._asking or asyncio.get_running_loop().create_future()
            await asyncio.wait([self._asking], timeout=_ANSWERS_S)

    @property
    def _is_waiting(self) -> bool:
        """Whether a report is due from the replica."""
        return not self.view.has_read_all

    def _watch(self) -> None:
        """Ask the replica for its state while it owes a report and stays quiet."""
        self._watching = self._channel is not None and self._is_waiting
        if self._channel is None or not self._watching:
            return
        loop = asyncio.get_running_loop()
        if self.view.should_be_asked(loop.time()):
            self.view.asked(loop.time())
            self._channel.ask()
        loop.call_later(QUIET_S, self._watch, context=contextvars.Context())

    def _hear(self, report: Any) -> None:
        """Take over the state that a report carries."""
        self.view.hear(asyncio.get_running_loop().time(), report.state, report.seen)
        if self._asking is not None:
            self._asking.set_result(None)
            self._asking = None

    def _on_report(self, report: Any) -> None:
        first = self.view.state is None
        self._hear(report)
        if first:
            self._wait_s = 0.0
            self._lose_suspect()  # the replica has dropped them
            self.pool.changed()

    # --- how it ends --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Close the link: Serve says that the replica is dead or drained."""
        if self._task is not None:
            self._task.cancel()
        if self._channel is not None:
            left, self._channel.pending = list(self._channel.pending.values()), {}
            self._channel.close()
            self._channel = None
            self._suspect += left
        self._lose_suspect()

    def drain(self) -> bool:
        """Serve no longer lists the replica: let it answer what it has. Returns False, with the link closed, if it has
        nothing. A replica that stays silent hangs; its link is closed before Serve gets around to ending it.
        """
        if self._channel is None or not self._channel.pending:
            self.end()
            return False
        loop = asyncio.get_running_loop()
        self.view.asked(loop.time())
        self._channel.ask()
        loop.call_later(_HUNG_S, self._end_if_hung, context=contextvars.Context())
        self._end_once_done()
        return True

    def _end_once_done(self) -> None:
        """Close the link of a draining replica once it has answered all: until then it does not end."""
        if self._channel is None or self.pool.links.get(self.view.replica) is self:
            return  # it is lost, or listed again
        if self._channel.pending:
            asyncio.get_running_loop().call_later(_DONE_S, self._end_once_done, context=contextvars.Context())
        elif self.pool.drained(self):
            self.end()

    def _end_if_hung(self) -> None:
        if self.view.is_silent(asyncio.get_running_loop().time()) and self.pool.drained(self):
            self.end()

    def _on_lost(self, left: list[Any]) -> None:
        if self._channel is None:
            return
        self._channel = None
        self.view.forget()
        self._suspect += left
        if not self.may_run_on:
            self._lose_suspect()
        self.pool.changed()
        if self.pool.links.get(self.view.replica) is self:
            self._task = self.pool.spawn(self._connect())
        else:
            self.pool.drained(self)
            self._lose_suspect()

    def _lose_suspect(self) -> None:
        lost, self._suspect = self._suspect, []
        who = f"the {self.pool.name} pool lost replica {self.view.replica}"
        for pending in lost:
            pending.fail(ReplicaLost(f"{who} while {self.at_work}; try again"))

    async def _connect(self) -> None:
        """Connect, with retries, then send the policy and ask for a report. The first report resets the backoff."""
        at, told = self.about["channel"], False
        who = f"the {self.pool.name} pool's replica {self.view.replica} at {at['host']}:{at['port']}"
        while True:
            await asyncio.sleep(self._wait_s)  # 0, unless the last connection broke before its first report
            self._wait_s = min(max(2 * self._wait_s, _FIRST_RETRY_S), _LAST_RETRY_S)
            try:
                channel: C = await self.pool.open_channel(
                    (at["host"], at["port"]), at["secret"], self._on_report, self._on_lost
                )
            except (OSError, TimeoutError) as error:
                if isinstance(error, ConnectionRefusedError):
                    self._lose_suspect()  # nothing listens there, so the replica's process is dead
                if not told:
                    told = True
                    why = str(error) or "no answer"
                    logger.warning("cannot reach %s (%s): it gets no requests until then", who, why)
                continue
            if channel.is_open:
                break  # else it broke before it was returned
        self._channel = channel
        self.configure()
        channel.ask()


def learned(state: Any) -> dict[str, Any]:
    """What `/info` shows about the state of any kind of replica."""
    return {
        "opens_s": state.opens_s if math.isfinite(state.opens_s) else None,
        "slowdown": round(state.slowdown, 4),
        "safety_margin": round(state.margin, 4),
    }
