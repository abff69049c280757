"""The queue of one device by exact numbers: one step below and one above each threshold of its docstrings.

A token costs a millisecond, so lengths are milliseconds. A run takes 200 ms more, and the margin is 0.25: predictions
may fill 0.8 of the time to a deadline. An idle device waits 6 ms for each waiting query, and a run may hold 600 ms.
"""

import copy
import math
from dataclasses import asdict, astuple, dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.admission.fair_share import Account, Tenant
from deployments.admission.predictor import LinePredictor, Predictor
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.limits import is_deferrable
from deployments.embedding.scheduler.run_queue import Line
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy, ScheduledQuery

MODEL, QUICK = CostModel(0.0, 0.001, 0.0, 0.2), CostModel(0.0, 1e-6, 0.0, 0.002)
STEP = 0.01  # ms


def slow(times, model=MODEL):
    return Told(times * model.beta_s, times, 0.25)


@dataclass
class Told(LinePredictor):
    """Hears what each run teaches."""

    runs: list[SimpleNamespace] = field(default_factory=list)

    def ended(self, now, work, took_s, answers=(), *, is_probe=False):
        self.runs.append(SimpleNamespace(work=work, took_s=took_s, answers=answers, is_probe=is_probe))


def queue_of(*, slowdown=1.0, micro_batch_tokens=0, slo_s=1.0, model=MODEL, **policy):
    queue = Scheduler(model, Policy(slo_s, **policy), predictor=slow(slowdown, model))
    queue.set_pass_tokens(micro_batch_tokens)
    return queue


def query(ms, due=1.0, **how):
    return ScheduledQuery(ms, due, **how)


def deferrable(ms, due=5.0, **how):
    return ScheduledQuery(ms, due, deferrable=True, **how)


def bulk(ms, due=600.0):
    return ScheduledQuery(ms, due, deferrable=True, bulk=True)


def running(ms, *waiting, **how):
    """A run of `ms` and its 200 ms began at 0 s; `waiting` came just afterwards."""
    queue = queue_of(**how)
    admit(queue, 0.0, query(ms))
    queue.start(0.0)
    return admit(queue, 0.0, *waiting)


def admit(queue, now, *queries):
    """Whatever the rules say."""
    rule, queue.admission = queue.admission, queue._by_depth
    for one in queries:
        one.cost = queue.limits.model.cost(one.tokens)
        queue._admit(now, [one], (1.0, 0.0))
    queue.admission = rule
    return queue


def takes(queue, now, *queries, **how):
    return copy.deepcopy(queue).offer(now, queries, **how)


def has_room(queue, now, allowed_s, ms, make=query, **how):
    """A query of just less than `ms` is admitted, and one of just more is not."""
    return [takes(queue, now, make(ms + more, now + allowed_s), **how) for more in (-STEP, STEP)] == [1, 0]


# --- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "now", "allowed_s", "ms"),
    [
        # An idle device: L + f (beta + W + c) <= t / (1 + m), L its pause.
        pytest.param(queue_of(), 0.0, 1.0, 800 - 6 - 200, id="idle"),
        pytest.param(queue_of(slowdown=2.0), 0.0, 1.0, (800 - 6) / 2 - 200, id="idle and slow"),
        pytest.param(queue_of(depth=4), 0.0, 1.0, 4 * 75, id="idle, bounded by a depth"),
        # At the end of runs: one of 300 ms takes until 0.5 s.
        pytest.param(running(300), 0.2, 1.0, 800 - 300 - 200, id="at the end"),
        pytest.param(running(300, query(100, 1.0)), 0.2, 1.0, 640 - 300 - 200 - 100, id="one that waits has less time"),
        pytest.param(
            running(300, deferrable(50, 1.1)), 0.2, 1.0, 720 - 300 - 200 - 50, id="a deferrable one has less time"
        ),
        pytest.param(
            running(300, *[deferrable(50, 9)] * 4), 0.2, 2.0, 600 - 60 - 50, id="deferrable ones' share of any run"
        ),
        pytest.param(running(300, *[bulk(25)] * 4), 0.2, 2.0, 600 - 30 - 25, id="bulk's part of any run"),
        pytest.param(admit(queue_of(), 0.0, *[deferrable(50, 9)] * 4), 0.0, 2.0, 600 - 60 - 50, id="the same, idle"),
        pytest.param(running(300, slowdown=2.0), 0.4, 1.6, (1280 - 600) / 2 - 200, id="at the end, slow"),
        # Pass by pass: L + f (beta + U + c + pass) <= left / (1 + m).
        pytest.param(running(300, micro_batch_tokens=100), 0.2, 1.0, 800 - 300 - 200 - 100, id="pass by pass"),
        pytest.param(
            running(300, query(50), micro_batch_tokens=100), 0.2, 1.0, 800 - 300 - 200 - 50 - 100, id="one is ahead"
        ),
        pytest.param(
            running(300, query(50, 0.7), micro_batch_tokens=100), 0.2, 1.0, 150, id="its deadline is its own matter"
        ),
        pytest.param(
            running(300, micro_batch_tokens=100, slowdown=2.0), 0.4, 2.0, (1600 - 600) / 2 - 300, id="passes, slow"
        ),
    ],
)
def test_room_for_an_urgent_query(queue, now, allowed_s, ms):
    assert has_room(queue, now, allowed_s, ms, again=True)


def behind_a_short_run(*waiting, ms=90):
    """These came at 0.2 s. The run ends at 0.29 s, or as much later as it is longer."""
    queue = running(ms, micro_batch_tokens=100)
    for one in waiting:
        assert queue.offer(0.2, [one])
    return queue


LAST, ONE_BEFORE = query(411, 1.2), query(409, 1.2)  # without and with a pass to spare: 510 ms are left at most


@pytest.mark.parametrize(
    ("queue", "allowed_s", "ms"),
    [
        pytest.param(behind_a_short_run(), 1.0, 800 - 90 - 200, id="without a pass to spare"),
        pytest.param(behind_a_short_run(ms=91), 1.0, 800 - 91 - 200 - 100, id="behind a longer run"),
        pytest.param(behind_a_short_run(deferrable(40)), 1.0, 800 - 90 - 200 - 40, id="a deferrable one has its part"),
        pytest.param(
            behind_a_short_run(deferrable(140)), 1.0, 800 - 90 - 200 - 100, id="its part is larger than a pass"
        ),
        pytest.param(behind_a_short_run(), 0.8, 640 - 90 - 200, id="almost an SLO is left"),
        pytest.param(behind_a_short_run(), 0.79, 632 - 90 - 200 - 100, id="less than that is left"),
        pytest.param(behind_a_short_run(LAST), 2.0, 510 - 411, id="one that waits has no pass to spare"),
        pytest.param(behind_a_short_run(ONE_BEFORE), 2.0, 600 - 409, id="it has one: it may be followed"),
        pytest.param(behind_a_short_run(LAST, query(60, 1.25)), 2.0, 510 - 471, id="neither of two has one"),
        pytest.param(
            behind_a_short_run(query(400, 1.2), query(50, 2.0)), 2.0, 600 - 450, id="the last of them has time"
        ),
    ],
)
def test_behind_a_short_run_queries_need_no_pass_to_spare(queue, allowed_s, ms):
    assert has_room(queue, 0.2, allowed_s, ms)


def test_deferrable_queries_have_no_part_of_a_run_that_has_no_pass_to_spare():
    """They may run in two runs of 60 ms each until their deadline; one of them is full."""
    assert has_room(behind_a_short_run(ONE_BEFORE, deferrable(1)), 0.2, 2.75, 120 - 1, deferrable)
    assert has_room(behind_a_short_run(LAST, deferrable(1)), 0.2, 2.75, 60 - 1, deferrable)


