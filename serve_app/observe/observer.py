"""Follows requests from arrival to end, for the access log and for traces. If both are off, `on` is False and nothing
here is called.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from typing import Protocol, TypeVar

from deployments.errors import WindveError
from serve_app.observe.access_log import Level, LineWriter, is_wanted, line
from serve_app.observe.facts import EndedRequest, TracedRequest, trace_id
from serve_app.observe.tracer import Tracer

T = TypeVar("T")
U = TypeVar("U")

START = b"x-request-start"  # by HAProxy (haproxy.sh): "t=", Unix time in us, " ", its host, " ", its process
_HERE = socket.gethostname().encode()
_DIGITS = 16  # until the year 2286
REQUEST_ID, TRACEPARENT = "x-request-id", "traceparent"
_REQUEST_ID, _TRACEPARENT = REQUEST_ID.encode(), TRACEPARENT.encode()
_AN_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # any other id from a client is ignored
_A_PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C Trace Context, section 3.2

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ONE_MODEL = "/v1/models/"  # followed by a model's name
_CURRENT: ContextVar[TracedRequest | None] = ContextVar("traced", default=None)
_HUNG_UP = 499  # nginx's status for a client that disconnected
_BROKEN = 500


class LogRules(Protocol):
    """The part of a Router's `user_config` that is used here."""

    @property
    def access_log(self) -> Level: ...

    @property
    def slo_s(self) -> float: ...


class Observer:
    """Observes the requests of one Router replica. `on`: requests are logged or traced. `routes`: the paths that appear
    by name. All others appear as `other`, because a client may put any text there.
    """

    def __init__(
        self, lines: LineWriter | None = None, tracer: Tracer | None = None, routes: Collection[str] = ()
    ) -> None:
        self.on = tracer is not None
        self._lines, self._tracer, self._routes = lines, tracer, frozenset(routes)
        self._logs = False
        self._configs: Mapping[str, LogRules] = {}
        self._level: Level = "off"
        self._slo_s = 0.0

    def configure(self, configs: Mapping[str, LogRules]) -> None:
        """Apply these rules, by model name. The first one applies to requests that name no model."""
        self._configs = configs
        first = next(iter(configs.values()))
        self._level, self._slo_s = first.access_log, first.slo_s
        self._logs = any(config.access_log != "off" for config in configs.values())
        self.on = self._logs or self._tracer is not None

    def begin(self, headers: Mapping[bytes, bytes]) -> TracedRequest | None:
        """A request has arrived. `headers`: HTTP's, or gRPC's metadata. None if it is neither logged nor traced."""
        waiting_s = waited_s(headers)
        began_s, started = time.time() - waiting_s, asyncio.get_running_loop().time() - waiting_s
        span = None if self._tracer is None else self._tracer.begin(headers, began_s)
        if span is None and not self._logs:
            return None
        parent = _A_PARENT.fullmatch(headers.get(_TRACEPARENT, b""))
        return TracedRequest(
            request_id=request_id(headers),
            trace_id=trace_id(span) if span is not None else None if parent is None else parent[1].decode(),
            began_s=began_s,
            started=started,
            span=span,
        )

    def end_http(self, traced: TracedRequest, method: str, path: str, status: int, error: BaseException | None) -> None:
        """The request was answered with this status."""
        route = path if path in self._routes else f"{ONE_MODEL}{{name}}" if path.startswith(ONE_MODEL) else "other"
        self._end(traced, f"{method if method in _METHODS else 'OTHER'} {route}", status, error)

    def break_http(self, traced: TracedRequest | None, method: str, path: str, error: BaseException) -> None:
        """The request ended without an answer: the client disconnected, or there is a defect."""
        if traced is not None:
            status = _HUNG_UP if isinstance(error, asyncio.CancelledError) else _BROKEN
            self.end_http(traced, method, path, status, error)

    def begin_call(self, metadata: Mapping[bytes, bytes]) -> TracedRequest | None:
        """A gRPC call, or a message of a stream, has arrived. `current_request` returns it from now on."""
        traced = self.begin(metadata)
        _CURRENT.set(traced)
        return traced

    def end_call(self, traced: TracedRequest, call: str, error: BaseException | None) -> None:
        """The call was answered, or failed with this error. `call`: its full name."""
        self._end(traced, call, _grpc_status(error), error)

    def tracing_each(
        self, call: str, metadata: Mapping[bytes, bytes], answer: Callable[[T], Awaitable[U]]
    ) -> Callable[[T], Awaitable[U]]:
        """Wrap `answer`, which answers one message of a stream, so that each message is traced."""

        async def trace(message: T) -> U:
            traced = self.begin_call(metadata)
            problem: BaseException | None = None
            try:
                return await answer(message)
            except BaseException as error:
                problem = error
                raise
            finally:
                if traced is not None:
                    self.end_call(traced, call, problem)

        return trace

    def _end(self, traced: TracedRequest, route: str, status: int | str, error: BaseException | None) -> None:
        ended = EndedRequest(route, status, asyncio.get_running_loop().time() - traced.started, error)
        if traced.tenant is None and traced.facts is not None:
            traced.tenant = traced.facts.tenant  # in a stream, each message checks its client
        config = self._configs.get(traced.model or "")
        level, slo_s = (self._level, self._slo_s) if config is None else (config.access_log, config.slo_s)
        if self._lines is not None and is_wanted(level, traced, ended, slo_s):
            self._lines.add(line(traced, ended))
        if self._tracer is not None and traced.span is not None:
            self._tracer.end(traced, ended)


def waited_s(headers: Mapping[bytes, bytes], clock: Callable[[], float] = time.time) -> float:
    """Seconds since HAProxy had the whole request; a busy Router reads it later. 0 if HAProxy is on another host, whose
    clock may differ, and if a client made the header up.
    """
    at, _, proxy = headers.get(START, b"").removeprefix(b"t=").partition(b" ")
    if proxy.partition(b" ")[0] != _HERE or not (at.isdigit() and len(at) <= _DIGITS):
        return 0.0
    return max(0.0, clock() - int(at) / 1e6)


def request_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The client's request id, if it has only characters that are safe in a log."""
    found = headers.get(_REQUEST_ID, b"")
    return found.decode() if _AN_ID.fullmatch(found) else None


def current_request() -> TracedRequest | None:
    """The gRPC call or stream message that the current task answers."""
    return _CURRENT.get()


def _grpc_status(error: BaseException | None) -> str:
    match error:
        case None:
            return "OK"
        case WindveError():
            return error.grpc_status
        case asyncio.CancelledError():
            return "CANCELLED"
    return "UNKNOWN"
