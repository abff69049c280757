"""A cluster in virtual time: the real admission, leases and batchers of N nodes, over devices, cores and a network that
are formulas.

What decides is the product's own code: `QueueManager`, `Shortage`, `Tenancy`, `Holdings`, `LeaseOffice`, `Leases` and
`Batcher`. What is modelled: a device answers a run of n queries after `alpha * n + beta`, and merges what waits into
its next run, as `Embedder` does; a process has one core, on which its work is done one after the other; a message
takes `delay_s`; each node's proxy sends a query to the Router on which it has the fewest.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from deployments.batcher import Answer, Batcher, Job, Pacing, Reply
from deployments.holdings import Holdings
from deployments.lease_office import LeaseOffice
from deployments.queue_manager import Full, QueueManager, Short
from deployments.shortage import Shortage
from deployments.tenancy import Tenancy

from deployments.errors import ReplicaLost

T = TypeVar("T")

_IDS = np.zeros(0, np.int32)
_VECTORS, _NORMS = np.zeros((4096, 1), np.float32), np.ones(4096, np.float32)
_LAST_ANSWER_S = 60.0
_SETTLING_S = 2.0  # from the first Router's start until all hold their shares


@dataclass(frozen=True, slots=True)
class Device:
    """One replica's: a run of n queries takes `alpha_s * n + beta_s`; at most `depth` are in flight."""

    alpha_s: float
    beta_s: float
    depth: int

    @property
    def most_queries_s(self) -> float:
        """When every run is as full as the depth allows: one runs while the rest of the places fill for the next."""
        half = self.depth / 2
        return half / (self.alpha_s * half + self.beta_s)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a core. Those `_each` are for each replica (of all pools) that a Router knows, or for each Router that
    an office knows.
    """

    query_s: float = 0.0  # a Router's, for a query that is answered
    refusal_s: float = 0.0  # a Router's, for one that is told busy
    query_each_s: float = 0.0
    call_s: float = 0.0  # a Router's, for a word to an office and its answer
    call_each_s: float = 0.0
    answer_s: float = 0.0  # an embedder's, for the same word
    answer_each_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """`nodes` with one replica of each of `devices`, and `routers`. `delay_s`: (least, most) of a message."""

    nodes: int
    routers: int
    devices: Mapping[str, Device]
    costs: Costs = Costs()
    delay_s: tuple[float, float] = (0.0, 0.0)
    seed: int = 0

    @property
    def replicas(self) -> int:
        return self.nodes * len(self.devices)


class Core:
    """One process's event loop: what it has to do is done one after the other."""

    __slots__ = ("_free_at", "busy_s")

    def __init__(self) -> None:
        self._free_at = 0.0
        self.busy_s = 0.0

    def done_in(self, seconds: float) -> float:
        """Seconds from now until work that has just come is done."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + seconds
        self.busy_s += seconds
        return self._free_at - now


@dataclass(slots=True, eq=False)
class _Call:
    router: str
    queries: int
    answer: asyncio.Future[float]


class Replica:
    """An embedder: its office, and its engine as `Embedder` runs it."""

    def __init__(self, cluster: Cluster, name: str, pool: str) -> None:
        self.name, self.pool = name, pool
        self.device = cluster.shape.devices[pool]
        self.core = Core()
        self.alive = True
        self.words = 0
        self.most = 0
        self._inbox: list[_Call] = []
        self._running: list[_Call] = []
        self._orphaned = 0
        self._runs: asyncio.Task[None] | None = None
        self.office = LeaseOffice(cluster.lives, self._orphan)

    async def embed(self, router: str, queries: int) -> float:
        """Seconds of the run that its queries were in."""
        if not self.alive:
            raise ReplicaLost(f"replica {self.name} has gone")
        call = _Call(router, queries, asyncio.get_running_loop().create_future())
        self._inbox.append(call)
        self.most = max(self.most, self.in_flight)
        if self._runs is None:
            self._runs = asyncio.get_running_loop().create_task(self._run_inbox())
        return await call.answer

    @property
    def in_flight(self) -> int:
        return sum(call.queries for call in self._inbox) + sum(call.queries for call in self._running)

    def die(self) -> None:
        self.alive = False
        for call in [*self._inbox, *self._running]:
            if not call.answer.done():
                call.answer.set_exception(ReplicaLost(f"replica {self.name} died"))

    async def _run_inbox(self) -> None:
        while self._inbox:
            calls, self._inbox = self._inbox, []
            self._running = calls
            run_s = self.device.alpha_s * sum(call.queries for call in calls) + self.device.beta_s
            await asyncio.sleep(run_s)
            self._running = []
            orphaned, self._orphaned = self._orphaned, 0
            self.office.end_lingering(orphaned)
            for call in calls:
                if not call.answer.done():
                    call.answer.set_result(run_s)
        self._runs = None

    def _orphan(self, router: str) -> int:
        """As `Embedder`: what waits is dropped, what runs runs on."""
        self._inbox = [call for call in self._inbox if call.router != router]
        left = sum(call.queries for call in self._running if call.router == router)
        self._orphaned += left
        return left


class Router:
    """What `Router` and `Pool` do on the way of a query."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.alive = True
        self.core = Core()
        self.words = 0
        shape = cluster.shape
        self._query_s = shape.costs.query_s + shape.costs.query_each_s * shape.replicas
        self._call_s = shape.costs.call_s + shape.costs.call_each_s * shape.replicas
        self.queue = QueueManager(list(shape.devices), self._on_release, self._on_low)
        self.tenancies: dict[str, Tenancy] = {}
        self.batchers: dict[str, Batcher] = {}
        self.shortage = Shortage(self.queue, self.tenancies)
        self._shares = False
        for pool, device in shape.devices.items():
            self._open(pool, device)

    def _open(self, pool: str, device: Device) -> None:
        batcher = Batcher(
            pool, self._send, lambda *_: None, lambda: self.queue.is_full(pool),
            depth=device.depth, pacing=Pacing.from_beta(device.beta_s), clock=asyncio.get_running_loop().time,
        )  # fmt: skip
        holdings = Holdings(batcher.out, lambda: self.queue.in_flight(pool), lambda: batcher.waiting)
        batcher.places = holdings.at
        self.batchers[pool] = batcher
        self.tenancies[pool] = Tenancy(
            pool, self.name, self.name, self._call, self.queue, holdings,
            lambda: self._on_change(pool), lambda _: None,
        )  # fmt: skip
        self.queue.set_depth(pool, device.depth)
        self.tenancies[pool].set_depth(device.depth)

    async def start(self) -> None:
        for pool, replicas in self.cluster.pools.items():
            await asyncio.gather(*(self.tenancies[pool].join(replica.name) for replica in replicas))
            self._follow(pool)

    def forget(self, replica: Replica) -> None:
        """Serve says that it is dead."""
        self.tenancies[replica.pool].drop(replica.name)
        self._follow(replica.pool)
        self.batchers[replica.pool].give_up(replica.name, ReplicaLost(f"replica {replica.name} died"))

    def _follow(self, pool: str) -> None:
        live = [replica.name for replica in self.cluster.pools[pool] if replica.alive]
        self.queue.set_replicas(pool, len(live))
        self.batchers[pool].set_replicas(live, lambda name: ReplicaLost(f"replica {name} has gone"))
        self.tenancies[pool].update()

    def die(self) -> None:
        """In mid-sentence: nothing more is heard of it."""
        self.alive = False
        for tenancy in self.tenancies.values():
            for replica in list(tenancy.holdings.replicas):
                tenancy.drop(replica)

    async def query(self) -> str | None:
        """The pool that answered; None: told busy."""
        for _ in range(2):
            if not self.queue.free and not (self.queue.has_more() and self.shortage.waiting < self.queue.capacity):
                await asyncio.sleep(self.core.done_in(self.cluster.shape.costs.refusal_s))
                return None
            await asyncio.sleep(self.core.done_in(self._query_s))
            permits = self.queue.admit()
            if isinstance(permits, Short):
                permits = await self.shortage.decide(1)
            if isinstance(permits, Full):
                return None
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self.batchers[permits[0].pool].submit([Job(_IDS, permits[0], answer)])
            try:
                return (await answer).pool
            except ReplicaLost:
                continue
        return None

    async def _send(  # what a batch holds and is called means nothing to a formula
        self,
        replica: str,
        batch_id: str,  # noqa: ARG002
        queries: Sequence[npt.NDArray[np.int32]],
        each_token: bool,  # noqa: ARG002
    ) -> Reply:
        await asyncio.sleep(self.cluster.delay_s())
        seconds = await self.cluster.replicas[replica].embed(self.name, len(queries))
        await asyncio.sleep(self.cluster.delay_s())
        if not self.alive:
            await asyncio.get_running_loop().create_future()
        return _VECTORS[: len(queries)], _NORMS[: len(queries)], seconds

    async def _call(self, replica: str, what: str, *words: Any) -> Any:
        cluster, owner = self.cluster, self.cluster.replicas[replica]
        self.words += 1
        await asyncio.sleep(self.core.done_in(self._call_s) + cluster.delay_s())
        if not owner.alive:
            return None
        owner.words += 1
        await asyncio.sleep(owner.core.done_in(cluster.answer_s))
        answer = await owner.office.calls[what](*words)
        await asyncio.sleep(cluster.delay_s())
        if not self.alive:
            await asyncio.get_running_loop().create_future()
        return answer

    def _on_low(self, pool: str) -> None:
        self.tenancies[pool].ask_ahead()

    def _on_release(self) -> None:
        if self._shares:
            self.shortage.serve()
            for tenancy in self.tenancies.values():
                tenancy.released()

    def _on_change(self, pool: str) -> None:
        self._shares = any(tenancy.holdings.shared for tenancy in self.tenancies.values())
        self.batchers[pool].look_again()
        self._on_release()


