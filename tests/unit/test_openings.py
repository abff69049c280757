"""Which of many are open, and when the others open."""

import math

from deployments.embedding.openings import Openings


def of(**opens_at):
    openings = Openings()
    for name, at in opens_at.items():
        openings.put(name, at, 1.0)
    return openings


def test_who_is_open_and_who_opens_when():
    openings = of(a=1.0, b=1.1, c=math.inf, d=0.5)
    assert [sorted(openings.open(now)) for now in (1.0, 1.09, 1.1)] == [["a", "d"], ["a", "d"], ["a", "b", "d"]]
    openings.put("a", 3.0, 1.2)
    openings.put("c", 1.2, 1.2)
    assert sorted(openings.open(2.9)) == ["b", "c", "d"]
    openings.put("a", 2.0, 2.9)  # sooner than it had said
    openings.put("a", 3.5, 2.9)  # and later: what it said before does not count
    assert sorted(openings.open(3.4)) == ["b", "c", "d"]
    assert sorted(openings.open(3.5)) == ["a", "b", "c", "d"]


def test_who_opened_and_says_the_same_time_again_is_closed():
    openings = of(a=5.0)
    openings.put("a", 1.0, 1.0)
    openings.put("a", 5.0, 1.0)
    assert list(openings.open(4.9)) == []
    openings.put("a", 5.0, 2.0)
    assert len(openings._next) == 2  # it is not kept again and again
    assert list(openings.open(5.0)) == ["a"]


def test_what_is_past_is_not_kept_though_nobody_asks_who_is_open():
    """A small pool never asks, and each report of a full replica says another time."""
    openings = Openings()
    for number in range(1000):
        openings.put("a", 0.01 * number + 0.3, 0.01 * number)
    assert len(openings._next) <= 31
    assert list(openings.open(10.28)) == []
    assert list(openings.open(10.3)) == ["a"]


def test_who_has_gone_does_not_open():
    openings = of(a=1.0, b=2.0, c=1.0)
    openings.keep(["c"])
    assert list(openings.open(3.0)) == ["c"]
    assert openings._opens_at == {}


def test_those_that_were_looked_at_come_last():
    openings = of(a=1.0, b=1.0, c=1.0, d=1.0)
    assert [openings.some(1.0, 2, lambda name: name != "b") for _ in range(3)] == [["a", "c"], ["d", "a"], ["c", "d"]]
