"""The demand on a device: work per second, by tenant and by query length, and for whom room is kept. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.admission.fair_share import Account, Shares, Tenant
from deployments.admission.starvation import LongRequests
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.state import ScheduledQuery

_SPARE = 3.0  # of the work that others are expected to ask for: their queries come unevenly
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

    def arrives(self, now: float, work: float, tenant: Tenant | None = None) -> None:
        """Count work that asks for this device. `tenant`: set only for work that a Router has refused itself."""
        if tenant is not None:
            self.shares.account(now, tenant).refused(work)
        if now - self._rho_at > _FADE_S:  # more often would be a waste
            self.rho *= math.exp((self._rho_at - now) / _RHO_S)
            self._rho_at = now
        self.rho = self.rho_with(work)

    def rho_with(self, work: float) -> float:
        """`rho` once this work has arrived."""
        return self.rho + work / _RHO_S

    def refused(self, now: float, cost: float, count: int) -> None:
        """Count `count` queries of that cost that a Router refused for lack of room here."""
        most = self.limits.idle_room(self.limits.policy.slo_s)
        if cost <= most:
            self.long_queries.offered(now, cost, refused=True, count=count, most=most)

    def is_contended(self, now: float) -> bool:
        """Whether tenants have shares of this device now."""
        self.shares.capacity_rho = self.limits.capacity_rho
        self.shares.divide(now)
        return self.shares.has_level

    def has_urgent(self, now: float) -> bool:
        """Whether an urgent query came lately."""
        return now - self._rho_at < _RHO_S

    def offered(
        self,
        now: float,
        queries: Sequence[ScheduledQuery],
        total: float,
        most: float,
        *,
        tenant: Tenant | None,
        again: bool,
    ) -> None:
        """Count the offered urgent queries, except those that cost more than `most`, which even an idle device
        refuses. `total`: the cost of all. A tenant that offers only such queries gets no account, so nobody leaves
        room to it. `again`: another replica of the pool has counted their arrival.
        """
        asked = total if total <= most else sum(query.cost for query in queries if query.cost <= most)
        if not asked:
            return
        if tenant is not None:
            self.shares.capacity_rho = self.limits.capacity_rho
            account = self.shares.account(now, tenant)
            for query in queries:
                query.account = account
        if not again:
            self.arrives(now, asked)

    def note(self, now: float, queries: Sequence[ScheduledQuery], taken: int, total: float, most: float) -> None:
        """Count queries for the fairness to tenants and to long queries. The first `taken` of them were admitted.
        Refused queries that cost more than `most` do not count: even an idle device refuses them.
        """
        used = asked = total
        counts, refused = True, queries[taken:]
        if refused:
            used = sum(query.cost for query in queries[:taken])
            wanted = [query.cost for query in refused if query.cost <= most]
            asked, counts = used + sum(wanted), len(wanted) == len(refused)
        if (account := queries[0].account) is not None:
            account.count(asked, used)
        if counts:
            cost, slo_s = asked / len(queries), self.limits.policy.slo_s
            most = self.limits.idle_room(slo_s) if cost > self.long_queries.mean else math.inf  # not long
            left_s = min(queries[0].due - now, slo_s)
            self.long_queries.offered(now, cost, refused=bool(refused), most=most, left_s=left_s)

    @property
    def reserve(self) -> float:
        """Room that is reserved for a long query. 0 if even an idle device would refuse it."""
        reserve = self.long_queries.reserve
        return reserve if reserve and reserve <= self.limits.idle_room(self.limits.policy.slo_s) else 0.0

    def shared_room(self, account: Account, room: float, next_work: float, until_s: float, cost: float) -> float:
        """How much of `room` in the next run, which starts in `until_s` and has work of `next_work` already, a
        tenant over its share may use for a query of `cost`. If no tenant over its share has work waiting, one query
        always fits the limits on their part of a run: otherwise long queries would never run.
        """
        limits, shares = self.limits, self.shares
        room -= shares.kept_s(account, until_s)
        if not shares.has_under_share:
            return room
        left = self._shared_run - next_work - _SPARE * shares.expected_s(account, until_s)
        part = min(limits.policy.max_batch_fraction * limits.run_work - shares.others_waiting_s, left)
        return min(room, part if shares.others_waiting_s else max(part, cost))

    @property
    def _shared_run(self) -> float:
        """The most work of a run, if a query of a tenant under its share that comes just after its start is to be in
        time. That query is answered by the first pass of the next run or, at a run's end, by a run of the same length.
        """
        limits, predictor = self.limits, self.limits.predictor
        slo_s = predictor.fill_s(limits.policy.slo_s)
        first_work = self.shares.under_share_cost_s + limits.pass_work
        after_s = predictor.seconds(first_work) if limits.micro_batch_tokens else slo_s / 2
        return max(_LEAST_RUN * limits.run_work, predictor.work_in(slo_s - after_s))

    def prefers(self, query: ScheduledQuery) -> bool:
        """Whether it may use room that is reserved for long queries: it is deferrable, or its tenant is under its
        share.
        """
        account = query.account
        return query.deferrable or (self.shares.has_level and account is not None and not account.is_over_share)
