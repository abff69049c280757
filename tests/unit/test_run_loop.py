"""A replica's side, in virtual time: what it admits, runs, answers and drops."""

import asyncio
import itertools
import math
import random
import time
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.virtual_time import virtual
from deployments.embedding.frames import Offer, Offers
from deployments.embedding.run import PlannedQuery
from deployments.embedding.run_loop import RunLoop
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy
from deployments.errors import EngineFailed, Unavailable
from deployments.models.outputs import TEXT
from tests.kit.replica_world import FakeRouter, adds_up, replica


def served(**how):
    """A Router, and its replica's two parts."""
    runner, engine = replica(**how)
    return FakeRouter(runner), runner, engine


async def answered_once(tokens=5, **how):
    """As `served`, after the answer to one query of so many tokens."""
    router, runner, engine = served(**how)
    router.offer(tokens=tokens)
    await runner.drained()
    engine.runs.clear()
    return router, runner, engine


async def told_all(runner):
    """All runs have ended, and the Routers have been told."""
    await runner.drained()
    await asyncio.sleep(0.01)


async def test_a_burst_meets_and_becomes_one_run():
    runner, engine = replica()
    routers = [FakeRouter(runner, name) for name in "ab"]
    for number in range(30):
        routers[number % 2].offer()
        await asyncio.sleep(0.001)
    await asyncio.sleep(2)
    assert engine.runs == [30]
    assert [len(router.answers()) for router in routers] == [15, 15]


async def test_a_run_that_is_full_begins_before_its_pause_is_over_and_the_next_one_has_its_own():
    router, runner, engine = served()
    for _ in range(60):
        router.offer()
    assert runner.schedule.run.unanswered
    await runner.drained()
    router.offer()
    assert len(engine.runs) == 1
    await asyncio.sleep(1)
    assert len(engine.runs) == 2


async def test_answers_leave_as_passes_end_and_say_where_the_time_went():
    router, runner, _ = served()
    router.offer(16)
    await asyncio.sleep(0.3)
    await runner.drained()
    await asyncio.sleep(0)
    first, last = router.ends[1, 0], router.ends[1, 15]
    assert last[0] - first[0] == pytest.approx(8 * 0.018)
    answer = first[1]
    assert answer.compute_s == pytest.approx(0.27 + 8 * 0.018)
    assert answer.stay_s == pytest.approx(first[0])
    assert answer.numbers.tolist() == [1, 75]


async def test_the_rows_of_tokens_go_to_their_query():
    router, _, _ = served()
    router.offer(1, tokens=3)
    router.offer(1, tokens=4, outputs=("tokens",))
    router.offer(1, tokens=5)
    await asyncio.sleep(1)
    assert [len(router.ends[number, 0][1].numbers) for number in (1, 2, 3)] == [2, 8, 2]
    assert [router.ends[number, 0][1].numbers[0] for number in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("alpha_s", "admission", "depth", "admitted"),
    [
        # The pool's model and depth are those of a device that takes 18 ms a query, beta 0.27 s.
        (0.018, "deadline", 10, 20),  # ten run, and ten are in the next run
        (0.0091, "deadline", 10, 20),
        (0.0089, "deadline", 10, 60),  # it goes by its own: more than (1 s - beta) / 0.0089 s do not fit
        (0.0089, "deadline", 0, 0),
        (0.0089, "depth", 10, 10),  # Algorithm 1
    ],
)
async def test_a_device_twice_as_quick_as_the_pools_is_not_bound_by_it(alpha_s, admission, depth, admitted):
    runner, _ = replica(curve=(alpha_s, 0.27), micro_batch_queries=None)
    router = FakeRouter(runner, admission=admission, depth=depth, model=[0.0, 0.018 / 75, 0.0, 0.27])
    for _ in range(60):
        router.offer()
    assert runner.schedule.in_flight == admitted


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({"slo_s": 2.0}, Policy(2.0)),
        ({"slo_s": 2.0, "depth": 9, "of": "a later version"}, Policy(2.0, depth=9)),
        ({"slo_s": 2.0, "admission": "depth", "bulk_share": 0.1}, Policy(2.0, "depth", bulk_share=0.1)),
        ({"slo_s": 2.0, "depth": 9, "model": [0.0, 1e-4, 0.0, 0.2, "of a later version"]}, Policy(2.0, depth=9)),
    ],
)
async def test_a_router_of_a_neighbouring_version_sends_more_or_fewer_settings(settings, policy):
    runner, _ = replica()
    runner.receive(Mock(), Offers(settings={"router": "r", **settings}))
    limits = runner.schedule.limits
    assert limits.policy == policy
    assert limits.model == (CostModel(0.0, 1e-4, 0.0, 0.2) if "model" in settings else runner._measured)


