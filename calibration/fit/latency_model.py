"""Fits WindVE's latency model, `t = alpha*C + beta` (Eq. 12), to measured bursts. Pure.

The fit is robust. A first line goes through the most consistent share of the samples. Samples far from it are left out,
and the rest are fitted by weighted least squares with alpha, beta >= 0. Device noise grows with the latency, so all
residuals are relative to the line. If latencies do not follow a line, the lowest line on or above them is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from calibration.fit.curve import Curve, Shape

CONFIDENCE = 0.985  # one-sided: how sure a sweep is of its line when it ends
NOT_LINEAR = 0.07  # relative distance from the line beyond which a level does not fit a line
_CONSISTENT = 0.7  # share of the samples that the first line is drawn through
_FAR = 4.0  # an outlier is this many standard deviations from the first line
_FAR_AT_LEAST = 0.10
_NOISE_BEFORE = 0.01  # prior of the noise, which counts as _BEFORE_WORTH samples: a few samples that happen to lie on a
_BEFORE_WORTH = 2  # line do not prove that there is no noise
_DEVIATIONS = 1.4826  # standard deviation of a normal distribution over its median absolute deviation

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One burst: `concurrency` queries at once per replica, and the latency that the SLO applies to, in seconds."""

    concurrency: int
    latency_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted line, its confidence, and the samples that it leaves out.

    `noise`: relative standard deviation of a burst's latency. `outliers`: indices of samples.
    """

    curve: Curve
    r2: float
    noise: float
    outliers: frozenset[int]
    covariance: Floats  # of (alpha, beta), s^2, [2, 2]
    quantile: float  # of Student's t at CONFIDENCE

    def margin_s(self, concurrency: float, shape: Shape = "burst") -> float:
        """Half of the confidence interval of the line at `concurrency`, s."""
        where = np.array([concurrency, 2.0 if shape == "steady" else 1.0])
        return self.quantile * math.sqrt(max(0.0, float(where @ self.covariance @ where)))


def fit(samples: Sequence[Sample]) -> Fit:
    """The line through three or more samples at two or more levels of concurrency. Raises ValueError for fewer."""
    concurrency = np.array([sample.concurrency for sample in samples], dtype=np.float64)
    latency = np.array([sample.latency_s for sample in samples], dtype=np.float64)
    if len(samples) < 3 or len(set(concurrency)) < 2:
        raise ValueError("a line needs three samples at two levels of concurrency")
    model = _consistent_line(concurrency, latency)
    residuals = latency / _line_s(model, concurrency) - 1
    spread = _DEVIATIONS * float(np.median(np.abs(residuals)))  # of their middle part
    near = np.abs(residuals) <= max(_FAR * spread, _FAR_AT_LEAST)
    if len(set(concurrency[near])) < 2:
        near = np.ones(len(samples), dtype=bool)
    for _ in range(3):
        model = _least_squares(concurrency[near], latency[near], model)
    return _describe(model, concurrency, latency, near)


@dataclass(frozen=True, slots=True)
class Misfit:
    """A level of concurrency at which no sample is near the line. With several samples there, it is not an outlier."""

    concurrency: int
    problem: str


def scatter(samples: Sequence[Sample]) -> float:
    """Relative standard deviation of latency among bursts of equal concurrency; 0 if there are no such bursts."""
    pairs = itertools.combinations(samples, 2)
    apart = [abs(math.log(a.latency_s / b.latency_s)) for a, b in pairs if a.concurrency == b.concurrency]
    return _DEVIATIONS * median(apart) / math.sqrt(2) if apart else 0.0


def misfit(samples: Sequence[Sample], fitted: Fit) -> Misfit | None:
    """The level that is furthest from the line, if noise and NOT_LINEAR do not explain the distance; else None."""
    away: dict[int, float] = {}
    for sample in samples:
        residual = sample.latency_s / fitted.curve.latency_s(sample.concurrency) - 1
        away[sample.concurrency] = min(away.get(sample.concurrency, math.inf), residual, key=abs)
    level, residual = max(away.items(), key=lambda item: abs(item[1]))
    # The line's own residuals do not measure noise here: they include the bend.
    if abs(residual) <= max(NOT_LINEAR, 3 * min(fitted.noise, scatter(samples))):
        return None
    line_s = fitted.curve.latency_s(level)
    return Misfit(
        level,
        f"latency is not linear in concurrency: {level} at once take {line_s * (1 + residual):.3g} s where the line "
        f"through the other bursts says {line_s:.3g} s (R2 {fitted.r2:.3f})",
    )


def cover(samples: Sequence[Sample], depth: int, limit_s: float) -> Fit:
    """The lowest line on or above all samples up to `depth`, except outliers, that reaches `limit_s` at `depth`.

    So it allows no more than `depth`, and it rises even if a device answers `depth` queries as fast as one. The lowest
    line is the one that is lowest halfway between 0 and `depth`.
    """
    far = 1 + max(_FAR * scatter(samples), _FAR_AT_LEAST)
    points = {depth: limit_s}
    outliers = set()
    for index, sample in enumerate(samples):
        level = sample.concurrency
        if level > depth:
            continue
        # More queries never take less time, so a burst was slow for its level if a larger one was much faster.
        if sample.latency_s > far * min(other.latency_s for other in samples if other.concurrency >= level):
            outliers.add(index)
        else:
            points[level] = max(points.get(level, 0.0), sample.latency_s)
    concurrency, latency = (np.array(column, dtype=np.float64) for column in zip(*sorted(points.items()), strict=True))
    line = _least_above(concurrency, latency, depth / 2)
    kept = [sample for index, sample in enumerate(samples) if sample.concurrency <= depth and index not in outliers]
    seen = np.array([sample.latency_s for sample in kept])
    unexplained = sum((sample.latency_s - line.latency_s(sample.concurrency)) ** 2 for sample in kept)
    spread = float(np.sum(np.square(seen - seen.mean()))) if kept else 0.0
    r2 = max(0.0, 1 - unexplained / spread) if spread > 0 else 0.0
    return Fit(line, r2, scatter(samples), frozenset(outliers), np.zeros((2, 2)), 0.0)


def _least_above(concurrency: Floats, latency: Floats, middle: float) -> Curve:
    """Of the lines through two points (or one and the origin) on or above all points, the lowest at `middle`."""
    lines = [Curve(float(np.max(latency / concurrency)), 0.0)]
    for first, second in itertools.combinations(range(len(latency)), 2):
        alpha_s = float((latency[second] - latency[first]) / (concurrency[second] - concurrency[first]))
        line = Curve(alpha_s, float(latency[first] - alpha_s * concurrency[first]))
        above = alpha_s * concurrency + line.beta_s >= latency * (1 - 1e-9)
        if alpha_s >= 0 and line.beta_s >= 0 and above.all():
            lines.append(line)
    return min(lines, key=lambda line: line.latency_s(middle))


def _consistent_line(concurrency: Floats, latency: Floats) -> Curve:
    """Least trimmed squares over the lines through all pairs of samples. Up to a third may be outliers."""
    first, second = np.triu_indices(len(latency), 1)
    apart = concurrency[first] != concurrency[second]
    first, second = first[apart], second[apart]
    alpha = np.maximum(0.0, (latency[second] - latency[first]) / (concurrency[second] - concurrency[first]))
    beta = latency[first] - alpha * concurrency[first]
    negative = beta < 0  # through the origin and the larger of the two, then
    larger = np.maximum(concurrency[first], concurrency[second])
    alpha = np.where(negative, np.where(concurrency[first] == larger, latency[first], latency[second]) / larger, alpha)
    beta = np.maximum(0.0, beta)
    residuals = np.square(latency / (np.outer(alpha, concurrency) + beta[:, None] + 1e-12) - 1)
    consistent = math.ceil(_CONSISTENT * len(latency))
    trimmed = np.sort(residuals, axis=1)[:, :consistent].sum(axis=1)
    best = int(np.argmin(trimmed))
    return Curve(float(alpha[best]), float(beta[best]))


def _least_squares(concurrency: Floats, latency: Floats, before: Curve) -> Curve:
    """Least squares, weighted by the previous line instead of the samples, so that low samples do not weigh more."""
    from scipy.optimize import nnls

    expected_s = _line_s(before, concurrency)
    (alpha_s, beta_s), _ = nnls(np.column_stack([concurrency / expected_s, 1 / expected_s]), latency / expected_s)
    return Curve(float(alpha_s), float(beta_s))


def _describe(model: Curve, concurrency: Floats, latency: Floats, near: npt.NDArray[np.bool_]) -> Fit:
    from scipy.stats import t as student

    concurrency, latency, line_s = concurrency[near], latency[near], _line_s(model, concurrency[near])
    columns = np.column_stack([concurrency, np.ones_like(concurrency)]) / line_s[:, None]
    residuals = latency / line_s - 1
    freedom = int(near.sum()) - 2
    variance = (float(residuals @ residuals) + _BEFORE_WORTH * _NOISE_BEFORE**2) / (freedom + _BEFORE_WORTH)
    covariance = np.asarray(np.linalg.pinv(columns.T @ columns), np.float64) * variance
    spread = float(np.sum(np.square(latency - latency.mean())))
    unexplained = float(np.sum(np.square(latency - line_s)))
    return Fit(
        model,
        r2=1 - unexplained / spread if spread > 0 else 0.0,
        noise=math.sqrt(float(residuals @ residuals) / max(1, freedom)),
        outliers=frozenset(int(index) for index in np.flatnonzero(~near)),
        covariance=covariance,
        quantile=float(student.ppf(CONFIDENCE, freedom + _BEFORE_WORTH)),
    )


def _line_s(model: Curve, concurrency: Floats) -> Floats:
    return np.maximum(model.alpha_s * concurrency + model.beta_s, 1e-9)
