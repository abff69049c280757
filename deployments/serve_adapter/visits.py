"""Counts the requests at this Router by source. The door decides by these counts (`admission/door.py`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MOST_SOURCES = 1000  # of more, those without requests are forgotten: HAProxies are replaced, and clients may lie
HOLD_S = 0.05  # half of the usual time between two checks of a HAProxy

Source = Hashable
"""Where a request came from: the protocol, and the host and process of the HAProxy that sent it."""


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
        """Count a request while the block runs."""
        if source not in self.entered and len(self.entered) >= MOST_SOURCES:
            self._forget()
        self.in_flight[source] += 1
        self.entered[source] += 1
        self.total += 1
        try:
            yield
        finally:
            self.total -= 1
            self.in_flight[source] -= 1

    def _forget(self) -> None:
        """Add up the sources that have no requests here."""
        for source in [source for source in self.entered if source is not None and not self.in_flight[source]]:
            count = self.entered.pop(source)
            self.entered[None] += count
            del self.in_flight[source]

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count a request that waits for its client while the block runs."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def hold(self, source: Source) -> None:
        """Delay a refusal. Its request counts as gone, but HAProxy still counts it, and so sends no other in its place.
        If its place were free at once, HAProxy would send every further request through it, to be refused here.
        """
        self.total -= 1
        self.in_flight[source] -= 1
        try:
            await asyncio.sleep(HOLD_S)
        finally:
            self.total += 1
            self.in_flight[source] += 1


VISITS = Visits()  # this process's
