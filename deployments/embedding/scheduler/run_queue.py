"""The waiting queries of a device, by class, each class in the order of its deadlines. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic

from deployments.admission.fair_share import Shares
from deployments.embedding.scheduler.limits import Limits
from deployments.embedding.scheduler.state import Q

_by_deadline = attrgetter("due")


@dataclass(slots=True, repr=False, eq=False)
class Line(Generic[Q]):
    """Queries of one class, sorted by deadline. `work_s`: their total work; `largest_s`: the work of the largest."""

    queries: list[Q] = field(default_factory=list)
    work_s: float = 0.0
    largest_s: float = 0.0

    def add(self, queries: Sequence[Q], work_s: float) -> None:
        """Add queries that share a deadline. `work_s`: their total work."""
        at = bisect_right(self.queries, queries[0].due, key=_by_deadline)
        self.queries[at:at] = queries
        self.work_s += work_s
        for query in queries:
            self.largest_s = max(self.largest_s, query.cost_s)

    def remove(self, gone: AbstractSet[int]) -> None:
        if not self.queries:
            return
        self.queries = [query for query in self.queries if id(query) not in gone]
        self.work_s = sum(query.cost_s for query in self.queries)
        self.largest_s = max((query.cost_s for query in self.queries), default=0.0)

    def most_s(self, sure_s: float) -> float:
        """The most work of this class in a run that has room only for its reserved part."""
        return min(self.work_s, sure_s + self.largest_s)

    def first(self, sure_s: float, fill_s: float, most_s: float) -> tuple[list[Q], float]:
        """The first queries for a run, and their work: as much as fits `fill_s` or, if that is more, the reserved part
        `sure_s`, but at most `most_s`.
        """
        taken, work_s = list[Q](), 0.0
        for query in self.queries:
            if work_s + query.cost_s > (fill_s if work_s >= sure_s and work_s else most_s):
                break
            work_s += query.cost_s
            taken.append(query)
        return taken, work_s


@dataclass(slots=True, repr=False, eq=False)
class RunQueue(Generic[Q]):
    """Three classes: urgent queries, deferrable ones behind them, and bulk behind both. It tells the tenants' shares
    how much urgent work of each tenant waits.

    Part of each run is reserved for the classes that run behind others, however much waits before them, as in deficit
    round robin (Shreedhar, Varghese, SIGCOMM 1995):

    - Deferrable queries get `limits.deferrable_run_s` of each run.
    - Bulk gets `limits.bulk_run_s` of each run with enough room; where runs of its own cost little, only once per SLO
      (`Admission.bulk_s`).

    Deferrable queries, and then bulk, also fill what urgent queries leave.
    """

    limits: Limits
    shares: Shares
    urgent_line: Line[Q] = field(default_factory=Line)
    deferrable_line: Line[Q] = field(default_factory=Line)
    bulk_line: Line[Q] = field(default_factory=Line)

    @property
    def urgent(self) -> list[Q]:
        return self.urgent_line.queries

    @property
    def urgent_s(self) -> float:
        """Work of the urgent queries."""
        return self.urgent_line.work_s

    @property
    def deferrable_s(self) -> float:
        """Work of all deferrable and bulk queries."""
        return self.deferrable_line.work_s + self.bulk_line.work_s

    @property
    def count(self) -> int:
        """How many queries wait."""
        return len(self.urgent_line.queries) + len(self.deferrable_line.queries) + len(self.bulk_line.queries)

    @property
    def next_deferrable_s(self) -> float:
        """The most deferrable and bulk work in the next run, if urgent queries leave no room."""
        limits = self.limits
        return self.deferrable_line.most_s(limits.deferrable_run_s) + self.bulk_line.most_s(limits.bulk_run_s)

    @property
    def next_run_s(self) -> float:
        """Work of the next run (W)."""
        waits = self.deferrable_line.queries or self.bulk_line.queries
        return self.urgent_line.work_s + (self.next_deferrable_s if waits else 0.0)

    @property
    def _lines(self) -> tuple[Line[Q], Line[Q], Line[Q]]:
        return self.urgent_line, self.deferrable_line, self.bulk_line

    def add(self, queries: Sequence[Q]) -> None:
        """Add queries of one request: they share class, deadline and tenant."""
        first, work_s = queries[0], sum([query.cost_s for query in queries])
        if first.deferrable:
            (self.bulk_line if first.bulk else self.deferrable_line).add(queries, work_s)
            return
        self.urgent_line.add(queries, work_s)
        if first.account is not None:
            self.shares.waits(first.account, work_s)

    def remove(self, gone: AbstractSet[int]) -> None:
        """Remove queries by their `id()`."""
        for line in self._lines:
            line.remove(gone)
        if self.shares.accounts:
            self.shares.wait((query.account, query.cost_s) for query in self.urgent if query.account is not None)

    def deferrable_first(self, fill_s: float, most_s: float, bulk_s: float) -> Sequence[Q]:
        """The deferrable and bulk queries of the next run: work up to `fill_s` or, if that is more, their reserved
        parts; at most `most_s`, and at most `bulk_s` of bulk. Next to deferrable queries, bulk never exceeds the run's
        limit.
        """
        limits, bulk = self.limits, self.bulk_line
        kept_s = max(0.0, min(bulk.work_s, limits.bulk_run_s, bulk_s))
        taken, work_s = self.deferrable_line.first(limits.deferrable_run_s, fill_s - kept_s, most_s)
        most_s = min(most_s, bulk_s, limits.run_s if taken else bulk_s) - work_s
        return taken + bulk.first(limits.bulk_run_s, fill_s - work_s, most_s)[0]
