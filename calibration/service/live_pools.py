"""Whether an application's pools are in a state to be calibrated, by what `/info` says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calibration.service.application import Application, CalibrationFailed


def notes_on_pools(windve: Mapping[str, Any]) -> Iterator[str]:
    """What a person should know before. Raises CalibrationFailed where nothing can be measured."""
    if windve["config_problem"]:
        raise CalibrationFailed(f"the application has refused its own config: {windve['config_problem']}")
    for name, pool in windve["pools"].items():
        if not pool["live_replicas"]:
            raise CalibrationFailed(f"the {name} pool has no live replica: see `serve status`, then run it again")
        if pool["live_replicas"] < pool["expected_replicas"]:
            yield (
                f"the {name} pool has {pool['live_replicas']} of {pool['expected_replicas']} replicas: "
                "the others may be slower"
            )
        if pool["in_flight"] if "in_flight" in pool else pool["rows"] or pool["waiting"]:
            yield "other traffic is being served: latencies include it, and its clients are told busy"


def check_replicas(application: Application, before: Mapping[str, Any]) -> None:
    """Raises CalibrationFailed where replicas came or went: what was measured is of those before."""
    now = application.info()["windve"]["pools"]
    for name, pool in before.items():
        if set(now.get(name, {"replicas": ()})["replicas"]) != set(pool["replicas"]):
            raise CalibrationFailed(
                f"replicas of the {name} pool came or went during the run: nothing was written; please run it "
                f"again, with a fixed number (args.{name}.replicas) where they follow the load"
            )
