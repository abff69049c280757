"""Waits for Ctrl-C, then lets requests in flight finish before `windve serve` stops, while HAProxy refuses new ones."""

from __future__ import annotations

import math
import re
import signal
import socket
import time
from types import FrameType

from rich.console import Console

from deployments.serve_adapter.local_ray import haproxy_socket

LONGEST_S = 30.0  # longer than usual SLOs; bulk requests and generations that take longer are cut
_ANSWER_S, _SILENT_S = 1.0, 3.0  # the longest wait for an answer of HAProxy; it is gone after so long without one
_REFUSE = "experimental-mode on; set var proc.stops bool(true)"  # serve_adapter/haproxy.sh
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


def finish_requests(stop: StopSignal, console: Console) -> None:
    """Return once no request is in flight, at the next signal, or after `LONGEST_S`. Without HAProxy, at once. Requests
    of a HAProxy that was just replaced are not waited for: nobody can ask it.
    """
    console.print("stopping")
    stop.forget()
    path, said, heard_at = haproxy_socket(), False, time.monotonic()
    ends = heard_at + LONGEST_S
    while path and time.monotonic() < min(ends, heard_at + _SILENT_S):
        try:
            count = _in_flight(path)
        except OSError:  # it is slow, or is just being replaced
            pass
        else:
            heard_at = time.monotonic()
            if not count:
                return
            if not said:
                console.print(
                    f"waiting up to {LONGEST_S:.0f} s for requests in flight ({count}); Ctrl-C again cuts them"
                )
                said = True
        if stop.wait(0.1):
            return


def _in_flight(path: str) -> int:
    """Requests that HAProxy has passed to Routers: it counts them by API key (serve_adapter/haproxy.sh)."""
    _ask(path, _REFUSE)  # each time, because one that has just started does not know yet
    tables = re.findall(r"table: (\S+),", _ask(path, "show table"))
    entries = ";".join(f"show table {table}" for table in tables)
    return sum(map(int, re.findall(r"conn_cur=(\d+)", _ask(path, entries)))) if tables else 0


def _ask(path: str, command: str) -> str:
    """HAProxy's answer. Raises OSError if there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(path)
        connection.sendall(command.encode() + b"\n")
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()
