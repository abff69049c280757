"""Chooses the size of the next burst from the samples so far. Pure.

The levels are few and far apart. Lone queries give an estimate of beta, and a quick climb gives one of alpha. Then the
level that should just meet the SLO, and half of it, are repeated until the depth's confidence interval is narrow. If
the latencies do not follow a line (tiled computation, quadratic attention), bisection finds the depth: more queries
never take less time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from calibration.fit.curve import Shape
from calibration.fit.latency_model import Fit, Sample, fit, misfit

LONE = 2  # lone queries at the beginning
LONE_TOO_SLOW = 3  # if this many lone queries are all too slow, the pool cannot be used (Eq. 11)
CLIMB = 6  # most times that a level is larger than the previous one
_SURE_SHARE = 0.02  # of the depth: the width of the interval at which the sweep ends
_SURE_QUERIES = 0.5
_ENOUGH, _ENOUGH_CHEAP, _CHEAP = 4, 8, 16  # samples; at a small depth, more samples cost little
_NEAR = 0.85  # of a level: a burst of so many is as informative
_REPEATS = 2  # samples of a level off the line before bisection replaces the line


@dataclass(frozen=True, slots=True)
class Aim:
    """The goal of a sweep: the depth at which queries are answered within `slo_s`, under traffic of `shape`. At most
    `most` queries run at once on one replica, in at most `bursts` runs in all.
    """

    slo_s: float
    shape: Shape = "burst"
    most: int = 2048
    bursts: int = 40


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest concurrency that met the SLO, and the smallest that missed it (None if none did)."""

    holds: int
    misses: int | None

    @property
    def close(self) -> bool:
        return self.misses is not None and self.misses - self.holds <= max(1, int(_SURE_SHARE * self.holds))


def bounds(samples: Sequence[Sample], aim: Aim) -> Bounds:
    """The bounds on the depth without a line. A level misses the SLO unless most of its bursts met it."""
    held = {level: _held(samples, level, aim) for level in {sample.concurrency for sample in samples}}
    misses = min((level for level in held if not held[level]), default=None)
    return Bounds(max((level for level in held if misses is None or level < misses), default=0), misses)


def limit_s(samples: Sequence[Sample], aim: Aim) -> float:
    """The longest that a burst may take. Steady traffic may wait for a running batch, about a lone query's time."""
    lone = [sample.latency_s for sample in samples if sample.concurrency == 1]
    return aim.slo_s - (median(lone) if aim.shape == "steady" else 0.0)


def next_level(samples: Sequence[Sample], aim: Aim) -> int | None:
    """The concurrency of the next burst; None if the depth is known well enough, or further bursts would not help."""
    lone = [sample.latency_s for sample in samples if sample.concurrency == 1]
    if len(lone) < LONE or (len(lone) < LONE_TOO_SLOW and min(lone) > aim.slo_s):
        return 1
    if min(lone) > aim.slo_s or aim.most == 1:
        return None
    highest = max(sample.concurrency for sample in samples)
    if highest == 1:
        return min(aim.most, _climb(samples, highest, aim))
    return _by_the_line(samples, highest, aim)


def deepest(samples: Sequence[Sample], aim: Aim) -> int:
    """The deepest that a line may say: it tells nothing of levels far above those that were tried."""
    highest = max(sample.concurrency for sample in samples)
    return min(aim.most, max(highest + 1, int(highest / _NEAR)))


def _by_the_line(samples: Sequence[Sample], highest: int, aim: Aim) -> int | None:
    fitted = fit(samples)
    target = max(1, fitted.curve.depth(aim.slo_s, aim.shape, aim.most))
    # Never go beyond a burst that was late: a flat line that does not fit would lead to bursts of minutes.
    if target > highest and not _close(highest, target) and _held(samples, highest, aim):
        return min(target, _climb(samples, highest, aim))
    odd = misfit(samples, fitted)
    if odd is not None:
        once = sum(sample.concurrency == odd.concurrency for sample in samples) < _REPEATS
        return odd.concurrency if once else _by_bisection(samples, aim)
    if len(samples) >= aim.bursts or _sure(samples, fitted, aim):
        return None
    return _where_it_helps(samples, min(target, _climb(samples, highest, aim)))


def _climb(samples: Sequence[Sample], highest: int, aim: Aim) -> int:
    """The highest level to try next. If `highest` takes t, any line allows at least slo/t times as many queries."""
    latency_s = median(sample.latency_s for sample in samples if sample.concurrency == highest)
    return max(highest + 1, min(CLIMB * highest, math.floor(3 * aim.slo_s / latency_s * highest)))


def _by_bisection(samples: Sequence[Sample], aim: Aim) -> int | None:
    """One burst per level until the bounds are close. Then these are repeated: a burst may be slow by chance."""
    found = bounds(samples, aim)
    if len(samples) >= aim.bursts:
        return None
    if found.misses is None and found.holds < aim.most:
        return min(aim.most, 2 * found.holds)
    if found.misses is not None and not found.close:
        return (found.holds + found.misses) // 2
    counts = Counter(sample.concurrency for sample in samples)
    if found.misses is not None and _held(samples, found.misses, aim) is None:
        return found.misses
    return found.holds if counts[found.holds] == 1 else None


def _held(samples: Sequence[Sample], level: int, aim: Aim) -> bool | None:
    """Whether most bursts at `level` were in time; None if half were late, or the only one was."""
    most_s = limit_s(samples, aim)
    late = [sample.latency_s > most_s for sample in samples if sample.concurrency == level]
    if late == [True] or 2 * sum(late) == len(late):
        return None
    return 2 * sum(late) < len(late)


def _close(level: int, target: int) -> bool:
    """Whether a burst at `level` is as informative as one at `target`."""
    return level >= min(_NEAR * target, target - 1)


def _sure(samples: Sequence[Sample], fitted: Fit, aim: Aim) -> bool:
    depth = fitted.curve.depth(aim.slo_s, aim.shape, aim.most)
    if len(samples) - len(fitted.outliers) < (_ENOUGH_CHEAP if depth < _CHEAP else _ENOUGH):
        return False
    exact = min(float(aim.most), fitted.curve.unrounded_depth(aim.slo_s, aim.shape)) if fitted.curve.rises else depth
    at = exact - max(_SURE_QUERIES, _SURE_SHARE * depth)
    return at <= 0 or fitted.curve.latency_s(at, aim.shape) + fitted.margin_s(at, aim.shape) <= aim.slo_s


def _where_it_helps(samples: Sequence[Sample], target: int) -> int:
    """The depth and half of it, in turn: the first locates the line, the second shows that it is straight."""
    near = sum(1 for sample in samples if _close(sample.concurrency, target))
    middle = max(1, target // 2)
    beside = sum(1 for sample in samples if 0.35 * target <= sample.concurrency <= 0.65 * target)
    return middle if beside < near // 2 and middle > 1 else target
