"""Plans each model's part of the cluster: its device and pools, and the resources that Ray reserves for replicas."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.errors import SettingsError
from deployments.hardware.affinity import CpuPart
from deployments.hardware.device_detector import CPU, Machine, Topology, decide_topology, probe_machine
from deployments.settings import Autoscaled, OneModelSettings
from serve_app.config.models import ApplicationArgs
from serve_app.config.router_autoscaling import fewest_routers

logger = logging.getLogger("ray.serve")

_RESOURCES = {"npu": "NPU", "cuda": "GPU"}
_JOIN_POLL_S = 1.0
_RAY_UNITS = 10_000  # in a resource, as Ray counts: rounded up, the last replica would find no place
FRAMEWORK_CPUS = 0.1  # CPUs that Ray reserves for a process that needs few or does its work on a device

Nodes = list[dict[str, Any]]  # as `ray.nodes()` lists them


class Plan(NamedTuple):
    """`device`: the accelerator's in torch's words ("cuda:0", "npu:0", "cpu"), "emulated" or "none"."""

    device: str
    topology: Topology


class Clock(Protocol):
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


def plan_once_nodes_are_there(
    args: ApplicationArgs, all_nodes: Callable[[], Nodes], clock: Clock
) -> tuple[Nodes, dict[str, Plan]]:
    """The cluster's live nodes, and each model's plan. Waits up to `wait_for_nodes_s`, because on Kubernetes the head
    node gets the config before other nodes join. Raises SettingsError if resources are still missing then.
    """
    wait_s = args.shared.wait_for_nodes_s
    ends, told = clock.monotonic() + wait_s, ""
    while True:
        nodes = [node for node in all_nodes() if node["Alive"]]
        try:
            return nodes, plan_models(args, nodes)
        except SettingsError as lacking:
            if clock.monotonic() >= ends:
                raise
            if str(lacking) != told:
                told = str(lacking)
                logger.warning("waiting for more nodes, up to %g s: %s", wait_s, told)
        clock.sleep(_JOIN_POLL_S)


def plan_models(args: ApplicationArgs, nodes: Nodes) -> dict[str, Plan]:
    """Raises SettingsError if the settings ask for more than the cluster has."""
    devices = divide_accelerators(args, nodes)
    plans = {}
    for name, settings in args.models.items():
        with args.locating(name):
            plans[name] = _plan(settings, nodes, *devices[name])
    return plans


def _plan(settings: OneModelSettings, nodes: Nodes, device: str, accelerators: int) -> Plan:
    instances = 0
    if settings.cpu_overflow or not accelerators:
        instances = _cpu_instances(settings, nodes)
    try:
        return Plan(device, decide_topology(accelerators, instances, cpu_overflow=bool(settings.cpu_overflow)))
    except ValueError as error:
        problem = f"{error}; no node of the cluster offers CPUs to Ray (see `ray status`)"
        raise SettingsError("args.accelerator.device", problem) from None


def divide_accelerators(args: ApplicationArgs, nodes: Nodes) -> dict[str, tuple[str, int]]:
    """(device, replicas) for each model; a device serves one replica, or `replicas_per_device` of one model. Models
    that ask for a number of replicas get it. The others share the other devices evenly; if there are too few, the first
    models get them. Raises SettingsError.
    """
    free = {device: int(_total(nodes, resource)) for device, resource in _RESOURCES.items()}
    found, given, auto = dict(free), {}, []
    for name, settings in args.models.items():
        with args.locating(name):
            device, wanted = _wanted(settings, found)
            if device in free and wanted is None:
                auto.append((name, device))
                continue
            if device in free:
                free[device] -= _booked(settings, wanted or 0, device, found[device], free[device])
            given[name] = (device, wanted or 0)
    for index, (name, device) in enumerate(auto):
        count = math.ceil(free[device] / sum(1 for _, other in auto[index:] if other == device))
        free[device] -= count
        given[name] = (device, count * args.models[name].accelerator.replicas_per_device)
        if not count:
            with args.locating(name):
                _do_without(name, args.models[name], device, found[device])
    # Ray shows each replica its own device as number 0.
    return {name: (f"{device}:0" if device in free and n else device if device not in free else "none", n)
            for name, (device, n) in given.items()}  # fmt: skip


def _wanted(settings: OneModelSettings, found: Mapping[str, int]) -> tuple[str, int | None]:
    """(kind of device, count). The count is None for as many as are free. Raises SettingsError."""
    asked = settings.accelerator
    wanted = _asked_for(asked.replicas)
    if asked.device == "none":
        return "none", 0
    # An emulated NPU or GPU reserves a real one.
    is_emulated = asked.engine == "emulated" and asked.device not in _RESOURCES
    kinds = [asked.device] if asked.device != "auto" else [kind for kind in found if found[kind]]
    if asked.replicas_per_device > 1 and (is_emulated or not kinds):
        problem = "an emulated device is not shared" if is_emulated else "no node has an accelerator (see `ray status`)"
        raise SettingsError("args.accelerator.replicas_per_device", problem)
    if is_emulated or asked.device == "cpu":
        return "emulated" if is_emulated else "cpu", wanted or 1
    if not kinds:
        return "none", 0
    kind = kinds[0]
    if not found[kind]:
        raise SettingsError(
            "args.accelerator.device",
            f"the config asks for {kind}, but no node has the resource {_RESOURCES[kind]} (see `ray status`)",
        )
    return kind, wanted


def _booked(settings: OneModelSettings, wanted: int, kind: str, found: int, free: int) -> int:
    """How many devices so many replicas take. Raises SettingsError if there are fewer."""
    each = settings.accelerator.replicas_per_device
    devices = math.ceil(wanted / each)
    if devices > free:
        taken = f", and {found - free} of them are for other models" if free < found else ""
        shared = f" for {each} replicas each" if each > 1 else ""
        problem = f"the config asks for {wanted}, but there are {found} {kind} devices{shared}{taken}"
        raise SettingsError("args.accelerator.replicas", problem)
    return devices


def _do_without(name: str, settings: OneModelSettings, kind: str, found: int) -> None:
    """Serve the model without an accelerator. Raises SettingsError if its settings require one."""
    taken = f"the cluster's {found} {kind} device{'s are' if found > 1 else ' is'} for other models"
    if settings.accelerator.device != "auto":
        raise SettingsError("args.accelerator.device", f"the config asks for {kind}, but {taken}")
    logger.warning("%s is served by the CPU alone: %s", name, taken)


def _cpu_instances(settings: OneModelSettings, nodes: Nodes) -> int:
    asked = settings.cpu
    machines = sum(1 for node in nodes if node["Resources"].get("CPU", 0) > 0)
    most = machines * _instances_per_machine(settings, nodes)
    wanted = _asked_for(asked.replicas)
    if wanted is None:
        return most
    if wanted > most:
        raise SettingsError(
            "args.cpu.replicas",
            f"the config asks for {wanted}, but {machines} machines hold {most} by instance_per: {asked.instance_per}",
        )
    return wanted


def _asked_for(replicas: str | int | Autoscaled) -> int | None:
    """How many replicas to start with; None: as many as the cluster has room for."""
    if isinstance(replicas, Autoscaled):
        return replicas.min
    return replicas if isinstance(replicas, int) else None


def _instances_per_machine(settings: OneModelSettings, nodes: Nodes) -> int:
    """1, or the smallest number of NUMA nodes of any machine: all replicas of a deployment have the same options."""
    if settings.cpu.instance_per == "machine":
        return 1
    return min(machine.numa_nodes for machine in probe_nodes(nodes))


def probe_nodes(nodes: Nodes) -> list[Machine]:
    """`probe_machine` on each node that offers CPUs."""
    probe = ray.remote(num_cpus=0)(probe_machine)
    there = [node["NodeID"] for node in nodes if node["Resources"].get("CPU", 0) > 0]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in there]
    machines: list[Machine] = ray.get([probe.options(scheduling_strategy=here).remote() for here in strategies])
    return machines


def cpu_parts(models: Mapping[str, OneModelSettings], plans: Mapping[str, Plan]) -> dict[str, CpuPart]:
    """The part of a machine's cores that each model with CPU instances asks for."""
    return {
        name: CpuPart(
            share=settings.cpu.share,
            cores=None if settings.cpu.cores == "auto" else settings.cpu.cores,
            per_numa_node=settings.cpu.instance_per == "numa_node",
        )
        for name, settings in models.items()
        if CPU in plans[name].topology.pools
    }