async def test_calling_off_frees_its_room_at_once():
    router, runner, _ = served(micro_batch_queries=None)
    first = router.offer(25)
    await asyncio.sleep(0.6)  # it runs
    for _ in range(40):
        router.offer()
    waiting = [number for number in range(2, 100) if number in runner._sessions[router].admitted]
    assert len(waiting) > 20
    router.call_off(*waiting)
    assert runner.schedule.queue.count == 0
    again = router.offer()
    await runner.drained()
    await asyncio.sleep(0)
    assert (again, 0) in router.ends
    assert (first, 24) in router.ends
    assert not {(number, 0) for number in waiting} & set(router.ends)


@pytest.mark.parametrize("is_gone", [False, True])
async def test_routers_hear_when_it_opens_sooner_than_they_were_told(is_gone):
    runner, _ = replica(micro_batch_queries=None)
    router, other = FakeRouter(runner, "a"), FakeRouter(runner, "b")
    router.offer(30)
    await asyncio.sleep(0.6)
    many = [router.offer() for _ in range(60)]
    other.offer()
    await asyncio.sleep(1e-6)
    told = [one.reports[-1][1].state.opens_s for one in (router, other)]
    assert min(told) > 0
    reports = len(other.reports)
    if is_gone:
        runner.gone(router)
    else:
        router.call_off(*(number for number in many if number not in router.ends))
    await asyncio.sleep(1e-6)
    assert len(other.reports) == reports + 1
    assert other.reports[-1][1].state.opens_s < told[1]
    if not is_gone:
        assert router.reports[-1][1].state.opens_s == other.reports[-1][1].state.opens_s


async def test_what_is_offered_and_called_off_in_one_frame_does_not_run():
    router, runner, engine = served()
    runner.receive(router, Offers([Offer(1, 1.0, [np.ones(5, np.int32)])], called_off=[1]))
    await asyncio.sleep(1)
    assert engine.runs == []
    assert runner.schedule.in_flight == 0


async def test_a_run_that_nobody_waits_for_is_stopped():
    router, runner, engine = served()
    numbers = [router.offer() for _ in range(30)]
    await asyncio.sleep(0.4)
    router.call_off(*numbers[:29])
    assert not runner._run.stop.is_set()
    router.call_off(numbers[29])
    await asyncio.sleep(0.2)
    assert engine.stopped == 1
    assert runner.schedule.in_flight == 0
    router.offer()
    await asyncio.sleep(1)
    assert len(engine.runs) == 2


async def test_what_a_router_had_waiting_is_dropped_with_its_connection():
    runner, engine = replica(micro_batch_queries=None)
    dead, other = FakeRouter(runner, "dead"), FakeRouter(runner, "other")
    other.offer(20)
    await asyncio.sleep(0.2)
    for _ in range(5):
        dead.offer()
    other.offer()
    runner.gone(dead)
    assert runner.schedule.queue.count == 1
    runner.gone(dead)  # once is enough, twice no error
    await runner.drained()
    assert engine.runs[1] == 1


@pytest.mark.parametrize(("outcome", "began_s"), [(None, 0.01), ("confirm", 0.004), ("call_off", None)])
async def test_a_run_waits_a_moment_for_the_rest_of_a_request_to_be_admitted_elsewhere(outcome, began_s):
    router, runner, engine = served()
    began, number = asyncio.get_running_loop().time(), router.offer(60, partial=True)
    await asyncio.sleep(0.004)
    assert 0 < router.admitted[number] < 60
    assert engine.runs == []
    if outcome is not None:
        getattr(router, outcome)(number)
    await asyncio.sleep(0.007)
    if began_s is None:
        assert (runner._run, runner.schedule.in_flight) == (None, 0)
    else:
        assert runner._run.began - began == pytest.approx(began_s, abs=1e-6)
    router.confirm(number)  # too late, and no error
    await told_all(runner)
    assert len(router.answers()) == sum(engine.runs) == (0 if began_s is None else router.admitted[number])
    assert not runner.schedule._held