def test_a_queue_without_a_pass_to_spare_opens_when_its_run_has_started():
    queue = behind_a_short_run(query(450, 1.2))
    queue.demand.long_queries.mean = 0.075
    assert queue.state(0.2).opens_s == pytest.approx(0.09 + 0.65 + 0.375 - 0.8)
    queue.ended(0.29)
    queue.start(0.29)
    assert has_room(queue, 0.29, 2.0, 600)


@pytest.mark.parametrize("allowed_s", [0.9097, 0.9100])
def test_the_first_of_the_next_run_leaves_room_for_those_that_will_come(allowed_s):
    """L = 0.48 <= (left / 1.25 - 0.2) / (1 + rho), where 300 ms and this millisecond have come in three seconds."""
    queue = running(300)
    queue.demand.arrives(0.0, 0.3)
    least_s = 1.25 * (0.2 + 0.48 * (1 + 0.1 * math.exp(-0.02 / 3) + 0.001 / 3))
    assert least_s == pytest.approx(0.9099, abs=1e-4)
    assert takes(queue, 0.02, query(1, 0.02 + allowed_s)) == (allowed_s > least_s)


def test_what_arrives_in_a_second_is_averaged_over_three():
    queue = queue_of()
    queue.demand.arrives(5.0, 3.0)
    queue.demand.arrives(5.009, 0.0)
    assert queue.demand.rho == 1
    queue.demand.arrives(5.011, 0.3)
    assert queue.demand.rho == pytest.approx(math.exp(-0.011 / 3) + 0.1)
    queue.demand.arrives(5.022, 0.0)
    assert queue.demand.rho == pytest.approx(math.exp(-0.022 / 3) + 0.1 * math.exp(-0.011 / 3))


def test_work_is_counted_once_and_not_that_of_deferrable_queries():
    queue = queue_of()
    queue.offer(0.0, [query(30), query(60)])
    assert queue.demand.rho == pytest.approx(0.03)
    queue.offer(0.0, [query(30)], again=True)
    queue.offer(0.0, [bulk(30)])
    assert queue.demand.rho == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("queue", "now", "allowed_s", "ms"),
    [
        # Of any run a fifth of its half: 60 ms. L + ceil(work / 60 ms) * SLO <= left / (1 + m)
        pytest.param(running(300, deferrable(40)), 0.2, 3.0 / 0.8, 60 * 2 - 40, id="two whole runs"),
        pytest.param(
            running(300, deferrable(40), query(10, 9)), 0.2, 4.31 / 0.8, 60 * 3 - 40, id="one later: some wait"
        ),
        # The next run takes longer than others: 200 ms, 900, 40 and the query's own; so it is one of 50 ms at most.
        pytest.param(running(300, query(900, 9), deferrable(40)), 0.2, 3.49 / 0.8, 50, id="a long run is next"),
        pytest.param(running(300, deferrable(40), slo_s=2.0), 0.2, 4.31 / 0.8, 140 * 2 - 40, id="a longer SLO"),
        pytest.param(running(300), 0.2, 1.31 / 0.8, 810, id="one that is larger goes by itself: with it 10 ms longer"),
    ],
)
def test_room_for_a_deferrable_query(queue, now, allowed_s, ms):
    assert has_room(queue, now, allowed_s, ms, deferrable)


def test_who_is_deferrable():
    """Who allows more than two SLOs; by a count nobody."""
    assert [is_deferrable("deadline", 0.5, allowed_s) for allowed_s in (1.0, 1.001)] == [False, True]
    assert not is_deferrable("depth", 0.5, 9.0)


@pytest.mark.parametrize(
    ("queue", "ms"),
    [
        (queue_of(), 500 * 0.8 - 200),
        (admit(queue_of(), 0.0, bulk(50)), 500 * 0.8 - 200 - 50),
        (admit(queue_of(), 0.0, deferrable(150)), 500 * 0.8 - 200 - 150),  # they are before it
        (admit(queue_of(), 0.0, deferrable(190)), 0.1 * 0.5 * 600),
        (queue_of(slo_s=2.0, bulk_share=0.25, depth=100), 0.25 * 2000 * 0.8 - 200),
        (queue_of(model=CostModel(0.0, 0.0001, 0.0, 0.5)), 0.1 * 0.5 * (800 - 500)),  # its share of any run is more
    ],
)
def test_bulk_has_room_for_its_share_of_an_slo(queue, ms):
    assert queue.state(0.0).bulk_room == pytest.approx(ms / 1000)


def test_bulk_gets_no_more_than_the_next_run_may_take_and_one_larger_one_by_itself():
    queue = running(300, bulk(50))
    assert has_room(queue, 0.2, 600.0, 150, bulk)
    assert takes(running(300), 0.2, bulk(900))
    assert takes(running(300), 0.2, *[bulk(50) for _ in range(9)], partial=True) == 4


@pytest.mark.parametrize(
    ("queue", "offer", "is_urgent"),
    [
        (queue_of(), [deferrable(100, 2.5)] * 5, True),  # they end within the SLO, and their share would not hold them
        (queue_of(), [deferrable(400, 2.5)], False),  # one goes by itself
        (queue_of(), [deferrable(400, 1.1)], True),  # and has no time for that
    ],
)
def test_several_deferrable_queries_that_an_idle_device_would_end_in_time_are_urgent(queue, offer, is_urgent):
    queue = copy.deepcopy(queue)
    offer = [ScheduledQuery(one.tokens, one.due, one.deferrable, one.bulk, cost=one.tokens / 1000) for one in offer]
    first = offer[0].due
    queue.admission.promote(0.0, offer, sum(one.cost for one in offer))
    assert {(one.deferrable, one.due) for one in offer} == ({(False, 1.0)} if is_urgent else {(True, first)})


def test_an_offer_of_deferrable_queries_to_an_idle_device_is_urgent():
    offer = [deferrable(100, 2.5) for _ in range(5)]
    assert queue_of().offer(0.0, offer)
    assert not any(one.deferrable for one in offer)


@pytest.mark.parametrize(
    ("queue", "offer", "how", "taken"),
    [
        (queue_of(), [query(100)] * 6, {"partial": True}, 5),
        (queue_of(depth=0), [query(1)], {}, 0),
        (queue_of(depth=1), [query(74)], {}, 1),
        (queue_of(admission="depth", depth=3), [query(9000)] * 4, {"partial": True}, 3),
        (queue_of(admission="depth"), [query(1)], {}, 0),
        # Bulk has its share of the places, and one at least.
        (queue_of(admission="depth", depth=3), [bulk(1)] * 9, {"partial": True}, 1),
        (admit(queue_of(admission="depth", depth=9), 0.0, bulk(1)), [bulk(1)] * 9, {"partial": True}, 3),
    ],
)
def test_all_are_admitted_or_none_or_the_first_of_them(queue, offer, how, taken):
    queue, offer = copy.deepcopy(queue), [copy.copy(one) for one in offer]
    before = queue.queue.count
    assert queue.offer(0.0, offer, **how) == taken
    assert queue.queue.count == before + taken
    assert sum(astuple(queue.refusals)) == len(offer) - taken


@pytest.mark.parametrize(
    ("queue", "offer", "reason"),
    [
        # Never: beta + c is more than there is, as quick as the device is known to be.
        (queue_of(), query(801), "never"),
        (queue_of(slowdown=0.5), query(1801), "never"),
        (queue_of(slowdown=0.5), query(1799), "full"),
        (queue_of(slowdown=2.0), query(799), "full"),
        (queue_of(), query(801, 5.0), "full"),
        (queue_of(depth=9), query(801, 5.0), "never"),  # a run of such a depth ends within the SLO
        (queue_of(admission="depth"), query(9000), "full"),
        (queue_of(depth=0), query(9000), "closed"),
    ],
)
def test_why_a_query_is_refused(queue, offer, reason):
    queue = copy.deepcopy(queue)
    assert queue.offer(5.0, [query(offer.tokens, 5.0 + offer.due)]) == (reason is None)
    assert asdict(queue.refusals) == {"full": 0, "never": 0, "closed": 0} | ({reason: 1} if reason else {})


