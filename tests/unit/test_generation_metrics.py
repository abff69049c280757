"""What is counted of generations, with instruments that write down what they are told."""

import asyncio

import pytest
from test_metrics import Written

from deployments.errors import Busy, DeadlineExceeded, EngineFailed, InvalidInput, ReplicaLost
from deployments.generation.metrics import (
    GenerationPoolState,
    GenerationRouterMetrics,
    GeneratorMetrics,
    GeneratorState,
    Promise,
    Streamed,
)
from deployments.generation.scheduler.state import HostState

PROMISE = Promise(1.0, 0.1)
BULK = Promise(None, None)
STATE = GeneratorState(7, 2, 1.25, 0.02, 60, 40, (5, 2), 3)
HOST = HostState(5, 9, 4, 1, (50, 30, 19), 400, (2, 3), 120.5, 300.0, 1.25)


class Told:
    """Metrics of a Router, and what they have told when they are published."""

    def __init__(self):
        self.written = Written()
        self.metrics = GenerationRouterMetrics(self.written)

    def begin(self, promise=PROMISE, answers=1, client=None):
        return Streamed(self.metrics, 10.0, promise, prompt_tokens=30, answers=answers, client=client)

    def of(self, name):
        self.metrics.publish(PROMISE, {})
        return self.written.of(f"windve_{name}")

    def total(self, histogram):
        """The sum of what it has observed, and its tags."""
        return self.of(f"{histogram}_sum")[-1:]

    def kept(self, name):
        """(promises, late ones), of all pools."""
        return tuple(sum(value for value, _ in self.of(each)) for each in (f"{name}_promised", f"{name}_missed"))


def stream(told, times, *, promise=PROMISE, end="stop", error=None, now=20.0):
    """One generation of one answer, a token at each time, admitted by the CPU pool."""
    streamed = told.begin(promise)
    streamed.admitted("cpu")
    for at in times:
        streamed.arrived(at, 0)
    if end is not None:
        streamed.ended(0, end)
    streamed.over(now, error)


def test_an_answer_s_first_token_pace_and_worst_gap():
    told = Told()
    stream(told, [10.5, 10.6, 10.9, 11.0])
    assert told.total("time_to_first_token_seconds") == [(0.5, ("cpu",))]
    assert told.total("time_per_output_token_seconds") == [(pytest.approx(0.5 / 3), ("cpu",))]
    assert told.total("worst_gap_seconds") == [(pytest.approx(0.3), ("cpu",))]
    assert told.of("answer_tokens") == [(4, ("cpu",))]
    assert told.of("prompt_tokens") == [(30, ("cpu",))]
    assert told.of("answers") == [(1, ("cpu", "stop"))]
    assert told.of("queries") == [(1, ("cpu", "ok"))]


@pytest.mark.parametrize(
    ("times", "first_tokens", "paces"),
    [
        ([10.9, 11.0], (1, 0), (1, 0)),
        ([11.1, 11.2], (1, 1), (1, 0)),
        ([10.9, 11.01], (1, 0), (1, 1)),
        ([10.9, 10.91, 11.09], (1, 0), (1, 0)),  # a gap is not the pace
        ([10.9], (1, 0), (0, 0)),  # one token has no pace
    ],
)
def test_each_promise_is_kept_or_not(times, first_tokens, paces):
    told = Told()
    stream(told, times)
    assert told.kept("ttft") == first_tokens
    assert told.kept("tpot") == paces


def test_bulk_has_no_promise():
    told = Told()
    stream(told, [50.0, 60.0], promise=BULK)
    assert (told.kept("ttft"), told.kept("tpot")) == ((0, 0), (0, 0))
    assert told.total("time_per_output_token_seconds") == []
    assert told.of("answer_tokens") == [(2, ("cpu",))]


def test_answers_of_one_generation_are_told_apart():
    told = Told()
    streamed = told.begin(answers=3)
    streamed.admitted("cpu")
    for answer, at in [(0, 10.5), (1, 10.6), (0, 10.55), (1, 10.9), (2, 10.9)]:
        streamed.arrived(at, answer)
    streamed.ended(0, "stop")
    streamed.ended(1, "length")
    streamed.over(11.0, asyncio.CancelledError())
    assert told.total("time_to_first_token_seconds") == [(0.5, ("cpu",))]
    assert told.kept("tpot") == (2, 1)
    assert set(told.of("answers")) == {(1, ("cpu", how)) for how in ("stop", "length", "cancelled")}
    assert told.of("queries") == [(1, ("none", "cancelled"))]


@pytest.mark.parametrize(
    ("times", "error", "now", "first_tokens", "paces"),
    [
        ([], EngineFailed("x"), 10.5, (1, 1), (0, 0)),
        ([], asyncio.CancelledError(), 10.5, (0, 0), (0, 0)),
        ([], asyncio.CancelledError(), 11.5, (1, 1), (0, 0)),
        ([], DeadlineExceeded("x"), 11.5, (1, 1), (0, 0)),
        ([10.5], ReplicaLost("x"), 10.6, (1, 0), (1, 1)),
        ([10.5, 10.6], ReplicaLost("x"), 10.7, (1, 0), (1, 1)),
        ([10.5, 10.6], asyncio.CancelledError(), 10.7, (1, 0), (1, 0)),
        ([10.5, 10.8], asyncio.CancelledError(), 10.9, (1, 0), (1, 1)),
    ],
)
def test_what_fails_by_us_or_is_given_up_late_breaks_the_promise(times, error, now, first_tokens, paces):
    told = Told()
    stream(told, times, end=None, error=error, now=now)
    assert told.kept("ttft") == first_tokens
    assert told.kept("tpot") == paces
    how = "failed" if isinstance(error, EngineFailed | ReplicaLost) else "cancelled"
    assert told.of("answers") == [(1, ("cpu", how))]


