"""How long a run of a device takes, learned from its runs. Pure.

Work is in planned seconds: the sum of what the cost model says for each query. A run of work w takes

    T(w) = g (b + k w)

- b and k, a line, follow the device by a Kalman filter in relative errors. What is unknown of b has the size of the SLO
  at least: so small runs teach b, and large ones k. Light load alone then says nothing of a large run.
- g is what the last run took beyond the line and the margin. It holds until the next run: a slow spell counts at once,
  and ends at once.
- The line is trusted up to the largest run of late, or an eighth of the SLO. A larger run takes at least as long as the
  lines through the latest large runs say: a device that slows down with size is not thought quick because its small
  runs are.

A prediction may fill 1 / (1 + m) of the time to a deadline. The margin m is adaptive conformal inference (Gibbs and
Candes, 2021, Eq. 2): it grows by `_GAIN` times the share of a run's answers that it did not cover, and shrinks by
`_GAIN * _AIM`. While m is between its bounds, the share that it does not cover comes to `_AIM` over many runs, whatever
the distribution of the errors that it counts. It is no promise of `_AIM` for all answers, as four things differ from
the paper: an error is known only when its run ends; only admitted queries are seen; a prediction short of a quarter of
the SLO does not shrink the margin, as it is easily covered; and an error that the line knows by now is not counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_NOISE = 0.03  # standard deviation of a run's time, as a share
_DOUBT, _WALK = 0.3, 0.003  # of a parameter: its standard deviation at first; what is added with each run
_BETA_SLO = 0.02  # of the SLO: b is in doubt by this beside its own size
_CLIP = 3.0  # standard deviations: an error that is larger is an outlier, and counts as so large
_WIDEN = 0.1  # of a parameter: its doubt after outliers of one sign in a row, times their number
_CHANGED = 2  # such outliers: the device has changed
_TOGETHER = 0.9  # correlation of both doubts where it became slower: what slows b down slows k down, too
_LEAST_SLOPE = 0.02
_RELEVANT = 0.25  # of the SLO: an excess is a share of no shorter a time
_SLOWEST, _SPELL = 3.0, 0.05  # g at most; what it takes for a spell, beside the margin
_TRUSTED, _FADE = 0.125, 0.95  # of the SLO: the line holds so far in any case; of the largest run, with each run
_LARGE, _KEPT, _REMEMBERED_S = 0.5, 3, 60.0  # of the most that a run may hold; the latest so many; for so long
_GAIN, _AIM, _LEAST_MARGIN, _MOST_MARGIN = 0.05, 0.002, 0.02, 0.3
_FEW_MARGIN, _FEW = 0.05, 5.0  # the margin at first; SLOs of predictions after which it has faded to the least
_DEVIATIONS, _DEVIATION = 3.25, 0.01  # mean deviations that the margin covers; the deviation at first
_FORGET = 0.05  # of the deviation, with each run
_LONG_ANSWER = 0.75  # of the SLO: an error is a share of no shorter a prediction
_HOPELESS = 0.5  # of the SLO: no margin covers such an excess


@dataclass(slots=True)
class LinePredictor:
    """A device that is known: a run of work w takes `intercept_s + slope * w` seconds."""

    intercept_s: float = 0.0
    slope: float = 1.0  # seconds for a second of work
    margin: float = 0.0
    slo_s: float = 1.0  # the promise: errors are judged as shares of it
    has_changed: bool = False  # the device, by its latest runs

    def seconds(self, work_s: float) -> float:
        """What a run of so much work takes."""
        return self.intercept_s + self.slope * work_s

    def work_s(self, seconds: float) -> float:
        """The most work of a run that takes no longer; below 0 where none does."""
        return (seconds - self.intercept_s) / self.slope

    def fill_s(self, left_s: float) -> float:
        """How much of the time to a deadline predictions may fill."""
        return left_s / (1 + self.margin)

    def promise(self, slo_s: float) -> None:
        """Another SLO is in force."""
        self.slo_s = slo_s

    def ended(self, now: float, run: EndedRun) -> None:
        """A run has ended: nothing is learned."""


class EndedRun(NamedTuple):
    """A run that was whole. `answers`: (predicted, actual seconds) since each query was admitted; `is_probe`: it ran to
    see whether the device is still slow.
    """

    work_s: float
    took_s: float
    answers: Sequence[tuple[float, float]] = ()
    is_probe: bool = False


class _LargeRun(NamedTuple):
    """A run of late, and what the line said then. `over`: what it took, as a share of that, 1 at least."""

    at: float
    work_s: float
    took_s: float
    intercept_s: float
    slope: float
    over: float


@dataclass(slots=True)
class Predictor(LinePredictor):
    """Learns from each run. `planned_s`: what a run takes beside its work, by the cost model."""

    planned_s: float = field(kw_only=True)
    _b: float = field(init=False)
    _k: float = 1.0
    _spell: float = 1.0  # g
    _doubt: tuple[float, float, float] = field(init=False)  # variance of b, covariance, variance of k
    _outliers: int = 0  # in a row; below 0: quick ones
    _large: deque[_LargeRun] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _small_s: float = 0.0  # work of the last run that was not large
    _largest_s: float = 0.0  # work, fading
    _trusted_s: float = field(init=False)  # work of a run for which the line alone speaks
    _lines: list[tuple[float, float, float]] = field(init=False)  # (work, seconds, slope) of each for larger runs
    _conformal: float = _LEAST_MARGIN
    _unchanged: float = _LEAST_MARGIN  # it was so before the outliers in a row
    _covered: float = 0.0  # SLOs of predictions that have come true
    _deviation: float = _DEVIATION  # mean share that runs are off by
    _weighed: float = 0.0  # runs, each by its share of an SLO
    _excess_s: float = 0.0  # of the last run

    def __post_init__(self) -> None:
        self._b = self.planned_s
        self._reset_doubt()
        self._lines = [(0.0, self.planned_s, 1.0)]
        self._publish()

    def seconds(self, work_s: float) -> float:
        took_s = self._b + self._k * work_s
        if work_s > self._trusted_s:
            least_s = math.inf
            for at, y, slope in self._lines:
                least_s = min(least_s, y + slope * (work_s - at))
            took_s = max(took_s, least_s)
        return self._spell * took_s

    def work_s(self, seconds: float) -> float:
        seconds, trusted_s = seconds / self._spell, self._trusted_s
        work_s = (seconds - self._b) / self._k
        if work_s <= trusted_s:
            return work_s
        most_s = 0.0
        for at, y, slope in self._lines:
            most_s = max(most_s, at + (seconds - y) / slope)
        return max(trusted_s, min(work_s, most_s))

    def promise(self, slo_s: float) -> None:
        self.slo_s = slo_s
        self._reset_doubt()
        self._publish()

    def ended(self, now: float, run: EndedRun) -> None:
        """Learn from it."""
        work_s, took_s, most_s, spell = run.work_s, run.took_s, self.work_s(self.fill_s(self.slo_s)), self._spell
        if run.is_probe:  # it alone says how slow the device is now
            times = took_s / (self._b + self._k * work_s)
            self._b, self._k = self._b * times, max(_LEAST_SLOPE, self._k * times)
            self._reset_doubt()
        else:
            self._count_outlier(self._follow(work_s, took_s))
        line_s = self._b + self._k * work_s
        off = (took_s - line_s) / max(line_s, _RELEVANT * self.slo_s)
        self._spell = min(_SLOWEST, 1 + off) if off > max(self.margin, _SPELL) else 1.0
        self._remember(now, work_s, took_s, large=work_s >= _LARGE * most_s)
        weight = min(1.0, line_s / (_RELEVANT * self.slo_s)) ** 2
        self._weighed += weight
        fade = weight * max(_FORGET, 1 / (self._weighed + 3))
        self._deviation += fade * (min(abs(off), 3 * self._deviation + 0.005) - self._deviation)
        self._adapt(run.answers, max(0.0, took_s - min(spell, self._spell) * line_s), weight)
        self._publish()

    def _reset_doubt(self) -> None:
        scale_s = self.planned_s + _BETA_SLO * self.slo_s
        self._doubt = (_DOUBT * scale_s) ** 2, 0.0, (_DOUBT * self._k) ** 2

    def _follow(self, work_s: float, took_s: float) -> int:
        """A step of the filter. Returns 1 for a slow outlier, -1 for a quick one, else 0."""
        line_s, (p, c, q) = self._b + self._k * work_s, self._doubt
        x, z = (p + c * work_s) / line_s, (c + q * work_s) / line_s
        spread = (x + z * work_s) / line_s + _NOISE**2
        error, limit = took_s / line_s - 1, _CLIP * math.sqrt(spread)
        step = max(-limit, min(limit, error)) / spread
        self._b, self._k = max(0.0, self._b + x * step), max(_LEAST_SLOPE, self._k + z * step)
        walk_s = _WALK * (self.planned_s + _BETA_SLO * self.slo_s)
        self._doubt = p - x * x / spread + walk_s * walk_s, c - x * z / spread, q - z * z / spread + _WALK * _WALK
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

    def _remember(self, now: float, work_s: float, took_s: float, *, large: bool) -> None:
        """The lines through large runs: each is slower by as much as a small run has become since."""
        self._largest_s = work_s if self.has_changed else max(work_s, _FADE * self._largest_s)
        b, k = self._b, self._k
        if large:
            self._large.append(_LargeRun(now, work_s, took_s, b, k, max(1.0, took_s / (b + k * work_s))))
        else:
            self._small_s = work_s
        while self._large and self._large[0].at < now - _REMEMBERED_S:
            self._large.popleft()
        self._lines = [] if self._large else [(0.0, self.planned_s, 1.0)]
        for one in self._large:
            then_s = (one.intercept_s + one.slope * self._small_s) * one.over
            more_s = b + k * self._small_s - then_s
            slower = max(1.0, 1 + more_s / max(then_s, _RELEVANT * self.slo_s))
            slope = max(1.0, one.took_s / (self.planned_s + one.work_s))
            self._lines.append((one.work_s, slower * one.took_s, slower * slope))

    def _adapt(self, answers: Sequence[tuple[float, float]], excess_s: float, weight: float) -> None:
        """The margin, by these answers. What the line explains by now is no error: `excess_s` is the rest."""
        unexplained_s, self._excess_s = excess_s + self._excess_s, excess_s  # of this run and the one before
        if not answers or unexplained_s > _HOPELESS * self.slo_s:
            self._covered += weight
            return
        long_s, m = _LONG_ANSWER * self.slo_s, self._conformal
        missed = sum(min(actual - said, unexplained_s) > m * max(said, long_s) for said, actual in answers)
        share = sum(said for said, _ in answers) / len(answers) / self.slo_s
        self._covered += (share := share if share > _RELEVANT else 0.0)
        m = m + _GAIN * missed / len(answers) if missed else m - _GAIN * _AIM * share
        if self._outliers >= _CHANGED:  # the line knows it now
            m = min(m, self._unchanged)
        self._conformal = min(_MOST_MARGIN, max(_LEAST_MARGIN, m))

    def _publish(self) -> None:
        few = _FEW_MARGIN - (_FEW_MARGIN - _LEAST_MARGIN) * min(1.0, self._covered / _FEW)
        self.margin = min(_MOST_MARGIN, max(self._conformal, few, _DEVIATIONS * self._deviation))
        self._trusted_s = max(self._largest_s, _TRUSTED * self.slo_s)
        self.intercept_s, self.slope = self._spell * self._b, self._spell * self._k