# --- long queries, and tenants ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "offer", "mean_ms"),
    [
        (queue_of(), [query(75, 1.2), query(115, 1.2)], 75 + 0.4),
        (queue_of(), [bulk(95)], 75),
        # Refused, and not on an idle device; or refused there as well.
        (running(300, query(300, 9)), [query(594 - STEP, 1.2)], 75 + 0.02 * 519),
        (running(300, query(300, 9)), [query(75, 1.2), query(600, 1.2)], 75),
        (running(300, query(300, 9), slowdown=2.0), [query(197 - STEP, 1.2)], 75 + 0.02 * 122),
        (running(300, query(300, 9), slowdown=2.0), [query(197 + STEP, 1.2)], 75),
    ],
)
def test_which_queries_count_for_the_fairness_to_long_ones(queue, offer, mean_ms):
    queue = copy.deepcopy(queue)
    queue.offer(0.2, [copy.copy(one) for one in offer])
    assert queue.demand.long_queries.mean == pytest.approx(mean_ms / 1000, abs=1e-6)


@pytest.mark.parametrize(
    ("ms", "allowed_s", "long_ms", "usual_s"),
    [
        # An idle device admits 594 ms of those with the SLO.
        (0.6 * 594 - STEP, 1.0, 0.6 * 594 - STEP, 1.0),
        (0.6 * 594 + STEP, 1.0, 0, 1.0),
        (0.6 * 594 - STEP, 1.5, 0.6 * 594 - STEP, 1.0),  # no more than the SLO counts
        (200, 0.9491, 200, 0.998982),
        (200, 0.9490, 0, 0.99898),  # less than 0.95 of it
        (0.6 * 594 - STEP, 0.96, 0.6 * 594 - STEP, 0.9992),
    ],
)
def test_which_refused_queries_room_is_kept_for(ms, allowed_s, long_ms, usual_s):
    queue = running(300, query(300, 9))
    long_queries = queue.demand.long_queries
    long_queries.usual.mean_s = 1.0
    assert not queue.offer(0.2, [query(ms, 0.2 + allowed_s)])
    assert long_queries.long == pytest.approx(long_ms / 1000)
    assert long_queries.usual.mean_s == pytest.approx(usual_s)


@pytest.mark.parametrize(
    ("long_ms", "now", "offer", "how", "taken"),
    [
        # The device takes 300 ms at 0.2 s, and 350 at 0.25 s.
        (360, 0.25, [query(10, 1.25)], {}, 0),
        (350, 0.2, [query(10, 1.2), query(360, 1.2)], {"partial": True}, 1),  # the long one is among them
        (595, 0.2, [query(10, 1.2)], {}, 1),  # no idle device would admit that one
        (350, 0.2, [bulk(10)], {}, 1),
    ],
)
def test_room_is_kept_for_a_long_query(long_ms, now, offer, how, taken):
    queue = running(300)
    reserving(queue, long_ms)
    assert takes(queue, now, *offer, **how) == taken


def shared(queue, now=0.0, *, under_share_rho=0.0, mean_ms=10, **kinds):
    """Tenants of these kinds, and a level that somebody is below."""
    queue = copy.deepcopy(queue)
    shares = queue.demand.shares
    shares.level, shares.has_under_share, shares.under_share_rho, shares._at = 9.0, True, under_share_rho, now
    shares.accounts |= {
        name: Account(1.0, is_over_share=kind, ahead_rho=under_share_rho if kind else 0.0)
        for name, kind in kinds.items()
    }
    shares.over_share = {name: account for name, account in shares.accounts.items() if account.is_over_share}
    shares.under_share_cost_s = queue.demand.long_queries.mean = mean_ms / 1000
    return queue


def of_tenant(name):
    return lambda ms, due: query(ms, due, tenant=Tenant(name))


@pytest.mark.parametrize(
    ("queue", "sharing", "ms"),
    [
        # A quiet query that comes just after the run's start is in time: two such runs take 800 ms.
        (queue_of(), {}, 400 - 200),
        (queue_of(model=CostModel(0.0, 0.001, 0.0, 0.02)), {}, 400 - 20),
        (queue_of(model=CostModel(0.0, 0.001, 0.0, 0.3)), {}, 0.25 * 500),  # a quarter of a run, at least
        # Pass by pass: 800 ms less the first pass of the run after it, which has that query.
        (queue_of(micro_batch_tokens=50), {}, 800 - 200 - (200 + 10 + 50)),
        # Three times what quiet ones ask for in the 6 ms until it starts.
        (queue_of(), {"under_share_rho": 0.01}, 200 - 3 * 0.01 * 6),
        (queue_of(), {"under_share_rho": 0.2}, 200 - 3 * 0.2 * 6),
        (queue_of(max_batch_fraction=0.2), {}, 0.2 * 600),
        (queue_of(max_batch_fraction=0.9, slowdown=2.0), {}, 0.25 * 200),
        # What waits counts.
        (admit(queue_of(), 0.0, query(50)), {}, 200 - 50),
        (queue_of(max_batch_fraction=0.2), {"waiting_ms": 70}, 0.2 * 600 - 70),
    ],
)
def test_tenants_above_their_share_leave_room_to_others(queue, sharing, ms):
    sharing = dict(sharing)
    waiting_ms = sharing.pop("waiting_ms", 1e-6)
    queue = shared(queue, over_share=True, quiet=False, **sharing)
    queue.demand.shares.waits(queue.demand.shares.accounts["over_share"], waiting_ms / 1000)
    assert has_room(queue, 0.0, 1.0, ms, of_tenant("over_share"))


def test_one_query_of_tenants_above_their_share_has_room_however_long():
    """While it waits, what is left of their part of the run."""
    queue = shared(queue_of(), over_share=True, quiet=False)
    assert has_room(queue, 0.0, 1.0, 594, of_tenant("over_share"))
    queue.demand.shares.waits(queue.demand.shares.accounts["over_share"], 0.07)
    assert has_room(queue, 0.0, 1.0, 200, of_tenant("over_share"))


def test_a_quiet_tenant_goes_by_the_common_rule_without_those_who_will_come():
    queue = running(550)
    queue.demand.rho, queue.demand._rho_at = 9.0, 0.2
    assert not takes(queue, 0.2, query(1, 1.2))
    queue = shared(queue, 0.2, quiet=False, over_share=True)
    queue.demand.shares.accounts["over_share"].offered_s = 90.0  # 9 device seconds a second
    assert has_room(queue, 0.2, 1.0, 50, of_tenant("quiet"))
    assert not takes(queue, 0.2, query(1, 1.2, tenant=Tenant("over_share")))
    queue.demand.shares.level = math.inf
    assert not takes(queue, 0.2, query(1, 1.2, tenant=Tenant("quiet")))


def test_a_quiet_tenant_gets_the_room_that_is_kept_for_long_queries():
    queue = shared(running(300), 0.2, quiet=False, over_share=True)
    reserving(queue, 350).demand.long_queries.mean = 0.001
    assert [takes(queue, 0.2, query(10, 1.2, tenant=Tenant(name))) for name in ("quiet", "over_share")] == [1, 0]


@pytest.mark.parametrize(("due", "tokens", "runs"), [(0.38, 120, 2), (0.37, 50, 1), (0.37, 40, 2)])
def test_a_deferrable_query_may_share_the_last_pass_where_the_urgent_one_has_time_for_a_full_one(due, tokens, runs):
    """due / 1.25 less beta: 104 and 96 ms, of which a full pass takes 100, and its own 50."""
    queue = admit(queue_of(micro_batch_tokens=100), 0.0, query(50, due), deferrable(tokens, 9))
    assert len(queue.start(0.0)) == runs


