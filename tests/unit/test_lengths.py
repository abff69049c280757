"""What a query costs by its length: on devices that are formulas, through HTTP as a client sees it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.fit.curve import Curve
from calibration.fit.latency_model import Sample
from calibration.fit.lengths import fit_cost, next_concurrency, other_lengths

TOKENS = 75
V100 = Curve(0.018, 0.27)
SHARES = {  # of alpha: for the query, its tokens, and their square
    "in proportion": (0, 1, 0),
    "the same for all": (1, 0, 0),
    "of each some": (0.2, 0.7, 0.1),
    "attention": (0, 0.6, 0.4),
}


def seconds(line, shares, tokens):
    return line.alpha_s * sum(share * (tokens / TOKENS) ** power for power, share in enumerate(shares))


def measured(line, shares, depth, lengths=(10, 225), most=2048, noise=lambda: 1.0):
    samples = {}
    for length in lengths:
        own = samples[length] = []
        while (level := next_concurrency(own, length / TOKENS, line, depth, most)) is not None:
            assert level <= most
            taken_s = (line.beta_s + level * seconds(line, shares, length)) * noise()
            own.append(Sample(level, taken_s))
    return samples


@pytest.mark.parametrize(
    ("tokens", "most_tokens", "lengths"),
    [
        *[(75, 512, [10, 225]), (75, 200, [10, 200]), (75, 75, [10]), (10, 512, [30]), (200, 256, [10]), (3, 3, [])],
        *[(15, 22, []), (16, 24, [10]), (16, 25, [10, 25])],  # alike: at most one and a half times as long
    ],
)
def test_a_short_and_a_long_length_that_the_model_takes(tokens, most_tokens, lengths):
    assert other_lengths(tokens, most_tokens) == lengths


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("line", [V100, Curve(0.00904, 0.24), Curve(0.0752, 0.85)], ids=["V100", "Atlas", "Kunpeng"])
def test_the_cost_of_a_device_is_found(line, shares):
    samples = measured(line, shares, line.depth(2.0))
    cost = fit_cost(samples, line, TOKENS)
    for tokens in (10, 40, TOKENS, 150, 225, 500):
        assert cost.cost(tokens) == pytest.approx(seconds(line, shares, tokens), rel=1e-3)
    assert cost.cost(TOKENS) == pytest.approx(line.alpha_s, rel=1e-9)
    unmeasured = fit_cost({10: [], 225: []}, line, TOKENS)
    assert unmeasured.cost(150) == pytest.approx(2 * line.alpha_s)


def test_with_noise_and_a_slow_burst_it_is_near():
    for seed in range(20):
        chance = np.random.default_rng(seed)
        samples = measured(V100, SHARES["of each some"], 96, noise=lambda by=chance: 1 + 0.03 * by.standard_normal())
        slow = samples[225][-1]
        samples[225][-1] = Sample(slow.concurrency, 3 * slow.latency_s)
        cost = fit_cost(samples, V100, TOKENS)
        for tokens in (10, 225):
            assert cost.cost(tokens) == pytest.approx(seconds(V100, SHARES["of each some"], tokens), rel=0.2)


@pytest.mark.parametrize(
    ("found", "times", "depth", "most", "level"),
    [
        ([], 3.0, 96, 2048, 16),  # half of the depth's work
        ([], 0.1, 96, 2048, 48),  # a short query may cost as much
        ([], 3.0, 1, 2048, 1),
        ([(48, 2)], 0.1, 96, 2048, 24),  # each cost twice alpha
        ([(48, 0.5)], 0.1, 96, 2048, 96),
        ([(48, 0.1)], 0.1, 96, 2048, 288),  # six times the burst before
        ([(48, 0.1)], 0.1, 96, 200, 200),
        ([(500, 0)], 0.1, 96, 2048, 960),  # it counts as a twentieth
        ([(48, 200)], 0.1, 96, 2048, 1),
        ([(1, 0.5)], 0.1, 1, 2048, 2),  # of a depth of one all of its work
        ([(48, 2), (24, 1)], 0.1, 96, 2048, 24),  # as the first one said
        ([(48, 2), (24, 2), (24, 2)], 0.1, 96, 2048, None),
    ],
)
def test_what_is_sent_of_another_length(found, times, depth, most, level):
    """`found`: queries, and what each cost, times alpha."""
    assert next_concurrency([], times, Curve(0.0, 0.5), depth, most) is None  # nothing to learn
    line = Curve(0.015625, 0.25)  # exact in floats
    samples = [Sample(count, line.beta_s + count * cost * line.alpha_s) for count, cost in found]
    assert next_concurrency(samples, times, line, depth, most) == level


@pytest.mark.parametrize(("tokens", "cost", "counts_as"), [(50, 0.3, 0.3), (10, 0.02, 0.05)])
def test_errors_weigh_by_their_share_of_the_cost_and_of_a_twentieth_of_alpha_at_least(tokens, cost, counts_as):
    """A share q for the query itself brings the one length nearer to its cost, and the other away from it."""
    samples = {tokens: [Sample(1, cost)], 200: [Sample(1, 4.2)]}
    squared = np.array([(tokens / 100) ** 2, 4.0])
    weights = 1 / np.array([counts_as, 4.2])
    slopes, wanted = (1 - squared) * weights, (np.array([cost, 4.2]) - squared) * weights
    q = slopes @ wanted / (slopes @ slopes)
    found = fit_cost(samples, Curve(1.0, 0.0), 100)
    assert (found.query_s, found.token_s, 100**2 * found.token2_s) == pytest.approx((q, 0, 1 - q), rel=1e-4)


SAMPLES = st.dictionaries(
    st.sampled_from([10, 225]),
    st.lists(st.builds(Sample, st.integers(1, 500), st.floats(1e-3, 100)), min_size=1),
    min_size=1,
)


@settings(max_examples=100, deadline=None)
@given(SAMPLES, st.floats(1e-5, 0.2), st.floats(0, 1))
def test_whatever_was_measured_no_part_is_negative_and_eq_12_stays_true(samples, alpha_s, beta_s):
    cost = fit_cost(samples, Curve(alpha_s, beta_s), TOKENS)
    assert min(cost.query_s, cost.token_s, cost.token2_s) >= 0
    assert cost.cost(TOKENS) == pytest.approx(alpha_s)
