"""A device in a `StepWorld` whose steps an engine really computes, so the world's clock is real time."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.simulation.hybrid_device import HybridStep
from benchmarks.simulation.step_world import StepDevice
from deployments.generation.engine.steps import Steps
from deployments.generation.scheduler.work import Chunk, Copy, Work


@dataclass(slots=True, eq=False, kw_only=True)
class TrueDevice(StepDevice):
    """`steps`: the engine, in its own thread. All its tokens are equal, because only times matter. The time of
    scheduler and world between two steps counts too.
    """

    steps: Steps
    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    _origin: float = field(default_factory=time.monotonic)
    _running: Future[HybridStep] = field(init=False)

    def _begin(self, copies: Sequence[Copy]) -> None:
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
        self._running = self._thread.submit(self._compute, work)

    def _compute(self, work: Work) -> HybridStep:
        _, arrived, compute_s, _ = self.steps.step(work)
        return HybridStep(time.monotonic() - self._origin - self.began, arrived, compute_s)

    def _run(self) -> HybridStep:
        return self._running.result()
