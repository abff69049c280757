"""Composition root: settings -> bound Serve application. The only `.bind()`.

args of the Serve config -> Settings -> what the cluster has -> Topology -> Router(embedders)
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from starlette.types import ASGIApp

from deployments.embedder import Embedder
from deployments.errors import SettingsError
from deployments.hardware.device_detector import ACCELERATOR, CPU, Machine, Topology, decide_topology, probe_machine
from deployments.router import Router
from deployments.settings import Autoscaled, Settings
from serve_app.api_keys import ApiKeys
from serve_app.grpc_services import METHODS

logger = logging.getLogger("ray.serve")

_DEPLOYMENTS = {ACCELERATOR: "AcceleratorEmbedder", CPU: "CpuEmbedder"}
_REPLICA_ROUTER = RequestRouterConfig(request_router_class="deployments.serve_adapter.replica_router.ReplicaRouter")  # type: ignore[arg-type]
_RESOURCES = {"npu": "NPU", "cuda": "GPU"}
_JOIN_POLL_S = 1.0
_FRAMEWORK_CPUS = 0.1  # what the scheduler books for a process whose work is elsewhere


class Ingress(Router):
    """The Router with its routes and calls: what answers HTTP and gRPC."""

    def __init__(
        self, settings: Settings, topology: Topology, handles: Mapping[str, tuple[str, DeploymentHandle[Any]]]
    ) -> None:
        self.api_keys = None if settings.api_keys is None else ApiKeys.read(settings.api_keys)
        super().__init__(settings, topology, handles)
        from serve_app.grpc_api import GrpcApi

        calls = GrpcApi(self, self.api_keys)
        for name in METHODS:  # Serve finds what answers a gRPC call by its name
            setattr(self, name, getattr(calls, name))

    async def check_health(self) -> None:
        """Called by Serve every ten seconds or so: the moment to see whether the API keys have changed."""
        if self.api_keys is not None:
            await asyncio.to_thread(self.api_keys.refresh)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from serve_app.http_api import HttpApi

        return HttpApi(self, self.api_keys)


def build(args: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`. Raises SettingsError that names the key."""
    settings = Settings.parse(args)
    nodes, device, topology = plan_once_nodes_are_there(settings, ray.nodes, time)
    embedders = {}
    for pool in topology.pools:
        options = _accelerator_options(device) if pool == ACCELERATOR else _cpu_options(settings, nodes)
        embedders[pool] = (
            _DEPLOYMENTS[pool],
            serve.deployment(
                name=_DEPLOYMENTS[pool],
                **_how_many(settings, pool, topology),
                max_ongoing_requests=1000,  # never reached: queries travel by the channel, and the schedule admits
                request_router_config=_REPLICA_ROUTER,
                health_check_period_s=2,
                health_check_timeout_s=5,  # three in a row, and the replica is replaced
                max_constructor_retry_count=3,
                **options,
            )(Embedder).bind(pool, settings, device if pool == ACCELERATOR else CPU),
        )
    router = serve.deployment(
        name="Router",
        user_config={},  # what is missing is then said by name, not met by the first query
        max_ongoing_requests=1_000_000,  # must exceed all depths together, or overload waits in the proxy instead
        max_constructor_retry_count=3,
        ray_actor_options={"num_cpus": _FRAMEWORK_CPUS},
    )(serve.ingress()(Ingress))
    application: Application = router.bind(settings, topology, embedders)
    return application


class Clock(Protocol):
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


def plan_once_nodes_are_there(
    settings: Settings, all_nodes: Callable[[], list[dict[str, Any]]], clock: Clock
) -> tuple[list[dict[str, Any]], str, Topology]:
    """The cluster's live nodes, and the plan for them; on Kubernetes the head node is told the config before the others
    have joined. Raises SettingsError where after `wait_for_nodes_s` they still lack what is asked for.
    """
    ends, told = clock.monotonic() + settings.wait_for_nodes_s, ""
    while True:
        nodes = [node for node in all_nodes() if node["Alive"]]
        try:
            return nodes, *plan_application(settings, nodes)
        except SettingsError as lacking:
            if clock.monotonic() >= ends:
                raise
            if str(lacking) != told:
                told = str(lacking)
                logger.warning("waiting for more nodes, up to %g s: %s", settings.wait_for_nodes_s, told)
        clock.sleep(_JOIN_POLL_S)


def _how_many(settings: Settings, pool: str, topology: Topology) -> dict[str, Any]:
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


