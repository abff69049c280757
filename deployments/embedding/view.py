"""Predicts when a replica would finish a query, from its last state and what the Router has sent since. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.admission.predictor import LinePredictor
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.limits import Pacing, idle_room
from deployments.embedding.scheduler.state import ReplicaState
from deployments.serving.replica_view import ReplicaView

_SAME_S = 1e-6
UNKNOWN_COST = CostModel(0.0, 0.0, 0.0, 0.0)  # until the replica's first report


class Ask(NamedTuple):
    """A query for which a replica may have room. `allowed_s`: from its arrival to its deadline; `lag_s`: how much less
    than an SLO is left when it reaches the replica.
    """

    tokens: int
    allowed_s: float
    lag_s: float = 0.0
    tenant: Tenant | None = None


@dataclass(slots=True, eq=False)
class View(ReplicaView[ReplicaState]):
    """One embedding replica as a Router sees it. Its unseen work is in planned device seconds."""

    model: CostModel = UNKNOWN_COST

    def hear(self, now: float, state: ReplicaState, seen: int) -> None:
        ReplicaView.hear(self, now, state, seen)
        self.model = CostModel(*state.model[:4])

    def finish_s(self, now: float, lengths: Sequence[int]) -> float:
        """Seconds until queries of these lengths would be answered there, if they were sent together now."""
        state = self.state
        if state is None:
            return math.inf
        model = self.model
        work = model.cost(lengths[0]) if len(lengths) == 1 else model.work(lengths)
        mine_s = model.beta_s + self._unseen_work + work
        return max(0.0, self.heard_at + state.free_s - now) + state.slowdown * mine_s

    def opens_s(self, now: float, tenant: Tenant | None = None) -> float:
        """Seconds until it admits the tenant's queries, by its last state, and is not ejected. 0: now."""
        state = self.state
        if state is None:
            return 0.0
        opens_s = state.under_share_opens_s if state.over_share and not self.is_over_share(tenant) else state.opens_s
        return max(0.0, self.heard_at + opens_s - now, self.outlier.until - now)

    def has_room(self, now: float, ask: Ask) -> bool:
        """Whether it has room for this query beside the work sent to it since its last state. If the query would be
        late even on an idle device, its size is ignored.
        """
        state, need = self.state, self.model.cost(ask.tokens)
        is_sized = state is not None and state.opens_cost and not (state.over_share or self.is_idle)
        if state is None or not is_sized or self.model.beta_s + need > ask.allowed_s:
            return self.opens_s(now, ask.tenant) <= 0
        needed = max(need, state.reserve) + self._unseen_work + self._lost_room(state, ask)
        return state.room_after(now - self.heard_at) >= needed and not self.outlier.is_ejected(now)

    def _lost_room(self, state: ReplicaState, ask: Ask) -> float:
        """Room that the query loses because it comes `lag_s` late. If the size of a run limits the room, the spare time
        between the run's end and the deadline is used up first.
        """
        lost = ask.lag_s / state.slowdown
        left_s = ask.allowed_s / (1 + state.margin) - state.free_s
        beyond = left_s / state.slowdown - self.model.beta_s - state.room
        return max(0.0, lost - max(0.0, beyond)) if lost > 0 else lost

    @property
    def in_flight(self) -> int:
        """Unanswered queries of all Routers, by its last state."""
        return 0 if self.state is None else self.state.in_flight

    def is_over_share(self, tenant: Tenant | None) -> bool:
        """Whether the replica has reported that this tenant is over its share."""
        return self.state is not None and tenant is not None and tenant.name in self.state.over_share

    @property
    def is_idle(self) -> bool:
        """Whether it has no queries, as far as this Router knows."""
        return self.state is None or not (self.state.in_flight or self._unseen)

    def room_now(self, now: float, tokens: float, slo_s: float, depth: int | None) -> float:
        """For how many queries of `tokens` tokens it has room beside what was sent since its last report. `depth`: the
        most in flight, if it admits by count.
        """
        state = self.state
        if state is None or self.is_out(now):
            return 0.0
        if depth is not None:
            return max(0.0, depth - state.in_flight - sum(count for _, count, _ in self._unseen))
        if self.is_idle and self.opens_s(now) <= 0:  # a replica whose runs are measured is idle, but not open
            return self.most_queries(tokens, slo_s)
        room = state.room_after(now - self.heard_at) - self._unseen_work
        return max(0.0, room) / max(1e-9, self.model.cost(round(tokens)))

    def most_queries(self, tokens: float, slo_s: float) -> float:
        """How many queries of `tokens` tokens it would admit at once if it were idle."""
        return max(0.0, self.idle_room(slo_s)) / max(1e-9, self.model.cost(round(tokens)))

    def idle_room(self, left_s: float) -> float:
        """The work, in planned device seconds, that it would admit with this much time left if it were idle. Below 0:
        none.
        """
        state, model = self.state, self.model
        if state is None:
            return left_s
        most = math.inf if state.depth is None else state.depth * model.alpha_s
        predictor = LinePredictor(state.slowdown * model.beta_s, state.slowdown, state.margin)
        return idle_room(predictor, Pacing.of_beta(model.beta_s), left_s, most)

    def best_room(self, left_s: float) -> float:
        """As `idle_room`, but at its best known speed and without a margin: more is late whatever its state."""
        speed = 1.0 if self.state is None else min(1.0, self.state.slowdown)
        return left_s / speed - self.model.beta_s + _SAME_S

    def bulk_room(self, *, by_count: bool) -> float:
        """Planned device seconds of room for bulk queries, by its last state and what was sent since."""
        if self.state is None:
            return 0.0
        unseen = sum(count for _, count, _ in self._unseen) * self.model.alpha_s if by_count else self._unseen_work
        return self.state.bulk_room - unseen

    def is_flooded(self, slo_s: float, depth: int | None) -> bool:
        """Whether it was sent more since its last state than it can admit: within the SLO or, by count, up to `depth`.
        It then gets no more.
        """
        if depth is not None:
            return sum(count for _, count, _ in self._unseen) >= depth
        return self.state is not None and self.state.slowdown * self._unseen_work > slo_s
