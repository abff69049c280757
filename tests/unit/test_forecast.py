"""Whether promises hold: the work until each deadline, in seconds that were summed up by hand."""

import math

import pytest

from deployments.generation.scheduler.forecast import Forecast, HostShare, Pace, Prompt
from deployments.generation.scheduler.step_time import StepTime

STEPS = StepTime(1.0, 0.0, 0.0, 0.5, 0.0, 0)  # a step takes 1 s, and each token of a prompt half a second
ROWS = StepTime(1.0, 0.25, 0.0, 0.5, 0.0, 1)  # each row but the first a quarter
READS = StepTime(0.0, 0.0, 0.5, 0.0, 0.0, 0)  # half a second for each token that is read
PAIRS = StepTime(1.0, 0.0, 0.0, 0.5, 0.25, 0)
KNEE = StepTime(1.0, 0.0, 0.0, 0.5, 0.0, 3)  # three tokens of a step cost nothing
A_BIT = 1e-6


def pace(due_s, pace_s=1.0, left=1, length=10, *, host=0):
    return Pace(due_s, pace_s, left, length, host=host)


def prompt(due_s, tokens, pairs=0.0, answers=1, most_tokens=1, pace_s=None, *, on_host=False):
    return Prompt(due_s, tokens, pairs, tokens, answers, most_tokens, pace_s, on_host)


def look(paces, prompts=(), model=STEPS, slow=1.0, free_s=0.0, longest_s=100.0, **more):
    return Forecast(model, slow, free_s, longest_s, paces, prompts, **more).look()


def sooner(what):
    return what._replace(due_s=what.due_s - A_BIT)


@pytest.mark.parametrize(
    ("model", "slow", "free_s", "paces"),
    [
        (STEPS, 1.0, 0.0, [pace(1.0)]),
        (STEPS, 1.0, 0.0, [pace(1.0, left=3)]),  # as many steps as tokens, each as long as the pace
        (STEPS, 2.0, 0.5, [pace(2.5)]),
        (STEPS, 1.0, 0.0, [pace(2.5, pace_s=0.25, left=3)]),  # the third is due after 3 s
        (STEPS, 1.0, 0.0, [pace(1.0, pace_s=9.0, left=3)]),  # only the first is in a hurry
        (ROWS, 1.0, 0.0, [pace(1.5)] * 3),
        (ROWS, 1.0, 0.0, [pace(1.25), pace(1.25, left=3)]),  # both in the first step, then one of them alone
        (ROWS, 1.0, 0.0, [pace(4.25 - 2 * 0.5, pace_s=0.5, left=3), pace(9.0, left=2), pace(9.0, left=4)]),
        (READS, 1.0, 0.0, [pace(2.0, 2.75, left=3, length=4)]),  # (4 + 5 + 6) / 2 s until the third
        (READS, 1.0, 0.0, [pace(2.5, 2.5, left=3, length=4)]),
        (READS, 1.0, 0.0, [pace(7.0, length=4), pace(99.0, left=9, length=10)]),
        (READS, 1.0, 0.0, [pace(0.5 * (10 + 11 + 4), 0.0, left=2, length=10), pace(99.0, left=1, length=4)]),
    ],
)
def test_the_latest_time_at_which_paces_hold(model, slow, free_s, paces):
    assert look(paces, model=model, slow=slow, free_s=free_s).kept
    assert not look([sooner(paces[0]), *paces[1:]], model=model, slow=slow, free_s=free_s).kept


def test_answers_without_a_pace_are_never_due():
    assert Pace.of(3.0, 0.5, 4, 10, on_host=True) == Pace(3.5, 0.5, 4, 10, host=1)
    assert Pace.of(3.0, None, 4, 10) == Pace(math.inf, 1.0, 4, 10)
    assert look([Pace.of(0.0, None, 500, 10)]).kept


