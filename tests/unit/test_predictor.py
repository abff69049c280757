"""The predictor by exact numbers: each of its constants at its edge, and what it must not learn.

Most devices here are planned with 0.1 s and a promise of 1 s: what is unknown of b has the size of 0.12 s.
"""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.admission import predictor as module
from deployments.admission.predictor import LinePredictor, Predictor


def learned(*runs, planned_s=0.1, slo_s=1.0, now=0.0):
    """After runs of (work, seconds)."""
    predictor = Predictor(planned_s=planned_s, slo_s=slo_s)
    for work_s, took_s in runs:
        predictor.ended(now, work_s, took_s)
    return predictor


def steady(*runs, times=40, **how):
    return learned(*[runs[number % len(runs)] for number in range(times)], **how)


def answered(predictor, *answers, work_s=0.5, off=1.0):
    """A run of that work, `off` times as long as it is said to be, with (predicted, actual) of its answers."""
    predictor.ended(0.0, work_s, off * predictor.seconds(work_s), answers)
    return predictor


def certain(b=0.1, *, slo_s=1.0, **learned):
    """A device without jitter, whose line does not move with its next run."""
    predictor = Predictor(planned_s=b, slo_s=slo_s)
    predictor._doubt, predictor.jitter_s = (0.0, 0.0, 0.0), 0.0
    for name, value in learned.items():
        setattr(predictor, f"_{name}", value)
    return predictor


def test_a_known_device_is_a_line():
    line = LinePredictor(0.2, 2.0, 0.25)
    assert (line.seconds(0.3), line.work_in(0.8), line.fill_s(1.0)) == (0.8, pytest.approx(0.3), 0.8)
    line.ended(0.0, 0.3, 9.0)
    assert line == LinePredictor(0.2, 2.0, 0.25)
    line.promise(2.0)
    assert line == LinePredictor(0.2, 2.0, 0.25, 2.0)
    assert LinePredictor() == LinePredictor(0.0, 1.0, 0.0, 1.0, has_changed=False)


def test_before_the_first_run_it_is_the_model():
    new = learned()
    assert (new.intercept_s, new.slope, new.margin, new.seconds(0.5)) == (0.1, 1.0, 0.05, 0.6)


@pytest.mark.parametrize("slo_s", [1.0, 2.0])
@pytest.mark.parametrize(("off", "counted"), [(0.05, 0.05), (5.0, 3.0), (-0.9, -0.9)])
def test_a_step_of_the_filter(slo_s, off, counted):
    """In relative errors. At first b is in doubt by 0.3 times its own size and 2 % of the SLO, k by 0.3; a run by 0.03
    and 1 % of the SLO. A run that is slower by more than three standard deviations counts as three.
    """
    found = learned((0.5, 0.6 * (1 + off)), slo_s=slo_s)
    size_s = 0.1 + 0.02 * slo_s
    p, q = (0.3 * size_s) ** 2, 0.3**2
    x, z = p / 0.6, 0.5 * q / 0.6
    spread = (p + 0.5**2 * q) / 0.6**2 + 0.03**2 + (0.01 * slo_s / 0.6) ** 2
    step = counted / spread if abs(counted) < 1 else counted / math.sqrt(spread)
    assert (found._b, found._k) == pytest.approx((max(0.0, 0.1 + x * step), max(0.02, 1 + z * step)))
    walk_s = 0.003 * size_s
    doubt = p - x * x / spread + walk_s**2, -x * z / spread, q - z * z / spread + 0.003**2
    assert found._doubt == pytest.approx(doubt, rel=1e-9)


@pytest.mark.parametrize("true", [(0.06, 1.0), (0.15, 1.0), (0.1, 0.7), (0.1, 1.4), (0.16, 1.0)])
def test_both_parts_of_a_line_are_learned_apart(true):
    b, k = true
    found = steady((0.02, b + 0.02 * k), (0.7, b + 0.7 * k), times=80)
    for work_s in (0.02, 0.1, 0.4, 0.7):
        assert found.seconds(work_s) == pytest.approx(b + k * work_s, rel=0.01)


