"""What a Router thinks of a replica that generates, by its last report and what it was sent since."""

import math

import pytest

from deployments.generation.scheduler.state import StepState
from deployments.generation.view import GenerationView

STATE = StepState(3.0, 0.5, 0.01, 7, 12, 3, 2, 99, (0.1, 0.0, 0.0, 0.001, 0.0, 8), 1.5, 0.02, (4, 1))


def view(*sent, heard_at=10.0, seen=0, state=STATE):
    """`sent`: (frame, tokens of a prompt)."""
    found = GenerationView("a", (False, 7))
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


def test_nothing_is_known_when_the_connection_has_broken():
    found = view((1, 50))
    found.asked(12.0)
    found.forget()
    assert (found.state, found.has_read_all, found.is_silent(99.0)) == (None, True, False)