@pytest.mark.parametrize(("last_due", "runs"), [(0.66, 4), (0.62, 3)])
def test_only_those_of_the_last_pass_wait_for_who_shares_it(last_due, runs):
    """Urgent work of 250 ms, more than the first deadline leaves; the last 50 need 200 + 100 ms and beta."""
    urgent = query(100, 0.4), query(100, 0.55), query(50, last_due)
    queue = admit(queue_of(micro_batch_tokens=100), 0.0, *urgent, deferrable(60, 9))
    assert len(queue.start(0.0)) == runs


def test_by_depth_places_are_kept_for_others():
    """What the quiet ones ask for in an SLO, 0.03 s, and three standard deviations: 0.17 s of 0.075 s each."""
    queue = shared(queue_of(admission="depth", depth=9), over_share=True, quiet=False, under_share_rho=0.03, mean_ms=75)
    for name, places in (("over_share", 6), ("quiet", 9)):
        offer = [query(1, tenant=Tenant(name)) for _ in range(9)]
        assert takes(queue, 0.0, *offer, partial=True) == places
    assert takes(queue, 0.0, *[deferrable(1, tenant=Tenant("over_share")) for _ in range(9)], partial=True) == 9
    assert takes(admit(queue, 0.0, *[query(1)] * 9), 0.0, query(1, tenant=Tenant("over_share"))) == 0


def test_what_a_tenant_asked_for_and_got():
    queue, tenant = running(300), Tenant("a")
    queue.offer(0.2, [query(200, 1.2, tenant=tenant), query(150, 1.2, tenant=tenant)], partial=True)
    account = queue.demand.shares.accounts["a"]
    assert (account.offered_s, account.used_s) == (pytest.approx(0.35), pytest.approx(0.2))
    assert account.waiting_s == pytest.approx(0.2)
    queue.offer(0.2, [query(50, 1.2, tenant=tenant)])
    assert (account.offered_s, account.used_s) == (pytest.approx(0.4), pytest.approx(0.25))
    queue.demand.arrives(0.2, 0.5, tenant)  # that a Router has refused by itself
    assert (account.offered_s, account.used_s) == (pytest.approx(0.9), pytest.approx(0.25))
    queue.remove(queue.queue.urgent[:1])
    assert account.waiting_s == pytest.approx(0.05)
    queue.remove([])
    assert account.waiting_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("ms", "allowed_s", "rule", "asked_s"),
    [
        ([593], 1.0, {}, 0.593),
        ([595], 1.0, {}, 0.0),
        ([10], 0.25, {}, 0.0),
        ([200, 593], 1.0, {}, 0.793),
        ([200, 595], 1.0, {}, 0.2),
        ([595], 0.25, {"admission": "depth", "depth": 1}, 0.595),  # a count promises no time
    ],
)
def test_what_an_idle_device_refuses_too_is_not_asked_of_it(ms, allowed_s, rule, asked_s):
    """No room that others leave would help it, and it is in no run that comes."""
    queue = running(300, **rule)
    queue.offer(0.2, [query(one, 0.2 + allowed_s, tenant=Tenant("a")) for one in ms], partial=True)
    assert queue.demand.shares.accounts.get("a", Account(1.0)).offered_s == pytest.approx(asked_s)
    assert queue.demand.rho == pytest.approx(asked_s / 3)


def test_nobody_leaves_room_to_a_tenant_whose_queries_are_deferrable_or_in_vain():
    queue = running(300)
    for make, ms, due, name in ((deferrable, 50, 9.0, "a"), (query, 595, 1.2, "b"), (query, 50, 1.2, "c")):
        queue.offer(0.2, [make(ms, due, tenant=Tenant(name))])
    assert set(queue.demand.shares.accounts) == {"c"}


# --- probes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slowdown", "slo_s", "ms", "after_s"),
    [
        # It would be in time with a slowdown of 1, the pause of 6 ms included: one SLO without a run.
        (8.0, 2.0, [75], 2.0),
        (4.0, 1.0, [794 + STEP], 8.0),
        (4.0, 2.0, [1900], 16.0),
        (1.5, 1.0, [400], 1.0),
        # Several at once must be in time.
        (4.0, 1.0, [394, 400 - STEP], 1.0),
        (4.0, 1.0, [394, 400 + STEP], None),
    ],
)
def test_an_idle_device_that_would_refuse_lets_a_query_in_now_and_then(slowdown, slo_s, ms, after_s):
    queue = queue_of(slowdown=slowdown, slo_s=slo_s)

    def let_in(now):
        return takes(queue, now, *[query(one, now + slo_s) for one in ms]) == len(ms)

    times = (99.0,) if after_s is None else (after_s - 1e-6, after_s + 1e-6)
    assert [let_in(now) for now in times] == [False, True][: len(times)]


@pytest.mark.parametrize("queue", [running(300, slowdown=4.0), admit(queue_of(slowdown=4.0), 0.0, query(10))])
def test_only_an_idle_device_lets_one_in_as_a_probe(queue):
    queue.run.since = -20.0
    assert not takes(queue, 0.3, query(75, 1.3))


def test_the_time_between_probes_doubles_until_a_run_that_is_none():
    queue, now, waits = queue_of(slowdown=4.0), 0.0, []
    for is_probe, whole in [*[(True, True)] * 2, (True, False), *[(True, True)] * 2, (False, True), (True, True)]:
        waits.append(queue.state(now).opens_s)
        if is_probe:
            assert not takes(queue, now + waits[-1] - 1e-6, query(75, now + waits[-1] + 1))
            now += waits[-1] + 1e-6
        if is_probe:
            assert queue.offer(now, [query(75, now + 1)]) == 1
        else:
            admit(queue, now, query(75, now + 1))
        queue.start(now)
        now += 1.0
        queue.ended(now, whole=whole)
    assert waits == [pytest.approx(wait_s) for wait_s in (1, 2, 4, 4, 8, 8, 1)]


def test_a_probe_that_is_in_time_is_believed():
    queue = queue_of(slowdown=4.0)
    queue.offer(1.1, [query(300, 2.1)])
    queue.start(1.1)
    queue.ended(1.1 + 0.5)
    admit(queue, 2.0, query(75, 9))
    queue.start(2.0)
    queue.ended(2.0 + 0.275)
    assert [run.is_probe for run in queue.limits.predictor.runs] == [True, False]


def test_a_probe_of_a_device_that_is_not_slow_teaches_as_any_run():
    """A hopeless query after eight SLOs, with a hiccup: the burst after it is admitted as before."""
    queue = queue_of()
    queue.offer(9.0, [query(900, 10.0)])
    queue.start(9.0)
    queue.ended(9.0 + 3.0)
    assert [run.is_probe for run in queue.limits.predictor.runs] == [False]


def test_a_probe_that_is_called_off_is_none_any_more():
    queue = queue_of(slowdown=4.0)
    queue.offer(1.1, [one := query(300, 2.1)])
    queue.remove([one])
    admit(queue, 2.0, query(75, 9))
    queue.start(2.0)
    queue.ended(2.0 + 0.275)
    assert [run.is_probe for run in queue.limits.predictor.runs] == [False]


