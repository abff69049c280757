"""One application in virtual time: N nodes with a replica of each pool, Routers, and clients.

What decides is the product's own code: `Router` places (over `Pool`, `Link` and `View`), `Runner` and `Schedule` admit
and run. What is modelled: devices (`device`), the processes' cores and the network (`wire`), and that a text of 4 n
characters has n tokens. Each node's proxy sends a query to the Router on which it has the fewest, as HAProxy does.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from deployments.errors import Busy, WindveError
from deployments.hardware.device_detector import Topology
from deployments.metrics import Instruments
from deployments.models.encoder import Encoder
from deployments.models.model_files import ModelCard
from deployments.models.outputs import Numbers, Output
from deployments.models.tokenising import Tokenising
from deployments.models.tokenizer import TokenIds
from deployments.placement.link import Link
from deployments.placement.pool import Pool
from deployments.placement.request import Wanted
from deployments.queueing.schedule import Policy, Schedule
from deployments.router import Host, Router
from deployments.runner import Runner
from deployments.settings import Settings
from deployments.transport.channel import PendingOffer
from deployments.transport.frames import Report
from tests.kit.simulation.arrivals import Arrival
from tests.kit.simulation.device import Device, Engine
from tests.kit.simulation.wire import Core, Line, MemoryChannel

_MAX_TOKENS = 512
_TOKEN = "abcd"
_START_S = 0.1  # until all Routers have heard all replicas


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a core. A frame takes `frame_s` and `item_s` for each query or answer in it, at either end."""

    query_s: float = 0.0  # a Router's, for a query that is answered, but for the frames
    refusal_s: float = 0.0  # a Router's, for one that is told busy
    place_s: float = 0.0  # a Router's, for choosing replicas
    frame_s: float = 0.0
    item_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """`nodes` with one replica of each of `devices`, and `routers`. `delay_s`: (least, most) of a message; `depths`:
    by pool, for admission by depth.
    """

    nodes: int
    routers: int
    devices: Mapping[str, Device]
    slo_s: float
    costs: Costs = Costs()
    delay_s: tuple[float, float] = (0.0, 0.0)
    depths: Mapping[str, int] | None = None
    seed: int = 0


class Ended(NamedTuple):
    """How a query ended: `pool` is None where it was not answered."""

    at: float
    tokens: int
    allowed_s: float
    took_s: float
    pool: str | None
    retry_after_s: float = 0.0

    @property
    def in_time(self) -> bool:
        return self.pool is not None and self.took_s <= self.allowed_s + 1e-9


@dataclass(slots=True, eq=False)
class Replica:
    """One device with its queue."""

    name: str
    pool: str
    node: str
    runner: Runner
    engine: Engine
    core: Core = field(default_factory=Core)


class SimulatedRouter(Router):
    """The Router without Ray, files and tokenizer."""

    def __init__(self, application: Application, name: str, node: str) -> None:
        shape = application.shape
        pools = tuple(shape.devices)
        topology = Topology(pools, dict.fromkeys(pools, shape.nodes), len(pools) > 1, "simulated")
        card = SimpleNamespace(
            kinds=("embedding",), token_widths={}, outputs_for=lambda _: ("text",), name="none", max_tokens=_MAX_TOKENS
        )
        host = Host(
            name, node, cast("Instruments", _Instruments()), cast("ModelCard", card), cast("Encoder", _Encoder())
        )
        super().__init__(
            cast("Settings", SimpleNamespace()), topology, dict.fromkeys(pools, ("", cast("Any", None))), host
        )
        self.application = application
        self.core = Core()
        self.open: set[asyncio.Task[None]] = set()

    def _pool(self, name: str) -> Pool:
        return _Pool(
            name, deployment="", handle=None, router=self.replica, node=self._node, on_change=self._bulk.look_again
        ).of(self)

    @property
    def known(self) -> int:
        """Replicas that it has connections to."""
        return sum(len(pool.live) for pool in self.pools.values())

    @property
    def links(self) -> Iterable[Link]:
        return (link for pool in self.pools.values() for link in pool.links.values())


class _Pool(Pool):
    """Its replicas are the application's."""

    router: SimulatedRouter

    def of(self, router: SimulatedRouter) -> _Pool:
        self.router = router
        self.open_channel = self._open_channel  # type: ignore[assignment]
        return self

    def connect(self) -> None:
        replicas = self.router.application.replicas
        members = {
            name: {"node": replica.node, "channel": {"host": name, "port": 0, "secret": ""}}
            for name, replica in replicas.items()
            if replica.pool == self.name
        }
        self.follow(members, None)

    async def _open_channel(
        self,
        address: tuple[str, int],
        _secret: str,
        on_report: Callable[[Report], None],
        on_lost: Callable[[list[PendingOffer]], None],
    ) -> MemoryChannel:
        application = self.router.application
        replica = application.replicas[address[0]]
        return application.connect(self.router.core, replica, on_report, on_lost)


