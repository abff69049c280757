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
    """Urgent queries, and deferrable ones that run behind them; `urgent_s`, `deferrable_s`: their work. The tenants'
    shares hear what waits of whom.
    """

    limits: Limits
    shares: Shares
    urgent: list[Query] = field(default_factory=list)
    deferrable: list[Query] = field(default_factory=list)
    urgent_s: float = 0.0
    deferrable_s: float = 0.0
    _deferrable_largest_s: float = 0.0

    @property
    def count(self) -> int:
        """Queries that wait, held ones included."""
        return len(self.urgent) + len(self.deferrable)

    @property
    def ready(self) -> int:
        """Those that may run now."""
        return sum(not query.held for line in (self.urgent, self.deferrable) for query in line)

    @property
    def next_deferrable_s(self) -> float:
        """At most so much deferrable work is in the next run, however full: until those that wait have their share."""
        if not self.deferrable:
            return 0.0
        return min(self.deferrable_s, self.limits.deferrable_run_s + self._deferrable_largest_s)

    @property
    def next_run_s(self) -> float:
        """Work of the next run (W)."""
        return self.urgent_s + self.next_deferrable_s if self.deferrable else self.urgent_s

    def add(self, queries: Iterable[Query]) -> None:
        for query in queries:
            if query.deferrable:
                insort(self.deferrable, query, key=_by_deadline)
                self.deferrable_s += query.cost_s
                self._deferrable_largest_s = max(self._deferrable_largest_s, query.cost_s)
            else:
                insort(self.urgent, query, key=_by_deadline)
                self.urgent_s += query.cost_s
                if query.account is not None:
                    self.shares.waits(query.account, query.cost_s)

    def remove(self, gone: AbstractSet[int]) -> None:
        """Those with these ids do not wait any more."""
        self.urgent = [query for query in self.urgent if id(query) not in gone]
        self.deferrable = [query for query in self.deferrable if id(query) not in gone]
        self.urgent_s = sum(query.cost_s for query in self.urgent)
        self.deferrable_s = sum(query.cost_s for query in self.deferrable)
        self._deferrable_largest_s = max((query.cost_s for query in self.deferrable), default=0.0)
        if self.shares.accounts:
            self.shares.wait((query.account, query.cost_s) for query in self.urgent if query.account is not None)

    def urgent_ready(self) -> list[Query]:
        """All urgent queries that may run: the next run takes them."""
        return [query for query in self.urgent if not query.held]

    def deferrable_ready(self, fill_s: float, most_s: float) -> Sequence[Query]:
        """The first deferrable queries that may run: `fill_s` of work, or their share of any run; at most `most_s`."""
        taken, work_s, sure_s = list[Query](), 0.0, self.limits.deferrable_run_s
        for query in self.deferrable:
            if query.held:
                continue
            if work_s + query.cost_s > (fill_s if work_s >= sure_s and work_s else most_s):
                break
            work_s += query.cost_s
            taken.append(query)
        return taken
