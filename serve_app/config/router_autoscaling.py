"""Lets the Routers follow the load, by the busy share that each reports to Serve (`BusyMeter`). Pure.

Serve ignores `num_replicas` in a config if the code has an `autoscaling_config`. So windve adds it to the config, where
a config that sets either of them keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

AUTO = "auto"  # Serve's `num_replicas`: the build task then hands the policy to the controller, which may lack windve
TARGET = 0.6  # of the time; above it, requests wait for a Router noticeably longer
_CPUS_FOR_TWO = 4  # with fewer, a second Router would take its core from the first, HAProxy and the CPU pool
_CPUS_EACH = 2  # a busy Router takes one for its event loop, and most of another for tokenizing and its HAProxy


def fewest_routers(cpus: float) -> int:
    """2 in a cluster that offers Ray four CPUs or more, so that one may die; else 1."""
    return 2 if cpus >= _CPUS_FOR_TWO else 1


def router_autoscaling(cpus: float) -> dict[str, Any]:
    """The `autoscaling_config` of the Routers in a cluster that offers Ray so many CPUs: one Router per two of them at
    most. A new Router takes seconds to start, and a removed one finishes its requests, so Routers stay ten minutes.
    """
    fewest = fewest_routers(cpus)
    return {
        "min_replicas": fewest,
        "max_replicas": max(fewest, int(cpus // _CPUS_EACH)),
        "upscale_delay_s": 5.0,
        "downscale_delay_s": 600.0,
        "metrics_interval_s": 5.0,
        "look_back_period_s": 10.0,
        "policy": {
            "policy_function": "deployments.serve_adapter.autoscaling:KeepUtilization",
            "policy_kwargs": {"target": TARGET},
        },
    }


def follow_load(applications: Iterable[dict[str, Any]], cpus: float) -> None:
    """Add it to each application's Router that sets neither `num_replicas` nor `autoscaling_config`."""
    for application in applications:
        for deployment in application.get("deployments") or []:
            if deployment.get("name") == "Router" and not {"num_replicas", "autoscaling_config"} & deployment.keys():
                deployment |= {"num_replicas": AUTO, "autoscaling_config": router_autoscaling(cpus)}
