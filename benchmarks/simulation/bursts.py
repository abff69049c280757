"""What an accelerator and a CPU answer of one burst, in virtual time: the paper's measure of concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.simulation import virtual_time
from benchmarks.simulation.application import Application, Shape
from benchmarks.simulation.arrivals import QUERY_TOKENS, Arrival, poisson
from benchmarks.simulation.device import Device

_MOST_TURNS = 100_000_000
_ROUNDS = 20
_SPARE = 1.5  # a burst's queries, over those that the devices could answer
_STREAM_S = 120.0


class Answered(NamedTuple):
    """Queries that were answered in time in the worst of some bursts, by pool, and the late ones of all bursts."""

    by_pool: Mapping[str, int]
    late: int

    @property
    def all(self) -> int:
        return sum(self.by_pool.values())


def of_a_burst(devices: Mapping[str, Device], slo_s: float, tokens: int = QUERY_TOKENS, *, by_depth: bool) -> Answered:
    """All queries of a burst arrive at once at idle devices. `by_depth`: admission by the paper's count."""
    return virtual_time.run(_bursts(devices, slo_s, tokens, by_depth=by_depth), _MOST_TURNS)


def busy_share(devices: Mapping[str, Device], slo_s: float) -> Mapping[str, float]:
    """By pool, the share of its time that a device computes under a stream of twice the capacity."""
    return virtual_time.run(_stream(devices, slo_s), _MOST_TURNS)


async def _bursts(devices: Mapping[str, Device], slo_s: float, tokens: int, *, by_depth: bool) -> Answered:
    scaled = {pool: _for_length(device, tokens) for pool, device in devices.items()}
    depths = {pool: int((slo_s - device.beta_s) / device.alpha_s + 1e-9) for pool, device in scaled.items()}
    able = {pool: device for pool, device in devices.items() if depths[pool] > 0}  # Eq. 11
    app = Application(Shape(1, 1, able, slo_s, depths={pool: depths[pool] for pool in able} if by_depth else None))
    await app.start()
    worst, late = Answered({}, 0), 0
    for number in range(_ROUNDS):
        app.ended.clear()
        await app.serve([Arrival(0.0, tokens)] * (10 + int(_SPARE * sum(depths.values()))))
        late += sum(one.pool is not None and not one.in_time for one in app.ended)
        found = Answered({pool: sum(one.in_time and one.pool == pool for one in app.ended) for pool in able}, 0)
        worst = found if number == 0 else min(worst, found, key=lambda one: one.all)
        await asyncio.sleep(2 * slo_s)
    return Answered(worst.by_pool, late)


def _for_length(device: Device, tokens: int) -> Device:
    return Device(device.alpha_s * tokens / QUERY_TOKENS, device.beta_s)


async def _stream(devices: Mapping[str, Device], slo_s: float) -> Mapping[str, float]:
    app = Application(Shape(1, 1, devices, slo_s))
    await app.start()
    await app.serve(poisson(2 * sum(device.queries_s(slo_s) for device in devices.values()), _STREAM_S))
    return {replica.pool: replica.engine.busy_s / _STREAM_S for replica in app.replicas.values()}
