"""Adds gRPC services to Serve's server, as generated `add_..._to_server` functions do, and corrects two flaws of Serve.

Serve replaces the handlers of a service (`_method_handlers`) with its own. These send headers before a refusal, as
before an answer; and they take a stream's status from a context only if a message comes with it. Wrappers around
Serve's handlers correct both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from operator import methodcaller
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from deployments.admission.door import VISITS, Source
from deployments.errors import InvalidInput

_RETRIED = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
PROXY = "x-windve-proxy"  # metadata: host and process of the HAProxy that sent the call
TIME_LEFT = "windve-time-left-ms"  # metadata: the time left to a stream's deadline, which Serve hides

_GOOD = {None, 0, grpc.StatusCode.OK}  # gRPC's values before and after Serve has set the status

T = TypeVar("T")

_MAKERS = {  # by whether the client streams, and whether the server does
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def offer(
    services: Mapping[ServiceDescriptor, Sequence[MethodDescriptor]], servicer: Any, server: grpc.aio.Server
) -> None:
    """Add services to a server. `servicer` has a method for each call. `reader` parses the messages."""
    for service, methods in services.items():
        handlers = {f"/{service.full_name}/{method.name}": _handler(servicer, method) for method in methods}
        server.add_generic_rpc_handlers((_Handlers(service.full_name, handlers),))


class _Handlers(grpc.ServiceRpcHandler):
    """A service's handlers. Serve puts its own into `_method_handlers`."""

    def __init__(self, name: str, handlers: dict[str, Any]) -> None:
        self._name = name
        self._method_handlers = handlers
        self._ready: dict[str, Any] = {}

    def service_name(self) -> str:
        return self._name

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        if method not in self._ready and method in self._method_handlers:
            handler = self._method_handlers[method]
            streams = (handler.request_streaming, handler.response_streaming)  # Serve sets all four kinds of method
            if streams == (False, False):
                handler = handler._replace(unary_unary=_counted(_at_once(handler.unary_unary)))
            elif streams == (False, True):
                waits = method.endswith("/Watch")
                handler = handler._replace(
                    unary_stream=_counted_stream(_with_its_status(handler.unary_stream), waits=waits)
                )
            elif streams == (True, False):
                handler = handler._replace(stream_unary=_counted(handler.stream_unary, waits=True))
            else:
                handler = handler._replace(stream_stream=_counted_stream(handler.stream_stream, waits=True))
            self._ready[method] = handler
        return self._ready.get(method)


def _counted(answer: Callable[[Any, Any], Awaitable[T]], *, waits: bool = False) -> Callable[[Any, Any], Awaitable[T]]:
    """Count the call for the Router's door. `waits`: it waits for its client most of the time."""

    async def call(request: Any, context: Any) -> T:
        with VISITS.visit(_source(context)), VISITS.wait() if waits else nullcontext():
            return await answer(request, context)

    return call


def _counted_stream(
    answer: Callable[[Any, Any], AsyncGenerator[T, None]], *, waits: bool = False
) -> Callable[[Any, Any], AsyncGenerator[T, None]]:
    """As `_counted`, for calls with a stream of answers."""

    async def call(request: Any, context: Any) -> AsyncGenerator[T, None]:
        with VISITS.visit(_source(context)), VISITS.wait() if waits else nullcontext():
            async with aclosing(answer(request, context)) as messages:
                async for message in messages:
                    yield message

    return call


def _source(context: Any) -> Source:
    """gRPC, and the host of the HAProxy that sent the call."""
    host = next((value for key, value in context.invocation_metadata() or () if key == PROXY), "")
    return "grpc", host.encode()


def _at_once(answer: Callable[[Any, Any], Awaitable[bytes]]) -> Callable[[Any, Any], Awaitable[bytes]]:
    """Send a refusal without headers before it. To gRPC's retries, headers mean an answer (gRFC A6, "committed")."""

    async def call(request: Any, context: Any) -> bytes:
        reply = await answer(request, context)
        if context.code() in _RETRIED:
            await _end(context)
        return reply

    return call


def _with_its_status(answer: Callable[[Any, Any], AsyncGenerator[bytes, None]]) -> Callable[[Any, Any], Any]:
    """Send a stream's error status. After an error, the stream's last message is empty, and the context has the status.

    The empty message is not sent. Raising an exception instead would lose the metadata, and Serve would log a
    traceback.
    """

    async def call(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        async with aclosing(answer(request, _Timed(context))) as messages:
            async for message in messages:
                if message:
                    yield message
        if context.code() not in _GOOD:
            await _end(context)

    return call


async def _end(context: Any) -> None:
    """End the call with the error status that the context has."""
    if context.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        await VISITS.hold(_source(context))
    await context.abort(context.code(), context.details(), context.trailing_metadata())


class _Timed:
    """A call's context that adds the time left to the deadline to its metadata."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        metadata = [(key, value) for key, value in self._context.invocation_metadata() if key != TIME_LEFT]
        left_s = self._context.time_remaining()
        return metadata if left_s is None else [*metadata, (TIME_LEFT, str(int(left_s * 1000)))]


def _handler(servicer: Any, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    return _MAKERS[method.client_streaming, method.server_streaming](
        getattr(servicer, method.name),
        request_deserializer=reader(GetMessageClass(method.input_type)),
        response_serializer=methodcaller("SerializeToString"),
    )


def reader(kind: type[Message]) -> Callable[[bytes], Message | InvalidInput]:
    """A parser of messages. It returns an error instead of raising it, since gRPC would answer UNKNOWN and log it."""
    name = kind.DESCRIPTOR.full_name

    def read(raw: bytes) -> Message | InvalidInput:
        try:
            return kind.FromString(raw)
        except DecodeError:
            return InvalidInput(f"these {len(raw)} bytes are not a {name}: no protobuf, or a text that is not UTF-8")

    return read