@pytest.mark.parametrize(("b", "large_s"), [(0.17, 0.97), (0.22, 0.97), (0.27, 0.97), (0.32, 1.02)])
def test_light_load_teaches_nothing_good_of_a_large_run(b, large_s):
    """0.27 s is planned; small runs take b. Before a large run was seen, one takes what is planned at least."""
    found = steady((0.018, b + 0.018), times=200, planned_s=0.27)
    assert found.seconds(0.018) == pytest.approx(b + 0.018, rel=0.01)
    assert found.seconds(0.7) == pytest.approx(large_s, rel=0.03)


# --- slow spells and changes ------------------------------------------------------------------------------------------


def test_a_slow_run_counts_at_once_and_until_the_next():
    found = steady((0.5, 0.6))
    calm_s = found.seconds(0.5)
    found.ended(0.0, 0.5, 1.2)
    assert found.seconds(0.5) > 1.5 * calm_s
    assert found.slope == found._spell * found._k != found._k
    found.ended(0.0, 0.5, 0.6)
    assert found.seconds(0.5) < 1.1 * calm_s


@pytest.mark.parametrize(("off", "is_spell"), [(1.04, False), (1.06, True)])
def test_a_spell_is_beyond_the_margin_and_a_twentieth(off, is_spell):
    found = steady((0.5, 0.6), times=400)
    found.ended(0.0, 0.5, 0.6 * off)
    assert (found._spell > 1) == is_spell


def test_a_spell_is_three_times_at_most():
    found = steady((0.5, 0.6))
    found.ended(0.0, 0.5, 60.0)
    assert found._spell == 3


def test_a_hiccup_of_a_short_run_says_little_of_a_long_one():
    """A run of 5 ms takes 35 ms more: of a promise of 1 s that is little."""
    found = steady((0.004, 0.005), planned_s=0.001)
    before_s = found.work_in(found.fill_s(1.0))
    found.ended(0.0, 0.004, 0.04)
    assert found.work_in(found.fill_s(1.0)) > 0.8 * before_s


@pytest.mark.parametrize(
    ("line_s", "slo_s", "jitter_s", "off_s", "counted_s"),
    [
        (0.2, 1.0, 0.01, 0.02, 0.02),
        (0.2, 1.0, 0.01, -0.02, 0.02),
        (0.2, 1.0, 0.01, 0.0, 0.0),
        (0.2, 1.0, 0.01, 0.5, 0.03),  # at most three times the mean
        (0.2, 1.0, 0.0, 0.5, 0.01),  # or 1 % of the SLO
        (0.2, 2.0, 0.0, 0.5, 0.02),
        (0.24, 1.0, 0.01, 0.02, 0.02),
        (0.26, 1.0, 0.01, 0.02, None),  # a quarter of the SLO is not short
        (0.26, 2.0, 0.01, 0.02, 0.02),
        (0.2, 1.0, 0.03, 0.06, 0.03),  # the mean is at most 3 % of the SLO
        (0.2, 2.0, 0.03, 0.06, 0.06),
    ],
)
def test_the_mean_error_of_short_runs(line_s, slo_s, jitter_s, off_s, counted_s):
    """Each run counts a twentieth."""
    found = certain(slo_s=slo_s)
    found.jitter_s = jitter_s
    found.ended(0.0, line_s - 0.1, line_s + off_s)
    assert found.jitter_s == pytest.approx(jitter_s if counted_s is None else 0.95 * jitter_s + 0.05 * counted_s)


def test_the_jitter_begins_at_a_hundredth_of_the_promise_and_outlasts_it():
    found = Predictor(planned_s=0.1, slo_s=2.0)
    assert found.jitter_s == 0.02
    found.promise(1.0)
    assert found.jitter_s == 0.02


def test_a_short_run_that_the_host_delays_says_little_of_a_large_one():
    """Measured on two cores: the first run of a burst took 57 ms, because the Router was receiving the others. For the
    next the line said 0.55 s; it took 0.32 s.
    """
    lone = [(0.0002, took_s) for took_s in (0.007, 0.012, 0.008, 0.009, 0.009)]
    found = learned(*lone, (0.025, 0.057), planned_s=0.004)
    assert found.seconds(0.298) < 1.5 * 0.298
    found.ended(0.0, 0.298, 0.321)
    assert found.seconds(0.298) == pytest.approx(0.321, rel=0.05)


