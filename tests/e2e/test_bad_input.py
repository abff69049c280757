"""Many requests that nobody should send, against the real service: each ends with a refusal, none with our fault, and a
neighbour's queries are answered rightly all along.

`WINDVE_BAD_INPUTS=10000` sends more than these.
"""

import asyncio
import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import psutil
from bad_requests import HEADERS, call, frame, large, many, opened
from bad_sender import HUNG, send

from tests.kit import tei_wire

COUNT = int(os.environ.get("WINDVE_BAD_INPUTS", "500"))
SEED = int(os.environ.get("WINDVE_BAD_INPUTS_SEED", "15"))
AT_ONCE = 8
WARMING = 120  # large bodies: glibc keeps what they took, up to a bound
GROWTH_MIB = 48  # between a half and all
LONGEST_S = 60  # whoever stops sending is cut off after 10 s
TEXTS = ("Where does the overflow go?", "The accelerator answers first; the CPU takes what it cannot.")
SLOW, LET_BE_S = 200, 12  # connections; seconds after which those leave that nobody cuts off
_POST = b"POST /embed HTTP/1.1\r\nhost: windve\r\ncontent-length: "
SLOW_KINDS = {  # whether it is gRPC, what is sent at once, whether a byte follows each second, whether it is cut off
    "silent": (False, b"", False, True),
    "half a head": (False, _POST[:40], False, True),
    "a byte a second": (False, _POST + b"1000\r\n\r\n{", True, True),
    "a large body, a byte a second": (False, _POST + b"1000000\r\n\r\n" + b" " * 70_000, True, False),
    "idle after an answer": (False, b"GET /ping HTTP/1.1\r\nhost: windve\r\n\r\n", False, False),
    "gRPC: a preface and no more": (True, opened(), False, True),
    "gRPC: a call without its message": (True, opened(frame(HEADERS, 4, 1, call("/tei.v1.Embed/Embed"))), False, False),
}
OUR_FAULT = {"UNKNOWN", "UNAVAILABLE", "DATA_LOSS", HUNG}


def test_bad_requests_harm_nobody(real, figure):
    requests, chance = many(COUNT, SEED), random.Random(SEED)
    with neighbour(real) as seen:
        warming = (large(chance, "large bodies, first") for _ in range(WARMING))  # allocators and caches fill
        first = itertools.chain(warming, itertools.islice(requests, COUNT // 2))
        ended = asyncio.run(send(real, first, AT_ONCE, LONGEST_S))
        halfway = memory(real)
        ended += asyncio.run(send(real, requests, AT_ONCE, LONGEST_S))
    real.wait_until_idle()
    after = memory(real)
    by_kind = defaultdict(Counter)
    for bad, statuses in ended:
        by_kind[bad.kind].update(statuses)
    for kind, count in by_kind.items():
        figure(f"{kind}: {dict(count)}")
    figure(f"memory after {COUNT // 2} and {COUNT}, MiB: {dict(halfway)}, {dict(after)}")
    figure(f"their neighbour: {about(seen)}")
    assert not [(one.kind, found, one.sent) for one, found in ended if any(is_fault(one, what) for what in found)]
    assert {what for what, _ in seen} == {"right"}
    for name, size in after.items():
        assert size - halfway[name] < GROWTH_MIB, name


def test_slow_clients_harm_nobody(real, figure):
    """Connections that say nothing, stop in the middle, or send a byte a second; a neighbour beside them."""
    with neighbour(real) as seen:
        ended = asyncio.run(drag(real, SLOW))
    for kind, times in ended.items():
        figure(f"slow, {kind}: {len(times)} connections, ended after {min(times):.1f} to {max(times):.1f} s")
    figure(f"neighbour of {SLOW} slow clients: {about(seen)}")
    for kind, (*_, is_cut_off) in SLOW_KINDS.items():
        assert not is_cut_off or max(ended[kind]) < LONGEST_S, kind
    assert {what for what, _ in seen} == {"right"}


async def drag(service, connections):
    """{kind: seconds after which each was cut off, or hung up by itself}."""
    ended = defaultdict(list)

    async def one(kind, port, sent, drip, longest_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            while time.monotonic() < began + longest_s:
                with contextlib.suppress(TimeoutError):
                    if not await asyncio.wait_for(reader.read(2**16), 1.0):
                        break
                if drip:
                    writer.write(b"a")
        ended[kind].append(time.monotonic() - began)
        writer.transport.abort()

    async with asyncio.TaskGroup() as group:
        for kind, (grpc, sent, drip, is_cut_off) in itertools.islice(itertools.cycle(SLOW_KINDS.items()), connections):
            port = service.grpc_port if grpc else service.port
            group.create_task(one(kind, port, sent, drip, LONGEST_S if is_cut_off else LET_BE_S))
    return ended


def about(seen):
    slowest = max(seconds for _, seconds in seen)
    return f"{len(seen)} queries, {dict(Counter(what for what, _ in seen))}, the slowest {slowest:.2f} s"


def is_fault(bad, what):
    """Ours, and not what gRPC's own library says."""
    if what == "504":
        return not bad.late
    if what == "INTERNAL":
        return not bad.internal
    return what in OUR_FAULT or what.removeprefix("HTTP ").startswith("5")


def memory(service):
    """{process: MiB} of what a request passes through."""
    found = Counter()
    for process in psutil.Process(service.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            for sign in ("haproxy.cfg", "Router", "Embedder", "ProxyActor"):
                if sign in words:
                    found[sign] += process.memory_info().rss // 2**20
    return found


@contextlib.contextmanager
def neighbour(service):
    """A client with valid queries. What became of them fills the list that it gives: (what it got, seconds) of each."""
    right = {text: embed(service, text) for text in TEXTS}
    seen, over = [], threading.Event()

    def ask_all_along():
        with tei_wire.connected(service.grpc_port) as tei:
            asks = [
                partial(embed, service),
                lambda text: tei.call("Embed/Embed", inputs=text, truncate=True).embeddings,
            ]
            for text, ask in itertools.cycle(itertools.product(TEXTS, asks)):
                started = time.monotonic()
                try:
                    what = "right" if np.array(ask(text)) @ right[text] > 0.999 else "WRONG"
                except Exception as error:  # noqa: BLE001 - it is told, whatever it is
                    what = repr(error)[:200]
                seen.append((what, time.monotonic() - started))
                if over.wait(0.03):
                    return

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask_all_along)
        try:
            yield seen
        finally:
            over.set()
            asking.result()


def embed(service, text):
    reply = service.ask("/embed", {"inputs": text})
    assert reply.status == 200, reply
    return np.array(reply.json()[0])
