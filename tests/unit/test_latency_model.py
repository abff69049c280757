import math
from collections import Counter
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from calibration.fit.curve import Curve, ceil, floor
from calibration.fit.latency_model import Fit, Misfit, Sample, _consistent_line, cover, fit, misfit, scatter

# SLO 1 s and 2 s, burst and steady: floor((slo - beta) / alpha) and floor((slo - 2 * beta) / alpha).
V100 = Curve(0.018, 0.27)
XEON = Curve(0.0858, 0.32)
ATLAS = Curve(0.00904, 0.24)
KUNPENG = Curve(0.0752, 0.85)

LEVELS = (1, 1, 6, 36, 40)
CONCURRENCY = st.integers(1, 2048)
ANY_SAMPLES = st.lists(st.builds(Sample, CONCURRENCY, st.floats(1e-4, 1e3)), min_size=3, max_size=40).filter(
    lambda samples: len({sample.concurrency for sample in samples}) > 1
)
SHAPES = st.sampled_from(["burst", "steady"])
few = settings(max_examples=50, deadline=None)  # a fit takes milliseconds


def on(model, levels=LEVELS, factors=None):
    """Samples on the line, each times its factor."""
    factors = factors or [1.0] * len(levels)
    return [Sample(level, factor * model.latency_s(level)) for level, factor in zip(levels, factors, strict=True)]


@pytest.mark.parametrize(
    "model",
    [V100, XEON, ATLAS, KUNPENG, Curve(0.0, 0.5), Curve(0.02, 0.0)],
    ids=["V100", "Xeon", "Atlas", "Kunpeng", "alpha 0", "beta 0"],
)
def test_a_line_is_found_exactly(model):
    found = fit(on(model))
    assert found.curve.alpha_s == pytest.approx(model.alpha_s, rel=1e-9, abs=1e-12)
    assert found.curve.beta_s == pytest.approx(model.beta_s, rel=1e-9, abs=1e-12)
    assert found.noise == pytest.approx(0, abs=1e-9)
    assert not found.outliers


@few
@given(ANY_SAMPLES)
def test_alpha_and_beta_are_never_negative(samples):
    model = fit(samples).curve
    assert model.alpha_s >= 0
    assert model.beta_s >= 0
    assert model.latency_s(1) > 0


def test_the_first_line_goes_through_the_origin_where_a_pairs_own_would_go_below_zero():
    """Through the larger of each pair: 1.2 s for 20, or 2.6 s for 40. The former leaves less."""
    levels, latencies = np.array([20.0, 10.0, 40.0]), np.array([1.2, 0.5, 2.6])
    assert _consistent_line(levels, latencies) == Curve(1.2 / 20, 0.0)


def test_where_free_least_squares_would_go_below_zero_the_line_goes_through_the_origin():
    model = fit([Sample(10, 0.5), Sample(20, 1.2), Sample(40, 2.6)]).curve  # alpha 0.07, beta -0.2
    assert model.beta_s == 0
    assert 0.05 < model.alpha_s < 0.07


@few
@given(
    alpha_s=st.floats(0, 0.2),
    beta_s=st.floats(0.001, 2),
    levels=st.lists(st.integers(1, 200), min_size=5, max_size=10).filter(lambda at: max(Counter(at).values()) <= 2),
    factor=st.floats(2, 4),
    data=st.data(),
)
def test_one_slow_burst_anywhere_does_not_move_the_line(alpha_s, beta_s, levels, factor, data):
    model = Curve(alpha_s, beta_s)
    slow = data.draw(st.integers(0, len(levels) - 1), label="slow")
    found = fit(on(model, levels, [factor if index == slow else 1.0 for index in range(len(levels))]))
    assert found.outliers == {slow}
    for level in levels:
        assert found.curve.latency_s(level) == pytest.approx(model.latency_s(level), rel=1e-6)


@pytest.mark.parametrize("samples", [on(V100, (1, 6)), on(V100, (6, 6, 6))], ids=["two samples", "one level"])
def test_too_little_for_a_line_is_refused(samples):
    with pytest.raises(ValueError, match="three samples at two levels"):
        fit(samples)


