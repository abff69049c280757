"""How busy a thread is: the share of time in which it ran or waited for a core. Pure, except for `read_busy_s`.

A Router works in the thread of its event loop. If this thread is always busy, requests wait for it in sockets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_NS = 1e-9
_OVER_S = 1.0  # a share covers at least this much time
_STEP_S = 0.1  # between two readings that are kept


def read_busy_s(schedstat: Path = _SCHEDSTAT) -> float:
    """Seconds in which the calling thread ran or waited for a core since its start.

    Linux counts both (`/proc/thread-self/schedstat`: ns that it ran, ns that it waited, time slices). Without this
    file it returns the CPU time alone.
    """
    try:
        ran_ns, waited_ns = map(int, schedstat.read_bytes().split()[:2])
    except (OSError, ValueError):
        return time.thread_time()
    return (ran_ns + waited_ns) * _NS


class BusyMeter:
    """Measures how busy a thread is. Make it and read it in this thread.

    `read`: seconds in which the thread was busy since its start; `clock`: s on any clock.
    """

    def __init__(self, read: Callable[[], float] = read_busy_s, clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._readings = deque([(clock(), read())])

    @property
    def share(self) -> float:
        """The thread's busy time over all time, in [0, 1], since the last reading that is a second old or older. If
        there is none yet, since this meter was made.
        """
        now, busy_s = self._clock(), self._read()
        readings = self._readings
        while len(readings) > 1 and readings[1][0] <= now - _OVER_S:
            readings.popleft()
        since, before_s = readings[0]
        if now >= readings[-1][0] + _STEP_S:
            readings.append((now, busy_s))
        return min(1.0, max(0.0, (busy_s - before_s) / (now - since))) if now > since else 0.0
