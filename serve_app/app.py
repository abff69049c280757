"""Composition root: settings -> bound Serve application.

args of the Serve config -> Args -> what the cluster has -> a Plan for each model -> Router(embedders of each model)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.embedding.replica import Embedder
from deployments.embedding.router import Router
from deployments.errors import SettingsError
from deployments.hardware.device_detector import Topology
from deployments.serve_adapter.access_log_file import access_log_handler
from deployments.serve_adapter.gc_freeze import spare_what_is_loaded
from serve_app.api_keys import ApiKeys
from serve_app.config.cluster_plan import cpu_parts, plan_once_nodes_are_there
from serve_app.config.models import Args
from serve_app.config.serve_deployments import bind_pools, bindable_router
from serve_app.grpc_services import METHODS
from serve_app.observe.access_log import LineWriter
from serve_app.observe.observer import Observer
from serve_app.observe.tracer import Tracer

Embedders = Mapping[str, tuple[str, DeploymentHandle[Any]]]  # of one model: pool -> name and handle of its deployment


class Ingress:
    """The Routers of all models with their routes and calls: what answers HTTP and gRPC."""

    def __init__(self, args: Args, topologies: Mapping[str, Topology], embedders: Mapping[str, Embedders]) -> None:
        keys = args.shared.api_keys
        self.api_keys = None if keys is None else ApiKeys.read(keys)
        self._args = args
        routers = {}
        for name, settings in args.models.items():
            with args.locating(name):
                routers[name] = Router(settings, topologies[name], embedders[name])
        self.routers = args.by_model(routers)
        from serve_app.embedding.grpc_calls import GrpcApi

        traces = args.shared.traces
        tracer = None if traces is None else Tracer.exporting(traces, serve.get_replica_context().replica_tag)
        self._observer = Observer(LineWriter(access_log_handler()), tracer)
        calls = GrpcApi.of_models(self.routers, self.api_keys, self._observer)
        for name in METHODS:  # Serve finds what answers a gRPC call by its name
            setattr(self, name, getattr(calls, name))
        spare_what_is_loaded()

    async def reconfigure(self, user_config: Any) -> None:
        """Called by Serve with the `user_config`: at the start, and in place whenever it changes. See
        `Router.configure` and `Router.refuse`; a config that is bad for one model changes nothing for the others.
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
            self._observer.configure(configs)
            await asyncio.gather(*(router.joined() for router in self.routers))

    async def check_health(self) -> None:
        """Called by Serve every second or so: the moment to see whether the API keys have changed."""
        if self.api_keys is not None:
            await asyncio.to_thread(self.api_keys.refresh)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        if self._args.several:
            from serve_app.embedding.models_api import ModelsApi

            return ModelsApi(self.routers, self.api_keys, self._observer)
        from serve_app.embedding.api import HttpApi

        return HttpApi(self.routers.first, self.api_keys, self._observer)


def build(args: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`. Raises SettingsError that names the key."""
    read = Args(args)
    nodes, plans = plan_once_nodes_are_there(read, ray.nodes, time)
    parts = cpu_parts(read.models, plans)
    names = read.deployments()
    embedders = {
        name: bind_pools(settings, plans[name], nodes, parts, names[name], replica=Embedder)
        for name, settings in read.models.items()
    }
    router = bindable_router(Ingress, nodes)
    topologies = {name: plan.topology for name, plan in plans.items()}
    application: Application = router.bind(read, topologies, embedders)
    return application
