"""What one API key may use in all, in simulated time."""

import random
from dataclasses import astuple

import pytest

from deployments.admission.quota import Quota
from deployments.generation.charge import GenerationCharge
from deployments.generation.scheduler.state import StepState
from deployments.generation.scheduler.step_time import StepTime


def used(quota, rate, cost, seconds, routers=1, seed=1):
    """What such requests use in so many seconds, and how long those that are refused are told to wait."""
    chance, now, total, waits = random.Random(seed), 0.0, 0.0, []
    while (now := now + chance.expovariate(rate)) < seconds:
        wait_s = quota.wait_s(now, routers)
        if wait_s > 0:
            waits.append(wait_s)
            continue
        quota.spend(cost)
        total += cost
    return total, waits


@pytest.mark.parametrize("cost", [1.0, 75.0, 4000.0])
@pytest.mark.parametrize("routers", [1, 4])
def test_nobody_uses_more_than_the_quota(cost, routers):
    total, waits = used(Quota(1000.0, "tokens"), 5000 / cost, cost, 60.0, routers)
    most = 1000.0 / routers * 65 + cost
    assert 0.85 * 1000 / routers * 60 <= total <= most
    assert waits


def test_who_stays_below_is_never_refused():
    total, waits = used(Quota(1000.0, "tokens"), 8.0, 100.0, 60.0)
    assert not waits
    assert total > 0


@pytest.mark.parametrize(
    ("asks", "waits"),
    [
        # When, of how many Routers, and what it costs. The quota is 2 a second; 5 s of it may be used at once.
        ([(0.0, 1, 10.0), (0.0, 1, 0.0)], [0, 0.05]),  # nothing is left
        ([(0.0, 1, 9.99), (0.0, 1, 0.0)], [0, 0]),
        ([(0.0, 1, 40.0), (0.0, 1, 0.0), (15.0, 1, 0.0), (15.1, 1, 0.0)], [0, 15.05, 0.05, 0]),
        ([(0.0, 1, 4.0), (1.0, 1, 8.1), (1.0, 1, 0.0)], [0, 0, 0.1]),  # 8 were left
        ([(0.0, 1, 4.0), (99.0, 1, 11.0), (99.0, 1, 0.0)], [0, 0, 0.55]),  # it holds no more than 10
        ([(7.0, 1, 4.0), (6.0, 1, 6.1), (6.0, 1, 0.0)], [0, 0, 0.1]),  # the clock goes back
        ([(0.0, 1, 100.0), (0.0, 1, -100.0), (0.0, 1, 0.0)], [0, 45.05, 0]),  # it was refused: given back
        # Each of four Routers grants a quarter.
        ([(0.0, 4, 3.0), (0.0, 4, 0.0)], [0, 1.05]),
        ([(0.0, 4, 2.4), (0.0, 4, 0.0)], [0, 0]),
        ([(0.0, 1, 0.0), (0.0, 2, 6.0), (0.0, 2, 0.0)], [0, 0, 1.05]),  # a Router has come
        ([(0.0, 2, 0.0), (0.0, 1, 6.0), (0.0, 1, 0.0)], [0, 0, 0.55]),  # and gone
    ],
)
def test_how_long_a_request_waits(asks, waits):
    quota, found = Quota(2.0, "tokens"), []
    for now, routers, cost in asks:
        found.append(quota.wait_s(now, routers))
        quota.spend(cost)
    assert found == [pytest.approx(wait_s) for wait_s in waits]


def test_an_answer_pays_for_what_it_reads_not_for_what_others_of_its_request_read():
    model = StepTime(0.1, 0.0, 0.001, 0.0, 0.0)
    state = StepState(0.0, 0.0, 0.0, 9, 9, 2, 0, 5, astuple(model), 2.0, 0.0, (0, 0))
    charged = GenerationCharge(Quota(1.0, "device_seconds"), prompt_tokens=100)
    for _ in range(3):
        for answer in range(2):
            charged.came(state, answer)
    read = 2 * (100 + 101 + 102)
    assert charged.quota._left == pytest.approx(-2.0 * (6 * 0.1 / 2 + 0.001 * read))
