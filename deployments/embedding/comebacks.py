"""When refused clients should come back: each at a different time. Pure: the time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LONGEST = 30.0  # SLOs: the longest wait
_FORGOTTEN = 1.0  # SLOs without a refusal after which the line ends: whoever came found room
_RETURNING = 0.5  # the share of clients that are expected to come back to an opening for many


@dataclass(slots=True)
class Comebacks:
    """A Router's virtual line of refused clients. Each is told to come back when the devices will have done the work of
    all those before it in the line. The line ends when nobody has been refused for a while.

    A device that answers at the end of its run opens for many clients at once, and then for none until its next
    opening. It needs many at that moment. So the line behind such an opening is at most an SLO long, and then starts
    again.
    """

    _line_at: float = -math.inf  # when the work of everyone in the line is done
    _refused_at: float = -math.inf

    def wait_s(self, now: float, opens_s: float, *, work_s: float, room_s: float, slo_s: float) -> float:
        """Seconds until a refused query should come back.

        - `work_s`: how long all devices together need for it.
        - `opens_s`: when there is room for it if nobody else comes.
        - `room_s`: the work that they open for at once, in seconds of all devices; 0 if room grows gradually.
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
