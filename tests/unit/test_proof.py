"""Fine-tuning and verification against devices that are formulas."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from calibration.fit.levels import Aim
from calibration.measure.journal import Burst
from calibration.measure.sweep import sweep
from calibration.prove.fine_tune import fine_tune
from calibration.prove.proof import tune, verify
from calibration.service.application import CalibrationFailed

V100, XEON = (0.018, 0.27), (0.0858, 0.32)
AIM = Aim(2.0)


class Devices:
    """`late[n]` seconds are added to burst n on the accelerator; `taken` places are somebody else's."""

    def __init__(self, curves, late=(), taken=0, replicas=1):
        self.curves, self.late, self.taken = curves, itertools.chain(late, itertools.repeat(0.0)), taken
        self.replicas = dict.fromkeys(curves, replicas)
        self.bursts = []

    def latency_s(self, alpha_s, beta_s, depth):
        return alpha_s * depth + beta_s

    async def burst(self, stage, depths, extra=0, tokens=None):
        more = next(self.late)
        latencies = {}
        for pool, (alpha_s, beta_s) in self.curves.items():
            answered = max(0, depths[pool] * self.replicas[pool] - self.taken)
            latencies[pool] = [self.latency_s(alpha_s, beta_s, depths[pool]) + more] * answered
            more = 0.0
        sent = sum(depths[pool] * self.replicas[pool] for pool in depths) + extra
        busy = sent - sum(map(len, latencies.values()))
        done = Burst(stage, 0.0, dict(depths), sent, busy, 0, latencies)
        self.bursts.append(done)
        return done


def verified(devices, depths, aim=AIM):
    return asyncio.run(verify(devices, depths, aim, lambda *_: None))


def test_one_slow_burst_changes_nothing():
    devices = Devices({"accelerator": V100}, late=[1.0])
    tuned = asyncio.run(tune(devices, fine_tune({"accelerator": 94}, 2048), AIM, lambda _: None))
    assert tuned.depths == {"accelerator": 96}


def test_depths_that_hold_are_verified_beyond_their_places():
    devices = Devices({"accelerator": V100, "cpu": XEON})
    proof = verified(devices, {"accelerator": 96, "cpu": 19})
    assert proof.depths == {"accelerator": 96, "cpu": 19}
    assert proof.share == 1.0
    assert len(proof.bursts) == 5
    assert all(burst.busy == 12 for burst in proof.bursts)  # a tenth more than there are places


def test_the_late_pool_alone_steps_down():
    devices = Devices({"accelerator": V100, "cpu": XEON})
    assert verified(devices, {"accelerator": 98, "cpu": 19}).depths == {"accelerator": 96, "cpu": 19}
    assert verified(devices, {"accelerator": 96, "cpu": 20}).depths == {"accelerator": 96, "cpu": 19}


def test_a_little_late_is_stepped_down_for_and_accepted_if_it_stays():
    """One query of each burst is late: 1 in 200, less than 1 %."""

    class Ragged(Devices):
        async def burst(self, stage, depths, extra=0, tokens=None):
            done = await super().burst(stage, depths, extra)
            done.latencies_s["accelerator"][0] = 2.1
            return done

    proof = verified(Ragged({"accelerator": (0.001, 0.1)}), {"accelerator": 200})
    assert proof.depths == {"accelerator": 197}
    assert 0.99 <= proof.share < 1.0


def test_what_never_holds_is_refused():
    devices = Devices({"accelerator": V100}, late=itertools.repeat(5.0))
    with pytest.raises(CalibrationFailed, match=r"0\.00% of the admitted .* nothing was written"):
        verified(devices, {"accelerator": 90})


def test_a_verification_that_cannot_be_won_any_more_ends_early():
    devices = Devices({"accelerator": V100}, late=[5.0])
    verified(devices, {"accelerator": 90})
    assert [burst.depths["accelerator"] for burst in devices.bursts] == [90] + [89] * 5


@pytest.mark.parametrize("replicas", [1, 3])
def test_places_that_others_take_are_no_proof(replicas):
    devices = Devices({"accelerator": V100, "cpu": XEON}, taken=1, replicas=replicas)
    with pytest.raises(CalibrationFailed, match="slots of the accelerator pool could be filled"):
        verified(devices, {"accelerator": 40, "cpu": 7})


def test_a_sweep_that_others_disturb_is_refused():
    devices = Devices({"cpu": XEON}, taken=1)
    with pytest.raises(CalibrationFailed, match="1 of 1 queries were refused by the cpu pool"):
        asyncio.run(sweep(devices, "cpu", Aim(2.0), lambda _: None))


def test_queries_that_fail_are_not_said_to_find_no_place():
    class Hanging(Devices):
        async def burst(self, stage, depths, extra=0, tokens=None):
            done = await super().burst(stage, depths, extra)
            return replace(done, failed=done.sent, latencies_s={"cpu": []})

    with pytest.raises(CalibrationFailed, match="1 of 1 queries failed on the cpu pool: a replica was lost, or hangs"):
        asyncio.run(sweep(Hanging({"cpu": XEON}), "cpu", Aim(2.0), lambda _: None))


def test_a_pool_too_slow_for_one_query_gets_no_depth():
    estimate = asyncio.run(sweep(Devices({"cpu": (0.5, 3.0)}), "cpu", Aim(2.0), lambda _: None))
    assert (estimate.depth, estimate.line, len(estimate.samples)) == (0, None, 3)
    assert estimate.smallest_slo_s(Aim(2.0)) == 3.5


def test_one_query_at_once_may_be_the_most():
    estimate = asyncio.run(sweep(Devices({"cpu": XEON}), "cpu", Aim(2.0, most=1), lambda _: None))
    assert (estimate.depth, estimate.line) == (1, None)
