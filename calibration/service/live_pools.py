"""Checks from `/info` whether an application's pools can be calibrated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calibration.service.application import Application, CalibrationFailed


def notes_on_pools(windve: Mapping[str, Any]) -> Iterator[str]:
    """Notes for the user before a run. Raises CalibrationFailed if nothing can be measured."""
    if windve["config_problem"]:
        raise CalibrationFailed(f"the application has refused its own config: {windve['config_problem']}")
    for name, pool in windve["pools"].items():
        if not pool["live_replicas"]:
            raise CalibrationFailed(f"the {name} pool has no live replica: see `serve status`, then run it again")
        if pool["live_replicas"] < pool["expected_replicas"]:
            yield (
                f"the {name} pool has {pool['live_replicas']} of {pool['expected_replicas']} replicas: "
                "the missing ones may be slower"
            )
        if pool["in_flight"] if "in_flight" in pool else pool["rows"] or pool["waiting"]:
            yield "other traffic is being served: it affects the latencies, and its requests may be refused"


def check_replicas(application: Application, before: Mapping[str, Any]) -> None:
    """Raises CalibrationFailed if replicas joined or left, because the measurements are of the earlier ones."""
    now = application.info()["windve"]["pools"]
    for name, pool in before.items():
        if set(now.get(name, {"replicas": ()})["replicas"]) != set(pool["replicas"]):
            raise CalibrationFailed(
                f"replicas of the {name} pool joined or left during the run: nothing was written; run it again, "
                f"with a fixed number of replicas (args.{name}.replicas) if they are autoscaled"
            )
