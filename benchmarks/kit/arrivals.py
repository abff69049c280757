"""Queries that come by themselves, whatever became of those before: streams at random moments, and bursts, over
keep-alive connections that are opened beforehand.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.kit import texts
from calibration.load import Address, Connection, Reply, ask_all, connect, hold_open, request_bytes

MIXED = "mixed"  # log-normal lengths, mean about 75 once they are cut to the model's longest
_MEDIAN, _SPREAD, _SHORTEST, _LONGEST = 60, 0.9, 4, 512
LONGEST = 256  # tokens that all-MiniLM-L6-v2 takes: longer texts are cut
_CONNECTIONS_AT_LEAST = 50
_TIMEOUT_S = 90.0

Length = int | str  # tokens of each query, or MIXED


@dataclass(frozen=True, slots=True)
class Arrival:
    """A query that comes `at_s` after the first, of so many tokens; `allowed_s`: the SLO, unless it brings its own."""

    at_s: float
    tokens: int
    allowed_s: float
    own_deadline: bool = False


def poisson(rate: float, seconds: float, length: Length, allowed_s: float, seed: int = 3) -> list[Arrival]:
    """Arrivals at `rate` a second."""
    chance, at_s, found = random.Random(seed), 0.0, []  # noqa: S311 - not a secret
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        found.append(Arrival(at_s, _tokens(length, chance), allowed_s))
    return found


def _tokens(length: Length, chance: random.Random) -> int:
    if isinstance(length, int):
        return length
    return min(_LONGEST, max(_SHORTEST, int(chance.lognormvariate(math.log(_MEDIAN), _SPREAD))))


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of an arrival. `reply` is None where no connection was free or the connection broke."""

    arrival: Arrival
    reply: Reply | None
    after_s: float  # from the moment when it was due to come

    @property
    def ok(self) -> bool:
        return self.reply is not None and self.reply.status == 200

    @property
    def in_time(self) -> bool:
        return self.ok and self.reply is not None and self.reply.seconds <= self.arrival.allowed_s

    @property
    def router_s(self) -> float:
        """Seconds by the Router's clock, from its first read to its answer."""
        return 0.0 if self.reply is None else int(self.reply.headers.get("x-total-time", 0)) / 1000

    @property
    def busy(self) -> bool:
        return self.reply is not None and self.reply.status == 429


def burst(address: Address, requests: Sequence[bytes]) -> list[Reply]:
    """All requests at once, on connections of their own; their replies in the same order."""

    async def run() -> list[Reply]:
        connections = await connect(address, len(requests))
        try:
            return await ask_all(connections, requests)
        finally:
            for connection in connections:
                connection.hang_up()

    return asyncio.run(run())


class Load:
    """Clients of one service. `longest`: tokens that the model takes; longer texts are cut by it."""

    def __init__(self, url: str, longest: int = LONGEST) -> None:
        self._address = Address.parse(url)
        self._longest = longest
        self._connections: list[Connection] = []

    def request(self, arrival: Arrival, number: int) -> bytes:
        headers = [("x-request-timeout-ms", f"{arrival.allowed_s * 1000:.0f}")] if arrival.own_deadline else []
        text = texts.of_tokens(min(arrival.tokens, self._longest), number)
        payload = {"input": text, "encoding_format": "base64"}
        return request_bytes(payload, headers=headers, host=self._address.netloc)

    async def open(self, connections: int) -> None:
        """So many connections, each just used."""
        await hold_open(self._connections, self._address, connections)

    def close(self) -> None:
        for connection in self._connections:
            connection.hang_up()
        self._connections = []

    async def burst(self, queries: int, tokens: int, allowed_s: float) -> list[Ended]:
        """All at once."""
        arrivals = [Arrival(0.0, tokens, allowed_s)] * queries
        await self.open(queries)
        requests = [self.request(arrival, number) for number, arrival in enumerate(arrivals)]
        replies = await ask_all(self._connections[:queries], requests, _TIMEOUT_S)
        return [Ended(arrival, reply, reply.seconds) for arrival, reply in zip(arrivals, replies, strict=True)]

    async def stream(
        self, arrivals: Sequence[Arrival], on_busy: Callable[[Ended], Arrival | None] = lambda _: None
    ) -> list[Ended]:
        """Each at its moment; `on_busy` may send a refused one again, as another arrival."""
        rate = len(arrivals) / arrivals[-1].at_s
        allowed_s = max(arrival.allowed_s for arrival in arrivals)
        await self.open(min(len(arrivals), int(1.5 * rate * allowed_s) + _CONNECTIONS_AT_LEAST))
        idle, ended, asking = list(self._connections), list[Ended](), list[asyncio.Task[None]]()
        requests = [self.request(arrival, number) for number, arrival in enumerate(arrivals)]
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def ask(arrival: Arrival, request: bytes) -> None:
            connection = idle.pop() if idle else await Connection.open(self._address)
            try:
                reply = await connection.ask(request, _TIMEOUT_S)
            except (OSError, EOFError, TimeoutError):
                ended.append(Ended(arrival, None, loop.time() - began - arrival.at_s))
                return
            idle.append(connection)
            one = Ended(arrival, reply, loop.time() - began - arrival.at_s)
            ended.append(one)
            again = on_busy(one) if one.busy else None
            if again is not None:
                await asyncio.sleep(began + again.at_s - loop.time())
                await ask(again, request)

        for arrival, request in zip(arrivals, requests, strict=True):
            await asyncio.sleep(began + arrival.at_s - loop.time())
            asking.append(asyncio.create_task(ask(arrival, request)))
        await asyncio.gather(*asking)
        self._connections = idle
        return ended


def figures(ended: Sequence[Ended], seconds: float) -> dict[str, Any]:
    """What clients saw: late is by the client's clock, from the request's first byte to the answer's last."""
    ok = [one for one in ended if one.ok and one.reply is not None]
    latencies = np.array([one.reply.seconds for one in ok if one.reply is not None] or [0.0])
    in_time = [one for one in ok if one.in_time]
    refused = {name: _refused(ended, *bounds) for name, bounds in {"short": (0, 49), "long": (201, 10**6)}.items()}
    return {
        "sent": len(ended),
        "answered": len(ok),
        "busy": sum(one.busy for one in ended),
        "failed": sum(not (one.ok or one.busy) for one in ended),
        "late": len(ok) - len(in_time),
        "late_share": 1 - len(in_time) / max(1, len(ok)),
        "router_late": sum(one.router_s > one.arrival.allowed_s for one in ok),  # by its own clock, from its first read
        "goodput_s": len(in_time) / seconds,
        "p50_s": float(np.quantile(latencies, 0.5)),
        "p99_s": float(np.quantile(latencies, 0.99)),
        "slowest_s": float(latencies.max()),
        "busy_p99_s": float(np.quantile([one.reply.seconds for one in ended if one.busy and one.reply] or [0.0], 0.99)),
        "refused": refused,
    }


def _refused(ended: Sequence[Ended], least: int, most: int) -> Mapping[str, int]:
    those = [one for one in ended if least <= one.arrival.tokens <= most]
    return {"sent": len(those), "busy": sum(one.busy for one in those)}
