"""The Serve deployments of an application: its Routers and its pools."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments.hardware.affinity import CpuPart
from deployments.hardware.device_detector import ACCELERATOR, CPU, Topology
from deployments.settings import Autoscaled, OneModelSettings
from serve_app.config.cluster_plan import (
    FRAMEWORK_CPUS,
    Nodes,
    Plan,
    accelerator_options,
    cpu_options,
    cpu_parts,
    plan_once_nodes_are_there,
    router_count,
)
from serve_app.config.models import ApplicationArgs

REPLICA_ROUTER = RequestRouterConfig(request_router_class="deployments.serve_adapter.replica_router.ReplicaRouter")  # type: ignore[arg-type]

Names = Mapping[str, str]  # of a pool's deployment
_FINISH_S = 620.0  # for the requests of a Router that stops: a bulk request may take ten minutes by default


def bind_application(args: ApplicationArgs, ingress: type, replica: type) -> Application:
    """Bind the Routers (class `ingress`) and the pools' replicas (class `replica`). Each Router gets `args` and, for
    each model, the topology and the pools' deployments. Waits for the nodes that `args` need. Raises SettingsError.
    """
    args.pin_revisions()
    nodes, plans = plan_once_nodes_are_there(args, ray.nodes, time)
    parts, names = cpu_parts(args.models, plans), args.deployments()
    pools = {
        name: bind_pools(settings, plans[name], nodes, parts, names[name], replica=replica)
        for name, settings in args.models.items()
    }
    topologies = {name: plan.topology for name, plan in plans.items()}
    application: Application = _router(ingress, nodes).bind(args, topologies, pools)
    return application


def _router(ingress: type, nodes: Nodes) -> Deployment:
    deployment: Deployment = serve.deployment(
        name="Router",
        user_config={},  # so that a missing setting is named at the start, not by the first query
        max_ongoing_requests=1_000_000,  # must exceed the sum of all depths, or else overload waits in the proxy
        max_constructor_retry_count=3,
        num_replicas=router_count(nodes),  # the default; the config may set it
        max_surge_percent=100,  # a new version answers before the old one stops
        graceful_shutdown_timeout_s=_FINISH_S,
        health_check_period_s=1,  # finds a dead Router within a second
        ray_actor_options={"num_cpus": FRAMEWORK_CPUS},
    )(serve.ingress()(ingress))
    return deployment


def bind_pools(
    settings: OneModelSettings, plan: Plan, nodes: Nodes, parts: Mapping[str, CpuPart], names: Names, *, replica: type
) -> dict[str, tuple[str, Application]]:
    """Bind each pool's deployment of the class `replica`: pool -> (name, deployment). `parts`: see `cpu_parts`."""
    bound = {}
    for pool in plan.topology.pools:
        if pool == ACCELERATOR:
            device = plan.device
            options = accelerator_options(device, settings.accelerator.replicas_per_device)
        else:
            part = parts[settings.model.served_name].share / sum(part.share for part in parts.values())
            device, options = CPU, cpu_options(settings, nodes, part)
        is_overflow = pool == CPU and ACCELERATOR in plan.topology.pools
        if is_overflow:  # Routers keep it (`ReplicaSet.patience_s`) while the accelerator changes its model
            options["graceful_shutdown_timeout_s"] = _FINISH_S
        deployment = serve.deployment(
            name=names[pool],
            **how_many(settings, pool, plan.topology),
            max_ongoing_requests=1000,  # never reached: queries bypass Serve, and the scheduler admits them
            request_router_config=REPLICA_ROUTER,
            graceful_shutdown_wait_loop_s=0.1,  # the next replica may wait for this device
            health_check_period_s=2,
            health_check_timeout_s=5,  # three in a row, and the replica is replaced
            max_constructor_retry_count=3,
            **options,
        )(replica)
        bound[pool] = (names[pool], deployment.bind(pool, settings, device, parts, is_overflow=is_overflow))
    return bound


def how_many(settings: OneModelSettings, pool: str, topology: Topology) -> dict[str, Any]:
    """Serve options for a pool's number of replicas."""
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
                policy_function="deployments.serve_adapter.autoscaling:KeepUtilization",
                policy_kwargs={"target": asked.target_utilization},
            ),
        )
    }
