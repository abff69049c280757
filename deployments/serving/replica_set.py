"""The replicas of one pool, as Serve reports them to a Router: live, draining or gone."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from deployments.serve_adapter import membership
from deployments.serving.channel import RouterChannel
from deployments.serving.connections import reach
from deployments.serving.replica_link import ReplicaLink

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

L = TypeVar("L", bound=ReplicaLink[Any, Any])

ASKED = 4  # the most replicas of a pool that are asked for one query
_LINGER_S = 1.0  # between looks; Serve reports the pools one after another


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

    async def open_channel(
        self,
        address: tuple[str, int],
        secret: str,
        on_report: Callable[[Any], None],
        on_lost: Callable[[list[Any]], None],
    ) -> Any:
        """Connect to a replica. Raises OSError or TimeoutError. A simulation overrides it."""
        return await reach(lambda: self.channel_type(on_report, on_lost), address, secret)

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
    def is_open(self) -> bool:
        """Whether it gets queries, and any replica answers."""
        return self.may_answer

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
