"""Simulated devices that generate, with windve's `StepScheduler`, as events in virtual time. Pure.

A device's true times come from a table that its scheduler does not know. The scheduler has a fit to noisy steps.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.simulation.hybrid_device import HybridDevice, HybridStep, HybridWork, SubBatch
from deployments.admission.fair_share import Tenant
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import PARKING, Generation, Row, ScheduledChunk
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepLoad, StepTime
from deployments.generation.scheduler.work import UNTIMED, Copy

_COUNTS = (0, 1, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)  # row counts in the tables


class Arrival(NamedTuple):
    """A generation that arrives. `tokens`: the true lengths of its answers, which the scheduler does not know. `talk`:
    the conversation that it continues, if its earlier turns may be cached.
    """

    at: float
    prompt_tokens: int
    most_tokens: int
    tokens: tuple[int, ...] = (1,)
    bulk: bool = False
    tenant: Tenant | None = None
    talk: int | None = None

    @property
    def keys(self) -> list[bytes]:
        """For `Generation.keys`, also of what is not generated yet."""
        tokens = 0 if self.talk is None else self.prompt_tokens + max(self.tokens)
        return [b"%d %d" % (self.talk or 0, place) for place in range(tokens // BLOCK)]


class Times(Protocol):
    def seconds(self, load: StepLoad) -> float:
        """Seconds of a step."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """A device's true times: `linear_s` by rows and tokens in a step, interpolated linearly, plus seconds per token
    read from the cache and per pair of tokens in a prompt.
    """

    linear_s: tuple[tuple[float, float], ...]
    kv_token_s: float
    pair_s: float

    def seconds(self, load: StepLoad) -> float:
        counts, seconds = zip(*self.linear_s, strict=True)
        linear_s = float(np.interp(load.rows + load.prompt_tokens, counts, seconds))
        return linear_s + self.kv_token_s * load.kv_tokens + self.pair_s * load.pairs

    @classmethod
    def of_rates(
        cls, gb_s: float, tflops: float, *, layers: int = 32, width: int = 4096, kv_kb: float = 131
    ) -> StepTable:
        """The table of a model with 8 billion 2-byte weights on a device with this memory bandwidth and compute rate. A
        step takes the longer of reading and multiplying the weights, with a smooth transition.
        """
        weights = 8e9
        read_s = 2 * weights / (gb_s * 1e9)
        linear = tuple((n, (read_s**4 + (2 * weights * n / (tflops * 1e12)) ** 4) ** 0.25 + 0.001) for n in _COUNTS)
        return cls(linear, kv_kb / (gb_s * 1e6), 4 * width * layers / (tflops * 1e12))

    def fitted(self, noise: float, seed: int = 0) -> StepTime:
        """The step time that a warm-up would find, from steps with this relative noise."""
        draw = random.Random(seed)
        loads = [
            StepLoad(rows, rows * length).with_chunk(length if prompt else 0, prompt)
            for rows in (0, 1, 4, 16, 32, 64)
            for length in (64, 1024, 4096)
            for prompt in (0, 16, 64, 256, 512, 1024)
            if rows or prompt
        ]
        return StepTime.fit((load, self.seconds(load) * (1 + draw.gauss(0, noise))) for load in loads)


class Certain(Learning):
    """Learning for a device that always takes the predicted time."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.margin = 0.0

    def worked(self, *_: Any, **__: Any) -> None: ...

    def answered(self, *_: Any, **__: Any) -> None: ...


