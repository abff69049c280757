"""The core time of decisions and frames, measured without Ray and without devices."""

import statistics
import time
from time import perf_counter_ns
from typing import Any

import numpy as np

from benchmarks.simulation.application import Application, Shape
from benchmarks.simulation.arrivals import QUERY_TOKENS
from benchmarks.simulation.device import Device
from benchmarks.simulation.virtual_time import run
from deployments.embedding.frames import Answered, Offer, Offers, PassAnswers, Report
from deployments.embedding.request import Request
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy, ReplicaState, ScheduledQuery

WAITING = 1000
_DECISIONS = 30_000
_DEVICE, _SLO_S = Device(1e-3, 0.1), 4.0  # a batch has room for several thousand
_DIMENSION = 384
_FRAMES = 2000
_ITEMS = (1, 8, 32)
_STATE = ReplicaState(0.5, 0.9, 0.1, 90, 45, 96, 7, (0.0, 2.4e-4, 0.0, 0.27), 1.01, 0.02, (7, 0, 0))


def admission(decisions: int = _DECISIONS) -> dict[str, Any]:
    """Time of one `Scheduler.offer` that is admitted while 1,000 queries wait, without the clock's own time."""
    schedule = Scheduler[ScheduledQuery](_DEVICE.model, Policy(_SLO_S), QUERY_TOKENS)
    schedule.offer(0.0, [ScheduledQuery(QUERY_TOKENS, _SLO_S)])
    schedule.start(0.0)
    for number in range(WAITING):
        assert schedule.offer(0.0, [ScheduledQuery(QUERY_TOKENS, _SLO_S + number * 1e-4)])
    clock, offers = [], []
    for number in range(decisions):
        query = ScheduledQuery(QUERY_TOKENS, _SLO_S + (number * 7919 % WAITING) * 1e-4)
        before = perf_counter_ns()
        clock.append(perf_counter_ns() - before)
        before = perf_counter_ns()
        admitted = schedule.offer(number * 1e-6, [query])
        offers.append(perf_counter_ns() - before)
        assert admitted
        schedule.remove([query])
    assert schedule.queue.count == WAITING
    own = statistics.median(clock)
    percentiles = [(value - own) / 1000 for value in statistics.quantiles(offers, n=100)]
    return {
        "p50_us": percentiles[49],
        "p99_us": percentiles[98],
        "largest_us": (max(offers) - own) / 1000,
        "clock_us": own / 1000,
        "percentiles_us": percentiles,
    }


def frame_s() -> tuple[float, float]:
    """(core seconds per frame, extra core seconds per query or answer in it) at one end: the mean over both ends of
    offers and reports.
    """
    ids = np.zeros(QUERY_TOKENS, np.int32)
    numbers = np.zeros(_DIMENSION, np.float32)
    found = []
    for items in _ITEMS:
        offers = Offers([Offer(n, 1.98, [ids]) for n in range(items)], refused_s={None: 0.2})
        answered = [PassAnswers.of_one(Answered(n, 0, numbers, 1.0123456716537476, 0.4, 0.5)) for n in range(items)]
        report = Report(_STATE, 7, answered=answered)
        frames = b"".join(offers.encode()), b"".join(report.encode()[0])
        started = time.perf_counter()
        for _ in range(_FRAMES // items):
            offers.encode()
            Offers.decode(frames[0])
            report.encode()
            Report.decode(frames[1])
        found.append((time.perf_counter() - started) / (_FRAMES // items) / 4)
    each, fixed = np.polyfit(_ITEMS, found, 1)
    return max(0.0, float(fixed)), max(0.0, float(each))


def place_s(nodes: int, queries: int = 1000) -> float:
    """A Router's seconds for choosing the replicas for one query among `nodes` nodes with two replicas each."""

    async def place() -> float:
        application = Application(Shape(nodes, 1, {"accelerator": _DEVICE, "cpu": _DEVICE}, _SLO_S))
        await application.start()
        router = application.routers[0]
        request = Request(["abcd" * QUERY_TOKENS])
        router._take(request)  # noqa: SLF001 - it is timed by itself
        started = time.perf_counter()
        for _ in range(queries):
            router._refuse_early(request)  # noqa: SLF001
            next(router._placer.candidates(request, [QUERY_TOKENS]))  # noqa: SLF001
        return (time.perf_counter() - started) / queries

    return run(place(), 10**9)
