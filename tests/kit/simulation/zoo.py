"""True devices in virtual time that no cost model describes, and an oracle that knows them.

A device is a law: the seconds of a run by its true work, what disturbs it in time, and the model that the scheduler is
given. The scheduler is the product's own. All is drawn from seeds: a scene has one result.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deployments.admission.predictor import LinePredictor
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy, Query

WARM_S, WARM_BURSTS_S = 30.0, 70.0  # that do not count
BURST_S, BURSTS_S = 20.0, 300.0  # from one burst to the next, and the length of their scenes
CHANGED_S = 60.0  # after a sudden change: counted apart


@dataclass(frozen=True, slots=True)
class Base:
    """A device as its makers say, and what is asked of it: `light` queries a second between bursts of `burst`."""

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
STYLES = ("end", "pass")  # when answers come
LOADS = ("0.3", "0.8", "1.5", "burst", "mixed")


class Exact:
    """It runs as the model says. Work and times are seconds."""

    mixed_only = False
    stair_s = 0.0

    def __init__(self, base: Base, seed: int, seconds: float) -> None:
        self.alpha_s, self.beta_s, self.slo_s = base.alpha_s, base.beta_s, base.slo_s
        self.seconds, self.most_s, self.draw = seconds, base.slo_s - base.beta_s, random.Random(seed)
        self.changes: tuple[float, ...] = ()

    def model(self) -> CostModel:
        return CostModel.of_curve(self.alpha_s, self.beta_s)

    def cost_s(self, tokens: int) -> float:
        return self.alpha_s * tokens / QUERY_TOKENS

    def run_s(self, work_s: float) -> float:
        """Of an undisturbed run."""
        return self.beta_s + work_s

    def slow(self, now: float) -> float:
        return 1.0

    noise_mean = 1.0
    added_mean_s = 0.0

    def scale(self, now: float) -> float:
        return self.slow(now) * self.noise_mean

    def mean_s(self, work_s: float, now: float) -> float:
        """What an oracle knows of the future: the mean."""
        return self.run_s(work_s) * self.scale(now) + self.added_mean_s

    def noise(self) -> float:
        return 1.0

    def added_s(self) -> float:
        return 0.0

    def clock(self, now: float, busy_s: float) -> float:
        """When so much work is done that begins now."""
        return now + busy_s

    def pass_ends(self, works: Sequence[float], now: float) -> list[float]:
        """When each pass of a run ends; `works`: the true work done by then."""
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
    return law.beta_s + 1.2 * law.most_s * (work_s / law.most_s) ** 1.5


@shape
def regimes(law: Exact, work_s: float) -> float:
    return law.beta_s + 0.6 * work_s + max(0.0, work_s - law.most_s / 2)


@shape
def overhead(law: Exact, work_s: float) -> float:
    return law.beta_s + work_s + (0.06 if law.beta_s > 0.1 else 0.006)


class Tiles(Exact):
    """Work is done by sixteen queries at a time."""

    def __init__(self, base: Base, seed: int, seconds: float) -> None:
        super().__init__(base, seed, seconds)
        self.stair_s = 16 * self.alpha_s

    def run_s(self, work_s: float) -> float:
        return self.beta_s + self.stair_s * math.ceil(work_s / self.stair_s - 1e-9)


class Gauss(Exact):
    def noise(self) -> float:
        return max(0.8, 1 + self.draw.gauss(0, 0.03))


class Noise(Exact):
    """And one run in twenty takes two to four times as long."""

    noise_mean = 0.95 + 0.05 * 3

    def noise(self) -> float:
        return self.draw.uniform(2, 4) if self.draw.random() < 0.05 else max(0.8, 1 + self.draw.gauss(0, 0.03))


class Pauses(Exact):
    """It stands still for a time again and again."""

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
    """1.6 times as slow, and back."""

    def __init__(self, base: Base, seed: int, seconds: float) -> None:
        super().__init__(base, seed, seconds)
        self.changes = (seconds / 3 + 10, seconds * 0.8 + 10)

    def slow(self, now: float) -> float:
        return 1.6 if self.changes[0] <= now < self.changes[1] else 1.0


class Drift(Exact):
    def slow(self, now: float) -> float:
        return 1 + 0.4 * min(1.0, max(0.0, (now - 30) / (0.6 * self.seconds)))


class Stolen(Exact):
    """Another process takes half for two seconds at a time, a quarter of the time."""

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


class Ratio1(Exact):
    """A warm-up has said that all lengths cost the same."""

    mixed_only = True

    def model(self) -> CostModel:
        return CostModel(self.alpha_s, 0.0, 0.0, self.beta_s)


class Ratio46(Exact):
    """A warm-up has said that the cost grows with the square of the length."""

    mixed_only = True

    def model(self) -> CostModel:
        return CostModel(0.0, 0.0, self.alpha_s / QUERY_TOKENS**2, self.beta_s)


LAWS: dict[str, type[Exact]] = {
    law.__name__.lower(): law
    for law in (
        Exact, beta06, beta09, beta15, alpha07, alpha14, quadratic, convex, Tiles, regimes, overhead, Gauss, Noise,
        Pauses, Hiccups, Slower, Drift, Stolen, Ratio1, Ratio46,
    )
}  # fmt: skip


def capacity(law: Exact, style: str) -> float:
    """Queries of 75 tokens a second, by runs as long as the SLO (pass by pass), or half of it."""
    longest_s = law.slo_s if style == "pass" else law.slo_s / 2
    low, high = 0.0, 4 * law.slo_s
    for _ in range(40):
        middle = (low + high) / 2
        took_s = law.run_s(middle) * law.noise_mean + law.added_mean_s - law.stair_s / 2
        low, high = (middle, high) if took_s <= longest_s else (low, middle)
    return max(low / law.alpha_s, 0.5) / longest_s


def arrivals(base: Base, law: Exact, style: str, load: str, seed: int) -> list[tuple[float, int]]:
    """(at, tokens)."""
    draw, come, at = random.Random(seed), list[tuple[float, int]](), 0.0
    mixed = load == "mixed" or law.mixed_only

    def tokens() -> int:
        return round(min(512, max(4, draw.lognormvariate(math.log(60), 0.9)))) if mixed else 75

    rate = base.light if load == "burst" else capacity(law, style) * (0.8 if load == "mixed" else float(load))
    while (at := at + draw.expovariate(rate)) < law.seconds:
        come.append((at, tokens()))
    if load == "burst":
        for number in range(1, math.ceil(law.seconds / BURST_S)):
            come += [(number * BURST_S + index * 1e-5, tokens()) for index in range(base.burst)]
        come.sort()
    return come


@dataclass(slots=True)
class Served:
    """One query; `ended` is nan while it is not answered."""

    at: float
    tokens: int
    admitted: bool = False
    ended: float = math.nan


class World:
    """One device, one scheduler."""

    def __init__(self, schedule: Scheduler, law: Exact) -> None:
        self.schedule, self.law, self.now = schedule, law, 0.0
        self._events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def run(self, come: Sequence[tuple[float, int]]) -> list[Served]:
        events, served, index = self._events, list[Served](), 0
        while index < len(come) or events:
            if events and (index >= len(come) or events[0][:2] < (come[index][0], 2)):
                self.now, _, _, what, given = heapq.heappop(events)
                what(*given)
                continue
            self.now, tokens = come[index]
            index += 1
            one = Served(self.now, tokens)
            served.append(one)
            if self.schedule.offer(self.now, [Query(tokens, self.now + self.law.slo_s, item=one)]):
                one.admitted = True
                self._look()
        return served

    def _at(self, when: float, order: int, what: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._events, (when, order, next(self._numbers), what, given))

    def _look(self) -> None:
        wait_s = self.schedule.start_in_s(self.now)
        if wait_s is None:
            return
        if wait_s > 1e-12:
            self._at(self.now + wait_s, 1, self._look)
            return
        passes, tokens, work_s, works = [list[Query]()], 0, 0.0, list[float]()
        for query in self.schedule.start(self.now):
            if (most := self.schedule.limits.micro_batch_tokens) and passes[-1] and tokens + query.tokens > most:
                passes.append([])
                tokens = 0
            passes[-1].append(query)
            tokens += query.tokens
        for one in passes:
            work_s += sum(self.law.cost_s(query.tokens) for query in one)
            works.append(work_s)
        ends = self.law.pass_ends(works, self.now)
        for one, end in zip(passes, ends, strict=True):
            self._at(end, 0, self._passed, one)
        self._at(ends[-1], 0, self._ended)

    def _passed(self, queries: list[Query]) -> None:
        self.schedule.passed(self.now, queries)
        for query in queries:
            query.item.ended = self.now

    def _ended(self) -> None:
        self.schedule.ended(self.now)
        self._look()


class Oracle(LinePredictor):
    """Knows the device's mean, its noise and its changes; its margin is fixed."""

    clock: World

    def __init__(self, law: Exact, margin: float = 0.02) -> None:
        LinePredictor.__init__(self, margin=margin)
        self._law, self._step_s = law, law.alpha_s / 50
        self._curve = [law.run_s(number * self._step_s) for number in range(int(3 * law.slo_s / self._step_s))]

    @property
    def _now(self) -> float:
        return self.clock.now if hasattr(self, "clock") else 0.0

    def seconds(self, work_s: float) -> float:
        return self._law.mean_s(work_s, self._now)

    def work_s(self, seconds: float) -> float:
        seconds = (seconds - self._law.added_mean_s) / self._law.scale(self._now)
        if seconds < self._curve[0]:
            return seconds - self._curve[0]
        return (bisect.bisect_right(self._curve, seconds + 1e-9) - 1) * self._step_s