@dataclass(slots=True, eq=False)
class StepDevice:
    """A running device. `noise`: relative noise of a step's time. `slow`: factor on a step's time, by the clock.
    `hybrid`: its stages, if its host holds part of the cache; `times` are not used then.
    """

    name: str
    times: Times
    schedule: StepScheduler
    noise: float = 0.0
    slow: Callable[[float], float] = lambda _: 1.0
    seed: int = 0
    hybrid: HybridDevice | None = None
    step: list[ScheduledChunk] = field(default_factory=list)
    runs: bool = False
    began: float = 0.0
    work: HybridWork = field(default_factory=HybridWork)  # the running or last step's
    came: HybridStep = field(default_factory=lambda: HybridStep(0.0, (), UNTIMED))  # of it
    mode: str = ""  # its mode
    parked: Mapping[int, Row] = field(default_factory=dict)  # rows that may get their token in it, by number
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def start(self, now: float) -> bool:
        """Begin a step if there is work."""
        self.step, self.began = self.schedule.next_step(now), now
        copies = self.schedule.copies()
        self.runs, self.mode = bool(self.step) or self.schedule.joins, self.schedule.mode
        if self.runs:
            self.work = self._work(copies)
            self._begin(copies)
        return self.runs

    def ends(self) -> float:
        """When the running step ends. Waits for it if a device really computes."""
        self.came = self._run()
        return self.began + self.came.seconds

    def _work(self, copies: Sequence[Copy]) -> HybridWork:
        """The work of the step."""
        self.parked = dict(self.schedule.parked)
        parking, batches = [], [SubBatch(), SubBatch()]
        for row, start, tokens, _, batch in self.step:
            if row.parked is not None:
                parking.append((row.parked, start + 1))
            else:
                batches[batch] = batches[batch].with_piece(start, tokens, on_host=row.generation.on_host)
        copied = BLOCK * sum(copy.from_host != copy.to_host for copy in copies)
        return HybridWork(batches[0], batches[1], parking, self.schedule.called_off(), self.schedule.joins, copied)

    def _begin(self, copies: Sequence[Copy]) -> None:
        """Does nothing in virtual time. A device that really computes overrides it."""

    def _run(self) -> HybridStep:
        slow = self.slow(self.began) * max(0.5, 1 + self._draw.gauss(0, self.noise))
        if self.hybrid is None:
            return HybridStep(slow * self.times.seconds(self.schedule.load), (), UNTIMED)
        return self.hybrid.step(self.began, self.work, slow)

    def picked(self) -> list[Row]:
        """The rows that got a token in the step that ended; for a completed prompt, its first row."""
        rows = [part.row for part in self.step if part.wanted and part.batch != PARKING]
        return rows + [self.parked[number] for number in self.came.arrived]

    def ended(self, now: float, finished: Sequence[Row]) -> None:
        """The step has ended."""
        self.step, self.runs = [], False
        _, arrived, compute_s = self.came
        self.schedule.ended(now, now - self.began, finished, arrived=arrived, compute_s=compute_s)


@dataclass(slots=True, eq=False, kw_only=True)
class Sent(Generation):
    """A generation and its outcome. `came_at`: time of its first token; None if refused. `last_at`: per answer."""

    arrival: Arrival
    device: str | None = None
    came_at: float | None = None
    last_at: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def late_first(self) -> bool:
        return self.came_at is not None and self.came_at > self.due + 1e-9

    @property
    def late_pace(self) -> bool:
        pace_s = self.pace_s
        if pace_s is None or self.came_at is None:
            return False
        return any(at - self.came_at > (self.counts[number] - 1) * pace_s + 1e-9 for number, at in self.last_at.items())

    @property
    def in_time(self) -> bool:
        return self.device is not None and not (self.late_first or self.late_pace)


