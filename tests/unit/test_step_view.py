"""What a Router thinks of a replica that generates, by its last report and what it was sent since."""

import math

import pytest

from deployments.generation.scheduler.state import StepState
from deployments.generation.view import StepView

STATE = StepState(3.0, 0.5, 0.01, 7, 12, 3, 2, 99, (0.1, 0.0, 0.0, 0.001, 0.0, 8), 1.5, 0.02, (4, 1))


def view(*sent, heard_at=10.0, seen=0, state=STATE):
    """`sent`: (frame, tokens of a prompt)."""
    found = StepView("a", (False, 7))
    for frame, tokens in sent:
        found.sent(frame, 1, tokens)
    if state is not None:
        found.hear(heard_at, state, seen)
    return found


@pytest.mark.parametrize(
    ("sent", "seen", "now", "first_s"),
    [
        ([], 0, 10.0, 0.5 + 0.01 * 100),
        ([], 0, 10.3, 0.2 + 0.01 * 100),
        ([], 0, 11.0, 0.01 * 100),  # what it said it would wait for is over
        ([(1, 50), (2, 30)], 0, 10.0, 0.5 + 0.01 * 180),
        ([(1, 50), (2, 30)], 1, 10.0, 0.5 + 0.01 * 130),  # its state counts the first
        ([(1, 50), (2, 30)], 2, 10.0, 0.5 + 0.01 * 100),
    ],
)
def test_when_a_first_token_would_come(sent, seen, now, first_s):
    found = view(*sent, seen=seen)
    assert found.first_s(now, 100) == pytest.approx(first_s)
    assert found.has_read_all is (seen == len(sent))


@pytest.mark.parametrize(("now", "opens_s"), [(10.0, 3.0), (12.0, 1.0), (14.0, 0.0)])
def test_when_it_admits_again(now, opens_s):
    assert view().opens_s(now) == opens_s


def test_of_a_replica_that_has_not_reported_nothing_is_known():
    found = view((1, 50), state=None)
    assert (found.first_s(10.0, 1), found.opens_s(10.0)) == (math.inf, 0.0)


@pytest.mark.parametrize(
    ("sent", "asked_at", "now", "should"),
    [
        ([(1, 50)], None, 10.25, True),
        ([(1, 50)], None, 10.24, False),
        ([], None, 20.0, False),
        ([(1, 50)], 10.0, 20.0, True),
        ([(1, 50)], 10.1, 20.0, False),  # it was asked since
    ],
)
def test_a_replica_is_asked_that_says_nothing_of_what_it_was_sent(sent, asked_at, now, should):
    found = view(*sent)
    if asked_at is not None:
        found.asked(asked_at)
    assert found.should_be_asked(now) is should


@pytest.mark.parametrize(
    ("asked_at", "now", "silent"),
    [(10.1, 11.11, True), (10.1, 11.09, False), (10.5, 11.5, False), (10.0, 20.0, False), (None, 20.0, False)],
)
def test_a_replica_is_silent_that_was_asked_and_says_nothing_for_a_second(asked_at, now, silent):
    found = view()
    if asked_at is not None:
        found.asked(asked_at)
    assert found.is_silent(now) is silent


def test_nothing_is_known_when_the_connection_has_broken():
    found = view((1, 50))
    found.asked(12.0)
    found.forget()
    assert (found.state, found.has_read_all, found.is_silent(99.0)) == (None, True, False)
