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
    """

    seconds: float = 0.0  # the estimate, at most a quarter of the SLO
    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _until: float = 0.0  # the last sample is complete

    def heard(self, now: float, transit_s: float, slo_s: float) -> float:
        """An answer came and was so long on its way. Returns the estimate."""
        if now >= self._until:
            self._samples.append(transit_s)
            self._until = now + _SAMPLE * slo_s
        elif transit_s > self._samples[-1]:
            self._samples[-1] = transit_s
        else:
            return self.seconds
        longest = sorted(self._samples)
        self.seconds = min(max(0.0, longest[-2 if len(longest) > 1 else 0]), _LONGEST * slo_s)
        return self.seconds
