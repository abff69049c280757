"""What is learned of answers' lengths, and the blocks that are foreseen by it."""

import math
import random
from math import sqrt

import pytest

from deployments.generation.scheduler import answer_lengths
from deployments.generation.scheduler.answer_lengths import AnswerLengths
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of

LIVES = 20 / 21  # the share that outlives a bin in which one answer has ended, beside the 20 that are thought not to
SURE = 3.5 * sqrt(LIVES * (1 - LIVES))  # standard deviations of one such answer
LONGEST = 128 * 32  # tokens that are told apart


@pytest.fixture
def few(monkeypatch):
    """Few answers were seen, so that nothing is thought of the lengths that nobody had."""
    monkeypatch.setattr(answer_lengths, "_PRIOR_ANSWERS", 20.0)
    monkeypatch.setattr(answer_lengths, "_FEW", math.inf)


def learned(*ended, goes_on=()):
    """From answers that went on, then from those that ended: (tokens, of so many that it might have) each."""
    found = AnswerLengths()
    for tokens in goes_on:
        found.goes_on(tokens)
    for one in ended:
        found.ended(*one)
    return found


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("ended", "goes_on", "most_tokens", "mean"),
    [
        ([], [], 500, 500),
        ([(10, 500)], [], 64, 32 + 32 * LIVES),
        ([(31, 500)], [], 64, 32 + 32 * LIVES),
        ([(32, 500)], [], 64, 64),  # it lived longer than the first 32 tokens
        ([(32, 500)], [], 96, 64 + 32 * LIVES),
        ([(63, 64)], [], 96, 64 + 32 * LIVES),
        ([(64, 64)], [], 128, 128),  # it was cut off
        ([(10, 500), (10, 500)], [], 64, 32 + 32 * (1 - 1.99 / 21.99)),  # the first one has faded by a hundredth
        ([(10, 500), (500, 500)], [], 64, 32 + 32 * (1 - 0.99 / 20.99)),
        ([(10, 500)], [32], 64, 32 + 32 * (1 - 1 / 21.99)),
        ([(10, 500)], [31, 33], 64, 32 + 32 * LIVES),  # only whole bins are counted
        ([(40, 500)], [64], 96, 64 + 32 * (1 - 1 / 21.99)),
        ([(10, 500), (40, 500)], [], 96, 32 + 32 * (1 - 0.99 / 20.99) * (1 + LIVES)),
        ([(LONGEST - 1, 9999)], [], LONGEST + 32, LONGEST + 32 * LIVES),
        ([(LONGEST - 1, 9999)], [LONGEST], LONGEST + 32, LONGEST + 32 * (1 - 1 / 21.99)),
        ([(LONGEST, 9999)], [LONGEST + 32], LONGEST + 64, LONGEST + 64),
    ],
)
def test_the_mean_of_what_was_seen(ended, goes_on, most_tokens, mean):
    assert learned(*ended, goes_on=goes_on).mean(most_tokens) == pytest.approx(mean)


@pytest.mark.usefixtures("few")
def test_an_answer_that_goes_on_counts_at_once():
    found = learned((10, 500))
    found.goes_on(32)
    assert found.mean(64) == pytest.approx(32 + 32 * (1 - 1 / 22))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("tokens", "lefts", "lengths", "blocks"),
    [
        ([0], [500], [99], 5 * (LIVES + SURE)),
        ([0] * 9, [500] * 9, [99] * 9, 5 * (9 * LIVES + 3 * SURE)),
        ([0], [32], [96], 1),  # it has all by the first time ahead
        ([0], [32], [97], 2),
        ([0], [33], [96], 2 * (LIVES + SURE)),
        ([16], [100], [28], 1 * (40 / 41 + 3.5 * sqrt(40 / 41 / 41))),  # half of a bin is behind it
        ([48], [100], [156], 2),  # it has outlived the bin
        ([0, 48], [500, 500], [99, 147], 5 * LIVES + 6 + 5 * SURE),
        ([0], [1], [128], 2),
        ([48, 48], [1, 300], [299, 100], 3 + 2),  # before the first one ends; the other alone has 4 at most
    ],
)
def test_the_most_blocks_after_one_answer_of_few_tokens(tokens, lefts, lengths, blocks):
    assert learned((10, 500)).most_blocks(tokens, lefts, lengths, 128) == pytest.approx(blocks)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("ahead", [32, 64, 128, 256, 512, 1024, 2048])
def test_times_ahead_at_which_blocks_are_counted(ahead):
    """One answer has ended just before. At this time the others are as many as outlived it."""
    found = learned((ahead - 1, 9999))
    assert found.most_blocks([0], [ahead + 1], [0], 128) == pytest.approx((ahead // 128 + 1) * (LIVES + SURE))


@pytest.mark.usefixtures("few")
def test_nobody_is_thought_to_end_before_anybody_did():
    assert learned((600, 9999)).most_blocks([0], [129], [0], 128) == 2


def test_nobody_looks_further_ahead_than_bins_reach():
    assert AnswerLengths().most_blocks([0], [9999], [0], 128) == LONGEST / 128


@pytest.mark.parametrize("seen", [0, 1, 100])
def test_answers_of_lengths_that_nobody_had_are_thought_to_end_the_more_were_seen(seen):
    """Of those that reach the n-th bin, a share of up to 1 / (n + 1) ends in it."""
    found = learned(*[(10, 9999)] * seen)
    known = sum(0.99**n for n in range(seen))
    prior = known / (known + 20)
    assert found._lives[2] / found._lives[1] == pytest.approx(1 - prior / 3)
    assert found._lives[100] / found._lives[50] == pytest.approx(math.prod(1 - prior / n for n in range(52, 102)))


@pytest.mark.parametrize("count", [5, 40, 200])
def test_no_more_blocks_are_held_than_foreseen_but_rarely(count):
    draw = random.Random(1)
    lengths = [min(500, int(draw.lognormvariate(4.4, 1.0)) + 1) for _ in range(1000)]
    found = AnswerLengths()
    for length in lengths:
        for tokens in range(32, length + 1, 32):
            found.goes_on(tokens)
        found.ended(length, 500)
    foreseen = found.most_blocks([0] * count, [500] * count, [99] * count, BLOCK)
    assert foreseen < 0.8 * count * blocks_of(100 + 500 - 1, BLOCK) or count == 5
    above = 0
    for _ in range(200):
        ends = draw.choices(lengths, k=count)
        peak = max(sum(blocks_of(100 + at, BLOCK) for end in ends if end > at) for at in range(0, 500, 50))
        above += peak > foreseen
    assert above <= 4
