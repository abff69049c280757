"""Measures one pool alone, with bursts at levels chosen from the results so far, until its line is known. Also runs the
stress test that this replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibration.fit.latency_model import Fit, Sample, cover, fit, misfit, scatter
from calibration.fit.lengths import LengthSample, next_concurrency
from calibration.fit.levels import Aim, bounds, limit_s, next_level
from calibration.measure.trials import TrialLoads
from calibration.service.application import CalibrationFailed

TOO_NOISY = 0.25  # relative standard deviation of a burst's latency above which no depth can be found
_AGAIN = 2  # times that a burst is repeated because other traffic took its slots


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
        return max(self.lone_s, self.line.curve.latency_s(1, aim.shape) + self.line.margin_s(1, aim.shape))


async def sweep(trials: TrialLoads, pool: str, aim: Aim, on_sample: Callable[[list[Sample]], None]) -> Estimate:
    """Measure `pool` alone until its depth is known. Raises CalibrationFailed if its latencies scatter too much, or
    other traffic disturbs it.
    """
    samples: list[Sample] = []
    while (level := next_level(samples, aim)) is not None:
        samples.append(await _measure(trials, "sweep", pool, level, aim))
        on_sample(samples)
    return estimated(pool, samples, aim, sum(sample.concurrency for sample in samples) * trials.replicas[pool])


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
    depth = line.safe_depth(aim.slo_s, aim.shape, aim.most)
    if not depth and line.curve.depth(aim.slo_s, aim.shape, aim.most):
        depth = 1  # the line allows it, but its upper bound does not; fine-tuning decides
    return replace(found, line=line, depth=depth)


async def measure_length(trials: TrialLoads, estimate: Estimate, tokens: int, aim: Aim) -> list[LengthSample]:
    """Measure a few bursts of queries of another length on a pool whose line is known."""
    assert estimate.line is not None
    samples: list[LengthSample] = []
    line, times = estimate.line.curve, tokens / trials.tokens
    while (level := next_concurrency(samples, times, line, estimate.depth, aim.most)) is not None:
        found = await _measure(trials, f"{tokens} tokens", estimate.pool, level, aim, tokens=tokens)
        samples.append(LengthSample(tokens, level, found.latency_s))
    return samples


async def stress_test(trials: TrialLoads, pool: str, aim: Aim, step: int) -> tuple[int, int]:
    """The stress test that the estimator replaces (Eq. 7-10): increase the concurrency by `step` until the SLO is
    missed.

    Returns the largest concurrency that met it, and the number of queries sent.
    """
    level, spent = 0, 0
    while level + step <= aim.most:
        spent += level + step
        sample = await _measure(trials, "stress test", pool, level + step, aim)
        if sample.latency_s > aim.slo_s:
            break
        level += step
    return level, spent * trials.replicas[pool]


async def _measure(
    trials: TrialLoads, stage: str, pool: str, level: int, aim: Aim, *, tokens: int | None = None
) -> Sample:
    """Measure the latency of a burst that the SLO applies to: that of its slowest query, or the quantile."""
    alone = {name: level if name == pool else 0 for name in trials.replicas}
    for _ in range(1 + _AGAIN):
        burst = await trials.burst(stage, alone, tokens=tokens)
        if not burst.busy and not burst.failed:
            return Sample(level, float(np.quantile(burst.latencies_s[pool], aim.quantile, method="higher")))
    if burst.failed:
        raise CalibrationFailed(
            f"{burst.failed} of {burst.sent} queries failed on the {pool} pool: a replica was lost, or hangs"
        )
    raise CalibrationFailed(
        f"{burst.busy} of {burst.sent} queries were refused by the {pool} pool: other traffic is served at the same "
        "time, or a replica was lost; calibrate when traffic is low"
    )
