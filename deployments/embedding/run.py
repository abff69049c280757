"""A run of the engine, and which of its queries run again once it has failed. Pure.

A run that fails is looked into, so that one query does not take the others along:

    it fails                        the last query that was answered runs again, by itself
    that fails, too                 the engine is broken: all queries of the run are told so, and Routers offer them
                                    elsewhere; the replica's health check fails until something is answered
    that is answered                the run's queries run again in halves, and halves of halves
    a query fails alone             the last query that was answered runs again: if it is answered, the other is told
                                    its own error; else the engine has broken meanwhile
    `MOST_AGAIN` runs were, or      Routers offer the rest elsewhere, too, and know that the engine is well
    others are due before
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deployments.embedding.scheduler.state import ScheduledQuery
from deployments.models.outputs import Outputs
from deployments.models.tokenizer import TokenIds
from deployments.serving.sessions import RouterSession

MOST_AGAIN = 25  # enough for two bad queries in 64

Indices = npt.NDArray[np.intp]


class EngineQuery(Protocol):
    """What the engine computes: an offered query, or a batch of one."""

    @property
    def ids(self) -> TokenIds: ...

    @property
    def outputs(self) -> Outputs: ...


@dataclass(slots=True, eq=False)
class QuerySession(RouterSession):
    """`admitted`: by their offers' numbers, the queries that are not answered, by their index."""

    admitted: dict[int, dict[int, OfferedQuery]] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class OfferedQuery(ScheduledQuery):
    """One query that a Router offered, and where its answer goes."""

    session: QuerySession
    number: int
    index: int
    ids: TokenIds
    outputs: Outputs
    gone: bool = False  # nobody waits for it any more


@dataclass(slots=True, eq=False)
class Run:
    """The engine's run: its queries in the order of their deadlines. `stop`: nobody waits for any of them.

    `group`: what the engine computes now, by index; an empty one is the query that was answered before. Once the run
    has failed: `groups`, what runs again after this one; `again`: how often it has; `sentence`: what it failed of;
    `alone`: a query that failed alone, and of what. `since`: when the engine began with the group.
    """

    queries: list[OfferedQuery]
    began: float
    tokens: int
    stop: threading.Event = field(default_factory=threading.Event)
    since: float = field(init=False)
    left: set[int] = field(init=False)  # indices of those that are not answered
    group: Sequence[int] = field(init=False)
    groups: deque[Sequence[int]] = field(default_factory=deque)
    again: int = 0
    sentence: str = ""
    alone: tuple[OfferedQuery, str] | None = None

    def __post_init__(self) -> None:
        self.group, self.since = range(len(self.queries)), self.began
        self.left = set(self.group)

    def waiting(self, indices: Iterable[int]) -> list[int]:
        """Of these, those that somebody still waits for."""
        return [index for index in indices if index in self.left and not self.queries[index].gone]

    def split(self, *, has_answered: bool) -> int | None:
        """The group has failed: its halves run again. A query that failed alone, again, is returned instead.
        `has_answered`: there is a query that was answered before; it runs first.
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
        """Nothing runs again but, if it is next, what was answered before: that says whether the engine is broken."""
        self.groups = deque(group for group in self.groups if not group)

    def next_group(self, now: float) -> bool:
        """Take the next group, in so far as its deadlines have not passed. False where there is none."""
        while self.groups and self.again < MOST_AGAIN and not self.stop.is_set():
            group = self.groups.popleft()
            self.group = [index for index in self.waiting(group) if self.queries[index].due > now]
            if self.group or not group:
                self.again += 1
                return True
        return False