@pytest.mark.parametrize(("most_tokens", "answers", "paces"), [(1, 2, 0), (5, 2, 2)])
def test_the_first_token_comes_of_the_prompt(most_tokens, answers, paces):
    one = prompt(3.0, 20, answers=answers, most_tokens=most_tokens, pace_s=0.5)
    assert one.paces(2.0) == [Pace(2.5, 0.5, 4, 21)] * paces


@pytest.mark.parametrize(
    ("model", "more", "paces", "prompts", "first_s"),
    [
        (STEPS, {}, [], [2], [2.0]),
        (STEPS, {}, [], [2, 4], [2.0, 4.0]),  # in one step, behind each other
        (STEPS, {"slow": 2.0, "free_s": 0.5}, [], [2, 4], [4.5, 8.5]),
        (KNEE, {}, [], [2, 4], [1.0, 2.5]),
        (KNEE, {}, [pace(1.0, 9.0, left=5)], [4], [2.0]),
        (STEPS, {}, [pace(1.5, 10.0, left=5)], [2], [3.0]),  # the answer is due before: one step more
        (STEPS, {}, [pace(3.0 + A_BIT, 10.0, left=5)], [4], [3.0]),
        (STEPS, {}, [pace(3.0, 10.0, left=5)], [4], [4.0]),
        (STEPS, {}, [pace(1.0, 1.0, left=5)], [2], [7.0]),  # all five are due before it ends
        (STEPS, {}, [pace(1.0, 2.0, left=50)], [2], [4.0]),
        (STEPS, {"longest_s": 2.0}, [], [8], [9.0]),  # at least so many steps as the longest ones
        (STEPS, {"longest_s": 2.0, "free_s": 1.0}, [], [8], [10.0]),
        (STEPS, {"most_tokens": 4}, [], [2, 4, 4], [2.0, 5.0, 8.0]),  # in one step, in two, in three
        (STEPS, {"most_tokens": 5}, [pace(99.0, left=9)], [8], [6.0]),  # the answer is in each of the two
        (ROWS, {}, [pace(1.5, 10.0, left=5)] * 3, [2], [2 * 1.5 + 1.0]),
        (READS, {}, [pace(2.0, 10.0, left=5, length=4)], [2], [4.5]),
        (PAIRS, {}, [], [(2, 3.0), (2, 5.0)], [2.75, 5.0]),
    ],
)
def test_when_first_tokens_come(model, more, paces, prompts, first_s):
    """By a prompt's tokens, or by its tokens and pairs."""
    waiting = [prompt(50.0, *(one if isinstance(one, tuple) else (one,))) for one in prompts]
    found = look(paces, waiting, model, **more)
    assert found.first_s == pytest.approx(first_s)
    *others, last = waiting
    in_time = last._replace(due_s=first_s[-1])
    others = [one._replace(due_s=first) for one, first in zip(others, first_s, strict=False)]
    assert look(paces, [*others, in_time], model, **more).kept
    assert not look(paces, [*others, sooner(in_time)], model, **more).kept


@pytest.mark.parametrize(
    ("model", "pace_s", "most_tokens", "answers"),
    [
        (STEPS, 1.0, 9, 1),  # a step of a second each
        (ROWS, 1.25, 2, 2),
        (READS, 9 / 2, 2, 1),  # it reads the prompt's eight, and itself
    ],
)
def test_answers_of_a_prompt_that_waits_are_to_be_in_time_too(model, pace_s, most_tokens, answers):
    for faster, kept in ((0.0, True), (A_BIT, False)):
        one = prompt(50.0, 8, 0.0, answers, most_tokens, pace_s - faster)
        assert look([], [one], model).kept is kept, faster


@pytest.mark.parametrize(
    ("pace_s", "due_s", "kept"),
    [
        (11.0, 16.0, True),  # the answer's second token is due when the other prompt's first one is, after 2 + 4 + 10 s
        (10.9, 15.5, False),
        (10.9, 15.95, True),  # the prompt can wait
        (10.9, 14.9, False),
    ],
)
def test_prompts_that_are_due_come_before_tokens_that_are_due_later(pace_s, due_s, kept):
    found = look([], [prompt(9.0, 8, most_tokens=3, pace_s=pace_s), prompt(due_s, 20)])
    assert found.first_s == pytest.approx([5.0, 15.0])
    assert found.kept is kept


