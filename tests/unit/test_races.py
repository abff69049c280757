"""The races at start, by engines and products that take the time that they say."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.engines import races
from deployments.engines.races import fastest_s, measured_throughput, quickest_cpu_dtype


class Timed:
    """Moves its clock by `cost(lengths)`, and by `first_s` more for the first batch of each shape."""

    def __init__(self, cost, first_s=0.0):
        self.cost, self.first_s, self.now, self.seen = cost, first_s, 0.0, []

    def passes(self, batch, stop):
        lengths = batch.lengths.tolist()
        self.now += self.cost(lengths) + (self.first_s if lengths not in self.seen else 0.0)
        self.seen.append(lengths)
        yield np.arange(len(batch)), (np.zeros((len(batch), 1), np.float32),)


def speed(engine, max_tokens=512):
    card = SimpleNamespace(vocab_size=100, max_tokens=max_tokens, kind="embedding", outputs_for=lambda _: ("text",))
    return measured_throughput(engine, card, clock=lambda: engine.now)


def test_each_kind_has_about_as_many_tokens():
    tokens = {sum(lengths) for lengths in _lengths(512)}
    assert max(tokens) < 1.4 * min(tokens)


@pytest.mark.parametrize("max_tokens", [512, 128, 8])
def test_no_query_is_longer_than_the_model_allows(max_tokens):
    assert max(max(lengths) for lengths in _lengths(max_tokens)) <= max_tokens


def _lengths(max_tokens):
    engine = Timed(lambda lengths: 1e-3 * sum(lengths))
    speed(engine, max_tokens)
    return engine.seen


def test_what_is_prepared_once_does_not_count():
    assert speed(Timed(lambda _: 0.01, first_s=0.5)).equal_s == pytest.approx(0.01)


def test_a_slow_model_is_timed_once():
    engine = Timed(lambda _: 7.0)
    assert speed(engine).mixed_s == pytest.approx(7.0)
    assert len(engine.seen) == 2


def test_it_says_the_figures_of_equal_and_of_mixed_lengths():
    assert str(speed(Timed(lambda lengths: 0.1 if set(lengths) == {75} else 0.2))) == (
        "160 queries/s of 75 tokens and 80 of mixed lengths"
    )


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
