"""Autoscaling policy: a pool gets as many replicas as keep its queues at a target utilization. Pure.

Serve's own policy counts calls in progress at each replica. Here queries go through a socket that Serve does not see,
and the queue is the scarce resource. So each replica reports to Serve how full its queue is
(`Replica.record_autoscaling_stats`), and this policy keeps that at `target`. Delays, factors and bounds remain Serve's.

Serve sends this module by value to its controller, so it imports nothing of windve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

UTILIZATION = "utilization"  # the name of the metric in which a replica reports how full its queue is


class Context(Protocol):
    """The part of Serve's AutoscalingContext that the policy reads."""

    current_num_replicas: int
    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class KeepUtilization:
    """Serve's `policy_function`. `target`: how full the queues should be, in (0, 1]. See `Scheduler.utilization`."""

    def __init__(self, target: float) -> None:
        self.target = target

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """(wanted replicas before Serve applies bounds and delays, no state). A replica that has not reported yet
        counts as full as the mean of the others.
        """
        fills = (context.aggregated_metrics or {}).get(UTILIZATION) or {}
        if not fills:
            return context.target_num_replicas, {}
        mean = sum(fills.values()) / len(fills)
        return context.current_num_replicas * mean / self.target, {}
