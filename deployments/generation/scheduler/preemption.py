"""Takes blocks back if a cache has none left for a row that needs one. Pure.

Answers that became longer than learned lengths predicted can fill a cache. Then the rows that were admitted last lose
all their blocks, bulk first (`Row.rank`). Their tokens so far are computed again once there is room
(`BlockManager.needed_to_begin`), and the answer goes on as if nothing had happened: no token is drawn twice.

- A row takes blocks only of rows that rank behind it. So the row that ranks first always goes on, and all rows end.
- A row that has no blocks takes only those of bulk. Otherwise rows would take turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from deployments.generation.scheduler.block_manager import BlockManager
from deployments.generation.scheduler.queue import StepQueue
from deployments.generation.scheduler.sequences import Row


def preempt(queue: StepQueue) -> list[Row]:
    """Free blocks for the rows that had to wait for one in the last step. Returns the rows that lost theirs."""
    rows = [*queue.running, *queue.uncomputed]
    found: list[Row] = []
    for on_host, cache in enumerate(queue.caches):
        here = {row for row in rows if row.generation.on_host == on_host}
        if stalled := here.intersection(queue.stalled):
            found += _taken_from(cache, stalled, (row for row in here if row.table and row.parked is None))
    return found


def _taken_from(cache: BlockManager, stalled: Iterable[Row], holders: Iterable[Row]) -> list[Row]:
    needed, found = -cache.free, list[Row]()
    victims = sorted(holders, key=attrgetter("rank"))  # the last goes first
    for row in sorted(stalled, key=attrgetter("rank")):
        needed += 1 if row.table else cache.needed_to_begin(row)
        while needed > 0 and victims and victims[-1].rank > row.rank:
            victim = victims[-1]
            if not (row.table or victim.generation.bulk > row.generation.bulk):
                break
            needed += cache.free
            cache.preempt(victims.pop())
            needed -= cache.free
            found.append(victim)
    return found
