"""A pool, with scripted replicas: whom it asks, how much room it has, and what it shows of itself."""

import asyncio
import math
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.admission.fair_share import Tenant
from deployments.admission.predictor import LinePredictor
from deployments.embedding.config import CostConfig, PoolConfig
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.state import Policy
from deployments.embedding.view import Ask, View
from tests.kit.scripted_replicas import ScriptedReplica, pool_of


def names(links):
    return [link.view.replica for link in links]


@pytest.mark.parametrize(
    ("states", "order"),  # (name, whether it is away, rank, state)
    [
        ([("a", False, 2, {}), ("b", False, 1, {}), ("c", True, 0, {})], "bac"),  # level: those of the own node
        # Those away count as if they took a quarter longer: 0.275 s are 0.344 s.
        ([("a", False, 0, {"free_s": 0.06}), ("b", True, 1, {})], "ab"),
        ([("a", False, 0, {"free_s": 0.08}), ("b", True, 1, {})], "ba"),
        # To a tenth of a millisecond.
        ([("a", False, 1, {"free_s": 0.00002}), ("b", False, 0, {"free_s": 0.00003})], "ba"),
        ([("a", False, 1, {"free_s": 0.00001}), ("b", False, 0, {"free_s": 0.0002})], "ab"),
        # Those that are open before those that said when they open.
        ([("a", False, 0, {"opens_s": 0.1}), ("b", True, 1, {"free_s": 0.9})], "ba"),
        ([("a", False, 0, {"opens_s": 0.1, "over_share": ["other"]}), ("b", True, 1, {"free_s": 0.9})], "ab"),
    ],
)
async def test_those_that_finish_first_are_asked_first(states, order):
    links = []
    for name, is_away, rank, state in states:
        links.append(ScriptedReplica(name, rank=rank, **state))
        links[-1].view.rank = (is_away, rank)
    found = pool_of("accelerator", *links).soonest(0.0, [75], 4, ask=Ask(75, 1.0, tenant=Tenant("mine")))
    assert "".join(names(found)) == order


async def test_so_many_are_asked_and_none_that_has_stopped_or_was_sent_enough():
    links = [ScriptedReplica(name, rank=rank) for rank, name in enumerate("abcd")]
    pool = pool_of("accelerator", *links)
    links[0].view.asked(0.1)
    links[1].view.sent(1, 2, 1.1)
    assert names(pool.soonest(1.2, [75], 3, ask=Ask(75, 1.0), slo_s=1.0)) == ["c", "d"]
    assert names(pool.soonest(1.2, [75], 3, ask=Ask(75, 1.0), slo_s=2.0)) == ["c", "d", "b"]
    assert names(pool.soonest(1.2, [75], 1, ask=Ask(75, 1.0), slo_s=2.0)) == ["c"]
    assert names(pool.soonest(1.2, [75], 3, ask=Ask(75, 1.0), depth=2)) == ["c", "d"]
    pool.live = links[:3]
    assert names(pool.soonest(1.2, [75], 3, ask=Ask(75, 1.0), slo_s=1.0)) == ["c"]
    pool.live = links[:2]
    assert names(pool.soonest(1.2, [75], 3, ask=Ask(75, 1.0), slo_s=1.0)) == []


def say(pool, links, **state):
    for link in links:
        link.view.hear(asyncio.get_running_loop().time(), link.view.state._replace(**state), 0)


def asked(pool, most=99, tenant=None, **how):
    ask = Ask(75, 1.0, tenant=tenant)
    return sorted(map(int, names(pool.soonest(asyncio.get_running_loop().time(), [75], most, ask=ask, **how))))


def is_full(pool, tenant=None):
    return pool.is_full(asyncio.get_running_loop().time(), Ask(75, 1.0, tenant=tenant))


async def test_of_many_sixteen_are_looked_at_in_turn_and_open_ones_first():
    many = [ScriptedReplica(str(number), rank=number) for number in range(20)]
    pool = pool_of("accelerator", *many)
    assert [asked(pool) for _ in range(3)] == [[*range(16)], [*range(12), 16, 17, 18, 19], [*range(8), *range(12, 20)]]
    say(pool, many[2:], opens_s=0.5)
    assert [asked(pool, 2) for _ in range(3)] == [[0, 1]] * 3
    found = [asked(pool) for _ in range(2)]  # the others make up the number, in turn
    assert [(len(some), some[:2]) for some in found] == [(16, [0, 1])] * 2
    assert {number for _ in range(20) for number in asked(pool)} == {*range(20)}
    many[0].view.asked(0.1)
    await asyncio.sleep(1.2)
    many[1].view.sent(1, 2, 1.1)
    assert not {0, 1} & {*asked(pool, slo_s=1.0)}  # the one has stopped, and the other was sent enough