@pytest.mark.parametrize(("queries", "how"), [(60, {"bulk": True, "left_s": 600.0}), (10, {})])
async def test_no_run_waits_for_the_rest_of_bulk_or_of_what_is_admitted_whole(queries, how):
    router, runner, _ = served()
    router.offer(queries, partial=True, **how)
    assert not runner.schedule._held


async def test_a_query_that_cannot_wait_cuts_the_wait_for_a_part_short():
    router, runner, engine = served(micro_batch_queries=None)
    loop, schedule = asyncio.get_running_loop(), runner.schedule
    router.offer(10)
    await asyncio.sleep(0.1)
    router.offer()
    ends = runner._run.began + 0.27 + 10 * 0.018
    await asyncio.sleep(ends - 0.001 - loop.time())
    schedule.hold(loop.time(), "part")
    await asyncio.sleep(0.003)
    assert engine.runs == [10]
    predictor = schedule.limits.predictor
    router.offer(left_s=(predictor.seconds(2 * 0.018) + 0.003) * (1 + predictor.margin))
    await asyncio.sleep(0.004)
    assert runner._run.began == pytest.approx(ends + 0.005, abs=1e-4)


async def test_an_engines_failure_is_told_to_its_own_queries():
    router, runner, engine = served()
    engine.outcome = lambda waiting: MemoryError("out of memory") if waiting.number < 3 else None
    router.offer(left_s=2.0)
    router.offer(2, left_s=2.0)
    await asyncio.sleep(0.1)
    router.offer(left_s=2.0)
    await asyncio.sleep(3)
    assert (router.ends[1], router.ends[2]) == (("failed", "out of memory"), ("failed", "out of memory"))
    assert (3, 0) in router.ends
    assert runner.schedule.in_flight == 0


def breaks(*tokens):
    """The outcome of queries of so many tokens; without any, of all."""
    return lambda query: ValueError(f"no {len(query.ids)}") if not tokens or len(query.ids) in tokens else None


QUICK = {"curve": (1e-4, 0.02)}
NO_NUMBERS = "the engine gave no finite numbers for this input"


@pytest.mark.parametrize(
    ("answered", "lengths", "runs"),
    [
        # The run; what was answered before; halves, the one that is answered and the one that is not; the bad one, what
        # was answered before, and its neighbour.
        (True, [5, 9, 75, 9], [4, 1, 2, 2, 1, 1, 1]),
        (False, [5, 9, 75, 9], [4, 2, 2, 1, 1, 1]),
        (True, [75], [1, 1, 1, 1]),
    ],
)
async def test_a_query_that_breaks_its_run_fails_alone(answered, lengths, runs):
    router, runner, engine = served(**QUICK, micro_batch_queries=None)
    if answered:
        router.offer(tokens=5)
        await runner.drained()
    engine.runs.clear()
    engine.outcome = breaks(75)
    sent = {router.offer(tokens=tokens): tokens for tokens in lengths}
    await told_all(runner)
    for number, tokens in sent.items():
        assert (router.ends[number] == ("failed", "no 75")) if tokens == 75 else ((number, 0) in router.ends)
    assert (engine.runs, router.broken, runner.problem) == (runs, [], None)


async def test_so_many_runs_look_into_one_and_the_rest_may_be_answered_elsewhere():
    router, runner, engine = await answered_once(**QUICK, micro_batch_queries=None)
    engine.outcome = breaks(75)
    for _ in range(40):
        router.offer()
    await told_all(runner)
    assert len(engine.runs) == 1 + 25
    assert engine.runs[:6] == [40, 1, 20, 20, 10, 10]
    assert (len(router.suspect), router.broken, runner.problem) == (40, [], None)  # nobody need be ejected
    assert len(router.ends) == 1 + 40


async def test_an_engine_that_fails_with_what_it_answered_before_is_broken_until_it_answers():
    router, runner, engine = await answered_once(75, **QUICK)
    engine.outcome = breaks()
    numbers = [router.offer(tokens=tokens) for tokens in (5, 6, 7)]
    await told_all(runner)
    assert sorted(router.broken) == numbers
    assert {router.ends[number] for number in numbers} == {("failed", "no 5")}
    assert (engine.runs, runner.problem) == ([3, 1], "no 5")
    engine.outcome = lambda _: None
    router.offer()
    await runner.drained()
    assert runner.problem is None