class Found(NamedTuple):
    """Late shares of those admitted: when steady, in the minute after a change; goodput: true work a second in time."""

    late: float
    late_changed: float
    goodput: float
    admitted: int


class Scene(NamedTuple):
    law: str
    base: str
    style: str
    load: str

    def play(self, *, oracle: bool = False, seed: int = 3) -> Found:
        base = BASES[self.base]
        law = LAWS[self.law](base, seed, BURSTS_S if self.load == "burst" else base.seconds)
        come = arrivals(base, law, self.style, self.load, seed)
        passes = QUERY_TOKENS * base.pass_queries if self.style == "pass" else 0
        if oracle:
            predictor = Oracle(law)
            true = CostModel.of_curve(law.alpha_s, law.beta_s)
            world = World(Scheduler(true, Policy(law.slo_s), passes, predictor), law)
            predictor.clock = world
        else:
            world = World(Scheduler(law.model(), Policy(law.slo_s), passes), law)
        return measured(world.run(come), law, WARM_BURSTS_S if self.load == "burst" else WARM_S)


def measured(served: list[Served], law: Exact, warm_s: float) -> Found:
    late, counts, good_s = [0, 0], [0, 0], 0.0
    for one in served:
        is_late = one.admitted and one.ended > one.at + law.slo_s + 1e-9
        if one.at < warm_s or not one.admitted:
            continue
        good_s += 0.0 if is_late else law.cost_s(one.tokens)
        changed = bool(law.changes) and law.changes[0] - law.slo_s <= one.at < law.changes[0] + CHANGED_S
        late[changed] += is_late
        counts[changed] += 1
    shares = [bad / count if count else 0.0 for bad, count in zip(late, counts, strict=True)]
    return Found(shares[0], shares[1], good_s / (law.seconds - warm_s), sum(counts))


def scenes(laws: Sequence[str] = tuple(LAWS)) -> Iterator[Scene]:
    """Eight for each device."""
    points = [
        ("v100", "end", "0.8"), ("v100", "end", "1.5"), ("v100", "end", "burst"), ("v100", "pass", "0.8"),
        ("v100", "pass", "mixed"), ("v100", "pass", "burst"), ("tiny", "end", "burst"), ("quick", "pass", "burst"),
    ]  # fmt: skip
    for law in laws:
        for point in points:
            if not (LAWS[law].mixed_only and point[2] == "mixed"):
                yield Scene(law, *point)
