"""When those who are told busy should come back: each at a moment of its own. Pure: the time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LONGEST = 30.0  # SLOs: nobody is told to come back later
_FORGOTTEN = 1.0  # SLOs without a refusal: whoever came found room, and the line is over
_RETURNING = 0.5  # of those who are told of an opening for many: the others leave their moment to somebody else


@dataclass(slots=True)
class Comebacks:
    """One Router's line of those who were refused. Whoever is refused is told the moment at which the devices have done
    the work of all who were told before. While nobody is refused the line ends.

    A device that answers at its run's end opens for many at once, and then for nobody until its next opening. It needs
    many then: the line behind such an opening is an SLO long at most, and begins anew.
    """

    _line_at: float = -math.inf  # the work of all who were told is done
    _refused_at: float = -math.inf

    def wait_s(self, now: float, opens_s: float, *, work_s: float, room_s: float, slo_s: float) -> float:
        """Seconds until a query should come back that takes the devices together `work_s`. There is room for it in
        `opens_s`, if nobody else comes. `room_s`: what they open for at once, in seconds of all; 0: room grows.
        """
        opens_at = now + opens_s
        if room_s:
            place = max(self._line_at, opens_at)
            if place - room_s > opens_at + slo_s:
                place = opens_at
            work_s *= _RETURNING
        elif now - self._refused_at <= _FORGOTTEN * slo_s:
            place = max(opens_at, min(self._line_at, now + _LONGEST * slo_s))
        else:
            place = opens_at
        self._refused_at, self._line_at = now, place + work_s
        return max(opens_s, place - room_s - now)
