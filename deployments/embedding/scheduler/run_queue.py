"""Queries that a device has admitted and does not run yet, in the order of their deadlines. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter

from deployments.admission.fair_share import Shares
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.state import Query

_by_deadline = attrgetter("due")


@dataclass(slots=True, repr=False, eq=False)
class RunQueue:
    """Urgent queries, and patient ones that run behind them; `urgent_s`, `patient_s`: their work. The tenants' shares
    hear what waits of whom.
    """

    limits: Limits
    shares: Shares
    urgent: list[Query] = field(default_factory=list)
    patient: list[Query] = field(default_factory=list)
    urgent_s: float = 0.0
    patient_s: float = 0.0
    _patient_largest_s: float = 0.0

    @property
    def count(self) -> int:
        """Queries that wait, held ones included."""
        return len(self.urgent) + len(self.patient)

    @property
    def ready(self) -> int:
        """Those that may run now."""
        return sum(not query.held for line in (self.urgent, self.patient) for query in line)

    @property
    def next_patient_s(self) -> float:
        """At most so much patient work is in the next run, however full: until those that wait have their share."""
        return min(self.patient_s, self.limits.patient_run_s + self._patient_largest_s) if self.patient else 0.0

    @property
    def next_run_s(self) -> float:
        """Work of the next run (W)."""
        return self.urgent_s + self.next_patient_s if self.patient else self.urgent_s

    def add(self, queries: Iterable[Query]) -> None:
        for query in queries:
            if query.patient:
                insort(self.patient, query, key=_by_deadline)
                self.patient_s += query.cost_s
                self._patient_largest_s = max(self._patient_largest_s, query.cost_s)
            else:
                insort(self.urgent, query, key=_by_deadline)
                self.urgent_s += query.cost_s
                if query.account is not None:
                    self.shares.waits(query.account, query.cost_s)

    def remove(self, gone: AbstractSet[int]) -> None:
        """Those with these ids do not wait any more."""
        self.urgent = [query for query in self.urgent if id(query) not in gone]
        self.patient = [query for query in self.patient if id(query) not in gone]
        self.urgent_s = sum(query.cost_s for query in self.urgent)
        self.patient_s = sum(query.cost_s for query in self.patient)
        self._patient_largest_s = max((query.cost_s for query in self.patient), default=0.0)
        if self.shares.accounts:
            self.shares.wait((query.account, query.cost_s) for query in self.urgent if query.account is not None)

    def urgent_ready(self) -> list[Query]:
        """All urgent queries that may run: the next run takes them."""
        return [query for query in self.urgent if not query.held]

    def patient_ready(self, fill_s: float, most_s: float) -> Sequence[Query]:
        """The first patient queries that may run: `fill_s` of work, or their share of any run; never above `most_s`."""
        taken, work_s, sure_s = list[Query](), 0.0, self.limits.patient_run_s
        for query in self.patient:
            if query.held:
                continue
            if work_s + query.cost_s > (fill_s if work_s >= sure_s and work_s else most_s):
                break
            work_s += query.cost_s
            taken.append(query)
        return taken
