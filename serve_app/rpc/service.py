"""What the gRPC services of embeddings and of generation share: who may call, and the standard health check."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext

from deployments.admission.quota import Client
from deployments.errors import InvalidInput, UnknownModel
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.serve_adapter.replica_process import is_stopping
from serve_app.api_keys import ApiKeys
from serve_app.observe.observer import Observer
from serve_app.rpc.calls import Received, check_size, metadata_of, set_status

_WATCH_S = 0.5  # between two looks at whether a health has changed
_POOL_SERVICES = {f"windve.{pool}": pool for pool in (ACCELERATOR, CPU)}


def is_live(service: str, live_pools: Mapping[str, bool]) -> bool:
    """A pool can answer: of a service that stands for one (`windve.cpu`) that pool, else any."""
    return live_pools.get(_POOL_SERVICES[service], False) if service in _POOL_SERVICES else any(live_pools.values())


class GrpcService(ABC):
    """The calls of one Router replica. Serve finds a call's method by its name, and gives it a `grpc_context`.

    `services`: the full names of those that are answered. `max_bytes`: of one message. The health check
    (grpc.health.v1) needs no key, as `/health`; it may be asked of all (`""`), of a service, or of a pool.
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
        """Calls of this service are answered now, or this pool answers; by this model, or by one of all (None). Raises
        UnknownModel.
        """

    def let_in(self, context: RayServegRPCContext) -> Client | None:
        """Who asks, where API keys have names. Raises Unauthorized."""
        return None if self.api_keys is None else self.api_keys.check(metadata_of(context, "authorization"))

    def checked(self, request: Received) -> Any:
        """The message, if it is one and not larger than an HTTP body may be. Raises InvalidInput or BodyTooLarge."""
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
            grpc_context.set_details(f"there is no such service here, only {', '.join(self._services)}")
            return Empty()
        return HealthCheckResponse(status=status)

    async def Watch(self, request: Received, grpc_context: RayServegRPCContext) -> AsyncGenerator[Message, None]:
        """What Check says, now and at every change, until this Router is told to stop: Serve would wait for its end."""
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
