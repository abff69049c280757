"""What a query costs by its tokens, the fit, and the paper's depths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.admission.least_squares import non_negative
from deployments.embedding.scheduler.cost_model import CostModel

RUNS = [([75], 1), ([75] * 16, 1), ([250] * 4, 1), ([10] * 32, 1), ([75] * 64, 1), ([500] * 2, 1), ([500] * 20, 1)]


def taken(model, noise=()):
    noise = noise or [1.0] * len(RUNS)
    return [
        (tokens, factor * (model.beta_s + sum(map(model.cost, tokens))))
        for (tokens, _), factor in zip(RUNS, noise, strict=True)
    ]


@pytest.mark.parametrize("alpha_s", [0.0, 0.018])
def test_alpha_is_the_cost_of_75_tokens(alpha_s):
    model = CostModel.of_curve(alpha_s, 0.27)
    assert model.alpha_s == model.cost(75) == pytest.approx(alpha_s)
    assert CostModel(0.01, 1e-4, 1e-6, 0.1).cost(100) == pytest.approx(0.01 + 0.01 + 0.01)


@pytest.mark.parametrize(
    "model",
    [
        CostModel(0.0, 2.4e-4, 0.0, 0.27),
        CostModel(0.003, 2.4e-4, 0.0, 0.03),
        CostModel(0.0, 1e-4, 4e-7, 0.1),
        CostModel(0.002, 1e-4, 4e-7, 0.1),
        CostModel(0.0, 1e-4, 0.0, 0.0),
    ],
)
def test_the_fit_finds_what_the_runs_were_made_of(model):
    found = CostModel.fit(taken(model))
    for name in ("query_s", "token_s", "token2_s", "beta_s"):
        assert getattr(found, name) == pytest.approx(getattr(model, name), rel=1e-5, abs=1e-9), name


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=len(RUNS), max_size=len(RUNS)))
def test_no_coefficient_is_negative_whatever_was_measured(noise):
    found = CostModel.fit(taken(CostModel(0.001, 2e-4, 1e-7, 0.05), noise))
    assert min(found.query_s, found.token_s, found.token2_s, found.beta_s) >= 0
    assert found.alpha_s + found.beta_s > 0


def test_one_run_is_enough_and_none_is_not():
    found = CostModel.fit([([75] * 4, 0.4)])
    assert found.beta_s + 4 * found.alpha_s == pytest.approx(0.4)
    with pytest.raises(ValueError, match="at least one run"):
        CostModel.fit([])


def test_a_query_costs_something_where_all_runs_took_the_same():
    found = CostModel.fit([([75] * count, 0.4) for count in (1, 2, 4, 8)])
    assert (found.alpha_s, found.beta_s) == (pytest.approx(0.4 / 8), pytest.approx(0.4))


def test_a_run_that_took_no_time_is_no_error():
    assert CostModel.fit([([75], 0.0)]).cost(75) < 1e-6


@pytest.mark.parametrize(
    ("columns", "wanted", "coefficients"),
    [
        ([[1, 0], [2, 0]], [2, 4], [2, 0]),  # what was never varied is 0
        ([[1, 1], [1, 2]], [2, 1], [1.5, 0]),  # together the second would be -1
        ([[1, 1], [1, 1.02]], [1.1, 1.0], [1.05, 0]),  # and by itself it fits less well
        ([[1, 1], [2, 1], [3, 1]], [2, 3, 4], [1, 1]),
    ],
)
def test_the_best_without_a_negative_coefficient(columns, wanted, coefficients):
    assert non_negative(np.array(columns, float), np.array(wanted, float)) == pytest.approx(coefficients)