# --- what runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "now", "wait_s"),
    [
        # 6 ms for each that waits, three at most, from the last; half of beta from the first.
        (admit(queue_of(), 0.0, query(10)), 0.002, 0.004),
        # A timer cannot tell less than half a millisecond.
        (admit(queue_of(), 0.0, query(10)), 0.0054, 0.0006),
        (admit(queue_of(), 0.0, query(10)), 0.0056, 0.0),
        # So a lone query of a quick device, whose beta is 2 ms, does not wait. Three are a burst.
        (admit(queue_of(model=QUICK), 0.0, query(10)), 0.0, 0.0),
        (admit(queue_of(model=QUICK), 0.0, query(10), query(10), query(10)), 0.0, 0.0006),
        # No query of the mean cost has room beside it.
        (admit(queue_of(), 0.0, query(512)), 0.0, 0.006),
        (admit(queue_of(), 0.0, query(514)), 0.0, 0.0),
        (admit(queue_of(admission="depth", depth=9), 0.0, *[bulk(10)] * 4), 0.0, 0.018),  # bulk has its share of places
    ],
)
def test_when_the_next_run_begins(queue, now, wait_s):
    assert queue.start_in_s(now) == (wait_s if wait_s is None else pytest.approx(wait_s))


@pytest.mark.parametrize(
    ("offers", "wait_s"),
    [
        ([query(10, 1.0), query(100, 0.39)], 0.312 - 0.31),
        ([deferrable(50, 2.0), query(50, 0.377)], 0.3016 - 0.3),
        ([deferrable(50, 1.255)], 1.004 - 1.0),  # one SLO before its end
    ],
)
def test_a_pause_makes_nobody_late_who_was_admitted(offers, wait_s):
    queue = queue_of()
    for one in offers:
        later = ScheduledQuery(one.tokens, 5.0 + one.due, one.deferrable, cost=one.tokens / 1000)
        queue._admit(5.0, [later], (1.0, 0.0))
    queue.demand.long_queries.mean = 1e-6  # somebody could still join
    assert queue.start_in_s(5.001) == pytest.approx(max(0.0, wait_s - 0.001))


def test_only_who_is_admitted_by_its_finish_shortens_the_pause():
    for policy, wait_s in (({}, 0.054 - 0.046), ({"admission": "depth", "depth": 9}, 0.057 - 0.046)):
        queue = queue_of(**policy)
        assert queue.offer(0.0, [query(50, 0.38)])  # 304 ms less 250
        assert queue.offer(0.045, [query(1, 1.0)])
        queue.demand.long_queries.mean = 1e-6
        assert queue.start_in_s(0.046) == pytest.approx(wait_s)


def test_what_waits_at_a_runs_end_has_waited_already():
    queue = running(300, query(10))
    queue.ended(0.5)
    assert queue.start_in_s(0.5) == 0
    idle = running(300)
    idle.ended(0.5)
    admit(idle, 0.6, query(10))
    assert idle.start_in_s(0.6) == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("urgent", "ms", "how", "taken"),
    [
        # Half of the SLO's 800 ms is for deferrable ones; a fifth of half a run, 60 ms, is theirs in any run.
        ([], 45, {}, 4),
        ([query(300)], 45, {}, 2),
        ([query(300)], 61, {}, 1),
        ([query(300)], 59, {}, 2),
        ([], 101, {"slo_s": 2.0}, 5),
        # At the end of a run the urgent ones wait for them: no later than their deadline.
        ([query(100, 0.51)], 45, {}, 2),
        ([query(100, 0.45)], 45, {}, 1),
        ([query(100, 0.40)], 45, {}, 0),
    ],
)
def test_deferrable_queries_fill_a_run_behind_the_urgent_ones(urgent, ms, how, taken):
    urgent = [query(one.tokens, 5.0 + one.due) for one in urgent]
    queue = admit(queue_of(**how), 5.0, *urgent, *[deferrable(ms, 19.0) for _ in range(12)])
    run = queue.start(5.0)
    assert run[: len(urgent)] == urgent
    assert len(run) == len(urgent) + taken
    assert queue.run.predicted_s == pytest.approx(0.2 + sum(one.cost for one in run))
    assert (queue.queue.count, queue.run.unanswered, queue.runs) == (12 - taken, len(run), 1)


@pytest.mark.parametrize(
    ("urgent", "deferrables", "bulks"),
    [
        ([], 3, 2),  # of 200 ms 30 are kept for bulk: a tenth of half a run
        ([query(300)], 2, 2),
        ([query(515, 9.0)], 1, 0),  # with 61 ms of the one and 25 of the other it would be longer than a run may be
        ([query(513, 9.0)], 1, 1),
    ],
)
def test_bulk_has_its_part_of_a_run_behind_deferrable_queries(urgent, deferrables, bulks):
    waits = [deferrable(45 if bulks == 2 else 61, 19.0) for _ in range(12)], [bulk(25) for _ in range(3)]
    queue = admit(queue_of(), 0.0, *urgent, *waits[0], *waits[1])
    run = queue.start(0.0)
    assert (len(run) - len(urgent), sum(one.bulk for one in run)) == (deferrables + bulks, bulks)
    assert run[len(urgent) :] == waits[0][:deferrables] + waits[1][:bulks]


SMALL_BETA = CostModel(0.0, 0.001, 0.0, 0.02)


@pytest.mark.parametrize(("now", "taken"), [(2.99, 4), (3.01, 8)])
def test_bulk_runs_are_short_for_three_seconds_after_an_urgent_query(now, taken):
    """Nine times beta, 180 ms; else half of the SLO's 800 ms, less beta."""
    queue = queue_of(model=SMALL_BETA)
    queue.demand.arrives(0.0, 0.1)
    assert len(admit(queue, now, *[bulk(45) for _ in range(12)]).start(now)) == taken


@pytest.mark.parametrize(
    ("beta_s", "bulk_at", "taken"), [(0.0399, 4.01, 0), (0.0399, 3.99, 5), (0.0401, 4.01, 5), (0.0399, -math.inf, 5)]
)
def test_where_runs_of_its_own_cost_it_little_bulk_lengthens_those_of_others_once_in_an_slo(beta_s, bulk_at, taken):
    """Nine times beta are less than the 400 ms less beta that bulk has of a run."""
    queue = admit(queue_of(model=CostModel(0.0, 0.001, 0.0, beta_s)), 5.0, query(100, 6.0))
    admit(queue, 5.0, *[bulk(45) for _ in range(12)])
    queue.run.bulk_at = bulk_at
    assert len(queue.start(5.0)) == 1 + taken
    assert queue.run.bulk_at == (5.0 if taken else bulk_at)


def test_behind_a_deferrable_query_that_does_not_fit_none_runs():
    queue = admit(queue_of(), 0.0, query(100), *(deferrable(ms, due) for ms, due in ((70, 7), (200, 8), (10, 9))))
    assert [one.tokens for one in queue.start(0.0)] == [100, 70]


def test_bulk_that_runs_has_its_places_until_it_is_answered():
    queue = admit(queue_of(admission="depth", depth=9), 0.0, *[bulk(1) for _ in range(4)])
    run = queue.start(0.0)
    assert takes(queue, 0.0, *[bulk(1) for _ in range(9)], partial=True) == 0
    queue.passed(0.1, run[:3])
    assert takes(queue, 0.1, *[bulk(1) for _ in range(9)], partial=True) == 3


def test_a_line_that_is_empty_again_forgets_its_largest_query():
    line, query = Line(), ScheduledQuery(75, 1.0, cost=0.2)
    line.add([query], 0.2)
    assert (line.work, line.largest) == (0.2, 0.2)
    line.remove({id(query)})
    assert (line.queries, line.work, line.largest) == ([], 0.0, 0.0)


# --- several single queries at once -----------------------------------------------------------------------------------