@pytest.mark.parametrize(
    ("runs", "ended", "broken"),
    [
        # Runs until the engine breaks: none of the isolation's, those of 1, of 4 and 4, and of 2 and 2.
        (1, {}, [2, 3, 4, 5, 6, 7, 8, 9]),
        (2, {}, [2, 3, 4, 5, 6, 7, 8, 9]),
        (4, {6: True, 7: True, 8: True, 9: True}, [2, 3, 4, 5]),
        (6, {2: True, 3: True, 6: True, 7: True, 8: True, 9: True}, [4, 5]),
        # The bad one has failed, which says nothing of it: the engine fails with what it answered before, too.
        (7, {2: True, 3: True, 6: True, 7: True, 8: True, 9: True}, [4, 5]),
        (8, {2: True, 3: True, 4: False, 6: True, 7: True, 8: True, 9: True}, [5]),
        (9, {2: True, 3: True, 4: False, 5: True, 6: True, 7: True, 8: True, 9: True}, []),
    ],
)
async def test_an_engine_that_breaks_while_a_run_is_looked_into_blames_nobody(runs, ended, broken):
    """The third of eight is bad. Whom it could not answer may be answered elsewhere."""
    router, runner, engine = await answered_once(**QUICK, micro_batch_queries=None)
    engine.outcome = lambda query: ValueError("bad") if len(query.ids) == 13 or len(engine.runs) > runs else None
    for index in range(8):
        router.offer(tokens=13 if index == 2 else 75)
    await told_all(runner)
    answered = {number: True for number, _ in router.answers()[1:]}
    failed = {key: False for key, how in router.ends.items() if how[0] == "failed" and key not in router.broken}
    assert (answered | failed, sorted(router.broken)) == (ended, broken)
    assert (runner.problem is None) == (not broken)


async def test_an_engine_that_never_answered_is_broken():
    router, runner, engine = served(**QUICK)
    engine.outcome = breaks()
    router.offer()
    await told_all(runner)
    assert (router.broken, engine.runs) == ([1], [1, 1])


async def test_a_run_that_fails_once_is_answered():
    router, runner, engine = await answered_once(75, **QUICK)
    failures = [MemoryError("once")]
    engine.outcome = lambda _: failures.pop() if failures else None
    router.offer(3)
    await told_all(runner)
    assert len(router.answers()) == 4


async def test_a_run_that_fails_after_its_last_answer_blames_no_query():
    router, runner, engine = await answered_once(**QUICK)
    failures, compute = [MemoryError("once")], runner._compute

    def fails_behind_the_first(items, passed, ended, stop):
        is_first = [item.index for item in items if item.number == 2] == [0]
        compute(items, passed, lambda problem: ended(MemoryError("behind") if is_first else problem), stop)

    engine.outcome = lambda _: failures.pop() if failures else None
    runner._compute = fails_behind_the_first
    router.offer(2, tokens=75)
    await told_all(runner)
    assert router.answers()[1:] == [(2, 0), (2, 1)]
    assert 2 not in router.ends


async def test_what_is_late_does_not_run_again():
    router, runner, engine = await answered_once(micro_batch_queries=None)
    engine.outcome = breaks(75)
    router.offer(left_s=0.5)  # its run takes 0.29 s, and so does the one before its own
    router.offer(tokens=5, left_s=0.5)
    router.offer(tokens=5, left_s=2.0)
    await told_all(runner)
    assert {key for key, how in router.ends.items() if how[0] == "failed"} == {2, 3}
    assert router.broken == []  # the engine is well: nobody need be ejected
    assert (4, 0) in router.ends


async def test_an_engine_that_cannot_begin_a_run_fails_it_and_takes_the_next():
    router, runner, engine = served()
    begin, runner._compute = runner._compute, None  # not even callable
    router.offer()
    await asyncio.sleep(1)
    (how,) = router.ends.values()
    assert how[0] == "failed"
    runner._compute = begin
    router.offer()
    await asyncio.sleep(1)
    assert len(router.answers()) == len(engine.runs) == 1


async def test_a_query_whose_answer_is_no_number_fails_with_its_offer():
    router, _, engine = served()
    engine.outcome = lambda waiting: np.nan if (waiting.number, waiting.index) == (2, 1) else None
    for size in (1, 3, 1):
        router.offer(size)
    await asyncio.sleep(2)
    assert router.ends[2] == ("failed", NO_NUMBERS)
    assert {(1, 0), (3, 0)} <= set(router.ends)
    assert (2, 2) not in router.ends


