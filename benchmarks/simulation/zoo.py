"""Devices that no cost model describes (`laws.py`) in virtual time, and an oracle that knows them.

The scheduler is windve's. Everything is drawn from seeds, so a scene always has the same result.
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

from benchmarks.simulation.laws import BASES, BURST_S, LAWS, Base, Exact, overhead
from deployments.admission.predictor import LinePredictor
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy, ScheduledQuery

WARM_S, WARM_BURSTS_S = 30.0, 70.0  # warm-up, which does not count
BURSTS_S = 300.0  # the length of scenes with bursts
LATE = 0.005  # the largest late share with which a scene keeps the promise
CHANGED_S = 60.0  # after a sudden change; counted separately


def capacity(law: Exact, style: str) -> float:
    """Queries of 75 tokens per second, with batches as long as the SLO (answers per micro-batch), or half of it."""
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
            come += [(number * BURST_S + index * law.apart_s, tokens()) for index in range(base.burst)]
        come.sort()
    return come


@dataclass(slots=True, eq=False, kw_only=True)
class Served(ScheduledQuery):
    """`ended` is NaN until it is answered."""

    at: float
    admitted: bool = False
    ended: float = math.nan

    def late(self, slo_s: float) -> bool:
        return self.ended > self.at + slo_s + 1e-9


class World:
    """One device, one scheduler."""

    def __init__(self, schedule: Scheduler[Served], law: Exact) -> None:
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
            one = Served(tokens=tokens, due=self.now + self.law.slo_s, at=self.now)
            served.append(one)
            if self.schedule.offer(self.now, [one]):
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
        passes, tokens, work_s, works = [list[Served]()], 0, 0.0, list[float]()
        for query in self.schedule.start(self.now):
            if (most := self.schedule.limits.micro_batch_tokens) and passes[-1] and tokens + query.tokens > most:
                passes.append([])
                tokens = 0
            passes[-1].append(query)
            tokens += query.tokens
        for one in passes:
            work_s += sum(self.law.cost(query.tokens) for query in one)
            works.append(work_s)
        ends = self.law.pass_ends(works, self.now)
        for one, end in zip(passes, ends, strict=True):
            self._at(end, 0, self._passed, one)
        self._at(ends[-1], 0, self._ended)

    def _passed(self, queries: list[Served]) -> None:
        self.schedule.passed(self.now, queries)
        for query in queries:
            query.ended = self.now

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

    def seconds(self, work: float) -> float:
        return self._law.mean_s(work, self._now)

    def work_in(self, seconds: float) -> float:
        seconds = (seconds - self._law.added_mean_s) / self._law.scale(self._now)
        if seconds < self._curve[0]:
            return seconds - self._curve[0]
        return (bisect.bisect_right(self._curve, seconds + 1e-9) - 1) * self._step_s


class Found(NamedTuple):
    """Late shares of the admitted queries, in steady state and in the minute after a change. Goodput: true work per
    second in time.
    """

    late: float
    late_changed: float
    goodput: float
    admitted: int


def world_of(law: Exact, passes: int = 0, *, oracle: bool = False) -> World:
    """`passes`: tokens per micro-batch, if answers come per micro-batch."""
    policy = Policy(law.slo_s)
    if not oracle:
        return World(Scheduler(law.model(), policy, passes), law)
    predictor = Oracle(law)
    world = World(Scheduler(CostModel.of_curve(law.alpha_s, law.beta_s), policy, passes, predictor), law)
    predictor.clock = world
    return world


class Scene(NamedTuple):
    """`style`: whether answers come at the end of a batch, or per micro-batch."""

    law: str
    base: str
    style: str
    load: str

    def play(self, *, oracle: bool = False, seed: int = 3) -> Found:
        base = BASES[self.base]
        law = LAWS[self.law](base, seed, BURSTS_S if self.load == "burst" else base.seconds)
        come = arrivals(base, law, self.style, self.load, seed)
        world = world_of(law, QUERY_TOKENS * base.pass_queries if self.style == "pass" else 0, oracle=oracle)
        return measured(world.run(come), law, WARM_BURSTS_S if self.load == "burst" else WARM_S)


def measured(served: list[Served], law: Exact, warm_s: float) -> Found:
    late, counts, good_s = [0, 0], [0, 0], 0.0
    for one in served:
        if one.at < warm_s or not one.admitted:
            continue
        is_late = one.late(law.slo_s)
        good_s += 0.0 if is_late else law.cost(one.tokens)
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


class Burst(NamedTuple):
    """A burst of `queries`, after light load at the times `light`."""

    law: type[Exact]
    base: str
    light: Sequence[float]
    queries: int
    at_s: float = BURST_S

    def play(self, *, oracle: bool = False) -> tuple[int, int]:
        """(admitted, late) queries of the burst."""
        law = self.law(BASES[self.base], 1, 30.0)
        times = [*self.light, *[self.at_s] * self.queries]
        served = world_of(law, oracle=oracle).run([(at, QUERY_TOKENS) for at in times])[-self.queries :]
        admitted = [one for one in served if one.admitted]
        return len(admitted), sum(one.late(law.slo_s) for one in admitted)


class Beta017(Exact):
    def run_s(self, work_s: float) -> float:
        return 0.17 + work_s


class Beta022(Exact):
    def run_s(self, work_s: float) -> float:
        return 0.22 + work_s


class Hiccup(Exact):
    """The eleventh batch takes 0.35 s more."""

    runs = 0

    def added_s(self) -> float:
        self.runs += 1
        return 0.35 if self.runs == 11 else 0.0


_LIGHT = [0.7 * number for number in range(26)]
BURSTS = {
    "beta is 0.17 s, not 0.27 s": Burst(Beta017, "v100", _LIGHT, 80),
    "beta is 0.22 s, not 0.27 s": Burst(Beta022, "v100", _LIGHT, 80),
    "each run takes 6 ms more than modelled": Burst(overhead, "tiny", [0.05 * number for number in range(390)], 600),
    "the run before takes 0.35 s more": Burst(Hiccup, "quick", [*map(float, range(10)), 19.9], 206, 20.0),
}
