"""Verification against devices that are formulas."""

import asyncio
import itertools

import pytest

from calibration.fit.levels import Aim
from calibration.measure.sweep import sweep
from calibration.prove.proof import Load, step_down, verify
from calibration.report.report_model import Burst
from calibration.service.application import CalibrationFailed

V100, XEON = (0.018, 0.27), (0.0858, 0.32)
AIM = Aim(2.0)


class Devices:
    """`late[n]` seconds are added to run or burst n on the accelerator."""

    tokens, problem = 75, ""

    def __init__(self, curves, late=(), replicas=1):
        self.curves, self.late = curves, itertools.chain(late, itertools.repeat(0.0))
        self.replicas = dict.fromkeys(curves, replicas)
        self.bursts, self.in_force = [], {}

    def latency_s(self, alpha_s, beta_s, depth):
        return alpha_s * depth + beta_s

    async def seconds(self, stage, pool, size, tokens=None):
        return self.latency_s(*self.curves[pool], size) + next(self.late)

    async def put_in_force(self, depths):
        self.in_force = dict(depths)

    async def burst(self, stage, depths, queries):
        assert depths == self.in_force
        more, left, latencies = next(self.late), queries, {}
        for pool, (alpha_s, beta_s) in self.curves.items():
            answered = min(left, depths[pool] * self.replicas[pool])
            latencies[pool] = [self.latency_s(alpha_s, beta_s, depths[pool]) + more] * answered
            left, more = left - answered, 0.0
        done = Burst(stage, 0.0, dict(depths), queries, left, 0, latencies)
        self.bursts.append(done)
        return done


def verified(devices, depths, aim=AIM, most=10_000):
    load = Load(devices, devices.replicas, most)
    return asyncio.run(verify(load, depths, aim, devices.put_in_force, lambda *_: None))


def test_depths_that_hold_are_verified_beyond_their_places():
    devices = Devices({"accelerator": V100, "cpu": XEON})
    proof = verified(devices, {"accelerator": 96, "cpu": 19})
    assert proof.depths == {"accelerator": 96, "cpu": 19}
    assert proof.share == 1.0
    assert proof.bursts == len(devices.bursts) == 5
    assert all(burst.busy == 12 for burst in devices.bursts)  # a tenth more than there are places


def test_the_late_pool_alone_steps_down():
    devices = Devices({"accelerator": V100, "cpu": XEON})
    assert verified(devices, {"accelerator": 98, "cpu": 19}).depths == {"accelerator": 96, "cpu": 19}
    assert verified(devices, {"accelerator": 96, "cpu": 20}).depths == {"accelerator": 96, "cpu": 19}


def test_what_never_holds_is_refused():
    devices = Devices({"accelerator": V100}, late=itertools.repeat(5.0))
    with pytest.raises(CalibrationFailed, match=r"0\.00% of the admitted .* nothing was written"):
        verified(devices, {"accelerator": 90})


def test_a_verification_that_cannot_be_won_any_more_ends_early():
    devices = Devices({"accelerator": V100}, late=[5.0])
    verified(devices, {"accelerator": 90})
    assert [burst.depths["accelerator"] for burst in devices.bursts] == [90] + [89] * 5


def test_a_burst_is_no_larger_than_the_way_carries():
    devices = Devices({"accelerator": V100}, replicas=3)
    assert verified(devices, {"accelerator": 90}, most=100).bursts == 5
    assert {burst.sent for burst in devices.bursts} == {110}
    late = Devices({"accelerator": V100}, late=[5.0])  # by the way: smaller depths are not tried
    assert verified(late, {"accelerator": 90}, most=20).depths == {"accelerator": 90}
    assert {burst.depths["accelerator"] for burst in late.bursts} == {90}


def test_a_pool_too_slow_for_one_query_gets_no_depth_and_one_may_be_the_most():
    estimate = asyncio.run(sweep(Devices({"cpu": (0.5, 3.0)}), "cpu", Aim(2.0), lambda _: None))
    assert (estimate.depth, estimate.line, len(estimate.samples)) == (0, None, 3)
    assert estimate.smallest_slo_s(Aim(2.0)) == 3.5
    estimate = asyncio.run(sweep(Devices({"cpu": XEON}), "cpu", Aim(2.0, most=1), lambda _: None))
    assert (estimate.depth, estimate.line) == (1, None)


def test_a_depth_that_stays_late_is_lowered_by_more_and_more():
    depth, lowered = 100, []
    for attempt in range(8):
        depth = step_down(depth, attempt)
        lowered.append(depth)
    assert lowered == [99, 98, 96, 92, 84, 68, 36, 0]
    assert [step_down(depth, attempt=0) for depth in (0, 1, 2, 99, 200, 1000)] == [0, 0, 1, 98, 198, 990]


def test_bursts_that_are_all_refused_verify_nothing():
    class Leased(Devices):
        async def burst(self, stage, depths, queries):
            return Burst(stage, 0.0, dict(depths), queries, queries, 0, {pool: [] for pool in depths})

    with pytest.raises(CalibrationFailed, match="no query of the verification was admitted"):
        verified(Leased({"accelerator": V100}), {"accelerator": 96})
