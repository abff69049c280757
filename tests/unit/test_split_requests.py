"""Requests of many queries that no replica has room for alone: their parts meet at the replicas of two nodes."""

import asyncio
import random

import pytest

from benchmarks.simulation.application import Application, Shape, _text
from benchmarks.simulation.arrivals import Arrival
from benchmarks.simulation.device import Device
from benchmarks.simulation.virtual_time import run
from deployments.embedding.link import Link
from deployments.embedding.request import Request
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.errors import Busy
from tests.kit.replica_world import V100, XEON

SLO_S = 1.0
SEEDS, BURSTS, BURST_S = 3, 40, 0.7
MOST_TURNS = 10**7


async def send_bursts(application, seed):
    """Requests of up to the work of a run, several at almost the same time."""
    draw, requests = random.Random(seed), []
    for _ in range(BURSTS):
        for size in draw.choices([1, 4, 12, 30, 45], k=draw.randint(2, 6)):
            router = draw.choice(application.routers)
            requests.append(asyncio.create_task(send(router, size, draw.choice([20, 75, 150]))))
            await asyncio.sleep(draw.choice([0.0, 0.0, 0.002, 0.02]))
        await asyncio.sleep(draw.expovariate(1 / BURST_S))
    return sum(await asyncio.gather(*requests))


async def send(router, size, tokens):
    """How many queries were answered."""
    try:
        answer = await router.embed(Request([_text(Arrival(0.0, tokens))] * size))
    except Busy:
        return 0
    return len(answer.vectors)


@pytest.mark.parametrize("micro_batch_queries", [8, None])
@pytest.mark.parametrize("delay_s", [(0.0, 0.0), (0.001, 0.004), (0.002, 0.03)], ids=str)
def test_no_query_of_a_split_request_is_late(micro_batch_queries, delay_s, monkeypatch):
    """Also where it takes longer than a run waits to hear of the other parts. By the clocks of the replicas."""
    late, parts, passed, confirm = [], [], Scheduler.passed, Link.confirm

    def look(schedule, now, queries):
        queries = list(queries)
        late.extend(now - query.due for query in queries if now > query.due + 1e-6)
        passed(schedule, now, queries)

    def count(link, pending):
        parts.append(pending)
        confirm(link, pending)

    monkeypatch.setattr(Scheduler, "passed", look)
    monkeypatch.setattr(Link, "confirm", count)
    devices = {"accelerator": Device(*V100, micro_batch_queries), "cpu": Device(*XEON, micro_batch_queries)}

    async def serve(seed):
        application = Application(Shape(2, 2, devices, SLO_S, delay_s=delay_s, seed=seed))
        await application.start()
        return await send_bursts(application, seed)

    answered = sum(run(serve(seed), MOST_TURNS) for seed in range(SEEDS))
    assert not late
    assert len(parts) > 20
    assert answered > 3500
