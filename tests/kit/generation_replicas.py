"""Replicas that generate, composed as in `Generator`, over emulated devices in virtual time, with connections in
memory.
"""

import asyncio

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.simulation.application import NoInstruments
from deployments.generation.engine.emulated_steps import EmulatedSteps, following
from deployments.generation.frames import GenerationOffers
from deployments.generation.router import GenerationRouter
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.work import load_of
from deployments.generation.settings import GenerationSettings
from deployments.generation.step_loop import StepLoop
from deployments.hardware.device_detector import Topology
from deployments.serving.connections import RouterConnection, Server
from deployments.serving.frames import HEAD, WIRE
from deployments.serving.router import RouterContext

VOCABULARY = 300
EMULATED = {"engine": "emulated", "emulated": {"beta_s": 0.002}}
ARGS = {"model": {"id": "here"}, "accelerator": EMULATED, "cpu": EMULATED}
WORDS = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))


class Card:
    """The part of `GenerationCard` that a Router reads."""

    name, context = "emulated", 4096

    def __init__(self, end_tokens=()):
        self.end_tokens = end_tokens


def answer_to(ids, most_tokens, ends=(), vocabulary=VOCABULARY):
    """The tokens that emulated devices generate after these, up to the first one in `ends`."""
    ids = list(ids)
    length = len(ids)
    while len(ids) < length + most_tokens and not (len(ids) > length and ids[-1] in ends):
        ids.append(following(ids, vocabulary))
    return ids[length:]


class Wire:
    """One end of a connection. `chance`: random source that cuts data into pieces and delays them; None: data arrives
    at once, whole. `deaf`: it receives nothing any more.
    """

    def __init__(self, protocol, chance=None):
        self.protocol, self.peer, self.closing, self.deaf = protocol, None, False, False
        self._chance, self._last = chance, 0.0

    def writelines(self, parts):
        data = b"".join(parts)
        while data and not self.closing:
            size = len(data) if self._chance is None else self._chance.choice([1, 7, 300, len(data), len(data)])
            self._later(self.peer._hear, data[:size])
            data = data[size:]

    def _later(self, what, *args):
        loop = asyncio.get_running_loop()
        late_s = 0.0 if self._chance is None else self._chance.choice([0.0, 1e-6, 1e-3])
        self._last = max(self._last + 1e-9, loop.time() + late_s)  # arrival times differ, so that the order is kept
        loop.call_at(self._last, what, *args)

    def _hear(self, data):
        if not (self.closing or self.deaf):
            self.protocol.data_received(data)

    def is_closing(self):
        return self.closing

    def get_extra_info(self, _):
        return None

    def get_write_buffer_size(self):
        return 0

    def abort(self):
        self._end()
        if not self.deaf:
            self._later(self.peer._end)

    def _end(self):
        if not (self.closing or self.deaf):
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    close = abort


class Device:
    """Computes steps at once, then waits as long as they take, times `slow`. `problem`: error of the next step.
    `broken`: error of all steps. `bad`: a token that makes a step fail.
    """

    def __init__(self, model, blocks, host=None):
        hosts = {"host": host.time, "num_cpu_blocks": host.block_count} if host else {}
        self.steps = EmulatedSteps(model, blocks, VOCABULARY, sleep=self.take, clock=self.time, **hosts)
        self.model, self.took, self.works = model, 0.0, []  # `took`: seconds of this step
        self.problem, self.slow, self._task = None, 1.0, None
        self.broken, self.bad = None, -1

    def time(self):
        return asyncio.get_running_loop().time() + self.took

    def take(self, seconds):
        self.took += self.slow * seconds

    def step(self, work):
        """Replaces the engine's `steps`."""
        problem = self.problem or self.broken
        if problem is None and any(self.bad in chunk.ids for chunk in work.chunks):
            problem = RuntimeError("a bad prompt")
        if problem is not None:
            self.take(self.model.seconds(load_of(work.chunks)))
            raise problem
        return self.steps.step(work)

    def compute(self, work, ended):
        self.works.append(work)

        async def step(before):
            if before is not None:
                await before
            try:
                found = work.run(self)
            except (RuntimeError, ValueError) as error:
                found = error
            self.problem = None
            await asyncio.sleep(self.took)
            self.took = 0.0
            ended(found)

        self._task = asyncio.get_running_loop().create_task(step(self._task))


class Replica:
    """`hung`: it reads nothing. `flooded`: it reads offers, but never decides on any."""

    def __init__(self, name, model, policy=None, blocks=32, host=None, chance=None):
        self.name, self.chance, self.wires = name, chance, []
        self.device = Device(model, blocks, host)
        schedule = StepScheduler(model, policy or StepPolicy(1.0, 0.05), blocks, host=host)
        self.stepper = StepLoop(schedule, self.device.compute, clock=asyncio.get_running_loop().time)
        self.server = Server(name, self._receive, self.stepper.gone, GenerationOffers.decode)
        self.alive, self.hung, self.flooded = True, False, False

    def _receive(self, connection, offers):
        if self.flooded and offers.asks:
            self.stepper._sessions[connection].asks = True
            self.stepper.report_soon()
        elif not (self.hung or self.flooded):
            self.stepper.receive(connection, offers)

    @property
    def about(self):
        return {"node": "n", "wire": WIRE, "channel": {"host": self.name, "port": 1, "secret": self.server.secret}}

    def connect(self, channel):
        if not self.alive:
            raise ConnectionRefusedError
        here, there = Wire(RouterConnection(self.server), self.chance), Wire(channel, self.chance)
        here.peer, there.peer = there, here
        self.wires.append(there)
        channel.connection_made(there)
        here.protocol.connection_made(here)

    def die(self):
        self.alive = False
        for wire in self.wires:
            wire.peer.abort()
            wire.peer.deaf = True

    @property
    def is_free(self):
        """Whether no block is used or reserved, and nothing waits."""
        state, schedule = self.stepper.state(), self.stepper.schedule
        blocks = schedule.room._blocks
        return (
            (self.stepper.in_flight, state.rows, state.waiting) == (0, 0, 0)
            and state.free_blocks == blocks.free == blocks.count == len({*blocks._free, *blocks._kept})
            and schedule.room.reserved == schedule.room._reserved_bulk == 0
            and not any(session.admitted for session in self.stepper._sessions.values())
        )


def router_of(pools, args=ARGS, end_tokens=()):
    """A Router of these pools, the accelerator's first. It does not follow any replica yet."""
    topology = Topology(tuple(pools), dict.fromkeys(pools, 1), cpu_overflow=True, reason="a test")
    context = RouterContext("router", "n", NoInstruments(), Card(end_tokens), WORDS)
    return GenerationRouter(GenerationSettings.parse(args), topology, {name: (name, None) for name in pools}, context)


def reach_of(replicas, late_s=lambda: 0.0):
    """A replacement for `serving.connections.reach`. `replicas()`: all replicas. `late_s()`: seconds to reach one."""

    async def reach(make, address, secret):
        replica = next(one for one in replicas() if one.name == address[0])
        channel = make()
        replica.connect(channel)
        await asyncio.sleep(late_s())
        shown = secret.encode()
        channel.transport.writelines([HEAD.pack(HEAD.size + len(shown), 0), shown])
        return channel

    return reach
