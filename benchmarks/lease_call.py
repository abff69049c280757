"""`python -m benchmarks.lease_call`: what a word between a Router and a lease office costs both, on a Ray of its own.

Prints JSON: seconds of the caller's and of the office's process for each call through Serve's handle, with pickle as
`Pool` sends it and the settings of `make serve`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

from benchmarks.peers import local_ray
from deployments.leases import Ask, Depth

_AT_ONCE = 8  # calls on their way together, as a Router that asks several owners


class Office:
    """Answers at once: what the decision costs is measured without Ray."""

    async def lease(self, replica: str, what: str, *words: Any) -> int:
        return len(replica) + len(what) + len(words)

    async def used_s(self) -> float:
        return time.process_time()


class Caller:
    def __init__(self, office: Any) -> None:
        self._office = office
        pickled = office.options(request_serialization="pickle", response_serialization="pickle")
        self._lease = pickled.options(method_name="lease")

    async def measure(self, calls: int) -> dict[str, float]:
        await self._make(calls // 4)
        before = time.process_time(), await self._office.used_s.remote(), time.monotonic()
        await self._make(calls)
        after = time.process_time(), await self._office.used_s.remote(), time.monotonic()
        names = ("call_s", "answer_s", "wall_s")
        return {name: (b - a) / calls for name, a, b in zip(names, before, after, strict=True)}

    async def _make(self, calls: int) -> None:
        asked = Ask(3, Depth(1, 64), 8)

        async def some() -> None:
            for _ in range(calls // _AT_ONCE):
                await self._lease.remote("abcdefgh", "ask", "router", asked)

        await asyncio.gather(*(some() for _ in range(_AT_ONCE)))


def main(calls: int = 4000) -> None:
    os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "1"
    with local_ray.running():
        from ray import serve

        serve.start(proxy_location="Disabled")
        options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 1000}
        office = serve.deployment(name="Office", **options)(Office).bind()
        caller = serve.run(serve.deployment(name="Caller", **options)(Caller).bind(office), route_prefix=None)

        async def ask() -> dict[str, float]:
            told: dict[str, float] = await caller.measure.remote(calls)
            await serve.shutdown_async()  # type: ignore[no-untyped-call]
            return told

        print(json.dumps(asyncio.run(ask())))


if __name__ == "__main__":
    main()
