"""One application in virtual time: N nodes with a replica of each pool, Routers, and clients.

Decisions are made by the real code: `Router` places (with `Pool`, `Link` and `View`), `RunLoop` and `Scheduler` admit
and run. The rest is simulated: devices (`device`), the processes' cores and the network (`wire`); a text of 4 n
characters has n tokens. Each node's proxy sends a query to the Router with the fewest of its queries, as HAProxy does.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from benchmarks.simulation.arrivals import Arrival
from benchmarks.simulation.device import Device, Engine
from benchmarks.simulation.wire import FREE, Core, Costs, Line, MemoryChannel
from deployments.admission.predictor import LinePredictor
from deployments.embedding.frames import Report
from deployments.embedding.link import Link, PendingOffer
from deployments.embedding.pool import Pool
from deployments.embedding.request import Request
from deployments.embedding.router import Router
from deployments.embedding.run import OfferedQuery
from deployments.embedding.run_loop import RunLoop
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy
from deployments.errors import Busy, WindveError
from deployments.hardware.device_detector import Topology
from deployments.models.encoder import Encoder
from deployments.models.model_files import ModelCard
from deployments.models.outputs import Numbers, Output
from deployments.models.tokenizer import TokenIds
from deployments.models.tokenizing import Tokenizing
from deployments.serving.frames import WIRE
from deployments.serving.metrics import Instruments
from deployments.serving.router import RouterContext
from deployments.settings import RequestLimits, Settings

_MAX_TOKENS = 512
_TOKEN = "abcd"
_START_S = 0.1  # until all Routers have reports of all replicas


@dataclass(frozen=True, slots=True)
class Shape:
    """`nodes`, each with one replica of each of `devices`, and `routers`. `delay_s`: (min, max) of a message. `depths`:
    by pool, for admission by depth.
    """

    nodes: int
    routers: int
    devices: Mapping[str, Device]
    slo_s: float
    costs: Costs = FREE
    delay_s: tuple[float, float] = (0.0, 0.0)
    depths: Mapping[str, int] | None = None
    seed: int = 0


class Ended(NamedTuple):
    """How a query ended. `pool` is None if it was not answered."""

    at: float
    tokens: int
    allowed_s: float
    took_s: float
    pool: str | None
    retry_after_s: float = 0.0

    @property
    def in_time(self) -> bool:
        return self.pool is not None and self.took_s <= self.allowed_s + 1e-9


class Replica:
    """One device with its queue, closed until a Router sends its policy."""

    def __init__(
        self,
        name: str,
        device: Device,
        *,
        pool: str = "",
        node: str = "n",
        slo_s: float = 1.0,
        seed: int = 0,
        predictor: LinePredictor | None = None,
    ) -> None:
        self.name, self.pool, self.node = name, pool, node
        self.engine, self.core = Engine(device, seed=seed), Core()
        schedule = Scheduler[OfferedQuery](device.model, Policy(slo_s, depth=0), device.micro_batch_tokens, predictor)
        self.runner = RunLoop(schedule, self.engine.compute, clock=asyncio.get_running_loop().time)
        self.alive = True
        self.channels: list[MemoryChannel] = []

    def reset(self) -> None:
        """Break the connections; the process stays alive."""
        for channel in self.channels:
            channel.breaks()

    def die(self) -> None:
        self.alive = False
        self.reset()
        self.engine.cancel()


class Cluster:
    """Replicas, with in-memory connections. `delay_s`: see `Shape`."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        costs: Costs = FREE,
        delay_s: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
    ) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.draw = random.Random(seed)
        self._costs, self._delay_s = costs, delay_s

    def members(self, pool: str) -> dict[str, dict[str, Any]]:
        """The live replicas of a pool, in the form in which Serve reports them to Routers."""
        return {
            name: {"node": replica.node, "wire": WIRE, "channel": {"host": name, "port": 1, "secret": ""}}
            for name, replica in self.replicas.items()
            if replica.pool == pool and replica.alive
        }

    def connect(
        self,
        core: Core,
        replica: Replica,
        on_report: Callable[[Report], None],
        on_lost: Callable[[list[PendingOffer]], None],
    ) -> MemoryChannel:
        """Raises ConnectionRefusedError. `core`: the Router's."""
        if not replica.alive:
            raise ConnectionRefusedError
        lines = Line(core, replica.core, self._delay_s, self.draw), Line(replica.core, core, self._delay_s, self.draw)
        channel = MemoryChannel(lines, core, replica.runner, self._costs, on_report, on_lost)
        replica.channels.append(channel)
        return channel


class SimulatedRouter(Router):
    """The Router without Serve. `counts`: replicas by pool."""

    def __init__(
        self,
        cluster: Cluster,
        counts: Mapping[str, int],
        context: RouterContext[ModelCard, Encoder],
        settings: Settings,
    ) -> None:
        topology = Topology(tuple(counts), dict(counts), len(counts) > 1, "simulated")
        super().__init__(settings, topology, dict.fromkeys(counts, ("", cast("Any", None))), context)
        self.cluster = cluster
        self.core = Core()
        self.open: set[asyncio.Task[None]] = set()
        self._placer.draw = cluster.draw.random

    def _pool(self, name: str) -> Pool:
        pool = _Pool(
            name, deployment="", handle=None, router=self.replica, node=self._node, on_change=self._replicas_changed
        )
        pool.cluster, pool.core = self.cluster, self.core
        return pool

    @property
    def known(self) -> int:
        """How many replicas it has connections to."""
        return sum(len(pool.live) for pool in self.pools.values())

    @property
    def links(self) -> Iterable[Link]:
        return (link for pool in self.pools.values() for link in pool.links.values())


