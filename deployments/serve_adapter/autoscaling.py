"""How many embedder replicas a pool should have: as many as keep its queues filled to a share. Pure.

Serve's own policy goes by calls in progress at each replica. Here queries travel by a socket that Serve does not
count, and what is scarce is the queue. So each replica tells Serve how full its queue is
(`Embedder.record_autoscaling_stats`), and this policy keeps it at `target`. Delays, factors and bounds stay Serve's.

Serve sends this module by value to its controller: it imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

UTILIZATION = "utilization"  # the name under which a replica tells how full its queue is


class Context(Protocol):
    """What of Serve's AutoscalingContext is looked at."""

    current_num_replicas: int
    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class KeepUtilization:
    """Serve's `policy_function`. `target`: how full the queues should be, in (0, 1]: see `Scheduler.utilization`."""

    def __init__(self, target: float) -> None:
        self.target = target

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """(replicas wanted before Serve's bounds and delays, no state). A replica that has not reported yet counts as
        full as the mean of the others.
        """
        fills = (context.aggregated_metrics or {}).get(UTILIZATION) or {}
        if not fills:
            return context.target_num_replicas, {}
        mean = sum(fills.values()) / len(fills)
        return context.current_num_replicas * mean / self.target, {}
