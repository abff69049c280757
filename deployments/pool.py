"""One pool as the Router sees it: its live replicas, and a channel to each."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deployments import membership
from deployments.errors import ReplicaLost
from deployments.metrics import PoolState
from deployments.placement.locality import rank
from deployments.placement.view import QUIET_S, View
from deployments.queueing.cost_model import CostModel
from deployments.settings import PoolConfig
from deployments.transport.channel import Channel, Placed
from deployments.transport.frames import Offer, Report

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0  # between attempts to connect
_AWAY = 1.25  # a replica on another node counts as if it finished so many times later: one slow run of the nearest must
# not move queries between nodes
_LOOKED_AT = 16  # replicas, for one query
_HUNG_S = 1.5  # in which a replica that is counted out gives a word, if it lives
_ANSWERS_S = 0.5  # a replica that takes longer for a word is shown by its last


class Link:
    """A Router's connection to one replica: made again when it breaks, until Serve says that the replica has gone.

    What was placed when the connection broke is in doubt: it may still run there. It counts as lost when the replica,
    reached again, has dropped it, or when Serve says that the replica is dead; not before, so that no query ever runs
    twice at once on live replicas.
    """

    def __init__(self, pool: Pool, replica: str, about: Mapping[str, Any], rank: tuple[bool, int]) -> None:
        self.view = View(replica, rank)
        self.about = about
        self.answered = 0  # queries
        self.bulk_parts = 0  # of bulk requests, there now
        self.bulk_again_at = 0.0  # it had no room for bulk queries, and is not asked before
        self._pool = pool
        self._channel: Channel | None = None
        self._doubtful: list[Placed] = []
        self._words: list[asyncio.Future[None]] = []
        self._watching = False
        self._wait_s = 0.0  # before the next attempt to connect
        self._task = pool.spawn(self._connect())

    @property
    def is_live(self) -> bool:
        return self._channel is not None and self.view.word is not None

    def offer(self, offer: Offer) -> Placed:
        assert self._channel is not None
        placed = self._channel.offer(offer)
        cost_s = self.view.model.work_s(map(len, offer.queries))
        self.view.sent(self._channel.frames, len(offer.queries), cost_s)
        if not self._watching:
            self._watch()
        return placed

    def _watch(self) -> None:
        """Ask for a word while it says nothing of what it was sent."""
        self._watching = self._channel is not None and not self.view.has_read_all
        if self._channel is None or not self._watching:
            return
        loop = asyncio.get_running_loop()
        if self.view.should_be_asked(loop.time()):
            self.view.asked(loop.time())
            self._channel.ask()
        loop.call_later(QUIET_S, self._watch, context=contextvars.Context())

    def call_off(self, placed: Placed) -> None:
        placed.forget()
        if self._channel is not None:
            self._channel.call_off(placed)

    def confirm(self, placed: Placed) -> None:
        if self._channel is not None:
            self._channel.confirm(placed)

    def refuse_here(self, work_s: float) -> None:
        """A query of so much work is refused without asking the replica, which is told with the next frame."""
        if self._channel is not None:
            self._channel.tell_refused(work_s)

    def configure(self) -> None:
        if self._channel is not None:
            self._channel.configure(self._pool.terms)

    def describe(self) -> dict[str, Any]:
        """As `/info` shows it; the channel's secret stays here."""
        word = self.view.word
        assert word is not None
        return {
            **self.about,
            "channel": f"port {self.about['channel']['port']}",
            "queries": self.answered,
            "in_flight": word.in_flight,
            "waiting": word.waiting,
            "most_in_flight": word.most,
            "runs": word.runs,
            "opens_s": word.opens_s if math.isfinite(word.opens_s) else None,
            "factor": round(word.factor, 4),
            "margin": round(word.margin, 4),
            "refusals": dict(zip(("full", "never", "closed"), word.refusals, strict=True)),
        }

    async def ask_word(self) -> None:
        """Return when the replica has told how it is, or does not answer."""
        if self._channel is not None:
            self._channel.ask()
            word = asyncio.get_running_loop().create_future()
            self._words.append(word)
            await asyncio.wait([word], timeout=_ANSWERS_S)

    def end(self) -> None:
        """Serve says that the replica has gone: dead, or drained."""
        self._task.cancel()
        if self._channel is not None:
            left, self._channel.placed = list(self._channel.placed.values()), {}
            self._channel.close()
            self._channel = None
            self._doubtful += left
        self._lose_doubtful()

    def drain(self) -> bool:
        """Serve counts it out; it may still answer what it has: the connection ends with the replica. False where it
        has nothing, and the link has ended. One that gives no word any more is hung: Serve takes a while to end it.
        """
        if self._channel is None or not self._channel.placed:
            self.end()
            return False
        loop = asyncio.get_running_loop()
        self.view.asked(loop.time())
        self._channel.ask()
        loop.call_later(_HUNG_S, self._end_if_hung, context=contextvars.Context())
        return True

    def _end_if_hung(self) -> None:
        if self.view.is_silent(asyncio.get_running_loop().time()) and self._pool.drained(self):
            self.end()

    def _on_report(self, report: Report) -> None:
        first = self.view.word is None
        self.view.hear(asyncio.get_running_loop().time(), report.word, report.seen)
        self.answered += len(report.answered)
        for word in self._words:
            if not word.done():
                word.set_result(None)
        self._words.clear()
        if first:
            self._wait_s = 0.0
            self._lose_doubtful()  # it has dropped them
            self._pool.changed()

    def _on_lost(self, left: list[Placed]) -> None:
        if self._channel is None:
            return
        self._channel = None
        self.view.forget()
        self._doubtful += left
        self._pool.changed()
        if self._pool.links.get(self.view.replica) is self:
            self._task = self._pool.spawn(self._connect())
        else:
            self._pool.drained(self)  # and has ended
            self._lose_doubtful()

    def _lose_doubtful(self) -> None:
        lost, self._doubtful = self._doubtful, []
        for placed in lost:
            placed.fail(
                ReplicaLost(
                    f"the {self._pool.name} pool lost replica {self.view.replica} while the query was on it; "
                    "please try again"
                )
            )

    async def _connect(self) -> None:
        """Until it is reached; its first word ends the wait."""
        at, wait_s, told = self.about["channel"], _FIRST_RETRY_S, False
        await asyncio.sleep(self._wait_s)  # 0, unless the last connection broke before its first word
        self._wait_s = min(max(2 * self._wait_s, _FIRST_RETRY_S), _LAST_RETRY_S)
        while True:
            try:
                address = (at["host"], at["port"])
                channel = await self._pool.open_channel(address, at["secret"], self._on_report, self._on_lost)
            except (OSError, TimeoutError) as error:
                if isinstance(error, ConnectionRefusedError):  # nobody listens there: its process is dead
                    self._lose_doubtful()
                if not told:
                    told = True
                    logger.warning(
                        "the %s pool's replica %s is not reached at %s:%s (%s): it gets no queries until it is",
                        self._pool.name, self.view.replica, at["host"], at["port"], str(error) or "no answer",
                    )  # fmt: skip
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LAST_RETRY_S)
                continue
            if not channel.is_open:  # it broke before it was known here
                await asyncio.sleep(wait_s)
                continue
            self._channel = channel
            channel.configure(self._pool.terms)
            channel.ask()
            return


