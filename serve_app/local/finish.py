"""Lets requests in flight finish before `windve serve` stops, while HAProxy refuses new ones."""

from __future__ import annotations

import re
import socket
import time

from rich.console import Console

from deployments.serve_adapter.local_ray import haproxy_socket
from serve_app.stop_signal import StopSignal

LONGEST_S = 30.0  # longer than usual SLOs; bulk requests and generations that take longer are cut
_ANSWER_S = 1.0
_REFUSE = "experimental-mode on; set var proc.stops bool(true)"  # serve_adapter/haproxy.sh


def finish_requests(stop: StopSignal, console: Console) -> None:
    """Return once no request is in flight, at the next signal, or after `LONGEST_S`. Without HAProxy, at once. Requests
    of a HAProxy that was just replaced are not waited for: nobody can ask it.
    """
    console.print("stopping")
    stop.forget()
    ends, said = time.monotonic() + LONGEST_S, False
    while haproxy_socket() and time.monotonic() < ends:
        try:
            count = _in_flight()
        except OSError:  # it is slow, or is just being replaced
            count = None
        if count == 0:
            return
        if count and not said:
            console.print(f"waiting up to {LONGEST_S:.0f} s for requests in flight ({count}); Ctrl-C again cuts them")
            said = True
        if stop.wait(0.1):
            return


def _ask(command: str) -> str:
    """HAProxy's answer. Raises OSError if there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(haproxy_socket())
        connection.sendall(command.encode() + b"\n")
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def _in_flight() -> int:
    """Requests that HAProxy has passed to Routers: it counts them by API key (serve_adapter/haproxy.sh)."""
    _ask(_REFUSE)  # each time, because one that has just started does not know yet
    tables = re.findall(r"table: (\S+),", _ask("show table"))
    entries = ";".join(f"show table {table}" for table in tables)
    return sum(map(int, re.findall(r"conn_cur=(\d+)", _ask(entries)))) if tables else 0
