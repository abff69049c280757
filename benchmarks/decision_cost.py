"""What the decisions cost a core by the number of Routers and replicas, measured without Ray and without devices."""

from __future__ import annotations

import asyncio
import time
import tracemalloc

import numpy as np
from deployments.batcher import Reply
from deployments.channel import Batch, BatchServer, Channel
from deployments.leases import Depth, Leases, Word

from benchmarks.cluster import Cluster, Device, Seen, Shape
from benchmarks.virtual_time import run

_LOOPBACK = "127.0.0.1"
_TURNS = 10**9


def office_word_s(routers: int, words: int = 2000) -> float:
    """Seconds for one word at an office that knows so many Routers: a question in a round, or places given back."""
    leases, depth = Leases(), Depth(1, 4 * routers)
    for number in range(routers):
        leases.join(str(number), depth, 0)
    for _ in range(3):
        for router in leases.routers:
            order = leases.take_order(router)
            if order is not None:
                keep = 0 if leases.is_sole(router) else None
                leases.hear(router, Word(order.term, depth, order.recall, keep=keep))
    terms = {}
    for router in leases.routers:
        told = leases.join(router, depth, 0)  # begins anew, and so says its term
        terms[router] = told.term
    rounds = max(64, words // routers)
    started = time.perf_counter()
    for number in range(rounds):
        router = str(number % routers)
        missing = 4 - leases.ask(router, terms[router], 4)
        leases.recall({router: missing}, gently=True)
        leases.answer(router, terms[router], missing, patient=True)
        _take_all(leases)
        leases.give(router, terms[router], leases.held(router))
        _take_all(leases)
    return (time.perf_counter() - started) / rounds / 2


def _take_all(leases: Leases) -> None:
    """As the office, which looks after each word whether there is news for those who listen."""
    for router in leases.routers:
        leases.take_order(router)


def query_s(replicas: int, queries: int = 1500) -> float:
    """Seconds for one query of a Router that shares so many replicas of a pool: admission, batcher and release, and a
    simulated device, which costs the same however many replicas there are.
    """
    quick = Device(1e-3, 1e-2, 64)

    async def serve() -> float:
        cluster = Cluster(Shape(replicas, 2, {"accelerator": quick}))
        await cluster.start()
        rate = replicas * quick.most_queries_s / 4
        seen = Seen()
        started = time.perf_counter()
        await cluster.serve(rate, queries / rate, lambda: seen, lambda: None)
        spent_s = time.perf_counter() - started
        await cluster.stop()
        return spent_s / len(seen.latencies_s)

    return run(serve(), _TURNS)


def word_s(replicas: int, words: int = 300) -> float:
    """Seconds for what a Router does with each word of an office: its places are counted anew."""

    async def update() -> float:
        cluster = Cluster(Shape(replicas, 2, {"accelerator": Device(1e-3, 1e-2, 64)}))
        await cluster.start()
        tenancy = cluster.routers[0].tenancies["accelerator"]
        started = time.perf_counter()
        for _ in range(words):
            tenancy.update()
        spent_s = time.perf_counter() - started
        await cluster.stop()
        return spent_s / words

    return run(update(), _TURNS)


def slope(cost: dict[int, float]) -> float:
    """Least squares: how much each one more adds."""
    return float(np.polyfit(list(cost), list(cost.values()), 1)[0])


def channel_kb(channels: int = 200) -> float:
    """Kilobytes of Python's memory that one open channel takes, both ends together; the kernel's buffers aside."""

    async def embed(_id: str, batch: Batch) -> Reply:
        queries = len(batch.lengths)
        return np.zeros((queries, 1), np.float32), np.ones(queries, np.float32), 0.0

    async def measure() -> float:
        server = BatchServer(_LOOPBACK, embed, lambda _: None)
        port = await server.start()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        opened = [await Channel.open(_LOOPBACK, port, server.secret) for _ in range(channels)]
        for channel in opened:
            await channel.embed("a", [np.zeros(75, np.int32)])
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        for channel in opened:
            channel.close()
        server.close()
        await asyncio.sleep(0.05)
        return (after - before) / channels / 1000

    return asyncio.run(measure())