@pytest.mark.parametrize("times", [1.6, 0.6])
def test_a_device_that_changed_is_known_after_few_runs(times):
    found = steady((0.5, 0.6))
    for _ in range(4):
        found.ended(0.0, 0.5, 0.6 * times)
    assert found._b + found._k * 0.5 == pytest.approx(0.6 * times, rel=0.1)
    before = found._doubt
    for _ in range(20):
        found.ended(0.0, 0.5, 0.6 * times)
    assert found._doubt[2] < before[2]  # and it is certain again


OUT, IN = 1.5, 1.0  # of what the line says: an outlier, and none


@pytest.mark.parametrize(
    ("offs", "changed"),
    [
        ([OUT], False),
        ([OUT, OUT], True),
        ([1 / OUT, 1 / OUT], True),
        ([OUT, 1 / OUT], False),
        ([OUT, IN, OUT], False),
        ([OUT, OUT, IN], False),
        ([1.088, 1.088], False),  # three times 0.03 is the limit of a line without doubt
        ([1.092, 1.092], True),
    ],
)
def test_two_outliers_of_one_sign_are_a_change(offs, changed):
    found = certain()
    for off in offs:
        found._doubt = (0.0, 0.0, 0.0)
        found.ended(0.0, 0.5, 0.6 * off)
    assert found.has_changed == changed


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("slo_s", "b", "size_s"), [(1.0, 0.02, 0.12), (2.0, 0.02, 0.14), (1.0, 0.3, 0.3)])
@pytest.mark.parametrize(("off", "together"), [(OUT, 0.9), (1 / OUT, 0.0)])
def test_a_change_puts_the_line_in_doubt(count, slo_s, b, size_s, off, together):
    """By a tenth of its size for each outlier, of b 0.1 s and 2 % of the SLO at least; together if it is slower."""
    found = certain(slo_s=slo_s, b=0.1)
    for _ in range(count):
        found._doubt, found._b, found._k = (0.0, 0.0, 0.0), b, 2.0
        found.ended(0.0, 0.5, (b + 1.0) * off)
    of_b, of_k = 0.1 * count * size_s, 0.1 * count * 2.0
    assert found._doubt == pytest.approx((of_b**2, together * of_b * of_k, of_k**2))


def test_a_doubt_that_is_larger_stays():
    found = certain(outliers=1, doubt=(4.0, 0.0, 4.0))
    found.ended(0.0, 0.5, 100.0)
    assert found.has_changed
    assert found._doubt[0] + found._doubt[2] > 4.0


def test_a_device_that_became_slower_is_slower_for_larger_runs_too():
    """Small runs alone show it."""
    found = steady((0.05, 0.15), (0.5, 0.6))
    for _ in range(6):
        found.ended(0.0, 0.05, 1.5 * 0.15)
    assert found.seconds(0.4) > 1.25 * 0.5


@pytest.mark.parametrize(("times", "work_s"), [(4.0, 0.1), (0.3, 0.1)])
def test_a_probe_is_believed(times, work_s):
    found = steady((0.5, 5.0))
    found.ended(0.0, work_s, times * 0.2, is_probe=True)
    assert found._b + found._k * work_s == pytest.approx(times * 0.2)
    assert found._doubt == pytest.approx(((0.3 * 0.12) ** 2, 0.0, (0.3 * found._k) ** 2))


def test_a_probe_drops_a_wrong_beta_and_keeps_the_slope():
    """Planned beside dying processes: a beta of 0.95 s instead of 5 ms. A slope of 0.02 made a capacity of 110 queries
    7,200.
    """
    found = Predictor(planned_s=0.95, slo_s=1.0)
    found.ended(0.0, 0.007, 0.015, is_probe=True)
    assert (found.intercept_s, found.slope) == (pytest.approx(0.008), 1.0)


def test_a_probe_that_took_no_time_leaves_a_device():
    found = steady((0.5, 0.6))
    found.ended(0.0, 0.5, 0.0, is_probe=True)
    assert (found.intercept_s, found.slope) == (0.0, 0.02)
    found.ended(0.0, 0.5, 0.6)
    assert found.seconds(0.5) > 0


def test_another_promise_counts_at_once():
    found = learned()
    found.promise(10.0)
    assert found._trusted_work == 1.25
    assert found._doubt[0] == pytest.approx((0.3 * (0.1 + 0.2)) ** 2)


