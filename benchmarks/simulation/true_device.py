"""A device in a `StepWorld` whose steps an engine really computes: the world's clock is the true one then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.simulation.hybrid_device import HybridStep
from benchmarks.simulation.step_world import StepDevice
from deployments.generation.scheduling.chunk import Chunk, Copy, Steps, Work


@dataclass(slots=True, eq=False, kw_only=True)
class TrueDevice(StepDevice):
    """`steps`: the engine. What it computes does not matter, only when: all tokens are the same one. What the schedule
    takes, and the world, comes between two steps.
    """

    steps: Steps
    _origin: float = field(default_factory=time.monotonic)

    def _run(self, now: float, copies: Sequence[Copy]) -> HybridStep:
        batches: list[list[Chunk]] = [[], []]
        parking = []
        for row, start, tokens, wanted, batch in self.step:
            ids, on_host = np.zeros(tokens, np.int32), row.generation.on_host
            chunk = Chunk(ids, start, tuple(row.table), wanted, on_host)
            if row.parked is not None:
                parking.append((row.parked, chunk))
            else:
                batches[batch].append(chunk)
        work = Work(batches[0], copies, batches[1], parking, self.work.called_off, self.work.joins)
        _, arrived, busy = self.steps.step(work)
        return HybridStep(time.monotonic() - self._origin - now, arrived, busy)
