"""Predicts how long a device's run takes, and learns it from the runs. Pure.

Work is in planned seconds: the sum of the cost model's costs of all queries. A run of work w takes

    T(w) = g (b + k w)

- A Kalman filter in relative errors tracks the line b + k w. The initial uncertainty of b includes a share of the SLO.
  So small runs teach b and large ones k, and light load alone says nothing about a large run.
- Other work on the host delays a short run by milliseconds rather than by a share. So the noise of a run includes the
  mean error of short runs in seconds (`jitter_s`): a run of 60 ms instead of 40 hardly moves the line at 0.8 s. Since
  other work never makes a run faster, a fast outlier counts in full, and a slow one is clipped.
- g is the slow spell: if the last run took longer than the line by more than the margin, g is the ratio, else 1. It
  holds until the next run, so a slow spell counts at once and ends at once.
- The line is trusted up to the largest recent run, or an eighth of the SLO. A larger run takes at least as long as the
  lines through the latest large runs predict. So a device that slows down with size does not look fast because its
  small runs are.

A prediction may fill 1 / (1 + m) of the time to a deadline. The margin m follows adaptive conformal inference (Gibbs
and Candes, 2021, Eq. 2): it grows by `_GAIN` times the share of a run's answers that it did not cover, and shrinks by
`_GAIN * _AIM`. While m is between its bounds, the uncovered share tends to `_AIM` over many runs, whatever the
distribution of the counted errors. This does not promise `_AIM` for all answers, because four things differ from the
paper:

- An error is known only when its run ends.
- Only admitted queries are seen.
- A prediction shorter than a quarter of the SLO does not shrink the margin, because it is easily covered. If it is
  missed, it counts in proportion to its length: a delay that is large for a small run may be small for a large one.
- An error that the line has learned by now is not counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_NOISE = 0.03  # standard deviation of a run's time, as a share
_DOUBT, _WALK = 0.3, 0.003  # of a parameter: its initial standard deviation; the process noise of each run
_BETA_SLO = 0.02  # of the SLO: added to b's own size for its uncertainty
_JITTER, _MOST_JITTER = 0.01, 0.03  # of the SLO: the initial mean error of short runs; the largest
_CLIP = 3.0  # standard deviations: larger errors are outliers, and slow ones are clipped to this
_WIDEN = 0.1  # of a parameter: its uncertainty per outlier, after several of one sign in a row
_CHANGED = 2  # outliers in a row after which the device has changed
_TOGETHER = 0.9  # correlation of b and k after the device became slower, since what slows b usually slows k
_LEAST_SLOPE = 0.02
_RELEVANT = 0.25  # of the SLO: shorter runs and predictions count less
_SLOWEST, _SPELL = 3.0, 0.05  # the largest g; the least excess that counts as a spell
_TRUSTED, _FADE = 0.125, 0.95  # of the SLO: the line is always trusted so far; decay of the largest run, per run
_LARGE, _KEPT, _REMEMBERED_S = 0.5, 3, 60.0  # of a run's most work: a large run; how many are kept; for how long
_GAIN, _AIM, _LEAST_MARGIN, _MOST_MARGIN = 0.05, 0.003, 0.02, 0.3
_FEW_MARGIN, _FEW = 0.05, 5.0  # the initial margin; SLOs of predictions after which it has faded to the least
_DEVIATIONS, _DEVIATION = 3.25, 0.01  # mean deviations that the margin covers; the initial deviation
_FORGET = 0.05  # how much each run counts in the mean deviation and in the jitter
_LONG_ANSWER = 0.75  # of the SLO: errors of shorter predictions are taken relative to this
_HOPELESS = 0.5  # of the SLO: an excess that no margin could cover

Ends = Sequence[tuple[float, float]]  # of each query: (predicted, actual) seconds from its admission to its answer


@dataclass(slots=True)
class LinePredictor:
    """A fixed prediction: a run of work w takes `intercept_s + slope * w` seconds."""

    intercept_s: float = 0.0
    slope: float = 1.0  # seconds per second of work
    margin: float = 0.0
    slo_s: float = 1.0  # the scale on which errors matter
    has_changed: bool = False  # the latest runs show that the device has changed
    jitter_s: float = 0.0  # mean error of short runs, in seconds

    def seconds(self, work: float) -> float:
        """Predicted seconds of a run."""
        return self.intercept_s + self.slope * work

    def work_in(self, seconds: float) -> float:
        """The most work of a run that takes at most `seconds`. Below 0: no run is so short."""
        return (seconds - self.intercept_s) / self.slope

    def fill_s(self, left_s: float) -> float:
        """How much of the time to a deadline a prediction may fill."""
        return left_s / (1 + self.margin)

    def promise(self, slo_s: float) -> None:
        """Take a new SLO."""
        self.slo_s = slo_s

    def ended(self, now: float, work: float, took_s: float, answers: Ends = (), *, is_probe: bool = False) -> None:
        """Take the result of a complete run, of which a fixed prediction learns nothing. `is_probe`: it ran to find out
        whether the device is still slow.
        """


class _LargeRun(NamedTuple):
    """A recent large run, and the line at that time. `over`: its time divided by the line's prediction, at least 1."""

    at: float
    work: float
    took_s: float
    intercept_s: float
    slope: float
    over: float


