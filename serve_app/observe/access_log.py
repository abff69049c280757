"""The access log: one JSON line per request, for the requests that `access_log` selects. No client text. Pure."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from deployments.errors import is_ours
from serve_app.observe.facts import EndedRequest, TracedRequest

logger = logging.getLogger("ray.serve")

Level = Literal["off", "slow", "errors", "all"]
_LEVELS: Mapping[Level, int] = {"off": 0, "slow": 1, "errors": 2, "all": 3}
_EVERY_S = 0.25
_MOST_WAITING = 20_000  # lines, while the disk is slow


def is_wanted(level: Level, traced: TracedRequest, ended: EndedRequest, slo_s: float) -> bool:
    """Whether a level logs this request. `slow`: requests that were late or failed on the server's side. `errors`: all
    of these, and every other error.
    """
    if level == "all":
        return True
    if ended.error is not None:
        ours = is_ours(ended.error) and not isinstance(ended.error, asyncio.CancelledError)
        return _LEVELS[level] >= _LEVELS["slow" if ours else "errors"]
    if level == "off":
        return False
    return ended.actual_s > slo_s if traced.facts is None else traced.facts.is_late(ended.actual_s, slo_s)


def line(traced: TracedRequest, ended: EndedRequest) -> dict[str, Any]:
    """A request's fields in the log. Times are in seconds."""
    common = {
        "time": datetime.fromtimestamp(traced.began_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": traced.request_id,
        "trace_id": traced.trace_id,
        "route": ended.route,
        "status": ended.status,
        "error": ended.code,
        "tenant": traced.tenant,
        "model": traced.model,
        "actual_s": round(ended.actual_s, 6),
    }
    return common if traced.facts is None else common | traced.facts.line()


class LineWriter:
    """Writes lines with a logging handler in a thread, a few times a second, so that a slow disk delays no request."""

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler
        self._lines: list[bytes] = []
        self._dropped = 0
        self._writing = False
        self._thread = ThreadPoolExecutor(1, "access-log")
        handler.handleError = self._failed  # type: ignore[method-assign, assignment]
        self._said = False

    def add(self, told: Mapping[str, Any]) -> None:
        """Write this soon. If too many lines wait, drop it; a separate line reports how many were dropped."""
        if len(self._lines) >= _MOST_WAITING:
            self._dropped += 1
            return
        self._lines.append(orjson.dumps(told))
        if not self._writing:
            self._soon()

    def _soon(self) -> None:
        self._writing = True
        asyncio.get_running_loop().call_later(_EVERY_S, self._write, context=contextvars.Context())

    def _write(self) -> None:
        if not self._lines:
            return  # `close` has written them
        written = asyncio.get_running_loop().run_in_executor(self._thread, self._handler.emit, self._record())
        written.add_done_callback(self._written)

    def _record(self) -> logging.LogRecord:
        """All lines that wait. They wait no longer."""
        lines, self._lines = self._lines, []
        if self._dropped:
            lines.append(orjson.dumps({"dropped": self._dropped}))
            self._dropped = 0
        return logging.makeLogRecord({"msg": b"\n".join(lines).decode()})

    def close(self) -> None:
        """Write the lines that wait, and return when all are written."""
        if self._lines:
            self._thread.submit(self._handler.emit, self._record()).result()

    def _written(self, _: Any) -> None:
        self._writing = False
        if self._lines:
            self._soon()

    def _failed(self, _: logging.LogRecord) -> None:
        """Log a failed write once, instead of a traceback for each. Called in the writing thread."""
        if not self._said:
            self._said = True
            problem = sys.exception()
            logger.error("cannot write the access log (%s); lines are lost until the problem is fixed", problem)