def accelerator_options(device: str, replicas_per_device: int = 1) -> dict[str, Any]:
    """Ray options of a replica on this device, which it may share."""
    options: dict[str, Any] = {"num_cpus": FRAMEWORK_CPUS}
    part = 1 if replicas_per_device == 1 else _RAY_UNITS // replicas_per_device / _RAY_UNITS
    if device.startswith("npu"):
        options["resources"] = {"NPU": part}
    elif device.startswith("cuda"):
        options["num_gpus"] = part
    return {"ray_actor_options": options}


def cpu_options(settings: OneModelSettings, nodes: Nodes, part: float = 1.0) -> dict[str, Any]:
    """Ray options of a CPU instance. `part`: this model's fraction of the CPUs for all models' instances, in (0, 1]."""
    per_machine = _instances_per_machine(settings, nodes)
    booked = settings.cpu.num_cpus
    if booked == "auto":
        smallest = min(node["Resources"]["CPU"] for node in nodes if node["Resources"].get("CPU", 0) > 0)
        share = smallest * 3 / 4 * part / per_machine  # the lower quarter is for the framework and the accelerator
        booked = FRAMEWORK_CPUS if settings.emulated else math.floor(share) if share >= 1 else min(0.5, _down(share))
    return {"ray_actor_options": {"num_cpus": booked}, "max_replicas_per_node": per_machine}


def router_count(nodes: Nodes) -> int:
    """The number of Routers if the config says nothing of it."""
    return fewest_routers(_total(nodes, "CPU"))


def _down(number: float) -> float:
    """Round down to two decimals: Ray counts CPUs in ten-thousandths."""
    return math.floor(number * 100) / 100


def _total(nodes: Nodes, resource: str) -> float:
    return sum(float(node["Resources"].get(resource, 0)) for node in nodes)