@pytest.mark.parametrize("opens_s", [0.5, math.inf])
async def test_of_two_hundred_each_is_looked_at_by_one_of_seven_queries(opens_s):
    many = [ScriptedReplica(str(number), rank=number) for number in range(200)]
    pool = pool_of("accelerator", *many)
    say(pool, many, opens_s=opens_s)
    assert all(is_full(pool) for _ in range(7))
    for number in (199, 0, 77):
        say(pool, many[number : number + 1], opens_s=0.0)
        assert not all(is_full(pool) for _ in range(7))
        assert asked(pool, 1) == [number]  # it looks where one was found
        say(pool, many[number : number + 1], opens_s=0.2 if number == 77 else opens_s)
    await asyncio.sleep(0.3)
    assert [77] in [asked(pool, 1) for _ in range(7)]  # it has opened, as it had said
    await asyncio.sleep(0.3)
    assert len(asked(pool, 200)) == 16


async def test_a_replica_that_serve_counts_out_is_not_asked_though_it_reports():
    many = [ScriptedReplica(str(number), rank=number) for number in range(20)]
    pool = pool_of("accelerator", *many)
    del pool.links["3"]
    pool.changed()
    say(pool, many[3:4], opens_s=0.0)
    assert 3 not in {number for _ in range(3) for number in asked(pool)}


async def test_who_is_over_its_share_goes_where_it_is_not():
    many = [ScriptedReplica(str(number), rank=number) for number in range(40)]
    pool = pool_of("accelerator", *many)
    say(pool, many[:39], opens_s=9.0, over_share=["big"])
    assert [39] in [asked(pool, 1, tenant=Tenant("big")) for _ in range(2)]
    say(pool, many[39:], opens_s=9.0, over_share=["big"])
    assert [is_full(pool, Tenant(name)) for name in ("big", "small")] == [True, False]


@pytest.mark.parametrize(
    ("how", "capacity", "room"),
    [
        # Ten milliseconds a query; the idle devices have 0.8 s, and one of them has reported room for 0.3 s.
        ({}, 160 - 2 * 0.6, 80 - 0.6 + 30),
        ({"queue_depth": 0}, 0, 0),
        ({"queue_depth": 7, "admission": "depth"}, 14, 14 - 3),
        ({"queue_depth": 2, "admission": "depth"}, 4, 2),
    ],
)
async def test_how_many_queries_have_room(how, capacity, room):
    model = (0.01, 0.0, 0.0, 0.2)
    links = [
        ScriptedReplica("a", model=model),
        ScriptedReplica("b", model=model, in_flight=3, room=0.3),
        ScriptedReplica("c"),
    ]
    links[2].view.forget()
    pool = pool_of("accelerator", *links[:2], **how)
    pool.policy["slo_s"] = 1.0
    assert pool.is_open == (how.get("queue_depth") != 0)
    assert pool.capacity(75, 1.0) == pytest.approx(capacity)
    assert pool.room_now(0.0, 75) == pytest.approx(room)
    assert pool.is_idle(0.0) == pool.is_open
    assert pool.queries_per_s == pytest.approx(200)
    pool.live = []
    assert (pool.is_open, pool.capacity(75, 1.0), pool.queries_per_s) == (False, 0, 0)


REPORTED = st.fixed_dictionaries(
    {
        "model": st.tuples(*[st.floats(0, most) for most in (0.02, 2e-4, 1e-6, 0.5)]),
        "slowdown": st.floats(0.5, 4.0),
        "margin": st.floats(0.02, 0.3),
        "depth": st.none() | st.integers(0, 60),
        "free_s": st.floats(0, 1.0),
        "in_flight": st.integers(0, 60),
    }
)
CHANGE = st.tuples(st.just("hears"), st.integers(0, 39), REPORTED) | st.tuples(
    st.sampled_from(["joins", "leaves", "admits"]), st.integers(0, 39), REPORTED
)


@given(
    st.lists(REPORTED, min_size=1, max_size=40),
    st.lists(CHANGE, max_size=20),
    st.integers(1, 600),
    st.floats(1, 512),
    st.floats(-0.5, 1.0),
)
def test_counting_until_it_is_enough_says_what_the_sum_over_all_replicas_says(reports, changes, count, tokens, left_s):
    asyncio.run(compare_with_sums(reports, changes, count, tokens, left_s))


