"""Says what an application that has not started yet is waiting for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from serve_app.config.models import ApplicationArgs

FIRST_S, AGAIN_S = 10.0, 30.0  # when to print the first line, and the interval after it

_SETTINGS = {"CPU": "cpu.num_cpus", "GPU": "accelerator.replicas", "NPU": "accelerator.replicas"}
_RESOLUTION = 1e-6

Resources = Mapping[str, float]


def lacking(asked: Resources, there: Resources, free: Resources) -> str | None:
    """The first resource that a process asks for and the cluster does not have free; None if all are free."""
    for name, wanted in asked.items():
        has, left = there.get(name, 0.0), free.get(name, 0.0)
        if name in _SETTINGS and wanted > left + _RESOLUTION:
            taken = f"{has - left:.3g} {'is' if has - left <= 1 else 'are'} taken"
            return f"{wanted:.3g} {name}: the cluster has {has:.3g}, {taken}; set {_SETTINGS[name]}"
    return None


def waits(
    applications: Mapping[str, Any], names: Mapping[tuple[str, str], str], there: Resources, free: Resources
) -> Iterator[str]:
    """One sentence for each deployment that has not started.

    `applications`: from Serve's `ServeInstanceDetails`, in which values that Serve has not set yet are missing.
    `names`: see `deployment_models`. `there`, `free`: the cluster's total and free resources, as Ray counts them.
    """
    for name, application in applications.items():
        if application["status"] == "DEPLOYING" and not application["deployments"]:
            yield f"the application {name} is loading: Ray imports it and checks the nodes"
        for deployment, about in application["deployments"].items():
            starting = [replica for replica in about["replicas"] if replica["state"] == "STARTING"]
            whose = names.get((name, deployment))
            what = f"{deployment} of {whose}" if whose else deployment
            if any(replica.get("pid") is None for replica in starting):
                problem = lacking(about.get("required_resources", {}), there, free)
                yield f"{what} waits for {problem}" if problem else f"{what} waits for Ray to start its process"
            elif starting:
                yield f"{what} starts: it loads the model and warms up" if whose else f"{what} starts"


def deployment_models(applications: Mapping[str, ApplicationArgs]) -> dict[tuple[str, str], str]:
    """(application, deployment) -> the model that the deployment runs."""
    return {
        (name, deployment): model
        for name, args in applications.items()
        for model, pools in args.deployments().items()
        for deployment in pools.values()
    }


class Reporter:
    """Reports what a slow start is waiting for. `look` returns the lines of `waits`; `say` prints one."""

    def __init__(self, say: Callable[[str], None], look: Callable[[], Iterable[str]], now: float) -> None:
        self._say, self._look = say, look
        self._started, self._due = now, now + FIRST_S

    def tick(self, now: float) -> None:
        """Call it regularly. Prints when a report is due."""
        if now < self._due:
            return
        self._due = now + AGAIN_S
        for line in self._look():
            self._say(f"waiting for {now - self._started:.0f} s: {line}")
