"""What is asked of a device: work a second, by which tenants, how long queries; and for whom room is kept. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.admission.fair_share import Account, Shares, Tenant
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.starvation import LongQueries
from deployments.embedding.scheduler.state import ScheduledQuery

_LEAST_OTHERS = 0.25  # of a run: the others have at least so much of it, also where the SLO is short
# If no setting says what the others have of a run: half of beta, but no less and no more than these shares of the run.
# Of more than half, too many queries of a tenant under its share find no room where answers come at a run's end.
_BETA_OTHERS, _SHORTEST_OTHERS, _LONGEST_OTHERS = 0.5, 0.1, 0.25
_FADE_S = 0.01
_RHO_S = 3.0  # over which the arrival of work is averaged


@dataclass(slots=True, repr=False, eq=False)
class Demand:
    """`rho`: work that arrives in a second. `shares`: what tenants asked for and got. `long_queries`: the same for
    long and short queries.
    """

    limits: Limits
    long_queries: LongQueries
    shares: Shares = field(default_factory=Shares)
    rho: float = 0.0
    _rho_at: float = -math.inf

    def arrives(self, now: float, work_s: float, tenant: Tenant | None = None) -> None:
        """So much work asks for this device. `tenant`: whose, of what a Router has refused by itself."""
        if tenant is not None:
            self.shares.account(now, tenant).offered_s += work_s
        if now - self._rho_at > _FADE_S:  # oftener would only cost
            self.rho *= math.exp((self._rho_at - now) / _RHO_S)
            self._rho_at = now
        self.rho += work_s / _RHO_S

    def refused(self, now: float, cost_s: float, count: int) -> None:
        """So many queries of that cost were refused by a Router, for want of room here."""
        if cost_s <= self.limits.idle_room_s(self.limits.policy.slo_s):
            self.long_queries.offered(now, cost_s, refused=True, count=count)

    def has_urgent(self, now: float) -> bool:
        """An urgent query came lately."""
        return now - self._rho_at < _RHO_S

    def offered(
        self, now: float, queries: Sequence[ScheduledQuery], most_s: float, *, tenant: Tenant | None, again: bool
    ) -> None:
        """These urgent queries ask for this device, but for those that cost more than `most_s`: an idle device refuses
        them, too. A tenant that asks in vain only has no account: nobody leaves room to it. `again`: another replica of
        the pool has counted them as arriving.
        """
        asked_s = sum(query.cost_s for query in queries if query.cost_s <= most_s)
        if not asked_s:
            return
        if tenant is not None:
            account = self.shares.account(now, tenant)
            for query in queries:
                query.account = account
        if not again:
            self.arrives(now, asked_s)

    def note(self, now: float, queries: Sequence[ScheduledQuery], taken: int, most_s: float) -> None:
        """The first `taken` of these were admitted: for the fairness to tenants, and to long queries. No room that is
        kept would help those that cost more than `most_s`.
        """
        used_s, refused = sum(query.cost_s for query in queries[:taken]), queries[taken:]
        wanted_s = [query.cost_s for query in refused if query.cost_s <= most_s]
        asked_s = used_s + sum(wanted_s)
        if (account := queries[0].account) is not None:
            account.count(asked_s, used_s)
        if len(wanted_s) == len(refused):
            self.long_queries.offered(now, asked_s / len(queries), refused=bool(refused))

    @property
    def reserve_s(self) -> float:
        """Room that is kept for a long query; none for one that an idle device would refuse as well."""
        reserve_s = self.long_queries.reserve_s
        return reserve_s if reserve_s and reserve_s <= self.limits.idle_room_s(self.limits.policy.slo_s) else 0.0

    def shared_s(self, account: Account, room_s: float, until_s: float, cost_s: float) -> float:
        """Of that room in the next run, which starts in `until_s`, what a tenant may take that asks for more than its
        share, with a query of `cost_s`: at least that one, if none of those over their share waits. Long queries would
        fit into no run else.
        """
        shares = self.shares
        kept_s = shares.kept_s(account, self.long_queries.mean_s, until_s)
        if shares.has_under_share:
            part_s = self._others_run_s - shares.others_waiting_s
            room_s = min(room_s, part_s if shares.others_waiting_s else max(part_s, kept_s + cost_s))
        return room_s - kept_s

    @property
    def _others_run_s(self) -> float:
        """The most work in one run of tenants over their share: after its start, a query of a tenant under its share is
        still in time. They have at least a part of each run.
        """
        limits, beta_s, predictor = self.limits, self.limits.model.beta_s, self.limits.predictor
        one_s = self.long_queries.mean_s
        slo_s = predictor.fill_s(limits.policy.slo_s) * (1 - 2 * self.shares.under_share_rho)
        in_time_s = predictor.work_s(slo_s - predictor.seconds(one_s)) - one_s - limits.pass_s  # and the run after it
        share, most_s = limits.policy.max_batch_fraction, limits.run_s
        if share is None:
            share = min(_LONGEST_OTHERS, max(_SHORTEST_OTHERS, _BETA_OTHERS * beta_s / max(most_s, 1e-9)))
        return min(share * most_s, max(in_time_s, _LEAST_OTHERS * most_s))

    def prefers(self, query: ScheduledQuery) -> bool:
        """It gets room that is kept for long queries: it is deferrable, or its tenant asks for less than its share."""
        account = query.account
        return query.deferrable or (self.shares.has_level and account is not None and not account.is_over_share)
