"""The queue of one device. It admits queries by predicted finish or by a count, and chooses the queries of each run.

Pure: it imports neither ray nor torch and reads no clock; the time is an argument. One `Scheduler` belongs to one
replica, and one thread calls all its methods. Its parts:

    `limits`              policy, cost model, and the limits of a run that follow from them
    `demand`              the demand: work per second, tenants, long queries
    `admission`           the rules by predicted finish and by count
    `run_queue`           the waiting queries
    `current_run`         the running queries

Three classes of queries wait:

    urgent      The deadline is at most two SLOs away. They run in the order of their deadlines.
    deferrable  The deadline is later. They run behind the urgent ones. They and bulk may lengthen a run up to
                `bulk_share` of the SLO. A fifth of that share is reserved for them in every run.
    bulk        They run behind both, and are promised no time. A tenth of that share is reserved for them. While urgent
                queries come, deferrable and bulk queries fill at most nine betas of a run. Where that is less than the
                share, bulk runs by itself, and only once per SLO beside urgent queries.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic

from deployments.admission.predictor import LinePredictor, Predictor
from deployments.admission.starvation import LongRequests
from deployments.embedding.scheduler.admission import Admission, DepthAdmission, Opening
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.current_run import CurrentRun, Outlook
from deployments.embedding.scheduler.demand import Demand
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.run_queue import RunQueue
from deployments.embedding.scheduler.state import Policy, Q, Refusals, ReplicaState, ScheduledQuery

_NOW_S = 0.0005  # a shorter wait counts as none, because the loop's timers count whole milliseconds
_HOLD_SLO = 0.01  # of the SLO: how long a run waits until the rest of a request is placed
_NEVER = math.inf


class Scheduler(Generic[Q]):
    """The queue of one device: `offer` admits, `start_in_s` and `start` begin a run, `passed` and `ended` follow it.

    Since the start, `most` counts the most queries in flight at once, and `runs` the runs.

    If a request is spread over replicas, each admits a part. While the rest is being offered elsewhere (`hold`,
    `release`), the next run waits for the outcome: at most a hundredth of the SLO, and only while all waiting queries
    stay in time. After that the run includes the part. If nobody admits the rest, its answers are wasted.
    """

    def __init__(
        self, model: CostModel, policy: Policy, micro_batch_tokens: int = 0, predictor: LinePredictor | None = None
    ) -> None:
        predictor = predictor or Predictor(planned_s=model.beta_s, slo_s=policy.slo_s)
        self.limits = Limits(model, policy, micro_batch_tokens, predictor)
        self._given, self._is_calibrated, self.refusals = model, False, Refusals()
        self.most = self.runs = 0
        self.demand, self.run = Demand(self.limits, LongRequests(model.alpha_s)), CurrentRun(self.limits)
        self.queue = RunQueue[Q](self.limits, self.demand.shares)
        parts = self.limits, self.queue, self.run, self.demand
        self._by_finish, self._by_depth = Admission(*parts), DepthAdmission(*parts)
        self.admission: Admission[Q]
        self._held: dict[Hashable, float] = {}  # for each held part, until when the next run waits
        # For queries that wait for an idle device: first arrival, last arrival, and the latest start that keeps them in
        # time.
        self._first = self._last = self._start_by = _NEVER
        self._apply()

    # --- configuration ------------------------------------------------------------------------------------------------

    def set_pass_tokens(self, tokens: int) -> None:
        """Set the size of a pass in tokens; 0: all answers leave at the run's end."""
        self.limits.micro_batch_tokens = tokens
        self._apply()

    def configure(self, policy: Policy, model: CostModel, *, calibrated: bool = False) -> None:
        """Apply a new promise, rule or model in place. Waiting queries keep the costs at which they were admitted."""
        if (model, calibrated) != (self._given, self._is_calibrated):
            self._given = self.limits.model = model
            self._is_calibrated = calibrated
            self.demand.long_queries = LongRequests(model.alpha_s)
            predictor = Predictor(planned_s=model.beta_s, slo_s=policy.slo_s, is_calibrated=calibrated)
            self.limits.predictor = predictor
        if policy.slo_s != self.limits.policy.slo_s:
            self.limits.predictor.promise(policy.slo_s)
        self.limits.policy = policy
        self._apply()

    def _apply(self) -> None:
        """Update what depends on the policy, the model and the predictor."""
        self.limits.refresh()
        self.admission = self._by_depth if self.limits.policy.admission == "depth" else self._by_finish

    @property
    def planned_s(self) -> float:
        """Seconds of the current or last run by the configured model, without what was learned."""
        return self._given.beta_s + self._given.work(self.run.lengths)

    @property
    def in_flight(self) -> int:
        """How many admitted queries are unanswered."""
        return self.queue.count + self.run.unanswered

    # --- admission ----------------------------------------------------------------------------------------------------

    def offer(self, now: float, queries: Sequence[Q], *, partial: bool = False, again: bool = False) -> int:
        """Decide on queries of one request, which share a deadline. Admits all or none or, if `partial`, as many of the
        first as have room. Returns how many it admitted.

        `again`: another replica of the pool has counted their work already.
        """
        model, total = self.limits.model, 0.0
        for query in queries:
            query.cost = model.cost(query.tokens)
            total += query.cost
        first, outlook, admission, run_work = queries[0], self._outlook(now), self.admission, self.limits.run_work
        most = 0.0
        if first.deferrable:
            admission.promote(now, queries, total)
        else:
            most = admission.most_cost(first.due - now)
            self.demand.offered(now, queries, total, most, tenant=first.tenant, again=again)
        taken = admission.fitting(now, queries, total, outlook, run_work)
        if 0 < taken < len(queries):
            later = outlook[0], outlook[1] + (0.0 if first.bulk else self._hold_s)  # its run may wait for the rest
            taken = admission.fitting(now, queries, total, later, run_work) if partial else 0
        if not first.deferrable:
            self.demand.note(now, queries, taken, total, most)
        if taken:
            self._admit(now, queries[:taken], outlook)
        if taken < len(queries):
            self._count_refused(len(queries) - taken, queries[taken], now)
        return taken

    def offer_each(self, now: float, queries: Sequence[Q], *, again: bool = False) -> bool:
        """Admit urgent queries of one tenant, each a request of its own, if there surely is room for one after another.
        If not, returns False, and nothing has been decided: `offer` must decide on each.
        """
        if not self.admission.keeps_nothing(now):
            return False
        model, total = self.limits.model, 0.0
        for query in queries:
            query.cost = model.cost(query.tokens)
            total += query.cost
        outlook = self._outlook(now)
        if not self.admission.has_room_for_each(now, min([query.due for query in queries]), total, outlook):
            return False
        self.demand.offered(now, queries, total, _NEVER, tenant=queries[0].tenant, again=again)
        for query in queries:
            self.demand.note(now, (query,), 1, query.cost, _NEVER)
            self._admit(now, (query,), outlook)
        return True

    def hold(self, now: float, part: Hashable) -> None:
        """Delay the next run: the rest of this part's request is being offered elsewhere."""
        self._held[part] = now + self._hold_s

    def release(self, part: Hashable) -> None:
        """End the delay: the rest is admitted, or the part is not wanted any more."""
        self._held.pop(part, None)

    @property
    def _hold_s(self) -> float:
        return _HOLD_SLO * self.limits.policy.slo_s

    def _admit(self, now: float, queries: Sequence[Q], outlook: Outlook) -> None:
        admission, is_running, queue, (f, until_s) = self.admission, self.run.is_running, self.queue, outlook
        if not is_running and not queue.count:
            self._first, self._start_by = now, _NEVER
        self._last = now
        queue.add(queries)
        admission.admitted(now, queries[-1], outlook)
        if (in_flight := queue.count + self.run.unanswered) > self.most:
            self.most = in_flight
        predicted_s = until_s + f * self.limits.predictor.seconds(queue.next_work)
        for query in queries:
            query.admitted_at, query.predicted_s = now, predicted_s
        if not is_running:
            self._start_by = min(self._start_by, now + max(0.0, admission.may_wait_s(now, queries[0], f)))

    def _count_refused(self, count: int, query: ScheduledQuery, now: float) -> None:
        if self.limits.policy.depth == 0:
            self.refusals.closed += count
        elif self.admission.never(query.cost, query.due - now):
            self.refusals.never += count
        else:
            self.refusals.full += count

    # --- runs ---------------------------------------------------------------------------------------------------------

    def start_in_s(self, now: float) -> float | None:
        """Seconds until the next run should start. None if a run is running or nothing waits."""
        if self.run.is_running or not self.queue.count:
            return None
        return max(self._pause_s(now), self._held_s(now))

    def _pause_s(self, now: float) -> float:
        """Seconds to wait for a burst to end."""
        if self.admission.is_full(now, self._outlook(now)):
            return 0.0
        wait_s = self._start_at(self.queue.count, self._last) - now
        return wait_s if wait_s > _NOW_S else 0.0

    def _held_s(self, now: float) -> float:
        """Seconds to wait until held parts are decided, while all waiting queries stay in time."""
        if not self._held:
            return 0.0
        wait_s = min(max(self._held.values()), self._start_by) - now
        return wait_s if wait_s > _NOW_S else 0.0

    def _start_at(self, waiting: int, last: float) -> float:
        return min(self._start_by, self.limits.pacing.start_at(waiting, first=self._first, last=last))

    def start(self, now: float) -> list[Q]:
        """Begin the next run. Returns its queries in the order of their deadlines, deferrable and bulk ones last."""
        run, admission = self.queue.urgent.copy(), self.admission
        if len(run) < self.queue.count:
            run += self.queue.deferrable_first(*admission.deferrable_limits(now, run), admission.bulk_limit(now, run))
        self._forget(run)
        self._held.clear()
        self.runs += 1
        self.run.begin(now, run)
        return run

    def passed(self, now: float, queries: Iterable[ScheduledQuery]) -> None:
        """Note that these queries of the current run are answered."""
        self.run.passed(now, list(queries))

    def ended(self, now: float, *, whole: bool = True) -> None:
        """End the current run. If not `whole`, it failed or was stopped, and nothing is learned from its time."""
        # On a device that is not slow, a probe is like any other run.
        probe = self._by_finish.is_probe and self.limits.is_slow(self.run.work)
        self.run.ended(now, whole=whole, probe=probe)
        self._by_finish.ended(whole=whole)
        self._apply()
        self._first = self._last = now
        if self.queue.count:  # these have waited already, so there is no pause
            self._first = now - self.limits.pacing.longest_s
            heads = [line[0] for line in (self.queue.urgent, self.queue.deferrable_line.queries) if line]
            waits_s = (self.admission.may_wait_s(now, query, 1.0) for query in heads)
            self._start_by = now + max(0.0, min(waits_s, default=_NEVER))

    def remove(self, queries: Iterable[ScheduledQuery]) -> None:
        """Remove queries that nobody wants any more."""
        self._forget(queries)
        if not (self.queue.count or self.run.is_running):
            self._by_finish.is_probe = False  # it was called off

    def _forget(self, queries: Iterable[ScheduledQuery]) -> None:
        """Take these out of the queue."""
        gone = set(map(id, queries))
        if gone:
            self.queue.remove(gone)

    # --- predictions --------------------------------------------------------------------------------------------------

    def _outlook(self, now: float) -> Outlook:
        if self.run.is_running:
            return self.run.outlook(now)
        if not (waiting := self.queue.count):
            return 1.0, self.limits.pacing.pause_s
        return 1.0, max(0.0, self._start_at(waiting + 1, now) - now)

    def opens_s(self, now: float) -> float:
        """Seconds until a query of the mean cost that allows the SLO would be admitted. 0: now. Inf: closed."""
        return self._opening(now, self._outlook(now)).opens_s

    def _opening(self, now: float, outlook: Outlook) -> Opening:
        if self.limits.policy.depth == 0:
            return Opening(_NEVER)
        return self.admission.opening(now, outlook, over_share=False)

    def _free_s(self, outlook: Outlook) -> float:
        """Seconds until all running and waiting queries are done."""
        free_s = outlook[1] if self.run.is_running else 0.0
        if self.queue.count:
            free_s += outlook[0] * self.limits.predictor.seconds(self.queue.urgent_work + self.queue.deferrable_work)
        return free_s

    def state(self, now: float) -> ReplicaState:
        """The state that Routers rely on until the next report."""
        model, predictor, outlook = self.limits.model, self.limits.predictor, self._outlook(now)
        waiting, refusals, slowdown = self.queue.count, self.refusals, outlook[0] * predictor.slope
        admission, opening, under_share_opens_s = self.admission, self._opening(now, outlook), 0.0
        opens_s, cost, room, grows = opening
        if over_share := admission.over_share if opens_s < _NEVER else ():
            over_share_s = admission.opening(now, outlook, over_share=True).opens_s
            opens_s, under_share_opens_s, cost = max(opens_s, over_share_s), opens_s, 0.0
        return ReplicaState(
            opens_s, self._free_s(outlook), max(0.0, admission.bulk_room), waiting + self.run.unanswered, waiting,
            self.most, self.runs,
            (model.query_s, model.token_s, model.token2_s, predictor.seconds(0.0) / predictor.slope),
            slowdown, predictor.margin, (refusals.full, refusals.never, refusals.closed),
            under_share_opens_s, over_share or (), depth=self.limits.policy.depth,
            opens_cost=cost, room=room, reserve=self.demand.reserve if cost else 0.0,
            room_grows=grows,
        )  # fmt: skip

    def utilization(self, now: float) -> float:
        """How full the queue is: the used share of its depth or of an SLO. Autoscaling follows it."""
        if self.admission is self._by_depth:
            return self.in_flight / max(1, self.limits.policy.depth or 0)
        return self._free_s(self._outlook(now)) / self.limits.policy.slo_s