async def compare_with_sums(reports, changes, count, tokens, left_s):
    """After any reports, joins, leaves and other policies. If idle replicas have room for less than a query each, the
    count may stop too early.
    """
    links = [ScriptedReplica(str(number), rank=number, **state) for number, state in enumerate(reports)]
    pool = pool_of("accelerator", *links)
    for what, number, state in changes:
        link = links[number % len(links)]
        if what == "joins":
            links.append(link := ScriptedReplica(str(len(links)), rank=len(links), **state))
            pool.links[link.view.replica] = link
        elif what == "leaves":
            pool.links.pop(link.view.replica, None)
        elif what == "admits":
            depth = state["depth"]
            pool.configure(PoolConfig(queue_depth=depth), {"admission": "depth" if depth else "deadline", "slo_s": 1.0})
        say(pool, [link], **state)
        pool.changed()
    views = [link.view for link in pool.live]
    rooms = [most_queries(view.state, tokens, left_s) for view in views]
    if pool.by_count:
        rooms = [pool.config.queue_depth] * len(views)
    all_of_them = sum(rooms) if pool.is_open else 0.0
    assert pool.capacity(tokens, left_s) == pytest.approx(all_of_them)
    looked_at = sum(rooms[: 16 + count])
    if abs(looked_at - count) > 1e-6:
        assert (pool.capacity(tokens, left_s, count) >= count) == (pool.is_open and looked_at >= count)
    if all(room >= 1 for room in rooms) and abs(all_of_them - count) > 1e-6:
        assert (pool.capacity(tokens, left_s, count) >= count) == (all_of_them >= count)


def most_queries(state, tokens, left_s):
    """As the replica itself says it."""
    model, slowdown = CostModel(*state.model), state.slowdown
    predictor = LinePredictor(slowdown * model.beta_s, slowdown, state.margin)
    room = Limits(model, Policy(left_s, depth=state.depth), 0, predictor).idle_room(left_s)
    return max(0.0, room) / max(1e-9, model.cost(round(tokens)))


@pytest.mark.parametrize(("replicas", "looked_at"), [(40, 40), (2000, 66)])
async def test_a_request_looks_at_no_more_replicas_than_it_has_queries(replicas, looked_at, monkeypatch):
    """Even where none of them has room."""
    links = [ScriptedReplica(str(number), rank=number, slowdown=9.0) for number in range(replicas)]
    pool, seen = pool_of("accelerator", *links), []
    monkeypatch.setattr(View, "most_queries", lambda view, *_: seen.append(view) or 0.0)
    assert pool.capacity(75, 1.0, 50) == 0
    assert len(seen) == looked_at


async def test_a_pool_as_it_shows_itself():
    pool = pool_of("accelerator", ScriptedReplica("a", in_flight=3, waiting=2), ScriptedReplica("b", in_flight=4))
    for link in pool.live:
        link.describe = lambda: "a replica"
    shown = pool.describe()
    assert shown["latency_model"] == {"alpha_s": 0.075, "beta_s": 0.2, "source": "measured at warm-up"}
    assert (shown["in_flight"], shown["waiting"], shown["live_replicas"], shown["queue_depth"]) == (7, 2, 2, None)
    assert shown["replicas"] == {"a": "a replica", "b": "a replica"}
    assert tuple(pool.gauges().values()) == (True, 0, 2, 0, pytest.approx(0.075), 0.2, False)
    pool.configure(PoolConfig(alpha_s=0.01, beta_s=0.1, queue_depth=0), {})
    assert pool.describe()["latency_model"] == {"alpha_s": 0.01, "beta_s": 0.1, "source": "calibrated"}
    pool.live[0].view.outlier.eject(0.0)
    assert tuple(pool.gauges().values()) == (False, 0, 2, 1, 0.01, 0.1, True)
    assert tuple(pool_of("cpu").gauges().values()) == (True, 0, 0, 0, 0.0, 0.0, False)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ({"alpha_s": 0.075, "beta_s": 0.2}, [0.0, pytest.approx(0.001), 0.0, 0.2]),
        (
            {"alpha_s": 0.075, "beta_s": 0.2, "cost": CostConfig(query_s=0.1, token_s=0.2, token2_s=0.3)},
            [0.1, 0.2, 0.3, 0.2],
        ),
    ],
)
async def test_what_replicas_are_told_of_a_config(config, model):
    pool = pool_of("accelerator")
    pool.configure(PoolConfig(queue_depth=7, **config), {"slo_s": 2.0, "admission": "depth"})
    assert pool.policy == {"router": "r", "slo_s": 2.0, "admission": "depth", "depth": 7, "model": model}
    assert pool.by_count
    pool.links["a"] = Mock()
    pool.configure(PoolConfig(), {})
    assert pool.links["a"].configure.called
    assert not pool.by_count
