"""Lets requests in flight finish before `windve serve` stops, while HAProxy refuses new ones."""

from __future__ import annotations

import re
import socket
import time

from rich.console import Console

from deployments.serve_adapter.local_ray import haproxy_socket
from serve_app.stop_signal import StopSignal

LONGEST_S = 30.0  # more than an SLO; bulk requests and generations may take longer, and are cut then
_ANSWER_S = 1.0
_REFUSE = "experimental-mode on; set var proc.stops bool(true)"  # serve_adapter/haproxy.sh


def finish_requests(stop: StopSignal, console: Console) -> None:
    """Return once no request is in flight, at the next signal, or after `LONGEST_S`. Without HAProxy, at once."""
    console.print("stopping")
    stop.forget()
    try:
        _ask(_REFUSE)
        ends, said = time.monotonic() + LONGEST_S, False
        while (count := _in_flight()) and time.monotonic() < ends:
            if not said:
                console.print(f"{count} in flight: waiting for up to {LONGEST_S:.0f} s; Ctrl-C again ends them")
                said = True
            if stop.wait(0.1):
                return
    except OSError:
        return


def _ask(command: str) -> str:
    """HAProxy's answer. Raises OSError if there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(haproxy_socket())
        connection.sendall(command.encode() + b"\n")
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def _in_flight() -> int:
    """Queries that Routers have: those that HAProxy counts by API key (serve_adapter/haproxy.sh)."""
    tables = re.findall(r"table: (\S+),", _ask("show table"))
    entries = ";".join(f"show table {table}" for table in tables)
    return sum(map(int, re.findall(r"conn_cur=(\d+)", _ask(entries)))) if tables else 0
