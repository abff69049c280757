"""The way to the device and back: the proxy, a Router and the sockets, of ordinary queries timed at the client.

The paper's stress test times queries at the client, so a depth leaves room for the way. One query's way is what a lone
query takes less its batch. A burst's way is longer, because Routers read its queries one by one. So the way is a
line too: `beta_s` of one query, and `alpha_s` more of each other one that comes with it.
"""

from __future__ import annotations

from statistics import median

from calibration.fit.curve import Curve
from calibration.measure.planned import PlannedBursts
from calibration.measure.traffic import Traffic
from calibration.service.application import CalibrationFailed

_LONE, _PLANNED, _BURSTS, _BURST = 9, 5, 3, 16  # lone queries, planned runs, bursts, and the queries of a burst
_LEAST_S = 1e-5  # of a query: no Router is quicker
_OF_SLO, _OF_RATE = 0.5, 0.7  # the part of an SLO, and of the way's rate, that a proof's burst and stream may take


def most_at_once(way: Curve, slo_s: float) -> int:
    """How large a burst may be if it should show what the devices do."""
    return max(1, int(_OF_SLO * slo_s / way.alpha_s))


def most_rate(way: Curve) -> float:
    """The same for a stream, in queries per second."""
    return _OF_RATE / way.alpha_s


async def measure_way(traffic: Traffic, runs: PlannedBursts, pool: str) -> Curve:
    """Send ordinary queries, then time the same batches on `pool`, the preferred one, without the way. Raises
    CalibrationFailed.
    """
    lone = [await traffic.burst("way", {}, 1) for _ in range(_LONE)]
    bursts = [await traffic.burst("way", {}, _BURST) for _ in range(_BURSTS)]
    alone = [seconds for one in lone for seconds in one.latencies_s[pool]]
    if not alone:
        raise CalibrationFailed(f"the {pool} pool answers no queries: it must be open while it is calibrated")
    whole = [found for one in bursts if len(found := one.latencies_s[pool]) == _BURST]
    lone_s = max(0.0, median(alone) - median([await runs.seconds("way", pool, 1) for _ in range(_PLANNED)]))
    if not whole:  # a device so slow that it does not take so many
        return Curve(_LEAST_S, lone_s)
    batch_s = median([await runs.seconds("way", pool, _BURST) for _ in range(_BURSTS)])
    more_s = median(map(max, whole)) - batch_s - lone_s
    return Curve(max(_LEAST_S, more_s / (_BURST - 1)), lone_s)
