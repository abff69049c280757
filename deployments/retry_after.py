"""When a refused client should come back: computed from what the pools run and hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_OVERDUE_SHARE = 0.25  # of what a batch has taken so far: how long one that is past its time is thought to need still
_MARGIN = 1.03  # who comes a moment too early is refused once more; a batch may end a moment late
_SHORTEST_S = 0.01
_UNKNOWN_S = 1.0  # nothing runs and nothing is known


class Running(NamedTuple):
    """What a replica does: a run of `queries` since `seconds`, and `next_queries` that wait there for its next run."""

    queries: int
    seconds: float
    next_queries: int = 0


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """One pool's latency model (Eq. 12), its capacity (depth times live replicas), and what it runs and holds.

    `running`: of each busy replica; `waiting`: queries that are with no replica yet.
    """

    alpha_s: float
    beta_s: float
    capacity: int
    running: Sequence[Running]
    waiting: int


def retry_after_s(asked: int, free: int, pools: Sequence[PoolLoad]) -> float:
    """Seconds until `asked` places should be free, given `free` now: batches end in order and free their places.

    More than the pools hold at once takes as many full rounds as it fills them.
    """
    pools = [pool for pool in pools if pool.capacity]
    capacity = sum(pool.capacity for pool in pools)
    if not capacity:
        return _UNKNOWN_S
    full_round_s = max(pool.alpha_s * pool.capacity + pool.beta_s for pool in pools)
    rounds, missing = divmod(max(0, asked - free), capacity)
    soonest_s = 0.0
    for ends_s, places in sorted(end for pool in pools for end in _ends(pool)):
        if missing <= 0:
            break
        missing -= places
        soonest_s = ends_s
    if missing > 0:
        rounds += 1
    return max(_SHORTEST_S, _MARGIN * (soonest_s + rounds * full_round_s))


def _ends(pool: PoolLoad) -> list[tuple[float, int]]:
    """(seconds from now, places freed) of each run of the pool, those that wait included."""
    ends, first_s = [], []
    for queries, elapsed_s, then in pool.running:
        left_s = pool.alpha_s * queries + pool.beta_s - elapsed_s
        ends_s = left_s if left_s > 0 else _OVERDUE_SHARE * max(elapsed_s, pool.beta_s)
        ends.append((ends_s, queries))
        first_s.append(ends_s)
        if then:
            ends.append((ends_s + pool.alpha_s * then + pool.beta_s, then))
    if pool.waiting:
        ends.append((min(first_s, default=0.0) + pool.alpha_s * pool.waiting + pool.beta_s, pool.waiting))
    return ends
