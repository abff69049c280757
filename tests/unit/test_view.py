"""What a Router knows of a replica between two of its states: exact numbers on both sides of each threshold."""

import math

import pytest

from deployments.admission.fair_share import Tenant
from deployments.embedding.scheduler.state import ReplicaState
from deployments.embedding.view import Ask, View
from deployments.serving.replica_set import rank

MODEL = (0.0, 0.018 / 75, 0.0, 0.27)
STATE = ReplicaState(0.0, 0.0, 0.5, 0, 0, 0, 0, MODEL, 1.0, 0.02, (0, 0, 0))


def view(now=10.0, seen=0, **state):
    one = View("a", (False, 1))
    one.hear(now, STATE._replace(**state), seen)
    return one


def sent(*offers, **state):
    """`offers`: how many queries and how much work went there since its last state."""
    one = view(**state)
    for frame, (queries, cost) in enumerate(offers, 1):
        one.sent(frame, queries, cost)
    return one


def test_before_its_first_word_nothing_is_known():
    one = View("a", (False, 1))
    assert one.finish_s(0.0, [75]) == math.inf
    assert (one.room_now(0.0, 75, 1.0, None), one.bulk_room(by_count=False), one.opens_s(0.0)) == (0, 0, 0)
    assert not one.is_over_share(Tenant("a"))
    assert not one.is_flooded(1.0, None)
    assert not one.is_silent(5.0)
    assert one.has_read_all
    one.sent(1, 1, 0.1)
    assert one.should_be_asked(0.25)  # since it was made
    one.hear(0.25, STATE, 0)
    assert one.finish_s(0.25, []) == pytest.approx(0.37)


@pytest.mark.parametrize(
    ("one", "now", "finish_s"), [(view(free_s=0.5), 10.2, 0.3 + 0.288), (view(free_s=0.5), 99.0, 0.288)]
)
def test_when_a_query_would_be_answered(one, now, finish_s):
    assert one.finish_s(now, [75]) == pytest.approx(finish_s)


def test_what_was_sent_counts_until_it_has_read_it_or_its_connection_breaks():
    one = sent((10, 0.18), (5, 0.09))
    for seen, unseen_s in ((1, 0.09), (2, 0.0)):
        one.hear(10.0, STATE, seen)
        assert one.finish_s(10.0, [75]) == pytest.approx(0.288 + unseen_s)
        assert one.has_read_all == (seen == 2)
    one.sent(3, 5, 0.09)
    one.asked(10.3)
    one.forget()
    assert one.finish_s(10.0, [75]) == math.inf
    assert one.has_read_all
    assert not one.is_silent(12.0)
    one.sent(1, 1, 0.018)
    assert one.finish_s(10.0, [75]) == math.inf
    one.hear(11.0, STATE, 0)
    assert one.finish_s(11.0, [75]) == pytest.approx(0.288 + 0.018)
    assert one.should_be_asked(11.25)


GREEDY = {"opens_s": 0.5, "under_share_opens_s": 0.1, "over_share": ["big"]}


@pytest.mark.parametrize(
    ("state", "tenant", "now", "opens_s"),
    [({"opens_s": 0.5}, None, 10.2, 0.3), (GREEDY, "big", 10.0, 0.5), (GREEDY, "small", 10.0, 0.1)],
)
def test_when_it_opens_and_to_whom(state, tenant, now, opens_s):
    one = view(**state)
    tenant = tenant and Tenant(tenant)
    assert one.opens_s(now, tenant) == pytest.approx(opens_s)
    assert one.is_over_share(tenant) == (state is GREEDY and tenant == Tenant("big"))


# 18 ms of room for queries of 75 tokens, which cost as much; it opens to one of 150 in 18 ms.
GROWING = {"opens_s": 0.018, "opens_cost": 0.036, "room": 0.018, "in_flight": 9, "room_grows": True}
FULL = {**GROWING, "opens_s": 0.3, "room_grows": False}  # the run is full: no more before the next one
AT_ONCE = {"opens_s": 0.4, "opens_cost": 0.5, "room": 0.0, "in_flight": 9}


@pytest.mark.parametrize(
    ("one", "tokens", "how", "opens_s"),
    [
        (view(**GROWING), 75, {}, 0.0),
        (view(**GROWING), 100, {}, 0.006),
        (view(**{**GROWING, "opens_s": 0.0, "opens_cost": 0.05}), 300, {}, 0.022),  # open, but not to so long a query
        (view(**{**GROWING, "opens_s": 0.036}, slowdown=2.0), 300, {}, 0.108),
        (view(**GROWING), 300, {"now": 10.04}, 0.014),  # room grows with the clock
        (sent((1, 0.018), **GROWING), 75, {}, 0.018),  # it is taken by what was sent since
        (view(**GROWING, free_s=0.7), 75, {"lag_s": 0.004}, 0.004),
        # The size of its run bounds the room, not the deadline.
        (view(**GROWING, free_s=1 / 1.02 - 0.5), 75, {"lag_s": 0.004}, 0.0),
        (view(**GROWING, free_s=1 / 1.02 - 0.5), 75, {"lag_s": 0.216}, 0.004),
        (view(**GROWING), 300, {"lag_s": -1.0}, 0.0),  # it allows more than the SLO
        (view(**GROWING, reserve=0.05), 75, {}, 0.032),  # room is kept for a long query
        (view(**FULL), 75, {}, 0.0),
        (view(**FULL), 100, {}, 0.3),
        (view(**AT_ONCE), 75, {}, 0.4),
        (view(**AT_ONCE), 75, {"now": 10.5}, 0.0),
        (sent((9, 0.49), **AT_ONCE), 75, {}, 0.408),
        (view(**{**AT_ONCE, "opens_s": 0.0, "opens_cost": 0.02}), 75, {}, 0.0),
        (view(**{**AT_ONCE, "opens_s": 0.0, "opens_cost": 0.02}), 100, {}, 0.004),
        # By what counts for any query: nothing is said of costs, it is idle, tenants are held back, it is too long.
        (view(opens_s=0.2, in_flight=9), 512, {}, 0.2),
        (view(**{**GROWING, "in_flight": 0, "opens_s": 0.0}), 512, {}, 0.0),
        (view(**GROWING, over_share=["big"], under_share_opens_s=0.1), 512, {}, 0.1),
        (view(**GROWING), 75, {"allowed_s": 0.28}, 0.018),
        (View("a", (False, 1)), 75, {}, 0.0),
    ],
)
def test_when_it_has_room_for_a_query_of_that_length(one, tokens, how, opens_s):
    asked = {"allowed_s": 1.0, **how}
    opens_at, ask = asked.pop("now", 10.0) + opens_s, Ask(tokens, **asked)
    assert one.has_room(opens_at + 1e-6, ask)
    assert not one.has_room(opens_at - 1e-6, ask) or not opens_s


