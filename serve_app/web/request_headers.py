"""Reads from a request's headers how long it may take, how urgent it is, how long it has waited so far, and which
space its client expects. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from deployments.errors import InvalidInput, WrongSpace
from serve_app.observe.observer import START, waited_s

PRIORITY, TIMEOUT = "x-windve-priority", "x-request-timeout-ms"
SPACE, EXPECT_SPACE = "x-windve-space", "x-windve-expect-space"
_PRIORITY, _TIMEOUT, _EXPECT_SPACE = PRIORITY.encode(), TIMEOUT.encode(), EXPECT_SPACE.encode()
_TIMEOUT_DIGITS = 9  # eleven days


def admission(headers: Mapping[bytes, bytes], clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """The fields of a `Request` that the headers set: bulk, how long the request may take, and how
    long it has waited before it reached this process. Raises InvalidInput.
    """
    asked: dict[str, Any] = {}
    if START in headers:
        asked["waited_s"] = waited_s(headers, clock)
    priority, timeout = headers.get(_PRIORITY), headers.get(_TIMEOUT)
    if priority is not None:
        if priority not in {b"bulk", b"normal"}:
            raise InvalidInput(f"the header {PRIORITY} must be 'bulk' or 'normal', not '{priority.decode('latin-1')}'")
        asked["bulk"] = priority == b"bulk"
    if timeout is not None:
        if not (timeout.isdigit() and len(timeout) <= _TIMEOUT_DIGITS and int(timeout)):
            given = timeout.decode("latin-1")
            raise InvalidInput(f"the header {TIMEOUT} must be a whole number of milliseconds from 1, not '{given}'")
        asked["timeout_s"] = int(timeout) / 1000
    return asked


def check_space(headers: Mapping[bytes, bytes], space: str) -> None:
    """Raises WrongSpace if the client expects another space than the model's (`models/space.py`)."""
    expected = headers.get(_EXPECT_SPACE)
    if expected is not None and expected.decode("latin-1") != space:
        raise WrongSpace(
            f"{EXPECT_SPACE} is '{expected.decode('latin-1')}', but this model's space is {space}: do not mix their "
            "vectors in one index"
        )
