"""When those who are told busy should come back: not all at once. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

_RETURNING = 0.5  # of those who are told, about so many come back; the others leave their moment to somebody else


@dataclass(slots=True)
class Comebacks:
    """One Router's. An opening admits so many queries as its room holds, and then one after the other as the devices
    work. So whoever is refused is told a moment behind those who were told before. The line is an SLO long at most, and
    then begins anew: not all of them come, and who comes too early is told again.
    """

    _line_at: float = 0.0  # the work of all who were told is done, if it begins as the devices open

    def wait_s(self, now: float, opens_s: float, *, work_s: float, room_s: float, slo_s: float) -> float:
        """Seconds until a query should come back that takes the devices together `work_s`. They open in `opens_s`, and
        have room for `room_s` then.
        """
        opens_at = now + opens_s
        line_at = max(self._line_at, opens_at)
        if line_at - room_s > opens_at + slo_s:
            line_at = opens_at
        self._line_at = line_at + _RETURNING * work_s
        return max(opens_s, line_at - room_s - now)
