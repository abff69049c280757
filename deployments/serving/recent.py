"""Counts of what a Router answered, refused and missed in the last five minutes, for `/info`. Pure."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

BUCKET_S, BUCKETS = 5, 60
REFUSED, LATE = "refused", "late"
_MOST_FINISHES = 200
_FIRST, _THEN_EACH = 16, 8  # a bucket samples its first 16 finishes, then every eighth, to cover all of a burst


class Recent:
    """Counts in buckets of `BUCKET_S` seconds, and a sample of predicted and actual finishes. `clock`: s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[int, Counter[str]] = {}
        self._finishes: deque[tuple[int, float, float, str]] = deque(maxlen=_MOST_FINISHES)
        self._asked = (0, 0)  # bucket, and how many were asked for in it

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` queries now. `name`: the pool that answered them, REFUSED or LATE."""
        now = self._bucket()
        if now not in self._buckets:
            for old in [at for at in self._buckets if at <= now - BUCKETS]:
                del self._buckets[old]
            self._buckets[now] = Counter()
        self._buckets[now][name] += count

    def wants_finish(self) -> bool:
        """Whether to sample the finish of the request that arrives now."""
        now = self._bucket()
        bucket, before = self._asked
        asked = before + 1 if bucket == now else 1
        self._asked = now, asked
        return asked <= _FIRST or asked % _THEN_EACH == 0

    def finished(self, predicted_s: float, actual_s: float, pool: str) -> None:
        """Add a request to the sample. Both times are from its arrival to its answer."""
        self._finishes.append((self._bucket(), round(predicted_s, 4), round(actual_s, 4), pool))

    def describe(self) -> dict[str, Any]:
        """Counts by bucket, oldest first; the last bucket is incomplete. Finishes are [predicted s, actual s, pool]."""
        now = self._bucket()
        buckets = [self._buckets.get(at, Counter()) for at in range(now - BUCKETS + 1, now + 1)]
        pools = sorted({name for bucket in buckets for name in bucket} - {REFUSED, LATE})
        return {
            "bucket_s": BUCKET_S,
            "answered": {pool: [bucket[pool] for bucket in buckets] for pool in pools},
            "refused": [bucket[REFUSED] for bucket in buckets],
            "late": [bucket[LATE] for bucket in buckets],
            "finishes": [finish for at, *finish in self._finishes if at > now - BUCKETS],
        }

    def _bucket(self) -> int:
        return int(self._clock() // BUCKET_S)
