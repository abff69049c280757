"""The HTTP server side: reads ASGI messages, checks API keys, writes answers and errors.

It uses no framework: a framework's layers cost about as much as everything else that the Router does for a query.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.admission.door import Source, Visits
from deployments.admission.quota import Client
from deployments.errors import BodyTooLarge, Busy, Compressed, Defect, InvalidInput, WindveError
from serve_app.api_keys import ApiKeys
from serve_app.observe.facts import TracedRequest
from serve_app.observe.observer import START, Observer, request_id
from serve_app.web.errors import JSON, Headers, error_answer
from serve_app.web.json_values import LARGE, check_values

PROBES = ("/health", "/ping")  # for load balancers: need no key, and are logged only if refused
_TURN_S = 0.002
_NESTED = (dict, list, np.ndarray)
_DEFECT = "the server failed because of a defect of its own; see its log"
T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]


class ClientGone(Exception):
    """The client has disconnected."""


class ResponseStream(ABC):
    """The body of an answer that is sent while it is produced."""

    @abstractmethod
    async def run(self, gone: asyncio.Task[None], write: Write) -> WindveError | None:
        """Write all of it. Returns the error that broke it off, if any, for the log. `gone` is done once the client has
        disconnected. Raises ClientGone.
        """

    @abstractmethod
    async def close(self) -> None:
        """Call this instead of `run` if the client is gone before the first byte."""


Answer = tuple[Headers, bytes | ResponseStream]  # the headers include the content type, but not the content length


class HttpRequest:
    """An HTTP request, as handlers get it."""

    __slots__ = ("_leaving", "_receive", "client", "content", "headers", "method", "path", "root", "traced")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.root: str = scope.get("root_path", "")  # ASGI puts the application's route prefix there
        self.path: str = scope["path"].removeprefix(self.root) or "/"
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.client: Client | None = None  # set if API keys have names
        self.content: Any = None  # once the body has been read: its bytes, or its parsed JSON
        self.traced: TracedRequest | None = None  # for the access log or a trace
        self._receive = receive
        self._leaving: asyncio.Task[None] | None = None

    async def body(self, largest: int) -> Any:
        """The body, to be parsed by a type of `requests.py`. Raises BodyTooLarge as soon as it exceeds `largest` bytes,
        or if it has too many values, and Compressed.
        """
        if self.content is not None:
            return self.content
        coding = self.headers.get(b"content-encoding", b"identity").decode("latin-1")
        if coding != "identity":
            raise Compressed(
                f"the body is compressed ({coding}), which this server does not support; send it uncompressed"
            )
        problem = f"the body has more bytes than this server accepts ({largest}); send fewer texts at once"
        told = self.headers.get(b"content-length", b"")
        if told.isdigit() and int(told) > largest:
            raise BodyTooLarge(problem)
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise InvalidInput("the connection closed before the whole body arrived")  # nobody reads it
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > largest:
                raise BodyTooLarge(problem)
            more = message.get("more_body", False)
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if len(body) > LARGE:
            await asyncio.to_thread(check_values, body)
        return body

    async def json_object(self, largest: int) -> dict[str, Any] | None:
        """The body if it is a JSON object, else None. `content` keeps it for a type to parse, or to refuse."""
        found = self.content = await self.body(largest)
        if isinstance(found, bytes):
            try:
                found = orjson.loads(found)
            except orjson.JSONDecodeError:
                return None
        if not isinstance(found, dict):
            return None
        self.content = found
        return found

    def named(self, name: str | None) -> str:
        """The end of the answer's id: the body's (`name`), or else x-request-id, or else a new one."""
        return name or request_id(self.headers) or uuid.uuid4().hex

    @property
    def gone(self) -> asyncio.Task[None]:
        """Done once the client has disconnected. Use it only after the body has been read."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        return self._leaving

    async def _leave(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def while_here(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. If the client disconnects, cancel it and raise ClientGone."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            if task.cancel():
                await asyncio.wait({task})

    def end(self) -> None:
        """Stop watching for the client's disconnection."""
        if self._leaving is not None:
            self._leaving.cancel()


Handler = Callable[[HttpRequest], Awaitable[Answer]]


class Asgi(ABC):
    """An ASGI application: checks API keys, and writes answers and errors."""

    def __init__(
        self, api_keys: ApiKeys | None, observer: Observer | None, *, emulated: bool, has_page: bool = False
    ) -> None:
        self._api_keys = api_keys
        self._has_page = has_page
        self._observer = observer or Observer()
        self._headers = [(b"x-windve-emulated", b"true")] if emulated else []

    @abstractmethod
    async def answer(self, request: HttpRequest) -> Answer:
        """Raises WindveError."""

    def route(self, path: str) -> str:
        """The path of a request without the prefix of its model."""
        return path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _not_http(scope, receive, send)
            return
        request = HttpRequest(scope, receive)
        status = 0
        problem: WindveError | None = None
        if self._observer.on:
            request.traced = self._observer.begin(request.headers)
        try:
            if self._api_keys is not None and not self._is_open(request):
                self._let_in(request, self._api_keys)
            headers, body = await self.answer(request)
            status = 200
            if isinstance(body, ResponseStream):
                problem = await self._stream(request, headers, body, send)
        except WindveError as error:
            problem = error
            status, headers, body = error_answer(error, self.route(request.path))
        except ClientGone:
            self._observer.break_http(request.traced, request.method, request.path, asyncio.CancelledError())
            return
        except BaseException as error:
            await self._break(request, error, send, begun=bool(status))
            raise
        finally:
            request.end()
        if request.traced is not None and (problem is not None or request.path not in PROBES):
            self._observer.end_http(request.traced, request.method, request.path, status, problem)
        if isinstance(body, bytes):
            headers += ((b"content-length", b"%d" % len(body)), *self._headers)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if request.method == "HEAD" else body})

    async def _break(self, request: HttpRequest, error: BaseException, send: Send, *, begun: bool) -> None:
        """Answer an unexpected error as a Defect, if no answer has begun. Serve then logs and counts the error."""
        self._observer.break_http(request.traced, request.method, request.path, error)
        if isinstance(error, Exception) and not begun:
            status, headers, body = error_answer(Defect(_DEFECT), self.route(request.path))
            await send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})
            await send({"type": "http.response.body", "body": body})

    def _is_open(self, request: HttpRequest) -> bool:
        """Whether the request needs no key: a probe, or the page, which holds no secrets and asks for a key itself."""
        if request.method not in {"GET", "HEAD"}:
            return False
        return request.path in PROBES or (self._has_page and request.path == "/")

    @staticmethod
    def _let_in(request: HttpRequest, api_keys: ApiKeys) -> None:
        """Raises Unauthorized."""
        shown = request.headers.get(b"authorization")
        request.client = api_keys.check(None if shown is None else shown.decode("latin-1"))
        if request.traced is not None and request.client is not None:
            request.traced.tenant = request.client.tenant.name

    async def _stream(
        self, request: HttpRequest, headers: Headers, body: ResponseStream, send: Send
    ) -> WindveError | None:
        async def write(some: bytes) -> None:
            await send({"type": "http.response.body", "body": some, "more_body": True})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._headers]})
        except BaseException:
            await body.close()
            raise
        problem = await body.run(request.gone, write)
        await send({"type": "http.response.body", "body": b""})
        return problem


