"""Tells how long a request waited before this process read it. Pure."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

START = b"x-request-start"  # by HAProxy (haproxy.sh): "t=", Unix time in us, " ", its host, " ", its process
_HERE = socket.gethostname().encode()
_DIGITS = 16  # until the year 2286


def waited_s(headers: Mapping[bytes, bytes], clock: Callable[[], float] = time.time) -> float:
    """Seconds since HAProxy had the whole request; a busy Router reads it later. 0 if HAProxy is on another host, whose
    clock may differ, and if a client made the header up.
    """
    at, _, proxy = headers.get(START, b"").removeprefix(b"t=").partition(b" ")
    if proxy.partition(b" ")[0] != _HERE or not (at.isdigit() and len(at) <= _DIGITS):
        return 0.0
    return max(0.0, clock() - int(at) / 1e6)
