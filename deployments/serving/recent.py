"""Counts of what a Router answered, refused and missed in the last five minutes, for `/info`. Pure."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

BUCKET_S, BUCKETS = 5, 60
REFUSED, LATE = "refused", "late"
_MOST_FINISHES = 200
_FIRST, _THEN_EACH = 16, 8  # a bucket samples its first 16 finishes in time, then every eighth, to cover all of a burst


class Recent:
    """Counts in buckets of `BUCKET_S` seconds, and predicted and actual finishes of a sample and of all late ones.
    `clock`: s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[int, Counter[str]] = {}
        self._in_time: deque[tuple[int, float, float, str]] = deque(maxlen=_MOST_FINISHES)
        self._late: deque[tuple[int, float, float, str]] = deque(maxlen=_MOST_FINISHES)
        self._seen = (0, 0)  # bucket, and how many finished in time in it

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` queries now. `name`: the pool that answered them, REFUSED or LATE."""
        now = self._bucket()
        if now not in self._buckets:
            for old in [at for at in self._buckets if at <= now - BUCKETS]:
                del self._buckets[old]
            self._buckets[now] = Counter()
        self._buckets[now][name] += count

    def finished(self, predicted_s: float, actual_s: float, pool: str, *, late: bool) -> None:
        """Keep the request if it is late or in the sample. Both times are from its arrival to its answer."""
        now = self._bucket()
        found = (now, round(predicted_s, 4), round(actual_s, 4), pool)
        if late:
            self._late.append(found)
            return
        bucket, before = self._seen
        seen = before + 1 if bucket == now else 1
        self._seen = now, seen
        if seen <= _FIRST or seen % _THEN_EACH == 0:
            self._in_time.append(found)

    def describe(self) -> dict[str, Any]:
        """Counts by bucket, oldest first; the last bucket is incomplete. Finishes, of the sample and of the late, are
        [predicted s, actual s, pool], the newest 200 of each.
        """
        now = self._bucket()
        buckets = [self._buckets.get(at, Counter()) for at in range(now - BUCKETS + 1, now + 1)]
        pools = sorted({name for bucket in buckets for name in bucket} - {REFUSED, LATE})
        return {
            "bucket_s": BUCKET_S,
            "answered": {pool: [bucket[pool] for bucket in buckets] for pool in pools},
            "refused": [bucket[REFUSED] for bucket in buckets],
            "late": [bucket[LATE] for bucket in buckets],
            "finishes": [finish for at, *finish in self._in_time if at > now - BUCKETS],
            "late_finishes": [finish for at, *finish in self._late if at > now - BUCKETS],
        }

    def _bucket(self) -> int:
        return int(self._clock() // BUCKET_S)
