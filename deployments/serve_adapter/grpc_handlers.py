"""gRPC services as Serve can carry them: what the generated `add_..._to_server` functions do, and what Serve spoils.

Serve replaces the handlers of a service (`_method_handlers`) by its own. It then sends a refusal as it sends an answer,
behind headers; and it takes a stream's status from a context only where a message comes with it. Both are put right
here, around Serve's handlers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from operator import methodcaller
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from deployments.errors import InvalidInput

_RETRIED = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
TIME_LEFT = "windve-time-left-ms"  # metadata of a stream's context: what its client's deadline leaves; Serve hides it

_GOOD = {None, 0, grpc.StatusCode.OK}  # as gRPC has it before and after Serve has set it

_MAKERS = {  # by whether the client streams, and whether the server does
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def offer(
    services: Mapping[ServiceDescriptor, Sequence[MethodDescriptor]], servicer: Any, server: grpc.aio.Server
) -> None:
    """Add these services to a server; `servicer` has a method for each call. Messages are read by `reader`."""
    for service, methods in services.items():
        handlers = {f"/{service.full_name}/{method.name}": _handler(servicer, method) for method in methods}
        server.add_generic_rpc_handlers((_Handlers(service.full_name, handlers),))


class _Handlers(grpc.ServiceRpcHandler):
    """A service's handlers; Serve puts its own into `_method_handlers`."""

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
            streams = (handler.request_streaming, handler.response_streaming)  # Serve fills in all four forms
            if streams == (False, False):
                handler = handler._replace(unary_unary=_at_once(handler.unary_unary))
            elif streams == (False, True):
                handler = handler._replace(unary_stream=_with_its_status(handler.unary_stream))
            self._ready[method] = handler
        return self._ready.get(method)


def _at_once(answer: Callable[[Any, Any], Awaitable[bytes]]) -> Callable[[Any, Any], Awaitable[bytes]]:
    """A refusal without headers before it: gRPC's own retries take headers for an answer (gRFC A6, "committed")."""

    async def call(request: Any, context: Any) -> bytes:
        reply = await answer(request, context)
        if context.code() in _RETRIED:
            await context.abort(context.code(), context.details(), context.trailing_metadata())
        return reply

    return call


def _with_its_status(answer: Callable[[Any, Any], AsyncGenerator[bytes, None]]) -> Callable[[Any, Any], Any]:
    """A stream to one request. Where it goes wrong its last message is empty, and the context has the status.

    What is raised in its place loses the metadata, and Serve logs it with a traceback. The empty message is not sent.
    """

    async def call(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        async with aclosing(answer(request, _Timed(context))) as messages:
            async for message in messages:
                if message:
                    yield message
        if context.code() not in _GOOD:
            await context.abort(context.code(), context.details(), context.trailing_metadata())

    return call


class _Timed:
    """A call's context, whose metadata say what its deadline leaves."""

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
    """Bytes -> message, or the error as a value: what is raised here gRPC answers with UNKNOWN, and logs."""
    name = kind.DESCRIPTOR.full_name

    def read(raw: bytes) -> Message | InvalidInput:
        try:
            return kind.FromString(raw)
        except DecodeError:
            return InvalidInput(f"these {len(raw)} bytes are not a {name}: no protobuf, or a text that is not UTF-8")

    return read
