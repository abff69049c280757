"""Has replicas time planned runs, at levels chosen from the results so far: until a pool's line is known, for other
lengths, and for the stress test that this replaces. What ordinary queries take beyond them is the way.

The paper's stress test times queries at the client, so a depth leaves room for the way to the device and back: proxy,
Router, sockets. A burst's way is longer than a lone query's, because Routers read its queries one by one. So the way is
a line too: `beta_s` of one query, and `alpha_s` more of each other one that comes with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from calibration.fit.curve import Curve
from calibration.fit.latency_model import Fit, Sample, cover, fit, misfit, scatter
from calibration.fit.lengths import next_concurrency
from calibration.fit.levels import Aim, bounds, deepest, limit_s, next_level
from calibration.measure.traffic import Traffic
from calibration.report.report_model import Burst
from calibration.service.application import CalibrationFailed
from calibration.service.replicas import Replicas
from deployments.embedding.run import PlannedBatch

TOO_NOISY = 0.25  # relative standard deviation of a burst's latency above which no depth can be found
LEAST_WAY_S = 1e-5  # of a query: no Router is quicker
_LONE, _PLANNED, _BURSTS, _BURST = 9, 5, 3, 16  # of the way: lone queries, planned runs, bursts, and their queries


@dataclass(slots=True)
class PlannedBursts:
    """Runs of queries on one replica of each pool. `tokens`: the usual length of a query."""

    replicas: Replicas
    bursts: list[Burst]  # each is added
    tokens: int
    _warm: set[tuple[str, PlannedBatch]] = field(default_factory=set)  # whose first run, which pays for more, is done

    async def seconds(self, stage: str, pool: str, size: int, tokens: int | None = None) -> float:
        """Seconds of a run of `size` queries on one pool while the others time nothing. Raises CalibrationFailed."""
        at, batch = time.time(), PlannedBatch(size, tokens or self.tokens)
        if (pool, batch) not in self._warm:
            await self._seconds(pool, batch)
            self._warm.add((pool, batch))
        seconds = round(await self._seconds(pool, batch), 6)
        self.bursts.append(Burst(stage, at, {pool: size}, size, 0, 0, {pool: [seconds]}))
        return seconds

    async def _seconds(self, pool: str, batch: PlannedBatch) -> float:
        found = await self.replicas.time(pool, batch, warm_up=False)
        if found is None:
            raise CalibrationFailed(f"the {pool} pool has no room for a query of {batch.tokens} tokens")
        return found[0].seconds


async def measure_way(traffic: Traffic, runs: PlannedBursts, pool: str) -> Curve:
    """Send ordinary queries, then time the same batches on `pool`, the preferred one, without the way. Raises
    CalibrationFailed.
    """
    lone = [await traffic.burst("way", {}, 1) for _ in range(_LONE)]
    bursts = [await traffic.burst("way", {}, _BURST) for _ in range(_BURSTS)]
    alone = [seconds for one in lone for seconds in one.latencies_s[pool]]
    if not alone:
        raise CalibrationFailed(f"the {pool} pool answers no queries: it must be open while it is calibrated")
    whole = [found for one in bursts if len(found := one.latencies_s[pool]) == _BURST]
    lone_s = max(0.0, median(alone) - median([await runs.seconds("way", pool, 1) for _ in range(_PLANNED)]))
    if not whole:  # a device so slow that it does not take so many
        return Curve(LEAST_WAY_S, lone_s)
    batch_s = median([await runs.seconds("way", pool, _BURST) for _ in range(_BURSTS)])
    more_s = median(map(max, whole)) - batch_s - lone_s
    return Curve(max(LEAST_WAY_S, more_s / (_BURST - 1)), lone_s)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The result of a sweep that sent `queries`. `line` is None if not even one query meets the SLO (Eq. 11). `bent`:
    why the latencies do not follow a line; `line` is then on or above them, and bisection found `depth`.
    """

    pool: str
    samples: tuple[Sample, ...]
    line: Fit | None
    depth: int
    queries: int
    lone_s: float
    bent: str | None = None

    def queries_per_second(self, depth: int) -> float:
        """Queries per second that one replica answers with `depth` queries in each batch; 0 for depth 0."""
        if not depth:
            return 0.0
        return depth / (self.line.curve.latency_s(depth) if self.line else self.lone_s)

    def smallest_slo_s(self, aim: Aim) -> float:
        """The smallest SLO that one query meets, in seconds."""
        if self.line is None:
            return self.lone_s * (2 if aim.shape == "steady" else 1)
        return max(self.lone_s, self.line.curve.latency_s(1, aim.shape))


async def sweep(runs: PlannedBursts, pool: str, aim: Aim, on_sample: Callable[[list[Sample]], None]) -> Estimate:
    """Measure `pool` alone until its depth is known. Raises CalibrationFailed if its latencies scatter too much."""
    samples: list[Sample] = []
    while (level := next_level(samples, aim)) is not None:
        samples.append(Sample(level, await runs.seconds("sweep", pool, level)))
        on_sample(samples)
    return estimated(pool, samples, aim, sum(sample.concurrency for sample in samples))


def estimated(pool: str, samples: Sequence[Sample], aim: Aim, queries: int) -> Estimate:
    """The estimate from the samples of a complete sweep. Raises CalibrationFailed if they scatter too much."""
    lone_s = median(sample.latency_s for sample in samples if sample.concurrency == 1)
    found = Estimate(pool, tuple(samples), None, int(lone_s <= aim.slo_s), queries, lone_s)  # 1 if --most is 1
    if max(sample.concurrency for sample in samples) == 1:
        return found
    line = fit(samples)
    odd = misfit(samples, line)
    noise = line.noise if odd is None else scatter(samples)
    if noise > TOO_NOISY:
        raise CalibrationFailed(
            f"the {pool} pool: latencies of equal bursts scatter by {noise:.0%}; is other work on the device or the "
            "machine? Calibrate when traffic is low"
        )
    if odd is not None:
        depth = bounds(samples, aim).holds
        above = cover(samples, depth, limit_s(samples, aim)) if depth else None
        return replace(found, line=above, depth=depth, bent=odd.problem)
    return replace(found, line=line, depth=line.curve.depth(aim.slo_s, aim.shape, deepest(samples, aim)))


async def measure_length(runs: PlannedBursts, estimate: Estimate, tokens: int, aim: Aim) -> list[Sample]:
    """Measure a few runs of queries of another length on a pool whose line is known."""
    assert estimate.line is not None
    samples: list[Sample] = []
    line, times = estimate.line.curve, tokens / runs.tokens
    while (level := next_concurrency(samples, times, line, estimate.depth, aim.most)) is not None:
        samples.append(Sample(level, await runs.seconds(f"{tokens} tokens", estimate.pool, level, tokens)))
    return samples


async def stress_test(runs: PlannedBursts, pool: str, aim: Aim, step: int) -> tuple[int, int]:
    """Increase the concurrency by `step` until the SLO is missed (Eq. 7-10). Returns the largest concurrency that met
    it, and the number of queries sent.
    """
    level, spent = 0, 0
    while level + step <= aim.most:
        spent += level + step
        if await runs.seconds("stress test", pool, level + step) > aim.slo_s:
            break
        level += step
    return level, spent
