"""Room is kept for long queries once they are refused too often."""

from deployments.queueing.fairness import Fairness

LONG, MIDDLE, SHORT = 5.0, 1.5, 0.3


def after(*offers, at=0.0):
    """offers: (cost, refused, how many)"""
    fairness = Fairness(1.0)
    for cost_s, refused, count in offers:
        for _ in range(count):
            fairness.offered(at, cost_s, refused=refused)
            fairness.mean_s = 1.0
    return fairness


def test_no_room_is_kept_while_nobody_is_refused():
    assert after((LONG, False, 10), (SHORT, False, 10)).reserve_s == 0


def test_room_for_a_long_one_is_kept_when_only_those_are_refused():
    assert after((LONG, True, 5), (SHORT, False, 10)).reserve_s == LONG


def test_not_when_short_ones_are_refused_as_well():
    assert after((LONG, True, 5), (SHORT, True, 5), (SHORT, False, 5)).reserve_s == 0
    assert after((LONG, True, 5), (SHORT, True, 2), (SHORT, False, 8)).reserve_s == LONG


def test_a_few_long_ones_say_nothing():
    assert after((LONG, True, 2), (SHORT, False, 10)).reserve_s == 0


def test_those_between_have_no_say():
    assert after((MIDDLE, True, 50), (SHORT, False, 10)).reserve_s == 0


def test_refusals_are_forgotten():
    fairness = after((LONG, True, 5), (SHORT, False, 10))
    fairness.offered(30.0, SHORT, refused=False)
    assert fairness.reserve_s == 0


def test_the_mean_follows_what_is_offered():
    fairness = Fairness(1.0)
    for _ in range(400):
        fairness.offered(0.0, 3.0, refused=False)
    assert abs(fairness.mean_s - 3.0) < 0.01
