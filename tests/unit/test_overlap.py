"""APEX's model of overlap: what its equations say of one another, and of measured times."""

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.generation.overlap import Overlap, largest_ratio
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.scheduler.step_time import HostTime, StepTime

POSITIVE = st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1000)


@given(n_g=POSITIVE, n_c=POSITIVE, t_gl=POSITIVE, t_ga=POSITIVE)
def test_6_holds_exactly_where_5_does(n_g, n_c, t_gl, t_ga):
    found = Overlap(1000, t_gl, t_ga, n_g, n_c, 32)
    assert found.pays == (found.pipelined_rate > found.alone_rate)
    assert (found.ratio == found.largest_ratio) == (found.pipelined_rate == found.alone_rate)


@given(n_g=POSITIVE, t_gl=POSITIVE, t_ga=POSITIVE)
def test_at_the_bound_of_6_both_are_as_good_and_joining_late_is_never_worse(n_g, t_gl, t_ga):
    found = Overlap(1000, t_gl, t_ga, n_g, n_g / largest_ratio(t_gl, t_ga), 32)
    assert found.pipelined_rate == found.alone_rate
    assert found.asynchronous_rate == found.alone_rate + found.n_c


@pytest.mark.parametrize(("attention", "bound"), [(0.5, 7.5), (math.sqrt(2), 2 * math.sqrt(2) + 3), (1.5, 5.8333)])
def test_the_papers_figure_is_the_largest_of_its_range_and_the_least_of_all_lies_in_it(attention, bound):
    assert largest_ratio(1.0, attention) == pytest.approx(bound, rel=1e-4)
    assert largest_ratio(1.0, attention) >= 2 * math.sqrt(2) + 3 - 1e-12


def test_a_verdict_on_measured_times():
    model, host = StepTime(0.04, 0.0, 1e-6, 0.0002, 0.0), HostTime(0.0001, 4.9e-6, layers=32)
    found = Overlap.of(model, host, blocks=320, context=1000)  # 40 answers, of 8 blocks each
    assert (found.t_gl, found.t_ga) == pytest.approx((0.04, 0.04))
    assert found.n_g == pytest.approx(40 / 0.04)
    assert found.n_c == pytest.approx(1 / 0.005)
    assert found.ratio == pytest.approx(5.0)
    assert found.largest_ratio == pytest.approx(6.0)
    assert found.pays
    assert found.alone_rate == pytest.approx(500)
    assert found.pipelined_rate == pytest.approx(40 / 0.12 + 200)
    assert found.asynchronous_rate == pytest.approx(700)
    assert found.pipelined_blocks == 8 * 24  # 200 answers a second in steps of 0.12 s
    assert found.asynchronous_blocks == 8 * 512  # in 32 steps of 0.08 s
    slower = Overlap.of(model, HostTime(0.0001, 6e-6, layers=32), blocks=320, context=1000)
    assert not slower.pays
    assert slower.pipelined_rate < slower.alone_rate < slower.asynchronous_rate


@pytest.mark.parametrize(
    ("model", "host", "blocks"),
    [
        (StepTime(0.04, 0.0, 1e-6, 0.0, 0.0), HostTime(0.0, 1e-6), 7),
        (StepTime(0.04, 0.0, 0.0, 0.0, 0.0), HostTime(0.0, 1e-6), 320),
        (StepTime(0.0, 0.0, 1e-6, 0.0, 0.0), HostTime(0.0, 1e-6), 320),
        (StepTime(0.04, 0.0, 1e-6, 0.0, 0.0), HostTime(0.0, 0.0), 320),
    ],
)
def test_there_is_no_verdict_where_there_is_nothing_to_compare(model, host, blocks):
    assert Overlap.of(model, host, blocks, 1000) is None


def test_the_documented_table_is_what_the_equations_say():
    text = (Path(__file__).parents[2] / "docs" / "generation.md").read_text(encoding="utf-8")
    rows = [
        re.split(r" *\| *", line.strip("| \n")) for line in re.findall(r"^\| `[a-z].*-llama-.*$", text, re.MULTILINE)
    ]
    assert [row[0].strip("`") for row in rows] == list(EMULATED_ACCELERATORS)
    for row, device in zip(rows, EMULATED_ACCELERATORS.values(), strict=True):
        found = Overlap.of(device.step_time, device.host_time, device.blocks, 1024)
        rates = [f"{rate:.0f}" for rate in (found.alone_rate, found.pipelined_rate, found.asynchronous_rate)]
        sides = [f"{found.ratio:.1f}", f"{found.largest_ratio:.1f}", "yes" if found.pays else "no"]
        assert row[1:] == [str(device.blocks), *sides, *rates]
        assert 16 <= found.asynchronous_blocks / found.pipelined_blocks < 19
