"""The load: requests of several kinds at random moments, whatever becomes of those before. Each ends exactly once."""

import asyncio
import base64
import contextlib
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from calibration.load import Address, ClientConnection, HttpReply, request_bytes
from tests.faults.truth import Truth
from tests.faults.verdict import BACK_OFF_S, BEGUN, BROKEN, GRPC, HTTP, LARGE, REFUSED, SILENT, Ended
from tests.kit import tei_wire

_WORDS = "river stone window garden market paper light winter road music water house field summer letter".split()  # noqa: SIM905 - as one reads it
_LARGE_BYTES = 80_000  # more than the proxy can send to another Router
_PATIENCE_S = 90.0
_STATUS = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_RESETS = {"error code 8": BEGUN, "error code 7": REFUSED}  # CANCEL, REFUSED_STREAM: RFC 9113, section 7
_CUT = ("failed to connect", "socket closed", "connection reset", "goaway", "broken pipe", "recvmsg", "rst_stream")


@dataclass(frozen=True, slots=True)
class Kind:
    """`share` of all requests; `texts`: at least and at most; `timeout_ms`: the request's own deadline."""

    name: str
    share: float
    path: str
    texts: tuple[int, int] = (1, 1)
    timeout_ms: int | None = None
    bulk: bool = False
    large: bool = False


KINDS = (
    Kind("single, OpenAI", 0.30, "/v1/embeddings"),
    Kind("single, TEI", 0.20, "/embed"),
    Kind("single, gRPC", 0.20, "Embed/Embed"),
    Kind("batch, OpenAI", 0.08, "/v1/embeddings", texts=(2, 8)),
    Kind("batch, TEI", 0.05, "/embed", texts=(2, 8)),
    Kind("half a second, OpenAI", 0.07, "/v1/embeddings", timeout_ms=500),
    Kind("deferrable, TEI", 0.05, "/embed", timeout_ms=8000),
    Kind(LARGE, 0.03, "/v1/embeddings", large=True),
    Kind("bulk, OpenAI", 0.02, "/v1/embeddings", texts=(10, 20), bulk=True),
)


def queries_a_request(kinds: Sequence[Kind] = KINDS) -> float:
    """On average."""
    return sum(kind.share * sum(kind.texts) / 2 for kind in kinds) / sum(kind.share for kind in kinds)


class Traffic:
    """Clients in a thread with an event loop of its own. `take()` gives what has ended since it was last called."""

    def __init__(self, port: int, grpc_port: int, queries_per_s: float, seed: int = 7):
        self.truth, self._chance = Truth(), random.Random(seed)
        self._rate = queries_per_s / queries_a_request()
        self.address, self._grpc_port = Address("127.0.0.1", port), grpc_port
        self._asking: set[asyncio.Task] = set()
        self._ended: list[Ended] = []
        self._coming: asyncio.Task | None = None
        self._numbers = itertools.count()
        self.sent = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self.run(self._open())
        return self

    def __exit__(self, *_):
        self.pause()
        self.run(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, coroutine):
        """Run it among the clients; returns its value."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def go(self) -> None:
        self.run(self._go())

    def pause(self) -> None:
        """No further requests come; those that were sent go on."""
        if self._coming is not None:
            self.loop.call_soon_threadsafe(self._coming.cancel)

    def in_flight(self) -> int:
        return len(self._asking)

    def take(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def add(self, ended: Ended) -> None:
        self._ended.append(ended)

    async def _open(self):
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self._grpc_port}", options=[("grpc.max_reconnect_backoff_ms", int(1000 * BACK_OFF_S))]
        )
        self._embed = self._channel.unary_unary(
            f"/{tei_wire.PACKAGE}.Embed/Embed",
            request_serializer=tei_wire.CLASSES["EmbedRequest"].SerializeToString,
            response_deserializer=tei_wire.CLASSES["EmbedResponse"].FromString,
        )

    async def _close(self):
        await self._channel.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.1)  # connections that were aborted end in the loop's next turns

    async def _go(self):
        self._coming = asyncio.create_task(self._come())

    async def _come(self):
        at = self.loop.time()
        while True:
            at += self._chance.expovariate(self._rate)
            await asyncio.sleep(max(0.0, at - self.loop.time()))
            (kind,) = self._chance.choices(KINDS, [kind.share for kind in KINDS])
            self.sent += 1
            task = asyncio.create_task(self._ask(kind))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    def text(self, *, large: bool = False) -> str:
        """Unlike any other; log-normal lengths, about 75 tokens on average."""
        words = 16_000 if large else min(250, max(3, int(self._chance.lognormvariate(math.log(55), 0.9))))
        text = f"{next(self._numbers)} " + " ".join(self._chance.choices(_WORDS, k=words))
        return text[:_LARGE_BYTES]

    async def _ask(self, kind: Kind):
        texts = [self.text(large=kind.large) for _ in range(self._chance.randint(*kind.texts))]
        sent_at = time.monotonic()
        if kind.path == "Embed/Embed":
            via, (status, right, come_back, detail) = GRPC, await self._call(texts[0])
        else:
            via, (status, right, come_back, detail) = HTTP, await self._post(kind, texts)
        own_time = kind.timeout_ms is not None
        self.add(Ended(kind.name, via, sent_at, time.monotonic(), status, right, come_back, own_time, detail))

    async def _call(self, text: str):
        try:
            answer = await self._embed(tei_wire.request("Embed/Embed", inputs=text, truncate=True), timeout=_PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            if any(word in f"{details} {error.debug_error_string()}".lower() for word in _CUT):
                why = next((why for code, why in _RESETS.items() if code in details), details[:120])
                return BROKEN, False, False, why
            told = {key for key, _ in error.trailing_metadata() or ()}
            status = _STATUS.get(error.code(), str(error.code()))
            return status, False, "retry-after-ms" in told, details[:120]
        return 200, self.truth.agrees([text], [list(answer.embeddings)]), False, ""

    async def _post(self, kind: Kind, texts: list[str]):
        try:
            reply = await self._exchange(payload_of(kind, texts))
        except TimeoutError:
            return SILENT, False, False, f"nothing in {_PATIENCE_S:.0f} s"
        except (OSError, EOFError) as error:
            return BROKEN, False, False, type(error).__name__
        if reply.status != 200:
            come_back = int(reply.headers.get("retry-after", 0)) >= 1
            return reply.status, False, come_back, reply.body[:120].decode(errors="replace")
        return 200, self.truth.agrees(texts, vectors_of(reply, kind.path)), False, ""

    async def _exchange(self, request: bytes) -> HttpReply:
        connection = await ClientConnection.open(self.address)
        try:
            return await connection.ask(request, _PATIENCE_S)
        finally:
            connection.hang_up()


def payload_of(kind: Kind, texts: list[str]) -> bytes:
    headers = []
    if kind.timeout_ms is not None:
        headers.append(("x-request-timeout-ms", str(kind.timeout_ms)))
    if kind.bulk:
        headers.append(("x-windve-priority", "bulk"))
    if kind.path == "/embed":
        return request_bytes({"inputs": texts, "truncate": True}, kind.path, headers)
    return request_bytes({"input": texts, "encoding_format": "base64"}, kind.path, headers)


def vectors_of(reply: HttpReply, path: str) -> object:
    """Rows of numbers, or something that is none."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(reply.body)
        if path == "/embed":
            return found
        data = sorted(found["data"], key=lambda item: item["index"])
        return [np.frombuffer(base64.b64decode(item["embedding"]), np.float32) for item in data]
    return None