@pytest.mark.parametrize(
    ("most_tokens", "first_s", "latest_s"),
    [
        (9, 15.0, 15.0),  # eight tokens, a second each, while the other prompt is computed
        (14, 18.0, 20.0),  # it is not looked at more often: thirteen tokens are due before
    ],
)
def test_answers_of_the_prompts_before_delay_a_prompt_and_its_own_do_not(most_tokens, first_s, latest_s):
    first = prompt(5.0, 8, most_tokens=most_tokens, pace_s=1.0)
    for due_s, kept in ((latest_s, True), (latest_s - A_BIT, False)):
        assert look([], [first, prompt(due_s, 2)]).kept is kept
    hurried = look([], [first, prompt(latest_s, 2, most_tokens=99, pace_s=0.1)])
    assert hurried.first_s == pytest.approx([5.0, first_s])
    assert not hurried.kept


@pytest.mark.parametrize(
    ("share", "model", "paces", "due_s"),
    [
        (HostShare(0.0, 0.0, twice=True), STEPS, [pace(0, host=1)], 2.0),  # the weights are read twice
        (HostShare(0.0, 0.0, twice=True), STEPS, [pace(0)], 1.0),  # not where nobody is on the host
        (HostShare(0.0, 0.0, twice=False), STEPS, [pace(0, host=1)], 1.0),
        (HostShare(3.0, 0.0, twice=False), STEPS, [pace(0, host=1)], 3.0),
        (HostShare(3.0, 0.0, twice=False), STEPS, [pace(0, host=1), pace(99.0, host=1), pace(99.0)], 6.0),
        (HostShare(0.0, 0.25, twice=False), READS, [pace(0, host=1), pace(99.0, length=4)], 2.5),
        (HostShare(0.0, 0.25, twice=False), READS, [pace(0, host=1), pace(99.0, length=6)], 3.0),
    ],
)
def test_the_host_computes_beside_the_accelerator(share, model, paces, due_s):
    first, *others = (one._replace(due_s=one.due_s or due_s) for one in paces)
    assert look([first, *others], model=model, host=share).kept
    assert not look([sooner(first), *others], model=model, host=share).kept
    assert not look([first, *others], model=model, host=share, slow=1 + A_BIT).kept


@pytest.mark.parametrize(
    ("more", "first_s"),
    [
        ({}, 1 + 4 + 8 / 4),  # the tokens of the prompt itself
        ({"most_tokens": 4}, 2 + 4 + (4 + 8) / 4),  # in the second step the first half, too
        ({"longest_s": 3.0}, 6 + 4 + 7),  # in six steps, behind four tokens on average
    ],
)
def test_each_chunk_of_a_prompt_on_the_host_copies_what_is_before_it(more, first_s):
    share = HostShare(0.0, 0.0, twice=False, copy_token_s=0.25)
    one = prompt(first_s, 8, 32.0, on_host=True)
    assert look([], [one], host=share, **more) == ([first_s], True)
    assert not look([], [sooner(one)], host=share, **more).kept
    assert look([], [one._replace(on_host=False)], host=share, **more).first_s[0] < first_s


def test_once_a_prompt_is_computed_nothing_of_it_is_copied():
    share = HostShare(0.0, 0.0, twice=False, copy_token_s=0.25)
    long = prompt(20.0, 8, 32.0, on_host=True)
    assert look([pace(8.0, left=50)], [long], host=share).kept


def test_answers_that_join_later_take_no_time_before():
    running = pace(1.0, left=3)
    assert look([running], [prompt(8.0, 8, most_tokens=2)], ROWS).kept
    assert not look([running, pace(50.0, left=9)], [prompt(8.0, 8, most_tokens=2)], ROWS).kept


def test_a_device_with_nothing_to_do_keeps_all():
    assert look([]).kept
    assert not look([]).first_s.size
