"""Outlier ejection: when a Router stops sending to a replica whose engine fails or hangs, and for how long.

It follows Envoy's outlier detection, for the same reason: a replica that fails at once looks idle, and so attracts all
queries (https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier). The three numbers of
`replica_view.Outlier` are Envoy's defaults (`consecutive_5xx`, `base_ejection_time`, `max_ejection_time`). Envoy's
`max_ejection_percent` of 10 % suits hundreds of hosts; a pool here may have two.

    ejected        after `FAILURES` failures in a row: an offer failed because of the engine, or a first token was
                   overdue while another replica had room. Of those that are overdue together, only one counts, so that
                   a short pause ejects nobody
    for            `BASE_S` times the number of its ejections, at most `LONGEST_S`; the number starts again at 1 if the
                   replica has worked for as long as its last ejection took
    back           automatically; the next failure ejects it again, while an answer, or a failure that shows that the
                   engine works, clears it
    not ejected    if half of the Router's replicas are ejected already, or if it is the last one: one cause may make
                   all of them fail, and then it is better to keep trying
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

from deployments.serving.replica_set import ReplicaLink, ReplicaSet

logger = logging.getLogger("ray.serve")

MOST_EJECTED = 0.5  # of a Router's replicas, rounded up


def may_eject_one(ejected: int, replicas: int) -> bool:
    """Whether one more replica may be ejected, if `ejected` of the Router's live `replicas` are already."""
    return ejected < min(math.ceil(MOST_EJECTED * replicas), replicas - 1)


class Ejections:
    """One Router's ejections, over all its `pools` that may answer."""

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
        return [link for pool in self._pools.values() if pool.may_answer for link in pool.ejected()]

    @property
    def _live(self) -> int:
        return sum(len(pool.live) for pool in self._pools.values() if pool.may_answer)
