"""The metrics: every name, tag and bucket. docs/operations.md explains each one.

Ray exports them from each node. It adds the prefix `ray_`, the tags application, deployment and replica, and to
counters the suffix `_total`.

- While queries are served, counters and histograms are plain numbers. `publish` passes them to Ray every two seconds.
- A histogram is published as gauges under the names of a Prometheus histogram: `NAME_bucket` by `le`, `NAME_sum` and
  `NAME_count`. It counts every value. Ray's own histograms are unsuitable: Ray's agent replays each value in a loop
  (`open_telemetry_metric_recorder.py` in 2.60), so thousands a second would cost it a core, and their sum is a guess.

Does not import ray: Ray's instruments are arguments.
"""

from __future__ import annotations

import asyncio
import contextvars
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from deployments.errors import Busy, DeadlineExceeded, OverQuota, OverShare, is_ours

OK, BUSY, ERROR, CANCELLED, INVALID = "ok", "busy", "error", "cancelled", "invalid"
NO_POOL = "none"  # the pool of a request that failed
PUBLISHED_EVERY_S = 2.0

BUCKETS_S = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0]
TOKENIZING_BUCKETS_S = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
_QUERIES = [float(2**power) for power in range(10)]
_POOL = ("pool",)
_TENANT = ("tenant",)
_MOST_TENANTS = 50  # API key names in the metrics of each Router
OTHER_TENANTS = "other"
REACHED = {  # fields of a pool's state at a Router
    "is_open": "1 unless the pool is closed (queue_depth: 0)",
    "live_replicas": "Replicas that this Router may send to",
    "ejected_replicas": "Ejected replicas of windve_live_replicas: their engines fail, or hang (generation only)",
    "calibrated": "1 if a calibration wrote the cost model, 0 if it was measured at warm-up",
}
REPLICA_GAUGES = {  # fields of any replica's state
    "in_flight": "Queries that this replica has admitted and not yet answered",
    "waiting": "Queries of these that do not run yet",
    "slowdown": "Learned time of a batch over the cost model's prediction",
    "margin": "Safety margin that admission adds to a prediction, as a fraction of it",
}
ROUTER_GAUGES = {  # of a Router's process and its door: field -> name, meaning
    "busy": ("busy_ratio", "Share of time in which this Router's thread ran or waited for a core"),
    "in_hand": ("in_hand", "Requests that wait for this Router, or that it reads, checks or tokenizes"),
    "free": ("free_places", "How many more requests this Router takes from HAProxy"),
    "read_s": ("read_seconds", "CPU time of this Router's thread for a request, learned while the Router is short"),
}
_RATIOS = {"slowdown": "slowdown", "margin": "safety_margin"}
_LIMITS: dict[type[BaseException], str] = {OverShare: "share", OverQuota: "quota"}


class _Counter(Protocol):
    def inc(self, value: float, tags: dict[str, str]) -> None: ...


class Gauge(Protocol):
    def set(self, value: float, tags: dict[str, str]) -> None: ...


class Instruments(Protocol):
    """`ray.serve.metrics`, or a test's replacement."""

    Counter: Any
    Gauge: Any


class OfModel:
    """Instruments that add the tag `model` to every value."""

    def __init__(self, instruments: Instruments, model: str) -> None:
        def tagged(kind: Callable[..., Any]) -> Callable[..., Any]:
            def make(name: str, about: str, tags: tuple[str, ...] = ()) -> Any:
                instrument = kind(name, about, (*tags, "model"))
                instrument.set_default_tags({"model": model})
                return instrument

            return make

        self.Counter, self.Gauge = tagged(instruments.Counter), tagged(instruments.Gauge)


def outcome_of(error: BaseException) -> str:
    """The outcome under which a request that ended with this error is counted."""
    if isinstance(error, Busy):
        return BUSY
    if isinstance(error, DeadlineExceeded | asyncio.CancelledError):
        return CANCELLED  # the client stopped waiting
    return ERROR if is_ours(error) else INVALID


