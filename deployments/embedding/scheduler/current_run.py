"""The run that a device computes: how long it still takes, how slow the device is, and what its end teaches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.admission.learning import Learning
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.state import Query

_OVERDUE_SHARE = 0.25  # of what a run is late by: how long it is thought to need still
_LEAST_PREDICTION = 0.25  # of the SLO: an error of a shorter prediction says nothing about lateness
_UNIT_SHARE = 0.05  # of the SLO: the least work that the slowdown is learned from

Outlook = tuple[float, float]  # f, the slowdown now; L, seconds until the device is free


@dataclass(slots=True, repr=False, eq=False)
class CurrentRun:
    """The running run, or the last one. `unanswered`: its queries that wait for an answer, `bulk` of them bulk; 0 while
    the device is idle. `since`: the last sign of progress. `planned_s`: its work and beta.
    """

    limits: Limits
    is_running: bool = False
    unanswered: int = 0
    bulk: int = 0
    since: float = 0.0
    planned_s: float = field(init=False)
    _planned_by: CostModel | None = None
    _began: float = field(init=False)
    _done_s: float = field(init=False)  # work of its queries that are answered
    # Of each answered query: (predicted seconds, actual seconds, slowdown at admission).
    _errors: list[tuple[float, float, float]] = field(default_factory=list)

    def begin(self, now: float, queries: Sequence[Query]) -> None:
        self.is_running, self._began, self.since = True, now, now
        self.unanswered, self.bulk = len(queries), sum(query.bulk for query in queries)
        self._planned_by = self.limits.model
        self.planned_s, self._done_s = self._planned_by.beta_s + sum(query.cost_s for query in queries), 0.0

    def passed(self, now: float, queries: Sequence[Query]) -> None:
        """These are answered. Their predictions are compared with what happened."""
        self._done_s += sum(query.cost_s for query in queries)
        for query in queries:
            self.unanswered -= 1
            self.bulk -= query.bulk
            if query.predicted_s > _LEAST_PREDICTION * self.limits.policy.slo_s and not query.deferrable:
                joined_s = query.slow * max(0.0, self._done_s - query.ahead_s)  # later, and ran before it
                since = self._began if query.was_idle else query.admitted_at
                self._errors.append((query.predicted_s + joined_s, now - since, query.slow))
        self.since = now

    def ended(self, now: float, learning: Learning, *, whole: bool, probe: bool) -> None:
        """It has ended; what it took is learned if it was whole and planned by the model in force."""
        if whole and self._planned_by is self.limits.model:
            least_s = _UNIT_SHARE * self.limits.policy.slo_s
            learning.worked(self.planned_s, now - self._began, least_s=least_s, probe=probe)
            for predicted_s, actual_s, slow in self._errors:
                learning.answered(predicted_s, actual_s, slow)
        self._errors.clear()
        self.is_running, self.since = False, now
        self.unanswered = self.bulk = 0

    def outlook(self, now: float) -> Outlook:
        """While it runs. An overdue run shows that the device is slower than it was known to be."""
        limits, by_now_s = self.limits, self.planned_s
        if limits.micro_batch_tokens:
            by_now_s = min(by_now_s, limits.model.beta_s + self._done_s + limits.pass_s)
        f = max(limits.slowdown, (now - self._began) / by_now_s if by_now_s > 0 else 0.0)
        if not self.unanswered:  # all is answered, and the run about to end
            return f, 0.0
        rest_s = self.planned_s - (limits.model.beta_s + self._done_s if self._done_s else 0.0)
        left_s = f * rest_s - (now - self.since)
        late_s = (now - self._began) - limits.slowdown * self.planned_s
        return f, max(left_s, _OVERDUE_SHARE * late_s, 0.0)
