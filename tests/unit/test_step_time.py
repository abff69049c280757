"""What a step takes, and the fit."""

import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from deployments.generation.scheduler.work import UNTIMED, Chunk, Copy, Scoring, Work, load_of

ACCELERATOR = StepTime(0.02, 1.4e-4, 2e-7, 1.4e-4, 6e-9, 128)
CPU = StepTime(0.06, 2e-3, 1e-6, 2.2e-3, 5e-8, 4)


def loads():
    for rows in (0, 1, 4, 16, 64, 256):
        for tokens in (0, 16, 128, 1024):
            if rows or tokens:
                yield StepLoad(rows, rows * 700).with_chunk(300 if tokens else 0, tokens)


def test_a_step_costs_what_the_formula_says():
    model = StepTime(1.0, 0.1, 0.01, 0.2, 0.001, 4)
    assert model.seconds(StepLoad(3, 50)) == pytest.approx(1.5)
    assert model.seconds(StepLoad(6, 50)) == pytest.approx(1.7)
    assert model.seconds(StepLoad(3, 50).with_chunk(10, 5)) == pytest.approx(1.5 + 4 * 0.2 + 5 * 12.5 * 0.001)
    assert model.seconds(StepLoad().with_chunk(0, 4)) == pytest.approx(1.0 + 8 * 0.001)
    assert model.seconds(StepLoad(3.5)) == 1.0  # on average, so many rows
    assert StepTime(1.0, 0.5, 0.0, 0.5, 0.0).seconds(StepLoad(1)) == 1.5


def test_a_token_of_a_prompt_whose_log_probability_is_wanted_costs_a_row():
    """Its logits are computed and read as an answer's are; its attention is a prompt's."""
    model = StepTime(1.0, 0.5, 0.01, 0.125, 0.001, 4)
    load = StepLoad(2, 50).with_chunk(10, 6, scored=True)
    assert load == StepLoad(8, 50, 0, 6 * 13)
    assert model.seconds(load) == pytest.approx(1.0 + 4 * 0.5 + 50 * 0.01 + 78 * 0.001)
    ids = np.zeros(6, np.int32)
    assert load_of([Chunk(ids, 10, (), scoring=Scoring(ids, 0))]) == StepLoad().with_chunk(10, 6, scored=True)
    within_s = model.seconds(load)
    assert model.most_tokens(StepLoad(2, 50), 10, 99, within_s, scored=True) == 6
    assert model.most_tokens(StepLoad(2, 50), 10, 99, within_s) > 6


def test_chunks_of_a_prompt_see_as_much_as_the_whole():
    parts = StepLoad().with_chunk(0, 30).with_chunk(30, 50)
    assert parts == StepLoad().with_chunk(0, 80)


@pytest.mark.parametrize("model", [ACCELERATOR, CPU])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_fit_finds_what_the_steps_were_made_of(model, noise):
    draw = random.Random(5)
    steps = [(load, model.seconds(load) * (1 + draw.gauss(0, noise))) for load in loads() for _ in range(4)]
    found = StepTime.fit(steps)
    for load in loads():
        assert found.seconds(load) == pytest.approx(model.seconds(load), rel=1e-6 if not noise else 0.05)


@pytest.mark.parametrize("knee", [0, 1, 3, 17, 129, 300])
@pytest.mark.parametrize("model", [ACCELERATOR, CPU])
def test_the_fit_finds_any_knee(model, knee):
    """Where rows cost other than tokens of prompts: else a knee of 1 is one of 0 and a lower `beta_s`."""
    model = replace(model, row_s=0.8 * model.row_s, knee=knee)
    steps = [(load, model.seconds(load)) for load in (*loads(), StepLoad().with_chunk(0, 5), StepLoad(512, 512 * 30))]
    assert astuple(StepTime.fit(steps)) == pytest.approx(astuple(model), rel=1e-6)


def test_of_knees_that_fit_as_well_it_is_the_least():
    assert StepTime.fit([(StepLoad(600), 1.0)]).knee == 0


def test_where_no_step_had_rows_behind_the_knee_a_row_costs_what_a_token_does():
    model = StepTime(0.02, 1e-4, 2e-7, 1.4e-4, 6e-9, 64)
    steps = [(load, model.seconds(load)) for load in loads() if load.rows < 64]
    assert astuple(StepTime.fit(steps)) == pytest.approx((0.02, 1.4e-4, 2e-7, 1.4e-4, 6e-9, 64), rel=1e-6)