@dataclass(slots=True, eq=False)
class Tally:
    """A counter that sums its increments until they are published."""

    counter: _Counter
    names: tuple[str, ...]
    steps: dict[tuple[str, ...], float] = field(default_factory=dict)
    _totals: dict[tuple[str, ...], float] = field(default_factory=dict)

    def reached(self, total: float, *values: str) -> None:
        """Add what a total since the start has grown by."""
        before = self._totals.get(values, 0.0)
        self.add(total - before, *values)
        self._totals[values] = max(total, before)

    def add(self, step: float, *values: str) -> None:
        self.steps[values] = self.steps.get(values, 0.0) + step

    def publish(self) -> None:
        steps, self.steps = self.steps, {}
        for values, step in steps.items():
            if step > 0:
                self.counter.inc(step, dict(zip(self.names, values, strict=True)))


class Histogram:
    """Counts values by inclusive upper bound, as Prometheus does, and sums them, by tags."""

    def __init__(
        self, instruments: Instruments, name: str, about: str, bounds: Sequence[float], tags: tuple[str, ...] = ()
    ) -> None:
        self._bounds, self._names = tuple(bounds), tags
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        self._bucket: Gauge = instruments.Gauge(f"{name}_bucket", about, (*tags, "le"))
        self._sum: Gauge = instruments.Gauge(f"{name}_sum", about, tags)
        self._count: Gauge = instruments.Gauge(f"{name}_count", about, tags)

    def observe(self, value: float, *tags: str) -> None:
        if tags not in self._counts:
            self._counts[tags], self._sums[tags] = [0] * (len(self._bounds) + 1), 0.0
        self._counts[tags][bisect_left(self._bounds, value)] += 1
        self._sums[tags] += value

    def publish(self) -> None:
        """Publish the totals since the start to Ray."""
        labels = (*map(str, self._bounds), "+Inf")
        for values, counts in self._counts.items():
            tags = dict(zip(self._names, values, strict=True))
            for label, count in zip(labels, accumulate(counts), strict=True):
                self._bucket.set(float(count), {**tags, "le": label})
            self._sum.set(self._sums[values], tags)
            self._count.set(float(sum(counts)), tags)


class TenantMetrics:
    """Usage by API key name."""

    def __init__(self, instruments: Instruments) -> None:
        self._names: set[str] = set()
        self._queries = tally(
            instruments, "windve_tenant_queries", "Queries by the API key's name and by outcome", ("tenant", "outcome")
        )
        self._tokens = tally(instruments, "windve_tenant_tokens", "Tokens of answered queries by API key", _TENANT)
        self._seconds = tally(
            instruments, "windve_tenant_device_seconds", "Device seconds of answered queries by API key", _TENANT
        )

    def used(self, client: str, queries: int, *, tokens: int, device_s: float) -> None:
        """Count an answered request of this client."""
        name = self._shown(client)
        self._queries.add(queries, name, OK)
        self._tokens.add(tokens, name)
        self._seconds.add(device_s, name)

    def refused(self, client: str, error: BaseException, queries: int) -> None:
        """Count a request of this client that ended with this error."""
        outcome = next((limit for kind, limit in _LIMITS.items() if isinstance(error, kind)), outcome_of(error))
        self._queries.add(queries, self._shown(client), outcome)

    def _shown(self, client: str) -> str:
        """The client's name, or `OTHER_TENANTS` once `_MOST_TENANTS` other names are in use."""
        if client not in self._names and len(self._names) >= _MOST_TENANTS:
            return OTHER_TENANTS
        self._names.add(client)
        return client

    def publish(self) -> None:
        """Publish what was counted since the last call to Ray."""
        for counted in (self._queries, self._tokens, self._seconds):
            counted.publish()


