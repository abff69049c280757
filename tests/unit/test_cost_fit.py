"""Costs of lengths, fitted to a device's own runs."""

import random
from dataclasses import astuple

import numpy as np
import pytest

from deployments.embedding.scheduler.cost_model import CostFit, CostModel

TRUE = CostModel.of_curve(0.018, 0.27)
BY_COUNT, BY_SQUARE = CostModel(0.018, 0.0, 0.0, 0.27), CostModel(0.0, 0.0, 0.018 / 75**2, 0.27)


def after(model, runs, *, lengths=(4, 30, 75, 200, 512), noise=0.0, true=TRUE):
    """The model after so many runs of one to twenty queries of any of these lengths."""
    draw, fit = random.Random(3), CostFit()
    for _ in range(runs):
        run = draw.choices(lengths, k=draw.randint(1, 20))
        model = fit.ended(model, run, (true.beta_s + true.work(run)) * (1 + draw.gauss(0, noise)))
    return model


def shape(model):
    return [model.cost(tokens) / model.cost(75) for tokens in (30, 300, 512)]


@pytest.mark.parametrize("wrong", [BY_COUNT, BY_SQUARE])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_wrong_shape_is_mended_by_the_first_runs(wrong, noise):
    assert after(wrong, 31) == wrong
    assert shape(after(wrong, 64, noise=noise)) == pytest.approx(shape(TRUE), rel=0.2)
    assert shape(after(wrong, 320, noise=noise)) == pytest.approx(shape(TRUE), rel=0.1)


@pytest.mark.parametrize(("noise", "times"), [(0.0, 1.0), (0.03, 1.0), (0.0, 1.6)])
def test_a_right_shape_stays(noise, times):
    """Also where all takes longer: that is the predictor's business."""
    true = CostModel(0.0, times * TRUE.token_s, 0.0, times * 0.27)
    assert shape(after(TRUE, 400, noise=noise, true=true)) == pytest.approx(shape(TRUE), rel=0.06)


def drawn(count, shares=(1, 1, 1)):
    """Runs of one to twenty queries of three lengths."""
    draw = random.Random(3)
    return [draw.choices((4, 75, 512), shares, k=draw.randint(1, 20)) for _ in range(count)]


def taught(model, runs, true=TRUE):
    """The model by the last of these runs of a device; each is told of the same one before."""
    fit = CostFit()
    return [fit.ended(model, run, true.beta_s + true.work(run)) for run in runs][-1]


def test_the_work_of_the_runs_stays_as_it_was():
    quick, model, runs = CostModel(0.0, 2e-8, 0.0, 3e-5), CostModel(2e-6, 0.0, 0.0, 3e-5), drawn(32)
    found = taught(model, runs, quick)
    assert found != model
    assert sum(map(found.work, runs)) == pytest.approx(sum(map(model.work, runs)))
    assert found.beta_s == model.beta_s


def test_every_32nd_run_is_fitted_to():
    fit = CostFit()
    found = [fit.ended(BY_COUNT, run, TRUE.beta_s + TRUE.work(run)) != BY_COUNT for run in drawn(100)]
    assert [number for number, is_new in enumerate(found, 1) if is_new] == [32, 64, 96]


def test_a_fit_needs_32_runs_since_a_change():
    fit, found = CostFit(), []
    for number, run in enumerate(drawn(48)):
        if number == 16:
            fit.forget()
        found.append(fit.ended(BY_COUNT, run, TRUE.beta_s + TRUE.work(run)) != BY_COUNT)
    assert found == [False] * 47 + [True]


@pytest.mark.parametrize(("odd", "fitted_at", "counts"), [(1, 128, True), (32, 160, False), (33, 160, True)])
def test_the_latest_128_runs_count(odd, fitted_at, counts):
    """One of them alone had long queries."""
    runs = [[75] * (1 + number % 20) for number in range(fitted_at)]
    runs[odd - 1] = [512] * 20
    assert (taught(BY_COUNT, runs) != BY_COUNT) == counts


