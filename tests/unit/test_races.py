"""The races at start, by work that takes the time that it says."""

import itertools

import pytest

from deployments.engines import races
from deployments.engines.races import fastest_s, quickest_cpu_dtype


class Clock:
    """Moves by what runs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def way(self, *turns_s):
        """Work whose turns take these seconds, and then ever the last."""
        seconds = itertools.chain(turns_s, itertools.repeat(turns_s[-1]))

        def run():
            self.now += next(seconds)

        return run


def test_a_moment_in_which_the_machine_is_busy_decides_nothing():
    clock = Clock()
    ways = [clock.way(9.0, 9.0, 9.0, 1.0), clock.way(2.0), clock.way(3.0, 2.5, 4.0)]
    assert fastest_s(*ways, clock=clock) == pytest.approx([1.0, 2.0, 2.5])


@pytest.mark.parametrize(("one_s", "other_s", "quicker"), [(1.0, 2.0, True), (1.0, 1.0, True), (2.0, 1.0, False)])
def test_who_takes_no_longer_is_quicker(monkeypatch, one_s, other_s, quicker):
    monkeypatch.setattr(races, "fastest_s", lambda *_: [one_s, other_s])
    assert races.is_quicker(print, print) == quicker


@pytest.mark.parametrize(
    ("narrow_s", "exact_s", "dtype", "reason"),
    [
        (1.0, 2.0, "bfloat16", "it has instructions, 2.0 times as fast in products as float32"),
        (1.0, 1.0, "bfloat16", "it has instructions, 1.0 times as fast in products as float32"),
        (1.8, 1.0, "float32", "it has instructions, but multiplies float32 1.8 times as fast"),
    ],
)
def test_the_narrow_format_is_taken_only_where_it_is_no_slower(monkeypatch, narrow_s, exact_s, dtype, reason):
    clock = Clock()
    monkeypatch.setattr(races, "quick_cpu_dtype", lambda: ("bfloat16", "it has instructions"))
    monkeypatch.setattr(races, "_product", {"bfloat16": clock.way(narrow_s), "float32": clock.way(exact_s)}.get)
    assert quickest_cpu_dtype(clock) == (dtype, reason)


def test_without_instructions_there_is_no_race(monkeypatch):
    monkeypatch.setattr(races, "quick_cpu_dtype", lambda: ("float32", "none"))
    monkeypatch.setattr(races, "fastest_s", None)
    assert quickest_cpu_dtype(Clock()) == ("float32", "none")
