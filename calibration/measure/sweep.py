"""Measures one pool alone, with planned runs at levels chosen from the results so far, until its line is known. Also
runs the stress test that this replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibration.fit.latency_model import Fit, Sample, cover, fit, misfit, scatter
from calibration.fit.lengths import next_concurrency
from calibration.fit.levels import Aim, bounds, deepest, limit_s, next_level
from calibration.measure.planned import PlannedBursts
from calibration.service.application import CalibrationFailed

TOO_NOISY = 0.25  # relative standard deviation of a burst's latency above which no depth can be found


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
    lone_s = float(np.median([sample.latency_s for sample in samples if sample.concurrency == 1]))
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
    """The stress test that the estimator replaces (Eq. 7-10): increase the concurrency by `step` until the SLO is
    missed.

    Returns the largest concurrency that met it, and the number of queries sent.
    """
    level, spent = 0, 0
    while level + step <= aim.most:
        spent += level + step
        if await runs.seconds("stress test", pool, level + step) > aim.slo_s:
            break
        level += step
    return level, spent
