"""A run of the engine, and which of its queries run again after it has failed. Pure.

The replica bisects a failed run, so that one bad query does not fail the others. The last query that was ever answered
serves as the check whether the engine still works:

    the run fails                   run the check by itself
    the check fails                 the engine is broken: all queries of the run fail, Routers offer them elsewhere, and
                                    the replica's health check fails until something is answered
    the check is answered           run the queries again in halves, halves of halves, and so on
    a query fails alone, or a pass  run the check: if it is answered, these queries fail with their own errors; else the
    gives no finite numbers         engine has broken in the meantime
    `MOST_AGAIN` runs are used up,  fail the rest; Routers offer it elsewhere, and know that this engine works
    or urgent queries wait
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from deployments.embedding.scheduler.state import ScheduledQuery
from deployments.models.outputs import TEXT, Outputs
from deployments.models.tokenizer import TokenIds
from deployments.serving.sessions import RouterSession

MOST_AGAIN = 25  # enough to find two bad queries in 64

Indices = npt.NDArray[np.intp]


class PlannedBatch(NamedTuple):
    """A planned run: so many queries of so many tokens each."""

    queries: int
    tokens: int


class EngineQuery(Protocol):
    """A query for the engine: an offered one, a warm-up batch of one, or one of a planned run."""

    @property
    def ids(self) -> TokenIds: ...

    @property
    def outputs(self) -> Outputs: ...


class PlannedQuery(NamedTuple):
    """A query of meaningless tokens."""

    ids: TokenIds
    outputs: Outputs


@dataclass(slots=True, eq=False)
class QuerySession(RouterSession):
    """A Router's session. `admitted` holds each offer's unanswered queries by index, by the offer's number."""

    admitted: dict[int, dict[int, OfferedQuery]] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class OfferedQuery(ScheduledQuery):
    """A query that a Router offered, and where its answer goes."""

    session: QuerySession
    number: int
    index: int
    ids: TokenIds
    outputs: Outputs
    gone: bool = False  # nobody waits for it any more


@dataclass(slots=True, eq=False)
class Run:
    """A run of the engine: its queries in the order of their deadlines.

    - `stop`: set when nobody waits for any of them.
    - `group`: the queries that the engine computes now, by index. An empty group stands for the check.
    - `since`: when the engine began with the group.

    After the run has failed:

    - `groups`: what runs again after this group; `again`: how many groups have run again.
    - `sentence`: why the run failed.

    `blamed`: queries that fail, by reason, once something shows that the engine works.
    """

    queries: list[OfferedQuery]
    began: float
    tokens: int
    stop: threading.Event = field(default_factory=threading.Event)
    since: float = field(init=False)
    left: set[int] = field(init=False)  # indices of unanswered queries
    group: Sequence[int] = field(init=False)
    groups: deque[Sequence[int]] = field(default_factory=deque)
    again: int = 0
    sentence: str = ""
    blamed: defaultdict[str, list[OfferedQuery]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.group, self.since = range(len(self.queries)), self.began
        self.left = set(self.group)

    def waiting(self, indices: Iterable[int]) -> list[int]:
        """Those of `indices` that are unanswered and still wanted."""
        return [index for index in indices if index in self.left and not self.queries[index].gone]

    def split(self, *, has_answered: bool) -> int | None:
        """The group has failed: schedule its halves to run again. If the group is a single query that runs again,
        return its index instead. `has_answered`: there is a query for the check, which is scheduled first if it is due.
        """
        waiting = self.waiting(self.group)
        alone = self.again > 0 and len(self.group) == len(waiting) == 1
        if has_answered and (alone or not self.again):
            self.groups.appendleft(())
        if alone:
            return self.group[0]
        half = len(waiting) // 2
        self.groups += [some for some in (waiting[:half], waiting[half:]) if some]
        return None

    def give_way(self) -> None:
        """Drop all queries that should run again. A pending check stays: it says whether the engine is broken."""
        self.groups = deque(group for group in self.groups if not group)

    def next_group(self, now: float) -> bool:
        """Take the next group, without queries whose deadlines have passed. Returns False if there is none."""
        while self.groups and self.again < MOST_AGAIN and not self.stop.is_set():
            group = self.groups.popleft()
            self.group = [index for index in self.waiting(group) if self.queries[index].due > now]
            if self.group or not group:
                self.again += 1
                return True
        return False


def by_output(outputs: Sequence[Outputs], lengths: Sequence[int], window_tokens: int) -> Iterator[list[int]]:
    """Yield groups of queries, by index, that want the same outputs. The engine computes each group together.

    The run is sorted by deadline and cut into windows of at most `window_tokens` (a longer query is a window of its
    own). Only inside a window do plain queries come first. So a query leaves at most `window_tokens` after its turn,
    and admission adds one pass to its prediction for that. A run in which all queries want the same, or a
    `window_tokens` of 0 (all answers leave together), is one window.
    """
    start, tokens = 0, 0
    if window_tokens and len(set(outputs)) > 1:
        for index, length in enumerate(lengths):
            if index > start and tokens + length > window_tokens:
                yield from _groups(range(start, index), outputs)
                start, tokens = index, 0
            tokens += length
    yield from _groups(range(start, len(outputs)), outputs)


def _groups(window: Sequence[int], outputs: Sequence[Outputs]) -> Iterator[list[int]]:
    groups: dict[Outputs, list[int]] = {}
    for index in window:
        groups.setdefault(outputs[index], []).append(index)
    for wanted in sorted(groups, key=lambda wanted: wanted != TEXT):
        yield groups[wanted]