# --- runs larger than any of late -------------------------------------------------------------------------------------


def convex_s(work_s):
    return 0.1 + 1.5 * work_s**2


def test_a_device_that_slows_down_with_size_is_not_thought_quick():
    found = steady((0.02, convex_s(0.02)), (0.5, convex_s(0.5)), times=20)
    for _ in range(60):
        found.ended(1.0, 0.02, convex_s(0.02))
    assert found.seconds(0.5) >= 0.99 * convex_s(0.5)
    assert found.seconds(0.6) >= 0.1 + convex_s(0.5) - 1e-9


def test_the_line_is_trusted_up_to_the_largest_run_of_late():
    """It fades by a twentieth with each run, to an eighth of the SLO, and at once where the device has changed."""
    found = certain()
    assert found._trusted_work == 0.125
    found.ended(0.0, 0.7, 0.8)
    for _ in range(10):
        found.ended(0.0, 0.02, 0.12)
    assert found._trusted_work == pytest.approx(0.7 * 0.95**10)
    for _ in range(2):
        found._doubt = (0.0, 0.0, 0.0)
        found.ended(0.0, 0.2, 0.45)
    assert found._trusted_work == 0.2


def test_behind_what_is_trusted_a_run_takes_what_is_planned():
    found = certain()
    found._b = 0.05
    found.ended(0.0, 0.02, 0.07)
    assert found.seconds(0.125) == pytest.approx(0.175)
    assert found.seconds(0.1251) == pytest.approx(0.2251)


@pytest.mark.parametrize(
    ("b", "small_s", "slower"),
    [
        (0.1, 0.1, 1.0),
        (0.4, 0.1, 1 + (0.5 - 1.5 * 0.2) / 0.5),  # of a quarter of the SLO at least
        (1.0, 0.3, 1 + (1.3 - 1.5 * 0.4) / (1.5 * 0.4)),
        (1.0, None, 1 + (1.0 - 1.5 * 0.1) / 0.5),  # before any small run: by b
    ],
)
def test_a_larger_run_takes_what_the_line_through_a_large_one_says(b, small_s, slower):
    """That one took half as long again as the line says, so its own rises by as much. It is slower by what a small run
    takes more than it did then, if that took half as long again as well.
    """
    found = certain(slo_s=2.0)
    found.ended(0.0, 1.2, 1.5 * 1.3)
    assert found._lines == [(1.2, pytest.approx(1.95), pytest.approx(1.5))]
    found._doubt, found._b, found._spell = (0.0, 0.0, 0.0), b, 1.0
    work_s = small_s or 1.2
    found.ended(0.0, work_s, b + work_s)
    assert found._lines[0] == (1.2, pytest.approx(slower * 1.95), pytest.approx(slower * 1.5))


def test_the_line_through_a_large_run_that_was_quick():
    """It took less than its line says, and rises as planned."""
    found = certain()
    found.ended(0.0, 0.5, 0.3)
    assert found._lines == [(0.5, 0.3, 1.0)]
    found._doubt, found._b = (0.0, 0.0, 0.0), 0.2
    found.ended(0.0, 0.02, 0.22)
    assert found._lines == [(0.5, pytest.approx(1.4 * 0.3), pytest.approx(1.4))]


def test_large_runs_are_forgotten():
    """One was slow for another reason: a minute later it keeps runs small no more."""
    found = steady((0.02, 0.12), (0.7, 1.6), times=20, now=10.0)
    for _ in range(30):
        found.ended(70.0, 0.02, 0.12)
    assert len(found._lines) == 3
    found.ended(70.1, 0.02, 0.12)
    assert found._lines == [(0.0, 0.1, 1.0)]


@pytest.mark.parametrize(("works", "large"), [([0.5], 1), ([0.3], 0), ([0.5] * 5, 3)])
def test_a_large_run_has_half_of_the_most_work(works, large):
    assert len(learned(*[(work_s, 0.1 + work_s) for work_s in works])._large) == large


def test_the_lowest_of_the_latest_large_runs_counts():
    found = learned((0.7, 0.8), (0.7, 3.0), (0.7, 0.8))
    for _ in range(50):
        found.ended(0.0, 0.02, 0.12)
    assert found.seconds(0.8) < 1.3


