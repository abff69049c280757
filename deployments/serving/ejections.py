"""Ejects a Router's replicas whose engines fail or hang, and lets them back (`ejection_rule`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from deployments.serving.ejection_rule import may_eject_one
from deployments.serving.replica_link import ReplicaLink
from deployments.serving.replica_set import ReplicaSet

logger = logging.getLogger("ray.serve")


class Ejections:
    """One Router's ejections, over all its open `pools`."""

    def __init__(self, pools: Mapping[str, ReplicaSet[Any]]) -> None:
        self._pools = pools

    def note_failed(self, link: ReplicaLink[Any, Any]) -> None:
        """A replica's engine failed or hangs: eject the replica if it is an outlier and not too many are ejected."""
        now, outlier = asyncio.get_running_loop().time(), link.view.outlier
        if outlier.should_be_ejected(now) and may_eject_one(len(self._ejected()), self._live):
            ejected_s = outlier.eject(now)
            logger.warning(
                "ejecting the %s pool's replica %s for %.0f s: its engine has failed or hung %d times in a row",
                link.pool.name, link.view.replica, ejected_s, outlier.failures,
            )  # fmt: skip

    def replicas_changed(self) -> None:
        """If too large a share is ejected now, let those back at once whose ejections end first."""
        ejected = sorted(self._ejected(), key=lambda link: link.view.outlier.until, reverse=True)
        while ejected and not may_eject_one(len(ejected) - 1, self._live):
            link = ejected.pop()
            link.view.outlier.until = asyncio.get_running_loop().time()

    def _ejected(self) -> list[ReplicaLink[Any, Any]]:
        return [link for pool in self._pools.values() if pool.is_open for link in pool.ejected()]

    @property
    def _live(self) -> int:
        return sum(len(pool.live) for pool in self._pools.values() if pool.is_open)