def decided(queue, queries):
    """What a scheduler knows after deciding on these."""
    rule, demand = queue.admission, queue.demand
    accounts = [*demand.shares.accounts.values()]
    numbers = [
        queue.queue.urgent_work, queue.most, demand.rho, demand.reserve, demand.long_queries.mean, rule._tight_due,
        *[number for one in queries for number in (one.admitted_at, one.predicted_s, one.cost)],
        *[number for one in accounts for number in (one.offered_s, one.used_s, one.squares_s2, one.waiting_s)],
    ]  # fmt: skip
    return [(one.tokens, one.due) for one in queue.queue.urgent], queue.refusals, rule.is_probe, numbers


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_queries_that_are_admitted_together_would_all_be_admitted_one_by_one(data):
    some = lambda *between: data.draw(st.integers(*between))  # noqa: E731
    queue = running(
        some(5, 400),
        micro_batch_tokens=some(0, 1) * 100,
        slowdown=some(5, 20) / 10,
        depth=data.draw(st.sampled_from([None, 0, 9])),
    )
    admit(queue, 0.0, *[query(some(1, 60), some(6, 20) / 10) for _ in range(some(0, 3))])
    now, tenant = some(0, 30) / 100, data.draw(st.sampled_from([None, Tenant("a")]))
    each = [query(some(1, 90), now + some(5, 15) / 10, tenant=tenant) for _ in range(some(1, 5))]
    together, one_by_one, same = copy.deepcopy((queue, each)), copy.deepcopy((queue, each)), copy.deepcopy(queue)
    if together[0].offer_each(now, together[1]):
        assert [one_by_one[0].offer(now, [one]) for one in one_by_one[1]] == [1] * len(each)
        (*facts, numbers), (*others, expected) = decided(*together), decided(*one_by_one)
        assert (facts, numbers) == (others, pytest.approx(expected))
    else:
        assert decided(together[0], []) == decided(same, [])


@pytest.mark.parametrize(
    ("queue", "are_admitted"),
    [
        (running(300), True),
        (running(300, micro_batch_tokens=100), True),
        (running(300, depth=0), False),
        (queue_of(), False),  # an idle device's first queries determine the next ones' time
        (running(300, admission="depth", depth=9), False),
    ],
)
def test_single_queries_are_admitted_together_while_a_run_is_under_way(queue, are_admitted):
    assert queue.offer_each(0.2, [query(10, 1.2), query(20, 1.1)]) == are_admitted


@pytest.mark.parametrize(("ms", "are_admitted"), [(-STEP, True), (STEP, False)])
@pytest.mark.parametrize(
    ("queue", "room_ms"),
    [(running(300), 720 - 300 - 200), (running(300, micro_batch_tokens=100), 720 - 300 - 200 - 100)],
)
def test_the_first_one_due_limits_those_that_are_admitted_together(queue, room_ms, ms, are_admitted):
    """An SLO is 1 s and a quarter of it the margin: 1.1 s - 0.2 s leave 720 ms."""
    queries = [query(room_ms - 20 + ms, 1.2), query(20, 1.1)]
    assert copy.deepcopy(queue).offer_each(0.2, queries) == are_admitted


def test_none_are_admitted_together_while_room_is_kept():
    assert not shared(running(300), 0.2, quiet=False, loud=True).offer_each(0.2, [query(10, 1.2)])
    queue = running(300)
    queue.demand.shares._at = 0.1
    queue.demand.shares.accounts = {"loud": Account(1.0, 0.0, 20.0, 5.0), "quiet": Account(1.0, 0.0, 0.1, 0.1)}
    assert not queue.offer_each(0.2, [query(10, 1.2)])  # as the shares are now, not as they were
    queue = running(300)
    for at in range(9):
        queue.demand.long_queries.offered(0.1 + at / 100, 0.3, refused=True)
        queue.demand.long_queries.offered(0.1 + at / 100, 0.01, refused=False)
    assert queue.demand.reserve > 0
    assert not queue.offer_each(0.2, [query(10, 1.2)])


def test_a_run_is_in_the_order_of_deadlines():
    late, early, last, first = query(1, 0.9), query(1, 0.8), deferrable(1, 5.0), deferrable(1, 4.0)
    queue = admit(queue_of(), 0.0, late, last, early, first)
    assert queue.start(0.0) == [early, late, first, last]
    queue.ended(0.3)
    assert queue.start_in_s(0.3) is None


# --- parts of requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "room_ms"),
    [
        (queue_of(), 800 - 6 - 10 - 200),  # an idle device's pause, and a hundredth of the SLO
        (queue_of(slo_s=2.0), 800 - 6 - 20 - 200),
        (running(100, micro_batch_tokens=100), 800 - 300 - 10 - 200 - 100),
    ],
)
def test_a_part_has_room_where_its_run_may_wait_for_the_rest(queue, room_ms):
    parts = [[query(room_ms + more), query(500)] for more in (-STEP, STEP)]
    assert [takes(queue, 0.0, *part, partial=True, again=True) for part in parts] == [1, 0]
    assert takes(queue, 0.0, query(room_ms + STEP), partial=True, again=True) == 1  # it is all of its request


def test_a_part_of_a_bulk_request_needs_no_more_room():
    assert takes(queue_of(), 0.0, *[bulk(3) for _ in range(99)], partial=True) == 66


@pytest.mark.parametrize(
    ("waits", "hold_at", "wait_s"),
    [
        (query(100), 0.495, 0.005),  # a hundredth of the SLO from then on
        (query(100), 0.4904, 0.0),  # a timer cannot tell less than half a millisecond
        (query(100), 0.4, 0.0),
        (query(100, 0.8775), 0.5, 0.002),  # 302 ms less the run's 300
        (query(100, 0.87), 0.5, 0.0),
        (deferrable(50, 1.75375), 0.5, 0.003),  # one SLO before its end
        (bulk(50), 0.5, 0.01),
    ],
)
def test_a_run_waits_for_what_becomes_of_a_part_while_all_stays_in_time(waits, hold_at, wait_s):
    queue = running(300, waits)
    queue.hold(hold_at, "part")
    assert queue.start_in_s(0.5) is None
    queue.ended(0.5)
    assert queue.start_in_s(0.5) == pytest.approx(wait_s)
    queue.hold(0.5, "another")
    queue.release("another")
    assert queue.start_in_s(0.5) == pytest.approx(wait_s)
    queue.release("part")
    assert queue.start_in_s(0.5) == 0


def test_an_idle_device_waits_for_parts_after_its_pause():
    queue = queue_of()
    queue.offer(0.0, [query(1)])
    for hold_at, wait_s in ((-0.001, 0.009), (-0.006, 0.006), (queue._start_by - 0.004, 0.004)):
        queue.hold(hold_at, "part")
        assert queue.start_in_s(max(0.0, hold_at)) == pytest.approx(wait_s)


def test_the_next_run_takes_all_parts_along_and_the_one_after_it_does_not_wait_for_them():
    queue = running(300, one := query(100), deferrable(100, 600.0))
    queue.ended(0.5)
    queue.hold(0.5, "part")
    assert one in queue.start(0.508)
    admit(queue, 0.509, query(1))
    queue.ended(0.509)
    assert queue.start_in_s(0.509) == 0


# --- predictions ------------------------------------------------------------------------------------------------------


def part(queue, now, ms):
    """So many milliseconds of the run are answered at that time."""
    queue.run._done_s, queue.run.since = ms / 1000, now
    queue.run._foresee()
    return queue


def ended(queue, now):
    queue.ended(now)
    return queue


@pytest.mark.parametrize(
    ("queue", "now", "free_s"),
    [
        (queue_of(), 0.0, 0.0),
        (running(300), 0.2, 0.3),
        (running(300, query(100), bulk(50)), 0.2, 0.3 + 0.35),
        # Overdue: a quarter of what it is late by, and the slowdown is what it has been so far.
        (running(300, query(100)), 0.6, 0.025 + 1.2 * 0.3),
        # Pass by pass: 100 of 300 ms were answered at 0.35 s; 200 are left of then.
        (part(running(300, micro_batch_tokens=100), 0.35, 100), 0.4, 0.15),
        (part(running(300, micro_batch_tokens=100), 0.35, 100), 0.6, 1.5 * 0.2 - 0.25),  # 0.4 s were planned until now
        (part(running(300, query(10), micro_batch_tokens=100), 0.35, 100), 0.6, 1.5 * 0.2 - 0.25 + 1.5 * 0.21),
    ],
)
def test_when_all_that_it_holds_is_done(queue, now, free_s):
    assert queue.state(now).free_s == pytest.approx(free_s)
    assert queue.utilization(now) == pytest.approx(free_s)


