"""`python -m benchmarks.costs.frame_cost`: what a frame between Router and replica costs both, by the channel of their
own and by Serve's handle with bytes, on a Ray of its own with the settings of `make serve`.

Prints JSON: for each way and size of a frame, seconds of the Router's and of the replica's process for a query, and of
the clock for a frame that is alone. The replica answers at once, with vectors of 384 numbers.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from benchmarks.peers import local_ray
from deployments.transport.channel import Channel, RouterConnection, Server
from deployments.transport.frames import Answered, Offer, Offers, Report

QUERIES = (1, 8, 32)  # in a frame
_AT_ONCE = 8  # frames on their way together
_TOKENS, _NUMBERS = 75, 384
_IDS = np.arange(_TOKENS, dtype=np.int32)

Send = Callable[[int], Awaitable[None]]  # one frame of so many queries, answered


def _answer(offers: Offers) -> Report:
    numbers = np.ones(_NUMBERS, np.float32)
    answered = [Answered(offer.number, 0, numbers, 1.0, 0.0, 0.0, 0.0) for offer in offers.offers]
    return Report(answered=answered)


class Replica:
    """Answers at once, both ways."""

    async def listen(self) -> tuple[int, str]:
        def on_offers(client: RouterConnection, offers: Offers) -> None:
            client.send(_answer(offers))

        self._server = Server("127.0.0.1", on_offers, lambda _: None)
        return await self._server.start(), self._server.secret

    async def frame(self, frame: bytes) -> bytes:
        (report,) = _answer(Offers.decode(frame)).encode()
        return b"".join(report)

    async def used_s(self) -> float:
        return time.process_time()


class Router:
    def __init__(self, replica: Any) -> None:
        self._replica = replica
        options = {"request_serialization": "pickle", "response_serialization": "noop"}  # noop takes no arguments
        self._by_handle = replica.options(method_name="frame", **options)

    async def measure(self, queries: int) -> dict[str, dict[str, float]]:
        port, secret = await self._replica.listen.remote()
        channel = await Channel.open(("127.0.0.1", port), secret, lambda _: None, lambda _: None)

        async def by_channel(count: int) -> None:
            pending = [channel.offer(Offer(0, 1.0, [_IDS])) for _ in range(count)]
            await asyncio.gather(*(one.outcome for one in pending))

        async def by_handle(count: int) -> None:
            offers = Offers([Offer(number, 1.0, [_IDS]) for number in range(count)])
            Report.decode(await self._by_handle.remote(b"".join(offers.encode())))

        found = {}
        for way, send in {"channel": by_channel, "handle": by_handle}.items():
            for count in QUERIES:
                found[f"{way}, {count}"] = await self._cost(send, count, max(1, queries // count))
        channel.close()
        return found

    async def _cost(self, send: Send, count: int, frames: int) -> dict[str, float]:
        async def some(number: int) -> None:
            for _ in range(number):
                await send(count)

        await some(max(1, frames // 10))
        before = time.process_time(), await self._replica.used_s.remote()
        await asyncio.gather(*(some(frames // _AT_ONCE) for _ in range(_AT_ONCE)))
        after = time.process_time(), await self._replica.used_s.remote()
        sent = frames // _AT_ONCE * _AT_ONCE * count
        started = time.perf_counter()
        await some(100)
        alone_s = (time.perf_counter() - started) / 100
        router_s, replica_s = ((b - a) / sent for a, b in zip(before, after, strict=True))
        return {"router_s": router_s, "replica_s": replica_s, "alone_s": alone_s}


def main(queries: int = 8000) -> None:
    os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "1"
    with local_ray.running():
        from ray import serve

        serve.start(proxy_location="Disabled")
        options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 1000}
        replica = serve.deployment(name="Replica", **options)(Replica).bind()
        router = serve.run(serve.deployment(name="Router", **options)(Router).bind(replica), route_prefix=None)

        async def ask() -> dict[str, Any]:
            told: dict[str, Any] = await router.measure.remote(queries)
            await serve.shutdown_async()  # type: ignore[no-untyped-call]
            return told

        print(json.dumps(asyncio.run(ask())))


if __name__ == "__main__":
    main()
