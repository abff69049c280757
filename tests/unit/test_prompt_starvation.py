"""When room is kept for long prompts, and how much."""

import pytest

from deployments.generation.scheduler.starvation import _AIM, SHARE, LongPrompts

SHORT, LONG = 100, 1000


def offered(*what, now=0.0, prompts=None):
    """So many prompts of some tokens each, and whether they are admitted: (count, tokens, admitted)."""
    prompts = prompts or LongPrompts()
    for count, tokens, admitted in what:
        for _ in range(count):
            prompts.offered(now, tokens, admitted=admitted)
    return prompts


@pytest.mark.parametrize(
    ("before", "shortest"), [([SHORT], 201), ([SHORT, 200], 205), ([200, SHORT], 397), ([SHORT] * 9, 201)]
)
def test_a_prompt_is_long_that_is_twice_as_long_as_the_mean(before, shortest):
    prompts = offered(*[(1, tokens, True) for tokens in before])
    assert prompts.is_long(shortest)
    assert not prompts.is_long(shortest - 1)


@pytest.mark.parametrize(("refused", "tokens"), [(2, 0), (3, 520), (4, 540), (26, 980), (27, 1000), (28, 1000)])
def test_three_long_ones_have_a_say_and_with_each_more_room_is_kept(refused, tokens):
    assert offered((99, SHORT, True), (refused, LONG, False)).tokens == tokens


@pytest.mark.parametrize(("others", "tokens"), [(22, 0), (24, 520)])
def test_room_is_kept_while_less_than_seven_tenths_as_many_of_them_are_admitted(others, tokens):
    """Of four long ones two are, and of all 36 two more than of the others: (22 + 2) / 36 is two thirds."""
    prompts = offered((others, SHORT, True), (32 - others, SHORT, False), (2, LONG, True), (2, LONG, False))
    assert prompts.tokens == tokens


def test_room_is_kept_before_long_ones_get_less_than_is_promised():
    assert SHARE < _AIM


def test_less_room_is_kept_with_each_while_they_do_not_starve():
    prompts = offered((200, SHORT, True), (8, LONG, False))
    offered((1, SHORT, True), now=50.0, prompts=prompts)  # they are forgotten
    rooms = [prompts._room]
    for _ in range(3):
        offered((1, LONG, False), now=50.0, prompts=prompts)
        rooms.append(prompts._room)
    assert rooms == pytest.approx([0.62, 0.6, 0.58, 0.6])
    offered((1, SHORT, True), now=99.0, prompts=prompts)
    for now in range(100, 500, 50):
        offered((1, LONG, True), now=float(now), prompts=prompts)
    assert prompts._room == 0.5


def test_the_room_is_for_one_of_the_mean_length_of_long_ones():
    assert offered((99, SHORT, True), (2, LONG, False), (1, 2000, False)).tokens == round(0.52 * 1020)


@pytest.mark.parametrize(
    ("refused", "times", "starve"),
    [
        (3, [0.1], True),
        (3, [0.12], False),  # of three prompts a part is forgotten
        (4, [2.87], True),
        (4, [2.88], False),
        (4, [1.0, 1.05, 2.87], True),
    ],
)
def test_what_was_offered_is_forgotten(refused, times, starve):
    prompts = offered((99, SHORT, True), (refused, LONG, False))
    for now in times:
        offered((1, SHORT, True), now=now, prompts=prompts)
    assert (prompts.tokens > 0) is starve


def test_admissions_are_forgotten_as_refusals_are():
    prompts = offered((99, SHORT, True), (9, LONG, True))
    offered((9, LONG, False), now=10.0, prompts=prompts)
    assert prompts._long.share == pytest.approx(9 * 0.36788 / (9 + 9 * 0.36788), rel=1e-4)
    assert prompts._all.share == pytest.approx(108 * 0.36788 / (9 + 108 * 0.36788), rel=1e-4)
