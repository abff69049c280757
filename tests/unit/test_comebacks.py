"""Whoever is told busy is told a moment of their own, as far as the devices work one after the other."""

import pytest

from deployments.embedding.comebacks import Comebacks


def test_those_who_are_refused_are_told_moments_one_after_the_other():
    line = Comebacks()
    how = {"opens_s": 0.25, "work_s": 0.5, "room_s": 0.25, "slo_s": 0.25}  # every second one comes: 0.25 s for each
    # Two have room as it opens; the fourth would come more than an SLO after that, and is the first of a new line.
    assert [line.wait_s(0.0, **how) for _ in range(6)] == [0.25, 0.25, 0.5, 0.25, 0.25, 0.5]
    assert line.wait_s(0.5, **how) == 0.25  # the moments of the others are near
    assert line.wait_s(9.0, **how) == 0.25


@pytest.mark.parametrize(("earlier", "wait_s"), [(1, 1.0), (2, 1.0), (3, 1.125), (4, 1.25)])
def test_a_later_opening_has_the_same_line(earlier, wait_s):
    line = Comebacks()
    for _ in range(earlier):
        line.wait_s(0.0, opens_s=0.75, work_s=0.25, room_s=0.0, slo_s=4.0)
    assert line.wait_s(0.0, opens_s=1.0, work_s=0.25, room_s=0.0, slo_s=4.0) == wait_s
