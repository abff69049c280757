"""The slowdown goes up at once and down slowly; the margin covers 99.5 % of errors."""

import pytest

from deployments.generation.scheduler.learning import Learning


def learned(*ratios):
    learning = Learning()
    for ratio in ratios:
        learning.worked(1.0, ratio, least_s=0.05)
    return learning.slowdown


@pytest.mark.parametrize(
    ("ratios", "slowdown"),
    [
        ([1.0], 1.0),
        ([1.2], 1.2),  # at once
        ([9.0], 1.5),  # an outlier is not the rule
        ([2.0, 2.0], 2.0),  # a slow device is known after two
        ([1.4, 1.0], 1.3),  # down slowly
        ([0.5], 0.875),
        ([1e9] * 30, 50.0),
        ([0.0] * 100, 0.02),
    ],
)
def test_up_at_once_and_down_slowly(ratios, slowdown):
    assert learned(*ratios) == pytest.approx(slowdown, rel=1e-4)


def test_short_pieces_are_summed_up():
    learning = Learning()
    for _ in range(4):
        learning.worked(0.01, 0.05, least_s=0.05)
    assert learning.slowdown == 1  # 40 ms say nothing yet
    learning.worked(0.01, 0.01, least_s=0.05)
    assert learning.slowdown == pytest.approx(1.5)  # 0.21 for 0.05, bounded
    learning.worked(0.0, 0.1, least_s=0.0)  # nothing was planned: no ratio
    assert learning.slowdown == pytest.approx(1.5)


def answered(learning, *errors, slowdown=1.0):
    for error in errors:
        learning.answered(1.0, 1.0 + error, slowdown)
    return learning.margin


def after(count, *, calibrated=False):
    """So many errors of 0 are remembered already."""
    learning = Learning(calibrated)
    learning.errors.extend([0.0] * count)
    return learning


@pytest.mark.parametrize(("calibrated", "wide"), [(False, 0.10), (True, 0.05)])
def test_the_margin_is_wide_while_there_are_few_errors(calibrated, wide):
    assert Learning(calibrated).margin == wide
    assert answered(after(183, calibrated=calibrated), *[0.0] * 16) == wide
    assert answered(after(184, calibrated=calibrated), *[0.0] * 16) == 0.02  # of 200


@pytest.mark.parametrize(
    ("before", "times"), [(0, [16, 32]), (323, [16, 33]), (324, [17, 34]), (1000, [52, 107]), (2000, [100, 200])]
)
def test_the_margin_is_found_anew_after_sixteen_errors_or_a_twentieth_of_all(before, times):
    learning, found = after(before), []
    for time in range(1, times[-1] + 1):
        learning.margin = 0.25
        if answered(learning, 0.0) != 0.25:
            found.append(time)
    assert found == times


def test_the_oldest_of_more_than_two_thousand_errors_are_forgotten():
    assert [len(after(count).errors) for count in (1999, 2000, 2001)] == [1999, 2000, 2000]


def test_an_error_is_a_share_of_what_was_predicted():
    learning = Learning()
    learning.answered(0.5, 0.6, 1.0)
    assert list(learning.errors) == [pytest.approx(0.2)]


@pytest.mark.parametrize(
    ("errors", "margin"),
    [
        ([0.0] * 1000, 0.02),  # the floor
        ([-0.5] * 1000, 0.02),
        (([0.0] * 99 + [0.2]) * 10, 0.2),  # one in a hundred is more than one in two hundred
        ([0.0] * 998 + [0.2] * 2, 0.02),
        ([5.0] * 1000, 0.3),  # never more: the slowdown is for that
    ],
)
def test_the_margin_is_the_quantile_between_its_bounds(errors, margin):
    learning = Learning()
    assert answered(learning, *errors, *errors) == pytest.approx(margin, abs=1e-6)


def test_a_probe_is_believed():
    learning = Learning(slowdown=2.2)
    learning.worked(1.0, 1.05, least_s=0.05, probe=True)
    assert learning.slowdown == 1.05
    learning.worked(1.0, 9.0, least_s=0.05, probe=True)
    assert learning.slowdown == pytest.approx(1.5 * 1.05)


@pytest.mark.parametrize(
    ("ratios", "slowdown", "counts"),
    [
        ([1.2], 1.09, False),  # more than 1.1 times what was thought at admission
        ([1.2], 1.10, True),
        ([1.2, 1.0], 1.05, False),  # what waited behind the slow work is answered now
        ([1.2, 1.0, 1.0], 1.05, True),
    ],
)
def test_what_a_slower_device_missed_is_not_the_margins_business(ratios, slowdown, counts):
    learning = Learning()
    for ratio in ratios:
        learning.worked(1.0, ratio, least_s=0.05)
    learning.answered(1.0, 1.1, slowdown)
    assert bool(learning.errors) == counts
