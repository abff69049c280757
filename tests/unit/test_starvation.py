"""Room is kept for long queries once they are refused too often: exact numbers on both sides of each threshold."""

import pytest

from deployments.embedding.scheduler.starvation import LongQueries

LONG, MIDDLE, SHORT = 5.0, 1.5, 0.3


def after(*offers):
    """`offers`: (cost, refused, how many, and when unless at 0 s), each beside a mean of 1."""
    fairness = LongQueries(1.0)
    for cost_s, refused, count, *at in offers:
        for _ in range(count):
            fairness.mean_s = 1.0
            fairness.offered(*at or [0.0], cost_s, refused=refused)
    return fairness


@pytest.mark.parametrize(
    ("offers", "reserve_s"),
    [
        ([(LONG, False, 10), (SHORT, False, 10)], 0),  # nobody is refused
        ([(LONG, True, 5), (SHORT, False, 10)], LONG),
        ([(LONG, True, 5), (SHORT, True, 5), (SHORT, False, 5)], 0),  # short ones are refused as well
        ([(MIDDLE, True, 50), (SHORT, False, 10)], 0),  # those between have no say
        # Three of a kind are enough.
        ([(LONG, True, 2)], 0),
        ([(LONG, True, 3)], LONG),
        ([(LONG, True, 3), (SHORT, True, 2)], LONG),
        ([(LONG, True, 3), (SHORT, True, 3)], 0),
        # One refusal of a few is enough, none is not.
        ([(LONG, False, 2), (LONG, True, 1)], LONG),
        ([(LONG, False, 3)], 0),
        # More than 2.5 times as often as short ones: half of the long, a fifth and a sixth of the short.
        ([(LONG, True, 2), (LONG, False, 2), (SHORT, True, 1), (SHORT, False, 4)], 0),
        ([(LONG, True, 2), (LONG, False, 2), (SHORT, True, 1), (SHORT, False, 5)], LONG),
        # Long is more than twice the mean, which takes 2 % of each query: 2.0416 of a mean of 1.
        ([(2.04, True, 3)], 0),
        ([(2.05, True, 3)], 2.05),
        # Short is less than the mean.
        ([(LONG, True, 3), (0.99, True, 3)], 0),
        ([(LONG, True, 3), (1.0, True, 3)], LONG),
        # Both kinds fade within 10 s: 20 are 3.02 after 18.9 s, 2.96 after 19.1 s; 3 are fewer after 0.11 s.
        ([(LONG, True, 20), (MIDDLE, False, 1, 18.9)], LONG),
        ([(LONG, True, 20), (MIDDLE, False, 1, 10.0), (MIDDLE, False, 1, 18.9)], LONG),
        ([(LONG, True, 20), (MIDDLE, False, 1, 19.1)], 0),
        ([(LONG, True, 20), (SHORT, True, 3), (MIDDLE, False, 1, 0.09)], 0),
        ([(LONG, True, 20), (SHORT, True, 3), (MIDDLE, False, 1, 0.11)], LONG),
        ([(LONG, True, 20, 10.0), (SHORT, True, 3, 10.0), (MIDDLE, False, 1, 10.09)], 0),
        # Refusals fade beside what is offered later: 2 of them are 1.003 after 6.9 s, and less than one after 7 s.
        ([(LONG, True, 2), (LONG, False, 3, 6.9)], LONG),
        ([(LONG, True, 2), (LONG, False, 3, 7.0)], 0),
    ],
)
def test_room_for_a_long_query_is_kept_where_those_are_refused_too_often(offers, reserve_s):
    assert after(*offers).reserve_s == reserve_s


def test_as_much_is_kept_as_long_queries_cost_of_late():
    assert after((LONG, True, 3), (15.0, True, 1)).reserve_s == pytest.approx(6.0)  # a tenth of the way


def test_the_mean_follows_what_is_offered():
    fairness = LongQueries(1.0)
    for mean_s in (1.04, 1.0792):  # a fiftieth of the way to 3
        fairness.offered(0.0, 3.0, refused=False)
        assert fairness.mean_s == pytest.approx(mean_s)
