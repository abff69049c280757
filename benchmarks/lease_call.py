"""`python -m benchmarks.lease_call`: what a word between a Router and a lease office costs both, on a Ray of its own.

Prints JSON: seconds of the caller's and of the office's process for each call through Serve's handle, with pickle as
`Pool` sends it and the settings of `make serve`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from deployments.leases import Ask, Depth

_LOOPBACK = "127.0.0.1"
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
    with tempfile.TemporaryDirectory(prefix="windve-bench-") as scratch:
        token = Path(scratch) / "ray-token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # Ray's switch for a node that lives on loopback
            RAY_USAGE_STATS_ENABLED="0",
            RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
        )
        import ray
        from ray import serve

        ray.init(
            address="local", include_dashboard=False, object_store_memory=200 * 2**20, _node_ip_address=_LOOPBACK,
            logging_level=logging.ERROR, log_to_driver=False,
        )  # fmt: skip
        try:
            serve.start(proxy_location="Disabled")
            options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 1000}
            office = serve.deployment(name="Office", **options)(Office).bind()
            caller = serve.run(serve.deployment(name="Caller", **options)(Caller).bind(office), route_prefix=None)

            async def ask() -> dict[str, float]:
                told: dict[str, float] = await caller.measure.remote(calls)
                await serve.shutdown_async()  # type: ignore[no-untyped-call]
                return told

            print(json.dumps(asyncio.run(ask())))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
