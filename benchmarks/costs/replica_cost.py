"""The core time of a query in a replica's process, without Ray and with an engine that takes no time.

python -m benchmarks.costs.replica_cost    microseconds of a query, by the queries of a frame and of an offer
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from deployments.embedding.frames import Offer, Offers
from deployments.embedding.replica import Embedder
from deployments.embedding.run_loop import RunLoop
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy

SHAPES = ((1, 1), (8, 1), (64, 1), (64, 32))  # queries of a frame, and of each offer in it
_BATCH = 64  # queries of a run
_DIMENSION, _RUNS, _ROUNDS = 384, 400, 5
_QUICK = CostModel.of_curve(1e-6, 0.0)  # fast enough that nothing is refused and no run waits for a burst's end
_SETTINGS = {"router": "r", "slo_s": 1.0, "admission": "deadline", "bulk_share": 0.5, "max_batch_fraction": 1.0}


class _Instant:
    """An engine that answers each batch at once, in one pass."""

    micro_batch_tokens = 0

    def __init__(self) -> None:
        self._rows = np.full((256, _DIMENSION), 0.05, np.float32)

    def passes(self, batch: Any, _: threading.Event) -> Any:
        yield np.arange(len(batch)), (self._rows[: len(batch)],)


class _Router:
    """The Router's end: counts what comes."""

    unsent, bytes = 0, 0

    def hang_up(self) -> None:
        """Nothing is broken here."""

    def send(self, report: Any) -> None:
        self.bytes += sum(len(part) for frame in report.encode() for part in frame)


def query_us(queries: int, of_offer: int, runs: int = _RUNS) -> float:
    """Microseconds of a core for one query: from the frame's bytes to the bytes of its answer."""
    return statistics.median(asyncio.run(_run(queries, of_offer, runs)) for _ in range(_ROUNDS))


async def _run(queries: int, of_offer: int, runs: int) -> float:
    """While a run of 64 queries is with the engine, 64 others come."""
    embedder: Any = SimpleNamespace(_engine=_Instant(), _card=SimpleNamespace(kind="embedding", dimension=_DIMENSION))
    embedder._shape = lambda *found: Embedder._shape(embedder, *found)  # noqa: SLF001
    with_engine = []

    def compute(*run: Any) -> None:
        with_engine.append(run)

    async def end() -> None:
        run, passed, ended, stop = with_engine.pop()
        Embedder._run(embedder, run, passed, stop)  # noqa: SLF001
        ended(None)
        await asyncio.sleep(0)

    loop = RunLoop(Scheduler(_QUICK, Policy(1.0)), compute)
    router = _Router()
    loop.receive(router, Offers(settings=dict(_SETTINGS)))
    ids = [np.arange(QUERY_TOKENS, dtype=np.int32)] * of_offer
    encoded = [
        b"".join(Offers([Offer(frame * queries + n, 1.0, ids) for n in range(0, queries, of_offer)]).encode())
        for frame in range(runs * _BATCH // queries)
    ]
    started, frames = time.process_time(), iter(encoded)
    for _ in range(runs):
        for _ in range(_BATCH // queries):
            loop.receive(router, Offers.decode(next(frames)))
        await end()
    while loop.is_busy:
        await end()
    took_s = time.process_time() - started
    assert router.bytes > runs * _BATCH * _DIMENSION * 4, "not all were answered"
    return took_s / (runs * _BATCH) * 1e6


if __name__ == "__main__":
    for queries, of_offer in SHAPES:
        print(f"{queries:3} queries a frame, {of_offer:2} an offer: {query_us(queries, of_offer):6.1f} us a query")