@pytest.mark.parametrize(
    ("lengths", "passes", "runs"),
    [
        # One that is answered beside it shows that the engine works, whichever comes first; else a check does.
        ([13, 75], None, [2]),
        ([13, 75], 1, [2]),
        ([75, 13], 1, [2, 1]),
        ([13], None, [1, 1]),
        ([13, 13], 1, [2, 1]),
    ],
)
async def test_an_input_whose_answer_is_no_number_is_to_blame_itself(lengths, passes, runs):
    router, runner, engine = served(**QUICK, micro_batch_queries=passes)
    router.offer()
    await runner.drained()
    engine.runs.clear()
    engine.outcome = lambda query: np.nan if len(query.ids) == 13 else None
    sent = {router.offer(tokens=tokens, left_s=1.0 + at): tokens for at, tokens in enumerate(lengths)}
    await runner.drained()
    await asyncio.sleep(0.01)
    for number, tokens in sent.items():
        assert (router.ends[number][0] == "failed") if tokens == 13 else ((number, 0) in router.ends)
    assert (engine.runs, router.broken, router.suspect, runner.problem) == (runs, [], [], None)


async def test_a_broken_engine_is_broken_though_its_queries_are_late_when_that_is_known():
    """Else one whose run and check take more than an SLO would never be ejected."""
    router, runner, engine = served(curve=(0.018, 0.6))
    router.offer()
    await runner.drained()
    engine.outcome = lambda _: np.nan
    late = router.offer()
    await runner.drained()
    await asyncio.sleep(0.01)
    assert router.broken == [late]


@pytest.mark.parametrize("norm", [np.nan, np.inf])
async def test_an_engine_whose_answers_are_no_numbers_is_broken_until_one_is(norm):
    router, runner, engine = served(**QUICK)
    router.offer()
    await runner.drained()
    engine.outcome = lambda _: norm
    numbers = [router.offer(2) for _ in range(3)]
    await runner.drained()
    await asyncio.sleep(0.01)
    assert sorted(router.broken) == numbers
    assert {router.ends[number] for number in numbers} == {("failed", "it gave no finite numbers")}
    assert (engine.runs, runner.problem) == ([1, 6, 1], "it gave no finite numbers")
    engine.outcome = lambda _: None
    router.offer()
    await runner.drained()
    assert runner.problem is None


async def test_an_answer_that_is_no_number_is_looked_into_though_the_others_are_called_off():
    router, runner, engine = served(micro_batch_queries=1)
    router.offer(tokens=5)
    await runner.drained()
    engine.runs.clear()
    engine.outcome = lambda query: np.nan if len(query.ids) == 75 else None
    bad = router.offer(left_s=1.0)
    others = [router.offer(left_s=1.5) for _ in range(3)]
    await asyncio.sleep(0.1)
    await asyncio.sleep(0.27 + 1.5 * 0.018 - (runner.now() - runner._run.began))
    assert len(runner._run.left) == 3
    router.call_off(*others)
    await runner.drained()
    await asyncio.sleep(0.01)
    assert (set(router.ends), router.ends[bad]) == ({(1, 0), bad}, ("failed", NO_NUMBERS))
    assert engine.runs == [4, 1]


async def test_an_engine_that_fails_and_whose_check_is_no_number_is_broken():
    router, runner, engine = served(**QUICK)
    router.offer()
    await runner.drained()
    engine.outcome = lambda query: ValueError("bad") if len(query.ids) == 13 else np.nan
    bad = router.offer(tokens=13)
    await runner.drained()
    await asyncio.sleep(0.01)
    assert (router.broken, router.ends[bad], runner.problem) == ([bad], ("failed", "bad"), "bad")


async def test_a_run_stops_when_one_bad_answer_leaves_it_nothing_to_do():
    router, runner, engine = served(micro_batch_queries=2)
    engine.outcome = lambda query: np.nan if len(query.ids) == 75 and query.index == 0 else None
    good, bad = router.offer(tokens=5, left_s=1.0), router.offer(3, left_s=1.5)
    await told_all(runner)
    assert (set(router.ends), router.ends[bad]) == ({(good, 0), bad}, ("failed", NO_NUMBERS))
    assert engine.stopped == 1


