"""Which tokens may come, beside the transformers library's own rules, and how often each does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deployments.generation.text.sampling import Sampler, Sampling, candidates, log_shares

RANDOM = np.random.default_rng(0)


def logits_of(words, spread=3.0):
    return (RANDOM.standard_normal(words) * spread).astype(np.float32)


def allowed(logits, asked):
    """By transformers: token -> share."""
    scores = torch.from_numpy(logits)[None].double()
    rules = [TemperatureLogitsWarper(asked.temperature)]
    rules += [MinPLogitsWarper(asked.min_p)] if asked.min_p else []
    rules += [TopKLogitsWarper(asked.top_k)] if asked.top_k else []
    rules += [TopPLogitsWarper(asked.top_p)] if asked.top_p < 1 else []
    for rule in rules:
        scores = rule(None, scores)
    shares = scores.softmax(-1)[0].numpy()
    return {token: shares[token] for token in np.flatnonzero(shares)}


@settings(max_examples=60, deadline=None)
@given(
    words=st.sampled_from([3, 50, 3000, 20_000]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 2500]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5]),
)
def test_the_same_tokens_may_come_as_by_transformers(words, temperature, top_k, top_p, min_p):
    asked, logits = Sampling(temperature, top_k, top_p, min_p=min_p), logits_of(words)
    tokens, shares = candidates(logits, asked)
    wanted = allowed(logits, asked)
    tokens, shares = tokens[shares > 0], shares[shares > 0]
    assert set(tokens.tolist()) == set(wanted)
    np.testing.assert_allclose(shares / shares.sum(), [wanted[token] for token in tokens.tolist()], rtol=1e-6)


def test_zero_is_the_likeliest():
    logits = logits_of(1000)
    assert Sampler(Sampling(temperature=0, seed=3)).pick(logits) == logits.argmax()


def test_tokens_come_as_often_as_they_are_likely():
    logits, sampler = logits_of(6, 1.0), Sampler(Sampling(seed=1))
    times = np.bincount([sampler.pick(logits) for _ in range(20_000)], minlength=6) / 20_000
    np.testing.assert_allclose(times, np.exp(log_shares(logits)), atol=0.015)


@pytest.mark.parametrize("asked", [Sampling(seed=5), Sampling(0.7, 40, 0.9, 5)])
def test_a_seed_says_all_and_each_answer_has_its_own(asked):
    each = [logits_of(500, 1.0) for _ in range(20)]
    once, again, other = (Sampler(asked, number) for number in (0, 0, 1))
    picked = [once.pick(logits) for logits in each]
    assert picked == [again.pick(logits) for logits in each]
    assert picked != [other.pick(logits) for logits in each]
    negative = Sampler(replace(asked, seed=-5))
    assert picked != [negative.pick(logits) for logits in each]


def test_log_shares():
    logits = logits_of(5000)
    np.testing.assert_allclose(log_shares(logits), torch.from_numpy(logits).log_softmax(-1).numpy(), atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-300, 5e-324])
def test_a_temperature_next_to_nothing_is_the_likeliest_token(temperature):
    logits = logits_of(100, 300.0)
    assert Sampler(Sampling(temperature)).pick(logits) == logits.argmax()
