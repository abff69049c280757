"""Lets requests in flight finish before `windve serve` stops, while HAProxy refuses new ones."""

from __future__ import annotations

import re
import socket
import time

from rich.console import Console

from deployments.serve_adapter.local_ray import haproxy_socket
from serve_app.stop_signal import StopSignal

LONGEST_S = 30.0  # longer than usual SLOs; bulk requests and generations that take longer are cut
_ANSWER_S, _SILENT_S = 1.0, 3.0  # the longest wait for an answer of HAProxy; it is gone after so long without one
_REFUSE = "experimental-mode on; set var proc.stops bool(true)"  # serve_adapter/haproxy.sh


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