@dataclass(slots=True)
class Predictor(LinePredictor):
    """Learns from each run. `planned_s`: the beta of the cost model."""

    planned_s: float = field(kw_only=True)
    is_calibrated: bool = field(default=False, kw_only=True)
    _b: float = field(init=False)
    _k: float = 1.0
    _spell: float = 1.0  # g
    _doubt: tuple[float, float, float] = field(init=False)  # variance of b, covariance, variance of k
    _outliers: int = 0  # in a row; below 0: fast ones
    _large: deque[_LargeRun] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _small_work: float = 0.0  # work of the last run that was not large
    _largest_work: float = 0.0  # work of the largest run, fading
    _trusted_work: float = field(init=False)  # the largest work that is predicted by the line alone
    _lines: list[tuple[float, float, float]] = field(init=False)  # lines for larger runs: (work, seconds, slope)
    _conformal: float = field(init=False)
    _unchanged: float = field(init=False)  # `_conformal` before the current outliers in a row
    _covered: float = 0.0  # predictions so far, in SLOs
    _deviation: float = _DEVIATION  # mean relative error of runs
    _weighed: float = 0.0  # runs so far, short ones with less weight
    _excess_s: float = 0.0  # of the last run

    def __post_init__(self) -> None:
        self._b, self.jitter_s = self.planned_s, _JITTER * self.slo_s
        self._reset_doubt()
        self._lines = [(0.0, self.planned_s, 1.0)]
        self._conformal = self._unchanged = _LEAST_MARGIN
        if self.is_calibrated:
            self._deviation = _LEAST_MARGIN / _DEVIATIONS
        self._publish()

    def seconds(self, work: float) -> float:
        took_s = self._b + self._k * work
        if work > self._trusted_work:
            least_s = math.inf
            for at, y, slope in self._lines:
                least_s = min(least_s, y + slope * (work - at))
            took_s = max(took_s, least_s)
        return self._spell * took_s

    def work_in(self, seconds: float) -> float:
        seconds, trusted = seconds / self._spell, self._trusted_work
        work = (seconds - self._b) / self._k
        if work <= trusted:
            return work
        most = 0.0
        for at, y, slope in self._lines:
            most = max(most, at + (seconds - y) / slope)
        return max(trusted, min(work, most))

    def promise(self, slo_s: float) -> None:
        self.slo_s = slo_s
        self._reset_doubt()
        self._publish()

    def ended(self, now: float, work: float, took_s: float, answers: Ends = (), *, is_probe: bool = False) -> None:
        """Learn from it."""
        most, spell = self.work_in(self.fill_s(self.slo_s)), self._spell
        if is_probe:  # only this run shows how slow the device is now
            times = took_s / (self._b + self._k * work)
            slope = max(min(1.0, self._k), self._k * times)  # quicker than planned: b was wrong before k
            self._k = max(_LEAST_SLOPE, min(slope, took_s / work))
            self._b = max(0.0, took_s - self._k * work)
            self._reset_doubt()
        else:
            self._count_outlier(self._follow(work, took_s))
        line_s = self._b + self._k * work
        off = (took_s - line_s) / max(line_s, _RELEVANT * self.slo_s)
        self._spell = min(_SLOWEST, 1 + off) if off > max(self.margin, _SPELL) else 1.0
        self._remember(now, work, took_s, large=work >= _LARGE * most)
        weight = min(1.0, line_s / (_RELEVANT * self.slo_s)) ** 2
        self._weighed += weight
        fade = weight * max(_FORGET, 1 / (self._weighed + 3))
        self._deviation += fade * (min(abs(off), 3 * self._deviation + 0.005) - self._deviation)
        self._adapt(answers, max(0.0, took_s - min(spell, self._spell) * line_s), weight)
        self._publish()

    def _reset_doubt(self) -> None:
        scale_s = self.planned_s + _BETA_SLO * self.slo_s
        self._doubt = (_DOUBT * scale_s) ** 2, 0.0, (_DOUBT * self._k) ** 2

    def _follow(self, work: float, took_s: float) -> int:
        """Take a step of the filter, and update the jitter. Returns 1 for a slow outlier, -1 for a fast one, else 0."""
        line_s, (p, c, q) = self._b + self._k * work, self._doubt
        x, z = (p + c * work) / line_s, (c + q * work) / line_s
        spread = (x + z * work) / line_s + _NOISE**2 + (self.jitter_s / line_s) ** 2
        error, limit = took_s / line_s - 1, _CLIP * math.sqrt(spread)
        step = min(limit, error) / spread
        self._b, self._k = max(0.0, self._b + x * step), max(_LEAST_SLOPE, self._k + z * step)
        walk_s = _WALK * (self.planned_s + _BETA_SLO * self.slo_s)
        self._doubt = p - x * x / spread + walk_s * walk_s, c - x * z / spread, q - z * z / spread + _WALK * _WALK
        if line_s < _RELEVANT * self.slo_s:
            counts_s = min(abs(took_s - line_s), max(_JITTER * self.slo_s, 3 * self.jitter_s))
            self.jitter_s = min(_MOST_JITTER * self.slo_s, self.jitter_s + _FORGET * (counts_s - self.jitter_s))
        return (error > limit) - (error < -limit)

    def _count_outlier(self, sign: int) -> None:
        if not self._outliers:
            self._unchanged = self._conformal
        self._outliers = self._outliers + sign if sign * self._outliers > 0 else sign
        self.has_changed = abs(self._outliers) >= _CHANGED
        if self.has_changed:
            doubt, (p, _, q) = _WIDEN * abs(self._outliers), self._doubt
            scale_s = max(self._b, self.planned_s + _BETA_SLO * self.slo_s)
            p, q = max(p, (doubt * scale_s) ** 2), max(q, (doubt * self._k) ** 2)
            self._doubt = p, (_TOGETHER * math.sqrt(p * q) if self._outliers > 0 else 0.0), q

    def _remember(self, now: float, work: float, took_s: float, *, large: bool) -> None:
        """Remember the run, and update the lines through large runs. If small runs have become slower since a large
        run, its line becomes slower as well.
        """
        self._largest_work = work if self.has_changed else max(work, _FADE * self._largest_work)
        b, k = self._b, self._k
        if large:
            self._large.append(_LargeRun(now, work, took_s, b, k, max(1.0, took_s / (b + k * work))))
        else:
            self._small_work = work
        while self._large and self._large[0].at < now - _REMEMBERED_S:
            self._large.popleft()
        self._lines = [] if self._large else [(0.0, self.planned_s, 1.0)]
        for one in self._large:
            then_s = (one.intercept_s + one.slope * self._small_work) * one.over
            more_s = b + k * self._small_work - then_s
            slower = max(1.0, 1 + more_s / max(then_s, _RELEVANT * self.slo_s))
            slope = max(1.0, one.took_s / (self.planned_s + one.work))
            self._lines.append((one.work, slower * one.took_s, slower * slope))

    def _adapt(self, answers: Ends, excess_s: float, weight: float) -> None:
        """Adapt the margin to these answers. `excess_s`: the run's excess time that the line has not learned yet."""
        unexplained_s, self._excess_s = excess_s + self._excess_s, excess_s  # of this run and the one before
        if not answers or unexplained_s > _HOPELESS * self.slo_s:
            self._covered += weight
            return
        short_s, long_s, m = _RELEVANT * self.slo_s, _LONG_ANSWER * self.slo_s, self._conformal
        missed = sum(
            min(1.0, said / short_s)
            for said, actual in answers
            if min(actual - said, unexplained_s) > m * max(said, long_s)
        )
        share = sum(said for said, _ in answers) / len(answers) / self.slo_s
        self._covered += (share := share if share > _RELEVANT else 0.0)
        m = m + _GAIN * missed / len(answers) if missed else m - _GAIN * _AIM * share
        if self._outliers >= _CHANGED:  # the line has learned the change by now
            m = min(m, self._unchanged)
        self._conformal = min(_MOST_MARGIN, max(_LEAST_MARGIN, m))

    def _publish(self) -> None:
        first = _LEAST_MARGIN if self.is_calibrated else _FEW_MARGIN
        few = first - (first - _LEAST_MARGIN) * min(1.0, self._covered / _FEW)
        self.margin = min(_MOST_MARGIN, max(self._conformal, few, _DEVIATIONS * self._deviation))
        self._trusted_work = max(self._largest_work, _TRUSTED * self.slo_s)
        self.intercept_s, self.slope = self._spell * self._b, self._spell * self._k
