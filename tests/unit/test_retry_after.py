from __future__ import annotations

import pytest

from deployments.retry_after import PoolLoad, Running, retry_after_s

ALPHA_S, BETA_S = 0.018, 0.27


def load(running=(), waiting=0, capacity=90, alpha_s=ALPHA_S, beta_s=BETA_S):
    return PoolLoad(alpha_s, beta_s, capacity, [Running(*one) for one in running], waiting)


@pytest.mark.parametrize(
    ("asked", "free", "pools", "expected_s"),
    [
        # one batch of 90, sent 0.5 s ago: its end
        (1, 0, [load([(90, 0.5)])], 1.89 - 0.5),
        # the pool that frees enough first
        (1, 0, [load([(90, 0.0)]), load([(10, 0.1)], capacity=18)], 0.45 - 0.1),
        # the small batch that ends soon does not free enough: wait for the large one
        (20, 5, [load([(80, 0.0)]), load([(10, 0.1)], capacity=18)], 1.71),
        # what waits runs after what runs
        (50, 0, [load([(10, 0.0)], waiting=80)], 0.45 + 1.71),
        # a small batch that was sent ahead runs after the large one, not beside it
        (1, 0, [load([(80, 0.2, 10)])], 1.71 - 0.2),
        (85, 0, [load([(80, 0.2, 10)])], 1.71 - 0.2 + 0.45),
        # a batch that is past its time: a share of what it has taken, never a hammering client
        (1, 0, [load([(10, 8.0)])], 2.0),
        # more than fits at once: rounds
        (200, 0, [load([(90, 0.0)])], 2 * 1.89 + 1.89),
        (1, 0, [load(capacity=0)], 1.0),
        (1, 0, [], 1.0),
        (1, 1, [load()], 0.01),
    ],
)
def test_computed_from_the_queues(asked, free, pools, expected_s):
    assert retry_after_s(asked, free, pools) == pytest.approx(expected_s * (1 if expected_s in {1.0, 0.01} else 1.03))
