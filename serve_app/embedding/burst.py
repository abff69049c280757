"""The burst button of an emulated service's page. A browser sends only six requests at once, so the Router sends it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deployments.admission.quota import Client
from deployments.embedding.request import Embedded, Request
from deployments.embedding.router import Router
from deployments.errors import Busy, WindveError

_OF_CAPACITY, _LEAST, _MOST = 1.5, 6, 2000
_TEXT = "a query of about seventy five tokens, as the paper has them, " * 5


class Bursts:
    """The bursts of one Router, one at a time."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._runs = False

    async def send(self, client: Client | None) -> dict[str, Any]:
        """Raises Busy while another burst runs."""
        if self._runs:
            raise Busy("another burst is running; wait until it ends", retry_after_s=self._router.config.slo_s)
        self._runs = True
        try:
            return await _burst(self._router, client)
        finally:
            self._runs = False


async def _burst(router: Router, client: Client | None) -> dict[str, Any]:
    """Send 1.5 times as many one-text requests as all pools have room for, all at once, and sum up the outcome."""
    count = min(_MOST, max(_LEAST, math.ceil(_OF_CAPACITY * router.capacity)))
    asked = [asyncio.create_task(router.embed(Request([f"{_TEXT}{number}"], client=client))) for number in range(count)]
    try:
        found = await asyncio.gather(*asked, return_exceptions=True)
    finally:
        for task in asked:
            task.cancel()
    return {"slo_s": router.config.slo_s, "sent": count, **_outcome(found)}


def _outcome(found: Sequence[Embedded | BaseException]) -> dict[str, Any]:
    """Count the outcomes. Raises any exception that is not a WindveError."""
    pools, refused, failed, slowest_s = Counter[str](), 0, 0, 0.0
    for one in found:
        match one:
            case Embedded():
                pools.update(one.pools)
                slowest_s = max(slowest_s, one.total_s)
            case Busy():
                refused += 1
            case WindveError():
                failed += 1
            case _:
                raise one
    return {"answered": pools, "refused": refused, "failed": failed, "slowest_s": round(slowest_s, 4)}
