"""The gRPC services of an application that generates: generation (see `grpc_calls.py`) and the standard health check.

The Serve config names `add_to_server` under `grpc_options.grpc_servicer_functions`. As with `grpc_services.py`, Serve's
proxies import this module, so it imports little.
"""

from __future__ import annotations

from typing import Any

import grpc

from deployments.serve_adapter.grpc_handlers import offer
from serve_app.grpc_services import HEALTH
from serve_app.proto import generation_pb2

_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
SERVICE = _SERVICE.full_name
GENERATE = f"{_SERVICE.full_name}/Generate"


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the services of generation."""
    offer({_SERVICE: _SERVICE.methods, **HEALTH}, servicer, server)
