"""Loads both pools together: runs the trials of fine-tuning, and the verification. Nothing is written if that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from calibration.fit.levels import Aim
from calibration.measure.journal import Burst
from calibration.measure.trials import TrialLoads
from calibration.prove.fine_tune import Held, Tuned, Tuning, step_down
from calibration.service.application import CalibrationFailed

REQUIRED = 0.99  # share of the admitted queries that must meet the SLO
_DECIDED = 2  # bursts that must agree, because one slow burst proves nothing
_QUERIES, _FEWEST_BURSTS, _MOST_BURSTS = 200, 5, 30  # of a verification
_OVERLOAD = 0.1  # more queries than slots, so that the verification includes refusals
_POLISHED = 2  # most times that depths that hold are reduced so that no query at all is late
_ATTEMPTS = 7  # at smaller and smaller depths
_STEADY_TRIAL, _STEADY_PROOF = 4, 10  # windows, in SLOs
_SHORTEST_WINDOW_S = 3.0
_STEADY_CLIENTS, _STEADY_PAUSE = 0.5, 0.25  # more clients than slots; a client's pause, in SLOs


@dataclass(frozen=True, slots=True)
class TuningStep:
    """One trial of fine-tuning, for the report."""

    depths: Mapping[str, int]
    slowest_s: Mapping[str, float]
    held: Held


async def tune(trials: TrialLoads, tuning: Tuning, aim: Aim, on_step: Callable[[TuningStep], None]) -> Tuned:
    """Run the trials that `tuning` asks for."""
    try:
        depths = next(tuning)
        while True:
            step = await _try(trials, depths, aim)
            on_step(step)
            depths = tuning.send(step.held)
    except StopIteration as done:
        tuned: Tuned = done.value
        return tuned


async def _try(trials: TrialLoads, depths: Mapping[str, int], aim: Aim) -> TuningStep:
    """Repeat a trial until each pool has held or failed often enough."""
    open_pools = [pool for pool, depth in depths.items() if depth]
    good, bad, slowest = (dict.fromkeys(open_pools, 0), dict.fromkeys(open_pools, 0), dict.fromkeys(open_pools, 0.0))
    decided = _DECIDED if aim.shape == "burst" else 1
    while any(max(good[pool], bad[pool]) < decided for pool in open_pools):
        burst = await _load(trials, "fine-tune", depths, aim, _STEADY_TRIAL)
        for pool in open_pools:
            latencies = burst.latencies_s[pool]
            slowest[pool] = max(slowest[pool], *latencies)
            if max(good[pool], bad[pool]) < decided:
                (good if _holds(latencies, aim) else bad)[pool] += 1
    held = {pool: good.get(pool, 0) >= decided or not depth for pool, depth in depths.items()}
    return TuningStep(dict(depths), slowest, held)


def _holds(latencies_s: list[float], aim: Aim) -> bool:
    if aim.shape == "steady":
        return aim.within(latencies_s) >= REQUIRED * len(latencies_s)
    return aim.within(latencies_s) >= aim.quantile * len(latencies_s)


async def _load(trials: TrialLoads, stage: str, depths: Mapping[str, int], aim: Aim, windows: int) -> Burst:
    places = sum(depth * trials.replicas[pool] for pool, depth in depths.items())
    slo_s = aim.slo_s
    if aim.shape == "steady":
        extra = math.ceil(_STEADY_CLIENTS * places)
        window_s = max(_SHORTEST_WINDOW_S, windows * slo_s)
        burst = await trials.steady(stage, depths, extra, window_s, _STEADY_PAUSE * slo_s)
    else:
        burst = await trials.burst(stage, depths, math.ceil(_OVERLOAD * places) if stage == "verify" else 0)
    for pool, depth in depths.items():
        if len(burst.latencies_s[pool]) < depth * trials.replicas[pool]:
            raise CalibrationFailed(
                f"{len(burst.latencies_s[pool])} of {depth * trials.replicas[pool]} slots of the {pool} pool could be "
                "filled: other traffic is served at the same time, or a replica was lost; calibrate when traffic is low"
            )
    return burst


@dataclass(frozen=True, slots=True)
class Verification:
    """The last run at the final depths. `late[pool]` of `admitted[pool]` queries were answered after the SLO."""

    depths: dict[str, int]
    bursts: tuple[Burst, ...]
    admitted: dict[str, int]
    late: dict[str, int]

    @property
    def share(self) -> float:
        """The share of the admitted queries that met the SLO."""
        admitted = sum(self.admitted.values())
        return 1 - sum(self.late.values()) / admitted if admitted else 0.0

    @property
    def failed(self) -> int:
        return sum(burst.failed for burst in self.bursts)

    def late_pools(self) -> list[str]:
        """The pools that miss REQUIRED. If only their sum misses it: all pools with late queries."""
        allowed = 1 - REQUIRED
        late = [pool for pool, count in self.late.items() if count > allowed * self.admitted[pool]]
        return late or ([pool for pool, count in self.late.items() if count] if 1 - self.share > allowed else [])


async def verify(
    trials: TrialLoads, depths: Mapping[str, int], aim: Aim, on_burst: Callable[[int, int], None]
) -> Verification:
    """Send more load than these depths admit. If too many queries are late, reduce the late pool's depth and repeat. If
    REQUIRED holds but a few are late, reduce it once or twice more.

    Raises CalibrationFailed after `_ATTEMPTS`, or if the preferred pool's depth reaches 0.
    """
    depths = dict(depths)
    good: list[Verification] = []
    for attempt in range(_ATTEMPTS):
        verification = await _verify_once(trials, depths, aim, on_burst)
        if verification.failed:
            raise CalibrationFailed(f"{verification.failed} queries failed in the verification: nothing was written")
        late = verification.late_pools()
        if not late:
            good.append(verification)
            late = [pool for pool, count in verification.late.items() if count and depths[pool] > 1]
            if not late or len(good) > _POLISHED:
                return verification
        elif good:
            return good[-1]  # more late queries at smaller depths: the machine's noise
        depths = {pool: step_down(depth, attempt) if pool in late else depth for pool, depth in depths.items()}
        if not next(iter(depths.values())):
            break
    raise CalibrationFailed(
        f"the depths did not hold: {verification.share:.2%} of the admitted queries were answered within "
        f"{aim.slo_s:g} s, {REQUIRED:.0%} are needed; nothing was written. The device or the machine "
        "is too unsteady for this SLO: calibrate when traffic is low, or increase the SLO"
    )


async def _verify_once(
    trials: TrialLoads, depths: dict[str, int], aim: Aim, on_burst: Callable[[int, int], None]
) -> Verification:
    places = sum(depth * trials.replicas[pool] for pool, depth in depths.items())
    wanted = max(_FEWEST_BURSTS, min(_MOST_BURSTS, math.ceil(_QUERIES / places)))
    planned = 1 if aim.shape == "steady" else wanted
    bursts: list[Burst] = []
    for number in range(planned):
        bursts.append(await _load(trials, "verify", depths, aim, _STEADY_PROOF))
        on_burst(number + 1, planned)
        found = _sum_up(depths, bursts, aim)
        if aim.shape == "burst":
            late = any(
                count > (1 - REQUIRED) * depths[pool] * trials.replicas[pool] * planned
                for pool, count in found.late.items()
            )
            if late:
                break  # further bursts cannot make up for it
    return found


def _sum_up(depths: dict[str, int], bursts: list[Burst], aim: Aim) -> Verification:
    by_pool = {pool: [latency for burst in bursts for latency in burst.latencies_s[pool]] for pool in depths}
    return Verification(
        depths=dict(depths),
        bursts=tuple(bursts),
        admitted={pool: len(latencies) for pool, latencies in by_pool.items()},
        late={pool: len(latencies) - aim.within(latencies) for pool, latencies in by_pool.items()},
    )