@given(
    st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.2, 5.0), st.booleans(), st.floats(0.0, 200.0)), max_size=30),
    st.floats(0.0005, 0.5),
)
def test_work_is_the_inverse_of_seconds_and_both_grow(runs, planned_s):
    found = Predictor(planned_s=planned_s, slo_s=1.0)
    for work_s, off, is_probe, now in sorted(runs, key=lambda run: run[-1]):
        answers = [(found.seconds(work_s), off * found.seconds(work_s))]
        found.ended(now, work_s, off * (planned_s + work_s), answers, is_probe=is_probe)
    works = [0.0, 0.01, 0.1, 0.3, 0.7, 1.0, 3.0]
    times = [found.seconds(work_s) for work_s in works]
    assert times == sorted(times)
    assert all(math.isfinite(one) and one >= 0 for one in times)
    assert 0.02 <= found.margin <= 0.3
    for work_s in works[1:]:
        assert found.seconds(found.work_in(found.seconds(work_s))) <= found.seconds(work_s) * (1 + 1e-9)
        if work_s > found._trusted_work:
            assert found.work_in(found.seconds(work_s)) <= work_s * (1 + 1e-9) or found.seconds(
                found.work_in(found.seconds(work_s))
            ) == pytest.approx(found.seconds(work_s))


# --- the margin -------------------------------------------------------------------------------------------------------


def test_the_margin_fades_from_a_twentieth_to_its_least():
    found = Predictor(planned_s=0.1, slo_s=1.0)
    margins = [answered(found, (0.6, 0.6)).margin for _ in range(12)]
    assert margins == sorted(margins, reverse=True)
    assert margins[0] == pytest.approx(0.05 - 0.03 * 0.6 / 5)
    found._deviation = 0.0
    assert answered(found, (0.6, 0.6)).margin == 0.02


def test_runs_without_answers_fade_it_as_well():
    assert certain(deviation=0.0).margin == 0.05
    found = certain(deviation=0.0)
    found.ended(0.0, 0.5, 0.6)
    assert found.margin == pytest.approx(0.05 - 0.03 / 5)


@pytest.mark.parametrize(
    ("line_s", "slo_s", "weighed", "off", "deviation"),
    [
        (0.6, 1.0, 0, 0.02, 0.01 + 0.01 / 4),
        (0.6, 1.0, 0, 0.5, 0.01 + 0.025 / 4),  # three times 0.01 and 0.005 more count
        (0.6, 1.0, 99, -0.02, 0.01 + 0.01 * 0.05),
        (0.125, 1.0, 0, 0.02, 0.01 + 0.25 * 0.01 / 3.25),  # half of a quarter of the SLO: it weighs a quarter
        (0.25, 2.0, 0, 0.02, 0.01 + 0.25 * 0.01 / 3.25),
    ],
)
def test_the_mean_deviation(line_s, slo_s, weighed, off, deviation):
    """A share of the line, of a quarter of the SLO at least. A run weighs a twentieth, and more while they are few; one
    that is shorter weighs less, by its square.
    """
    found = certain(slo_s=slo_s)
    found._weighed += weighed
    found.ended(0.0, line_s - 0.1, line_s + off * max(line_s, 0.25 * slo_s))
    assert found._deviation == pytest.approx(deviation)


def test_the_margin_covers_three_and_a_quarter_mean_deviations():
    found = certain(deviation=0.05)
    found.ended(0.0, 0.5, 0.6 * 1.05)
    assert found.margin == pytest.approx(3.25 * 0.05)


def test_each_missed_answer_widens_it_by_a_twentieth_of_its_share():
    found = certain()
    answered(found, (0.8, 0.8), (0.8, 0.8), (0.8, 0.85), (0.8, 0.85), off=1.2)
    assert found._conformal == pytest.approx(0.02 + 0.05 / 2)


@pytest.mark.parametrize("slo_s", [1.0, 2.0])
@pytest.mark.parametrize(("late_s", "missed"), [(0.014, False), (0.016, True)])
def test_an_error_is_a_share_of_three_quarters_of_the_promise_at_least(slo_s, late_s, missed):
    found = certain(slo_s=slo_s)
    answered(found, (0.1, 0.1 + slo_s * late_s), off=1.2)
    assert (found._conformal > 0.02) == missed