@pytest.mark.parametrize(
    ("model", "slo_s", "burst", "steady"),
    [
        (V100, 1, 40, 25),
        (V100, 2, 96, 81),
        (XEON, 1, 7, 4),
        (XEON, 2, 19, 15),
        (ATLAS, 1, 84, 57),
        (ATLAS, 2, 194, 168),
        (KUNPENG, 1, 1, 0),
        (KUNPENG, 2, 15, 3),
        (KUNPENG, 0.9, 0, 0),  # one query takes 0.925 s: not at all (Eq. 11)
        (Curve(0.25, 0.5), 1, 2, 0),  # the SLO met to the dot
        (Curve(0.1, 0.2), 2.0, 18, 16),
        (Curve(0.1, 0.0), 0.3, 3, 3),  # 0.3 / 0.1 is 2.9999999999999996
    ],
)
def test_depth_is_what_the_line_leaves_within_the_slo(model, slo_s, burst, steady):
    assert model.depth(slo_s) == burst
    assert model.depth(slo_s, "steady") == steady
    assert model.depth(slo_s, most=10) == min(burst, 10)


def test_a_line_that_does_not_rise_allows_all_or_nothing():
    assert Curve(0.0, 0.5).depth(1, "steady", most=640) == 640
    assert Curve(0.0, 1.5).depth(1, most=640) == 0
    assert Curve(1e-9, 0.5).depth(0.5 + 1.5e-9, most=640) == 640  # one query is in time
    assert not Curve(1e-9, 0.5).rises
    assert Curve(1.4e-9, 0.5).rises
    with pytest.raises(ValueError, match="does not rise has no depth"):
        Curve(0.0, 0.3).depth(2.0)


def test_where_beta_alone_is_too_long_there_is_no_depth():
    assert KUNPENG.unrounded_depth(0.8) == 0
    assert KUNPENG.unrounded_depth(1.6, "steady") == 0


@pytest.mark.parametrize(
    ("value", "down", "up"),
    [
        (17.999999999, 18, 18),  # (2.0 - 0.2) / 0.1, by floats
        (1 - 0.9e-9, 1, 1),
        (1 - 1.4e-9, 0, 1),
        (1 + 0.9e-9, 1, 1),
        (1 + 1.4e-9, 1, 2),
        (1000 - 0.9e-6, 1000, 1000),
        (1000 - 1.4e-6, 999, 1000),
        (-0.5e-9, 0, 0),
    ],
)
def test_a_hair_beside_a_whole_number_is_that_number(value, down, up):
    assert (floor(value), ceil(value)) == (down, up)


@settings(deadline=None)
@given(alpha_s=st.floats(1e-4, 1), beta_s=st.floats(0, 5), slo_s=st.floats(0.01, 10), shape=SHAPES)
def test_one_query_more_than_the_depth_misses_the_slo(alpha_s, beta_s, slo_s, shape):
    depth = Curve(alpha_s, beta_s).depth(slo_s, shape)
    waits = beta_s if shape == "burst" else 2 * beta_s
    assert depth == 0 or alpha_s * depth + waits <= slo_s * (1 + 1e-9)
    assert alpha_s * (depth + 1) + waits >= slo_s * (1 - 1e-9)


@pytest.mark.parametrize(
    "factors", [[1.0] * 5, [1.0, 3.0, 1.0, 1.0, 1.0], [1.02, 0.98, 1.01, 0.99, 1.0]], ids=["on", "outlier", "noise"]
)
def test_a_line_a_slow_burst_and_noise_are_no_misfit(factors):
    samples = on(V100, LEVELS, factors)
    assert misfit(samples, fit(samples)) is None


def apart_by(noise):
    """Two bursts of 500 whose latencies are so far apart that bursts scatter by `noise`."""
    return [Sample(500, V100.latency_s(500) * math.exp(by * noise * math.sqrt(2) / 1.4826 / 2)) for by in (1, -1)]


