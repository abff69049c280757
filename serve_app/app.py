"""Composition root: settings -> bound Serve application. The only `.bind()`.

args of the Serve config -> Settings -> what the cluster has -> Topology -> Router(embedders)
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from starlette.types import ASGIApp

from deployments.device_detector import ACCELERATOR, CPU, Machine, Topology, decide_topology, probe_machine
from deployments.embedder import Embedder
from deployments.errors import SettingsError
from deployments.router import Router
from deployments.settings import Settings
from serve_app.api_keys import ApiKeys
from serve_app.grpc_services import METHODS

logger = logging.getLogger("ray.serve")

_DEPLOYMENTS = {ACCELERATOR: "AcceleratorEmbedder", CPU: "CpuEmbedder"}
_SEND_WHERE_TOLD = RequestRouterConfig(request_router_class="deployments.replica_router.ReplicaRouter")  # type: ignore[arg-type]
_RESOURCES = {"npu": "NPU", "cuda": "GPU"}
_WORKERS_S, _QUIET_S = 300, 5
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
        await super().check_health()
        if self.api_keys is not None:
            await asyncio.to_thread(self.api_keys.refresh)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from serve_app.http_api import HttpApi

        return HttpApi(self, self.api_keys)


def build(args: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`. Raises SettingsError that names the key."""
    settings = Settings.parse(args)
    nodes, (device, topology) = plan_when_there(settings, _live_nodes, time.sleep)
    embedders = {}
    for pool in topology.pools:
        options = _accelerator_options(device) if pool == ACCELERATOR else _cpu_options(settings, nodes)
        embedders[pool] = (
            _DEPLOYMENTS[pool],
            serve.deployment(
                name=_DEPLOYMENTS[pool],
                num_replicas=topology.replicas[pool],
                max_ongoing_requests=1000,  # the queue manager admits; a replica never refuses
                request_router_config=_SEND_WHERE_TOLD,
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


def plan_when_there(
    settings: Settings, look: Callable[[], list[dict[str, Any]]], sleep: Callable[[float], None]
) -> tuple[list[dict[str, Any]], tuple[str, Topology]]:
    """The nodes that `look` finds, and `plan_application` of them.

    A head node that offers no CPU is not a cluster yet: on Kubernetes the application comes as soon as the head is
    there, and the workers after it. What they lack is waited for up to five minutes, and after a wait, until no more
    have come for a few seconds. Raises SettingsError as `plan_application` does.
    """
    nodes, seconds, quiet = look(), 0, _QUIET_S
    while True:
        try:
            plan = plan_application(settings, nodes)
        except SettingsError as lacking:
            if seconds >= _WORKERS_S or not any(map(_offers_nothing, nodes)):
                raise
            if not seconds:
                logger.warning("waiting for more nodes, up to %d s: %s", _WORKERS_S, lacking)
            quiet = 0
        else:
            if quiet >= _QUIET_S:
                return nodes, plan
        sleep(1)
        before, nodes, seconds = nodes, look(), seconds + 1
        quiet = quiet + 1 if len(nodes) == len(before) else 0


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _offers_nothing(node: dict[str, Any]) -> bool:
    return not any(node["Resources"].get(resource) for resource in ("CPU", *_RESOURCES.values()))


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
    wanted = None if asked.replicas == "auto" else asked.replicas
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
    if asked.replicas == "auto":
        return most
    if asked.replicas > most:
        raise SettingsError(
            "args.cpu.replicas",
            f"{asked.replicas} were asked for, but {machines} machines take {most} with instance_per: "
            f"{asked.instance_per}",
        )
    return asked.replicas


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