class Pool:
    """`name` is "accelerator" or "cpu"; `deployment` is the name of its Serve deployment."""

    def __init__(
        self,
        name: str,
        *,
        deployment: str,
        handle: DeploymentHandle[Any] | None,
        router: str,
        node: str,  # on which the Router runs
        on_change: Callable[[], None],  # called whenever replicas have come or gone
    ) -> None:
        self.name = name
        self.config = PoolConfig()
        self.links: dict[str, Link] = {}
        self.terms: dict[str, Any] = {}
        self._draining: dict[str, Link] = {}
        self.live: list[Link] = []  # replicas that answer
        self._on_change = on_change
        self._deployment, self._handle = deployment, handle
        self._router, self._node = router, node
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = 0

    async def open_channel(
        self,
        address: tuple[str, int],
        secret: str,
        on_report: Callable[[Report], None],
        on_lost: Callable[[list[Placed]], None],
    ) -> Channel:
        """Raises OSError or TimeoutError. A simulation has another."""
        return await Channel.open(address, secret, on_report, on_lost)

    def connect(self) -> None:
        """Follow the pool's replicas from now on."""

        def changed(members: membership.Members, died: str | None) -> None:
            self._loop.call_soon_threadsafe(self.follow, members, died)

        membership.watch(self._deployment, changed)
        # A handle starts to follow its deployment with its first call.
        self.spawn(self._wake_handle())

    async def _wake_handle(self) -> None:
        assert self._handle is not None
        try:
            await self._handle.options(method_name="wake").remote()
        except Exception as error:  # noqa: BLE001 - it meant nothing; the handle follows its deployment from now on
            logger.info("the %s pool's first call failed: %s", self.name, error)

    def configure(self, config: PoolConfig, terms: Mapping[str, Any]) -> None:
        """Take a new depth, model and rule over, in place; every replica is told."""
        self.config = config
        model = None
        if config.alpha_s is not None and config.beta_s is not None:
            cost = config.cost
            curve = CostModel.of_curve(config.alpha_s, config.beta_s)
            model = [cost.query_s, cost.token_s, cost.token2_s, config.beta_s] if cost else list(_numbers(curve))
        self.terms = {"router": self._router, **terms, "depth": config.queue_depth, "model": model}
        for link in self.links.values():
            link.configure()

    def changed(self) -> None:
        """Replicas have come or gone, or have begun or ceased to answer."""
        self.live = sorted((link for link in self.links.values() if link.is_live), key=lambda link: link.view.rank)
        self._on_change()

    @property
    def is_open(self) -> bool:
        return self.config.queue_depth != 0 and bool(self.live)

    @property
    def by_count(self) -> bool:
        """Admission by depth: Algorithm 1."""
        return bool(self.terms.get("admission") == "depth")

    def capacity(self, tokens: float, slo_s: float) -> float:
        """Queries of so many tokens that may be in flight at once on idle replicas."""
        if not self.is_open:
            return 0.0
        if self.by_count:
            return (self.config.queue_depth or 0) * len(self.live)
        return sum(link.view.most_queries(tokens, slo_s, self.config.queue_depth) for link in self.live)

    def room_queries(self, now: float, tokens: float, left_s: float) -> float:
        """About how many of them would be admitted now."""
        if not self.is_open:
            return 0.0
        if self.by_count:
            words = [link.view.word for link in self.live if link.view.word is not None]
            return max(0.0, self.capacity(tokens, left_s) - sum(word.in_flight for word in words))
        return sum(link.view.room_queries(now, tokens, left_s) for link in self.live)

    @property
    def queries_s(self) -> float:
        """Queries of 75 tokens that its live replicas do in a second, about."""
        return sum(1 / max(link.view.model.alpha_s, 1e-6) for link in self.live)

    @property
    def calibrated(self) -> bool:
        return self.config.alpha_s is not None  # and beta_s with it: the settings see to that

    @property
    def latency_model(self) -> tuple[float, float]:
        """(alpha_s, beta_s): calibrated if the config has them, else what a replica measured while it warmed up."""
        if self.config.alpha_s is not None and self.config.beta_s is not None:
            return self.config.alpha_s, self.config.beta_s
        model = next((link.view.model for link in self.live), CostModel(0.0, 0.0, 0.0, 0.0))
        return model.alpha_s, model.beta_s

    def by_finish(
        self, now: float, lengths: Sequence[int], most: int, *, slo_s: float = math.inf, depth: int | None = None
    ) -> Iterator[Link]:
        """The live replicas that would finish first, `most` of them: those that are open before those that said when
        they open. Those that have stopped, or were sent enough, are left out.
        """
        live = [link for link in self._some() if not (link.view.is_silent(now) or link.view.is_flooded(slo_s, depth))]
        if len(live) == 1:
            yield live[0]
            return
        yield from heapq.nsmallest(
            most,
            live,
            key=lambda link: (
                link.view.opens_s(now) > 0,
                round(link.view.finish_s(now, lengths) * (_AWAY if link.view.rank[0] else 1.0), 4),
                link.view.rank,
            ),
        )

    def is_full(self, now: float) -> bool:
        """All that are looked at said when they open, and it is not yet."""
        return all(link.view.opens_s(now) > 0 for link in self._some(turn=False))

    def _some(self, *, turn: bool = True) -> Sequence[Link]:
        """The replicas that are looked at for one query. Where there are many, a few in turn: to look at all would take
        a thousand nodes' Router milliseconds a query, and all Routers would turn to the same one that seems best.
        """
        if len(self.live) <= _LOOKED_AT:
            return self.live
        start = self._turn % len(self.live)
        self._turn += _LOOKED_AT * turn
        few = self.live[start : start + _LOOKED_AT]
        return few + self.live[: _LOOKED_AT - len(few)]

    def follow(self, members: membership.Members, died: str | None) -> None:
        """Serve says which replicas live, and of one that it is dead for sure."""
        if set(members) != set(self.links):
            logger.info("the %s pool has %d live replicas", self.name, len(members))
        for replica in set(self.links) - set(members):
            link = self.links.pop(replica)
            self._draining[replica] = link
            if not link.drain():
                del self._draining[replica]
        for links in (self.links, self._draining):
            if died in links:
                links.pop(died).end()
        for replica, about in members.items():
            if replica in self._draining:  # counted in again
                self.links[replica] = self._draining.pop(replica)
                self.links[replica].configure()
            elif replica not in self.links and replica != died:
                where = rank(replica, about.get("node"), node=self._node, router=self._router)
                self.links[replica] = Link(self, replica, about, where)
        self.changed()

    def drained(self, link: Link) -> bool:
        """Serve had counted it out, and it has ended. False where it had not, or has counted it in again."""
        drains = self._draining.get(link.view.replica) is link
        if drains:
            del self._draining[link.view.replica]
        return drains

    def state(self) -> PoolState:
        """For Prometheus."""
        alpha_s, beta_s = self.latency_model
        is_open = self.config.queue_depth != 0
        return PoolState(is_open, self.config.queue_depth or 0, len(self.live), alpha_s, beta_s, self.calibrated)

    def spawn(self, errand: Any) -> asyncio.Task[None]:
        """In an empty context: it must not be cancelled with the HTTP request that happens to be at hand."""
        task: asyncio.Task[None] = self._loop.create_task(errand, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _numbers(model: CostModel) -> Sequence[float]:
    return model.query_s, model.token_s, model.token2_s, model.beta_s
