"""Waits for Ctrl-C in a way that cannot miss it."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType

_TURN_S = 0.2


class StopSignal:
    """Remembers the first SIGINT or SIGTERM after `listen`. For the main thread.

    The kernel may deliver a process's signal to any thread, and does so while the main thread already has one pending.
    Python then runs the handler in the main thread, but only once that thread runs Python code again. A main thread
    that blocks in `threading.Event.wait()` never does, so the signal would be lost until the next one. Therefore `wait`
    sleeps in short intervals. The handler sets an attribute and takes no lock, because the interrupted thread might
    hold it.
    """

    def __init__(self) -> None:
        self._came = False

    def listen(self) -> None:
        """Handle both signals from now on. Call it again after a library has installed its own handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def forget(self) -> None:
        """Forget the signal, so that `wait` waits for the next one."""
        self._came = False

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True

    def wait(self, timeout_s: float = math.inf) -> bool:
        """True once a signal has arrived; False if none arrives within `timeout_s`."""
        ends = time.monotonic() + timeout_s
        while not self._came and (left_s := ends - time.monotonic()) > 0:
            time.sleep(min(left_s, _TURN_S))
        return self._came
