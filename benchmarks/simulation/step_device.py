"""Devices that generate, by formula, with the product's own `StepSchedule`: events in virtual time. Pure.

A device's true times come from a table that its schedule does not have: the schedule knows a fit of noisy steps.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deployments.generation.step_schedule import Generation, Part, Row, StepPolicy, StepSchedule
from deployments.generation.step_time import StepLoad, StepTime


class Asked(NamedTuple):
    """A generation that arrives: `tokens` are the true lengths of its answers, which nobody knows before."""

    at: float
    prompt_tokens: int
    most_tokens: int
    tokens: tuple[int, ...] = (1,)
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class StepTable:
    """A device's times: `linear` is milliseconds by rows and tokens in a step, between which lines are drawn; each
    token read from the cache and each pair of tokens in a prompt take so many seconds more.
    """

    linear: tuple[tuple[float, float], ...]
    kv_token_s: float
    pair_s: float

    def seconds(self, load: StepLoad) -> float:
        count = load.rows + load.prompt_tokens
        (low, low_ms), (high, high_ms) = next(
            (pair for pair in zip(self.linear, self.linear[1:], strict=False) if pair[1][0] >= count),
            (self.linear[-2], self.linear[-1]),
        )
        linear_ms = low_ms + (count - low) / (high - low) * (high_ms - low_ms)
        return linear_ms / 1000 + self.kv_token_s * load.kv_tokens + self.pair_s * load.pairs

    def learned(self, noise: float, seed: int = 0) -> StepTime:
        """As a warm-up would find it."""
        draw = random.Random(seed)  # noqa: S311 - a simulation
        steps = []
        for rows in (0, 1, 4, 16, 32, 64):
            for length in (64, 1024, 4096):
                for prompt in (0, 16, 64, 256, 512, 1024):
                    if rows or prompt:
                        load = StepLoad(rows, rows * length).with_chunk(length if prompt else 0, prompt)
                        steps.append((load, self.seconds(load) * (1 + draw.gauss(0, noise))))
        return StepTime.fit(steps)


def load_of(parts: Sequence[Part]) -> StepLoad:
    """What a step computes."""
    load = StepLoad()
    for row, start, tokens, _ in parts:
        decodes = start >= row.generation.prompt_tokens
        load = load.with_row(start + 1) if decodes else load.with_chunk(start, tokens)
    return load


@dataclass(slots=True, eq=False)
class StepDevice:
    """One at work. `noise`: of a step's time, as a share; `slow`: times as long as in the table, by the clock."""

    name: str
    table: StepTable
    schedule: StepSchedule
    noise: float = 0.0
    slow: Callable[[float], float] = lambda _: 1.0
    seed: int = 0
    busy_s: float = 0.0
    step: list[Part] = field(default_factory=list)
    began: float = 0.0
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)  # noqa: S311 - a simulation

    def start(self, now: float) -> float | None:
        """Begins a step and says when it ends; None where there is nothing to do."""
        self.step, self.began = self.schedule.next_step(now), now
        self.schedule.copies()
        if not self.step:
            return None
        noise = max(0.5, 1 + self._draw.gauss(0, self.noise))
        took_s = self.table.seconds(load_of(self.step)) * self.slow(now) * noise
        self.busy_s += took_s
        return now + took_s


@dataclass(slots=True, eq=False)
class Sent:
    """What became of one: `first_at` None where it was refused; `last_at` of each answer."""

    asked: Asked
    generation: Generation
    device: str | None = None
    first_at: float | None = None
    last_at: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def late_first(self) -> bool:
        return self.first_at is not None and self.first_at > self.generation.due + 1e-9

    @property
    def late_pace(self) -> bool:
        pace_s = self.generation.pace_s
        if pace_s is None or self.first_at is None:
            return False
        return any(
            at - self.first_at > (self.counts[number] - 1) * pace_s + 1e-9 for number, at in self.last_at.items()
        )

    @property
    def in_time(self) -> bool:
        return self.device is not None and not (self.late_first or self.late_pace)


@dataclass(slots=True)
class StepWorld:
    """Devices in the order of preference: a generation is offered to one after the other."""

    devices: Sequence[StepDevice]
    policy: StepPolicy
    sent: list[Sent] = field(default_factory=list)
    now: float = 0.0
    _events: list[tuple[float, int, int]] = field(default_factory=list)

    def run(self, asked: Sequence[Asked]) -> list[Sent]:
        """Until all has ended."""
        ordered = sorted(asked)
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

    def _arrives(self, asked: Asked) -> None:
        policy = self.policy
        generation = Generation(
            asked.prompt_tokens,
            asked.most_tokens,
            self.now + policy.ttft_s,
            None if asked.bulk else policy.tpot_s,
            len(asked.tokens),
            asked.bulk,
        )
        sent = Sent(asked, generation)
        generation.item = sent
        self.sent.append(sent)
        for number, device in enumerate(self.devices):
            if device.schedule.offer(self.now, generation):
                sent.device = device.name
                if not device.step:
                    self._start(number)
                break

    def _start(self, number: int) -> None:
        ends = self.devices[number].start(self.now)
        if ends is not None:
            heapq.heappush(self._events, (ends, 0, number))

    def _ended(self, device: StepDevice) -> None:
        finished: list[Row] = []
        for row, _, _, wanted in device.step:
            generation = row.generation
            if not wanted or row not in generation.rows:
                continue
            sent: Sent = generation.item
            if sent.first_at is None:
                sent.first_at = self.now
                got = generation.rows
            else:
                got = [row]
            for one in got:
                count = sent.counts[one.number] = sent.counts.get(one.number, 0) + 1
                sent.last_at[one.number] = self.now
                if count == sent.asked.tokens[one.number]:
                    finished.append(one)
        device.step = []
        device.schedule.ended(self.now, self.now - device.began, finished)


def mixed(rate_s: float, seconds: float, *, bursts: bool = False, seed: int = 1) -> list[Asked]:
    """A stream of `rate_s`, or bursts of as many together; prompts of 10 to 4,000 tokens, answers of 1 to 500."""
    draw, at, out = np.random.default_rng(seed), 0.0, []
    while at < seconds:
        size = int(draw.integers(4, 25)) if bursts else 1
        at += draw.exponential(size / rate_s)
        for _ in range(size):
            prompt = int(np.clip(draw.lognormal(np.log(300), 1.2), 10, 4000))
            tokens = int(np.clip(draw.lognormal(np.log(80), 1.0), 1, 500))
            most = int(min(500, max(tokens, draw.choice([64, 128, 256, 500]))))
            out.append(Asked(at, prompt, most, (tokens,)))
    return [one for one in out if one.at < seconds]