@pytest.mark.parametrize("slo_s", [1.0, 2.0])
@pytest.mark.parametrize(("said", "counts"), [(0.5, 1.0), (0.251, 1.0), (0.248, 0.992), (0.025, 0.1)])
def test_a_short_answer_that_is_missed_counts_in_proportion(slo_s, said, counts):
    """Bursts on shared cores: each begins with a run of one query, which took 0.1 s for 0.02 s. Counted in full, ten of
    them held the margin at its most for an hour.
    """
    found = certain(slo_s=slo_s)
    answered(found, (slo_s * said, slo_s * (said + 0.1)), off=1.2)
    assert found._conformal == pytest.approx(0.02 + 0.05 * counts)


def test_what_the_run_explains_is_no_error():
    """The answer was late, its run took what was said: it had waited for others."""
    found = certain()
    answered(found, (0.6, 0.9), off=1.0)
    assert found._conformal == 0.02


def test_the_run_before_explains_a_late_answer_too():
    """By as much as both took longer: it waited for that one, and the second is over the limit of the other two."""
    found = certain()
    answered(found, off=1.02)
    found._doubt = (0.0, 0.0, 0.0)
    answered(found, (0.6, 0.62), off=1.02)
    assert found._conformal == pytest.approx(0.02 + 0.05)
    answered(found, (0.6, 0.62), off=1.0)
    found._conformal = 0.02
    answered(found, (0.6, 0.62), off=1.02)
    assert found._conformal == 0.02


@pytest.mark.parametrize("slo_s", [1.0, 2.0])
@pytest.mark.parametrize(("excess_s", "widens"), [(0.49, True), (0.51, False)])
def test_an_excess_of_half_the_promise_is_beyond_any_margin(slo_s, excess_s, widens):
    found = certain(slo_s=slo_s)
    took_s = 0.6 + excess_s * slo_s
    found.ended(0.0, 0.5, took_s, [(0.6, took_s)])
    assert (found._conformal > 0.02) == widens


@pytest.mark.parametrize("slo_s", [1.0, 2.0])
@pytest.mark.parametrize(("predicted_s", "shrinks"), [(0.24, False), (0.25, False), (0.26, True)])
def test_only_long_predictions_narrow_it(slo_s, predicted_s, shrinks):
    found = certain(slo_s=slo_s, conformal=0.2)
    answered(found, (slo_s * predicted_s, 0.0), (slo_s * predicted_s, 0.0))
    assert found._conformal == pytest.approx(0.2 - 0.05 * 0.003 * predicted_s * shrinks)


def test_errors_of_a_change_do_not_stay_in_the_margin():
    found = steady((0.5, 0.6), times=400)
    for _ in range(6):
        took_s = 1.6 * 0.6
        found.ended(0.0, 0.5, took_s, [(0.6, took_s)])
    assert found._conformal <= 0.02 + 0.05


def test_after_a_change_the_margin_is_no_wider_than_before():
    found = certain(conformal=0.1)
    for _ in range(2):
        found._doubt = (0.0, 0.0, 0.0)
        found.ended(0.0, 0.5, 0.8, [(0.6, 0.8)])
    assert found._conformal == 0.1


@pytest.mark.parametrize(("spread", "most"), [(0.04, 0.01), (0.1, 0.02)])
def test_the_share_that_it_does_not_cover_is_small(spread, most):
    draw, found, missed = random.Random(2), Predictor(planned_s=0.1, slo_s=1.0), 0
    for number in range(4000):
        said_s = found.seconds(0.5)
        took_s = 0.6 * draw.lognormvariate(0, spread)
        missed += number > 400 and said_s * (1 + found.margin) < took_s
        found.ended(0.0, 0.5, took_s, [(said_s, took_s)])
    assert missed / 3600 < most


def test_no_margin_is_wider_than_three_tenths():
    found = Predictor(planned_s=0.1, slo_s=1.0)
    for number in range(400):
        off = 1.45 if number % 2 else 0.9
        answered(found, (0.8, 0.8 * off), off=off)
    assert found.margin == module._MOST_MARGIN == 0.3
