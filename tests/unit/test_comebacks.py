"""Whoever is told busy is told a moment of their own: when the work of all who were told before is done."""

import pytest

from deployments.embedding.comebacks import Comebacks


def told(line, now, opens_s, *, room_s=0.0, work_s=0.25, slo_s=1.0):
    return line.wait_s(now, opens_s, work_s=work_s, room_s=room_s, slo_s=slo_s)


def test_those_who_are_refused_are_told_moments_one_after_the_other():
    line = Comebacks()
    assert [told(line, 0.0, 0.5) for _ in range(9)] == [0.5 + 0.25 * number for number in range(9)]
    assert told(line, 1.0, 0.5) == 1.75  # the line moves on with the clock
    assert told(line, 1.0, 2.5) == 2.5  # what opens later than its end is what counts


@pytest.mark.parametrize(("now", "wait_s"), [(1.0, 1.5), (1.0625, 0.5)])
def test_a_line_to_which_nobody_was_added_for_an_slo_is_over(now, wait_s):
    line = Comebacks()
    for _ in range(8):
        told(line, 0.0, 0.5)
    assert told(line, now, 0.5) == wait_s


def test_nobody_is_told_to_come_after_more_than_thirty_slos():
    line = Comebacks()
    assert [told(line, 0.0, 0.0, work_s=20.0) for _ in range(4)] == [0.0, 20.0, 30.0, 30.0]


def test_an_opening_for_many_has_a_short_line():
    line = Comebacks()
    how = {"work_s": 0.5, "room_s": 0.25, "slo_s": 0.25}  # every second one comes: 0.25 s for each
    # Two have room as it opens; the fourth would come more than an SLO after that, and is the first of a new line.
    assert [told(line, 0.0, 0.25, **how) for _ in range(6)] == [0.25, 0.25, 0.5, 0.25, 0.25, 0.5]
    assert told(line, 0.5, 0.25, **how) == 0.25  # the moments of the others are near
    assert told(line, 9.0, 0.25, **how) == 0.25
