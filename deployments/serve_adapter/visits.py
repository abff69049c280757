"""Counts the requests at this Router, by whence they came. The door decides by these counts (`admission/door.py`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_MOST_SOURCES = 1000  # more are counted as one: without HAProxy, clients could name any number of them
HOLD_S = 0.05  # half of the time between two checks of a HAProxy

Source = Hashable
"""Whence a request came: the protocol, and the host and process of the HAProxy that sent it."""


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
        if source not in self.entered and len(self.entered) >= _MOST_SOURCES:
            source = None
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

    async def hold(self, source: Source) -> None:
        """Delay a refusal. Its request counts as gone, but HAProxy still counts it, and so sends no other in its place.
        If one place were given back at once, all that is asked would pass through it, to be refused here.
        """
        source = source if source in self.entered else None
        self.total -= 1
        self.in_flight[source] -= 1
        try:
            await asyncio.sleep(HOLD_S)
        finally:
            self.total += 1
            self.in_flight[source] += 1


VISITS = Visits()  # this process's