@pytest.mark.parametrize(
    ("noise", "scattered", "most"),
    [
        (0.0, 0.0, 0.07),
        (0.05, 0.04, 0.12),  # three times the smaller of the two
        (0.03, 0.04, 0.09),
        (0.02, 0.02, 0.07),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_level_is_off_the_line_beyond_a_share_and_beyond_noise(noise, scattered, most, sign):
    line = Fit(V100, 1.0, noise, frozenset(), np.zeros((2, 2)), 0.0)
    found = [
        misfit([*apart_by(scattered), Sample(20, V100.latency_s(20) * (1 + sign * by))], line)
        for by in (most - 0.001, most + 0.001)
    ]
    assert found[0] is None
    assert found[1] == Misfit(20, found[1].problem)


def test_a_misfit_is_said_with_both_latencies():
    line = Fit(V100, 0.987, 0.0, frozenset(), np.zeros((2, 2)), 0.0)
    near, far = Sample(20, 0.6), Sample(20, 0.9)  # the line says 0.63: a level is as near as its nearest burst
    assert misfit([far, near], line) is None
    assert misfit([far, Sample(10, 0.5)], line).problem == (
        "latency is not linear in concurrency: 20 at once take 0.9 s where the line through the other bursts says "
        "0.63 s (R2 0.987)"
    )


@pytest.mark.parametrize(
    ("noise", "factor", "outlier"),
    [
        (0.0, 1.095, False),  # a tenth at least
        (0.0, 1.105, True),
        (0.0, 0.895, True),
        (0.03, 0.85, False),  # four deviations below 1.03, of which the median residual, 0.03, is 1 / 1.4826
        (0.03, 0.84, True),
    ],
)
def test_a_burst_is_an_outlier_beyond_four_deviations(noise, factor, outlier):
    off = [1, 1 + noise, 1 - noise]
    samples = on(V100, (1, 1, 1, 40, 40, 40, 40), [*off, *off, factor])
    assert fit(samples).outliers == ({6} if outlier else set())


@pytest.mark.parametrize("shape", ["burst", "steady"])
def test_the_margin_is_a_side_of_the_confidence_interval(shape):
    """Weighted least squares; beside the samples' own residuals two of one per cent are believed."""
    samples = on(V100, LEVELS, [1.02, 0.98, 1.0, 1.01, 0.99])
    found = fit(samples)
    line_s = np.array([found.curve.latency_s(level) for level in LEVELS])
    columns = np.column_stack([LEVELS, np.ones(5)]) / line_s[:, None]
    residuals = np.array([sample.latency_s for sample in samples]) / line_s - 1
    assert columns.T @ residuals == pytest.approx([0.0, 0.0], abs=1e-6)
    variance = (residuals @ residuals + 2 * 0.01**2) / (5 - 2 + 2)
    where = np.array([30, 2 if shape == "steady" else 1])
    deviation_s = math.sqrt(where @ np.linalg.inv(columns.T @ columns) @ where * variance)
    assert found.margin_s(30, shape) == pytest.approx(student.ppf(0.985, 5) * deviation_s, rel=1e-4)
    assert found.noise == pytest.approx(math.sqrt(residuals @ residuals / 3), rel=1e-4)


def test_of_three_samples_one_tells_the_noise():
    samples = on(V100, (1, 20, 40), [1.02, 0.98, 1.02])
    found = fit(samples)
    off = [sample.latency_s / found.curve.latency_s(sample.concurrency) - 1 for sample in samples]
    assert found.noise == pytest.approx(math.hypot(*off))


def test_what_the_line_explains():
    samples = [Sample(1, 0.5), Sample(1, 0.55), Sample(2, 1.0), Sample(2, 1.05)]
    found = fit(samples)
    latencies_s = np.array([sample.latency_s for sample in samples])
    left_s = latencies_s - [found.curve.latency_s(sample.concurrency) for sample in samples]
    assert found.r2 == pytest.approx(1 - left_s @ left_s / np.square(latencies_s - latencies_s.mean()).sum())
    assert fit([Sample(1, 1.0), Sample(2, 1.0), Sample(3, 1.0)]).r2 == 0


def test_equal_bursts_tell_the_noise_whatever_the_line():
    chance = np.random.default_rng(1)
    samples = [
        Sample(level, 0.01 * level**2 * (1 + 0.05 * chance.standard_normal())) for level in range(1, 30) for _ in "abc"
    ]
    assert 0.04 <= scatter(samples) <= 0.06
    assert scatter(samples[:1]) == 0


LEVEL_LATENCIES = st.lists(
    st.tuples(CONCURRENCY, st.floats(0.01, 1.0)), min_size=1, max_size=20, unique_by=lambda pair: pair[0]
)


@few
@given(LEVEL_LATENCIES, CONCURRENCY, st.floats(1.0, 2.0))
def test_a_line_covers_what_was_measured_and_promises_no_more(measured, depth, limit_s):
    rising = zip(sorted(level for level, _ in measured), sorted(latency for _, latency in measured), strict=True)
    samples = [Sample(level, latency_s) for level, latency_s in rising]
    found = cover(samples, depth, limit_s)
    assert not found.outliers
    assert found.curve.alpha_s >= 0
    assert found.curve.beta_s >= 0
    assert found.curve.latency_s(depth) >= limit_s * (1 - 1e-9)
    for sample in samples:
        if sample.concurrency <= depth:
            assert found.curve.latency_s(sample.concurrency) >= sample.latency_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("points", "depth", "limit_s", "line"),
    [
        ([(5, 0.4)], 20, 0.7, (0.02, 0.3)),
        ([(10, 0.2)], 20, 1.2, (0.06, 0.0)),  # by itself it would begin below zero
        ([(1, 0.5)], 40, 0.5, (0.0, 0.5)),
        ([(1, 0.25), (16, 1.0)], 40, 1.48, (0.02, 0.68)),  # least in the middle, at 20
        ([(60, 9.0), (5, 0.4)], 20, 0.7, (0.02, 0.3)),  # only up to the depth
        ([(5, 0.3), (20, 0.9)], 20, 0.7, (0.04, 0.1)),  # and that itself
        ([(60, 1.0)], 20, 0.7, (0.035, 0.0)),
    ],
)
def test_the_least_line_above(points, depth, limit_s, line):
    found = cover([Sample(*point) for point in points], depth, limit_s)
    assert astuple(found.curve) == pytest.approx(line)
    assert (found.covariance.tolist(), found.quantile) == ([[0.0, 0.0], [0.0, 0.0]], 0.0)


@pytest.mark.parametrize(("latency_s", "outliers"), [(1.1, set()), (1.1001, {1})])
def test_a_burst_is_slow_for_its_level_a_tenth_beyond_a_larger_one(latency_s, outliers):
    assert cover([Sample(40, 1.0), Sample(12, latency_s)], 40, 1.0).outliers == outliers


@pytest.mark.parametrize(("noise", "outliers"), [(0.05, {2}), (0.06, set())])
def test_beside_noise_a_burst_is_slow_for_its_level_beyond_four_deviations(noise, outliers):
    """1.22 times as slow as the quicker one of two bursts that are apart by so much noise."""
    large = apart_by(noise)
    assert cover([*large, Sample(400, 1.22 * large[1].latency_s)], 500, 1.0).outliers == outliers


def test_what_a_line_above_explains():
    """Of the samples that it goes by, the outlier 2 and what is beyond the depth aside."""
    samples = [Sample(1, 0.3), Sample(10, 0.4), Sample(20, 0.9), Sample(30, 0.5), Sample(40, 0.6), Sample(50, 0.1)]
    found = cover(samples[:-1], 40, 0.62)
    kept = [samples[0], samples[1], samples[3], samples[4]]
    left_s = [sample.latency_s - found.curve.latency_s(sample.concurrency) for sample in kept]
    latencies_s = np.array([sample.latency_s for sample in kept])
    assert found.r2 == pytest.approx(1 - sum(np.square(left_s)) / np.square(latencies_s - latencies_s.mean()).sum())
    assert 0.5 < found.r2 < 1


@pytest.mark.parametrize(
    "samples",
    [
        [Sample(1, 0.5), Sample(40, 0.5)],  # all take the same
        [Sample(50, 1.0)],  # none counts
        [Sample(1, 0.01), Sample(20, 0.1), Sample(40, 0.11)],  # far below
    ],
)
def test_a_line_above_explains_nothing(samples):
    assert cover(samples, 40, 2.0).r2 == 0