class Application:
    """Use within `virtual_time.run`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._draw = random.Random(shape.seed)
        self.replicas: dict[str, Replica] = {}
        for number in range(shape.nodes):
            for pool, device in shape.devices.items():
                engine = Engine(device, seed=shape.seed + len(self.replicas))
                schedule = Schedule(device.model, Policy(shape.slo_s, depth=0), device.pass_tokens)
                name = f"{pool} {number}"
                runner = Runner(schedule, engine.compute, clock=asyncio.get_running_loop().time)
                self.replicas[name] = Replica(name, pool, str(number), runner, engine)
        self.routers = [SimulatedRouter(self, f"router {n}", str(n % shape.nodes)) for n in range(shape.routers)]
        self._outstanding = [[0] * shape.routers for _ in range(shape.nodes)]  # at each node's proxy, of each Router
        self._alive = list(range(shape.routers))
        self.ended: list[Ended] = []
        self.returned: list[Ended] = []

    async def start(self) -> None:
        shape = self.shape
        config: dict[str, Any] = {"slo_s": shape.slo_s, "admission": "depth" if shape.depths else "finish"}
        for pool, device in shape.devices.items():
            config[pool] = {"alpha_s": device.alpha_s, "beta_s": device.beta_s}
            if shape.depths:
                config[pool]["queue_depth"] = shape.depths[pool]
        for router in self.routers:
            await router.reconfigure(config)
        await asyncio.sleep(_START_S)
        while not all(router.known == len(self.replicas) for router in self.routers):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(_START_S)

    def connect(
        self,
        core: Core,
        replica: Replica,
        on_report: Callable[[Report], None],
        on_lost: Callable[[list[PendingOffer]], None],
    ) -> MemoryChannel:
        lines = (
            Line(core, replica.core, self.shape.delay_s, self._draw),
            Line(replica.core, core, self.shape.delay_s, self._draw),
        )
        runner = replica.runner
        return MemoryChannel(
            lines=lines,
            receive=runner.receive,
            gone=runner.gone,
            frame_s=self._frame_s,
            core=core,
            answer_s=self._answer_s,
            on_report=on_report,
            on_lost=on_lost,
        )

    def _frame_s(self, items: int) -> float:
        return self.shape.costs.frame_s + items * self.shape.costs.item_s

    @property
    def _answer_s(self) -> float:
        costs = self.shape.costs
        return costs.query_s - costs.refusal_s / 2

    async def serve(self, arrivals: Iterable[Arrival], *, returns: float = 0.0) -> None:
        """Until all have ended; they are kept in `ended`. Of those told busy the share `returns` comes back once, when
        Retry-After says: how that ends is kept in `returned`.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks: set[asyncio.Task[None]] = set()
        for arrival in arrivals:
            wait_s = began + arrival.at - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            node = self._draw.randrange(self.shape.nodes)
            honours = returns > 0 and self._draw.random() < returns
            task = loop.create_task(self._client(node, arrival, honours=honours))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.wait(tasks)

    async def _client(self, node: int, arrival: Arrival, *, honours: bool) -> None:
        ended = await self._query(node, arrival)
        if ended is None:
            return
        self.ended.append(ended)
        if honours and ended.pool is None:
            await asyncio.sleep(ended.retry_after_s)
            again = await self._query(node, arrival)
            if again is not None:
                self.returned.append(again)

    async def _query(self, node: int, arrival: Arrival) -> Ended | None:
        """None where the Router died."""
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
            answer = await router.embed([_text(arrival.tokens)], _wanted(arrival.allowed_s))
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
        """A replica still has queries of that Router waiting."""
        name = self.routers[number].replica
        return any(
            session.name == name for replica in self.replicas.values() for session in replica.runner._sessions.values()
        )

    def kill_router(self, number: int) -> int:
        """Its process ends, and with it its connections. Returns how many queries were open there."""
        self._alive.remove(number)
        router = self.routers[number]
        lost = len(router.open)
        for link in list(router.links):
            link.end()
        for task in list(router.open):
            task.cancel()
        return lost


class _Encoder:
    """A query of so many tokens is so many times `_TOKEN`."""

    tokenising = Tokenising()

    def prompt(self, _: str | None) -> str:
        return ""

    async def encode(self, queries: Sequence[str], _: str, **_how: Any) -> list[TokenIds]:
        return [_ids(len(query) // len(_TOKEN)) for query in queries]

    def rows(self, numbers: Numbers, _: TokenIds, **_how: Any) -> dict[Output, Numbers]:
        return {"text": numbers}


class _Instruments:
    """In place of `ray.serve.metrics`."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: self

    def inc(self, *_: Any) -> None: ...

    def set(self, *_: Any) -> None: ...

    def observe(self, *_: Any) -> None: ...


@functools.cache
def _ids(tokens: int) -> TokenIds:
    return np.zeros(tokens, np.int32)


@functools.cache
def _text(tokens: int) -> str:
    return _TOKEN * tokens


@functools.cache
def _wanted(allowed_s: float | None) -> Wanted:
    return Wanted(timeout_s=allowed_s)
