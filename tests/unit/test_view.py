"""What a Router knows of a replica between two of its states."""

import math

import pytest

from deployments.placement.locality import rank
from deployments.placement.view import View
from deployments.queueing.schedule import ReplicaState

MODEL = (0.0, 0.018 / 75, 0.0, 0.27)


def view(now=10.0, seen=0, **state):
    told = ReplicaState(0.0, 0.0, 0.5, 0, 0, 0, 0, MODEL, 1.0, 0.02, (0, 0, 0))._replace(**state)
    one = View("a", (False, 1))
    one.hear(now, told, seen)
    return one


def test_before_its_first_word_it_finishes_nothing():
    assert View("a", (False, 1)).finish_s(0.0, [75]) == math.inf
    assert View("a", (False, 1)).room_queries(0.0, 75, 1.0) == 0


@pytest.mark.parametrize(
    ("state", "now", "finish_s"),
    [
        ({}, 10.0, 0.27 + 0.018),
        ({"free_s": 0.5}, 10.2, 0.3 + 0.288),
        ({"free_s": 0.5}, 99.0, 0.288),
        ({"factor": 2.0}, 10.0, 0.576),
    ],
)
def test_when_a_query_would_be_answered(state, now, finish_s):
    assert view(**state).finish_s(now, [75]) == pytest.approx(finish_s)


def test_what_was_sent_since_its_last_word_counts_until_it_has_read_it():
    one = view()
    one.sent(1, 10, 0.18)
    one.sent(2, 5, 0.09)
    assert one.finish_s(10.0, [75]) == pytest.approx(0.288 + 0.27)
    one.hear(10.1, one.state, 1)
    assert one.finish_s(10.1, [75]) == pytest.approx(0.288 + 0.09)
    one.hear(10.2, one.state, 2)
    assert one.finish_s(10.2, [75]) == pytest.approx(0.288)
    one.sent(3, 5, 0.09)
    one.forget()
    one.hear(11.0, view().state, 0)
    assert one.finish_s(11.0, [75]) == pytest.approx(0.288)


def test_its_opening_passes():
    one = view(opens_s=0.5)
    assert [one.opens_s(now) for now in (10.0, 10.25, 10.5, 12.0)] == [0.5, 0.25, 0, 0]
    assert view(opens_s=math.inf).opens_s(99.0) == math.inf
    assert view(opens_s=math.inf).room_queries(10.0, 75, 1.0) == 0


def test_about_how_many_queries_have_room():
    assert view().room_queries(10.0, 75, 1.0) == pytest.approx(0.73 / 0.018)
    assert view(free_s=0.5).room_queries(10.0, 75, 1.0) == pytest.approx(0.23 / 0.018)
    assert view().most_queries(75, 1.0, None) == pytest.approx(39.0, abs=0.05)  # less its margin and the pause
    assert view().most_queries(75, 1.0, 10) == pytest.approx(10)
    assert view().most_queries(150, 1.0, 10) == pytest.approx(5)


def test_room_for_bulk_is_told_less_what_was_sent():
    one = view(bulk_s=0.2)
    one.sent(1, 5, 0.05)
    assert one.bulk_room_s(by_count=False) == pytest.approx(0.15)
    assert one.bulk_room_s(by_count=True) == pytest.approx(0.2 - 5 * 0.018)


def test_a_replica_that_is_asked_and_says_nothing_is_silent():
    one = view()
    assert not one.should_be_asked(11.0)  # it has read all
    one.sent(1, 1, 0.018)
    assert [one.should_be_asked(now) for now in (10.1, 10.3)] == [False, True]
    one.asked(10.3)
    assert not one.should_be_asked(10.4)
    assert [one.is_silent(now) for now in (11.2, 11.4)] == [False, True]
    one.hear(11.5, one.state, 1)
    assert one.has_read_all
    assert not one.is_silent(11.6)


def test_a_replica_is_sent_no_more_than_it_can_ever_admit_before_its_next_word():
    one = view()
    one.sent(1, 50, 0.9)
    assert [one.is_flooded(1.0, None), one.is_flooded(1.0, 50), one.is_flooded(1.0, 51)] == [False, True, False]
    one.sent(1, 10, 0.18)
    assert one.is_flooded(1.0, None)
    one.hear(10.1, one.state, 1)
    assert not one.is_flooded(1.0, None)


def test_replicas_on_the_routers_node_are_preferred_and_others_in_an_order_of_its_own():
    assert rank("a", "n1", node="n1", router="r") < rank("a", "n2", node="n1", router="r")
    names = [f"replica-{i}" for i in range(6)]
    orders = {tuple(sorted(names, key=lambda n: rank(n, "x", node="y", router=f"r{i}"))) for i in range(8)}
    assert len({order[0] for order in orders}) >= 3
