"""Planned runs of queries on the pools' replicas: the device's time alone, without the way to it."""

from __future__ import annotations

import time
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

    async def seconds(self, stage: str, pool: str, size: int, tokens: int | None = None) -> float:
        """Seconds of a run of `size` queries on one pool while the others time nothing. Raises CalibrationFailed."""
        at, batch = time.time(), PlannedBatch(size, tokens or self.tokens)
        if (pool, batch) not in self._warm:
            await self._seconds(pool, batch)
            self._warm.add((pool, batch))
        seconds = round(await self._seconds(pool, batch), 6)
        self.bursts.append(Burst(stage, at, {pool: size}, size, 0, 0, {pool: [seconds]}))
        return seconds

    async def _seconds(self, pool: str, batch: PlannedBatch) -> float:
        found = await self.replicas.time(pool, batch, warm_up=False)
        if found is None:
            raise CalibrationFailed(f"the {pool} pool has no room for a query of {batch.tokens} tokens")
        return found[0].seconds