def test_a_run_that_began_later_is_overdue_later():
    queue = admit(queue_of(), 5.0, query(300, 6.0))
    queue.start(5.0)
    admit(queue, 5.0, query(100, 9.0))
    assert queue.state(5.2).free_s == pytest.approx(0.3 + 0.3)
    assert queue.state(5.6).free_s == pytest.approx(0.025 + 1.2 * 0.3)


@pytest.mark.parametrize(("now", "slowdown"), [(0.529, 1.0), (0.531, 1 + 0.002 / 0.5), (0.56, 1.12), (0.7, 1.4)])
def test_a_short_delay_shows_nothing_and_a_long_one_counts_in_full(now, slowdown):
    """Short: up to three times the jitter. Long: six times and more."""
    queue = running(300)
    queue.limits.predictor.jitter_s = 0.01
    assert queue.state(now).slowdown == pytest.approx(slowdown)


def test_a_run_that_is_all_answered_is_about_to_end():
    queue = queue_of(micro_batch_tokens=100)
    queue.offer(0.0, [one := query(200), other := query(100)])
    queue.start(0.0)
    queue.passed(0.4, [one])
    assert queue.state(0.45).free_s == pytest.approx(0.05)
    queue.passed(0.48, [other])
    assert (queue.state(0.49).free_s, queue.in_flight) == (0, 0)


@pytest.mark.parametrize(
    ("queue", "fill"),
    [
        (running(300, slo_s=2.0), 0.15),
        (running(300, query(300), slo_s=2.0), 0.4),
        (running(300, query(300), admission="depth", depth=8), 0.25),
        (running(300, query(300), admission="depth", depth=0), 2.0),
        (running(300, admission="depth"), 1.0),
    ],
)
def test_how_full_the_queue_is(queue, fill):
    """Of an SLO what it needs until it has done all; by count, of its depth. Autoscaling goes by it."""
    assert queue.utilization(0.2) == pytest.approx(fill)


FULL = {"slowdown": 4.0}


def reserving(queue, ms):
    long_queries = queue.demand.long_queries
    long_queries.offered(0.0, long_queries.mean, refused=False)
    for _ in range(3):
        queue.demand.long_queries.offered(0.0, ms / 1000, refused=True)
    queue.demand.long_queries.mean = 0.075
    return queue


def expecting(queue, rho):
    queue.demand.rho = rho
    return queue


@pytest.mark.parametrize(
    ("queue", "now", "opens_s"),
    [
        (queue_of(), 0.0, 0.0),
        (queue_of(depth=0), 0.0, math.inf),
        # By count: a place is free, or will be at the end of the run or of the next pass.
        (running(300, admission="depth", depth=2), 0.2, 0.0),
        (admit(queue_of(admission="depth", depth=9), 0.0, *[bulk(9)] * 4), 0.0, 0.0),  # for others than bulk
        (running(300, admission="depth", depth=1, micro_batch_tokens=100), 0.2, 0.1),
        (running(300, admission="depth", depth=1, micro_batch_tokens=100, slowdown=2.0), 0.4, 0.2),
        # For a query of the mean cost of 75 ms. At the end of runs one for the next is admitted at 0.6 s before it.
        (running(300), 0.2, 0.0),
        (running(550), 0.1, 0.65 - 0.6),
        (expecting(running(550), 0.1), 0.1, 0.65 - 0.6 / 1.1),
        (running(300, query(224, 2)), 0.2, 0.0),
        (running(300, query(226, 2)), 0.2, 0.3),
        (running(300, query(500, 2), deferrable(40)), 0.2, 0.3 + 0.74 - 0.6),
        (admit(queue_of(), 0.0, query(590)), 0.0, 0.012 + 0.79 - 0.6),
        # Pass by pass room grows with time, or with the next run's begin.
        (running(300, query(100, 2), micro_batch_tokens=100), 0.15, 0.025),
        (running(300, query(350, 2), micro_batch_tokens=100), 0.29, 0.135),
        (
            running(300, query(100, 4), micro_batch_tokens=100, slowdown=2.0),
            0.55,
            0.45 + 2 * (0.4 + 0.1 + 0.1 + 0.075) - 0.8,
        ),
        (running(300, query(550, 2), micro_batch_tokens=100), 0.15, 0.35 + 2 * 0.2 + 0.55 + 0.1 + 0.075 - 0.8),
        (running(300, query(300, 2), micro_batch_tokens=250), 0.44, 0.06 + 2 * 0.2 + 0.3 + 0.25 + 0.075 - 0.8),
        # It is idle, and would refuse: until a probe.
        (queue_of(slo_s=2.0, slowdown=8.0), 0.3, 1.7),
        (queue_of(model=CostModel(0.0, 0.001, 0.0, 0.55), slowdown=1.5), 0.3, 0.7),
        (queue_of(**FULL), 1.3, 0.0),
        (ended(running(0.0, **FULL), 5.0), 5.3, 0.7),
        (queue_of(model=CostModel(0.0, 0.001, 0.0, 0.74)), 0.0, 0.0),  # shorter ones are admitted
        (queue_of(model=CostModel(0.0, 0.001, 0.0, 0.77524)), 0.0, 0.0),  # of one token, at least: 1.5 ms
        (queue_of(model=CostModel(0.0, 0.001, 0.0, 0.776)), 0.3, 7.7),
        (reserving(running(300), 310), 0.2, 0.3),  # for a long one that room is kept for
    ],
)
def test_when_a_query_of_the_mean_cost_would_be_admitted(queue, now, opens_s):
    assert queue.state(now).opens_s == pytest.approx(max(0.0, opens_s), abs=1e-9)


def test_a_new_queue_is_open_and_empty():
    queue = Scheduler(MODEL, Policy(1.0))
    state = queue.state(0.0)
    assert state.bulk_room == pytest.approx(0.5 / 1.05 - 0.2)
    assert state._replace(bulk_room=0)[:15] == (0, 0, 0, 0, 0, 0, 0, astuple(MODEL), 1, 0.05, (0, 0, 0), 0, (), 1, None)
    assert queue.limits.micro_batch_tokens == 0


def test_a_state_says_all():
    queue = queue_of(slowdown=1.25)
    admit(queue, 0.0, query(300))
    queue.start(0.0)
    admit(queue, 0.0, query(100), bulk(20))
    queue.refusals.full, queue.refusals.never, queue.refusals.closed = 1, 2, 3
    state = queue.state(0.125)
    assert state._replace(opens_s=0, free_s=0, bulk_room=0)[:15] == (
        0, 0, 0, 3, 2, 3, 1, (0.0, 0.001, 0.0, 0.2), 1.25, 0.25, (1, 2, 3), 0.0, (), 1, None,
    )  # fmt: skip
    assert state.free_s == pytest.approx(0.5 + 1.25 * 0.32)
    assert state.bulk_room == pytest.approx(0.5 * 0.8 / 1.25 - 0.2 - 0.02)
    by_count = admit(queue_of(admission="depth", depth=9), 0.0, bulk(1))
    assert by_count.state(0.0).bulk_room == pytest.approx(3 * 0.075)


def test_it_opens_to_those_above_their_share_while_the_room_that_is_kept_shrinks():
    """Of half an SLO, 200 ms, 185 wait. At 0.2 s 90 are kept for the 300 until the next run; then 15 are free."""
    queue = shared(running(300, query(185, 9)), 0.2, quiet=False, over_share=True, under_share_rho=0.1)
    queue.demand.shares.waits(queue.demand.shares.accounts["over_share"], 0.185)
    assert queue.state(0.2).opens_s == pytest.approx(0.3 * (10 + 75) / (15 + 75))


