"""The queue of one device. It admits queries by predicted finish or by a count, and chooses the queries of each run.

Pure: it imports neither ray nor torch and reads no clock; the time is an argument. One `Schedule` belongs to one
replica, and one thread calls all its methods.

Two classes of queries wait:

    urgent      The deadline is at most two SLOs away. They run in the order of their deadlines.
    patient     They are bulk, or their deadline is later. They run behind the urgent ones. In a run that they lengthen
                they take at most `bulk_share` of the SLO. A fifth of that share is theirs in every run.

Symbols. Work is in planned device seconds, which the cost model says; the others are seconds on the clock:

    c           cost of the query
    U, W        work of the urgent queries that wait; work of the next run, which is U and the patient queries it takes
    L           time that the running run still needs
    left, t     time to the query's deadline; time to the earliest deadline in the next run, this query's included
    f, m        factor and margin (`learning`)
    rho         work that arrives in a second

A query is admitted if the next run still fits into the SLO, and

    answers come at the run's end       L + f (beta + W + c) <= t / (1 + m)
    and it is the first of the next     L <= (left / (1 + m) - f beta) / (1 + f rho)
      run while another one runs
    answers come pass by pass           L + f (beta + U + c + pass) <= left / (1 + m)
      (on an idle device: as at the end)
    it is patient                       L + ceil(patient work / its share of any run) * SLO <= left / (1 + m); one run
                                        more where urgent queries wait and answers come at the run's end
    depth (Algorithm 1), in place of    queries that wait and run < depth
      all of these

- Pass by pass, a new query delays no query with an earlier deadline. Queries with later deadlines are still in time,
  because this query is. So only its own deadline is checked.
- Without the term with rho, one early query would make the next run short.
- While tenants ask for more than there is, those over their share leave room to the others (`shares`). A query of a
  tenant that asks for less than its share goes by the rules above, with rho 0.
- A slow device may refuse every query for ever. So an idle device sometimes admits one query as a probe, and learns
  from it whether it is still slow.

`make bench ARGS=admission` compares these rules with simpler ones.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from deployments.admission.fair_share import Account, Kind, Shares, Tenant
from deployments.admission.learning import Learning
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel
from deployments.embedding.scheduler.pacing import Pacing
from deployments.embedding.scheduler.starvation import Fairness
from deployments.embedding.scheduler.state import Policy, Query, Refusals, ReplicaState

PATIENT = 2.0  # SLOs: who allows more than so many waits behind the others
_FADE_S = 0.01
_RHO_S = 3.0  # over which the arrival of work is averaged
_OVERDUE_SHARE = 0.25  # of what a run is late by: how long it is thought to need still
_LEAST_PREDICTION = 0.25  # of the SLO: an error of a shorter prediction says nothing about lateness
# An idle device that would refuse lets a query in after so many SLOs without a run. The time doubles, from the first to
# the last, with each such probe.
_FIRST_PROBE, _LAST_PROBE = 1.0, 8.0
_LEAST_OTHERS = 0.25  # of a run: the others have at least so much of it, also where the SLO is short
# If no setting says what the others have of a run: half of beta, but no less and no more than these shares of the run.
# Of more than half, too many queries of a quiet tenant find no room where answers come at a run's end.
_BETA_OTHERS, _SHORTEST_OTHERS, _LONGEST_OTHERS = 0.5, 0.1, 0.25
_SURE_SHARE = 0.2  # of `bulk_share`: of any run, however many urgent queries wait
_UNIT_SHARE = 0.05  # of the SLO: the least work that the factor is learned from
_NOW_S = 0.0005  # who would wait for less starts: the loop's timers count milliseconds
_NEVER = math.inf

_by_deadline = attrgetter("due")
_GREEDY = Account(1.0, kind=Kind.UNDER)  # any tenant that asks for more than its share


@dataclass(slots=True, repr=False, eq=False)
class Schedule:
    """The queue of one device: `offer` admits, `start_in_s` and `start` begin a run, `passed` and `ended` follow it.

    `pass_tokens`: tokens whose answers leave together; 0: all answers of a run come at its end. `running`: queries of
    the running run that are not answered. `most`: most queries in flight at once since the start. `runs`: since then.
    """

    model: CostModel
    policy: Policy
    pass_tokens: int = 0
    learning: Learning = field(default_factory=Learning)
    refusals: Refusals = field(default_factory=Refusals)
    running: int = 0
    most: int = 0  # in flight at once, since the start
    runs: int = 0  # since the start
    _shares: Shares = field(default_factory=Shares)
    _fairness: Fairness = field(init=False)
    _pacing: Pacing = field(init=False)
    _urgent: list[Query] = field(default_factory=list)
    _patient: list[Query] = field(default_factory=list)
    _urgent_s: float = 0.0
    _patient_s: float = 0.0
    _patient_largest_s: float = 0.0
    _bulk_running: int = 0
    _rho: float = 0.0
    _rho_at: float = 0.0
    _probe_after: float = _FIRST_PROBE  # SLOs without a run
    _probes: bool = False  # the running run, or what waits
    _first: float = field(init=False)  # arrival of the first of what waits for an idle device
    _last: float = field(init=False)
    _trial_depth: int | None = None  # of the latest offer, where it was a trial
    _start_by: float = _NEVER  # or somebody who waits for an idle device would be late
    _is_running: bool = False
    _began: float = field(init=False)
    _since: float = 0.0  # the last sign of progress
    planned_s: float = field(init=False)  # planned seconds of the running run, or of the last one
    _planned_by: CostModel | None = None  # the model that `planned_s` comes from
    _done_s: float = field(init=False)  # planned seconds of the running run's queries that are answered
    # Of the running run: (predicted seconds, actual seconds, factor at admission) of each answered query.
    _errors: list[tuple[float, float, float]] = field(default_factory=list)

    # `_learn` computes these from policy, model, factor and margin. All but the last are planned seconds.
    _run_most_s: float = field(init=False)  # the most work that one run may hold
    _patient_run_s: float = field(init=False)  # patient work that every run takes, however many urgent queries wait
    _pass_s: float = field(init=False)  # work of one pass
    _deadline_share: float = field(init=False)  # 1 / (1 + margin): so much of the time to a deadline may be filled

    def __post_init__(self) -> None:
        self._fairness = Fairness(self.model.alpha_s)
        self._pacing = Pacing.of_beta(self.model.beta_s)
        self._learn()

    # --- what is in force ---------------------------------------------------------------------------------------------

    def set_pass_tokens(self, tokens: int) -> None:
        """So many tokens leave together from now on."""
        self.pass_tokens = tokens
        self._learn()

    def configure(self, policy: Policy, model: CostModel, *, calibrated: bool) -> None:
        """Take over another promise, rule or model, in place. What waits stays, by the costs it was admitted by."""
        self.policy = policy
        if model != self.model:
            self.model = model
            self._fairness = Fairness(model.alpha_s)
            self.learning = Learning(calibrated)
        self._pacing = Pacing.of_beta(model.beta_s)
        self._learn()

    def _learn(self) -> None:
        """Another policy, model, factor or margin: what follows from them."""
        self._deadline_share = 1 / (1 + self.learning.margin)
        self._run_most_s = self._run_s(self.policy.slo_s)
        self._patient_run_s = _SURE_SHARE * self.policy.bulk_share * self._run_most_s
        self._pass_s = self.model.alpha_s * self.pass_tokens / QUERY_TOKENS

    @property
    def waiting(self) -> int:
        """Queries that are admitted and do not run yet, held ones included."""
        return len(self._urgent) + len(self._patient)

    @property
    def in_flight(self) -> int:
        """Queries that are admitted and not answered."""
        return self.waiting + self.running

    def _run_s(self, slo_s: float) -> float:
        """Planned seconds of work that one run may hold: it ends within `slo_s` of its start."""
        allowed_s = slo_s * self._deadline_share / self.learning.factor - self.model.beta_s
        if self.policy.depth is not None:
            allowed_s = min(allowed_s, self.policy.depth * self.model.alpha_s)
        return max(0.0, allowed_s)

    @property
    def _patient_next_s(self) -> float:
        """Of those that wait, at most so much is in the next run, however full: until they have their share."""
        return min(self._patient_s, self._patient_run_s + self._patient_largest_s) if self._patient else 0.0

    # --- admission ----------------------------------------------------------------------------------------------------

    def offer(
        self,
        now: float,
        queries: Sequence[Query],
        *,
        partial: bool = False,
        again: bool = False,
        depth: int | None = None,
        slo_s: float | None = None,
    ) -> int:
        """Admit these queries of one request, which have one deadline: all or none; where `partial`, as many of the
        first as there is room for. Returns how many were admitted.

        `again`: another replica of the pool has counted their work already. A calibration's trial is admitted by the
        count `depth` instead, or as though the SLO were `slo_s`.
        """
        total_s = 0.0
        for query in queries:
            query.cost_s = self.model.cost_s(query.tokens)
            total_s += query.cost_s
        first, f = queries[0], self._slow(now)
        until_s = self._until_free(now, f)
        if first.tenant is not None and depth is None:
            self._open_account(now, first.tenant, queries)
        if first.patient and depth is None:
            self._promote(now, queries, total_s)
        patient = first.patient
        if not (again or patient):
            self.arrives(now, total_s)
        if depth is not None or self.policy.admission == "depth":
            taken = min(len(queries), self._places(first, depth))
        else:
            taken = self._fitting(now, queries, total_s, self._room_for(now, first, f, until_s, slo_s))
        if taken < len(queries) and not partial:
            taken = 0
        self._trial_depth = depth
        if depth is None and not patient:
            self._note_demand(now, queries, taken, total_s)
        if taken:
            promised = depth is None and self.policy.admission == "finish"
            self._admit(now, queries[:taken], f, until_s, promised=promised)
        if taken < len(queries):
            self._count_refused(len(queries) - taken, queries[taken], now)
        return taken

    def _open_account(self, now: float, tenant: Tenant, queries: Sequence[Query]) -> None:
        account = self._shares.account(now, tenant)
        for query in queries:
            query.account = account

    def _note_demand(self, now: float, queries: Sequence[Query], taken: int, total_s: float) -> None:
        """For the fairness to tenants, and to long queries."""
        if (account := queries[0].account) is not None:
            account.count(total_s, total_s if taken == len(queries) else sum(query.cost_s for query in queries[:taken]))
        refused = queries[taken:]
        if not (refused and self._is_late_when_idle(now, refused)):  # no room that is kept would help those
            self._fairness.offered(now, total_s / len(queries), refused=bool(refused))

    def _is_late_when_idle(self, now: float, queries: Sequence[Query]) -> bool:
        """One of these would not be admitted on an idle device either."""
        return any(query.cost_s > self._idle_room_s(query.due - now) for query in queries)

    def arrives(self, now: float, work_s: float, tenant: Tenant | None = None) -> None:
        """So much work asks for this device. `tenant`: whose, of what a Router has refused by itself."""
        if tenant is not None:
            self._shares.account(now, tenant).offered_s += work_s
        if now - self._rho_at > _FADE_S:  # oftener would only cost
            self._rho *= math.exp((self._rho_at - now) / _RHO_S)
            self._rho_at = now
        self._rho += work_s / _RHO_S

    def _room_for(self, now: float, query: Query, f: float, until_s: float, slo_s: float | None) -> float:
        if query.patient:
            return self._patient_room_s(now, query, f, until_s)
        account, left_s = query.account, query.due - now
        if account is None or not self._shares.has_level:
            return self._room_s(now, left_s, f, until_s, slo_s)
        if account.kind == Kind.QUIET:
            return self._room_s(now, left_s, f, until_s, rho=0.0)
        return self._shared_s(account, self._room_s(now, left_s, f, until_s), until_s)

    def _shared_s(self, account: Account, room_s: float, until_s: float) -> float:
        """Of that room, what a tenant may take that asks for more than its share."""
        shares = self._shares
        if shares.has_quiet:
            room_s = min(room_s, self._others_run_s - shares.others_waiting_s)
        return room_s - shares.kept_s(account, self._fairness.mean_s, until_s)

    @property
    def _others_run_s(self) -> float:
        """The most work of a run of those who ask for more than their share: after its start a quiet tenant's query is
        still in time. They have at least a part of each run.
        """
        slo_s = self.policy.slo_s * self._deadline_share / self.learning.factor
        runs_s = 2 * (self.model.beta_s + self._fairness.mean_s)  # this run, and the one after it
        in_time_s = slo_s * (1 - 2 * self._shares.quiet_rho) - runs_s - self._pass_s
        share, most_s = self.policy.greedy_share, self._run_most_s
        if share is None:
            share = min(_LONGEST_OTHERS, max(_SHORTEST_OTHERS, _BETA_OTHERS * self.model.beta_s / max(most_s, 1e-9)))
        return min(share * most_s, max(in_time_s, _LEAST_OTHERS * most_s))

    def _room_s(
        self,
        now: float,
        left_s: float,
        f: float,
        until_s: float,
        slo_s: float | None = None,
        *,
        rho: float | None = None,
    ) -> float:
        """Room for urgent work now, in planned device seconds, below 0 where there is none. `left_s`: to the query's
        deadline; `f`: the factor now; `until_s`: L of the module's docstring; `slo_s`: in place of the policy's.
        """
        beta_s = self.model.beta_s
        left_s *= self._deadline_share
        work_s = self._urgent_s + self._patient_next_s
        room_s = (self._run_most_s if slo_s is None else self._run_s(slo_s)) - work_s
        if self.pass_tokens and self._is_running:  # patient ones are behind it in the run
            return min(room_s, (left_s - until_s) / f - beta_s - self._urgent_s - self._pass_s)
        rho = self._rho if rho is None else rho
        if self._is_running and not self._urgent and until_s > (left_s - f * beta_s) / (1 + f * rho):
            return 0.0
        for line in (self._urgent, self._patient[:1]):
            if line:
                left_s = min(left_s, (line[0].due - now) * self._deadline_share)
        return min(room_s, (left_s - until_s) / f - beta_s - work_s)

    def _idle_room_s(self, left_s: float) -> float:
        """What is admitted for such a deadline on an idle device."""
        until_s = left_s * self._deadline_share - self._pacing.pause_s
        return min(self._run_most_s, until_s / self.learning.factor - self.model.beta_s)

    def _promote(self, now: float, queries: Sequence[Query], total_s: float) -> None:
        """Make patient queries urgent where the device is idle, they fit into the SLO, and they are more work than the
        patient queries' share of a run.
        """
        first, finish = queries[0], self.policy.admission == "finish"
        if (
            first.bulk
            or not finish
            or self._is_running
            or self.waiting
            or total_s > self._idle_room_s(self.policy.slo_s)
        ):
            return
        if total_s > self._patient_room_s(now, first, self.learning.factor, self._pacing.pause_s):
            for query in queries:
                query.patient, query.due = False, min(query.due, now + self.policy.slo_s)

    def _may_probe(self, now: float, queries: Sequence[Query], total_s: float) -> bool:
        """Whether an idle device admits these queries as a probe, although its factor says that they would be late.

        It must have been idle for long enough: the factor may be out of date, and only a run shows it. The wait is
        shorter for queries that would be in time with a factor of 1. Several queries at once must be such.
        """
        in_time = self._pacing.pause_s + self.model.beta_s + total_s <= queries[0].due - now
        if not in_time and len(queries) > 1:
            return False
        after = self._probe_after if in_time and self.learning.factor > 1 else _LAST_PROBE
        return now - self._since > after * self.policy.slo_s

    def _fitting(self, now: float, queries: Sequence[Query], total_s: float, room_s: float) -> int:
        """How many of the first have room. On an idle device also sees whether they are to be a probe."""
        if self.policy.depth == 0:
            return 0
        idle = not (self._is_running or self.waiting)
        if idle:
            self._probes = total_s > room_s and self._may_probe(now, queries, total_s)
        if room_s < self._reserve_s > max(q.cost_s for q in queries) and not self._is_preferred(queries[0]):
            room_s = 0.0  # it is kept for a long query
        if total_s <= room_s or (idle and self._probes):
            return len(queries)
        taken = 0
        for query in queries:
            room_s -= query.cost_s
            if room_s < 0:
                break
            taken += 1
        return taken

    def _is_preferred(self, query: Query) -> bool:
        """It gets room that is kept for long queries: it is patient, or its tenant asks for less than its share."""
        shares = self._shares
        return query.patient or (shares.has_level and query.account is not None and query.account.kind == Kind.QUIET)

    def _patient_room_s(self, now: float, query: Query, f: float, until_s: float) -> float:
        left_s = (query.due - now) * self._deadline_share
        with_it_s = f * (self.model.beta_s + self._urgent_s + query.cost_s)
        longer_s = max(0.0, with_it_s + f * self._patient_next_s - self.policy.slo_s)  # the next run than others
        runs = math.floor(max(0.0, (left_s - until_s - longer_s) / self.policy.slo_s))
        if self._urgent and not self.pass_tokens:
            runs -= 1
        room_s = runs * self._patient_run_s - self._patient_s
        if query.bulk:  # no more than the next run may take: the rest waits at the Router, for whichever device is free
            room_s = min(room_s, self._bulk_most_s - self._patient_s)
        if not self._patient and runs >= 1:
            room_s = max(room_s, query.cost_s)  # one that is larger than the share is let through by itself
        return room_s

    @property
    def _bulk_most_s(self) -> float:
        slo_s = self.policy.bulk_share * self.policy.slo_s * self._deadline_share
        return max(self._patient_run_s, slo_s / self.learning.factor - self.model.beta_s, self.model.alpha_s)

    def _places(self, query: Query, depth: int | None) -> int:
        """Places for such a query by Algorithm 1, less those that its tenant leaves to others."""
        free, account = self._free(depth, bulk=query.bulk), query.account
        if account is None or query.patient:
            return free
        alpha_s, slo_s = self.model.alpha_s, self.policy.slo_s
        return max(0, free - math.ceil(self._shares.kept_s(account, alpha_s, slo_s) / alpha_s))

    def _free(self, depth: int | None, *, bulk: bool) -> int:
        """Places by Algorithm 1."""
        limit = depth if depth is not None else self.policy.depth or 0
        free = limit - self.in_flight
        if bulk and limit:
            held = self._bulk_running + sum(query.bulk for query in self._patient)
            free = min(free, max(1, int(limit * self.policy.bulk_share)) - held)
        return max(0, free)

    def _admit(self, now: float, queries: Sequence[Query], f: float, until_s: float, *, promised: bool) -> None:
        if not self._is_running and not self.waiting:
            self._first, self._start_by = now, _NEVER
        self._last = now
        for query in queries:
            query.admitted_at = now
            if query.patient:
                insort(self._patient, query, key=_by_deadline)
                self._patient_s += query.cost_s
                self._patient_largest_s = max(self._patient_largest_s, query.cost_s)
            else:
                insort(self._urgent, query, key=_by_deadline)
                self._urgent_s += query.cost_s
                if query.account is not None:
                    self._shares.waits(query.account, query.cost_s)
        if (in_flight := self.in_flight) > self.most:
            self.most = in_flight
        work_s = self._urgent_s + self._patient_next_s
        predicted_s = (until_s if self._is_running else 0.0) + f * (self.model.beta_s + work_s)
        for query in queries:
            query.predicted_s, query.ahead_s, query.slow, query.was_idle = predicted_s, work_s, f, not self._is_running
        if promised and not self._is_running:
            self._start_by = min(self._start_by, now + max(0.0, self._may_wait_s(now, queries[0], f)))

    @property
    def _reserve_s(self) -> float:
        """Room that is kept for a long query; none for one that an idle device would refuse as well."""
        reserve_s = self._fairness.reserve_s
        return reserve_s if reserve_s and reserve_s <= self._idle_room_s(self.policy.slo_s) else 0.0

    def _may_wait_s(self, now: float, query: Query, f: float) -> float:
        """Seconds that an idle device may wait before it starts what waits, this query among it."""
        if query.patient:
            return (query.due - now) * self._deadline_share - self.policy.slo_s
        left_s = (self._urgent[0].due - now) * self._deadline_share
        return left_s - f * (self.model.beta_s + self._urgent_s + self._patient_next_s)

    def _count_refused(self, count: int, query: Query, now: float) -> None:
        if self.policy.depth == 0:
            self.refusals.closed += count
        elif self.never(query.cost_s, query.due - now):
            self.refusals.never += count
        else:
            self.refusals.full += count

    def never(self, cost_s: float, left_s: float) -> bool:
        """A query of that cost does not end within `left_s` on an idle device either (Eq. 11), as quick as it is known
        to be: one that is slow just now may be asked again.
        """
        finish = self.policy.admission == "finish"
        return finish and min(1.0, self.learning.factor) * (self.model.beta_s + cost_s) > min(left_s, self._longest_s)

    @property
    def _longest_s(self) -> float:
        return _NEVER if self.policy.depth is None else self.policy.slo_s

    # --- what runs ----------------------------------------------------------------------------------------------------

    def start_in_s(self, now: float) -> float | None:
        """Seconds until the next run should start; None where none can: one runs, or nothing waits that may."""
        ready = [query for query in (*self._urgent, *self._patient) if not query.held] if not self._is_running else []
        if not ready:
            return None
        if self._nobody_can_join(now):
            return 0.0
        if self._trial_depth is not None:  # a calibration's burst, which is to be one run
            return max(0.0, self._first + self._pacing.longest_s - now)
        wait_s = self._start_at(len(ready), self._last) - now
        return wait_s if wait_s > _NOW_S else 0.0

    def _start_at(self, waiting: int, last: float) -> float:
        return min(self._start_by, self._pacing.start_at(waiting, first=self._first, last=last))

    def _nobody_can_join(self, now: float) -> bool:
        if self._trial_depth is not None or self.policy.admission == "depth":
            return not self._free(self._trial_depth, bulk=False)
        f, slo_s = self._slow(now), self.policy.slo_s
        return self._room_s(now, slo_s, f, self._until_free(now, f)) < self._fairness.mean_s

    def start(self, now: float) -> list[Query]:
        """Begin the next run: its queries in the order of their deadlines, the patient ones last."""
        run = [query for query in self._urgent if not query.held]
        sure_s, fill_s, most_s = self._patient_run_s, *self._fill_s(now, run)
        work_s = 0.0
        for query in self._patient:
            if query.held:
                continue
            if work_s + query.cost_s > (fill_s if work_s >= sure_s and work_s else most_s):
                break
            work_s += query.cost_s
            run.append(query)
        self.remove(run)
        self.runs += 1
        self.running = len(run)
        self._bulk_running = sum(query.bulk for query in run)
        self._is_running, self._began, self._since = True, now, now
        self.planned_s, self._done_s = self.model.beta_s + sum(query.cost_s for query in run), 0.0
        self._planned_by = self.model
        return run

    def _fill_s(self, now: float, run: Sequence[Query]) -> tuple[float, float]:
        """Planned seconds of patient queries that a run takes behind these urgent ones; and the most with their share
        of any run, which is less only where those would wait for it.
        """
        if self.policy.admission == "depth":
            return _NEVER, _NEVER
        f, urgent_s = self.learning.factor * (1 + self.learning.margin), sum(query.cost_s for query in run)
        fill_s = self.policy.bulk_share * self.policy.slo_s / f - self.model.beta_s - urgent_s
        if run and not self.pass_tokens:
            most_s = (run[0].due - now) / f - self.model.beta_s - urgent_s
            return min(fill_s, most_s), most_s
        return fill_s, _NEVER

    def passed(self, now: float, queries: Iterable[Query]) -> None:
        """These queries of the running run are answered."""
        queries = list(queries)
        self._done_s += sum(query.cost_s for query in queries)
        for query in queries:
            self.running -= 1
            self._bulk_running -= query.bulk
            if query.predicted_s > _LEAST_PREDICTION * self.policy.slo_s and not query.patient:
                joined_s = query.slow * max(0.0, self._done_s - query.ahead_s)  # later, and ran before it
                since = self._began if query.was_idle else query.admitted_at
                self._errors.append((query.predicted_s + joined_s, now - since, query.slow))
        self._since = now

    def ended(self, now: float, *, whole: bool = True) -> None:
        """The running run has ended; not `whole`: it failed or was stopped, and its time teaches nothing."""
        if whole and self._planned_by is self.model:
            least_s = _UNIT_SHARE * self.policy.slo_s
            self.learning.worked(self.planned_s, now - self._began, least_s=least_s, probe=self._probes)
            for predicted_s, actual_s, slow in self._errors:
                self.learning.answered(predicted_s, actual_s, slow)
        if not self._probes:
            self._probe_after = _FIRST_PROBE
        elif whole:
            self._probe_after = min(2 * self._probe_after, _LAST_PROBE)
        self._learn()
        self._errors.clear()
        self._is_running, self._probes, self._since = False, False, now
        self.running = self._bulk_running = 0
        self._first = self._last = now
        if self._urgent or self._patient:  # what waits has waited already: no pause
            self._first = now - self._pacing.longest_s

    def remove(self, queries: Iterable[Query]) -> None:
        """These do not wait any more: they run from now on, or nobody wants them."""
        gone = set(map(id, queries))
        if not gone:
            return
        self._urgent = [query for query in self._urgent if id(query) not in gone]
        self._patient = [query for query in self._patient if id(query) not in gone]
        self._urgent_s = sum(query.cost_s for query in self._urgent)
        self._patient_s = sum(query.cost_s for query in self._patient)
        self._patient_largest_s = max((query.cost_s for query in self._patient), default=0.0)
        if self._shares.accounts:
            self._shares.wait((query.account, query.cost_s) for query in self._urgent if query.account is not None)

    # --- predictions --------------------------------------------------------------------------------------------------

    def _slow(self, now: float) -> float:
        """The factor, by what was learned and by a run that is overdue."""
        if not self._is_running:
            return self.learning.factor
        if self.pass_tokens:
            by_now_s = min(self.planned_s, self.model.beta_s + self._done_s + self._pass_s)
        else:
            by_now_s = self.planned_s
        return max(self.learning.factor, (now - self._began) / by_now_s if by_now_s > 0 else 0.0)

    def _until_free(self, now: float, f: float) -> float:
        """L: seconds until the running run ends, or until an idle device starts."""
        if not self._is_running:
            if not self.waiting:
                return self._pacing.pause_s
            return max(0.0, self._start_at(self.waiting + 1, now) - now)
        if not self.running:  # all is answered, and the run about to end
            return 0.0
        rest_s = self.planned_s - (self.model.beta_s + self._done_s if self._done_s else 0.0)
        left_s = f * rest_s - (now - self._since)
        late_s = (now - self._began) - self.learning.factor * self.planned_s
        return max(left_s, _OVERDUE_SHARE * late_s, 0.0)

    def opens_s(self, now: float) -> float:
        """Seconds until a query of the mean cost that allows the SLO would be admitted; 0: now; inf: closed."""
        if self.policy.depth == 0:
            return _NEVER
        f = self._slow(now)
        until_s = self._until_free(now, f)
        if self.policy.admission == "depth":
            return 0.0 if self._free(None, bulk=False) else min(until_s, f * self._pass_s or until_s)
        return self._room_in_s(now, f, until_s, self._room_s(now, self.policy.slo_s, f, until_s))

    def _room_in_s(self, now: float, f: float, until_s: float, room_s: float) -> float:
        """`room_s`: that there is now for such a query."""
        cost_s = max(self._fairness.mean_s, self._reserve_s)
        if self.model.cost_s(1) <= (idle_s := self._idle_room_s(self.policy.slo_s)) < cost_s:
            cost_s = idle_s  # shorter ones are admitted
        missing_s = cost_s - room_s
        if missing_s <= 0:
            return 0.0
        if not self._is_running and not self.waiting:
            after = self._probe_after if self.learning.factor > 1 else _LAST_PROBE
            return max(0.0, self._since + after * self.policy.slo_s - now)
        slo_s, beta_s = self.policy.slo_s * self._deadline_share, self.model.beta_s
        work_s = self._urgent_s + self._patient_next_s
        if self.pass_tokens and self._is_running:
            if f * missing_s <= until_s and self._run_most_s - work_s >= cost_s:
                return f * missing_s
            return until_s + max(0.0, f * (2 * beta_s + work_s + self._pass_s + cost_s) - slo_s)
        latest_s = (slo_s - f * beta_s) / (1 + f * self._rho)  # of a run's rest, for somebody to open the next
        if self._is_running and not self._urgent and until_s > latest_s:
            return until_s - latest_s
        return until_s + max(0.0, f * (beta_s + work_s) - latest_s)

    def state(self, now: float) -> ReplicaState:
        """What Routers go by until they hear again."""
        f = self._slow(now)
        work_s = self._urgent_s + self._patient_s
        free_s = self._until_free(now, f) if self._is_running else 0.0
        if self.waiting:
            free_s += f * (self.model.beta_s + work_s)
        model = self.model
        by_count = self.policy.admission == "depth"
        bulk_s = self._free(None, bulk=True) * model.alpha_s if by_count else self._bulk_most_s - self._patient_s
        state = ReplicaState(
            self.opens_s(now), free_s, max(0.0, bulk_s), self.in_flight, self.waiting, self.most, self.runs,
            (model.query_s, model.token_s, model.token2_s, model.beta_s), f, self.learning.margin,
            (self.refusals.full, self.refusals.never, self.refusals.closed),
        )  # fmt: skip
        return self._beside_shares(now, state) if self._shares.has_level else state

    def _beside_shares(self, now: float, state: ReplicaState) -> ReplicaState:
        greedy, opens_s = self._shares.greedy, state.opens_s
        if not greedy or opens_s == _NEVER or self.policy.admission == "depth":
            return state
        f = self._slow(now)
        until_s = self._until_free(now, f)
        room_s = self._shared_s(_GREEDY, self._room_s(now, self.policy.slo_s, f, until_s), until_s)
        greedy_opens_s = self._room_in_s(now, f, until_s, room_s)
        return state._replace(opens_s=max(opens_s, greedy_opens_s), quiet_opens_s=opens_s, greedy=greedy)

    def fill(self, now: float) -> float:
        """How full the queue is: the share of its depth, or of an SLO, that is taken. Autoscaling goes by it."""
        if self.policy.admission == "depth":
            return self.in_flight / max(1, self.policy.depth or 0)
        return self.state(now).free_s / self.policy.slo_s
