"""The proof by streams: ordinary queries arrive one by one, more than the devices can answer, and are admitted by
predicted finish. Admitted queries must be in time; the others are refused.

REQUIRED allows twice as many late queries as serving should have over minutes. A stream of a few seconds has few
queries, and one slow batch is a large share of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from calibration.measure.traffic import Traffic
from calibration.prove.proof import REQUIRED
from calibration.report.report_model import StreamReport
from calibration.service.application import CalibrationFailed

OVERLOAD = 1.5  # times the pools' throughput
_SLOS, _SHORTEST_S = 10, 3.0  # length of a stream: in SLOs, and at least in seconds
_SPREAD = 0.9  # standard deviation of the logarithm of mixed lengths
_SHORTEST_TOKENS = 3
_ATTEMPTS = 2

Arrival = tuple[float, int]  # seconds after the first; tokens


@dataclass(frozen=True, slots=True)
class Stream:
    """Poisson arrivals of `rate` queries per second with `tokens` each. `mixed`: log-normal lengths with this mean."""

    name: str
    rate: float
    tokens: int
    mixed: bool

    def arrivals(self, slo_s: float, most_tokens: int, seed: int) -> list[Arrival]:
        chance = random.Random(seed)  # noqa: S311 - not a secret; seeded, so that a run can be repeated
        at, found = 0.0, []
        middle = math.log(self.tokens) - _SPREAD**2 / 2
        while at < max(_SHORTEST_S, _SLOS * slo_s):
            tokens = round(chance.lognormvariate(middle, _SPREAD)) if self.mixed else self.tokens
            found.append((at, min(most_tokens, max(_SHORTEST_TOKENS, tokens))))
            at += chance.expovariate(self.rate)
        return found


async def prove(traffic: Traffic, stream: Stream, arrivals: Sequence[Arrival], slo_s: float) -> StreamReport:
    """Send the stream, and once more if too many are late. Raises CalibrationFailed if that is late too, or fails."""
    for _ in range(_ATTEMPTS):
        sent = await traffic.stream(stream.name, slo_s, arrivals)
        latencies_s = [latency for pool in sent.latencies_s.values() for latency in pool]
        if sent.failed or not latencies_s:
            why = f" (one failed with {traffic.problem})" if traffic.problem else ""
            raise CalibrationFailed(
                f"{sent.failed} of {sent.sent} queries of a {stream.name} failed and {len(latencies_s)} were answered: "
                f"nothing was written{why}"
            )
        found = StreamReport.of(latencies_s, slo_s, sent=sent.sent, busy=sent.busy, **asdict(stream))
        if found.late <= (1 - REQUIRED) * found.admitted:
            return found
    raise CalibrationFailed(
        f"the SLO does not hold for a {stream.name} of {stream.rate:.3g} queries a second: {found.late} of "
        f"{found.admitted} admitted queries were answered after {slo_s:g} s; nothing was written. Calibrate when "
        "traffic is low, or increase the SLO"
    )
