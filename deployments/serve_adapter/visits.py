"""Counts the requests at this Router, by whence they came. The door decides by these counts (`admission/door.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Source = Hashable
"""Whence a request came: the protocol, and the host of the HAProxy that sent it."""


@dataclass(slots=True, eq=False)
class Visits:
    """`in_flight` and `entered` (since the start) by source; `total`: all in flight; `waiting`: how many of them wait
    for their client.
    """

    in_flight: Counter[Source] = field(default_factory=Counter)
    entered: Counter[Source] = field(default_factory=Counter)
    total: int = 0
    waiting: int = 0

    @contextmanager
    def visit(self, source: Source = None) -> Iterator[None]:
        """A request that is here meanwhile."""
        self.in_flight[source] += 1
        self.entered[source] += 1
        self.total += 1
        try:
            yield
        finally:
            self.total -= 1
            self.in_flight[source] -= 1

    @contextmanager
    def wait(self) -> Iterator[None]:
        """A request that waits for its client meanwhile."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


VISITS = Visits()  # this process's
