"""What one API key may use in all, in simulated time."""

import random

import pytest

from deployments.admission.quota import Quota


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