class _Pool(Pool):
    """A pool whose replicas are the cluster's."""

    cluster: Cluster
    core: Core

    def connect(self) -> None:
        self.follow(self.cluster.members(self.name), None)

    async def open_channel(self, address: tuple[str, int], secret: str, *events: Any) -> MemoryChannel:
        return self.cluster.connect(self.core, self.cluster.replicas[address[0]], *events)


class Application(Cluster):
    """Use within `virtual_time.run`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        places = [(pool, device, node) for node in range(shape.nodes) for pool, device in shape.devices.items()]
        replicas = [
            Replica(f"{pool} {node}", device, pool=pool, node=str(node), slo_s=shape.slo_s, seed=shape.seed + index)
            for index, (pool, device, node) in enumerate(places)
        ]
        super().__init__(replicas, shape.costs, shape.delay_s, shape.seed)
        self.routers = [self._router(number) for number in range(shape.routers)]
        self._outstanding = [[0] * shape.routers for _ in range(shape.nodes)]  # at each proxy, by Router
        self._alive = list(range(shape.routers))
        self.ended: list[Ended] = []

    def _router(self, number: int) -> SimulatedRouter:
        """A Router without model files and tokenizer."""
        card = SimpleNamespace(
            kinds=("embedding",), token_widths={}, outputs_for=lambda _: ("text",), name="none", max_tokens=_MAX_TOKENS
        )
        context = RouterContext(
            f"router {number}",
            str(number % self.shape.nodes),
            cast("Instruments", NoInstruments()),
            cast("ModelCard", card),
            cast("Encoder", _Encoder()),
        )
        counts = dict.fromkeys(self.shape.devices, self.shape.nodes)
        return SimulatedRouter(
            self, counts, context, cast("Settings", SimpleNamespace(limits=RequestLimits(), cpu_overflow=True))
        )

    async def start(self) -> None:
        shape = self.shape
        config: dict[str, Any] = {"slo_s": shape.slo_s, "admission": "depth" if shape.depths else "deadline"}
        for pool, device in shape.devices.items():
            config[pool] = {"alpha_s": device.alpha_s, "beta_s": device.beta_s}
            if shape.depths:
                config[pool]["queue_depth"] = shape.depths[pool]
        for router in self.routers:
            await router.reconfigure(config)
        await asyncio.sleep(_START_S)
        while not all(router.known == len(self.replicas) for router in self.routers):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(_START_S)

    async def serve(self, arrivals: Iterable[Arrival]) -> None:
        """Serve all arrivals; the outcomes are in `ended`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks: set[asyncio.Task[None]] = set()
        for arrival in arrivals:
            wait_s = began + arrival.at - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            node = self.draw.randrange(self.shape.nodes)
            task = loop.create_task(self._client(node, arrival))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.wait(tasks)

    async def _client(self, node: int, arrival: Arrival) -> None:
        if (ended := await self._query(node, arrival)) is not None:
            self.ended.append(ended)

    async def _query(self, node: int, arrival: Arrival) -> Ended | None:
        """The outcome of a query; None if its Router died."""
        outstanding = self._outstanding[node]
        number = min(self._alive, key=outstanding.__getitem__)
        outstanding[number] += 1
        router = self.routers[number]
        task = asyncio.current_task()
        assert task is not None
        router.open.add(task)
        try:
            return await self._embed(router, arrival)
        except asyncio.CancelledError:
            if number in self._alive:
                raise
            return None
        finally:
            outstanding[number] -= 1
            router.open.discard(task)

    async def _embed(self, router: SimulatedRouter, arrival: Arrival) -> Ended:
        loop, costs = asyncio.get_running_loop(), self.shape.costs
        came = loop.time()
        await self._work(router.core, costs.refusal_s / 2 + costs.place_s)
        pool, retry_s = None, 0.0
        try:
            answer = await router.embed(Request([_text(arrival)], timeout_s=arrival.allowed_s))
            pool = answer.pools[0]
        except WindveError as error:
            retry_s = error.retry_after_s if isinstance(error, Busy) else 0.0
            await self._work(router.core, costs.refusal_s / 2)
        allowed_s = arrival.allowed_s or self.shape.slo_s
        return Ended(came, arrival.tokens, allowed_s, loop.time() - came, pool, retry_s)

    async def _work(self, core: Core, seconds: float) -> None:
        if seconds > 0:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(core.done_at(now, seconds) - now)

    def holds(self, number: int) -> bool:
        """Whether a replica still has waiting queries of this Router."""
        name = self.routers[number].replica
        return any(
            session.name == name for replica in self.replicas.values() for session in replica.runner._sessions.values()
        )

    def kill_router(self, number: int) -> int:
        """End a Router's process and its connections. Returns how many queries were open there."""
        self._alive.remove(number)
        router = self.routers[number]
        lost = len(router.open)
        for link in list(router.links):
            link.end()
        for task in list(router.open):
            task.cancel()
        return lost


class _Encoder:
    """Encodes a query of n tokens as n times `_TOKEN`."""

    tokenizing = Tokenizing()

    def prompt(self, _: str | None) -> str:
        return ""

    async def encode(self, queries: Sequence[str], _: str, **_how: Any) -> tuple[list[TokenIds], float]:
        return [_ids(len(query) // len(_TOKEN)) for query in queries], 0.0

    def rows(self, numbers: Numbers, _: TokenIds, **_how: Any) -> dict[Output, Numbers]:
        return {"text": numbers}


class NoInstruments:
    """Replaces `ray.serve.metrics`, and each of its instruments."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: self


@functools.cache
def _ids(tokens: int) -> TokenIds:
    return np.zeros(tokens, np.int32)


def _text(arrival: Arrival) -> str:
    """A text of so many tokens that tells its client apart."""
    size = len(_TOKEN) * arrival.tokens
    return f"{arrival.at:<{size}.9f}"[:size]
