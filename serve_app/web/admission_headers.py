"""How long a request may take and how urgent it is, by its headers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.admission import trial
from deployments.admission.trial import Trial
from deployments.errors import InvalidInput

PRIORITY, TIMEOUT = "x-windve-priority", "x-request-timeout-ms"


_PRIORITY, _TIMEOUT, _TRIAL = PRIORITY.encode(), TIMEOUT.encode(), trial.HEADER.encode()


_TIMEOUT_DIGITS = 9  # eleven days


def admission(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """What a request's headers ask of `Router.embed` beyond what is usual: to be admitted as bulk, or by the depths of
    a trial, and how long to wait. Raises InvalidInput.
    """
    asked: dict[str, Any] = {}
    priority, own, timeout = headers.get(_PRIORITY), headers.get(_TRIAL), headers.get(_TIMEOUT)
    if priority is not None:
        if priority not in {b"bulk", b"normal"}:
            raise InvalidInput(f"the header {PRIORITY} may be 'bulk' or 'normal', not '{priority.decode('latin-1')}'")
        asked["bulk"] = priority == b"bulk"
    if own is not None:
        asked["trial"] = Trial.parse(own.decode("latin-1"))
    if timeout is not None:
        if not (timeout.isdigit() and len(timeout) <= _TIMEOUT_DIGITS and int(timeout)):
            given = timeout.decode("latin-1")
            raise InvalidInput(f"the header {TIMEOUT} should be whole milliseconds from 1, not '{given}'")
        asked["timeout_s"] = int(timeout) / 1000
    return asked
