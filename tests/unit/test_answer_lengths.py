"""What is learned of answers' lengths, and the blocks that are foreseen by it."""

import random

import pytest

from deployments.generation.scheduling.answer_lengths import AnswerLengths
from deployments.generation.scheduling.blocks import blocks_of


def learned(lengths, most=500):
    found = AnswerLengths()
    for length in lengths:
        has(found, min(length, most), most)
    return found


def has(found, length, most):
    """An answer of this length."""
    for tokens in range(1, length + 1):
        found.goes_on(tokens)
    found.ended(length, most)


def of_new(found, count, prompt=100, most=500):
    return found.most_blocks([0] * count, [most] * count, [prompt - 1] * count)


def test_who_has_seen_nothing_expects_the_longest():
    assert of_new(AnswerLengths(), 10) == 10 * blocks_of(100 + 500 - 1)


def test_answers_that_were_cut_off_say_nothing_of_how_long_they_would_be():
    assert of_new(learned([10_000] * 500), 10) == pytest.approx(10 * blocks_of(100 + 500 - 1))


@pytest.mark.parametrize("count", [5, 40, 200])
def test_no_more_blocks_are_held_than_foreseen_but_rarely(count):
    draw = random.Random(1)
    found = learned([int(draw.lognormvariate(4.4, 1.0)) + 1 for _ in range(3000)])
    foreseen = of_new(found, count)
    assert foreseen < 0.8 * count * blocks_of(100 + 500 - 1) or count == 5
    above = 0
    for _ in range(500):
        ends = [min(500, int(draw.lognormvariate(4.4, 1.0)) + 1) for _ in range(count)]
        peak = max(sum(blocks_of(100 + at) for end in ends if end > at) for at in range(0, 500, 10))
        above += peak > foreseen
    assert above <= 10


def test_one_that_goes_on_is_thought_to_go_on():
    found = learned(([10] * 9 + [480]) * 100)
    new, old = (found.most_blocks([picked] * 200, [500 - picked] * 200, [100 + picked] * 200) for picked in (0, 100))
    assert new < 0.6 * 200 * 5
    assert old > 0.9 * 200 * 5


def test_answers_that_go_on_count_before_they_end():
    found = learned([20] * 300)
    short = of_new(found, 20)
    for tokens in range(1, 200):
        for _ in range(60):
            found.goes_on(tokens)
    assert of_new(found, 20) > 1.2 * short


def test_what_is_learned_fades():
    found = learned([10] * 1000)
    short = of_new(found, 20)
    for _ in range(600):
        has(found, 450, 500)
    assert of_new(found, 20) > 1.5 * short
