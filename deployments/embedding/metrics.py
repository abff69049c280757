"""The metrics that only embeddings have; `serving/metrics.py` has those that generation has, too. docs/operations.md
explains each one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.serving.metrics import (
    BUCKETS_S,
    BUSY,
    CANCELLED,
    ERROR,
    NO_POOL,
    OK,
    REACHED,
    REPLICA_GAUGES,
    TOKENIZING_BUCKETS_S,
    Gauge,
    Histogram,
    Instruments,
    ReplicaMetrics,
    TenantMetrics,
    outcome_of,
    pool_gauges,
    tally,
)
from deployments.serving.recent import LATE, REFUSED, Recent


class RouterMetrics:
    """A Router's metrics. All methods are called in the event loop's thread."""

    def __init__(self, instruments: Instruments) -> None:
        self._queries = tally(
            instruments, "windve_queries", "Queries by pool and by the outcome of their request", ("pool", "outcome")
        )
        self._slo_missed = tally(
            instruments,
            "windve_slo_missed",
            "Requests of windve_requests that were answered late, or failed by a server error",
            (),
        )
        self._requests = tally(instruments, "windve_requests", "Requests that the SLO applies to: all except bulk", ())
        self.tenants = TenantMetrics(instruments)
        self._total = Histogram(
            instruments, "windve_request_seconds", "Seconds from arrival to answer of windve_requests", BUCKETS_S
        )
        self._queueing = Histogram(
            instruments, "windve_queue_seconds", "The longest wait for a device among a request's queries", BUCKETS_S
        )
        self._tokenizing = Histogram(
            instruments, "windve_tokenization_seconds", "Tokenizing one request", TOKENIZING_BUCKETS_S
        )
        gauges = {
            **REACHED,
            "depth": "Queue depth in force for each live replica; 0 if none is set",
            "alpha_s": "Latency model: extra seconds per query of 75 tokens in a batch",
            "beta_s": "Latency model: seconds that any batch takes",
        }
        self._gauges = pool_gauges(instruments, gauges)
        self._slo: Gauge = instruments.Gauge("windve_slo_seconds", "The promised latency")
        self.recent = Recent()

    def answered(self, pools: Sequence[str], *, tokenization_s: float, queue_s: float) -> None:
        """Count an answered request, by the pool of each of its queries."""
        for pool in set(pools):
            count = pools.count(pool)
            self._queries.add(count, pool, OK)
            self.recent.add(pool, count)
        self._tokenizing.observe(tokenization_s)
        self._queueing.observe(queue_s)

    def promised(self, total_s: float, allowed_s: float) -> None:
        """Count an answered request that is not bulk. An answer after more than `allowed_s` (the SLO,
        or the request's own timeout) missed the SLO.
        """
        self._requests.add(1)
        self._total.observe(total_s)
        if total_s > allowed_s:
            self._slo_missed.add(1)
            self.recent.add(LATE)

    def failed(self, error: BaseException, queries: int, *, late: bool = False) -> None:
        """Count a request of `queries` queries that ended with this error. `late`: after the promised deadline."""
        outcome = outcome_of(error)
        self._queries.add(queries, NO_POOL, outcome)
        if outcome == BUSY:
            self.recent.add(REFUSED, queries)
        if outcome == ERROR or (late and outcome == CANCELLED):  # errors of ours break the promise, too
            self._requests.add(1)
            self._slo_missed.add(1)
            self.recent.add(LATE)

    def publish(self, slo_s: float, pools: Mapping[str, Mapping[str, float]]) -> None:
        """Publish what was counted since the last call, and the gauges of each pool, to Ray."""
        for counted in (self._queries, self._requests, self._slo_missed):
            counted.publish()
        self.tenants.publish()
        for histogram in (self._total, self._queueing, self._tokenizing):
            histogram.publish()
        self._slo.set(slo_s, {})
        for pool, state in pools.items():
            for key, gauge in self._gauges.items():
                gauge.set(float(state[key]), {"pool": pool})


class EmbedderMetrics(ReplicaMetrics):
    """An embedding replica's metrics, with gauges from its `ReplicaState`."""

    def __init__(self, instruments: Instruments, pool: str, info: Mapping[str, str]) -> None:
        gauges = {**REPLICA_GAUGES, "free_s": "Predicted seconds until all admitted queries are answered"}
        super().__init__(instruments, pool, info, gauges, ("full", "never", "closed"))
