"""Sends queries of known lengths as bursts, open-loop streams and closed loops, over keep-alive connections that are
opened beforehand.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.kit import texts
from benchmarks.simulation.arrivals import Arrival
from calibration.load import Address, Clients, HttpReply, request_bytes

LONGEST = 256  # the maximum tokens of all-MiniLM-L6-v2; longer texts are cut
_CONNECTIONS_AT_LEAST = 50
_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of an arrival. `reply` is None if its connection broke."""

    arrival: Arrival
    reply: HttpReply | None

    @property
    def allowed_s(self) -> float:
        return math.inf if self.arrival.allowed_s is None else self.arrival.allowed_s

    @property
    def ok(self) -> bool:
        return self.reply is not None and self.reply.status == 200

    @property
    def in_time(self) -> bool:
        return self.ok and self.reply is not None and self.reply.seconds <= self.allowed_s

    @property
    def busy(self) -> bool:
        return self.reply is not None and self.reply.status == 429


class Load(Clients):
    """Clients of one service. Texts that are too long are cut to the model's maximum."""

    def __init__(self, url: str) -> None:
        super().__init__(Address.parse(url), _TIMEOUT_S)

    def request(self, arrival: Arrival, number: int) -> bytes:
        payload = {"input": texts.of_tokens(min(arrival.tokens, LONGEST), number), "encoding_format": "base64"}
        return request_bytes(payload, host=self.address.netloc)

    async def send_at_once(self, queries: int, tokens: int, allowed_s: float) -> list[Ended]:
        arrivals = [Arrival(0.0, tokens, allowed_s)] * queries
        await self.open(queries)
        replies = await self.burst([self.request(arrival, number) for number, arrival in enumerate(arrivals)])
        return [Ended(arrival, reply) for arrival, reply in zip(arrivals, replies, strict=True)]

    async def send(self, arrivals: Sequence[Arrival]) -> list[Ended]:
        """Send each arrival at its time."""
        rate, allowed_s = len(arrivals) / arrivals[-1].at, max(arrival.allowed_s or 0.0 for arrival in arrivals)
        await self.open(min(len(arrivals), int(1.5 * rate * allowed_s) + _CONNECTIONS_AT_LEAST))
        requests = [(arrival.at, self.request(arrival, number)) for number, arrival in enumerate(arrivals)]
        outcomes = await self.stream(requests)
        replies = (None if isinstance(outcome, Exception) else outcome for outcome in outcomes)
        return [Ended(arrival, reply) for arrival, reply in zip(arrivals, replies, strict=True)]


def closed_loop(url: str, requests: Sequence[bytes], *, connections: int, seconds: float) -> dict[str, Any]:
    """Send the requests in a closed loop on `connections` connections. Returns requests_s (until the last answer),
    p50_ms, p99_ms, and all latencies. Raises RuntimeError if one is not answered with 200.

    Unlike this, `wrk` cuts off the last answers, which are a large share of a short run if a batch takes a second.
    """
    asked = itertools.cycle(requests)

    async def run() -> tuple[list[HttpReply], float]:
        clients = Clients(Address.parse(url))
        try:
            await clients.open(connections)
            started = time.perf_counter()
            replies = await clients.steady(connections, lambda: next(asked), seconds)
            return replies, time.perf_counter() - started
        finally:
            clients.hang_up()

    try:
        replies, lasted = asyncio.run(run())
    except (OSError, EOFError) as error:
        raise RuntimeError(f"{url} did not answer under {connections} at once: {error!r}") from error
    if problems := [reply.problem for reply in replies if reply.status != 200]:
        raise RuntimeError(f"{url} answers under {connections} at once: {problems[0]}")
    latencies = np.array([1000 * reply.seconds for reply in replies])
    p50, p99 = np.percentile(latencies, (50, 99)).tolist()
    return {
        "requests_s": len(replies) / lasted,
        "p50_ms": p50,
        "p99_ms": p99,
        "latencies_ms": latencies.round(2).tolist(),
    }


def figures(ended: Sequence[Ended], seconds: float) -> dict[str, Any]:
    """What clients saw. Lateness is by the client's clock, from the request's first byte to the answer's last."""
    ok = [one for one in ended if one.ok]
    in_time = sum(one.in_time for one in ok)
    latencies = [one.reply.seconds for one in ok if one.reply is not None] or [0.0]
    busy = [one.reply.seconds for one in ended if one.busy and one.reply is not None]
    return {
        "sent": len(ended),
        "answered": len(ok),
        "busy": len(busy),
        "failed": len(ended) - len(ok) - len(busy),
        "late": len(ok) - in_time,
        "late_share": 1 - in_time / max(1, len(ok)),
        "goodput_s": in_time / seconds,
        "p50_s": float(np.quantile(latencies, 0.5)),
        "p99_s": float(np.quantile(latencies, 0.99)),
        "busy_p99_s": float(np.quantile(busy or [0.0], 0.99)),
    }
