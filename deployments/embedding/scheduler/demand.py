"""The demand on a device: work per second, by tenant and by query length, and for whom room is kept. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.admission.fair_share import Account, Shares, Tenant
from deployments.admission.starvation import LongRequests
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.state import ScheduledQuery

_LEAST_RUN = 0.25  # of a run's most work: fairness never shortens a run further
_FADE_S = 0.01
_RHO_S = 3.0  # the arrival rate is averaged over this time


@dataclass(slots=True, repr=False, eq=False)
class Demand:
    """`rho`: work that arrives per second. `shares`: what tenants asked for and got. `long_queries`: the same for long
    queries.
    """

    limits: Limits
    long_queries: LongRequests
    shares: Shares = field(default_factory=Shares)
    rho: float = 0.0
    _rho_at: float = -math.inf

    def arrives(self, now: float, work_s: float, tenant: Tenant | None = None) -> None:
        """Count work that asks for this device. `tenant`: set only for work that a Router has refused itself."""
        if tenant is not None:
            self.shares.account(now, tenant).refused(work_s)
        if now - self._rho_at > _FADE_S:  # more often would be a waste
            self.rho *= math.exp((self._rho_at - now) / _RHO_S)
            self._rho_at = now
        self.rho = self.rho_with(work_s)

    def rho_with(self, work_s: float) -> float:
        """`rho` once this work has arrived."""
        return self.rho + work_s / _RHO_S

    def refused(self, now: float, cost_s: float, count: int) -> None:
        """Count `count` queries of that cost that a Router refused for lack of room here."""
        most_s = self.limits.idle_room_s(self.limits.policy.slo_s)
        if cost_s <= most_s:
            self.long_queries.offered(now, cost_s, refused=True, count=count, most=most_s)

    def has_urgent(self, now: float) -> bool:
        """Whether an urgent query came lately."""
        return now - self._rho_at < _RHO_S

    def offered(
        self,
        now: float,
        queries: Sequence[ScheduledQuery],
        total_s: float,
        most_s: float,
        *,
        tenant: Tenant | None,
        again: bool,
    ) -> None:
        """Count the offered urgent queries, except those that cost more than `most_s`, which even an idle device
        refuses. `total_s`: the cost of all. A tenant that offers only such queries gets no account, so nobody leaves
        room to it. `again`: another replica of the pool has counted their arrival.
        """
        asked_s = total_s if total_s <= most_s else sum(query.cost_s for query in queries if query.cost_s <= most_s)
        if not asked_s:
            return
        if tenant is not None:
            self.shares.capacity_rho = self.limits.capacity_rho
            account = self.shares.account(now, tenant)
            for query in queries:
                query.account = account
        if not again:
            self.arrives(now, asked_s)

    def note(self, now: float, queries: Sequence[ScheduledQuery], taken: int, total_s: float, most_s: float) -> None:
        """Count queries for the fairness to tenants and to long queries. The first `taken` of them were admitted.
        Refused queries that cost more than `most_s` do not count: even an idle device refuses them.
        """
        used_s = asked_s = total_s
        counts, refused = True, queries[taken:]
        if refused:
            used_s = sum(query.cost_s for query in queries[:taken])
            wanted_s = [query.cost_s for query in refused if query.cost_s <= most_s]
            asked_s, counts = used_s + sum(wanted_s), len(wanted_s) == len(refused)
        if (account := queries[0].account) is not None:
            account.count(asked_s, used_s)
        if counts:
            cost_s, slo_s = asked_s / len(queries), self.limits.policy.slo_s
            most_s = self.limits.idle_room_s(slo_s) if cost_s > self.long_queries.mean else math.inf  # not long
            left_s = min(queries[0].due - now, slo_s)
            self.long_queries.offered(now, cost_s, refused=bool(refused), most=most_s, left_s=left_s)

    @property
    def reserve_s(self) -> float:
        """Room that is reserved for a long query. 0 if even an idle device would refuse it."""
        reserve_s = self.long_queries.reserve
        return reserve_s if reserve_s and reserve_s <= self.limits.idle_room_s(self.limits.policy.slo_s) else 0.0

    def shared_s(self, account: Account, room_s: float, next_run_s: float, until_s: float, cost_s: float) -> float:
        """How much of `room_s` in the next run, which starts in `until_s` and has work of `next_run_s` already, a
        tenant over its share may use for a query of `cost_s`. If no tenant over its share has work waiting, one query
        always fits the limits on their part of a run: otherwise long queries would never run.
        """
        limits, shares = self.limits, self.shares
        room_s -= (kept_s := shares.kept_s(account, until_s))
        if not shares.has_under_share:
            return room_s
        share = limits.policy.max_batch_fraction or 1.0  # None: of a Router of an older version
        part_s = min(share * limits.run_s - shares.others_waiting_s, self._shared_run_s - next_run_s - kept_s)
        return min(room_s, part_s if shares.others_waiting_s else max(part_s, cost_s))

    @property
    def _shared_run_s(self) -> float:
        """The most work of a run, if a query of a tenant under its share that comes just after its start is to be in
        time. That query is answered by the first pass of the next run or, at a run's end, by a run of the same length.
        """
        limits, predictor = self.limits, self.limits.predictor
        slo_s = predictor.fill_s(limits.policy.slo_s)
        first_s = self.shares.under_share_cost_s + limits.pass_s
        after_s = predictor.seconds(first_s) if limits.micro_batch_tokens else slo_s / 2
        return max(_LEAST_RUN * limits.run_s, predictor.work_s(slo_s - after_s))

    def prefers(self, query: ScheduledQuery) -> bool:
        """Whether it may use room that is reserved for long queries: it is deferrable, or its tenant is under its
        share.
        """
        account = query.account
        return query.deferrable or (self.shares.has_level and account is not None and not account.is_over_share)
