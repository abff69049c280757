"""Composition root of generation: settings -> bound Serve application.

args of the Serve config -> GenerationArgs -> what the cluster has -> a Plan -> Router(generators of each pool)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.generation.replica import Generator
from deployments.generation.router import GenerationRouter
from deployments.generation.settings import GenerationSettings
from deployments.hardware.device_detector import Topology
from deployments.serve_adapter.gc_freeze import spare_what_is_loaded
from serve_app.config.cluster_plan import cpu_parts, plan_once_nodes_are_there
from serve_app.config.generation import GenerationArgs
from serve_app.config.serve_deployments import bind_pools, bindable_router
from serve_app.generation.api import ApiOptions, CompletionsApi
from serve_app.generation.grpc_calls import GenerationCalls
from serve_app.ingress import ServiceIngress

Generators = Mapping[str, tuple[str, DeploymentHandle[Any]]]  # pool -> name and handle of its deployment


class GenerationIngress(ServiceIngress, GenerationCalls):
    """The Router with its routes and its calls: what answers HTTP and gRPC."""

    def __init__(self, settings: GenerationSettings, topology: Topology, generators: Generators) -> None:
        ServiceIngress.__init__(self, settings)
        self.router = GenerationRouter(settings, topology, generators)
        self._api = CompletionsApi(self.router, ApiOptions.of(settings), self.api_keys, self.observer)
        GenerationCalls.__init__(self, self.router, self._api.asking, self._api.names, self.api_keys, self.observer)
        spare_what_is_loaded()

    async def reconfigure(self, user_config: Any) -> None:
        """Called by Serve with the `user_config`: at the start, and in place whenever it changes."""
        await self.router.reconfigure(user_config)
        self.observer.configure({self.router.card.name: self.router.config})

    def asgi_app(self) -> ASGIApp:
        return self._api


def build(args: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`. Raises SettingsError that names the key."""
    read = GenerationArgs(args)
    nodes, plans = plan_once_nodes_are_there(read, ray.nodes, time)
    parts = cpu_parts(read.models, plans)
    ((name, settings),) = read.models.items()
    generators = bind_pools(settings, plans[name], nodes, parts, read.deployments()[name], replica=Generator)
    application: Application = bindable_router(GenerationIngress, nodes).bind(
        settings, plans[name].topology, generators
    )
    return application