def test_the_costs_in_force_weigh_a_tenth_of_a_run():
    """The normal equations of least squares. Of a run that takes 1, R has its queries, their tokens, these squared, and
    1; S the share of the mean run that each cost takes, times 0.1: R' R x + S S x = R' 1 + S S x0.
    """
    model, true, runs = CostModel(0.01, 1e-4, 1e-7, 0.2), CostModel(0.02, 3e-4, 4e-7, 0.3), drawn(32)
    seconds = np.array([true.beta_s + true.work(run) for run in runs]) * np.tile([1.01, 0.99], 16)
    sums = np.array([(len(run), sum(run), sum(one**2 for one in run), 1.0) for run in runs])
    rows, costs = sums / seconds[:, None], np.array([model.query_s, model.token_s, model.token2_s])
    by_work = np.stack([rows[:, :3] @ costs, rows[:, 3]], axis=1)
    slope, beta_s = np.linalg.lstsq(by_work, np.ones(32), rcond=None)[0]
    weights = np.diag(np.square(0.1 * rows.mean(axis=0)))
    in_force = weights @ [*slope * costs, beta_s]
    expected = np.linalg.solve(rows.T @ rows + weights, rows.T @ np.ones(32) + in_force)
    assert (expected > 0).all()
    fit = CostFit()
    found = [fit.ended(model, run, took_s) for run, took_s in zip(runs, seconds, strict=True)][-1]
    by_fit = np.array([found.query_s, found.token_s, found.token2_s])
    assert by_fit / by_fit[1] == pytest.approx(expected[:3] / expected[1], rel=1e-6)


@pytest.mark.parametrize(
    ("tokens", "shares", "right", "wrong"),
    [
        (8, (1, 1, 1), CostModel(1e-4, 2e-4, 0.0, 0.3), CostModel(1e-2, 2e-4, 0.0, 0.3)),
        (75, (1, 1, 1), CostModel(1e-2, 1e-4, 1e-6, 0.3), CostModel(1e-2, 5e-4, 1e-6, 0.3)),
        (512, (1, 20, 1), CostModel(3e-3, 2e-4, 1e-9, 0.3), CostModel(3e-3, 2e-4, 1e-5, 0.3)),
    ],
)
def test_a_model_is_another_where_a_cost_differs_by_three_per_cent(tokens, shares, right, wrong):
    """Of a query of 8, 75 or 512 tokens. Between the right costs and the wrong ones lie those in force from which the
    fit is another model: there, the cost of these tokens differs by just so much.
    """
    runs, low, high = drawn(32, shares), 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        parts = zip(astuple(right), astuple(wrong), strict=True)
        model = CostModel(*[(1 - middle) * a + middle * b for a, b in parts])
        if (found := taught(model, runs, right)) == model:
            low = middle
        else:
            high, differs = middle, {one: abs(found.cost(one) / model.cost(one) - 1) for one in (8, 75, 512)}
    assert differs[tokens] == max(differs.values()) == pytest.approx(0.03, rel=1e-6)


def test_where_runs_show_nothing_beside_their_work_the_model_stays():
    assert taught(BY_COUNT, drawn(32), CostModel(0.0, 2e-4, 0.0, 0.0)) == BY_COUNT


def test_where_runs_show_no_work_the_model_stays():
    """The slope of runs that all take the same is 0 or a rounding error, by which another model was found."""
    for most in range(2, 20):
        runs = [[75] * (1 + number % most) for number in range(32)]
        assert taught(BY_COUNT, runs, CostModel(0.0, 0.0, 0.0, 0.017)) == BY_COUNT


@pytest.mark.parametrize("lengths", [(75,), (512,), (8,)])
def test_one_length_says_nothing_of_others(lengths):
    assert shape(after(BY_COUNT, 400, lengths=lengths)) == pytest.approx(shape(BY_COUNT), rel=0.05)


def test_a_model_without_costs_stays():
    nothing = CostModel(0.0, 0.0, 0.0, 0.1)
    assert after(nothing, 64) == nothing


def test_runs_from_before_a_change_say_nothing_of_lengths():
    """It becomes twice as slow, and its runs shorter: the work of many queries seems to cost more."""
    model, draw, fit = TRUE, random.Random(5), CostFit()
    for number in range(96):
        if number == 64:
            fit.forget()
        run = draw.choices((4, 75, 512), k=20 if number < 64 else 6)
        model = fit.ended(model, run, (1 + (number >= 64)) * (0.27 + TRUE.work(run)))
        assert shape(model) == pytest.approx(shape(TRUE), rel=0.01)
