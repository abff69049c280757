"""Planned runs of queries on the pools' replicas: the device's time alone, without the way to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from calibration.measure.burst import Burst
from calibration.service.application import CalibrationFailed
from calibration.service.replicas import Replicas
from deployments.embedding.run import PlannedBatch


@dataclass(slots=True)
class PlannedBursts:
    """Runs of queries on one replica of each pool. `tokens`: the usual length of a query."""

    replicas: Replicas
    bursts: list[Burst]  # each is added
    tokens: int
    _warm: set[tuple[str, PlannedBatch]] = field(default_factory=set)  # whose first run, which pays for more, is done

    async def run(self, stage: str, sizes: Mapping[str, int], tokens: int | None = None) -> Burst:
        """Time a run of so many queries on each pool, all at the same time. Raises CalibrationFailed."""
        sent = sum(sizes.values())
        at, pools = time.time(), [pool for pool, size in sizes.items() if size]
        batches = [PlannedBatch(sizes[pool], tokens or self.tokens) for pool in pools]
        for pool, batch in zip(pools, batches, strict=True):  # apart, so that the timed runs begin together
            if (pool, batch) not in self._warm:
                await self._seconds(pool, batch)
                self._warm.add((pool, batch))
        seconds = await asyncio.gather(*map(self._seconds, pools, batches))
        found = {pool: [round(one, 6)] for pool, one in zip(pools, seconds, strict=True)}
        burst = Burst(stage, at, dict(sizes), sent, 0, 0, found)
        self.bursts.append(burst)
        return burst

    async def seconds(self, stage: str, pool: str, size: int, tokens: int | None = None) -> float:
        """Seconds of a run of `size` queries on one pool while the others time nothing."""
        burst = await self.run(stage, {pool: size}, tokens)
        return burst.latencies_s[pool][0]

    async def _seconds(self, pool: str, batch: PlannedBatch) -> float:
        found = await self.replicas.time(pool, batch, warm_up=False)
        if found is None:
            raise CalibrationFailed(f"the {pool} pool has no room for a query of {batch.tokens} tokens")
        return found[0].seconds
