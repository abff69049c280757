"""What each component of a cluster is asked for by its size alone, whatever the queries: computed, pure.

The periods are those of the code: the product's own, and Ray's defaults as the installed Ray has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from deployments.errors import Busy, DeadlineExceeded, EmptyInput, EngineFailed
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.metrics import EmbedderMetrics, Instruments, PoolState, RouterMetrics
from deployments.queueing.schedule import ReplicaState

EMBEDDER_CHECK_S, ROUTER_CHECK_S = 2.0, 1.0  # health_check_period_s in serve_app/bound_pools.py
CHECK_CORE_S = 0.0005  # of the controller for each health check, by github.com/ray-project/ray/pull/64871
SCRAPED_EVERY_S = 15.0  # assumed
RAY_BENCHMARK_REPLICAS = 8192  # the largest that Ray's own controller benchmark runs: ray-project/ray/pull/65371


@dataclass(frozen=True, slots=True)
class Periods:
    """Seconds between two."""

    router_check: float  # the controller's, of each Router
    proxy_check: float  # the controller's, of each node's proxy
    haproxy_check: float  # each HAProxy's, of each Router
    long_poll: tuple[float, float]  # until one without news ends
    node_check: float  # the GCS's, of each node
    node_checks_failed: int  # until a node is dead
    node_check_timeout: float
    agent_report: float  # each node's agent

    @classmethod
    def of_ray(cls) -> Periods:
        """As the product and the installed Ray have them, environment included."""
        from ray._raylet import Config  # type: ignore[attr-defined]
        from ray.dashboard.modules.reporter import reporter_consts
        from ray.serve._private import constants, long_poll

        return cls(
            router_check=ROUTER_CHECK_S,
            proxy_check=constants.PROXY_HEALTH_CHECK_PERIOD_S,
            haproxy_check=float(constants.RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER.removesuffix("s")),
            long_poll=long_poll.LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S,
            node_check=Config.health_check_period_ms() / 1000,
            node_checks_failed=Config.health_check_failure_threshold(),
            node_check_timeout=Config.health_check_timeout_ms() / 1000,
            agent_report=reporter_consts.REPORTER_UPDATE_INTERVAL_MS / 1000,
        )


@dataclass(frozen=True, slots=True)
class Loads:
    """Of one application on `nodes` with two embedder replicas each; rates are per second."""

    nodes: int
    routers: int
    replicas: int
    channels: int  # Router to embedder
    channel_mb: float  # of all processes together
    haproxy_checks_router: float  # that each Router answers
    controller_checks: float
    controller_core: float  # share of its core that these take
    long_polls: int  # open at the controller
    told_at_change: int  # replica records that the controller sends when one replica comes or goes
    lookups: int  # of actors, at the GCS, when all Routers start
    node_checks: float
    reports: float  # of the nodes' agents
    series: int  # the product's own, in Prometheus
    samples: float


def loads(nodes: int, routers: int, periods: Periods, *, channel_kb: float) -> Loads:
    replicas = 2 * nodes
    checks = replicas / EMBEDDER_CHECK_S + routers / periods.router_check + nodes / periods.proxy_check
    series = routers * router_series() + replicas * embedder_series()
    return Loads(
        nodes=nodes,
        routers=routers,
        replicas=replicas,
        channels=routers * replicas,
        channel_mb=routers * replicas * channel_kb / 1000,
        haproxy_checks_router=nodes / periods.haproxy_check,
        controller_checks=checks,
        controller_core=checks * CHECK_CORE_S,
        long_polls=routers + nodes,
        told_at_change=routers * nodes,  # the pool's replicas, to each Router
        lookups=routers * replicas,
        node_checks=nodes / periods.node_check,
        reports=nodes / periods.agent_report,
        series=series,
        samples=series / SCRAPED_EVERY_S,
    )


def largest(bound: Callable[[int], bool], most: int = 65_536) -> int:
    """The most nodes, by powers of two and then exactly, for which `bound` holds; it is taken to hold below."""
    low, high = 0, 1
    while high <= most and bound(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bound(middle) else (low, middle)
    return low


def router_series() -> int:
    """Time series of one Router with two pools, counted by its own metrics."""
    ledger = _Ledger()
    metrics = RouterMetrics(ledger.instruments)
    metrics.answered([ACCELERATOR, CPU], tokenization_s=0.0, queue_s=0.0)
    for error in _endings():
        metrics.failed(error, 1)
    metrics.promised(2.0, 1.0)
    metrics.publish(
        1.0,
        dict.fromkeys(
            (ACCELERATOR, CPU),
            PoolState(is_open=True, depth=1, live_replicas=1, alpha_s=0.0, beta_s=0.0, calibrated=True),
        ),
    )
    return ledger.series


def embedder_series() -> int:
    ledger = _Ledger()
    metrics = EmbedderMetrics(ledger.instruments, CPU, {"model": "m", "engine": "e", "dtype": "d", "version": "v"})
    metrics.ran(1, 1, 1.0, 1.0)
    metrics.failed()
    metrics.publish(ReplicaState(0.0, 0.0, 0.0, 0, 0, 0, 0, (0.0, 0.0, 0.0, 0.0), 1.0, 0.0, (1, 1, 1)))
    return ledger.series


def _endings() -> list[BaseException]:
    """One of each outcome."""
    return [Busy("", retry_after_s=1.0), DeadlineExceeded(""), EmptyInput(""), EngineFailed("")]


@dataclass(slots=True)
class _Ledger:
    """In place of `ray.serve.metrics`: what Prometheus would see."""

    seen: set[tuple[str, tuple[tuple[str, str], ...], int]] = field(default_factory=set)

    @property
    def series(self) -> int:
        return sum(lines for _, _, lines in self.seen)

    @property
    def instruments(self) -> Instruments:
        made = SimpleNamespace(Counter=self._single, Gauge=self._single, Histogram=self._histogram)
        return cast("Instruments", made)

    def _single(self, name: str, *_: Any) -> _Line:
        return _Line(self, name)

    def _histogram(self, name: str, _about: str, boundaries: Sequence[float], *_: Any) -> _Line:
        return _Line(self, name, len(boundaries) + 3)  # those, +Inf, sum and count


@dataclass(frozen=True, slots=True)
class _Line:
    ledger: _Ledger
    name: str
    lines: int = 1

    def inc(self, _value: float, tags: dict[str, str]) -> None:
        self.ledger.seen.add((self.name, tuple(sorted(tags.items())), self.lines))

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.inc(value, tags)

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self.inc(value, tags)
