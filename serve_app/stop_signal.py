"""Waits for Ctrl-C in a way that cannot miss it."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType

_TURN_S = 0.2


class StopSignal:
    """Remembers the first SIGINT or SIGTERM after `listen`. For the main thread.

    The kernel may deliver a process's signal to any of its threads, and does so while the main thread already has one
    pending. Python then notes the signal there, and runs the handler in the main thread as soon as that runs Python
    again. A main thread in `threading.Event.wait()` never does: the signal is lost until the next one. So `wait` sleeps
    in turns. The handler sets an attribute and takes no lock, which the thread that it interrupts might hold.
    """

    def __init__(self) -> None:
        self._came = False

    def listen(self) -> None:
        """Handles both signals from here on. Libraries put handlers of their own in place: call it again after them."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True

    def wait(self, timeout_s: float = math.inf) -> bool:
        """True once a signal came, False if none came in `timeout_s`."""
        ends = time.monotonic() + timeout_s
        while not self._came and (left_s := ends - time.monotonic()) > 0:
            time.sleep(min(left_s, _TURN_S))
        return self._came