@pytest.mark.parametrize(
    ("one", "tokens", "slo_s", "queries"),
    [
        # Its margin of 2 % is left free, and the pause of 8.1 ms.
        (view(), 75, 1.0, (1 / 1.02 - 0.0081 - 0.27) / 0.018),
        (view(slowdown=2.0), 75, 1.0, ((1 / 1.02 - 0.0081) / 2 - 0.27) / 0.018),
        (view(), 75, 0.2, 0.0),
        (view(depth=10), 75, 1.0, 10),
        (view(depth=10), 150.4, 1.0, 5),
        (view(model=(0.0, 0.0, 0.0, 0.0), margin=0.0), 75, 1.0, 1e9),
        (View("a", (False, 1)), 75, 1.0, 1e9),
    ],
)
def test_how_many_it_would_admit_if_it_were_idle(one, tokens, slo_s, queries):
    assert one.most_queries(tokens, slo_s) == pytest.approx(queries)


def test_room_for_bulk_is_told_less_what_was_sent():
    one = sent((5, 0.05), (1, 0.02), bulk_room=0.2)
    assert one.bulk_room(by_count=False) == pytest.approx(0.13)
    assert one.bulk_room(by_count=True) == pytest.approx(0.2 - 6 * 0.018)


@pytest.mark.parametrize(
    ("now", "heard_at", "asked_at", "should_be_asked", "is_silent"),
    [
        (10.24, 10.0, None, False, False),
        (10.25, 10.0, None, True, False),  # it has said nothing for a quarter of a second
        (11.0, 10.0, 10.3, False, False),  # it was asked
        (11.3, 10.0, 10.3, False, False),
        (11.31, 10.0, 10.3, False, True),  # and has said nothing for a second
        (11.5, 10.3, 10.3, True, False),
    ],
)
def test_a_replica_that_is_asked_and_says_nothing_is_silent(now, heard_at, asked_at, should_be_asked, is_silent):
    one = view()
    if asked_at is not None:
        one.asked(asked_at)
    one.hear(heard_at, STATE, 0)
    assert (one.should_be_asked(now), one.is_silent(now)) == (should_be_asked, is_silent)


@pytest.mark.parametrize(
    ("one", "depth", "is_flooded"),
    [
        (sent((30, 0.6), (20, 0.41)), None, True),  # more than an SLO's work
        (sent((50, 0.49), slowdown=2.0), None, False),
        (sent((30, 9.0), (20, 9.0)), 51, False),
        (sent((30, 9.0), (20, 9.0)), 50, True),
    ],
)
def test_a_replica_is_sent_no_more_than_it_can_ever_admit_before_its_next_word(one, depth, is_flooded):
    assert one.is_flooded(1.0, depth) == is_flooded


def test_replicas_on_the_routers_node_are_preferred_and_others_in_an_order_of_its_own():
    assert rank("a", "n1", node="n1", router="r") < rank("a", "n2", node="n1", router="r")
    names = [f"replica-{i}" for i in range(6)]
    orders = {tuple(sorted(names, key=lambda n: rank(n, "x", node="y", router=f"r{i}"))) for i in range(8)}
    assert len({order[0] for order in orders}) >= 3


@pytest.mark.parametrize(
    ("one", "now", "depth", "room"),
    [
        (View("a", (False, 1)), 10.0, None, 0.0),  # nothing is known yet
        (view(room=0.018), 10.0, None, (1 / 1.02 - 0.0081 - 0.27) / 0.018),  # idle: whatever it has reported
        (view(room=0.018, opens_s=0.5, in_flight=1), 10.0, None, 1.0),
        (view(room=0.018, opens_s=0.5, in_flight=1), 10.49, None, 1.0),  # more comes all at once
        (view(**AT_ONCE), 10.4, None, 0.5 / 0.018),
        (view(**GROWING), 10.036, None, 3.0),
        (view(**{**GROWING, "opens_s": 0.036}, slowdown=2.0), 10.036, None, 2.0),
        (sent((1, 0.009), **GROWING), 10.0, None, 0.5),
        (sent((2, 0.036), **GROWING), 10.0, None, 0.0),
        (sent((1, 0.009), in_flight=0), 10.0, 8, 7.0),  # by count
        (view(in_flight=9), 10.0, 8, 0.0),
    ],
)
def test_for_how_many_of_75_tokens_it_has_room(one, now, depth, room):
    assert one.room_now(now, 75.0, 1.0, depth) == pytest.approx(room)
