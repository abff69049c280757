"""What a Router knows of one replica: the last state that it reported, and the work that the Router has sent since.

The Router predicts from both when the replica would finish a query. Pure: the time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.admission.fair_share import Tenant
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.pacing import Pacing
from deployments.embedding.scheduler.state import ReplicaState

UNKNOWN_COST = CostModel(0.0, 0.0, 0.0, 0.0)  # until the replica's first report
QUIET_S = 0.25  # after which a replica that was sent something and said nothing is asked for its state
_SILENT_S = 1.0  # since it was asked: it may have stopped


@dataclass(slots=True, eq=False)
class View:
    """One replica as a Router sees it. Times are the Router's loop time, in seconds.

    `rank` orders replicas that would finish at the same time, the smallest first: (on another node, a hash). `state` is
    None until the first report, and again after the connection broke. `heard_at`: when the last report came.
    """

    replica: str
    rank: tuple[bool, int]
    state: ReplicaState | None = None
    model: CostModel = UNKNOWN_COST
    heard_at: float = 0.0
    # Sent after the frames that its last state counts: (number of the frame, queries, planned seconds) of each offer.
    _unseen: deque[tuple[int, int, float]] = field(default_factory=deque)
    _unseen_s: float = 0.0  # planned seconds of all of these
    _asked_at: float = -math.inf

    def hear(self, now: float, state: ReplicaState, seen: int) -> None:
        """A report came, made after `seen` frames of this Router."""
        self.state, self.heard_at = state, now
        self.model = CostModel(*state.model)
        while self._unseen and self._unseen[0][0] <= seen:
            self._unseen.popleft()
        self._unseen_s = sum(cost_s for _, _, cost_s in self._unseen)

    def sent(self, frame: int, queries: int, cost_s: float) -> None:
        """So many queries, so much work, go there in that frame."""
        self._unseen.append((frame, queries, cost_s))
        self._unseen_s += cost_s

    @property
    def has_read_all(self) -> bool:
        """Its last report came after all that was sent."""
        return not self._unseen

    def should_be_asked(self, now: float) -> bool:
        """It was sent something, has said nothing for a while, and was not asked yet."""
        return bool(self._unseen) and self._asked_at <= self.heard_at <= now - QUIET_S

    def asked(self, now: float) -> None:
        """For its state."""
        self._asked_at = now

    def forget(self) -> None:
        """The connection broke."""
        self.state = None
        self._asked_at = -math.inf
        self._unseen.clear()
        self._unseen_s = 0.0

    def finish_s(self, now: float, lengths: Sequence[int]) -> float:
        """Seconds until queries of so many tokens each would be answered there, if they went now together."""
        state = self.state
        if state is None:
            return math.inf
        mine_s = self.model.beta_s + self._unseen_s + self.model.work_s(lengths)
        return max(0.0, self.heard_at + state.free_s - now) + state.factor * mine_s

    def opens_s(self, now: float, tenant: Tenant | None = None) -> float:
        """Seconds until it admits such a tenant's queries again, by its last state; 0: now."""
        state = self.state
        if state is None:
            return 0.0
        opens_s = state.quiet_opens_s if state.greedy and not self.is_greedy(tenant) else state.opens_s
        return max(0.0, self.heard_at + opens_s - now)

    def is_greedy(self, tenant: Tenant | None) -> bool:
        """The replica has said that this tenant asks for more than its share."""
        return self.state is not None and tenant is not None and tenant.name in self.state.greedy

    def room_queries(self, now: float, tokens: float, slo_s: float) -> float:
        """About how many queries of so many tokens would be admitted now."""
        if self.state is None or math.isinf(self.state.opens_s):
            return 0.0
        factor = self.state.factor
        left_s = (
            slo_s - max(0.0, self.heard_at + self.state.free_s - now) - factor * (self.model.beta_s + self._unseen_s)
        )
        return max(0.0, left_s) / max(1e-9, factor * self.model.cost_s(round(tokens)))

    def most_queries(self, tokens: float, slo_s: float, depth: int | None) -> float:
        """Queries of so many tokens that it would admit at once if it were idle."""
        cost_s = max(1e-9, self.model.cost_s(round(tokens)))
        slow, margin = (1.0, 0.0) if self.state is None else (self.state.factor, self.state.margin)
        until_s = slo_s / (1 + margin) - Pacing.of_beta(self.model.beta_s).pause_s
        work_s = max(0.0, until_s / slow - self.model.beta_s)
        return min(work_s, math.inf if depth is None else depth * self.model.alpha_s) / cost_s

    def bulk_room_s(self, *, by_count: bool) -> float:
        """Planned device seconds of bulk queries that it has room for, by its last state and what was sent since."""
        if self.state is None:
            return 0.0
        unseen_s = sum(count for _, count, _ in self._unseen) * self.model.alpha_s if by_count else self._unseen_s
        return self.state.bulk_s - unseen_s

    def is_silent(self, now: float) -> bool:
        """It was asked for its state and has given none: it may have stopped."""
        return self.heard_at < self._asked_at < now - _SILENT_S

    def is_flooded(self, slo_s: float, depth: int | None) -> bool:
        """More was sent there since its last state than it can ever admit, within the SLO or, by count, to its `depth`:
        it is not sent even more.
        """
        if depth is not None:
            return sum(count for _, count, _ in self._unseen) >= depth
        return self.state is not None and self.state.factor * self._unseen_s > slo_s
