"""The gRPC services that are offered: TEI's, and the standard health check. `embedding/grpc_calls.py` answers them.

The Serve config names `add_to_server` under `grpc_options.grpc_servicer_functions`. Serve calls it in each process that
listens, its proxies included, so this module stays light; it routes a call to the ingress's method of the same name.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from operator import methodcaller
from typing import Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from deployments.errors import InvalidInput
from serve_app.proto import tei_pb2

_TEI: tuple[ServiceDescriptor, ...] = tuple(tei_pb2.DESCRIPTOR.services_by_name.values())
_HEALTH = cast("ServiceDescriptor", health_pb2.DESCRIPTOR.services_by_name["Health"])
HEALTH: dict[ServiceDescriptor, Sequence[MethodDescriptor]] = {
    _HEALTH: [_HEALTH.methods_by_name[name] for name in ("Check", "Watch")]
}
_OFFERED = {**{service: service.methods for service in _TEI}, **HEALTH}

_RETRIED = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
TIME_LEFT = "windve-time-left-ms"  # metadata of a stream's context: what its client's deadline leaves; Serve hides it

_GOOD = {None, 0, grpc.StatusCode.OK}  # as gRPC has it before and after Serve has set it

_MAKERS = {  # by whether the client streams, and whether the server does
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

METHODS = {  # by its name, under which Serve finds what answers it: the call's full name
    method.name: f"{service.full_name}/{method.name}" for service, methods in _OFFERED.items() for method in methods
}
SERVICES = tuple(service.full_name for service in _TEI)


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Of embeddings."""
    offer(_OFFERED, servicer, server)


def offer(
    services: Mapping[ServiceDescriptor, Sequence[MethodDescriptor]], servicer: Any, server: grpc.aio.Server
) -> None:
    """What the generated `add_..._to_server` functions do, for all of these services, and with `reader`."""
    for service, methods in services.items():
        handlers = {f"/{service.full_name}/{method.name}": _handler(servicer, method) for method in methods}
        server.add_generic_rpc_handlers((_Handlers(service.full_name, handlers),))


class _Handlers(grpc.ServiceRpcHandler):
    """A service's handlers. Serve puts its own in place of what is in `_method_handlers`, as grpcio calls it.

    Serve sends a refusal as it sends an answer, behind headers, and gRPC's own retries take that for an answer (gRFC
    A6, "committed"). Sent at once, without headers, it is retried when the refusal says.
    """

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
    async def call(request: Any, context: Any) -> bytes:
        reply = await answer(request, context)
        if context.code() in _RETRIED:
            await context.abort(context.code(), context.details(), context.trailing_metadata())
        return reply

    return call


def _with_its_status(answer: Callable[[Any, Any], AsyncGenerator[bytes, None]]) -> Callable[[Any, Any], Any]:
    """A stream to one request. Where it goes wrong its last message is empty, and the context says what is to be said.

    Serve's own proxy takes a status from a context only where a message comes with it. What is raised in its place
    loses the metadata, and Serve logs it with a traceback. The empty message is not sent.
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
