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
    """Queries of one class, sorted by deadline. `work`: their total work; `largest`: the work of the largest."""

    queries: list[Q] = field(default_factory=list)
    work: float = 0.0
    largest: float = 0.0

    def add(self, queries: Sequence[Q], work: float) -> None:
        """Add queries that share a deadline. `work`: their total work."""
        at = bisect_right(self.queries, queries[0].due, key=_by_deadline)
        self.queries[at:at] = queries
        self.work += work
        for query in queries:
            self.largest = max(self.largest, query.cost)

    def remove(self, gone: AbstractSet[int]) -> None:
        if not self.queries:
            return
        self.queries = [query for query in self.queries if id(query) not in gone]
        self.work = sum(query.cost for query in self.queries)
        self.largest = max((query.cost for query in self.queries), default=0.0)

    def most(self, sure: float) -> float:
        """The most work of this class in a run that has room only for its reserved part."""
        return min(self.work, sure + self.largest)

    def first(self, sure: float, fill: float, most: float) -> tuple[list[Q], float]:
        """The first queries for a run, and their work: as much as fits `fill` or, if that is more, the reserved part
        `sure`, but at most `most`.
        """
        taken, work = list[Q](), 0.0
        for query in self.queries:
            if work + query.cost > (fill if work >= sure and work else most):
                break
            work += query.cost
            taken.append(query)
        return taken, work


@dataclass(slots=True, repr=False, eq=False)
class RunQueue(Generic[Q]):
    """Three classes: urgent queries, deferrable ones behind them, and bulk behind both. It tells the tenants' shares
    how much urgent work of each tenant waits.

    Part of each run is reserved for the classes that run behind others, however much waits before them, as in deficit
    round robin (Shreedhar, Varghese, SIGCOMM 1995):

    - Deferrable queries get `limits.deferrable_part` of each run.
    - Bulk gets `limits.bulk_part` of each run with enough room; where runs of its own cost little, only once per SLO
      (`Admission.bulk_limit`).

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
    def urgent_work(self) -> float:
        """Work of the urgent queries."""
        return self.urgent_line.work

    @property
    def deferrable_work(self) -> float:
        """Work of all deferrable and bulk queries."""
        return self.deferrable_line.work + self.bulk_line.work

    @property
    def count(self) -> int:
        """How many queries wait."""
        return len(self.urgent_line.queries) + len(self.deferrable_line.queries) + len(self.bulk_line.queries)

    @property
    def next_deferrable(self) -> float:
        """The most deferrable and bulk work in the next run, if urgent queries leave no room."""
        limits = self.limits
        return self.deferrable_line.most(limits.deferrable_part) + self.bulk_line.most(limits.bulk_part)

    @property
    def next_work(self) -> float:
        """Work of the next run (W)."""
        waits = self.deferrable_line.queries or self.bulk_line.queries
        return self.urgent_line.work + (self.next_deferrable if waits else 0.0)

    @property
    def _lines(self) -> tuple[Line[Q], Line[Q], Line[Q]]:
        return self.urgent_line, self.deferrable_line, self.bulk_line

    def add(self, queries: Sequence[Q]) -> None:
        """Add queries of one request: they share class, deadline and tenant."""
        first, work = queries[0], sum([query.cost for query in queries])
        if first.deferrable:
            (self.bulk_line if first.bulk else self.deferrable_line).add(queries, work)
            return
        self.urgent_line.add(queries, work)
        if first.account is not None:
            self.shares.waits(first.account, work)

    def remove(self, gone: AbstractSet[int]) -> None:
        """Remove queries by their `id()`."""
        for line in self._lines:
            line.remove(gone)
        if self.shares.accounts:
            self.shares.wait((query.account, query.cost) for query in self.urgent if query.account is not None)

    def deferrable_first(self, fill: float, most: float, bulk_limit: float) -> Sequence[Q]:
        """The deferrable and bulk queries of the next run: work up to `fill` or, if that is more, their reserved
        parts; at most `most`, and at most `bulk_limit` of bulk. Next to deferrable queries, bulk never exceeds the
        run's limit.
        """
        limits, bulk = self.limits, self.bulk_line
        kept = max(0.0, min(bulk.work, limits.bulk_part, bulk_limit))
        taken, work = self.deferrable_line.first(limits.deferrable_part, fill - kept, most)
        most = min(most, bulk_limit, limits.run_work if taken else bulk_limit) - work
        return taken + bulk.first(limits.bulk_part, fill - work, most)[0]
