"""A device by formula: what one run of it takes, and when its answers leave."""

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.engines import Stopped
from deployments.queueing.cost_model import QUERY_TOKENS, CostModel
from deployments.runner import Ended, OfferedQuery, Passed

_MOST = 8192
_UNIT, _NORMS = np.zeros((_MOST, 1), np.float32), np.ones(_MOST, np.float32)


@dataclass(frozen=True, slots=True)
class Device:
    """`alpha_s` for 75 tokens, in proportion for others, and `beta_s` for each run.

    `pass_queries`: answers leave with each pass of so many times 75 tokens; None: at the run's end. `noise`: the
    standard deviation of a run's time, as a share; `slow`: how many times as long all takes as it is thought to.
    """

    alpha_s: float
    beta_s: float
    pass_queries: int | None = None
    noise: float = 0.0
    slow: float = 1.0

    @property
    def model(self) -> CostModel:
        return CostModel.of_curve(self.alpha_s, self.beta_s)

    @property
    def pass_tokens(self) -> int:
        return QUERY_TOKENS * (self.pass_queries or 0)

    def queries_s(self, slo_s: float) -> float:
        """Queries of 75 tokens a second that it can answer within `slo_s`, whenever they come: its runs are as long as
        that allows. At the run's end a query waits for one run and is in the next.
        """
        run_s = slo_s if self.pass_queries else slo_s / 2
        return max(0.0, run_s - self.beta_s) / self.alpha_s / run_s

    def depth(self, slo_s: float, *, steady: bool) -> int:
        """The paper's depth; `steady`: for queries that come while it runs."""
        return max(1, int((slo_s - (1 + steady) * self.beta_s) / self.alpha_s + 1e-9))


@dataclass(slots=True, eq=False)
class Engine:
    """One such device at work, for `Runner`. `busy_s`: how long it has run."""

    device: Device
    seed: int = 0
    busy_s: float = 0.0
    _draw: random.Random = field(init=False)
    _running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def compute(self, run: Sequence[OfferedQuery], passed: Passed, ended: Ended, stop: threading.Event) -> None:
        """Begins a run; it ends with Stopped where nobody waits any more."""
        self._running = asyncio.get_running_loop().create_task(self._run(run, passed, ended, stop))

    async def _run(self, run: Sequence[OfferedQuery], passed: Passed, ended: Ended, stop: threading.Event) -> None:
        device, model = self.device, self.device.model
        times = device.slow * (1 + self._draw.gauss(0, device.noise) if device.noise else 1.0)
        wait_s = device.beta_s
        for indices in self._passes(run):
            wait_s += sum(model.cost_s(len(run[index].ids)) for index in indices)
            await asyncio.sleep(wait_s * times)
            self.busy_s += wait_s * times
            wait_s = 0.0
            if stop.is_set():
                ended(Stopped())
                return
            passed(np.array(indices), _UNIT[: len(indices)], _NORMS[: len(indices)])
        ended(None)

    def _passes(self, run: Sequence[OfferedQuery]) -> Iterator[range]:
        most = self.device.pass_tokens
        start = tokens = 0
        for index, waiting in enumerate(run):
            if most and index > start and tokens + len(waiting.ids) > most:
                yield range(start, index)
                start, tokens = index, 0
            tokens += len(waiting.ids)
        yield range(start, len(run))
