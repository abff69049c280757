"""The standard health check (grpc.health.v1), of embeddings and of generation. It needs no key, as `/health`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext

from deployments.errors import UnknownModel
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.serve_adapter.replica_process import is_stopping
from serve_app.rpc.calls import Received, metadata_of, set_status

_WATCH_S = 0.5  # between two looks at whether a health has changed
POOL_SERVICES = {f"windve.{pool}": pool for pool in (ACCELERATOR, CPU)}


class HealthCalls(ABC):
    """Of one Router replica: each method has the name of its call, and Serve's name for the context.

    `services`: the full names of those that can be asked about, beside all (`""`) and the pools (`POOL_SERVICES`).
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = (*services, *POOL_SERVICES)

    @abstractmethod
    def is_served(self, service: str, model: str | None) -> bool:
        """Calls of this service are answered now, or this pool answers; by this model, or by one of all (None). Raises
        UnknownModel.
        """

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
