"""When one replica would finish a query, by its last state and what the Router has sent there since. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.admission.fair_share import Tenant
from deployments.admission.predictor import LinePredictor
from deployments.embedding.outliers import Outlier
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.state import Policy, ReplicaState
from deployments.serving.replica_view import ReplicaView

UNKNOWN_COST = CostModel(0.0, 0.0, 0.0, 0.0)  # until the replica's first report


@dataclass(slots=True, eq=False)
class View(ReplicaView[ReplicaState]):
    """One embedding replica as a Router sees it. Its unseen work is in planned device seconds."""

    model: CostModel = UNKNOWN_COST
    outlier: Outlier = field(default_factory=Outlier)

    def hear(self, now: float, state: ReplicaState, seen: int) -> None:
        ReplicaView.hear(self, now, state, seen)
        self.model = CostModel(*state.model[:4])

    def finish_s(self, now: float, lengths: Sequence[int]) -> float:
        """Seconds until queries of so many tokens each would be answered there, if they went now together."""
        state = self.state
        if state is None:
            return math.inf
        model = self.model
        work_s = model.cost_s(lengths[0]) if len(lengths) == 1 else model.work_s(lengths)
        mine_s = model.beta_s + self._unseen_work + work_s
        return max(0.0, self.heard_at + state.free_s - now) + state.slowdown * mine_s

    def opens_s(self, now: float, tenant: Tenant | None = None) -> float:
        """Seconds until it admits such a tenant's queries again, by its last state, and is not ejected; 0: now."""
        state = self.state
        if state is None:
            return 0.0
        opens_s = state.under_share_opens_s if state.over_share and not self.is_over_share(tenant) else state.opens_s
        return max(0.0, self.heard_at + opens_s - now, self.outlier.until - now)

    def is_out(self, now: float) -> bool:
        """It has stopped, or is ejected: it is sent nothing."""
        return now < self.outlier.until or self.is_silent(now)

    def is_over_share(self, tenant: Tenant | None) -> bool:
        """The replica has said that this tenant asks for more than its share."""
        return self.state is not None and tenant is not None and tenant.name in self.state.over_share

    def room_queries(self, now: float, tokens: float, slo_s: float) -> float:
        """About how many queries of so many tokens would be admitted now."""
        if self.state is None or math.isinf(self.state.opens_s):
            return 0.0
        slowdown = self.state.slowdown
        left_s = (
            slo_s
            - max(0.0, self.heard_at + self.state.free_s - now)
            - slowdown * (self.model.beta_s + self._unseen_work)
        )
        return max(0.0, left_s) / max(1e-9, slowdown * self.model.cost_s(round(tokens)))

    def most_queries(self, tokens: float, slo_s: float) -> float:
        """Queries of so many tokens that it would admit at once if it were idle."""
        state = self.state
        slowdown, margin, depth = (1.0, 0.0, None) if state is None else (state.slowdown, state.margin, state.depth)
        predictor = LinePredictor(slowdown * self.model.beta_s, slowdown, margin)
        limits = Limits(self.model, Policy(slo_s, depth=depth), 0, predictor)
        return max(0.0, limits.idle_room_s(slo_s)) / max(1e-9, self.model.cost_s(round(tokens)))

    def bulk_room_s(self, *, by_count: bool) -> float:
        """Planned device seconds of bulk queries that it has room for, by its last state and what was sent since."""
        if self.state is None:
            return 0.0
        unseen_s = sum(count for _, count, _ in self._unseen) * self.model.alpha_s if by_count else self._unseen_work
        return self.state.bulk_s - unseen_s

    def is_flooded(self, slo_s: float, depth: int | None) -> bool:
        """More was sent there since its last state than it can ever admit, within the SLO or, by count, to its `depth`:
        it is not sent even more.
        """
        if depth is not None:
            return sum(count for _, count, _ in self._unseen) >= depth
        return self.state is not None and self.state.slowdown * self._unseen_work > slo_s
