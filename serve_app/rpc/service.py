"""The base of the gRPC services of embeddings and of generation: API keys and the standard health check."""

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

_WATCH_S = 0.5  # between two checks of a watched health
_POOL_SERVICES = {f"windve.{pool}": pool for pool in (ACCELERATOR, CPU)}


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
