"""Learns from each step how slow the device is now (slowdown), and how wrong predictions are (margin). Pure.

`admission/predictor.py`, which embeddings use, was tried instead. In virtual time 12 % fewer tokens were in time in
bursts after light load, and 4 % fewer with a model that said half of the time that steps took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

_UP_AT_MOST = 1.5  # the largest increase by one observation: it may be an outlier, and two show a slow device
_DOWN_SHARE = 0.25  # of the way down by one observation: a device that was slow may soon be slow again
_SLOWEST, _QUICKEST = 50.0, 0.02
_QUANTILE = 0.995
_KEPT, _FEW = 2000, 200  # errors that are kept for the quantile; with fewer than 200 it proves little
_LEAST_MARGIN = 0.02
_WIDE_MARGIN = {True: 0.05, False: 0.10}  # the least margin while there are few errors, calibrated or not
_LARGEST_MARGIN = 0.3
_CHANGED = 1.1  # times the earlier slowdown: more than noise, so the device has become slower


@dataclass(slots=True)
class Learning:
    """`slowdown`: actual over planned seconds of recent work. `margin`: the share that is added to a prediction.

    The slowdown rises at once and falls slowly, because with a mean many answers would be late when a device slows
    down. The margin is the 99.5 % quantile of the relative errors of predictions, at least 2 %.
    """

    calibrated: bool = False
    slowdown: float = 1.0
    margin: float = field(init=False)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _latest: tuple[float, float] = (1.0, 1.0)  # actual over planned, for the last two pieces of work
    _planned_s: float = 0.0
    _actual_s: float = 0.0
    _new_errors: int = 0

    def __post_init__(self) -> None:
        self.margin = _WIDE_MARGIN[self.calibrated]

    def worked(self, planned_s: float, actual_s: float, *, least_s: float, probe: bool = False) -> None:
        """Learn that work planned as `planned_s` took `actual_s`. Short pieces are summed up to `least_s` of planned
        time, since a hiccup of milliseconds says nothing. `probe`: it ran to find out whether the device is still slow.
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
        """Learn that work took `actual_s`, which had been predicted as `predicted_s` with that `slowdown`.

        The error is ignored if the device has become slower since. The slowdown covers that, and the error would keep
        the margin wide for a long time.
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
