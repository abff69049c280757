"""Chooses the cores of a replica. Pure, except that it reads this machine's cores."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from deployments.hardware.affinity import CpuPart, plan_affinity, read_cpu_shape
from deployments.hardware.device_detector import CPU
from deployments.settings import OneModelSettings

logger = logging.getLogger("ray.serve")


def choose_cores(
    pool: str, settings: OneModelSettings, parts: Mapping[str, CpuPart], local_rank: int
) -> tuple[int, ...]:
    """The cores of a replica: planned for a CPU replica; those that the plan leaves for an accelerator's."""
    shape, name = read_cpu_shape(), settings.model.served_name
    if not parts:
        return shape.allowed[-shape.usable :]
    plans = dict(zip(parts, plan_affinity(shape, list(parts.values())), strict=True))
    if pool == CPU:
        instances = plans[name].instances
        cores = instances[local_rank % len(instances)]
        others = [
            other for other, plan in plans.items() if other != name and not set(cores).isdisjoint(*plan.instances)
        ]
        if others:
            logger.warning("%s shares its cores with %s: there are fewer cores than models", name, ", ".join(others))
        return cores
    reserved = next(iter(plans.values())).reserved
    return reserved if reserved and settings.accelerator.device != "cpu" else shape.allowed[-shape.usable :]
