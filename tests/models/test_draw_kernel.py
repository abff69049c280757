"""The kernel that draws tokens, beside the definition: how often each token comes, and which may come."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.generation.kernels import native
from deployments.generation.kernels.draw_kernel import HostLogits
from deployments.generation.text.logit_rules import rules_of
from deployments.generation.text.sampling import RowSamplers, Sampler, Sampling

built = pytest.mark.skipif(native.library("token_draws") is None, reason="not built: python setup.py build_ext")
ALMOST_ONE = 1 - 2**-53
LARGE = 24.3  # chi-squared of 7 degrees of freedom exceeds it once in a thousand
OPTIONS = [
    Sampling(),
    Sampling(0.5),
    Sampling(2.0, top_k=5),
    Sampling(top_p=0.9),
    Sampling(1.5, 6, 0.8),
    Sampling(min_p=0.1),
    Sampling(2.0, 7, 0.95, min_p=0.2),
]


class Fixed(Sampler):
    """Its random number is given."""

    def __init__(self, asked, random):
        super().__init__(asked)
        self._fixed = random

    def random(self):
        return self._fixed


def drawn(logits, samplers):
    picked = HostLogits(logits).pick([RowSamplers([sampler], None) for sampler in samplers])
    return [one.id for (one,) in picked]


def kept(logits, asked):
    """By the definition: the tokens that may come, sorted, equal ones in the vocabulary's order; and their shares."""
    least = max(logits) + np.float32(asked.below)
    order = sorted((token for token in range(len(logits)) if logits[token] >= least), key=lambda token: -logits[token])
    order = order[: asked.top_k or len(order)]
    shares = [math.exp((float(logits[token]) - float(max(logits))) / asked.temperature) for token in order]
    count, total = 0, 0.0
    while count < len(order) and (asked.top_p >= 1 or total < asked.top_p * math.fsum(shares)):
        total += shares[count]
        count += 1
    return order[:count], shares[:count]


@built
@pytest.mark.parametrize("asked", OPTIONS, ids=str)
def test_tokens_come_as_often_as_by_the_definition(asked):
    logits = np.array([0.3, -1.0, 1.2, 0.3, -2.5, 0.9, -0.2, 0.3], np.float32)
    tokens, shares = kept(logits, asked)
    sampler, times = Sampler(Sampling(**{**vars_of(asked), "seed": 4})), 8000
    counts = np.bincount(drawn(np.tile(logits, (times, 1)), [sampler] * times), minlength=8)
    wanted = np.zeros(8)
    wanted[tokens] = np.array(shares) / sum(shares) * times
    assert not counts[wanted == 0].any()
    likely = wanted > 0
    assert (np.square(counts - wanted)[likely] / wanted[likely]).sum() < LARGE


def vars_of(asked):
    return {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p", "min_p")}


@built
@settings(max_examples=150, deadline=None)
@given(
    logits=st.one_of(
        st.lists(st.integers(-4, 4), min_size=1, max_size=300).map(lambda found: np.array(found, np.float32)),
        st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=300).map(lambda found: np.array(found, np.float32)),
        st.tuples(st.integers(0, 2**32), st.sampled_from([1e-3, 1.0, 5.0]), st.integers(1, 3000)).map(
            lambda of: (np.random.default_rng(of[0]).standard_normal(of[2]) * of[1]).astype(np.float32).round(2)
        ),
    ),
    temperature=st.sampled_from([0.1, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 10, 100]),
    top_p=st.sampled_from([0.0123, 0.4321, 0.9123, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.0321]),
)
def test_the_tokens_that_may_come_are_those_of_the_definition(logits, temperature, top_k, top_p, min_p):
    asked = Sampling(temperature, top_k, top_p, min_p=min_p)
    if not 0 < top_k < len(logits) and top_p >= 1:
        return  # all may come, in the vocabulary's order
    tokens, shares = kept(logits, asked)
    upto = np.cumsum(shares) / math.fsum(shares)
    middles = np.concatenate([[0.0], (upto[:-1] + upto[1:]) / 2, [ALMOST_ONE]])  # one within each token's part
    each = [tokens[min(int(np.searchsorted(upto, middle, side="right")), len(tokens) - 1)] for middle in middles]
    found = drawn(np.tile(logits, (len(middles), 1)), [Fixed(asked, random) for random in middles])
    likely = np.array(shares)[[tokens.index(token) for token in each]] > 1e-12 * sum(shares)
    assert [token for token, is_likely in zip(found, likely, strict=True) if is_likely] == [
        token for token, is_likely in zip(each, likely, strict=True) if is_likely
    ]


def samplers_of(count):
    asked = [Sampling(**{**vars_of(OPTIONS[at % len(OPTIONS)]), "seed": at}) for at in range(count)]
    return [
        RowSamplers([Sampler(one, 0, (), rules_of(one, np.zeros(1, np.int32), ()))], at % 4)
        for at, one in enumerate(asked)
    ]


@pytest.mark.parametrize("is_built", [True, False])
def test_a_seed_gives_the_same_tokens_in_any_batch_and_on_any_threads(monkeypatch, is_built):
    if not is_built:
        monkeypatch.setattr(native, "library", lambda _: None)
    logits = np.random.default_rng(0).standard_normal((24, 5000)).astype(np.float32)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(HostLogits(logits).pick(samplers_of(24)))
    finally:
        torch.set_num_threads(threads)
    alone = [HostLogits(row[None]).pick([of])[0] for row, of in zip(logits, samplers_of(24), strict=True)]
    assert found == [alone, alone]


def test_a_row_without_finite_logits_has_no_tokens_and_others_have():
    logits = np.zeros((4, 100), np.float32)
    logits[0], logits[1, 3], logits[2, 7] = -np.inf, np.nan, np.inf
    asked = Sampling(0.0, logit_bias=((5, 9.0),))
    samplers = [RowSamplers([Sampler(asked, rules=rules_of(asked, np.zeros(0, np.int32), ()))], None) for _ in range(4)]
    *broken, (good,) = HostLogits(logits).pick(samplers)
    assert (broken, good.id) == ([None, None, None], 5)
    assert HostLogits(logits[:0]).pick([]) == []
    with pytest.raises(ValueError, match="4 rows of logits, and how to draw from 0"):
        HostLogits(logits).pick([])