def json_answer(content: Any) -> Answer:
    return [JSON], dumps(content)


def dumps(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


async def dumps_in_turns(content: Any) -> bytes:
    """As `dumps`, for large content: yields to other requests every two milliseconds."""
    pieces, until = list[bytes](), 0.0
    for piece in _pieces(content):
        pieces.append(piece)
        if (now := time.perf_counter()) > until:
            await asyncio.sleep(0)
            until = now + _TURN_S
    return b"".join(pieces)


def _pieces(content: Any) -> Iterator[bytes]:
    """The JSON in pieces: a row of numbers, or an object of numbers, is one piece."""
    if isinstance(content, dict) and any(isinstance(value, _NESTED) for value in content.values()):
        for at, (key, value) in enumerate(content.items()):
            yield (b"," if at else b"{") + dumps(key) + b":"
            yield from _pieces(value)
        yield b"}"
    elif isinstance(content, Sequence | np.ndarray) and len(content) and isinstance(content[0], _NESTED):
        for at, item in enumerate(content):
            yield b"," if at else b"["
            yield from _pieces(item)
        yield b"]"
    else:
        yield dumps(content)


async def _not_http(scope: Scope, receive: Receive, send: Send) -> None:
    """Acknowledge the server's start and end; close web sockets."""
    if scope["type"] != "lifespan":
        await send({"type": "websocket.close"})
        return
    message: Message = {"type": ""}
    while message["type"] != "lifespan.shutdown":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})


class Doorway:
    """An ASGI application that counts the requests of `app` for its Router's door (`admission/door.py`), and delays
    refusals. A request that waits for the rest of its body costs the Router nothing.
    """

    def __init__(self, app: ASGIApp, visits: Visits) -> None:
        self._app, self._visits = app, visits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_more, source = False, _source(scope)

        async def receive_part() -> Message:
            nonlocal has_more
            if has_more:
                with self._visits.wait():
                    message = await receive()
            else:  # the first part is there already, and after the last one only the end of the connection comes
                message = await receive()
            has_more = message.get("more_body", False)
            return message

        async def send_part(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == Busy.status:
                await self._visits.hold(source)
            await send(message)

        with self._visits.visit(source):
            await self._app(scope, receive_part, send_part)


def _source(scope: Scope) -> Source:
    """HTTP, and the HAProxy that sent it."""
    start = next((value for name, value in scope["headers"] if name == START), b"")
    return "http", start.partition(b" ")[2]
