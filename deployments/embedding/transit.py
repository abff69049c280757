"""Estimates how long queries take on the way to the replicas and back. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_SAMPLE = 0.1  # of the SLO: the longest transit within this time is one sample
_SAMPLES = 20
_LONGEST = 0.25  # of the SLO: the largest estimate


@dataclass(slots=True)
class Transit:
    """The estimate is the second-longest of the last 20 samples: a stall delays the answers of one sample, and says
    little about the next query. A sample is the longest transit in a short period, because when many answers arrive
    together, the last of them take longest.

    A burst keeps the Router busy, and the first answers to it wait for the Router. The last ones, which could be late,
    do not. So if there are answers that came in the second half of their time, only these count, in a sample and among
    samples.
    """

    seconds: float = 0.0  # the estimate, at most a quarter of the SLO
    _samples: deque[tuple[bool, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _until: float = 0.0  # when the last sample is complete

    def heard(self, now: float, transit_s: float, slo_s: float, *, near: bool) -> float:
        """Take an answer's transit time. `near`: it came in the second half of its time. Returns the estimate."""
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
