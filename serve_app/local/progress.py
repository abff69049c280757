"""What an application that does not come up waits for, in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from serve_app.config.models import ApplicationArgs

FIRST_S, AGAIN_S = 10.0, 30.0  # after so long it is said what is waited for, and again every so often

_SETTINGS = {"CPU": "cpu.num_cpus", "GPU": "accelerator.replicas", "NPU": "accelerator.replicas"}
_RESOLUTION = 1e-6

Resources = Mapping[str, float]


def lacking(asked: Resources, there: Resources, free: Resources) -> str | None:
    """What of the resources that a process asks for is not free in the cluster; None: all is."""
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

    `applications`: of Serve's details (`ServeInstanceDetails`), which leave out what Serve has not set yet; `names`:
    see `deployment_models`; `there`, `free`: what the cluster has, as Ray counts it.
    """
    for name, application in applications.items():
        if application["status"] == "DEPLOYING" and not application["deployments"]:
            yield f"the application {name} is being read: Ray imports it, and looks at the nodes"
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
    """(application, deployment) -> the model that the deployment computes."""
    return {
        (name, deployment): model
        for name, args in applications.items()
        for model, pools in args.deployments().items()
        for deployment in pools.values()
    }


class Reporter:
    """Says what is waited for, if it takes long. `say` gets each line; `look` tells what `waits` does."""

    def __init__(self, say: Callable[[str], None], look: Callable[[], Iterable[str]], now: float) -> None:
        self._say, self._look = say, look
        self._started, self._due = now, now + FIRST_S

    def tick(self, now: float) -> None:
        """Call it every now and then."""
        if now < self._due:
            return
        self._due = now + AGAIN_S
        for line in self._look():
            self._say(f"waiting for {now - self._started:.0f} s: {line}")
