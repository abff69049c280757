"""Composition root: settings -> bound Serve application. The only `.bind()`.

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
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.embedder import Embedder
from deployments.errors import SettingsError
from deployments.hardware.affinity import CpuPart
from deployments.hardware.device_detector import ACCELERATOR, CPU, Topology
from deployments.router import Router
from deployments.serve_adapter.access_log_file import access_log_handler
from deployments.settings import Autoscaled, Settings
from serve_app.access_log import LineWriter
from serve_app.api_keys import ApiKeys
from serve_app.cluster_plan import (
    FRAMEWORK_CPUS,
    Nodes,
    Plan,
    accelerator_options,
    cpu_options,
    cpu_parts,
    plan_once_nodes_are_there,
    router_count,
)
from serve_app.grpc_services import METHODS
from serve_app.observer import Observer
from serve_app.several_models import Args
from serve_app.tracer import Tracer

_REPLICA_ROUTER = RequestRouterConfig(request_router_class="deployments.serve_adapter.replica_router.ReplicaRouter")  # type: ignore[arg-type]

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
        from serve_app.grpc_api import GrpcApi

        traces = args.shared.traces
        tracer = None if traces is None else Tracer.exporting(traces, serve.get_replica_context().replica_tag)
        self._observer = Observer(LineWriter(access_log_handler()), tracer)
        calls = GrpcApi.of_models(self.routers, self.api_keys, self._observer)
        for name in METHODS:  # Serve finds what answers a gRPC call by its name
            setattr(self, name, getattr(calls, name))

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

    async def check_health(self) -> None:
        """Called by Serve every second or so: the moment to see whether the API keys have changed."""
        if self.api_keys is not None:
            await asyncio.to_thread(self.api_keys.refresh)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        if self._args.several:
            from serve_app.models_api import ModelsApi

            return ModelsApi(self.routers, self.api_keys, self._observer)
        from serve_app.http_api import HttpApi

        return HttpApi(self.routers.first, self.api_keys, self._observer)


def build(args: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`. Raises SettingsError that names the key."""
    read = Args(args)
    nodes, plans = plan_once_nodes_are_there(read, ray.nodes, time)
    parts = cpu_parts(read.models, plans)
    names = read.deployments()
    embedders = {
        name: _bind_embedders(settings, plans[name], nodes, parts, names[name])
        for name, settings in read.models.items()
    }
    router = serve.deployment(
        name="Router",
        user_config={},  # what is missing is then said by name, not met by the first query
        max_ongoing_requests=1_000_000,  # must exceed all depths together, or overload waits in the proxy instead
        max_constructor_retry_count=3,
        num_replicas=router_count(nodes),  # of a config that says nothing else
        max_surge_percent=100,  # a new version answers before the old one stops
        health_check_period_s=1,  # a Router that is gone is missed so soon
        ray_actor_options={"num_cpus": FRAMEWORK_CPUS},
    )(serve.ingress()(Ingress))
    topologies = {name: plan.topology for name, plan in plans.items()}
    application: Application = router.bind(read, topologies, embedders)
    return application


def _bind_embedders(
    settings: Settings, plan: Plan, nodes: Nodes, parts: Mapping[str, CpuPart], names: Mapping[str, str]
) -> dict[str, tuple[str, Application]]:
    bound = {}
    for pool in plan.topology.pools:
        if pool == ACCELERATOR:
            device, options = plan.device, accelerator_options(plan.device)
        else:
            part = parts[settings.model.served_name].share / sum(part.share for part in parts.values())
            device, options = CPU, cpu_options(settings, nodes, part)
        deployment = serve.deployment(
            name=names[pool],
            **how_many(settings, pool, plan.topology),
            max_ongoing_requests=1000,  # never reached: queries travel by the channel, and the schedule admits
            request_router_config=_REPLICA_ROUTER,
            health_check_period_s=2,
            health_check_timeout_s=5,  # three in a row, and the replica is replaced
            max_constructor_retry_count=3,
            **options,
        )(Embedder)
        bound[pool] = (names[pool], deployment.bind(pool, settings, device, parts))
    return bound


def how_many(settings: Settings, pool: str, topology: Topology) -> dict[str, Any]:
    """How many replicas Serve keeps of a pool."""
    asked = (settings.cpu if pool == CPU else settings.accelerator).replicas
    if not isinstance(asked, Autoscaled):
        return {"num_replicas": topology.replicas[pool]}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=asked.min,
            max_replicas=asked.max,
            upscale_delay_s=asked.upscale_delay_s,
            downscale_delay_s=asked.downscale_delay_s,
            policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
                policy_function="deployments.serve_adapter.autoscaling:KeepFill", policy_kwargs={"target": asked.fill}
            ),
        )
    }