@dataclass(slots=True)
class _Proxy:
    """A node's: least connections, in turn among those that have as few."""

    open_: list[int]
    turn: int = 0

    def pick(self, live: Sequence[bool]) -> int:
        count = len(self.open_)
        self.turn += 1
        order = ((self.turn + step) % count for step in range(count))
        return min((index for index in order if live[index]), key=self.open_.__getitem__)


@dataclass(slots=True)
class Seen:
    """What clients saw of the queries that came in a time; seconds."""

    latencies_s: list[float] = field(default_factory=list)
    by_pool: dict[str, int] = field(default_factory=dict)
    busy: int = 0
    lost: int = 0


class Cluster:
    """Use within `virtual_time.run`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.random = random.Random(shape.seed)  # noqa: S311 - a simulation
        self.pools = {
            pool: [Replica(self, f"{pool}-{node}", pool) for node in range(shape.nodes)] for pool in shape.devices
        }
        self.replicas = {replica.name: replica for replicas in self.pools.values() for replica in replicas}
        self.routers: list[Router] = []
        self.proxies: list[_Proxy] = []
        self.detection_s = 0.0  # until Ray knows that a process has died
        self.answer_s = 0.0  # an office's for a word
        self._died_at: dict[str, float] = {}
        self.most_in_flight: dict[str, int] = dict.fromkeys(shape.devices, 0)

    def delay_s(self) -> float:
        return self.random.uniform(*self.shape.delay_s)

    async def lives(self, actor: str) -> bool:
        await asyncio.sleep(self.delay_s())
        router = self.routers[int(actor)]
        return router.alive or asyncio.get_running_loop().time() < self._died_at[actor] + self.detection_s

    async def start(self) -> None:
        """All Routers one after the other, each at all replicas. Starting up costs no core: it is not what is asked."""
        self.routers = [Router(self, str(number)) for number in range(self.shape.routers)]
        for router in self.routers:
            await router.start()
        self.proxies = [_Proxy([0] * len(self.routers), node) for node in range(self.shape.nodes)]
        await asyncio.sleep(_SETTLING_S)
        self.answer_s = self.shape.costs.answer_s + self.shape.costs.answer_each_s * self.shape.routers

    async def serve(self, queries_s: float, seconds: float, seen: Callable[[], Seen], at_end: Callable[[], T]) -> T:
        """Poisson arrivals at all nodes together; each is counted in what `seen` gives when it comes. Returns what
        `at_end` gives after the last arrival, once all are answered.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        tasks: set[asyncio.Task[None]] = set()
        while loop.time() < ends:
            await asyncio.sleep(self.random.expovariate(queries_s))
            task = loop.create_task(self._query(seen()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        ended = at_end()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_ANSWER_S)
        return ended

    async def _query(self, seen: Seen) -> None:
        loop = asyncio.get_running_loop()
        came = loop.time()
        proxy = self.proxies[self.random.randrange(len(self.proxies))]
        number = proxy.pick([router.alive for router in self.routers])
        proxy.open_[number] += 1
        try:
            pool = await self.routers[number].query()
        finally:
            proxy.open_[number] -= 1
        if pool is None:
            seen.busy += 1
        else:
            seen.latencies_s.append(loop.time() - came)
            seen.by_pool[pool] = seen.by_pool.get(pool, 0) + 1

    async def stop(self) -> None:
        """Nothing is open any more."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill_router(self, number: int) -> None:
        self._died_at[str(number)] = asyncio.get_running_loop().time()
        self.routers[number].die()

    def in_flight(self, pool: str) -> int:
        return sum(router.queue.in_flight(pool) for router in self.routers if router.alive)

    def held_by(self, router: str) -> int:
        """Places that the offices count as this Router's."""
        return sum(replica.office.leases.held(router) for replica in self.replicas.values())

    async def watch(self, every_s: float) -> None:
        """The bound, looked at again and again: at the Routers and at the engines."""
        while True:
            for pool, device in self.shape.devices.items():
                self.most_in_flight[pool] = max(self.most_in_flight[pool], self.in_flight(pool))
                assert self.most_in_flight[pool] <= device.depth * self.shape.nodes, pool
            await asyncio.sleep(every_s)

    def check(self) -> None:
        for replica in self.replicas.values():
            assert replica.most <= replica.device.depth, (replica.name, replica.most)
            sole = any(replica.office.leases.is_sole(router.name) for router in self.routers)
            assert sole or replica.office.leases.most_held <= replica.device.depth, replica.name