def test_a_state_tells_those_above_their_share_when_it_opens_to_them():
    """The run holds 300 ms of them; 260 wait. The others' room is 300 ms at 0.2 s, and grows no more."""
    queue = running(300, query(260, 9), max_batch_fraction=0.5)
    assert queue.state(0.2)[11:14] == (0.0, (), 1)
    queue = shared(queue, 0.2, quiet=False, over_share=True)
    queue.demand.shares.waits(queue.demand.shares.accounts["over_share"], 0.285)
    state = queue.state(0.2)
    assert (state.opens_s, state.under_share_opens_s, state.over_share) == (pytest.approx(0.3), 0, ["over_share"])
    queue.configure(Policy(1.0, depth=0), MODEL)
    assert queue.state(0.2).over_share == ()
    queue.configure(Policy(1.0, "depth", 9), MODEL)
    assert queue.state(0.2).over_share == ()


# --- what is learned --------------------------------------------------------------------------------------------------


def answered(*offers, slo_s=1.0, late=1.05, whole=True):
    """What a run teaches that begins at 0.05 s and takes so many times as long as planned."""
    queue = queue_of(slo_s=slo_s)
    for one in offers:
        assert queue.offer(0.0, [one])
    run = queue.start(0.05)
    ends = 0.05 + late * queue.run.predicted_s
    queue.passed(ends, run)
    queue.ended(ends, whole=whole)
    return queue


@pytest.mark.parametrize(
    ("queue", "work_s", "said"),
    [
        (answered(query(100)), 0.1, [0.3]),
        (answered(query(100), query(50)), 0.15, [0.3, 0.35]),  # the first one's prediction had not known the second
        (answered(deferrable(50, 9), query(100)), 0.15, [0.35]),  # with the deferrable one that runs behind it
        (answered(bulk(100)), 0.1, []),
    ],
)
def test_an_idle_devices_run_teaches(queue, work_s, said):
    (run,) = queue.limits.predictor.runs
    assert (run.work, run.took_s) == (pytest.approx(work_s), pytest.approx(1.05 * (0.2 + work_s)))
    assert [one for one, _ in run.answers] == [pytest.approx(seconds, abs=0.05) for seconds in said]
    assert all(actual == pytest.approx(0.05 + run.took_s) for _, actual in run.answers)  # from admission


def test_a_run_that_was_not_whole_teaches_nothing():
    assert answered(query(100), whole=False).limits.predictor.runs == []


def test_a_prediction_behind_a_running_run_counts_from_admission():
    queue = running(300)
    queue.offer(0.2, [one := query(100, 1.2)])  # 0.3 s until it begins, and 0.3 s
    queue.offer(0.2, [other := query(40, 1.1)])  # runs before it
    queue.passed(0.5, [])
    queue.ended(0.5)
    assert queue.start(0.5) == [other, one]
    queue.passed(0.75, [other])
    queue.passed(0.2 + 0.64 * 1.05, [one])
    queue.ended(0.2 + 0.64 * 1.05)
    told = queue.limits.predictor.runs[-1].answers
    assert told == [(pytest.approx(0.64), pytest.approx(0.55)), (pytest.approx(0.6), pytest.approx(0.672))]


def test_a_run_that_another_model_planned_teaches_nothing():
    queue = running(300)
    queue.configure(Policy(2.0), CostModel.of_curve(0.01, 0.1))
    new = copy.deepcopy(queue.limits.predictor)
    queue.ended(9.0)
    assert queue.limits.predictor == new == Predictor(planned_s=0.1, slo_s=2.0)
    assert queue.demand.long_queries.mean == pytest.approx(0.01)
    assert queue.limits.pacing.pause_s == pytest.approx(0.003)


def test_another_policy_leaves_what_was_learned_and_counts_at_once():
    queue = running(300, query(10, 9), slowdown=1.25)
    queue.configure(Policy(2.0, bulk_share=0.25), MODEL)
    assert (queue.limits.predictor, queue.queue.count) == (Told(1.25 * 0.2, 1.25, 0.25, 2.0), 1)
    assert queue.state(0.2).bulk_room == pytest.approx(0.25 * 2.0 * 0.8 / 1.25 - 0.2)
    assert takes(queue, 0.2, query(1000, 3.2))


def test_a_calibrated_model_has_a_narrow_margin_from_the_start():
    queue = Scheduler(MODEL, Policy(1.0))
    assert queue.state(0.0).margin == pytest.approx(0.05)
    queue.configure(Policy(1.0), MODEL, calibrated=True)
    assert queue.state(0.0).margin == pytest.approx(0.02)


def test_what_is_called_off_leaves_no_work_behind():
    some = [deferrable(ms, 9) for ms in (300, 50, 40, 30)]
    queue = running(300, query(100, 9), *some)
    queue.remove([some[0], queue.queue.urgent[0]])
    assert has_room(queue, 0.2, 2.0, 600 - 60 - 50)  # their share of any run and the largest of them
    queue.remove(some[1:3])
    assert has_room(queue, 0.2, 2.0, 600 - 30)
    queue.remove(some[3:])
    assert has_room(queue, 0.2, 2.0, 600)


def test_a_run_that_was_slow_makes_the_next_one_short():
    queue = Scheduler(MODEL, Policy(1.0))
    before_s = queue.limits.run_work
    admit(queue, 0.0, query(300))
    queue.start(0.0)
    queue.ended(0.75)
    assert queue.limits.run_work < 0.7 * before_s


def test_each_answer_teaches_once():
    queue = queue_of()
    for now in (0.0, 1.0):
        queue.offer(now, [one := query(300, now + 1)])
        queue.start(now)
        queue.passed(now + 0.5, [one])
        queue.ended(now + 0.5)
    assert [len(run.answers) for run in queue.limits.predictor.runs] == [1, 1]


@pytest.mark.parametrize(
    ("micro_batch_tokens", "now", "waiting", "room"),
    [
        # Of the SLO a margin of 200 ms is left free; beta is 200 ms.
        (100, 0.0, [], 0.8 - 0.5 - 0.2 - 0.1),  # 500 ms until the run's end, 100 of a pass
        (100, 0.125, [query(100)], 0.8 - 0.375 - 0.2 - 0.1 - 0.1),
        (100, 0.0, [query(200)], -0.2),
        (0, 0.25, [], 0.8 - 0.25 - 0.2),
        (0, 0.25, [query(300)], 0.6 - 0.25 - 0.2 - 0.3),  # it is due first
    ],
)
def test_a_state_says_what_has_room(micro_batch_tokens, now, waiting, room):
    state = running(300, *waiting, micro_batch_tokens=micro_batch_tokens).state(now)
    assert state.room == pytest.approx(room)
    assert (state.opens_cost >= 0.075, state.room_grows, state.reserve) == (True, micro_batch_tokens > 0, 0.0)


def test_long_queries_that_routers_refuse_are_kept_room_for():
    queue = running(300, micro_batch_tokens=100)
    demand = queue.demand
    demand.refused(0.0, 0.9, 5)  # an idle device would refuse them, too
    demand.refused(0.0, 0.6 * 0.594 + 1e-5, 5)  # they need too much of it
    assert demand.long_queries.long == 0
    for _ in range(20):
        demand.long_queries.offered(0.0, 0.01, refused=False)
    demand.refused(0.0, 0.3, 5)
    assert queue.state(0.0).reserve == pytest.approx(0.3)
    demand.refused(0.0, 0.3, 2**63)  # however many a Router says that there were
    assert demand.long_queries.mean == pytest.approx(0.3)
