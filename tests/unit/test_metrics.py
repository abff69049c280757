"""What is counted, with instruments that write down what they are told."""

import asyncio
import contextlib
import re
from types import SimpleNamespace

import pytest

from deployments.embedding.metrics import EmbedderMetrics, RouterMetrics
from deployments.embedding.request import Request
from deployments.embedding.scheduler.state import ReplicaState
from deployments.errors import (
    Busy,
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    InvalidInput,
    OverQuota,
    OverShare,
    TimedOut,
    Unavailable,
    WrongKind,
)
from deployments.serving.metrics import Histogram, outcome_of
from tests.kit.router_world import Replica, World, text

STATE = ReplicaState(0.5, 1.5, 0.0, 7, 2, 9, 4, (0, 0, 0, 0), 1.25, 0.02, (3, 2, 1))


class Written:
    """Stands for `ray.serve.metrics`."""

    def __init__(self):
        self.names = []
        self.told = []
        self.Counter = self.Gauge = self.make

    def make(self, name, about, *_):
        self.names.append(name)

        def tell(value, tags):
            self.told.append((name, value, tuple(tags.values())))

        return SimpleNamespace(inc=tell, set=tell)

    def of(self, name):
        return [(value, tags) for told, value, tags in self.told if told == name]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Busy("full", retry_after_s=1), "busy"),
        (EmptyInput("nothing"), "invalid"),
        (WrongKind("a reranker"), "invalid"),
        (TimedOut("late"), "error"),
        (DeadlineExceeded("late by the client's own clock"), "cancelled"),
        (EngineFailed("broken"), "error"),
        (ZeroDivisionError(), "error"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_outcomes(error, outcome):
    assert outcome_of(error) == outcome


def test_keys_are_counted_by_name_and_limit():
    written = Written()
    metrics = RouterMetrics(written)
    metrics.tenants.used("search", 2, tokens=150, device_s=0.5)
    metrics.tenants.refused("search", OverShare("x", retry_after_s=1), 3)
    metrics.tenants.refused("search", OverQuota("x", retry_after_s=1), 1)
    metrics.tenants.refused("search", Busy("x", retry_after_s=1), 1)
    for number in range(60):
        metrics.tenants.used(f"key-{number}", 1, tokens=1, device_s=0.0)
    metrics.publish(1.0, {})
    found = dict(map(reversed, written.of("windve_tenant_queries")))
    assert [found["search", how] for how in ("ok", "share", "quota", "busy")] == [2, 3, 1, 1]
    assert found["other", "ok"] == 11
    assert len({name for name, _ in found}) == 51
    assert (150, ("search",)) in written.of("windve_tenant_tokens")
    assert (0.5, ("search",)) in written.of("windve_tenant_device_seconds")


def test_queries_are_counted_by_pool_and_outcome_and_published_together():
    written = Written()
    metrics = RouterMetrics(written)
    for _ in range(3):
        metrics.answered(["accelerator", "accelerator", "cpu"], tokenization_s=0.001, queue_s=0.1)
    metrics.failed(Busy("full", retry_after_s=1), 5)
    assert written.of("windve_queries") == []
    state = {"is_open": True, "depth": 40, "live_replicas": 3, "ejected_replicas": 1, "alpha_s": 0.01, "beta_s": 0.2}
    state["calibrated"] = True
    metrics.publish(1.0, {"cpu": state})
    counted = {(6, ("accelerator", "ok")), (3, ("cpu", "ok")), (5, ("none", "busy"))}
    assert set(written.of("windve_queries")) == counted
    metrics.publish(1.0, {})
    assert len(written.of("windve_queries")) == 3, "no step is published twice"
    gauges = {name: told for name in written.names if (told := written.of(name)) and told[0][1] == ("cpu",)}
    assert {name: told[0][0] for name, told in gauges.items()} == {
        "windve_open": 1,
        "windve_depth": 40,
        "windve_live_replicas": 3,
        "windve_ejected_replicas": 1,
        "windve_alpha_seconds": 0.01,
        "windve_beta_seconds": 0.2,
        "windve_calibrated": 1,
    }


def test_a_promise_is_kept_or_missed():
    written = Written()
    metrics = RouterMetrics(written)
    for total_s in (0.2, 0.99, 1.0, 1.01, 7.0):
        metrics.promised(total_s, 1.0)
    metrics.publish(1.0, {})
    assert written.of("windve_request_seconds_sum") == [(pytest.approx(10.2), ())]
    assert written.of("windve_slo_missed") == [(2, ())]
    assert sum(metrics.recent.describe()["late"]) == 2
    assert written.of("windve_requests") == [(5, ())]


@pytest.mark.parametrize(
    ("error", "late", "missed"),
    [
        (EngineFailed("x"), False, 1),
        (Unavailable("x"), False, 1),
        (DeadlineExceeded("would be late on an idle device too"), False, 0),
        (DeadlineExceeded("it was admitted, and was late"), True, 1),
        (asyncio.CancelledError(), False, 0),
        (asyncio.CancelledError(), True, 1),
        (Busy("full", retry_after_s=1), True, 0),
        (InvalidInput("bad"), True, 0),
    ],
)
def test_what_fails_by_us_or_ends_late_without_an_answer_misses_the_slo(error, late, missed):
    written = Written()
    metrics = RouterMetrics(written)
    metrics.failed(error, 1, late=late)
    metrics.publish(1.0, {})
    assert sum(metrics.recent.describe()["late"]) == missed
    assert sum(metrics.recent.describe()["refused"]) == isinstance(error, Busy)
    assert (written.of("windve_slo_missed"), written.of("windve_requests")) == ([(1, ())] * missed, [(1, ())] * missed)


def test_a_histogram_counts_every_value_by_inclusive_upper_bounds():
    written = Written()
    histogram = Histogram(written, "h", "about", [0.5, 1.0, 2.5], ("pool",))
    for value in (0.1, 0.5, 0.50001, 1.0, 2.0, 9.0):
        histogram.observe(value, "cpu")
    histogram.publish()
    totals = [(2, "0.5"), (4, "1.0"), (5, "2.5"), (6, "+Inf")]
    assert written.of("h_bucket") == [(count, ("cpu", le)) for count, le in totals]
    assert written.of("h_sum") == [(pytest.approx(13.10001), ("cpu",))]
    histogram.observe(0.1, "cpu")
    histogram.publish()
    assert written.of("h_count") == [(6, ("cpu",)), (7, ("cpu",))]  # running totals


def test_an_embedder_tells_each_run_and_what_it_is():
    written = Written()
    metrics = EmbedderMetrics(written, "cpu", {"model": "m", "dtype": "bfloat16"})
    metrics.ran(16, 1200, 0.5, 0.4)
    metrics.ran(4, 300, 0.25, 0.2)
    metrics.failed()
    metrics.publish(STATE)
    assert written.of("windve_inference_seconds_sum") == [(0.75, ("cpu",))]
    assert written.of("windve_batch_queries_sum") == [(20, ("cpu",))]
    assert [told for told in written.told if not re.search("_(bucket|sum|count)$", told[0])] == [
        ("windve_batches", 2, ("cpu",)),
        ("windve_batched_queries", 20, ("cpu",)),
        ("windve_batch_seconds", 0.75, ("cpu",)),
        ("windve_tokens", 1500, ("cpu",)),
        ("windve_planned_seconds", pytest.approx(0.6), ("cpu",)),
        ("windve_failed_batches", 1, ("cpu",)),
        ("windve_refusals", 3, ("cpu", "full")),
        ("windve_refusals", 2, ("cpu", "never")),
        ("windve_refusals", 1, ("cpu", "closed")),
        ("windve_in_flight", 7, ("cpu",)),
        ("windve_waiting", 2, ("cpu",)),
        ("windve_slowdown_ratio", 1.25, ("cpu",)),
        ("windve_safety_margin_ratio", 0.02, ("cpu",)),
        ("windve_free_seconds", 1.5, ("cpu",)),
        ("windve_info", 1, ("cpu", "m", "bfloat16")),
    ]
    metrics.publish(STATE._replace(refusals=(5, 2, 1)))
    assert written.of("windve_refusals")[3:] == [(2, ("cpu", "full"))]  # only what is new


def harmed(**how):
    return lambda *replicas: [setattr(one.engine, *what) for one in replicas for what in how.items()]


WELL = {
    "requests": 1,
    "slo_missed": 0,
    "batches": 1,
    "failed_batches": 0,
    "drift": 1,
    "in_flight": 0,
    "live_replicas": 1,
}
NO_RUN = {"requests": 1, "slo_missed": 1, "batches": 0, "drift": None}


@pytest.mark.parametrize(
    ("harm", "outcomes", "expected"),
    [
        (harmed(), {("accelerator", "ok"): 1}, WELL),
        (harmed(outcome=lambda _: RuntimeError("no")), {("none", "error"): 1}, {**WELL, **NO_RUN, "failed_batches": 2}),
        (harmed(slow=1e6), {("none", "cancelled"): 1}, {**WELL, **NO_RUN, "in_flight": 1}),
        (harmed(slow=1.5), {("accelerator", "ok"): 1}, {**WELL, "drift": 1.5}),
        (lambda one, _: one.die(), {("cpu", "ok"): 1}, {**WELL, "batches": 0, "drift": None, "live_replicas": 0}),
    ],
    ids=["well", "a run fails", "devices hang", "a slow device", "a replica dies"],
)
async def test_a_router_and_a_replica_tell_what_the_alerts_are_made_of(harm, outcomes, expected):
    """Of one request, whose client waits for five seconds."""
    written, pools = Written(), {"accelerator": [Replica("a")], "cpu": [Replica("c")]}
    (accelerator,), (cpu,) = pools.values()
    metrics = EmbedderMetrics(written, "accelerator", {})
    accelerator.runner._on_run = metrics.ran
    accelerator.runner._on_failure = lambda error: metrics.failed() or str(error)
    router = await World(pools).router(instruments=written)
    harm(accelerator, cpu)
    with contextlib.suppress(Exception):
        await asyncio.wait_for(router.embed(Request([text()])), 5.0)
    await asyncio.sleep(4.0)  # the Router publishes meanwhile
    metrics.publish(accelerator.runner.state())

    def total(name):
        return sum(value for value, _ in written.of(f"windve_{name}"))

    assert {tags: value for value, tags in written.of("windve_queries")} == outcomes
    found = {name: total(name) for name in ("requests", "slo_missed", "batches", "failed_batches", "in_flight")}
    planned_s = total("planned_seconds")
    found["drift"] = pytest.approx(total("batch_seconds") / planned_s, rel=0.1) if planned_s else None
    *_, found["live_replicas"] = [live for live, tags in written.of("windve_live_replicas") if tags == ("accelerator",)]
    assert found == expected
