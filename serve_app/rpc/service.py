"""What the gRPC services of embeddings and of generation share: who may call, how a call ends, the health check."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ray.serve.grpc_util import RayServegRPCContext

from deployments.admission.quota import Client
from deployments.errors import InvalidInput, WindveError
from serve_app.api_keys import ApiKeys
from serve_app.observe.facts import TracedRequest
from serve_app.observe.observer import Observer
from serve_app.rpc.calls import Received, check_size, headers_to_trace, metadata_of, set_status
from serve_app.rpc.health import POOL_SERVICES, HealthCalls


class GrpcService(HealthCalls):
    """The calls of one Router replica. Serve finds a call's method by its name, and gives it a `grpc_context`.

    `services`: the full names of those that are answered. `max_bytes`: of one message.
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
        super().__init__(services)
        self.api_keys, self.observer = api_keys, observer or Observer()
        self._max_bytes = max_bytes
        self._emulated = [("x-windve-emulated", "true")] if emulated else []

    def let_in(self, context: RayServegRPCContext) -> Client | None:
        """Who asks, where API keys have names. Raises Unauthorized."""
        return None if self.api_keys is None else self.api_keys.check(metadata_of(context, "authorization"))

    def checked(self, request: Received) -> Any:
        """The message, if it is one and not larger than an HTTP body may be. Raises InvalidInput or BodyTooLarge."""
        if isinstance(request, InvalidInput):
            raise request
        check_size(request.ByteSize(), self._max_bytes)
        return request

    def call(self, name: str, context: RayServegRPCContext) -> CallScope:
        """Within it one call is answered. `name`: its full name."""
        return CallScope(self.observer, name, context)


class CallScope:
    """One call from its arrival to its end, for the access log and traces (`traced`; None: nobody asks).

    An error of ours that leaves the scope becomes the call's status, and is not raised on: Serve would log it. Behind
    the scope the caller answers an empty message, which gRPC does not send where the status is not OK.
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
        if isinstance(error, WindveError):
            set_status(self._context, error)
        if self.traced is not None:
            ended = asyncio.CancelledError() if isinstance(error, GeneratorExit) else error
            self._observer.end_call(self.traced, self._name, ended)
        return isinstance(error, WindveError)

    def came_from(self, client: Client | None) -> None:
        """The name of the API key that it came with, for the log."""
        if self.traced is not None and client is not None:
            self.traced.key = client.tenant.name


def pool_is_live(service: str, live_pools: Mapping[str, bool]) -> bool | None:
    """Of the service that stands for a pool (`windve.cpu`); None: the service is no pool's."""
    return live_pools.get(POOL_SERVICES[service], False) if service in POOL_SERVICES else None
