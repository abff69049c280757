"""One burst of queries and its outcome."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst and its outcome. `depths`: per live replica. `latencies_s`: by the pool that answered. `at`: Unix time,
    in seconds.
    """

    stage: str  # way, sweep, stress test, 10 tokens (a length), verify, stream
    at: float
    depths: dict[str, int]
    sent: int
    busy: int
    failed: int
    latencies_s: dict[str, list[float]]
