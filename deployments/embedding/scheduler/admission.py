"""Admission by predicted finish: a query is admitted if it ends before its deadline. `DepthAdmission` is the rule by
count. Pure.

Symbols. Work (c, U, W) is in planned device seconds of the cost model. All other times are seconds on the clock.

    c           cost of the query
    U, W        work of the waiting urgent queries; work of the next run: U and the deferrable queries that join it
    L           time until the current run ends
    left, t     time to the query's deadline; time to the earliest deadline in the next run, including this query's
    s(x)        predicted seconds of a run of work x; w(t) is its inverse; b(t) is t without the safety margin
    f           the slowdown that an overdue run shows; else 1
    rho         work that arrives per second

A query is admitted if the next run still fits into the SLO, and

    answers come at the run's end       L + f s(W + c) <= b(t)
    and it is the first of the next     L + f s(rho L) <= b(left)
      run while another one runs
    answers come pass by pass           L + f s(U + c + pass) <= b(left)
      or, behind a short run            L + f s(W + c) <= b(t')
      or, on an idle device             as at the run's end
    it is bulk                          it may be in the next run; no time is promised
    it is deferrable                    L + ceil(deferrable work / its reserved part of a run) * SLO <= b(left); one run
                                        more if the next run has urgent queries without a pass to spare

- Pass by pass, later queries may share a query's pass, but delay it no further. So a query with a pass to spare stays
  in time, and so do those with later deadlines.
- The first queries of a burst start a short run, and the others wait behind it. They need no pass to spare if they have
  almost an SLO left; with less, they would keep the others out. t' is the time to the earliest deadline of this query
  and those that wait without a pass to spare. While there are any, the queue stays full until their run starts.
- Without the term with rho, one early query would make the next run short.
- Under contention, tenants over their share leave room to the others (`fair_share`). For tenants under their share, the
  rules above apply with rho 0.
- A slow device may refuse every query forever. So an idle device sometimes admits one as a probe (`probe`).

`make bench ARGS=admission` compares these rules with simpler ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, NamedTuple

from deployments.admission.probe import IdleProbe
from deployments.embedding.scheduler.current_run import CurrentRun, Outlook
from deployments.embedding.scheduler.demand import Demand
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.run_queue import RunQueue
from deployments.embedding.scheduler.state import Q, ScheduledQuery

_NEVER = math.inf
_SHORT_RUN = 0.15  # of a run's most work: a run behind which queries need no pass to spare
_BURST_LEFT = 0.8  # of the SLO: the least time to the deadline of a query without one


class Opening(NamedTuple):
    """When a device admits a query.

    - `opens_s`: seconds until a query of the mean cost would be admitted.
    - `cost`: the room then, in planned device seconds; 0: for a query of any cost. `room`: the room now.
    - `grows`: room grows pass by pass until then; otherwise it comes at once.
    """

    opens_s: float
    cost: float = 0.0
    room: float = 0.0
    grows: bool = False


@dataclass(slots=True, repr=False, eq=False)
class Admission(Generic[Q]):
    """The rule by predicted finish.

    - `is_probe`: the current run, or the waiting one, is a probe.
    - `_tight_due`: the earliest deadline of the queries that wait behind a short run without a pass to spare.
    """

    limits: Limits
    queue: RunQueue[Q]
    run: CurrentRun
    demand: Demand
    is_probe: bool = False
    _tight_due: float = _NEVER
    _probe: IdleProbe = field(default_factory=IdleProbe)

    def fitting(
        self, now: float, queries: Sequence[ScheduledQuery], total: float, outlook: Outlook, run_work: float
    ) -> int:
        """How many of the first queries have room. `total`: the cost of all; `run_work`: the most work of a run."""
        if self.limits.policy.depth == 0:
            return 0
        room = self._room_for(now, queries[0], outlook, run_work)
        idle = not (self.run.is_running or self.queue.count)
        if idle:
            self.is_probe = total > room and self._may_probe(now, queries, total)
        reserve = self.demand.reserve
        if reserve > room and reserve > max(q.cost for q in queries) and not self.demand.prefers(queries[0]):
            room = 0.0  # it is reserved for a long query
        if total <= room or (idle and self.is_probe):
            return len(queries)
        taken = 0
        for query in queries:
            room -= query.cost
            if room < 0:
                break
            taken += 1
        return taken

    def keeps_nothing(self, now: float) -> bool:
        """Whether a run is under way, and no room of the next one is kept for anybody."""
        is_open = self.run.is_running and self.limits.policy.depth != 0
        return is_open and not self.demand.reserve and not self.demand.is_contended(now)

    def has_room_for_each(self, now: float, due: float, total: float, outlook: Outlook) -> bool:
        """Whether urgent queries of this total cost have room one after another, in any order, if no room is kept for
        anybody. `due`: the earliest deadline. They may start a reserve for long queries, but it applies to later
        queries only.
        """
        return total <= self._room(now, due - now, outlook, self.limits.run_work, self.demand.rho_with(total))

    def is_full(self, now: float, outlook: Outlook) -> bool:
        """Whether a query of the mean cost would be refused."""
        return self._slo_room(now, outlook, self.demand.rho) < self.demand.long_queries.mean

    def opening(self, now: float, outlook: Outlook, *, over_share: bool) -> Opening:
        """When a query of at least the mean cost, with the SLO to its deadline, would be admitted. `over_share`: for a
        tenant over its share.
        """
        demand = self.demand
        account = next(iter(demand.shares.over_share.values()), None) if over_share else None
        if account is None:
            rho = 0.0 if demand.shares.has_level else demand.rho  # for tenants under their share
            return self._opening(now, outlook, self._slo_room(now, outlook, rho), rho)
        rho, until_s = account.ahead_rho + account.rho, outlook[1]
        for_all, next_work = self._slo_room(now, outlook, rho), self.queue.next_work
        mean = demand.long_queries.mean
        room = demand.shared_room(account, for_all, next_work, until_s, mean)
        last = demand.shared_room(account, for_all, next_work, 0.0, mean)
        needed = max(mean, demand.reserve)
        opening = self._opening(now, outlook, room, rho)
        if not room < needed <= last:
            return opening
        # The room that is kept for others shrinks until the next run starts.
        return opening._replace(opens_s=min(opening.opens_s, until_s * (needed - room) / (last - room)))

    @property
    def bulk_room(self) -> float:
        """Bulk work that fits into the next run. The rest waits at the Router for whichever device is free first."""
        queue, limits = self.queue, self.limits
        return max(limits.bulk_part, limits.most_bulk - queue.deferrable_line.work) - queue.bulk_line.work

    @property
    def over_share(self) -> Sequence[str]:
        """Tenants for which the device opens later than for others."""
        return self.demand.shares.named

    def promote(self, now: float, queries: Sequence[ScheduledQuery], total: float) -> None:
        """Make deferrable queries urgent if the device is idle and they fit into the SLO, but not into their room."""
        limits, first = self.limits, queries[0]
        slo_s = limits.policy.slo_s
        if first.bulk or self.run.is_running or self.queue.count or total > limits.idle_room(slo_s):
            return
        if total > self._deferrable_room(now, first, (1.0, limits.pacing.pause_s)):
            for query in queries:
                query.deferrable, query.due = False, min(query.due, now + slo_s)

    def never(self, cost: float, left_s: float) -> bool:
        """Whether a query of that cost would not end within `left_s` even on an idle device (Eq. 11) at its best known
        speed: a device that is merely slow at the moment may be asked again.
        """
        limits, policy = self.limits, self.limits.policy
        longest_s = _NEVER if policy.depth is None else policy.slo_s
        return min(limits.predictor.seconds(cost), limits.model.beta_s + cost) > min(left_s, longest_s)

    def most_cost(self, left_s: float) -> float:
        """The largest cost of a query, with this much time left, that an idle device admits."""
        return self.limits.idle_room(left_s)

    def may_wait_s(self, now: float, query: ScheduledQuery, f: float) -> float:
        """Seconds that an idle device may wait before it starts the waiting queries, including this one."""
        queue, predictor = self.queue, self.limits.predictor
        if query.deferrable:
            return predictor.fill_s(query.due - now) - self.limits.policy.slo_s
        return predictor.fill_s(queue.urgent[0].due - now) - f * predictor.seconds(queue.next_work)

    def deferrable_limits(self, now: float, urgent: Sequence[ScheduledQuery]) -> tuple[float, float]:
        """Two limits on the deferrable work in a run behind these urgent queries: how far it may fill the run, and the
        most including its reserved part. The second is finite only where urgent queries would have to wait for it.
        """
        limits, predictor, urgent_work = self.limits, self.limits.predictor, sum(query.cost for query in urgent)
        fill = predictor.work_in(predictor.fill_s(limits.policy.bulk_share * limits.policy.slo_s)) - urgent_work
        if self.demand.has_urgent(now):
            fill = min(fill, limits.between_work)
        # Deferrable queries delay the urgent ones of the last pass. Without passes, that is the whole run.
        pass_work, ahead = limits.pass_work or _NEVER, accumulate((query.cost for query in urgent), initial=0.0)
        due = min(
            (query.due for query, work in zip(urgent, ahead, strict=False)
             if urgent_work - work <= pass_work
             and predictor.work_in(predictor.fill_s(query.due - now)) < work + pass_work),
            default=_NEVER,
        )  # fmt: skip
        most = predictor.work_in(predictor.fill_s(due - now)) - urgent_work
        return min(fill, most), most

    def admitted(self, now: float, query: ScheduledQuery, outlook: Outlook) -> None:
        """Note a query that now waits, the last of its request."""
        left_s, with_pass = query.due - now, self.queue.urgent_line.work + self.limits.pass_work
        if self._needs_no_spare_pass(left_s) and with_pass > self._next_run_within(left_s, outlook):
            self._tight_due = min(self._tight_due, query.due)

    def bulk_limit(self, now: float, urgent: Sequence[ScheduledQuery]) -> float:
        """The most bulk work in a run with these urgent queries. Where bulk's own runs cost little, bulk joins a run of
        urgent queries at most once per SLO.
        """
        limits = self.limits
        if not urgent:
            return _NEVER
        if limits.between_work < limits.most_bulk and now - self.run.bulk_at < limits.policy.slo_s:
            return 0.0
        return limits.run_work - sum(query.cost for query in urgent)

    def ended(self, *, whole: bool) -> None:
        """Note that a run has ended, and whether it was a probe."""
        if not self.is_probe:
            self._probe.reset()
        elif whole:
            self._probe.back_off()
        self.is_probe = False
        self._tight_due = _NEVER

    def _needs_no_spare_pass(self, left_s: float) -> bool:
        """Whether a query with this much time to its deadline waits behind a short run, and allows almost an SLO."""
        run, limits = self.run, self.limits
        is_short = run.is_running and run.work <= _SHORT_RUN * limits.run_work
        return is_short and limits.micro_batch_tokens > 0 and left_s >= _BURST_LEFT * limits.policy.slo_s

    @property
    def _has_tight(self) -> bool:
        return self._tight_due < _NEVER

    def _room_for(self, now: float, query: ScheduledQuery, outlook: Outlook, run_work: float) -> float:
        if query.bulk:
            return max(self.bulk_room, 0.0 if self.queue.bulk_line.queries else query.cost)
        if query.deferrable:
            return self._deferrable_room(now, query, outlook)
        account, left_s, rho = query.account, query.due - now, self.demand.rho
        if account is None or not self.demand.shares.has_level:
            return self._room(now, left_s, outlook, run_work, rho)
        if not account.is_over_share:
            return self._room(now, left_s, outlook, self.limits.run_work, 0.0)
        room = self._room(now, left_s, outlook, self.limits.run_work, account.ahead_rho + account.rho)
        return self.demand.shared_room(account, room, self.queue.next_work, outlook[1], query.cost)

    def _slo_room(self, now: float, outlook: Outlook, rho: float) -> float:
        """Room for a query with the SLO to its deadline."""
        return self._room(now, self.limits.policy.slo_s, outlook, self.limits.run_work, rho)

    def _room(self, now: float, left_s: float, outlook: Outlook, run_work: float, rho: float) -> float:
        """Room for urgent work in a run of at most `run_work`. Below 0: none. `left_s`: time to the deadline."""
        limits, queue, is_running, (f, until_s) = self.limits, self.queue, self.run.is_running, outlook
        predictor, work = limits.predictor, queue.next_work
        room = run_work - work
        if limits.micro_batch_tokens and is_running:  # deferrable queries run behind it
            run_work = self._next_run_within(min(left_s, self._tight_due - now), outlook)
            spare = run_work - queue.urgent_line.work - limits.pass_work
            if self._needs_no_spare_pass(left_s):
                spare = max(spare, run_work - work)
            return min(room, spare)
        later_s = f * predictor.seconds(rho * until_s)  # time for the work that arrives until then
        if is_running and not queue.urgent and until_s + later_s > predictor.fill_s(left_s):
            return 0.0
        for line in (queue.urgent, queue.deferrable_line.queries):
            if line:
                left_s = min(left_s, line[0].due - now)
        return min(room, self._next_run_within(left_s, outlook) - work)

    def _next_run_within(self, left_s: float, outlook: Outlook) -> float:
        """The most work of the next run if it is to end within `left_s`."""
        predictor, (f, until_s) = self.limits.predictor, outlook
        return predictor.work_in((predictor.fill_s(left_s) - until_s) / f)

    def _deferrable_room(self, now: float, query: ScheduledQuery, outlook: Outlook) -> float:
        limits, queue, slo_s, (f, until_s) = self.limits, self.queue, self.limits.policy.slo_s, outlook
        left_s = limits.predictor.fill_s(query.due - now)
        with_it_s = f * limits.predictor.seconds(queue.next_work + query.cost)
        longer_s = max(0.0, with_it_s - slo_s)  # by which the next run exceeds an SLO
        runs = math.floor(max(0.0, (left_s - until_s - longer_s) / slo_s))
        if queue.urgent and (self._has_tight or not (limits.micro_batch_tokens and self.run.is_running)):
            runs -= 1
        line = queue.deferrable_line
        room = runs * limits.deferrable_part - line.work
        if not line.queries and runs >= 1:
            room = max(room, query.cost)  # a query larger than the reserved part is admitted alone
        return room

    def _may_probe(self, now: float, queries: Sequence[ScheduledQuery], total: float) -> bool:
        """Whether an idle device admits these queries as a probe. Several at once must be in time at planned speed."""
        limits = self.limits
        in_time = limits.pacing.pause_s + limits.model.beta_s + total <= queries[0].due - now
        if not in_time and len(queries) > 1:
            return False
        hopeful = in_time and limits.is_slow(total)
        return now - self.run.since > self._probe.after_s(limits.policy.slo_s, hopeful=hopeful)

    def _opening(self, now: float, outlook: Outlook, room: float, rho: float) -> Opening:
        """When a query of the mean cost has room. `room`: the room now."""
        limits, queue, is_running, (f, until_s) = self.limits, self.queue, self.run.is_running, outlook
        policy, model, predictor = limits.policy, limits.model, limits.predictor
        cost = max(self.demand.long_queries.mean, self.demand.reserve)
        if model.cost(1) <= (idle := limits.idle_room(policy.slo_s)) < cost:
            cost = idle  # shorter queries are admitted
        missing = cost - room
        if missing <= 0:
            return Opening(0.0, room, room, grows=limits.micro_batch_tokens > 0)
        if not is_running and not queue.count:
            after_s = self._probe.after_s(policy.slo_s, hopeful=limits.is_slow(cost))
            return Opening(max(0.0, self.run.since + after_s - now), cost, room)
        slo_s, work = predictor.fill_s(policy.slo_s), queue.next_work
        if limits.micro_batch_tokens and is_running:
            frees_s = f * (predictor.seconds(work + cost) - predictor.seconds(work + room))
            if frees_s <= until_s and limits.run_work - work >= cost and not self._has_tight:
                return Opening(frees_s, cost, room, grows=True)
            late_s = f * (predictor.seconds(work) + predictor.seconds(limits.pass_work + cost)) - slo_s
            return Opening(until_s + max(0.0, late_s), cost, room)
        beta_s = predictor.seconds(0.0)
        latest_s = (slo_s - f * beta_s) / (
            1 + f * predictor.slope * rho
        )  # the latest end of the current run at which a query may open the next
        # It then opens for all the work that fits into a run that starts so late.
        cost = max(cost, min(limits.run_work, predictor.work_in((slo_s - latest_s) / f)))
        if is_running and not queue.urgent and until_s > latest_s:
            return Opening(until_s - latest_s, cost, room)
        return Opening(until_s + max(0.0, f * predictor.seconds(work) - latest_s), cost, room)


class DepthAdmission(Admission[Q]):
    """The rule by count: Algorithm 1 of WindVE, `waiting and running queries < depth`. It promises no finish time."""

    __slots__ = ()

    def fitting(
        self, _now: float, queries: Sequence[ScheduledQuery], _total: float, _outlook: Outlook, _run_work: float
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
        pass_s = f * self.limits.predictor.slope * self.limits.pass_work
        return Opening(0.0 if self._free(bulk=False) else min(until_s, pass_s or until_s))

    @property
    def bulk_room(self) -> float:
        return self._free(bulk=True) * self.limits.model.alpha_s

    @property
    def over_share(self) -> Sequence[str]:
        return ()

    def keeps_nothing(self, _now: float) -> bool:
        return False

    def promote(self, *_: object) -> None:
        pass

    def admitted(self, *_: object) -> None:
        pass

    def never(self, *_: object) -> bool:
        return False

    def most_cost(self, _left_s: float) -> float:
        return math.inf

    def may_wait_s(self, *_: object) -> float:
        return math.inf

    def deferrable_limits(self, *_: object) -> tuple[float, float]:
        return math.inf, math.inf

    def bulk_limit(self, *_: object) -> float:
        return math.inf

    def _free(self, *, bulk: bool) -> int:
        """Free slots by Algorithm 1. Bulk queries may use a share of the depth."""
        limit = self.limits.policy.depth or 0
        free = limit - self.queue.count - self.run.unanswered
        if bulk and limit:
            held = self.run.bulk + len(self.queue.bulk_line.queries)
            free = min(free, max(1, int(limit * self.limits.policy.bulk_share)) - held)
        return max(0, free)
