"""The gRPC services of embeddings: TEI's and the standard health check. `embedding/grpc_calls.py` answers them.

The Serve config names `add_to_server` under `grpc_options.grpc_servicer_functions`. Serve calls it in each process that
listens, its proxies included, so this module imports little. Serve routes a call to the ingress's method of that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2

from deployments.serve_adapter.grpc_handlers import offer
from serve_app.proto import tei_pb2

_TEI: tuple[ServiceDescriptor, ...] = tuple(tei_pb2.DESCRIPTOR.services_by_name.values())
_HEALTH = cast("ServiceDescriptor", health_pb2.DESCRIPTOR.services_by_name["Health"])
HEALTH: dict[ServiceDescriptor, Sequence[MethodDescriptor]] = {
    _HEALTH: [_HEALTH.methods_by_name[name] for name in ("Check", "Watch")]
}
_OFFERED = {**{service: service.methods for service in _TEI}, **HEALTH}

METHODS = {  # the call's name, by which Serve finds the method -> its full name
    method.name: f"{service.full_name}/{method.name}" for service, methods in _OFFERED.items() for method in methods
}
SERVICES = tuple(service.full_name for service in _TEI)


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the services of embeddings."""
    offer(_OFFERED, servicer, server)
