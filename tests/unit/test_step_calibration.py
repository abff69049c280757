"""The calibration of generation, from planned steps to the proof: what is measured, fitted, promised and refused."""

from __future__ import annotations

import asyncio
import random
from dataclasses import astuple

import pytest

from calibration.generation.request_capacity import Mix, Replica, capacity, longest_prompt, refused
from calibration.generation.step_series import MeasuredStep, StepFit, StepRoom, all_series, measure
from calibration.service.application import CalibrationFailed
from deployments.generation.step_schedule import StepPolicy
from deployments.generation.step_time import StepLoad, StepTime

ROOM = StepRoom(step_tokens=2048, blocks=512, context=8192)
TIMES = {
    "accelerator": StepTime(0.04, 0.0004, 1e-6, 0.0002, 5e-8, 16),
    "cpu": StepTime(0.08, 0.004, 4e-6, 0.002, 2e-7, 4),
    "a small model": StepTime(0.002, 0.0002, 1e-7, 0.00005, 1e-8, 0),
}
POLICY = StepPolicy(2.0, 0.2)


class Device:
    """Steps take what `time` says, and scatter; what does not fit into the room is not run."""

    def __init__(self, time, noise=0.0, room=ROOM, seed=0):
        self.time, self.noise, self.room, self.draw = time, noise, room, random.Random(seed)
        self.asked = []

    async def ask(self, step):
        self.asked.append(step)
        if not step.fits(*self.room):
            return None
        return tuple(self.time.seconds(step.load) * (1 + self.draw.gauss(0, self.noise)) for _ in range(3))

    def measured(self, longest_s=0.25, planned_for=None):
        return asyncio.run(measure(planned_for or self.room, longest_s, self.ask))


@pytest.mark.parametrize(
    "room", [ROOM, StepRoom(64, 2048, 512), StepRoom(8, 256, 8192), StepRoom(4096, 2048, 64), StepRoom(4, 8, 16)]
)
def test_series_grow_and_fit(room):
    for steps in all_series(room).values():
        assert all(step.fits(*room) for step in steps)
        sizes = [step.rows + sum(tokens for _, tokens in step.chunks) for step in steps]
        assert sizes == sorted(set(sizes))


def test_a_series_stops_at_its_first_long_step_and_where_there_is_no_room():
    slow = Device(TIMES["cpu"])
    by_series = {}
    for one in slow.measured(0.1):
        by_series.setdefault(one.series, []).append(one.median_s)
    assert all(max(seconds[:-1], default=0.0) <= 0.1 for seconds in by_series.values())
    small = Device(TIMES["accelerator"], room=ROOM._replace(blocks=32))
    found = small.measured(planned_for=ROOM)
    assert all(one.step.fits(*small.room) for one in found)
    assert len(small.asked) - len(found) <= len(all_series(ROOM))


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("seed", range(3))
def test_the_truth_is_found_through_noise(name, seed):
    truth = TIMES[name]
    fit = StepFit.of(Device(truth, noise=0.03, seed=seed).measured())
    fit.check(name, 0.2)
    assert fit.median_error < 0.03
    for load in (StepLoad(8, 8 * 500), StepLoad(24, 24 * 300).with_chunk(0, 100), StepLoad().with_chunk(500, 60)):
        assert fit.time.seconds(load) == pytest.approx(truth.seconds(load), rel=0.06)


def test_what_is_written_is_what_was_found():
    fit = StepFit.of(Device(TIMES["accelerator"]).measured())
    assert tuple(fit.settings().values()) == astuple(fit.time)
    assert isinstance(fit.settings()["knee"], int)


def chance(seed):
    """Steps that follow nothing."""
    draw = random.Random(seed)
    steps = [step for steps in all_series(ROOM).values() for step in steps]
    return [MeasuredStep("any", step, (draw.lognormvariate(-4, 1),) * 3) for step in steps]


@pytest.mark.parametrize(
    ("measured", "problem"),
    [
        (chance(1), "follow no formula"),
        (Device(TIMES["cpu"]).measured()[:5], "only 5 steps of the cpu pool fit"),
        (Device(StepTime(0.5, 0, 0, 0, 0)).measured(1.0), "0.5 s for one token of one answer"),
    ],
)
def test_a_bad_fit_is_refused_in_a_sentence(measured, problem):
    with pytest.raises(CalibrationFailed, match=problem):
        StepFit.of(measured).check("cpu", 0.2)


def test_at_the_capacity_nearly_all_are_admitted_and_beyond_it_not():
    replicas = [Replica(TIMES["accelerator"], 512, 2048)]
    mix = Mix(200, 32, longest_prompt(replicas, POLICY), 8192)
    found = capacity(replicas, POLICY, mix, 0)
    for times, least, most in ((0.8, 0.0, 0.02), (2.0, 0.1, 1.0)):
        arrivals = mix.arrivals(times * found, 300 / (times * found), seed=5)
        share = refused(replicas, POLICY, arrivals, len(arrivals)) / len(arrivals)
        assert least <= share <= most, (times, share)


def test_two_replicas_take_more_and_a_device_that_is_too_slow_takes_nothing():
    one = Replica(TIMES["accelerator"], 512, 2048)
    mix = Mix(200, 16, 4000, 8192)
    alone = capacity([one], POLICY, mix, 0)
    assert 1.5 * alone < capacity([one, one], POLICY, mix, 0) < 3 * alone
    assert capacity([Replica(StepTime(3.0, 0, 0, 0, 0), 512, 2048)], POLICY, mix, 0) == 0


def test_a_mix_keeps_its_bounds_and_its_means():
    mix = Mix(300, 60, 100_000, 100_000)
    arrivals = mix.arrivals(10, 200, seed=3)
    assert sum(one.prompt_tokens for one in arrivals) / len(arrivals) == pytest.approx(300, rel=0.1)
    assert sum(one.answer_tokens for one in arrivals) / len(arrivals) == pytest.approx(60, rel=0.1)
    assert arrivals[-1].at == pytest.approx(200, rel=0.1)
    for one in Mix(300, 60, 400, 220).arrivals(10, 50, seed=3, together=5):
        assert 1 <= one.prompt_tokens <= 200
        assert 1 <= one.answer_tokens <= 220 - one.prompt_tokens
    moments = [one.at for one in Mix(300, 60, 400, 220).arrivals(10, 50, seed=3, together=5)]
    assert len(set(moments)) == len(moments) / 5
