"""The current run of a device: how long it still takes, how slow the device is, and what is learned from it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.admission.predictor import LinePredictor
from deployments.embedding.scheduler.cost_model import CostFit
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.state import ScheduledQuery

_OVERDUE_SHARE = 0.25  # an overdue run is expected to need another quarter of the time by which it is late
_JITTERS = 3.0  # mean errors of short runs: a shorter delay shows nothing, one twice as long counts in full
_LEAST_OVERDUE = 0.25  # of the SLO: a shorter overdue run says little about longer ones

Outlook = tuple[float, float]  # f, the slowdown that an overdue run shows, else 1; L, seconds until the run ends


@dataclass(slots=True, repr=False, eq=False)
class CurrentRun:
    """The current run, or the last one while the device is idle.

    - `unanswered`: its unanswered queries, `bulk` of them bulk; 0 while the device is idle.
    - `since`: when it last showed progress.
    - `work`: the work of all its queries; `predicted_s`: its predicted time.
    - `bulk_at`: when a run with bulk queries last began.
    """

    limits: Limits
    is_running: bool = False
    unanswered: int = 0
    bulk: int = 0
    since: float = 0.0
    bulk_at: float = -math.inf
    work: float = field(init=False)
    predicted_s: float = field(init=False)
    lengths: Sequence[int] = ()  # of its queries, in tokens
    _fit: CostFit = field(default_factory=CostFit)
    _began: float = field(init=False)
    _done_s: float = field(init=False)  # work of its answered queries
    _rest_s: float = field(init=False)  # predicted seconds of the others, from the last sign of progress
    _passes_by_s: float = field(init=False)  # seconds from its start by which the next pass should have ended
    _planned_by: LinePredictor | None = None
    _answers: list[tuple[float, float]] = field(default_factory=list)  # for each query: predicted, actual seconds

    def begin(self, now: float, queries: Sequence[ScheduledQuery]) -> None:
        self.is_running, self._began, self.since = True, now, now
        self.unanswered, self.bulk = len(queries), sum(query.bulk for query in queries)
        if self.bulk:
            self.bulk_at = now
        self._planned_by = self.limits.predictor
        self.lengths = [query.tokens for query in queries]
        self.work, self._done_s = sum(query.cost for query in queries), 0.0
        self.predicted_s = self.limits.predictor.seconds(self.work)
        self._foresee()

    def passed(self, now: float, queries: Sequence[ScheduledQuery]) -> None:
        """Note that these queries are answered, and compare their predictions with what happened."""
        self._done_s += sum(query.cost for query in queries)
        for query in queries:
            self.unanswered -= 1
            self.bulk -= query.bulk
            if not query.deferrable:
                self._answers.append((query.predicted_s, now - query.admitted_at))
        self.since = now
        self._foresee()

    def ended(self, now: float, *, whole: bool, probe: bool) -> None:
        """End the run. Learn from its time if it was whole and planned with the model in force."""
        limits, took_s = self.limits, now - self._began
        if whole and self._planned_by is limits.predictor:
            limits.predictor.ended(now, self.work, took_s, self._answers, is_probe=probe)
            if limits.predictor.has_changed:
                self._fit.forget()
            limits.model = self._fit.ended(limits.model, self.lengths, took_s)
        self._answers = []
        self.is_running, self.since = False, now
        self.unanswered = self.bulk = 0

    def outlook(self, now: float) -> Outlook:
        """The outlook while it runs. An overdue run shows that the device is slower than predicted."""
        took_s, by_s = now - self._began, self._passes_by_s
        f, late_s, usual_s = 1.0, took_s - by_s, _JITTERS * self.limits.predictor.jitter_s
        if late_s > usual_s:
            f += min(late_s, 2 * (late_s - usual_s)) / max(by_s, _LEAST_OVERDUE * self.limits.policy.slo_s)
        if not self.unanswered:  # the run is about to end
            return f, 0.0
        return f, max(f * self._rest_s - (now - self.since), _OVERDUE_SHARE * (took_s - self.predicted_s), 0.0)

    def _foresee(self) -> None:
        """Predict the rest of the run in advance, because `outlook` is called for each query."""
        limits, predictor, done_s = self.limits, self.limits.predictor, self._done_s
        self._rest_s = self.predicted_s - (predictor.seconds(done_s) if done_s else 0.0)
        self._passes_by_s = self.predicted_s
        if limits.micro_batch_tokens:
            self._passes_by_s = predictor.seconds(min(self.work, done_s + limits.pass_work))
