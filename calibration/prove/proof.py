"""The verification: ordinary traffic on all pools together while the depths are in force. Nothing is written if it
fails.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from calibration.fit.curve import Curve
from calibration.fit.levels import Aim
from calibration.measure.traffic import Traffic
from calibration.report.report_model import Burst, LatenciesReport, VerificationReport
from calibration.service.application import CalibrationFailed

REQUIRED = 0.99  # share of the admitted queries that must meet the SLO
_QUERIES, _FEWEST_BURSTS, _MOST_BURSTS = 200, 5, 30  # of a verification
_OVERLOAD = 0.1  # more queries than slots, so that the verification includes refusals
_ATTEMPTS = 8  # at smaller and smaller depths
_STEP = 100  # the first step down is 1/100 of a depth
_STEADY_PROOF = 10  # its length, in SLOs
_SHORTEST_WINDOW_S = 3.0
_STEADY_CLIENTS, _STEADY_PAUSE = 0.5, 0.25  # more clients than slots; a client's pause, in SLOs
_OF_SLO, _OF_RATE = 0.5, 0.7  # the part of an SLO, and of the way's rate, that a proof's burst and stream may take


def most_at_once(way: Curve, slo_s: float) -> int:
    """How large a burst may be if it should show what the devices do."""
    return max(1, int(_OF_SLO * slo_s / way.alpha_s))


def most_rate(way: Curve) -> float:
    """The same for a stream, in queries per second."""
    return _OF_RATE / way.alpha_s


@dataclass(frozen=True, slots=True)
class Load:
    """Ordinary traffic for a proof. `replicas`: by pool; depths are per replica. `most`: of a burst (`Way`)."""

    traffic: Traffic
    replicas: Mapping[str, int]
    most: int

    def slots(self, depths: Mapping[str, int]) -> int:
        """How many queries a burst fills, which may be fewer than the depths take."""
        return max(1, min(self.most, self._all(depths)))

    def fills(self, depths: Mapping[str, int]) -> bool:
        """Whether it does. Otherwise a late query is the way's fault, and smaller depths would not help."""
        return self._all(depths) <= self.most

    def _all(self, depths: Mapping[str, int]) -> int:
        return sum(depth * self.replicas[pool] for pool, depth in depths.items())

    async def send(self, depths: Mapping[str, int], aim: Aim) -> Burst:
        """More queries than the depths take: at once, or from clients that come at any moment."""
        slots = self.slots(depths)
        if aim.shape == "steady":
            window_s = max(_SHORTEST_WINDOW_S, _STEADY_PROOF * aim.slo_s)
            clients = slots + math.ceil(_STEADY_CLIENTS * slots)
            return await self.traffic.steady("verify", depths, clients, window_s, _STEADY_PAUSE * aim.slo_s)
        return await self.traffic.burst("verify", depths, slots + math.ceil(_OVERLOAD * slots))


async def verify(
    load: Load,
    depths: Mapping[str, int],
    aim: Aim,
    put_in_force: Callable[[Mapping[str, int]], Awaitable[None]],
    say: Callable[[str], None],
) -> VerificationReport:
    """Put these depths in force, and send more load than they admit. If too many queries of a pool are late, reduce its
    depth and repeat. Raises CalibrationFailed after `_ATTEMPTS`, or if the preferred pool's depth reaches 0.
    """
    depths = dict(depths)
    for attempt in range(_ATTEMPTS):
        await put_in_force(depths)
        found = await _verify_once(load, depths, aim, say)
        if not found.admitted:
            raise CalibrationFailed(
                "no query of the verification was admitted (is another calibration running?): nothing was written"
            )
        late = [name for name, pool in found.pools.items() if pool.late > (1 - REQUIRED) * pool.admitted]
        if not late:
            return found
        if load.fills(depths):
            depths = {pool: step_down(depth, attempt) if pool in late else depth for pool, depth in depths.items()}
        if not next(iter(depths.values())):
            break
    raise CalibrationFailed(
        f"the depths did not hold: {found.share:.2%} of the admitted queries were answered within "
        f"{aim.slo_s:g} s, {REQUIRED:.0%} are needed; nothing was written. The device or the machine "
        "is too unsteady for this SLO: calibrate when traffic is low, or increase the SLO"
    )


def step_down(depth: int, attempt: int) -> int:
    """The smaller depth to verify after attempt number `attempt` (0, 1, ...) was late. The steps grow."""
    return max(0, depth - max(1, depth // _STEP) * (1 << max(0, attempt - 1)))


async def _verify_once(load: Load, depths: dict[str, int], aim: Aim, say: Callable[[str], None]) -> VerificationReport:
    wanted = max(_FEWEST_BURSTS, min(_MOST_BURSTS, math.ceil(_QUERIES / load.slots(depths))))
    planned = 1 if aim.shape == "steady" else wanted
    bursts: list[Burst] = []
    for number in range(planned):
        bursts.append(await load.send(depths, aim))
        say(f"{number + 1} of {planned}")
        found = _sum_up(depths, bursts, aim.slo_s)
        if aim.shape == "burst" and found.late > (1 - REQUIRED) * load.slots(depths) * planned:
            break  # further bursts cannot make up for it
    if failed := sum(burst.failed for burst in bursts):
        raise CalibrationFailed(f"{failed} queries failed in the verification: nothing was written")
    return found


def _sum_up(depths: dict[str, int], bursts: list[Burst], slo_s: float) -> VerificationReport:
    pools = {
        pool: LatenciesReport.of([latency for burst in bursts for latency in burst.latencies_s[pool]], slo_s)
        for pool in depths
    }
    admitted, late = (sum(getattr(pool, name) for pool in pools.values()) for name in ("admitted", "late"))
    return VerificationReport(
        depths=depths,
        bursts=len(bursts),
        admitted=admitted,
        busy=sum(burst.busy for burst in bursts),
        share=1 - late / admitted if admitted else 0.0,
        pools=pools,
    )
