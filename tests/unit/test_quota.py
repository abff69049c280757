"""What one API key may use in all, in simulated time."""

import random

import pytest

from deployments.generation.generation_quota import Charged
from deployments.generation.scheduling.step_schedule import StepState
from deployments.generation.scheduling.step_time import StepTime
from deployments.queueing.quota import Quota


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


def test_who_comes_back_when_told_is_let_in():
    quota = Quota(0.5, "device_seconds")
    assert quota.wait_s(0.0, 1) == 0
    quota.spend(10.0)
    wait_s = quota.wait_s(0.0, 1)
    assert wait_s > 14
    assert quota.wait_s(0.5 * wait_s, 1) > 0
    assert quota.wait_s(wait_s, 1) == 0


def test_what_was_refused_is_given_back():
    quota = Quota(1.0, "device_seconds")
    assert quota.wait_s(0.0, 1) == 0
    quota.spend(100.0)
    quota.spend(-100.0)
    assert quota.wait_s(0.0, 1) == 0


def test_a_router_that_joins_takes_its_part():
    quota = Quota(1000.0, "tokens")
    assert quota.wait_s(0.0, 1) == 0
    assert quota.wait_s(0.0, 2) == 0
    quota.spend(2500.0)
    assert 0 < quota.wait_s(0.0, 2) < 0.1


def test_an_answer_pays_for_what_it_reads_not_for_what_others_of_its_request_read():
    model = StepTime(0.1, 0.0, 0.001, 0.0, 0.0)
    state = StepState(0.0, 0.0, 0.0, 9, 9, 2, 0, 5, model.as_tuple(), 2.0, 0.0, (0, 0))
    charged = Charged(Quota(1.0, "device_seconds"), 100)
    for _ in range(3):
        for answer in range(2):
            charged.came(state, answer)
    read = 2 * (100 + 101 + 102)
    assert charged.quota._left == pytest.approx(-2.0 * (6 * 0.1 / 2 + 0.001 * read))
