"""Composition root of generation: settings -> bound Serve application.

args of the Serve config -> GenerationArgs -> a Plan, by the cluster's devices -> Router(generators of each pool)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve import Application
from starlette.types import ASGIApp

from deployments.generation.replica import Generator
from deployments.generation.router import GenerationRouter
from deployments.hardware.device_detector import Topology
from deployments.serve_adapter.replica_process import freeze_gc
from serve_app.config.generation import GenerationArgs
from serve_app.config.serve_deployments import bind_application
from serve_app.generation.api import CompletionsApi
from serve_app.generation.grpc_calls import GenerationCalls
from serve_app.ingress import Deployed, ServiceIngress


class GenerationIngress(ServiceIngress, GenerationCalls):
    """Answers HTTP and gRPC: the Router with its routes and calls."""

    def __init__(
        self, args: GenerationArgs, topologies: Mapping[str, Topology], generators: Mapping[str, Deployed]
    ) -> None:
        ((name, settings),) = args.models.items()
        ServiceIngress.__init__(self, settings)
        self.router = GenerationRouter(settings, topologies[name], generators[name])
        self._api = CompletionsApi(self.router, settings, self.api_keys, self.observer)
        GenerationCalls.__init__(self, self.router, self._api.asking, self._api.names, self.api_keys, self.observer)
        freeze_gc()

    async def reconfigure(self, user_config: Any) -> None:
        """Serve calls this with the `user_config` at the start, and again whenever it changes."""
        await self.router.reconfigure(user_config)
        self.observer.configure({self.router.card.name: self.router.config})
        await self.open_door()

    def every_router(self) -> Sequence[GenerationRouter]:
        return [self.router]

    def api(self) -> ASGIApp:
        return self._api


def build(args: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`. Raises SettingsError that names the key."""
    return bind_application(GenerationArgs(args), GenerationIngress, Generator)