def test_a_fit_looks_for_the_knee_more_and_more_closely(monkeypatch):
    tried, of_knee = [], StepTime._with_knee
    monkeypatch.setattr(StepTime, "_with_knee", lambda *given: tried.append(given[-1]) or of_knee(*given))
    model = replace(ACCELERATOR, row_s=1e-4, knee=100)
    assert StepTime.fit([(load, model.seconds(load)) for load in loads()]).knee == 100
    assert tried == [
        0, 4, 8, 16, 32, 64, 128, 256, 512,
        88, 112, 136, 160, 184, 208, 232,  # eight parts of what lies between 64 and 256
        93, 98, 103, 108, 113, 118, 123,  # and between 88 and 128
        94, 95, 96, 97, 99, 100, 101, 102,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "prompt", "within_s", "tokens"),
    [(0, 99, 2.0, 14), (0, 14, 2.0, 14), (0, 13, 2.0, 13), (4, 99, 2.0, 10), (6, 99, 2.2, 10), (6, 99, 1.2, 0)],
)
def test_the_most_tokens_of_a_prompt(rows, prompt, within_s, tokens):
    """A second, and a tenth for each row and token behind the first four."""
    model = StepTime(1.0, 0.1, 0.0, 0.1, 0.0, 4)
    assert model.most_tokens(StepLoad(rows), 0, prompt, within_s + 1e-9) == tokens


@pytest.mark.parametrize(("prompt", "within_s", "tokens"), [(99, 2.0, 6), (6, 2.0, 6), (99, 1.75, 5)])
def test_a_step_may_take_just_so_long(prompt, within_s, tokens):
    """Exact numbers: half a second for each token behind the first four."""
    assert StepTime(1.0, 0.5, 0.0, 0.5, 0.0, 4).most_tokens(StepLoad(), 0, prompt, within_s) == tokens


def test_a_piece_of_one_token_is_a_row():
    assert StepLoad().with_piece(9, 1) == StepLoad(1, 10)
    assert StepLoad(1, 10).with_piece(9, 2) == StepLoad(1, 10, 2, 20)


def test_the_load_of_what_a_schedule_asks_for():
    row, chunk = (Chunk(np.zeros(tokens, np.int32), start, ()) for start, tokens in ((9, 1), (2, 4)))
    assert load_of([row, chunk]) == StepLoad(1, 10, 4, 16)
    assert (row.end, chunk.end, chunk.wanted, chunk.on_host) == (10, 6, True, False)
    assert Copy(1, 2) == (1, 2, False, False)
    assert Work([row]) == ([row], (), (), (), (), False)
    assert UNTIMED == (0.0, 0.0)


def test_linear_layers_and_attention():
    model, load = StepTime(1.0, 0.5, 0.25, 0.125, 2.0, 4), StepLoad(6, 8).with_chunk(2, 4)
    assert (model.linear_s(load), model.attention_s(load)) == (1.0 + 2 * 0.5 + 4 * 0.125, 8 * 0.25 + 16 * 2.0)
    assert model.linear_s(StepLoad(3, 0, 5)) == 1.0 + 4 * 0.125
    assert HostTime(0.5, 0.25).seconds(2, 8) == 3.0
    assert HostTime(0.5, 0.25) == HostTime(0.5, 0.25, 0.0, 1)


def test_a_fit_needs_steps():
    with pytest.raises(ValueError, match="at least one"):
        StepTime.fit([])
    with pytest.raises(ValueError, match="at least one"):
        HostTime.fit([], [(128, 1.0)], 4)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fit_of_a_host_finds_what_it_was_made_of(noise):
    truth, draw = HostTime(8e-5, 3e-6, 4e-5, 32), random.Random(3)
    loads = [StepLoad(rows, rows * tokens) for rows in (1, 4, 16, 64) for tokens in (32, 500, 2000)]
    attention = [(load, truth.seconds(*load[:2]) * (1 + draw.gauss(0, noise))) for load in loads]
    copies = [(tokens, tokens * 4e-5 * (1 + draw.gauss(0, noise))) for tokens in (0, 256, 1024, 4096)]
    found = HostTime.fit(attention, copies, 32)
    assert astuple(found) == pytest.approx(astuple(truth), rel=1e-6 if not noise else 0.25)
    for load in loads:
        assert found.seconds(*load[:2]) == pytest.approx(truth.seconds(*load[:2]), rel=1e-6 if not noise else 0.05)


def test_a_copied_token_takes_its_share():
    assert HostTime.fit([(StepLoad(1, 9), 0.1)], [(1, 0.5)], 4).copy_token_s == 0.5
    assert HostTime.fit([(StepLoad(1, 9), 0.1)], [], 4).copy_token_s == 0


def test_copies_that_seem_to_save_time_cost_nothing():
    assert HostTime.fit([(StepLoad(1, 9), 0.1)], [(256, -0.1)], 4).copy_token_s == 0


@pytest.mark.parametrize("model", [ACCELERATOR, CPU])
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 200), st.integers(0, 4000), st.integers(1, 4000), st.floats(0, 2))
def test_as_many_tokens_as_fit(model, rows, start, tokens, within_s):
    load = StepLoad(rows, 500 * rows)
    found = model.most_tokens(load, start, tokens, within_s)
    assert 0 <= found <= tokens
    assert not found or model.seconds(load.with_chunk(start, found)) <= within_s
    assert found == tokens or model.seconds(load.with_chunk(start, found + 1)) > within_s
