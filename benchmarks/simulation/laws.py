"""Devices that no cost model describes.

A law defines a batch's seconds by its true work, disturbances over time, and the model that the scheduler gets.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel

BURST_S = 20.0  # from one burst to the next


@dataclass(frozen=True, slots=True)
class Base:
    """A device's nominal model, and its load: `light` queries per second between bursts of `burst`."""

    alpha_s: float
    beta_s: float
    slo_s: float
    pass_queries: int
    seconds: float
    light: float
    burst: int


BASES = {
    "v100": Base(0.018, 0.27, 1.0, 8, 300, 1, 80),
    "quick": Base(0.0024, 0.0023, 1.0, 16, 100, 20, 600),
    "tiny": Base(0.001, 0.001, 0.5, 32, 100, 60, 600),
}


class Exact:
    """Runs exactly as the model says. Work and times are in seconds."""

    mixed_only = False
    stair_s = 0.0
    apart_s = 1e-5  # from one query of a burst to the next

    def __init__(self, base: Base, seed: int, seconds: float) -> None:
        self.alpha_s, self.beta_s, self.slo_s = base.alpha_s, base.beta_s, base.slo_s
        self.seconds, self.most_s, self.draw = seconds, base.slo_s - base.beta_s, random.Random(seed)
        self.changes: tuple[float, ...] = ()

    def model(self) -> CostModel:
        return CostModel.of_curve(self.alpha_s, self.beta_s)

    def cost(self, tokens: int) -> float:
        return self.alpha_s * tokens / QUERY_TOKENS

    def run_s(self, work_s: float) -> float:
        """Seconds of an undisturbed batch."""
        return self.beta_s + work_s

    def slow(self, now: float) -> float:
        return 1.0

    noise_mean = 1.0
    added_mean_s = 0.0

    def scale(self, now: float) -> float:
        return self.slow(now) * self.noise_mean

    def mean_s(self, work_s: float, now: float) -> float:
        """The mean seconds, which the oracle knows."""
        return self.run_s(work_s) * self.scale(now) + self.added_mean_s

    def noise(self) -> float:
        return 1.0

    def added_s(self) -> float:
        return 0.0

    def clock(self, now: float, busy_s: float) -> float:
        """When work of `busy_s` that begins now is done."""
        return now + busy_s

    def pass_ends(self, works: Sequence[float], now: float) -> list[float]:
        """When each micro-batch ends. `works`: the true work done by then."""
        times, added_s = self.slow(now) * self.noise(), self.added_s()
        return [self.clock(now, self.run_s(work_s) * times + added_s) for work_s in works]


def shape(run_s: Callable[[Exact, float], float]) -> type[Exact]:
    return type(run_s.__name__, (Exact,), {"run_s": run_s})


@shape
def beta06(law: Exact, work_s: float) -> float:
    return 0.6 * law.beta_s + work_s


@shape
def beta09(law: Exact, work_s: float) -> float:
    return 0.24 / 0.27 * law.beta_s + work_s


@shape
def beta15(law: Exact, work_s: float) -> float:
    return 1.5 * law.beta_s + work_s


@shape
def alpha07(law: Exact, work_s: float) -> float:
    return law.beta_s + 0.7 * work_s


@shape
def alpha14(law: Exact, work_s: float) -> float:
    return law.beta_s + 1.4 * work_s


@shape
def quadratic(law: Exact, work_s: float) -> float:
    return law.beta_s + 0.7 * work_s + 0.6 * work_s * work_s / law.most_s


@shape
def convex(law: Exact, work_s: float) -> float:
    return law.beta_s + 1.2 * law.most_s * math.pow(work_s / law.most_s, 1.5)


@shape
def regimes(law: Exact, work_s: float) -> float:
    return law.beta_s + 0.6 * work_s + max(0.0, work_s - law.most_s / 2)


@shape
def overhead(law: Exact, work_s: float) -> float:
    return law.beta_s + work_s + (0.06 if law.beta_s > 0.1 else 0.006)


class Tiles(Exact):
    """Computes in tiles of sixteen queries."""

    def __init__(self, base: Base, seed: int, seconds: float) -> None:
        super().__init__(base, seed, seconds)
        self.stair_s = 16 * self.alpha_s

    def run_s(self, work_s: float) -> float:
        return self.beta_s + self.stair_s * math.ceil(work_s / self.stair_s - 1e-9)


