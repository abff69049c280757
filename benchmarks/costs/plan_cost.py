"""What it costs a core to plan a step with a host, without an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter_ns

import numpy as np

from deployments.generation.scheduling.chunk import Computed, Work
from deployments.generation.scheduling.host_side import Host
from deployments.generation.scheduling.hybrid_plan import HostRow
from deployments.generation.scheduling.rows import Generation
from deployments.generation.scheduling.step_policy import StepPolicy
from deployments.generation.scheduling.step_schedule import StepSchedule
from deployments.generation.scheduling.step_time import HostTime, StepLoad, StepTime
from deployments.generation.step_work import steps_in
from deployments.generation.stepper import Stepper
from deployments.generation.text.sampling import Picked, RowSamplers, Sampling
from deployments.generation.token_frames import GenerationOffer, GenerationOffers
from deployments.serve_adapter.garbage import spare_what_is_loaded
from deployments.transport.channel import Frames

SEQUENCES = 256
_HERE = SEQUENCES // 4  # on the accelerator; the others are on the host
_PROMPT, _ANSWER, _BLOCKS = 512, 512, 8  # tokens, and blocks that hold both
_TIMES = StepTime(0.04, 4e-5, 1.4e-6, 0.0, 0.0, 1024)
_HOST = HostTime(1e-6, 2e-7, 1e-5, 32)  # so fast that there is room for each of its rows: each is looked at
_STEP_S = 0.1


def plan_us(plans: int) -> dict[str, float]:
    """Of one decision (`HybridPlanner.choose`): which of the host's rows take part, and how."""
    planner, load = Host(_HOST, 1).planner(_TIMES), StepLoad(_HERE, _HERE * _PROMPT)
    rows = [HostRow(_PROMPT + number) for number in range(SEQUENCES - _HERE)]
    return _quantiles([_took_us(lambda: planner.choose(load, rows)) for _ in range(plans)])


def step_us(steps: int, *, hybrid: bool) -> dict[str, float]:
    """Of one `StepSchedule.next_step`, all in: with the host's rows, or with as many on the accelerator."""
    schedule, now, found = _schedule(hybrid=hybrid), 0.0, list[float]()
    for _ in range(SEQUENCES):
        assert schedule.offer(now, Generation(_PROMPT, _ANSWER, now + 1e4, 100.0)), "there is room"
    while len(found) < steps:
        begins = bool(schedule.state(now).waiting)
        took_us = _took_us(partial(schedule.next_step, now))
        now += _STEP_S
        schedule.ended(now, _STEP_S)
        found += [] if begins else [took_us]
    return _quantiles(found)


def pause_us(steps: int, *, hybrid: bool) -> dict[str, float]:
    """Of an engine, from the end of a step to the begin of the next one: the `Stepper` accounts for the one, composes
    the other, and two threads wake each other. The engine computes nothing for as long as that takes.
    """
    spare_what_is_loaded()  # as a replica does
    return _quantiles(asyncio.run(_pauses_us(steps, _schedule(hybrid=hybrid))))


async def _pauses_us(steps: int, schedule: StepSchedule) -> list[float]:
    engine, thread = _Engine(schedule), ThreadPoolExecutor(1)
    stepper = Stepper(schedule, steps_in(thread, engine))
    ids, sampling = np.ones(_PROMPT, np.int32), Sampling(0.0)
    offers = [GenerationOffer(number, 1e4, ids, _ANSWER, sampling, tpot_s=100.0) for number in range(SEQUENCES)]
    settings = {"router": "", "ttft_s": 1e4, "tpot_s": 100.0, "bulk_share": 0.5, "model": None, "host": None}
    router = _Router()
    stepper.receive(router, GenerationOffers(settings=settings, offers=offers))
    while len(engine.pauses_us) < steps:  # noqa: ASYNC110 - the steps are those of another thread
        await asyncio.sleep(_STEP_S)
    stepper.gone(router)
    await stepper.drained()
    thread.shutdown()
    return engine.pauses_us


class _Engine:
    """`chunk.Steps`, and `chunk.DeviceLogits`. Its steps sleep for as long as they are planned to take. It keeps the
    pauses before those that have no prompts.
    """

    def __init__(self, schedule: StepSchedule) -> None:
        self.pauses_us: list[float] = []
        self._schedule = schedule
        self._ended_at = 0

    def step(self, work: Work) -> Computed:
        if self._ended_at and all(len(chunk.ids) == 1 for chunk in work.chunks):
            self.pauses_us.append((perf_counter_ns() - self._ended_at) / 1000)
        time.sleep(self._schedule.planned_s)
        return Computed(self)

    def pick(self, samplers: Sequence[RowSamplers]) -> list[list[Picked] | None]:
        self._ended_at = perf_counter_ns()
        return [[Picked(1)] * len(one.samplers) for one in samplers]


class _Router:
    """`stepper.Connection`: what it is sent is made, and thrown away."""

    unsent = 0

    def send(self, report: Frames) -> None:
        report.encode()

    def hang_up(self) -> None: ...


def _schedule(*, hybrid: bool) -> StepSchedule:
    host = Host(_HOST, (SEQUENCES - _HERE) * _BLOCKS) if hybrid else None
    return StepSchedule(_TIMES, StepPolicy(1e4, 100.0), (_HERE if hybrid else SEQUENCES) * _BLOCKS, host=host)


def _took_us(call: Callable[[], object]) -> float:
    began = perf_counter_ns()
    call()
    return (perf_counter_ns() - began) / 1000


def _quantiles(found: Sequence[float]) -> dict[str, float]:
    return {"p50_us": float(np.quantile(found, 0.5)), "p99_us": float(np.quantile(found, 0.99))}
