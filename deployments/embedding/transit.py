"""How long queries are on their way to the replicas and back, as far as a Router can tell. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_SAMPLE = 0.1  # of the SLO: the longest of the answers that came within it is one sample
_SAMPLES = 20
_LONGEST = 0.25  # of the SLO


@dataclass(slots=True)
class Transit:
    """Of the last 20 samples the longest but one: a stall holds up the answers of one sample, and says little of the
    next query's way. The last of many answers that arrive together have the longest transit, so these are one sample.

    A burst makes the Router busy, and the first answers to it wait for the Router. The last ones, which could be late,
    do not. So an answer in the second half of its time counts before all that come earlier.
    """

    seconds: float = 0.0  # the estimate, at most a quarter of the SLO
    _samples: deque[tuple[bool, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _until: float = 0.0  # the last sample is complete

    def heard(self, now: float, transit_s: float, slo_s: float, *, near: bool) -> float:
        """An answer came, in the second half of its time (`near`) or before, and was so long on its way. Returns the
        estimate.
        """
        sample = (near, transit_s)
        if now >= self._until:
            self._samples.append(sample)
            self._until = now + _SAMPLE * slo_s
        elif sample > self._samples[-1]:
            self._samples[-1] = sample
        else:
            return self.seconds
        decisive = max(self._samples)[0]
        longest = sorted(seconds for near, seconds in self._samples if near == decisive)
        self.seconds = min(max(0.0, longest[-2 if len(longest) > 1 else 0]), _LONGEST * slo_s)
        return self.seconds
