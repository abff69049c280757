"""The core time of planning a step with a host, without an engine."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns

import numpy as np

from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.hybrid.planner import HostRow
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import Generation
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime

SEQUENCES = 256
_HERE = SEQUENCES // 4  # on the accelerator; the others are on the host
_PROMPT, _ANSWER, _BLOCKS = 512, 512, 8  # tokens, and blocks that hold both
_TIMES = StepTime(0.04, 4e-5, 1.4e-6, 0.0, 0.0, 1024)
_HOST = HostTime(1e-6, 2e-7, 1e-5, 32)  # so fast that all of its rows have room, and each is considered
_STEP_S = 0.1


def plan_us(plans: int) -> dict[str, float]:
    """Time of one decision (`HybridPlanner.choose`): which of the host's rows take part, and how."""
    planner, load = HostCache(_HOST, 1).planner(_TIMES), StepLoad(_HERE, _HERE * _PROMPT)
    rows = [HostRow(_PROMPT + number) for number in range(SEQUENCES - _HERE)]
    return _quantiles([_took_us(lambda: planner.choose(load, rows)) for _ in range(plans)])


def step_us(steps: int, *, hybrid: bool) -> dict[str, float]:
    """Time of one whole `StepScheduler.next_step`: with rows on the host, or with as many on the accelerator."""
    schedule, now, found = _schedule(hybrid=hybrid), 0.0, list[float]()
    for _ in range(SEQUENCES):
        assert schedule.offer(now, Generation(_PROMPT, _ANSWER, now + 1e4, 100.0)).admitted, "there is room"
    while len(found) < steps:
        begins = bool(schedule.state(now).waiting)
        took_us = _took_us(partial(schedule.next_step, now))
        now += _STEP_S
        schedule.ended(now, _STEP_S)
        found += [] if begins else [took_us]
    return _quantiles(found)


def _schedule(*, hybrid: bool) -> StepScheduler:
    host = HostCache(_HOST, (SEQUENCES - _HERE) * _BLOCKS) if hybrid else None
    return StepScheduler(_TIMES, StepPolicy(1e4, 100.0), (_HERE if hybrid else SEQUENCES) * _BLOCKS, host=host)


def _took_us(call: Callable[[], object]) -> float:
    began = perf_counter_ns()
    call()
    return (perf_counter_ns() - began) / 1000


def _quantiles(found: Sequence[float]) -> dict[str, float]:
    return {"p50_us": float(np.quantile(found, 0.5)), "p99_us": float(np.quantile(found, 0.99))}
