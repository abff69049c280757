"""The replicas of one pool, as Serve reports them to a Router, and the Router's connection to each.

`ReplicaSet` follows which are live, draining or gone. `ReplicaLink` opens a connection, watches it, opens it again when
it breaks, and closes it when the replica is gone.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from deployments.errors import ReplicaLost
from deployments.serve_adapter import membership
from deployments.serving.connections import RouterChannel, reach
from deployments.serving.frames import WIRE, speaks
from deployments.serving.replica_view import QUIET_S, ReplicaView

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

ASKED = 4  # the most replicas of a pool that are asked for one query
_LINGER_S = 1.0  # between looks; Serve reports the pools one after another
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0  # between attempts to connect
_ANSWERS_S = 0.5  # `/info` shows the last known state of a replica that takes longer to report
_DONE_S = 0.05  # between looks whether a draining replica has answered all
_HUNG_S = 1.5  # a draining replica that does not report its state within this time hangs

V = TypeVar("V", bound=ReplicaView[Any])
C = TypeVar("C", bound=RouterChannel[Any, Any, Any])


class ReplicaLink(Generic[V, C]):
    """A Router's connection to one replica. It reconnects until Serve says that the replica is gone.

        no `_task`                      it serves another model, or its version of the frames is unknown here
        no `_channel`                   connecting, with retries
        `_channel`, no `view.state`     the replica was sent its policy and asked for its state
        both                            `is_live`; when the connection breaks, the link connects again

    Pending offers of a broken connection become suspect: they may still run on the replica. So that nothing runs twice
    at the same time, they fail with ReplicaLost only when the replica has reported again, and so has dropped them, or
    when its process is dead: Serve says so, or nothing listens on its port. A service that never offers anything twice
    sets `may_run_on` to False: its suspect offers fail at once.
    """

    view_type: type[V]
    may_run_on: ClassVar[bool]
    at_work: ClassVar[str]  # completes ReplicaLost's message

    def __init__(self, pool: ReplicaSet[Any], replica: str, about: Mapping[str, Any], rank: tuple[bool, int]) -> None:
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
                where = at["host"], at["port"]
                channel: C = await self.pool.open_channel(where, at["secret"], self._on_report, self._on_lost)
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


L = TypeVar("L", bound=ReplicaLink[Any, Any])


class ReplicaSet(ABC, Generic[L]):
    """A pool's replicas.

    `links`: the replicas in use, by replica id: those that Serve lists, and lingering ones. `live`: those of them that
    are connected and have reported, preferred ones first. `policy`: the policy in force, as it is sent to replicas.

    Serve stops old replicas before it starts new ones. A stopped replica lingers: it stays in use until another one
    that Serve lists answers, in any pool (`nothing_else_answers`). After `patience_s` it ends in any case, because a
    new replica may need its device.
    """

    link_type: type[L]
    channel_type: ClassVar[type[RouterChannel[Any, Any, Any]]]
    space = ""  # of the vectors that clients get (`models/space.py`)
    nothing_else_answers: Callable[[], bool] | None = None
    patience_s = 5.0

    def __init__(
        self,
        name: str,
        *,
        deployment: str,
        handle: DeploymentHandle[Any] | None,
        router: str,
        node: str,  # on which the Router runs
        on_change: Callable[[], None],  # called when replicas join or leave, or start or stop answering
    ) -> None:
        self.name, self.router_id = name, router
        self.policy: dict[str, Any] = {}
        self.links: dict[str, L] = {}
        self.live: list[L] = []  # replicas that answer
        self._draining: dict[str, L] = {}
        self._lingering: dict[str, float] = {}  # those of `links` that Serve does not list, and since when
        self._on_change = on_change
        self._deployment, self._handle, self._node = deployment, handle, node
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """As `/info` shows it."""

    async def open_channel(self, address: tuple[str, int], secret: str, *events: Callable[[Any], None]) -> Any:
        """Connect to a replica. Raises OSError or TimeoutError. `events`: what a channel calls (`RouterChannel`)."""
        return await reach(lambda: self.channel_type(*events), address, secret)

    def put_in_force(self, policy: Mapping[str, Any]) -> None:
        """Send a policy to every replica, and to replicas that join later."""
        self.policy = {"router": self.router_id, **policy}
        for link in self.links.values():
            link.configure()

    def connect(self) -> None:
        """Follow the pool's replicas from now on."""

        def changed(members: membership.Members, died: str | None) -> None:
            self._loop.call_soon_threadsafe(self.follow, members, died)

        membership.watch(self._deployment, changed)
        # A handle follows its deployment only after its first call.
        self.spawn(self._wake_handle())

    async def _wake_handle(self) -> None:
        assert self._handle is not None
        try:
            await self._handle.options(method_name="wake").remote()
        except Exception as error:  # noqa: BLE001 - the result does not matter: the handle follows its deployment now
            logger.info("the %s pool's first call failed: %s", self.name, error)

    def changed(self) -> None:
        """Update `live` after replicas have joined or left, or have started or stopped answering."""
        self.live = sorted((link for link in self.links.values() if link.is_live), key=lambda link: link.view.rank)
        self._on_change()

    def follow(self, members: membership.Members, died: str | None) -> None:
        """Take Serve's list of live replicas. `died`: a replica that is certainly dead."""
        if set(members) != set(self.links) - set(self._lingering):
            logger.info("the %s pool has %d live replicas", self.name, len(members))
        self._lingering = {replica: at for replica, at in self._lingering.items() if replica not in members}
        for replica in set(self.links) - set(members) - set(self._lingering):
            if self.nothing_else_answers is not None and self._answers(self.links[replica]):
                self._lingering[replica] = self._loop.time()
                self._end_lingering_soon(replica)
            else:
                self._drain(replica)
        for links in (self.links, self._draining):
            if died in links:
                links.pop(died).end()
        for replica, about in members.items():
            if replica in self._draining:  # listed again
                self.links[replica] = self._draining.pop(replica)
                self.links[replica].configure()
            elif replica not in self.links and replica != died:
                where = rank(replica, about.get("node"), node=self._node, router=self.router_id)
                self.links[replica] = self.link_type(self, replica, about, where)
        self.changed()

    def _drain(self, replica: str) -> None:
        link = self._draining[replica] = self.links.pop(replica)
        if not link.drain():
            del self._draining[replica]

    def _end_lingering_soon(self, replica: str) -> None:
        self._loop.call_later(_LINGER_S, self._end_lingering, replica, context=contextvars.Context())

    def _end_lingering(self, replica: str) -> None:
        """Drain a lingering replica, unless nothing else answers."""
        if replica not in self._lingering or replica not in self.links:
            self._lingering.pop(replica, None)
            return
        is_patient = self._loop.time() < self._lingering[replica] + self.patience_s
        is_last = self.nothing_else_answers is not None and self.nothing_else_answers()
        if is_patient and is_last and self._answers(self.links[replica]):
            self._end_lingering_soon(replica)
        else:
            del self._lingering[replica]
            self._drain(replica)
            self.changed()

    @property
    def has_listed_replica(self) -> bool:
        """Whether any replica that Serve lists answers."""
        links = self.live if self.may_answer else ()
        return any(link.view.replica not in self._lingering and self._answers(link) for link in links)

    def _answers(self, link: L) -> bool:
        """Whether it gets queries. A broken one must free its device for the next."""
        return link.is_live and not link.view.is_out(self._loop.time())

    @property
    def may_answer(self) -> bool:
        """Whether it would get queries if no other pool could answer."""
        return bool(self.live)

    def ejected(self) -> list[L]:
        """The live replicas that get no queries because their engines fail, or hang (generation only)."""
        now = self._loop.time()
        return [link for link in self.live if link.view.outlier.is_ejected(now)]

    def drained(self, link: L) -> bool:
        """A replica's connection has ended: forget the replica if it was draining. Returns whether it was."""
        drains = self._draining.get(link.view.replica) is link
        if drains:
            del self._draining[link.view.replica]
        return drains

    def spawn(self, errand: Any) -> asyncio.Task[None]:
        """Run a coroutine in an empty context, so that it is not canceled with the current HTTP request."""
        task: asyncio.Task[None] = self._loop.create_task(errand, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def rank(replica: str, replica_node: str | None, *, node: str, router: str) -> tuple[bool, int]:
    """A replica's sort key, preferred replicas first: those on the Router's own `node`, which need no network, then the
    others. Each Router orders equals in its own way, so that Routers do not all turn to the same replica.
    """
    return replica_node != node, zlib.crc32(f"{router} {replica}".encode())
