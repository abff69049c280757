"""What one Router holds of a pool's places, replica by replica, and how it obeys those who own them. Pure.

The other side of `leases`: places are counted out here before they are given back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.leases import Depth, Order, Word

ALL = sys.maxsize


@dataclass(slots=True)
class Holding:
    """Places at one replica. `sole`: its queue as a whole."""

    term: int
    held: int
    sole: bool
    ceiling: int | None = None
    exact: bool = False
    dry: bool = False  # its last answer was less than was asked for


@dataclass(slots=True)
class Holdings:
    """`out(replica)`: queries in the batches that are out there; the rest of `in_flight()` waits for any replica."""

    out: Callable[[str], int]
    in_flight: Callable[[], int]
    waiting: Callable[[], int]
    depth: Depth = field(default=Depth(0, 0))  # in force
    whole: int = 0  # what a sole holding counts for: the depth, or a trial's where that is more
    trial: bool = False  # this Router has trial depths in force
    reserved: int = 0  # granted for certain queries that are not in flight yet
    replicas: dict[str, Holding] = field(default_factory=dict)

    @property
    def shared(self) -> bool:
        return any(not holding.sole for holding in self.replicas.values())

    @property
    def exact(self) -> bool:
        """No idle places are kept, and each admission asks: trial depths are in force, here or elsewhere."""
        return self.shared and (self.trial or any(holding.exact for holding in self.replicas.values()))

    @property
    def places(self) -> int:
        return sum(self.whole if holding.sole else holding.held for holding in self.replicas.values())

    @property
    def admits(self) -> int:
        """Most queries in flight that this Router may admit to without asking."""
        if self.exact and not any(holding.sole for holding in self.replicas.values()):
            return 0
        return self.places - self.reserved

    @property
    def idle(self) -> int:
        return max(0, self.places - self.reserved - self.in_flight())

    @property
    def lacking(self) -> int:
        """Queries that wait and have no place anywhere: that of theirs has gone with its replica."""
        if not self.shared or any(holding.sole for holding in self.replicas.values()):
            return 0
        room = sum(max(0, holding.held - self.out(replica)) for replica, holding in self.replicas.items())
        return max(0, self.waiting() - room)

    def at(self, replica: str) -> int:
        """Most queries that batches may carry to this replica at once."""
        holding = self.replicas.get(replica)
        if holding is None:
            return 0
        return ALL if holding.sole else holding.held

    def join(self, replica: str, order: Order) -> None:
        held = self.out(replica) + order.granted
        self.replicas[replica] = Holding(order.term, held, order.sole, order.ceiling, order.exact)

    def obey(self, replica: str, order: Order, *, protected: int = 0) -> Word:
        """`protected` idle places are not given back: they came a moment ago for queries that found none."""
        holding = self.replicas[replica]
        given, keep = 0, None
        if order.term == holding.term:
            holding.held += order.granted
        elif order.sole:
            holding.sole = True
        else:  # it was sole, if only for a moment that this Router has not heard of
            keep = self._kept(replica, order.share) if holding.sole else holding.held
            holding.held, holding.sole = keep, False
        holding.term, holding.ceiling, holding.exact = order.term, order.ceiling, order.exact
        if order.wanted and not holding.sole and keep is None:
            idle = self.idle_at(replica)
            given = min(order.wanted, max(0, idle - protected), -(-idle // 2) if order.gently else idle)
            holding.held -= given
        return self.word(order.term, order.recall, given, keep)

    def word(self, term: int, recall: int = 0, given: int = 0, keep: int | None = None) -> Word:
        return Word(term, self.depth, recall, given, keep, self.in_flight(), self.waiting())

    def _kept(self, replica: str, share: int) -> int:
        """Of a queue that was this Router's as a whole: what is in flight, or its fair share if that is more."""
        elsewhere = self.places - self.whole
        return max(self.out(replica), self.in_flight() + self.reserved - elsewhere, min(share, self.whole))

    def idle_at(self, replica: str) -> int:
        """Idle places that could be given back to this replica."""
        holding = self.replicas[replica]
        return 0 if holding.sole else max(0, min(holding.held - self.out(replica), self.idle))

    def owed(self, protected: int = 0) -> list[tuple[str, int, int]]:
        """(replica, term, places) to be given back now, counted out already: idle ones above the ceilings."""
        owed = []
        for replica, holding in self.replicas.items():
            ceiling = 0 if self.exact else holding.ceiling
            if ceiling is None or holding.sole:
                continue
            keep = 0 if self.exact else protected
            count = min(holding.held - ceiling, self.idle_at(replica), self.idle - keep)
            if count > 0:
                holding.held -= count
                owed.append((replica, holding.term, count))
        return owed

    @property
    def owes(self) -> bool:
        """Places that come free may have to be given back."""
        return self.exact or any(
            holding.ceiling is not None and holding.held > holding.ceiling for holding in self.replicas.values()
        )
