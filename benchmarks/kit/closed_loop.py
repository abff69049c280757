"""Clients that ask again as soon as they have their answer, and are waited for at the end.

`wrk` cuts the last answers off. Where a batch of a hundred takes a second, that is a large share of a short run, and a
larger one for larger batches.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from calibration.load import Address, connect


def ask_again_and_again(url: str, requests: Sequence[bytes], *, connections: int, seconds: float) -> dict[str, Any]:
    """The requests one after the other, on so many connections, for so long: requests_s until the last answer, p50_ms,
    p99_ms, and each latency. Raises RuntimeError if one is not answered with 200.
    """
    return asyncio.run(_run(Address.parse(url), itertools.cycle(requests), connections, seconds))


async def _run(address: Address, requests: itertools.cycle[bytes], connections: int, seconds: float) -> dict[str, Any]:
    opened = await connect(address, connections)
    latencies: list[float] = []
    started = time.perf_counter()

    async def client(number: int) -> None:
        while time.perf_counter() < started + seconds:
            reply = await opened[number].ask(next(requests))
            if reply.status != 200:
                raise RuntimeError(
                    f"{address} answers {reply.status} under {connections} at once: {reply.body[:200]!r}"
                )
            latencies.append(reply.seconds)

    try:
        await asyncio.gather(*(client(number) for number in range(connections)))
        lasted = time.perf_counter() - started
    except (OSError, EOFError) as error:
        raise RuntimeError(f"{address} did not answer under {connections} at once: {error!r}") from error
    finally:
        for connection in opened:
            connection.hang_up()
    p50, p99 = np.percentile(latencies, (50, 99)) * 1000
    return {
        "requests_s": len(latencies) / lasted,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "latencies_ms": [round(latency * 1000, 2) for latency in latencies],
    }
