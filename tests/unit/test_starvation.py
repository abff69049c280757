"""Room is kept for long queries once too little of their work is admitted: numbers on both sides of each threshold."""

import math

import pytest

from deployments.admission.starvation import _AIM, SHARE, LongRequests, UsualTime

LONG, SHORT = 5.0, 0.25


def after(*offers):
    """`offers`: (cost, refused, how many, and when unless at 0 s), each beside a mean of 1."""
    fairness = LongRequests(1.0)
    for cost_s, refused, count, *at in offers:
        for _ in range(count):
            fairness.mean = 1.0
            fairness.offered(*at or [0.0], cost_s, refused=refused)
    return fairness


@pytest.mark.parametrize(
    ("offers", "reserve"),
    [
        ([(LONG, False, 10), (SHORT, False, 10)], 0),  # nobody is refused
        ([(LONG, True, 5), (SHORT, True, 10)], 0),  # or everybody
        ([(LONG, True, 5), (SHORT, False, 1)], LONG),
        # Three long ones are enough.
        ([(LONG, True, 2), (SHORT, False, 10)], 0),
        ([(LONG, True, 3), (SHORT, False, 10)], LONG),
        # Half of the long queries' work is admitted, and of all work 27.5 s and 28 s of 40: 0.72 * 0.69 and 0.7.
        ([(LONG, True, 2), (LONG, False, 2), (SHORT, False, 70), (SHORT, True, 10)], 0),
        ([(LONG, True, 2), (LONG, False, 2), (SHORT, False, 72), (SHORT, True, 8)], LONG),
        # Long is more than twice the mean, which takes 2 % of each query: 2.0416 of a mean of 1.
        ([(2.04, True, 3), (SHORT, False, 1)], 0),
        ([(2.05, True, 3), (SHORT, False, 1)], 2.05),
        # All fade within 10 s: 20 long ones are 3.02 after 18.9 s, 2.96 after 19.1 s; 3 are fewer after 0.11 s.
        ([(LONG, True, 20), (SHORT, False, 1, 18.9)], LONG),
        ([(LONG, True, 20), (SHORT, False, 1, 10.0), (SHORT, False, 1, 18.9)], LONG),
        ([(LONG, True, 20), (SHORT, False, 1, 19.1)], 0),
        ([(LONG, True, 3), (SHORT, False, 1, 0.09)], LONG),
        ([(LONG, True, 3), (SHORT, False, 1, 0.11)], 0),
        # What was admitted fades, too: 7.4 s of long queries beside 15 that are refused.
        ([(LONG, False, 4), (LONG, True, 3, 10.0), (SHORT, False, 40, 10.0)], LONG),
    ],
)
def test_room_for_a_long_query_is_kept_where_too_little_of_them_is_admitted(offers, reserve):
    assert after(*offers).reserve == reserve


def test_room_is_kept_before_long_queries_get_less_than_is_promised():
    assert SHARE < _AIM


def test_as_much_is_kept_as_long_queries_cost_of_late():
    assert after((LONG, True, 3), (15.0, True, 1), (SHORT, False, 1)).reserve == pytest.approx(
        6.0
    )  # a tenth of the way


@pytest.mark.parametrize(("mean", "count"), [(0.0, 1), (0.1, 2), (0.1, 20), (0.4, 2), (3.0, 2000)])
def test_many_at_once_count_as_one_after_the_other(mean, count):
    at_once, one_by_one = LongRequests(mean), LongRequests(mean)
    for fairness in (at_once, one_by_one):
        fairness.offered(0.0, 4.0, refused=False)
    at_once.offered(0.0, 1.0, refused=True, count=count)
    for _ in range(count):
        one_by_one.offered(0.0, 1.0, refused=True)
    for read in (
        lambda one: (one.mean, one.long, one.reserve),
        lambda one: (one._all.offered, one._all.admitted, one._long.offered, one._long.admitted),
    ):
        assert read(at_once) == pytest.approx(read(one_by_one))


@pytest.mark.parametrize(
    ("cost_s", "left_s", "helped"),
    [
        (6.0, 2.0, True),
        (6.01, 2.0, False),  # more than 0.6 of what an idle device admits
        (6.0, 1.9, True),
        (6.0, 1.89, False),  # less than 0.95 of the usual time, of which it makes 0.02
        (6.0, 9.0, True),
        (6.0, None, True),
        (6.01, None, False),
    ],
)
def test_room_is_kept_only_for_those_whom_it_helps(cost_s, left_s, helped):
    fairness = LongRequests(1.0)
    fairness.offered(0.0, SHORT, refused=False, left_s=2.0)
    fairness.offered(0.0, cost_s, refused=True, count=9, most=10.0, left_s=left_s)
    assert (fairness.long, fairness.reserve) == ((cost_s, cost_s) if helped else (0.0, 0.0))
    assert fairness._all.offered == pytest.approx(SHORT + 9 * cost_s * helped)
    assert fairness.usual.mean_s == pytest.approx(2.0 + 0.02 * ((left_s or 2.0) - 2.0))


@pytest.mark.parametrize(
    ("left_s", "refused", "counted_s", "long_s"),
    [
        (1.0, False, 9.0, 9.0),  # what is admitted counts, however little time it has
        (1.0, True, 0.0, 0.0),
        (2.0, True, 9.0, 9.0),
    ],
)
def test_the_time_to_a_deadline_matters_for_refused_queries_only(left_s, refused, counted_s, long_s):
    fairness = LongRequests(1.0, usual=UsualTime(2.0))
    fairness.offered(0.0, 9.0, refused=refused, left_s=left_s)
    assert (fairness._all.offered, fairness._long.offered) == (counted_s, long_s)


@pytest.mark.parametrize(("cost_s", "counted_s"), [(6.01, 0.0), (1.9, 1.9)])
def test_a_refused_query_that_reserved_room_does_not_help_lowers_no_share(cost_s, counted_s):
    fairness = LongRequests(1.0)
    fairness.offered(0.0, cost_s, refused=True, most=3.0 if cost_s < 2 else 10.0)
    assert fairness._all.offered == counted_s
    assert fairness.mean == pytest.approx(1.0 + 0.02 * (cost_s - 1.0))
    fairness.offered(0.0, 6.01, refused=False, most=10.0)
    assert (fairness._all.admitted, fairness._long.offered) == (6.01, 0.0)


@pytest.mark.parametrize(
    ("left_s", "is_tight", "mean_s"), [(0.9490, True, 0.99898), (0.9491, False, 0.998982), (2.0, False, 1.02)]
)
def test_a_query_with_much_less_time_than_others_is_tight(left_s, is_tight, mean_s):
    usual = UsualTime(1.0)
    assert usual.count(left_s) == is_tight
    assert usual.mean_s == pytest.approx(mean_s)
    assert not UsualTime().count(left_s)


def test_so_many_at_once_take_no_time():
    fairness = LongRequests(0.0)
    fairness.offered(0.0, 1.0, refused=True, count=2**63)
    assert fairness._long.offered == 0.0  # none of them costs more than twice the mean
    assert fairness.mean == 1.0


def test_all_that_is_remembered_fades():
    fairness = after((LONG, True, 1), (SHORT, False, 1, 10.0))
    assert fairness._all.offered == pytest.approx(LONG / math.e + SHORT)
    assert fairness._long.offered == pytest.approx(LONG / math.e)


def test_the_mean_follows_what_is_offered():
    fairness = LongRequests(1.0)
    for mean in (1.04, 1.0792):  # a fiftieth of the way to 3
        fairness.offered(0.0, 3.0, refused=False)
        assert fairness.mean == pytest.approx(mean)
