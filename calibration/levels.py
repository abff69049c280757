"""Which burst to send next, from the samples so far. Pure: a sweep that was interrupted goes on from its samples.

Few levels and far apart: lone queries, which give about beta; a quick climb, which gives about alpha; then the level
where the SLO should just be met, again and again, and half of it, until the confidence interval of the depth is narrow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from calibration.curve import Shape
from calibration.latency_model import Fit, Misfit, NotLinear, Sample, fit, misfit

LONE = 2  # lone queries before anything else
LONE_TOO_SLOW = 3  # as many that are all too slow settle that the pool cannot be used (Eq. 11)
CLIMB = 6  # at most so many times the level before
_SURE_SHARE = 0.02  # of the depth: an interval as narrow as this is good enough
_SURE_QUERIES = 0.5
_ENOUGH, _ENOUGH_CHEAP, _CHEAP = 4, 8, 16  # samples; where the depth is small, a few more cost next to nothing
_REPEATS = 4  # of every level, before the latency is called not linear


@dataclass(frozen=True, slots=True)
class Aim:
    """What is looked for: the depth for `slo_s` under traffic of `shape`; `most` queries at once are ever sent to one
    replica, and `bursts` in all.
    """

    slo_s: float
    shape: Shape = "burst"
    most: int = 2048
    bursts: int = 40


def next_level(samples: Sequence[Sample], aim: Aim) -> int | None:
    """The concurrency of the next burst, or None: the depth is known well enough, or no burst can make it so.

    Raises NotLinear when samples at a level that were repeated do not fit a line.
    """
    lone = [sample.latency_s for sample in samples if sample.concurrency == 1]
    if len(lone) < LONE or (len(lone) < LONE_TOO_SLOW and min(lone) > aim.slo_s):
        return 1
    if min(lone) > aim.slo_s or aim.most == 1:
        return None
    highest = max(sample.concurrency for sample in samples)
    if highest == 1:  # at least slo/(alpha + beta) fit: alpha*C + beta <= C * (alpha + beta)
        return min(aim.most, max(2, min(CLIMB, math.floor(3 * aim.slo_s / median(lone)))))
    return _by_the_line(samples, highest, aim)


def _by_the_line(samples: Sequence[Sample], highest: int, aim: Aim) -> int | None:
    fitted = fit(samples)
    target = _target(fitted, aim)
    if target > highest and not _close(highest, target):
        return min(target, CLIMB * highest)
    odd = misfit(samples, fitted)
    if odd is not None:
        return _measure_again(samples, odd)
    if len(samples) >= aim.bursts or _sure(samples, fitted, aim):
        return None
    return _where_it_helps(samples, target)


def _measure_again(samples: Sequence[Sample], odd: Misfit) -> int:
    """The level to repeat before the latency is called not linear: the odd one, then all others (one slow burst of
    theirs may have bent the line).
    """
    counts = Counter(sample.concurrency for sample in samples)
    if counts[odd.concurrency] < _REPEATS:
        return odd.concurrency
    level = min(counts, key=lambda concurrency: (counts[concurrency], concurrency))
    if counts[level] >= _REPEATS:
        raise NotLinear(odd.problem)
    return level


def _target(fitted: Fit, aim: Aim) -> int:
    return max(1, fitted.curve.depth(aim.slo_s, aim.shape, aim.most))


def _close(level: int, target: int) -> bool:
    """A burst at `level` says what one at `target` would."""
    return level >= min(0.85 * target, target - 1)


def _sure(samples: Sequence[Sample], fitted: Fit, aim: Aim) -> bool:
    depth = fitted.curve.depth(aim.slo_s, aim.shape, aim.most)
    if len(samples) - len(fitted.outliers) < (_ENOUGH_CHEAP if depth < _CHEAP else _ENOUGH):
        return False
    safe = _exact_depth(fitted, aim, margin=True)
    return safe >= aim.most or _exact_depth(fitted, aim) - safe <= max(_SURE_QUERIES, _SURE_SHARE * depth)


def _exact_depth(fitted: Fit, aim: Aim, *, margin: bool = False) -> float:
    """The concurrency, not rounded, at which the line (or its upper side) meets the SLO."""
    low, high = 0.0, float(aim.most)
    for _ in range(40):
        middle = (low + high) / 2
        worst_s = fitted.curve.latency_s(middle, aim.shape) + (fitted.margin_s(middle, aim.shape) if margin else 0.0)
        low, high = (middle, high) if worst_s <= aim.slo_s else (low, middle)
    return low


def _where_it_helps(samples: Sequence[Sample], target: int) -> int:
    """At the depth itself, and at half of it, in turn: the first says where the line is, the second that it is one."""
    near = sum(1 for sample in samples if _close(sample.concurrency, target))
    middle = max(1, target // 2)
    beside = sum(1 for sample in samples if 0.35 * target <= sample.concurrency <= 0.65 * target)
    return middle if beside < near // 2 and middle > 1 else target
