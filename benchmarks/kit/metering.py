"""A deployment that counts as windve's replicas do, with Ray's own instruments, and says what that takes of a core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import thread_time
from typing import Any

from ray import serve
from ray.serve import Application, metrics
from starlette.requests import Request

from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.metrics import PUBLISHED_EVERY_S, EmbedderMetrics, PoolState, RouterMetrics
from deployments.queueing.schedule import ReplicaState

_STATE = PoolState(is_open=True, depth=1024, live_replicas=1, alpha_s=0.01, beta_s=0.2, calibrated=True)
_TOKENS = 75
_SECONDS, _PLANNED_S = 0.1, 0.09  # of a run


class _Instruments:
    """Ray's; `observed` counts what histograms are told."""

    def __init__(self) -> None:
        self.observed = 0
        self.Counter: Any = metrics.Counter
        self.Gauge: Any = metrics.Gauge
        self.Histogram: Any = lambda *words: _Histogram(self, metrics.Histogram(*words))


class _Histogram:
    def __init__(self, instruments: _Instruments, histogram: Any) -> None:
        self._instruments, self._histogram = instruments, histogram

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self._instruments.observed += 1
        self._histogram.observe(value, tags)


class Metering:
    """GET /?requests_s=3000&runs_s=100&periods=20: so many periods between two publications, one after the other."""

    def __init__(self) -> None:
        self._refused = 0
        self._instruments = _Instruments()
        self._router = RouterMetrics(self._instruments)
        self._embedder = EmbedderMetrics(self._instruments, ACCELERATOR, {"model": "m", "engine": "e", "dtype": "d"})

    async def __call__(self, request: Request) -> dict[str, float]:
        requests_s, runs_s, periods = (float(request.query_params[key]) for key in ("requests_s", "runs_s", "periods"))
        return await asyncio.to_thread(self._meter, requests_s, runs_s, round(periods))

    def _meter(self, requests_s: float, runs_s: float, periods: int) -> dict[str, float]:
        requests, runs = round(requests_s * PUBLISHED_EVERY_S), round(runs_s * PUBLISHED_EVERY_S)
        before = self._instruments.observed
        spent = dict.fromkeys(("counting_s", "publishing_s", "embedder_s"), 0.0)
        for _ in range(periods):
            spent["counting_s"] += _timed(lambda: self._count(requests))
            spent["embedder_s"] += _timed(lambda: self._run(runs, max(1, requests // max(1, runs))))
            spent["publishing_s"] += _timed(self._publish)
        return {
            "requests": requests * periods,
            "runs": runs * periods,
            "seconds": PUBLISHED_EVERY_S * periods,
            "observed": self._instruments.observed - before,
            **spent,
        }

    def _count(self, requests: int) -> None:
        for number in range(requests):
            self._router.answered([ACCELERATOR], tokenization_s=0.0002, queue_s=number * 1e-5)
            self._router.promised(number * 1e-4, 1.0)

    def _run(self, runs: int, queries: int) -> None:
        for _ in range(runs):
            self._embedder.ran(queries, queries * _TOKENS, _SECONDS, _PLANNED_S)

    def _publish(self) -> None:
        self._router.publish(1.0, {ACCELERATOR: _STATE, CPU: _STATE})
        self._embedder.publish(self._state())

    def _state(self) -> ReplicaState:
        """A busy replica's; with each publication it has refused more."""
        self._refused += 1
        return ReplicaState(
            opens_s=0.5, free_s=0.9, bulk_s=0.0, in_flight=100, waiting=20, most=120, runs=1,
            model=(0.0, 0.0001, 0.0, 0.2), factor=1.1, margin=0.02, refusals=(self._refused,) * 3,
        )  # fmt: skip


def _timed(work: Callable[[], None]) -> float:
    """Seconds of a core that this thread takes for it."""
    before = thread_time()
    work()
    return thread_time() - before


def build(_: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`."""
    application: Application = serve.deployment(name="Metering", ray_actor_options={"num_cpus": 0.1})(Metering).bind()
    return application
