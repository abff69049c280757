"""Learns from each run how slow the device is now (slowdown), and how wrong predictions are (margin). Pure.

`admission/predictor.py`, which embeddings go by, was tried in its place: a line through beta and the rest of a step. In
virtual time, over 30 streams of 20 s, it had 9 first tokens late in place of 18 (of 3,300; all in slow spells) and
as many tokens in time (+0.4 %), but 12 % fewer in bursts behind light load, and 4 % where the model said half of the
time that steps took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

_UP_AT_MOST = 1.5  # times as slow by one observation: an outlier is not the rule, a slow device is known after two
_DOWN_SHARE = 0.25  # of the way down by one observation: a device that was slow once may be so again
_SLOWEST, _QUICKEST = 50.0, 0.02
_QUANTILE = 0.995
_KEPT, _FEW = 2000, 200  # errors that the quantile is taken of; fewer are no proof
_LEAST_MARGIN = 0.02
_WIDE_MARGIN = {True: 0.05, False: 0.10}  # while there are few errors: calibrated or not
_LARGEST_MARGIN = 0.3
_CHANGED = 1.1  # times the slowdown before: not noise, the device is slower


@dataclass(slots=True)
class Learning:
    """`slowdown`: actual over planned seconds of the latest work. `margin`: what is added to a prediction, as a share.

    The slowdown goes up at once and down slowly: a mean over runs would leave many late when a device slows down. The
    margin is the 99.5 % quantile of the relative errors of predictions at admission, not less than 2 %.
    """

    calibrated: bool = False
    slowdown: float = 1.0
    margin: float = field(init=False)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _latest: tuple[float, float] = (1.0, 1.0)  # actual over planned, of the last work and that before
    _planned_s: float = 0.0
    _actual_s: float = 0.0
    _new_errors: int = 0

    def __post_init__(self) -> None:
        self.margin = _WIDE_MARGIN[self.calibrated]

    def worked(self, planned_s: float, actual_s: float, *, least_s: float, probe: bool = False) -> None:
        """Work that was planned as `planned_s` took `actual_s`. Short pieces are summed up until `least_s` is planned:
        a hiccup of milliseconds says nothing. `probe`: it was let in to see whether the slowdown is still true.
        """
        self._planned_s += planned_s
        self._actual_s += actual_s
        if self._planned_s < least_s or self._planned_s <= 0:
            return
        ratio = self._actual_s / self._planned_s
        self._latest = ratio, self._latest[0]
        self._planned_s = self._actual_s = 0.0
        if ratio > self.slowdown:
            self.slowdown = min(ratio, _UP_AT_MOST * self.slowdown, _SLOWEST)
        elif probe:
            self.slowdown = max(ratio, _QUICKEST)
        else:
            self.slowdown = max(self.slowdown + _DOWN_SHARE * (ratio - self.slowdown), _QUICKEST)

    def answered(self, predicted_s: float, actual_s: float, slowdown: float) -> None:
        """A query was answered `actual_s` after admission, which had predicted `predicted_s` with that `slowdown`.

        The error is ignored where the device has become slower since. The slowdown covers that, and the error would
        keep the margin wide for long.
        """
        if max(self.slowdown, *self._latest) > _CHANGED * slowdown:
            return
        self.errors.append(actual_s / predicted_s - 1)
        self._new_errors += 1
        if self._new_errors >= max(16, len(self.errors) // 20):
            self._new_errors = 0
            worst = float(np.quantile(self.errors, _QUANTILE))
            least = _LEAST_MARGIN if len(self.errors) >= _FEW else _WIDE_MARGIN[self.calibrated]
            self.margin = min(max(worst, least), _LARGEST_MARGIN)
