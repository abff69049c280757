"""Code that all gRPC services share: errors as statuses, answers in order, bounds, metadata, keys, the health check."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext

from deployments.admission.door import VISITS
from deployments.admission.quota import Client
from deployments.errors import BodyTooLarge, Busy, InvalidInput, Unavailable, UnknownModel, WindveError
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.serve_adapter.replica_process import is_stopping
from serve_app.api_keys import ApiKeys
from serve_app.observe.facts import TracedRequest
from serve_app.observe.observer import REQUEST_ID, Observer
from serve_app.web.request_headers import admission, check_space

_LARGEST_DETAILS = 2_000  # bytes; each may become three in an HTTP/2 header, and clients accept 8 KiB of headers
_UNAVAILABLE_RETRY_S = 1.0
_WATCH_S = 0.5  # between two checks of a watched health
_POOL_SERVICES = {f"windve.{pool}": pool for pool in (ACCELERATOR, CPU)}

Received = Message | InvalidInput  # what `grpc_handlers.reader` returns for a client's bytes
T = TypeVar("T")


async def in_order(
    requests: AsyncIterator[Received], answer: Callable[[Received], Awaitable[T]], most: int
) -> AsyncGenerator[T, None]:
    """The answers to `requests`, in order, with at most `most` in progress. Raises the first error."""

    async def counted(request: Received) -> T:
        with VISITS.visit():
            return await answer(request)

    answers: deque[asyncio.Future[T]] = deque()
    # The read of the next request; empty once the client has sent all.
    coming: deque[asyncio.Future[Received | None]] = deque([asyncio.ensure_future(anext(requests, None))])
    try:
        while answers or coming:
            reads = coming if len(answers) < most else ()
            await asyncio.wait([*list(answers)[:1], *reads], return_when=asyncio.FIRST_COMPLETED)
            if reads and coming[0].done():
                request = coming.popleft().result()
                if request is not None:
                    answers.append(asyncio.ensure_future(counted(request)))
                    coming.append(asyncio.ensure_future(anext(requests, None)))
            while answers and answers[0].done():
                yield answers.popleft().result()
    finally:
        left: list[asyncio.Future[Any]] = [*answers, *coming]
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def metadata_of(context: RayServegRPCContext, name: str) -> str | None:
    return next((value for key, value in context.invocation_metadata() if key == name), None)


def asked_by(context: RayServegRPCContext, space: str) -> dict[str, Any]:
    """What a call's metadata ask of admission, by the names of HTTP's headers. `space`: the model's. Raises
    InvalidInput or WrongSpace.
    """
    headers = _headers_of(context)
    check_space(headers, space)
    return admission(headers)


def _headers_of(context: RayServegRPCContext) -> dict[bytes, bytes]:
    metadata: Sequence[tuple[str, str | bytes]] = context.invocation_metadata()
    return {key.encode(): value.encode() for key, value in metadata if isinstance(value, str)}


def headers_to_trace(context: RayServegRPCContext) -> dict[bytes, bytes]:
    """A call's metadata for `Observer.begin`, with Serve's request id if the client sent none."""
    return _headers_of(context) | {key.encode(): value.encode() for key, value in _request_id(context)}


def _request_id(context: RayServegRPCContext) -> list[tuple[str, str]]:
    """The client's request id, or else Serve's, under the name of HTTP's header."""
    found = metadata_of(context, REQUEST_ID) or dict(context.trailing_metadata()).get("request_id")
    return [(REQUEST_ID, found)] if found else []


def say(context: RayServegRPCContext, *metadata: tuple[str, str]) -> None:
    """Send this metadata and the request's id after the answer."""
    context.set_trailing_metadata([*_request_id(context), *metadata])


def set_status(context: RayServegRPCContext, error: WindveError) -> None:
    """Set an error as the call's status, with the time to retry, also in the form of gRPC's own retries (gRFC A6)."""
    context.set_code(grpc.StatusCode[error.grpc_status])
    context.set_details(error.message.encode()[:_LARGEST_DETAILS].decode(errors="ignore"))
    retry_after_s = error.retry_after_s if isinstance(error, Busy) else _UNAVAILABLE_RETRY_S
    if isinstance(error, (Busy, Unavailable)):
        milliseconds = str(math.ceil(retry_after_s * 1000))
        say(context, ("retry-after-ms", milliseconds), ("grpc-retry-pushback-ms", milliseconds))


