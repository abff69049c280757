"""Fits the cost of a query by its length, from a few bursts with lengths other than the sweep's. Pure.

A burst of C queries of n tokens takes beta + C * c(n), with the sweep's beta and

    c(n) = query_s + token_s * n + token2_s * n^2

No coefficient is negative. At the sweep's length c is alpha, so that Eq. 12 still holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from calibration.fit.curve import Curve
from calibration.fit.latency_model import Sample
from calibration.fit.levels import CLIMB
from deployments.embedding.scheduler.cost_model import CostModel

_SHORT, _TIMES_LONGER = 10, 3  # tokens; times the sweep's length
_ALIKE = 1.5  # lengths must differ by more than this factor
_BURSTS = 3  # per length: one to find how many queries are half a depth's work, and two with that many
_LEAST_SHARE = 0.05  # of alpha: lower bound of a query's cost for burst sizes and error weights
_HELD = 1e4  # weight of the condition that c is alpha at the sweep's length


def other_lengths(tokens: int, most_tokens: int) -> list[int]:
    """Lengths to measure besides `tokens`, up to `most_tokens`: a short and a long one that differ enough from it."""
    wanted = {min(_SHORT, most_tokens), min(_TIMES_LONGER * tokens, most_tokens)}
    return sorted(length for length in wanted if max(length / tokens, tokens / length) > _ALIKE)


def next_concurrency(samples: Sequence[Sample], times: float, line: Curve, depth: int, most: int) -> int | None:
    """How many queries to send next that are `times` as long as the sweep's; None if there are enough samples. They are
    about half of a depth's work. The first burst is smaller, because the cost of such a query is still unknown.
    """
    if len(samples) == _BURSTS or not line.rises:
        return None
    half_s = max(1.0, depth / 2) * line.alpha_s
    if not samples:
        return max(1, int(half_s / (line.alpha_s * max(1.0, times))))
    cost_s = max(_LEAST_SHARE * line.alpha_s, _seconds_each(samples[0], line))
    return max(1, min(most, CLIMB * samples[0].concurrency, int(half_s / cost_s)))


def fit_cost(samples: Mapping[int, Sequence[Sample]], line: Curve, tokens: int) -> CostModel:
    """Fit the cost to the median at each other length, with cost alpha at `tokens`. `samples`: by length; without any,
    the cost is proportional to the tokens.
    """
    if not any(samples.values()):
        return CostModel(0.0, line.alpha_s / tokens, 0.0, line.beta_s)
    from scipy.optimize import nnls

    costs = [median(_seconds_each(sample, line) for sample in found) for found in samples.values()]
    weights = 1 / np.maximum(costs, _LEAST_SHARE * line.alpha_s)
    columns = line.alpha_s * np.vander(np.array(list(samples)) / tokens, 3, increasing=True) * weights[:, None]
    shares, _ = nnls(np.vstack([columns, np.full(3, _HELD)]), np.append(np.array(costs) * weights, _HELD))
    parts = line.alpha_s * shares / shares.sum()  # of alpha: for the query, its tokens, their square
    return CostModel(float(parts[0]), float(parts[1]) / tokens, float(parts[2]) / tokens**2, line.beta_s)


def _seconds_each(sample: Sample, line: Curve) -> float:
    return max(0.0, (sample.latency_s - line.beta_s) / sample.concurrency)
