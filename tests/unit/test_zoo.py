"""Admission on devices that no cost model describes, beside an oracle that knows them (benchmarks.simulation.zoo)."""

from typing import NamedTuple

import pytest

from benchmarks.simulation.laws import BASES, LAWS, Base, Shared
from benchmarks.simulation.zoo import BURSTS, LATE, Scene, scenes


class Bar(NamedTuple):
    """Of a law's scenes: the mean late share in %, the mean and the least goodput as shares of the oracle's, and how
    many keep the promise.
    """

    late: float
    goodput: float
    least: float
    kept: int


class Delayed(Shared):
    """Other work on the host delays each run by 12 ms on average, besides the queries that it receives."""

    def added_s(self) -> float:
        return self.draw.expovariate(1 / 0.012)

    def noise(self) -> float:
        return max(0.9, 1 + self.draw.gauss(0, 0.03))


LIKE_OTHERS = {"beta06", "beta09", "alpha14", "quadratic", "overhead"}  # laws
LINEAR = Bar(0.0, 0.98, 0.95, 8)
BARS = {
    **dict.fromkeys(("beta06", "beta09", "beta15", "alpha07", "alpha14", "overhead"), LINEAR),
    "exact": Bar(0.0, 0.999, 0.99, 8),
    "quadratic": Bar(0.1, 0.96, 0.92, 8),
    "convex": Bar(0.1, 0.96, 0.92, 8),
    "tiles": Bar(2.0, 0.75, 0.50, 3),  # stairs of a third of the SLO
    "regimes": Bar(0.4, 0.96, 0.90, 7),
    "gauss": Bar(0.7, 0.97, 0.93, 7),
    "noise": Bar(7.5, 0.94, 0.84, 1),  # no margin covers it: the oracle is late with 8.7 %
    "pauses": Bar(3.7, 0.97, 0.75, 4),  # of 20 % of the SLO and more; the oracle is late with 16 %
    "hiccups": Bar(0.1, 0.90, 0.85, 8),
    "slower": Bar(0.1, 0.94, 0.85, 8),
    "drift": Bar(0.8, 0.97, 0.94, 6),
    "stolen": Bar(6.5, 0.89, 0.75, 0),  # half of the oracle's 13 %
    "shared": Bar(0.1, 0.97, 0.85, 8),
    "ratio1": Bar(0.1, 0.89, 0.75, 7),
    "ratio46": Bar(0.1, 0.90, 0.80, 7),
}


@pytest.mark.parametrize("law", [law for law in LAWS if law not in LIKE_OTHERS])
def test_the_promise_holds_on_strange_devices(law):
    late, goodput = [], []
    for scene in scenes([law]):
        found, best = scene.play(), scene.play(oracle=True)
        late.append(found.late)
        goodput.append(found.goodput / best.goodput)
    bar = BARS[law]
    assert 100 * sum(late) / len(late) <= bar.late
    assert sum(goodput) / len(goodput) >= bar.goodput
    assert min(goodput) >= bar.least
    assert sum(one <= LATE for one in late) >= bar.kept


def test_the_bars_are_those_of_the_whole_zoo():
    """The oracle keeps the promise in 132 of 166 scenes; in 135 where it always left a pass to spare."""
    assert BARS.keys() == LAWS.keys()
    assert sum(bar.kept for bar in BARS.values()) >= 135 - 5
    assert sum(bar.goodput for bar in BARS.values()) / len(BARS) > 0.94
    assert all(bar.least >= 0.75 for law, bar in BARS.items() if law != "tiles")


@pytest.mark.parametrize(("name", "least"), [*zip(BURSTS, (36, 36, 440, 150), strict=True)])
def test_light_load_teaches_enough_for_a_burst(name, least):
    """One factor for all, learned from small runs, made 47 to 63 of 80 late where beta was less than modelled, admitted
    117 of 498 possible beside 6 ms a run, and 6 to 37 of 206 possible after one run that stood still.
    """
    admitted, late = BURSTS[name].play()
    assert late == 0
    assert admitted >= least


@pytest.mark.parametrize("seed", [5, 8, 9, 10])
def test_bursts_on_cores_that_also_receive_them(monkeypatch, seed):
    """206 at once on a CPU like that of MiniLM. Where a short run that the host delayed taught as much as a large one,
    0.46 to 0.88 of the oracle's answers were in time.
    """
    monkeypatch.setitem(BASES, "cpu", Base(0.0052, 0.006, 1.0, 16, 100, 1, 206))
    monkeypatch.setitem(LAWS, "delayed", Delayed)
    scene = Scene("delayed", "cpu", "pass", "burst")
    found, best = scene.play(seed=seed), scene.play(oracle=True, seed=seed)
    assert found.late <= LATE
    assert found.goodput >= 0.93 * best.goodput


def test_a_scene_has_one_result():
    scene = Scene("noise", "quick", "pass", "burst")
    assert scene.play() == scene.play()