@pytest.mark.parametrize("per_offer", [1, 16_000])
@pytest.mark.parametrize("norm", [1.0, math.nan])
async def test_the_end_of_a_run_takes_time_in_proportion_to_its_queries(per_offer, norm):
    async def end_s(count):
        runs = []
        schedule, now = Scheduler(CostModel(0.0, 1e-9, 0.0, 0.2), Policy(1.0)), asyncio.get_running_loop().time
        loop = RunLoop(schedule, lambda *run: runs.append(run), clock=now)
        queries = [np.ones(1, np.int32)] * min(count, per_offer)
        offers = [Offer(number, 1.0, queries) for number in range(count // len(queries))]
        loop.receive(FakeRouter(loop), Offers(offers))
        await asyncio.sleep(1)
        ((run, passed, ended, _),) = runs
        numbers, norms = np.ones((count, 1), np.float32), np.full(count, norm, np.float32)
        began = time.process_time()
        for indices in np.split(np.arange(count), 20):
            passed(indices, numbers[indices], norms[indices])
        ended(None)
        assert len(run) == count
        return time.process_time() - began

    few_s, many_s = [min([await end_s(count) for _ in range(3)]) for count in (1_000, 16_000)]  # without a collection
    assert many_s < 5 * 16 * few_s


async def test_an_engine_that_forgets_a_query_has_failed():
    router, runner, _ = served()
    runner._compute = lambda run, passed, ended, stop: asyncio.get_running_loop().call_soon(ended, None)
    router.offer()
    await asyncio.sleep(2)
    assert router.ends[1] == ("failed", "the engine left 1 of 1 queries unanswered")


async def test_a_router_that_comes_back_hears_when_its_old_queries_have_ended():
    """Until then it must not send them elsewhere: they would run twice at once."""
    runner, engine = replica(micro_batch_queries=None)
    other, old = FakeRouter(runner, "other"), FakeRouter(runner, "same")
    other.offer(5)
    old.offer(20)
    await asyncio.sleep(0.2)
    old.offer(3)
    new = FakeRouter(runner, "same")  # the old connection broke at its own end only
    assert runner.schedule.queue.count == 0
    await asyncio.sleep(0.1)
    assert new.reports == []
    await asyncio.sleep(1)
    assert len(new.reports) == 1
    assert len(engine.runs) == 1
    assert (1, 4) in other.ends
    assert old.answers() == []


async def test_a_router_hears_when_a_runs_end_shows_that_there_is_room():
    """Its last answers left before the run had ended, with its state by what was known then."""
    runner, engine = replica()
    later = asyncio.get_running_loop().call_later
    runner._compute = lambda run, passed, ended, stop: engine.compute(run, passed, partial(later, 0.001, ended), stop)
    runner.schedule.limits.predictor.ended(0.0, 0.018, 3.5 * 0.288, is_probe=True)
    runner.schedule.set_pass_tokens(600)  # and all that follows from it
    await asyncio.sleep(1.5)
    router = FakeRouter(runner)
    router.offer()  # the probe
    await asyncio.sleep(1)
    assert router.answers() == [(1, 0)]
    assert router.reports[-1][1].state.slowdown == pytest.approx(1.0, abs=0.05)
    assert router.reports[-1][1].state.opens_s == 0
    assert len(engine.runs) == 1


async def test_an_offer_that_cannot_be_decided_on_fails_alone(monkeypatch):
    router, runner, _ = served()
    offer = runner.schedule._by_finish.__class__.fitting

    def fitting(admission, now, queries, *more):
        return 1 // (len(queries) - 2) and offer(admission, now, queries, *more)

    monkeypatch.setattr(runner.schedule._by_finish.__class__, "fitting", fitting)
    for count in (3, 2, 3):
        router.offer(count)
    await asyncio.sleep(2)
    assert router.ends[2][0] == "failed"
    assert len(router.answers()) == 6


async def test_single_queries_that_cannot_be_decided_on_fail_together_and_alone(monkeypatch):
    router, runner, _ = served()
    other = FakeRouter(runner, "other")
    other.offer(3)
    await asyncio.sleep(0.2)  # a run is under way: a frame's queries are admitted together
    note, calls = runner.schedule.demand.__class__.note, itertools.count(1)

    def noted(demand, *facts):
        return 1 // (next(calls) - 2) and note(demand, *facts)

    monkeypatch.setattr(runner.schedule.demand.__class__, "note", noted)
    ids = [np.full(75, 1, np.int32)]
    runner.receive(router, Offers([Offer(number, 1.0, ids) for number in (1, 2, 3)]))
    monkeypatch.undo()
    other.offer()
    await asyncio.sleep(2)
    assert [router.ends[number][0] for number in (1, 2, 3)] == ["failed"] * 3
    assert len(other.answers()) == 4


async def test_an_offer_without_queries_fails_alone():
    router, runner, _ = served()
    runner.receive(router, Offers([Offer(1, 1.0, [])]))
    router.offer()
    await asyncio.sleep(1)
    assert router.ends[1][0] == "failed"


async def test_never_is_told_apart_from_full():
    router, _, _ = served()
    router.offer(left_s=0.1)
    for _ in range(60):
        router.offer()
    await asyncio.sleep(0)
    assert router.ends[1] == ("refused", True)
    assert router.ends[61] == ("refused", False)


@pytest.mark.parametrize("micro_batch_queries", [None, 8])
@pytest.mark.parametrize("admission", ["deadline", "depth"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
@virtual
async def test_every_query_ends_once(admission, micro_batch_queries, seed):
    """Random offers, call-offs, confirmations, ends of connections and failures: work adds up, and nothing is left."""
    chance = random.Random(seed)
    runner, engine = replica(micro_batch_queries=micro_batch_queries)
    depth = 20 if admission == "depth" else None
    policy = {"admission": admission, "depth": depth}
    engine.outcome = lambda waiting: (
        ValueError("no")
        if (waiting.number + waiting.index) % 23 == 0
        else np.nan
        if (waiting.number + waiting.index) % 17 == 0
        else None
    )
    routers = [FakeRouter(runner, f"r{i}", **policy) for i in range(3)]
    everyone, wanted, called_off = list(routers), [], set()
    for _ in range(80):
        router = chance.choice(routers)
        match chance.choice(["offer", "offer", "offer", "off", "confirm", "end", "wait", "wait"]):
            case "offer":
                size, part = chance.choice([1, 1, 4, 30]), chance.random() < 0.3
                bulk = chance.random() < 0.2
                allowed = 600.0 if bulk else chance.choice([0.5, 1.0, 10.0])
                number = router.offer(size, chance.randint(4, 300), allowed, partial=part or bulk, bulk=bulk)
                wanted.append((router, number, size))
            case "off" if wanted:
                whose, number, _ = chance.choice(wanted)
                if whose in routers:
                    whose.call_off(number)
                    called_off.add((whose, number))
            case "confirm" if wanted:
                whose, number, _ = chance.choice(wanted)
                if whose in routers:
                    whose.confirm(number)
            case "end" if chance.random() < 0.3:
                at = routers.index(router)
                if chance.random() < 0.5:
                    runner.gone(router)
                routers[at] = FakeRouter(runner, f"r{at}", **policy)
                everyone.append(routers[at])
            case "wait":
                await asyncio.sleep(chance.choice([0.0, 0.01, 0.3]))
        adds_up(runner.schedule, asyncio.get_running_loop().time())
        assert runner.schedule.run.unanswered == (len(runner._run.left) if runner._run else 0)
        assert depth is None or runner.schedule.in_flight <= depth
    await asyncio.sleep(120)
    assert runner.schedule.in_flight == 0
    assert runner._run is None
    assert all(not session.admitted for session in runner._sessions.values())
    for router, number, size in wanted:
        if router not in routers or (router, number) in called_off:
            continue
        if number in router.ends:  # refused or failed, and some of it may have been answered before
            continue
        admitted = router.admitted.get(number, size)
        assert all((number, index) in router.ends for index in range(admitted))


async def test_a_query_is_told_an_error_only_if_it_ran_alone():
    """One of a pair that fails has gone: the other runs once more, and is answered."""
    router, runner, engine = await answered_once(micro_batch_queries=None)
    engine.outcome = breaks(77)
    router.offer(tokens=75, left_s=8.0)
    await asyncio.sleep(0.05)
    numbers = [router.offer(tokens=tokens, left_s=8.0) for tokens in (75, 77, 75, 75)]

    def pair_runs():
        run = runner._run
        return run is not None and run.again and sorted(len(run.queries[at].ids) for at in run.group) == [75, 77]

    for _ in range(1000):
        if pair_runs():
            break
        await asyncio.sleep(0.01)
    router.call_off(numbers[1])
    await told_all(runner)
    assert [(number, 0) in router.ends for number in numbers] == [True, False, True, True]


@pytest.mark.parametrize("how", [{"bulk": True}, {}])
async def test_looking_into_a_run_gives_way_to_those_that_are_due_before(how):
    """Twelve with much time and one bad among them; urgent ones came meanwhile."""
    router, _, engine = await answered_once(micro_batch_queries=None)
    engine.outcome = breaks(77)
    for tokens in (*[75] * 6, 77, *[75] * 5):
        router.offer(tokens=tokens, left_s=30.0, **how)
    await asyncio.sleep(0.3)
    urgent = [router.offer(left_s=1.0) for _ in range(2)]
    await asyncio.sleep(1.4)  # all that would run again takes 3 s
    assert all((number, 0) in router.ends for number in urgent)
    assert router.broken == []
    assert len(router.suspect) == 6  # the half with the bad one


@pytest.mark.parametrize(("tokens", "broken", "suspect"), [((), 11, 0), ((77,), 0, 10)])
async def test_a_run_that_gives_way_says_first_whether_the_engine_is_broken(tokens, broken, suspect):
    router, runner, engine = await answered_once(micro_batch_queries=None)
    engine.outcome, engine.slow = breaks(*tokens), 2.0
    for _ in range(10):
        router.offer(tokens=77, left_s=30.0)
    await asyncio.sleep(0.3)
    router.offer(left_s=0.9)  # the run takes twice as long as is known
    await told_all(runner)
    assert engine.runs[:3] == [10, 1, 1]  # what was answered before, and the urgent one
    assert (len(router.broken), len(router.suspect)) == (broken, suspect)
    assert (runner.problem is None) == (not broken)


# --- a calibration's planned runs -------------------------------------------------------------------------------------


def planned(queries):
    return [PlannedQuery(np.full(75, 1, np.int32), TEXT) for _ in range(queries)]


async def test_a_planned_run_takes_what_a_batch_takes_after_what_was_admitted_before():
    router, runner, engine = served()
    router.offer(4)
    await asyncio.sleep(0.1)
    before = repr(runner.schedule.limits.predictor)
    timing = asyncio.create_task(runner.planned.time([planned(16), None], 2, holder="a", lease_s=5.0, warm_up=False))
    await asyncio.sleep(0.01)
    refused = router.offer()
    found = await timing
    assert router.answers() == [(1, at) for at in range(4)]
    assert router.ends[refused][1:] == (False,)
    assert [one.seconds for one in found[0]] == pytest.approx([0.27 + 16 * 0.018] * 2)
    assert found[1] is None
    assert engine.runs == [4, 16, 16]
    assert repr(runner.schedule.limits.predictor) != before  # by the run of four
    assert runner.schedule.refusals.closed == 1


async def test_under_a_lease_a_replica_is_closed_until_it_ends_by_itself():
    router, runner, _ = served()
    await runner.planned.time([planned(1)], 1, holder="a", lease_s=5.0, warm_up=False)
    await asyncio.sleep(0.01)
    state = router.reports[-1][1].state
    assert (state.opens_s, state.bulk_room, state.opens_cost) == (pytest.approx(5.0, abs=0.02), 0.0, 0.0)
    with pytest.raises(Unavailable, match="another calibration"):
        await runner.planned.time([planned(1)], 1, holder="b")
    refused, wholly = router.offer(), router.offer(3, bulk=True, partial=True)
    await asyncio.sleep(4.9)
    assert {refused, wholly} <= router.ends.keys()
    await asyncio.sleep(0.2)
    taken = router.offer()
    await runner.drained()
    await asyncio.sleep(0.01)
    assert (taken, 0) in router.ends


async def test_who_ends_its_lease_opens_the_replica_at_once():
    router, runner, _ = served()
    await runner.planned.time([planned(1)], 1, holder="a", lease_s=5.0)
    await runner.planned.time([], 0, holder="a")
    await asyncio.sleep(0.01)
    assert router.reports[-1][1].state.opens_s < 0.1
    router.offer()
    assert runner.is_busy


async def test_a_planned_run_that_fails_is_told_to_who_planned_it():
    _, runner, engine = served()
    engine.outcome = lambda _: RuntimeError("out of memory")
    with pytest.raises(EngineFailed, match="out of memory"):
        await runner.planned.time([planned(2)], 1)
    assert runner.running_s == 0


async def test_a_long_planned_run_counts_as_running():
    _, runner, _ = served()
    timing = asyncio.create_task(runner.planned.time([planned(500)], 1, warm_up=False))
    await asyncio.sleep(6.0)
    assert runner.running_s == pytest.approx(6.0, abs=0.1)
    await timing
    assert runner.running_s == 0