@dataclass(slots=True)
class StepWorld:
    """Devices in the order of preference. A generation is offered to one after another."""

    devices: Sequence[StepDevice]
    policy: StepPolicy
    sent: list[Sent] = field(default_factory=list)
    now: float = 0.0
    tokens: int = 0  # so far
    _events: list[tuple[float, int, int]] = field(default_factory=list)

    def run(self, arrivals: Sequence[Arrival]) -> list[Sent]:
        """Run until everything has ended."""
        ordered = sorted(arrivals, key=lambda one: one.at)  # stable: simultaneous ones keep their order
        heap = self._events
        heap += [(one.at, 1, number) for number, one in enumerate(ordered)]
        heapq.heapify(heap)
        while heap:
            self.now, kind, number = heapq.heappop(heap)
            if kind == 1:
                self._arrives(ordered[number])
            else:
                self._ended(self.devices[number])
                self._start(number)
        return self.sent

    def saturated(self, backlog: Iterator[Arrival]) -> Iterator[None]:
        """Run steps forever. During each, offer the first device the next generations until it refuses one, which is
        offered again later.
        """
        device, waits = self.devices[0], next(backlog)
        while True:
            runs = device.start(self.now)
            while device.schedule.offer(self.now, sent := self._sent(waits)).admitted:
                sent.device = device.name
                self.sent.append(sent)
                waits = next(backlog)
            if runs:
                self.now = device.ends()
                self._ended(device)
                yield

    def queued(self, arrivals: Sequence[Arrival]) -> list[Sent]:
        """Run until everything has ended, on the first device. Who is refused waits at the door, first come, first
        served, and is offered again after each step. Raises ValueError if an idle device refuses one.
        """
        device, door = self.devices[0], deque(arrivals)
        while True:
            while door and door[0].at <= self.now:
                if not device.schedule.offer(self.now, sent := self._sent(door[0])).admitted:
                    break
                sent.device = device.name
                self.sent.append(sent)
                door.popleft()
            if device.start(self.now):
                self.now = device.ends()
                self._ended(device)
            elif not door:
                return self.sent
            elif door[0].at > self.now:
                self.now = door[0].at
            else:
                raise ValueError(f"an idle device refuses {door[0]}: give it a larger cache or a wider promise")

    def _sent(self, arrival: Arrival) -> Sent:
        policy = self.policy
        return Sent(
            arrival.prompt_tokens,
            arrival.most_tokens,
            self.now + policy.ttft_s,
            None if arrival.bulk else policy.tpot_s,
            len(arrival.tokens),
            arrival.bulk,
            arrival.tenant,
            keys=arrival.keys,
            arrival=arrival,
        )

    def _arrives(self, arrival: Arrival) -> None:
        sent = self._sent(arrival)
        self.sent.append(sent)
        for number, device in enumerate(self.devices):
            if device.schedule.offer(self.now, sent).admitted:
                sent.device = device.name
                if not device.runs:
                    self._start(number)
                break

    def _start(self, number: int) -> None:
        device = self.devices[number]
        if device.start(self.now):
            heapq.heappush(self._events, (device.ends(), 0, number))

    def _ended(self, device: StepDevice) -> None:
        finished: list[Row] = []
        for row in device.picked():
            sent = row.generation
            if row not in sent.rows:
                continue
            assert isinstance(sent, Sent)
            if sent.came_at is None:
                sent.came_at = self.now
                got = sent.rows
            else:
                got = [row]
            self.tokens += len(got)
            for one in got:
                count = sent.counts[one.number] = sent.counts.get(one.number, 0) + 1
                sent.last_at[one.number] = self.now
                if count == sent.arrival.tokens[one.number]:
                    finished.append(one)
        device.ended(self.now, finished)


def mixed(rate_s: float, seconds: float, *, bursts: bool = False, seed: int = 1) -> list[Arrival]:
    """A Poisson stream of `rate_s`, or bursts with the same rate. Prompts have 10 to 4,000 tokens, answers 1 to 500."""
    draw, at, out = np.random.default_rng(seed), 0.0, []
    while at < seconds:
        size = int(draw.integers(4, 25)) if bursts else 1
        at += draw.exponential(size / rate_s)
        for _ in range(size):
            prompt = int(np.clip(draw.lognormal(np.log(300), 1.2), 10, 4000))
            tokens = int(np.clip(draw.lognormal(np.log(80), 1.0), 1, 500))
            most = int(min(500, max(tokens, draw.choice([64, 128, 256, 500]))))
            out.append(Arrival(at, prompt, most, (tokens,)))
    return [one for one in out if one.at < seconds]


def conversations(rate_s: float, seconds: float, *, seed: int = 1) -> list[Arrival]:
    """Conversations of 8 turns. From 200 s on, `rate_s` turns arrive each second. Each one adds 20 to 500 tokens to a
    first prompt of 200 to 4,000 and all answers so far, and comes 10 to 40 s after the one before.
    """
    draw, began, out = np.random.default_rng(seed), 0.0, []
    while began < seconds:
        began += draw.exponential(8 / rate_s)
        at, prompt = began, int(np.clip(draw.lognormal(np.log(1000), 0.8), 200, 4000))
        for _ in range(8):
            tokens = int(np.clip(draw.lognormal(np.log(80), 1.0), 1, 500))
            out.append(Arrival(at, prompt, 500, (tokens,), talk=round(began * 1e6)))
            prompt += tokens + int(np.clip(draw.lognormal(np.log(60), 1.0), 20, 500))
            at += draw.uniform(10.0, 40.0)
    return sorted((one for one in out if one.at < seconds), key=lambda one: one.at)
