"""Costs of lengths, fitted to a device's own runs."""

import random

import pytest

from deployments.embedding.scheduler.cost_fit import CostFit
from deployments.embedding.scheduler.cost_model import CostModel

TRUE = CostModel.of_curve(0.018, 0.27)
BY_COUNT, BY_SQUARE = CostModel(0.018, 0.0, 0.0, 0.27), CostModel(0.0, 0.0, 0.018 / 75**2, 0.27)


def after(model, runs, *, lengths=(4, 30, 75, 200, 512), noise=0.0, true=TRUE):
    """The model after so many runs of one to twenty queries of any of these lengths."""
    draw, fit = random.Random(3), CostFit()
    for _ in range(runs):
        run = draw.choices(lengths, k=draw.randint(1, 20))
        model = fit.ended(model, run, (true.beta_s + true.work_s(run)) * (1 + draw.gauss(0, noise)))
    return model


def shape(model):
    return [model.cost_s(tokens) / model.cost_s(75) for tokens in (30, 300, 512)]


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


def test_the_work_of_the_runs_stays_as_it_was():
    draw, fit, model, runs = random.Random(3), CostFit(), BY_COUNT, []
    for _ in range(32):
        runs.append(draw.choices((4, 75, 512), k=9))
        model = fit.ended(model, runs[-1], 0.27 + TRUE.work_s(runs[-1]))
    assert sum(map(model.work_s, runs)) == pytest.approx(sum(map(BY_COUNT.work_s, runs)))
    assert model.beta_s == BY_COUNT.beta_s


@pytest.mark.parametrize("lengths", [(75,), (512,), (8,)])
def test_one_length_says_nothing_of_others(lengths):
    assert shape(after(BY_COUNT, 400, lengths=lengths)) == pytest.approx(shape(BY_COUNT), rel=0.05)


def test_a_model_without_costs_stays():
    nothing = CostModel(0.0, 0.0, 0.0, 0.1)
    assert after(nothing, 64) == nothing


def test_only_the_latest_runs_count():
    fit, model = CostFit(), TRUE
    for true in (BY_SQUARE, TRUE):
        draw = random.Random(4)
        for _ in range(256):
            run = draw.choices((4, 75, 512), k=9)
            model = fit.ended(model, run, 0.27 + true.work_s(run))
    assert shape(model) == pytest.approx(shape(TRUE), rel=0.1)


def test_runs_from_before_a_change_say_nothing_of_lengths():
    """It becomes twice as slow, and its runs shorter: the work of many queries seems to cost more."""
    model, draw, fit = TRUE, random.Random(5), CostFit()
    for number in range(96):
        if number == 64:
            fit.forget()
        run = draw.choices((4, 75, 512), k=20 if number < 64 else 6)
        model = fit.ended(model, run, (1 + (number >= 64)) * (0.27 + TRUE.work_s(run)))
        assert shape(model) == pytest.approx(shape(TRUE), rel=0.01)