@pytest.mark.parametrize(("error", "outcome"), [(Busy("x", retry_after_s=1), "busy"), (InvalidInput("x"), "invalid")])
def test_what_nobody_admits_breaks_no_promise(error, outcome):
    told = Told()
    told.begin(client="search").over(15.0, error)
    assert told.of("queries") == [(1, ("none", outcome))]
    assert told.of("tenant_queries") == [(1, ("search", outcome))]
    assert told.kept("ttft") == (0, 0)
    assert told.of("answers") == told.of("prompt_tokens") == []


def test_a_generation_that_a_second_replica_takes_has_one_prompt():
    told = Told()
    streamed = told.begin(client="search")
    streamed.admitted("accelerator")
    streamed.admitted("cpu")
    for _ in range(4):
        streamed.arrived(10.5, 0)
    streamed.over(10.5)
    assert told.of("prompt_tokens") == [(30, ("accelerator",))]
    assert told.of("queries") == [(1, ("cpu", "ok"))]
    assert told.of("tenant_tokens") == [(34, ("search",))]


def test_the_promise_and_the_pools():
    told = Told()
    told.metrics.publish(PROMISE, {"cpu": GenerationPoolState(True, 3, 1, calibrated=False)})
    assert told.written.told == [
        ("windve_slo_seconds", 1.0, ()),
        ("windve_tpot_seconds", 0.1, ()),
        ("windve_open", 1, ("cpu",)),
        ("windve_live_replicas", 3, ("cpu",)),
        ("windve_ejected_replicas", 1, ("cpu",)),
        ("windve_calibrated", 0, ("cpu",)),
    ]


def test_a_replica_tells_its_steps_and_its_cache():
    written = Written()
    metrics = GeneratorMetrics(written, "cpu", {"model": "m"})
    metrics.ran(16, 400, 0.05, 0.04)
    metrics.failed()
    metrics.publish(STATE)
    assert written.of("windve_batch_queries_sum") == [(16, ("cpu",))]
    counted = ("batches", "batched_queries", "tokens", "failed_batches")
    assert [written.of(f"windve_{name}")[0][0] for name in counted] == [1, 16, 400, 1]
    refused = {reason: value for value, (_, reason) in written.of("windve_refusals")}
    assert refused == {"full": 5, "never": 2}
    gauges = {"in_flight": 7, "waiting": 2, "kv_blocks_used": 60, "kv_blocks_free": 40}
    assert {name: written.of(f"windve_{name}")[0] for name in gauges} == {
        name: (value, ("cpu",)) for name, value in gauges.items()
    }
    assert written.of("windve_preempted_answers") == [(3, ("cpu",))]
    metrics.publish(STATE._replace(refusals=(6, 2)))
    assert written.of("windve_refusals")[2:] == [(1, ("cpu", "full"))]


def test_a_replica_tells_what_its_host_did_only_where_it_has_one():
    written = Written()
    metrics = GeneratorMetrics(written, "accelerator", {})

    def of(name):
        return {tags[1:]: value for value, tags in written.of(f"windve_{name}")}

    metrics.publish(STATE)
    assert not of("host_slowdown_ratio")
    assert not of("mode_steps")
    metrics.publish(STATE._replace(host=HOST))
    assert of("mode_steps") == {("accelerator",): 50, ("pipelined",): 30, ("asynchronous",): 19}
    assert of("moved_generations") == {("accelerator",): 2, ("host",): 3}
    counted = {name: of(f"{name}_tokens")[()] for name in ("host", "hybrid", "alone")}
    assert counted == {"host": 400, "hybrid": 420.5, "alone": 300}
    gauges = {
        name: of(name)[()] for name in ("cpu_blocks_used", "cpu_blocks_free", "parked_rows", "host_slowdown_ratio")
    }
    assert gauges == {"cpu_blocks_used": 4, "cpu_blocks_free": 5, "parked_rows": 1, "host_slowdown_ratio": 1.25}
    metrics.publish(STATE._replace(host=HOST._replace(steps=(50, 35, 19), gained=110.0, alone=350.0)))
    assert written.of("windve_mode_steps")[3:] == [(5, ("accelerator", "pipelined"))]
    assert written.of("windve_hybrid_tokens")[1:] == [(39.5, ("accelerator",))]


def test_the_last_five_minutes_have_generations_by_what_came_of_them():
    told = Told()
    for times, error in (([10.5, 10.6], None), ([11.5, 11.6], None), ([10.5, 11.5], None), ([], EngineFailed("x"))):
        stream(told, times, end="stop" if times else None, error=error)
    told.begin().over(10.1, Busy("full", retry_after_s=1))
    streamed = told.begin()
    streamed.predicted_s = 0.4
    streamed.admitted("cpu")
    streamed.arrived(10.5, 0)
    streamed.over(10.6, asyncio.CancelledError())
    recent = told.metrics.recent.describe()
    counts = sum(recent["answered"]["cpu"]), sum(recent["refused"]), sum(recent["late"])
    assert counts == (3, 1, 3)  # late: a first token, a pace, and the one that failed
    assert recent["finishes"] == [[0.4, 0.5, "cpu"]]
