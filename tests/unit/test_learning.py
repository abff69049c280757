"""The factor goes up at once and down slowly; the margin covers 99.5 % of errors."""

import pytest

from deployments.queueing.learning import Learning


def learned(*ratios):
    learning = Learning()
    for ratio in ratios:
        learning.worked(1.0, ratio, least_s=0.05)
    return learning.factor


@pytest.mark.parametrize(
    ("ratios", "factor"),
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
def test_up_at_once_and_down_slowly(ratios, factor):
    assert learned(*ratios) == pytest.approx(factor, rel=1e-4)


def test_short_pieces_are_summed_up():
    learning = Learning()
    for _ in range(4):
        learning.worked(0.01, 0.05, least_s=0.05)
    assert learning.factor == 1  # 40 ms say nothing yet
    learning.worked(0.01, 0.01, least_s=0.05)
    assert learning.factor == pytest.approx(1.5)  # 0.21 for 0.05, bounded
    learning.worked(0.0, 0.1, least_s=0.0)  # nothing was planned: no ratio
    assert learning.factor == pytest.approx(1.5)


def answered(learning, *errors, factor=1.0):
    for error in errors:
        learning.answered(1.0, 1.0 + error, factor)
    return learning.margin


def test_the_margin_is_wide_while_there_are_few_errors():
    assert Learning(calibrated=True).margin == 0.05
    assert Learning().margin == 0.10
    assert answered(Learning(), *[0.0] * 100) == 0.10
    assert answered(Learning(calibrated=True), *[0.0] * 100) == 0.05


@pytest.mark.parametrize(
    ("errors", "margin"),
    [
        ([0.0] * 1000, 0.02),  # the floor
        ([-0.5] * 1000, 0.02),
        (([0.0] * 99 + [0.2]) * 10, 0.2),  # one in a hundred is more than one in two hundred
        ([0.0] * 998 + [0.2] * 2, 0.02),
        ([5.0] * 1000, 0.3),  # never more: the factor is for that
    ],
)
def test_the_margin_is_the_quantile_between_its_bounds(errors, margin):
    learning = Learning()
    assert answered(learning, *errors, *errors) == pytest.approx(margin, abs=1e-6)


def test_a_probe_is_believed():
    learning = Learning(factor=2.2)
    learning.worked(1.0, 1.05, least_s=0.05, probe=True)
    assert learning.factor == 1.05
    learning.worked(1.0, 9.0, least_s=0.05, probe=True)
    assert learning.factor == pytest.approx(1.5 * 1.05)


def test_what_a_slower_device_missed_is_not_the_margins_business():
    learning = Learning(factor=2.0)
    assert answered(learning, *[1.0] * 400, factor=1.0) == 0.10
    assert not learning.errors
    assert answered(learning, *[0.05] * 2000, factor=1.95) == pytest.approx(0.05)


def test_nor_is_what_one_slow_run_missed_until_those_who_waited_behind_it_are_answered():
    learning = Learning()
    for ratio in (4.0, 1.0):
        learning.worked(1.0, ratio, least_s=0.05)
        assert answered(learning, 3.0) == 0.10
        assert not learning.errors
    learning.worked(1.0, 1.0, least_s=0.05)
    assert answered(learning, *[0.0] * 400, factor=learning.factor) == 0.02
