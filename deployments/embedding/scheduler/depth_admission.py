"""Admission by count: Algorithm 1 of WindVE, `waiting and running queries < depth`. Pure. It applies with
`admission: depth`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deployments.embedding.scheduler.admission import Admission, Opening
from deployments.embedding.scheduler.current_run import Outlook
from deployments.embedding.scheduler.state import Q, ScheduledQuery


class DepthAdmission(Admission[Q]):
    """Admission by the policy's count."""

    __slots__ = ()

    def fitting(
        self, _now: float, queries: Sequence[ScheduledQuery], _total_s: float, _outlook: Outlook, _run_s: float
    ) -> int:
        """See the base. Slots that the queries' tenant must leave to others do not count."""
        first = queries[0]
        free, account = self._free(bulk=first.bulk), first.account
        if account is not None and not first.deferrable:
            alpha_s, slo_s = self.limits.model.alpha_s, self.limits.policy.slo_s
            free = max(0, free - math.ceil(self.demand.shares.kept_s(account, slo_s) / alpha_s))
        return min(len(queries), free)

    def is_full(self, _now: float, _outlook: Outlook) -> bool:
        return not self._free(bulk=False)

    def opening(self, _now: float, outlook: Outlook, *, over_share: bool) -> Opening:  # noqa: ARG002 - to all alike
        f, until_s = outlook
        pass_s = f * self.limits.predictor.slope * self.limits.pass_s
        return Opening(0.0 if self._free(bulk=False) else min(until_s, pass_s or until_s))

    @property
    def bulk_room_s(self) -> float:
        return self._free(bulk=True) * self.limits.model.alpha_s

    def _free(self, *, bulk: bool) -> int:
        """Free slots by Algorithm 1. Bulk queries may use a share of the depth."""
        limit = self.limits.policy.depth or 0
        free = limit - self.queue.count - self.run.unanswered
        if bulk and limit:
            held = self.run.bulk + len(self.queue.bulk_line.queries)
            free = min(free, max(1, int(limit * self.limits.policy.bulk_share)) - held)
        return max(0, free)