class ReplicaMetrics:
    """The metrics of every replica. `info`: what it runs, published as tags; `gauges`: the fields of its state that are
    published, with descriptions; `reasons`: the reasons for refusals, in the state's order.
    """

    def __init__(
        self,
        instruments: Instruments,
        pool: str,
        info: Mapping[str, str],
        gauges: Mapping[str, str],
        reasons: Sequence[str],
    ) -> None:
        self._pool = {"pool": pool}
        tallies = {
            "windve_batches": "Batches that the engine ran",
            "windve_batched_queries": "Queries in these",
            "windve_batch_seconds": "What these took",
            "windve_tokens": "Tokens in these",
            "windve_planned_seconds": "The cost model's prediction for these batches",
            "windve_failed_batches": "Batches that failed",
        }
        self._tallies = [tally(instruments, name, about, _POOL) for name, about in tallies.items()]
        self._inference = Histogram(
            instruments, "windve_inference_seconds", "One batch in the engine", BUCKETS_S, _POOL
        )
        self._sizes = Histogram(instruments, "windve_batch_queries", "Queries in one batch", _QUERIES, _POOL)
        self._refusals = tally(
            instruments, "windve_refusals", "Queries that a replica refused, by reason", ("pool", "reason")
        )
        self._reasons = reasons
        self._gauges = pool_gauges(instruments, gauges)
        self._info: Gauge = instruments.Gauge("windve_info", "Always 1; what this replica runs", ("pool", *info))
        self._about = {**self._pool, **info}

    def ran(self, queries: int, tokens: int, seconds: float, planned_s: float) -> None:
        """Count a successful run, which took `seconds`. The cost model predicted `planned_s`."""
        self._inference.observe(seconds, self._pool["pool"])
        self._sizes.observe(float(queries), self._pool["pool"])
        for counted, step in zip(self._tallies, (1, queries, seconds, tokens, planned_s), strict=False):
            counted.add(step, self._pool["pool"])

    def failed(self) -> None:
        self._tallies[-1].add(1, self._pool["pool"])

    def publish(self, state: Any) -> None:
        """Publish what was counted since the last call, and this replica's gauges, to Ray. `state` has the gauges'
        fields, and `refusals`: counts since the start, by reason.
        """
        for reason, total in zip(self._reasons, state.refusals, strict=True):
            self._refusals.reached(total, self._pool["pool"], reason)
        for counted in (*self._tallies, self._refusals):
            counted.publish()
        for histogram in (self._inference, self._sizes):
            histogram.publish()
        for key, gauge in self._gauges.items():
            gauge.set(float(getattr(state, key)), self._pool)
        self._info.set(1.0, self._about)


def publish_periodically(publish: Callable[[], None]) -> None:
    """Call `publish` now and every `PUBLISHED_EVERY_S`, for as long as the running loop runs."""
    asyncio.get_running_loop().call_later(
        PUBLISHED_EVERY_S, publish_periodically, publish, context=contextvars.Context()
    )
    publish()


def tally(instruments: Instruments, name: str, about: str, tags: tuple[str, ...]) -> Tally:
    """A new counter of that name."""
    return Tally(instruments.Counter(name, about, tags), tags)


def router_gauges(instruments: Instruments) -> dict[str, Gauge]:
    """The gauges of a Router's process, which its models share, by the fields of `ROUTER_GAUGES`."""
    return {key: instruments.Gauge(f"windve_router_{name}", about) for key, (name, about) in ROUTER_GAUGES.items()}


def pool_gauges(instruments: Instruments, abouts: Mapping[str, str]) -> dict[str, Gauge]:
    """A gauge for each field, tagged with the pool: `beta_s` becomes windve_beta_seconds, `is_open` windve_open."""
    return {key: instruments.Gauge(_name(key), about, _POOL) for key, about in abouts.items()}


def _name(key: str) -> str:
    if key in _RATIOS:
        return f"windve_{_RATIOS[key]}_ratio"
    return f"windve_{key.removeprefix('is_').removesuffix('_s')}{'_seconds' if key.endswith('_s') else ''}"