class Gauss(Exact):
    def noise(self) -> float:
        return max(0.8, 1 + self.draw.gauss(0, 0.03))


class Noise(Exact):
    """In addition, one batch in twenty takes two to four times as long."""

    noise_mean = 0.95 + 0.05 * 3

    def noise(self) -> float:
        return self.draw.uniform(2, 4) if self.draw.random() < 0.05 else max(0.8, 1 + self.draw.gauss(0, 0.03))


class Pauses(Exact):
    """Pauses periodically."""

    every_s, long_s = 5.0, 0.2
    noise_mean = 1 + 0.2 / 5

    def clock(self, now: float, busy_s: float) -> float:
        at, end, number = now, now + busy_s, math.floor(now / self.every_s)
        while (begins := number * self.every_s) < end:
            if begins + self.long_s > at:
                end += self.long_s - max(0.0, at - begins) if begins < at else self.long_s
                at = begins + self.long_s
            number += 1
        return end


class Hiccups(Exact):
    added_mean_s = 0.05 * 0.04

    def added_s(self) -> float:
        return self.draw.expovariate(1 / 0.04) if self.draw.random() < 0.05 else 0.0


class Slower(Exact):
    """Becomes 1.6 times slower, and later recovers."""

    def __init__(self, base: Base, seed: int, seconds: float) -> None:
        super().__init__(base, seed, seconds)
        self.changes = (seconds / 3 + 10, seconds * 0.8 + 10)

    def slow(self, now: float) -> float:
        return 1.6 if self.changes[0] <= now < self.changes[1] else 1.0


class Drift(Exact):
    def slow(self, now: float) -> float:
        return 1 + 0.4 * min(1.0, max(0.0, (now - 30) / (0.6 * self.seconds)))


class Stolen(Exact):
    """Another process takes half of the device, for two seconds at a time, a quarter of the time."""

    noise_mean = 8 / 7

    def __init__(self, base: Base, seed: int, seconds: float) -> None:
        super().__init__(base, seed, seconds)
        at, self.marks = 0.0, list[float]()
        while at < seconds + 60:
            for mean_s in (6.0, 2.0):
                at += self.draw.expovariate(1 / mean_s)
                self.marks.append(at)

    def clock(self, now: float, busy_s: float) -> float:
        number, at = bisect.bisect_right(self.marks, now), now
        while True:
            rate = 0.5 if number % 2 else 1.0
            ends = self.marks[number] if number < len(self.marks) else math.inf
            if busy_s <= (ends - at) * rate:
                return at + busy_s / rate
            busy_s -= (ends - at) * rate
            at, number = ends, number + 1


class Shared(Exact):
    """Its cores also receive the queries: each burst takes 40 to 85 % of them for 0.05 to 0.2 s."""

    apart_s = 0.0005

    def clock(self, now: float, busy_s: float) -> float:
        number = math.floor(now / BURST_S)
        draw = random.Random(number)
        ends, rate = number * BURST_S + draw.uniform(0.05, 0.2), draw.uniform(0.15, 0.6)
        if not number or now >= ends:
            return now + busy_s
        done_s = min(busy_s, (ends - now) * rate)
        return now + done_s / rate + busy_s - done_s


class Ratio1(Exact):
    """The warm-up found that all lengths cost the same."""

    mixed_only = True

    def model(self) -> CostModel:
        return CostModel(self.alpha_s, 0.0, 0.0, self.beta_s)


class Ratio46(Exact):
    """The warm-up found that the cost grows with the square of the length."""

    mixed_only = True

    def model(self) -> CostModel:
        return CostModel(0.0, 0.0, self.alpha_s / QUERY_TOKENS**2, self.beta_s)


LAWS: dict[str, type[Exact]] = {
    law.__name__.lower(): law
    for law in (
        Exact, beta06, beta09, beta15, alpha07, alpha14, quadratic, convex, Tiles, regimes, overhead, Gauss, Noise,
        Pauses, Hiccups, Slower, Drift, Stolen, Shared, Ratio1, Ratio46,
    )
}  # fmt: skip
