"""When a replica whose engine fails is ejected, and for how long."""

import pytest

from deployments.serving.ejections import may_eject_one
from deployments.serving.replica_view import Outlier


@pytest.mark.parametrize(("failures", "is_one"), [(4, False), (5, True), (50, True)])
def test_five_failures_in_a_row_eject(failures, is_one):
    one = Outlier(failures)
    assert one.should_be_ejected(0.0) == is_one
    one.eject(0.0)
    assert not one.should_be_ejected(29.9)
    assert one.should_be_ejected(30.0) == is_one  # and its next failure again


def test_each_time_it_is_longer_until_it_was_well_for_as_long():
    one, now, ejected = Outlier(), 0.0, []
    for _ in range(12):
        ejected.append(one.eject(now))
        assert [one.is_ejected(now + ejected[-1] - 0.1), one.is_ejected(now + ejected[-1])] == [True, False]
        now = one.until + 1.0
    assert ejected == [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300, 300]
    assert one.eject(one.until + 300.0) == 300
    assert one.eject(one.until + 300.1) == 30
    assert one.eject(one.until + 29.9) == 60
    assert one.eject(one.until + 60.1) == 30


@pytest.mark.parametrize(
    ("reports", "failures"),
    [([(0, 1), (0, 2)], 3), ([(0, 3), (1, 0)], 0), ([(0, 3), (2, 1)], 1), ([(0, 0)], 0)],
)
def test_failures_are_counted_since_the_last_answer(reports, failures):
    one = Outlier()
    for worked, failed in reports:
        one.count(worked=worked, failed=failed)
    assert one.failures == failures


@pytest.mark.parametrize(("second_at", "counts"), [(0.9, False), (1.0, True), (1.1, True)])
def test_first_tokens_that_are_overdue_together_count_once(second_at, counts):
    one = Outlier(1)
    assert one.count_overdue(1.0, 0.0)
    assert one.count_overdue(1.5, second_at) == counts
    assert one.count_overdue(3.0, 1.5)
    assert one.failures == 3 + counts


@pytest.mark.parametrize(
    ("ejected", "replicas", "may"),
    [
        (0, 0, False),
        (0, 1, False),
        (0, 2, True),
        (1, 2, False),
        (1, 3, True),
        (2, 3, False),
        (1, 4, True),
        (2, 4, False),
    ],
)
def test_half_of_the_replicas_and_never_the_last_one(ejected, replicas, may):
    assert may_eject_one(ejected, replicas) == may


def test_a_new_one_has_not_failed():
    one = Outlier()
    assert (one.failures, one.ejections, one.is_ejected(0.0)) == (0, 0, False)