def plan_application(settings: Settings, nodes: list[dict[str, Any]]) -> tuple[str, Topology]:
    """The accelerator's torch device ("cuda:0", "npu:0", "cpu", "emulated", "none") and the pools, from what is there.

    `nodes` are `ray.nodes()`. Raises SettingsError where the settings ask for what the cluster lacks.
    """
    device, accelerators = _accelerators(settings, nodes)
    instances = 0
    if settings.heterogeneous or not accelerators:
        instances = _cpu_instances(settings, nodes)
    try:
        return device, decide_topology(accelerators, instances, heterogeneous=settings.heterogeneous)
    except ValueError as error:
        raise SettingsError("args.accelerator.device", f"{error}; no node of the cluster offers CPUs to Ray") from None


def _accelerators(settings: Settings, nodes: list[dict[str, Any]]) -> tuple[str, int]:
    asked = settings.accelerator
    wanted = _asked_for(asked.replicas)
    if asked.device == "none":
        return "none", 0
    if asked.engine == "emulated" and asked.device not in _RESOURCES:  # a kind that is named is booked all the same
        return "emulated", wanted or 1
    if asked.device == "cpu":
        return "cpu", wanted or 1
    found = {device: int(_total(nodes, resource)) for device, resource in _RESOURCES.items()}
    kinds = [asked.device] if asked.device != "auto" else [kind for kind in found if found[kind]]
    if not kinds:
        return "none", 0
    kind = kinds[0]
    if not found[kind]:
        raise SettingsError(
            "args.accelerator.device",
            f"{kind} was asked for, but no node of the cluster has the resource {_RESOURCES[kind]} (see `ray status`)",
        )
    if wanted and wanted > found[kind]:
        raise SettingsError(
            "args.accelerator.replicas", f"{wanted} were asked for, but the cluster has {found[kind]} {kind} devices"
        )
    return f"{kind}:0", wanted or found[kind]  # Ray shows each replica its own device as number 0


def _cpu_instances(settings: Settings, nodes: list[dict[str, Any]]) -> int:
    asked = settings.cpu
    machines = sum(1 for node in nodes if node["Resources"].get("CPU", 0) > 0)
    most = machines * _instances_per_machine(settings, nodes)
    wanted = _asked_for(asked.replicas)
    if wanted is None:
        return most
    if wanted > most:
        raise SettingsError(
            "args.cpu.replicas",
            f"{wanted} were asked for, but {machines} machines take {most} with instance_per: {asked.instance_per}",
        )
    return wanted


def _asked_for(replicas: str | int | Autoscaled) -> int | None:
    """How many there must be from the start; None: as many as the cluster has room for."""
    if isinstance(replicas, Autoscaled):
        return replicas.min
    return replicas if isinstance(replicas, int) else None


def _instances_per_machine(settings: Settings, nodes: list[dict[str, Any]]) -> int:
    """1, or the fewest NUMA nodes that any machine of the cluster has (all replicas of a deployment are alike)."""
    if settings.cpu.instance_per == "machine":
        return 1
    return min(machine.numa_nodes for machine in probe_nodes(nodes))


def probe_nodes(nodes: list[dict[str, Any]]) -> list[Machine]:
    """`probe_machine` on each node that offers CPUs."""
    probe = ray.remote(num_cpus=0)(probe_machine)
    there = [node["NodeID"] for node in nodes if node["Resources"].get("CPU", 0) > 0]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in there]
    machines: list[Machine] = ray.get([probe.options(scheduling_strategy=here).remote() for here in strategies])
    return machines


def _accelerator_options(device: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": _FRAMEWORK_CPUS}
    if device.startswith("npu"):
        options["resources"] = {"NPU": 1}
    elif device.startswith("cuda"):
        options["num_gpus"] = 1
    return {"ray_actor_options": options}


def _cpu_options(settings: Settings, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    per_machine = _instances_per_machine(settings, nodes)
    booked = settings.cpu.num_cpus
    if booked == "auto":
        smallest = min(node["Resources"]["CPU"] for node in nodes if node["Resources"].get("CPU", 0) > 0)
        share = smallest * 3 / 4 / per_machine  # the low quarter is left to the framework and the accelerator
        booked = _FRAMEWORK_CPUS if settings.emulated else math.floor(share) if share >= 1 else 0.5
    return {"ray_actor_options": {"num_cpus": booked}, "max_replicas_per_node": per_machine}


def _total(nodes: list[dict[str, Any]], resource: str) -> float:
    return sum(float(node["Resources"].get(resource, 0)) for node in nodes)