def check_size(size: int, most: int) -> None:
    """Check the bytes of a message, or of a stream that gets one answer. Raises BodyTooLarge."""
    if size > most:
        raise BodyTooLarge(f"the message has more bytes than this server accepts ({most}); send less text")


class CallScope:
    """One call from arrival to end. `traced`: for the access log and traces; None if both are off.

    A WindveError that leaves the scope becomes the call's status and is suppressed, because Serve would log it. After
    the scope, the caller returns an empty message, which gRPC does not send if the status is not OK.
    """

    __slots__ = ("_context", "_name", "_observer", "traced")

    def __init__(self, observer: Observer, name: str, context: RayServegRPCContext) -> None:
        self._observer, self._name, self._context = observer, name, context
        self.traced: TracedRequest | None = None

    def __enter__(self) -> Self:
        if self._observer.on:
            self.traced = self._observer.begin_call(headers_to_trace(self._context))
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if is_ours := isinstance(error, WindveError):
            set_status(self._context, error)
        if self.traced is not None:
            ended = asyncio.CancelledError() if isinstance(error, GeneratorExit) else error
            self._observer.end_call(self.traced, self._name, ended)
        return is_ours

    def came_from(self, client: Client | None) -> None:
        """Record the name of the call's API key, for the log."""
        if self.traced is not None and client is not None:
            self.traced.tenant = client.tenant.name


def is_live(service: str, live_pools: Mapping[str, bool]) -> bool:
    """Whether the service's pool can answer. `windve.cpu` stands for one pool; other services need any pool."""
    return live_pools.get(_POOL_SERVICES[service], False) if service in _POOL_SERVICES else any(live_pools.values())


class GrpcService(ABC):
    """The calls of one Router replica. Serve finds a call's method by its name, and passes `grpc_context`.

    `services`: the full names of the services. `max_bytes`: most bytes of one message. The health check
    (grpc.health.v1) needs no key, like `/health`. It covers all services (`""`), one service, or one pool.
    """

    def __init__(
        self,
        services: Sequence[str],
        api_keys: ApiKeys | None,
        observer: Observer | None,
        *,
        max_bytes: int,
        emulated: bool,
    ) -> None:
        self.api_keys, self.observer = api_keys, observer or Observer()
        self._services = (*services, *_POOL_SERVICES)
        self._max_bytes = max_bytes
        self._emulated = [("x-windve-emulated", "true")] if emulated else []

    @abstractmethod
    def is_served(self, service: str, model: str | None) -> bool:
        """Whether calls of this service are answered now; `service` may also name a pool. `model` None: by any model.
        Raises UnknownModel.
        """

    def let_in(self, context: RayServegRPCContext) -> Client | None:
        """The client, if API keys have names. Raises Unauthorized."""
        return None if self.api_keys is None else self.api_keys.check(metadata_of(context, "authorization"))

    def checked(self, request: Received) -> Any:
        """The message, if it is valid and no larger than `max_bytes`. Raises InvalidInput or BodyTooLarge."""
        if isinstance(request, InvalidInput):
            raise request
        check_size(request.ByteSize(), self._max_bytes)
        return request

    async def Check(self, request: Received, grpc_context: RayServegRPCContext) -> Message:
        try:
            status = self._status(request, grpc_context)
        except UnknownModel as error:
            set_status(grpc_context, error)
            return Empty()
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"there is no such service; this server has {', '.join(self._services)}")
            return Empty()
        return HealthCheckResponse(status=status)

    async def Watch(self, request: Received, grpc_context: RayServegRPCContext) -> AsyncGenerator[Message, None]:
        """The status of `Check`, now and at every change. Ends when this Router stops, because Serve waits for it."""
        last = None
        while last is None or not is_stopping():
            try:
                status = self._status(request, grpc_context)
            except UnknownModel:
                status = HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_S)
        yield HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)

    def _status(self, request: Received, context: RayServegRPCContext) -> Any:
        """Raises UnknownModel."""
        if not isinstance(request, HealthCheckRequest) or request.service not in {"", *self._services}:
            return HealthCheckResponse.SERVICE_UNKNOWN
        good = self.is_served(request.service, metadata_of(context, "model"))
        return HealthCheckResponse.SERVING if good else HealthCheckResponse.NOT_SERVING
