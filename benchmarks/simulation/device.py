"""A simulated device: how long a batch takes, and when its answers leave."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.embedding.run import EngineQuery, by_output
from deployments.embedding.run_loop import Ended, Passed
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel
from deployments.engines import Stopped
from deployments.models.outputs import TEXT, Numbers


@dataclass(frozen=True, slots=True)
class Device:
    """`alpha_s`: seconds per query of 75 tokens, in proportion to the tokens. `beta_s`: seconds per batch.

    `micro_batch_queries`: answers leave after each micro-batch of this many times 75 tokens; None: at the end of the
    batch. `noise`: relative standard deviation of a batch's time. `slow`: factor on all times that the scheduler does
    not know.
    """

    alpha_s: float
    beta_s: float
    micro_batch_queries: int | None = None
    noise: float = 0.0
    slow: float = 1.0

    @property
    def model(self) -> CostModel:
        return CostModel.of_curve(self.alpha_s, self.beta_s)

    @property
    def micro_batch_tokens(self) -> int:
        return QUERY_TOKENS * (self.micro_batch_queries or 0)

    def queries_s(self, slo_s: float) -> float:
        """Queries of 75 tokens per second that it can answer within `slo_s` at any arrival time, with batches as long
        as that allows. With answers at the end, a query waits for one batch and runs in the next.
        """
        run_s = slo_s if self.micro_batch_queries else slo_s / 2
        return max(0.0, run_s - self.beta_s) / self.alpha_s / run_s

    def depth(self, slo_s: float, *, steady: bool) -> int:
        """The paper's depth. `steady`: for queries that arrive while a batch runs."""
        return max(1, int((slo_s - (1 + steady) * self.beta_s) / self.alpha_s + 1e-9))


@dataclass(slots=True, eq=False)
class Engine:
    """A simulated engine for `RunLoop`. `runs`: the number of queries in each batch. `busy_s`: how long it has run.

    `outcome(query)`: None, the error that the batch fails with, or the norm of the answer. An answer is the first token
    and the number of tokens.
    """

    device: Device
    seed: int = 0
    busy_s: float = 0.0
    slow: float = 1.0  # on top of the device's own
    runs: list[int] = field(default_factory=list)
    stopped: int = 0
    outcome: Callable[[EngineQuery], Exception | float | None] = lambda _: None
    _draw: random.Random = field(init=False)
    _running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def compute(self, run: Sequence[EngineQuery], passed: Passed, ended: Ended, stop: threading.Event) -> None:
        """Begin a batch. It ends with Stopped if nobody waits for it any more."""
        assert self._running is None, "two runs at once"
        self.runs.append(len(run))
        self._running = asyncio.get_running_loop().create_task(self._run(run, passed, ended, stop))

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _run(self, run: Sequence[EngineQuery], passed: Passed, ended: Ended, stop: threading.Event) -> None:
        device, model = self.device, self.device.model
        times = self.slow * device.slow * (1 + self._draw.gauss(0, device.noise) if device.noise else 1.0)
        wait_s, problem = device.beta_s, None
        for indices in self._passes(run):
            wait_s += sum(model.cost(len(run[index].ids)) for index in indices)
            await asyncio.sleep(wait_s * times)
            self.busy_s += wait_s * times
            wait_s = 0.0
            outcomes = [self.outcome(run[index]) for index in indices]
            problem = (
                Stopped() if stop.is_set() else next((one for one in outcomes if isinstance(one, Exception)), None)
            )
            if problem is not None:
                break
            norms = np.array([1.0 if norm is None else norm for norm in outcomes], np.float32)
            passed(np.array(indices), [_answer(run[index]) for index in indices], norms)
        self.stopped += isinstance(problem, Stopped)
        self._running = None
        ended(problem)

    def _passes(self, run: Sequence[EngineQuery]) -> Iterator[list[int]]:
        most, lengths = self.device.micro_batch_tokens, [len(query.ids) for query in run]
        for group in by_output([query.outputs for query in run], lengths, most):
            start = tokens = 0
            for place, index in enumerate(group):
                if most and place > start and tokens + lengths[index] > most:
                    yield group[start:place]
                    start, tokens = place, 0
                tokens += lengths[index]
            yield group[start:]


def _answer(query: EngineQuery) -> Numbers:
    row = np.array([query.ids[0], len(query.ids)], np.float32)
    return row if query.outputs == TEXT else np.tile(row, len(query.ids))
