"""Composition root: settings -> bound Serve application.

args of the Serve config -> Args -> a Plan for each model, by the cluster's devices -> Router(embedders of each model)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve import Application
from starlette.types import ASGIApp

from deployments.embedding.replica import Embedder
from deployments.embedding.router import Router
from deployments.errors import SettingsError
from deployments.hardware.device_detector import Topology
from deployments.serve_adapter.replica_process import freeze_gc
from serve_app.config.models import Args
from serve_app.config.serve_deployments import bind_application
from serve_app.embedding.api import HttpApi
from serve_app.embedding.grpc_calls import TeiCalls
from serve_app.embedding.models_api import ModelsApi
from serve_app.ingress import Deployed, ServiceIngress


class Ingress(ServiceIngress, TeiCalls):
    """Answers HTTP and gRPC: the Routers of all models, with their routes and calls."""

    def __init__(self, args: Args, topologies: Mapping[str, Topology], embedders: Mapping[str, Deployed]) -> None:
        ServiceIngress.__init__(self, args.shared)
        self._args = args
        routers = {}
        for name, settings in args.models.items():
            with args.locating(name):
                routers[name] = Router(settings, topologies[name], embedders[name])
        self.routers = args.by_model(routers)
        TeiCalls.__init__(self, self.routers, self.api_keys, self.observer)
        freeze_gc()

    async def reconfigure(self, user_config: Any) -> None:
        """Serve calls this with the `user_config` at the start, and again whenever it changes. See `Router.configure`
        and `Router.refuse`. A config that is bad for one model changes nothing for the others.
        """
        pools = {router.card.name: router.topology.pools for router in self.routers}
        try:
            configs = self._args.router_configs(user_config, pools)
        except SettingsError as error:
            for router in self.routers:
                router.refuse(error)
        else:
            for router in self.routers:
                router.configure(configs[router.card.name])
            self.observer.configure(configs)
            await self.open_door()

    def every_router(self) -> Sequence[Router]:
        return list(self.routers)

    def api(self) -> ASGIApp:
        if self._args.several:
            return ModelsApi(self.routers, self.api_keys, self.observer)
        return HttpApi(self.routers.first, self.api_keys, self.observer)


def build(args: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`. Raises SettingsError that names the key."""
    return bind_application(Args(args), Ingress, Embedder)
