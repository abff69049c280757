"""The core time of a query in a replica's process, without Ray and with an engine that takes no time.

python -m benchmarks.costs.replica_cost    microseconds of a query, by the queries of a frame and of an offer
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvloop

from deployments.embedding.frames import Offer, Offers
from deployments.embedding.replica import Embedder
from deployments.embedding.run_loop import RunLoop
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy
from deployments.serve_adapter.replica_process import freeze_gc
from deployments.serving.connections import Server
from deployments.serving.frames import HEAD

SHAPES = ((1, 1), (8, 1), (64, 1), (64, 32))  # queries of a frame, and of each offer in it
_BATCH = 64  # queries of a run
_DIMENSION, _RUNS, _ROUNDS = 384, 400, 5
_PROCESS_RUNS = 1500
_QUICK = CostModel.of_curve(1e-6, 0.0)  # fast enough that nothing is refused and no run waits for a burst's end
_SETTINGS = {"router": "r", "slo_s": 1.0, "admission": "deadline", "bulk_share": 0.5, "max_batch_fraction": 1.0}


class _Instant:
    """An engine that answers each batch in one pass, after `seconds` without the GIL."""

    micro_batch_tokens = 0

    def __init__(self, seconds: float = 0.0) -> None:
        self._rows, self._seconds = np.full((1024, _DIMENSION), 0.05, np.float32), seconds

    def passes(self, batch: Any, _: threading.Event) -> Any:
        if self._seconds:
            time.sleep(self._seconds)
        yield np.arange(len(batch)), (self._rows[: len(batch)],)


def _embedder(**more: Any) -> Any:
    one: Any = SimpleNamespace(_card=SimpleNamespace(kind="embedding", dimension=_DIMENSION), **more)
    one._shape = lambda *found: Embedder._shape(one, *found)  # noqa: SLF001
    one._run = lambda *run: Embedder._run(one, *run)  # noqa: SLF001
    return one


def _frames(queries: int, of_offer: int, frames: int) -> Iterator[bytes]:
    ids = [np.arange(QUERY_TOKENS, dtype=np.int32)] * of_offer
    for frame in range(frames):
        offers = [Offer(frame * queries + n, 1.0, ids) for n in range(0, queries, of_offer)]
        yield b"".join(Offers(offers).encode())


# --- the code alone ---------------------------------------------------------------------------------------------------


class _Router:
    """The Router's end: counts what comes."""

    unsent, bytes = 0, 0

    def __init__(self, spent: Counter[str]) -> None:
        self._spent = spent

    def hang_up(self) -> None:
        """Nothing is broken here."""

    def send(self, report: Any) -> None:
        with _part(self._spent, "encode"):
            self.bytes += sum(len(part) for frame in report.encode() for part in frame)


@contextmanager
def _part(spent: Counter[str], name: str) -> Iterator[None]:
    started = time.process_time_ns()
    yield
    spent[name] += time.process_time_ns() - started


def query_us(queries: int, of_offer: int, runs: int = _RUNS) -> dict[str, float]:
    """Microseconds of a core for one query, from the frame's bytes to the bytes of its answer, in all and by part."""
    rounds = [asyncio.run(_run(queries, of_offer, runs)) for _ in range(_ROUNDS)]
    return {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}


async def _run(queries: int, of_offer: int, runs: int) -> dict[str, float]:
    """While a run of 64 queries is with the engine, 64 others come."""
    spent = Counter[str]()
    embedder, with_engine = _embedder(_engine=_Instant()), list[Any]()

    def compute(*run: Any) -> None:
        with_engine.append(run)

    async def end() -> None:
        run, passed, ended, stop = with_engine.pop()
        told = list[Any]()
        with _part(spent, "run"):
            embedder._run(run, lambda *found: told.append(found), stop)  # noqa: SLF001
        with _part(spent, "answer"):
            for found in told:
                passed(*found)
            ended(None)
        await asyncio.sleep(0)

    loop = RunLoop(Scheduler(_QUICK, Policy(1.0)), compute)
    router = _Router(spent)
    loop.receive(router, Offers(settings=dict(_SETTINGS)))
    await asyncio.sleep(0)
    frames = _frames(queries, of_offer, (runs + 1) * _BATCH // queries)
    loop.receive(router, Offers.decode(next(frames)))
    encoded = list(frames)
    freeze_gc()
    started = time.process_time()
    for at in range(0, len(encoded), _BATCH // queries):
        for frame in encoded[at : at + _BATCH // queries]:
            with _part(spent, "decode"):
                offers = Offers.decode(frame)
            with _part(spent, "admit"):
                loop.receive(router, offers)
        await end()
    while loop.is_busy:
        await end()
    took_s = time.process_time() - started
    assert router.bytes > runs * _BATCH * _DIMENSION * 4, "not all were answered"
    each = runs * _BATCH
    return {"all": took_s / each * 1e6, **{part: ns / each / 1e3 for part, ns in spent.items()}}


# --- a process of its own ---------------------------------------------------------------------------------------------


def process_us(queries: int, of_offer: int, runs: int = _PROCESS_RUNS, seconds: float = 0.002) -> float:
    """Microseconds of a core for one query, of a process with sockets, an event loop and the engine's thread. Two
    batches of 64 are there at once, and each run takes `seconds` in the engine without a core.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_serve, args=(there, seconds), daemon=True)
    child.start()
    port, secret = here.recv()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HEAD.pack(HEAD.size + len(secret), 0) + secret.encode())
        connection.sendall(b"".join(Offers(settings=dict(_SETTINGS)).encode()))
        encoded = list(_frames(queries, of_offer, (runs + 2) * _BATCH // queries))
        reader, sent, owed = connection.makefile("rb", 1 << 20), 0, 2 * _BATCH
        bytes_of_answer, answered = _DIMENSION * 4, 0
        while answered < runs * _BATCH:
            while owed >= queries and sent < len(encoded):
                connection.sendall(encoded[sent])
                sent, owed = sent + 1, owed - queries
            size, head = HEAD.unpack(reader.read(HEAD.size))
            body = reader.read(size - HEAD.size)
            came = (len(body) - head) // bytes_of_answer
            if not answered and came:
                here.send("begin")
            owed, answered = owed + came, answered + came
        here.send("end")
        used_s: float = here.recv()
    child.join()
    return used_s / answered * 1e6


def _serve(pipe: Any, seconds: float) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    uvloop.run(_replica(pipe, seconds))


async def _replica(pipe: Any, seconds: float) -> None:
    embedder = _embedder(_engine=_Instant(seconds), _thread=ThreadPoolExecutor(1))
    worker = RunLoop(Scheduler(_QUICK, Policy(1.0)), lambda *run: Embedder._compute(embedder, *run))  # noqa: SLF001
    server = Server("127.0.0.1", worker.receive, worker.gone, Offers.decode)
    pipe.send((await server.start(), server.secret))
    freeze_gc()
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    used_s = list[float]()
    for _ in range(2):
        await told.wait()
        pipe.recv()
        told.clear()
        used_s.append(time.process_time())
    pipe.send(used_s[1] - used_s[0])


if __name__ == "__main__":
    for queries, of_offer in SHAPES:
        found = query_us(queries, of_offer)
        parts = ", ".join(f"{part} {us:.1f}" for part, us in found.items() if part != "all")
        alone = statistics.median(process_us(queries, of_offer) for _ in range(3))
        print(
            f"{queries:3} queries a frame, {of_offer:2} an offer: {found['all']:5.1f} us a query ({parts}); "
            f"in a process of its own {alone:5.1f}",
            flush=True,
        )
