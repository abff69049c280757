"""Admission where the places that this Router holds do not suffice: the decisions that wait for more. Pure asyncio.

First come, first served, and one question for all that wait. The accelerator's places are asked for before a query
spills over to the CPU, and a request is still one decision: all of its queries get places, or none do.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.queue_manager import Full, Permit, QueueManager
from deployments.tenancy import Tenancy


@dataclass(slots=True, eq=False)
class _Decision:
    queries: int
    trial: bool
    only: str | None
    answer: asyncio.Future[list[Permit] | Full]

    def may_use(self, pool: str) -> bool:
        return self.only in {None, pool}


@dataclass(slots=True, repr=False, eq=False)
class Shortage:
    queue: QueueManager
    tenancies: Mapping[str, Tenancy]  # in order of preference
    _line: list[_Decision] = field(default_factory=list)
    _stage: int = 0  # so many pools have said what they have
    _claimed: dict[tuple[str, bool], int] = field(default_factory=dict)  # (pool, for a trial): reserved places
    _task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(decision.queries for decision in self._line)

    async def decide(self, queries: int, *, trial: bool = False, only: str | None = None) -> list[Permit] | Full:
        decision = _Decision(queries, trial, only, asyncio.get_running_loop().create_future())
        self._line.append(decision)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._ask(), context=contextvars.Context())
        try:
            return await decision.answer
        except asyncio.CancelledError:
            if decision in self._line:
                self._line.remove(decision)
            if decision.answer.done() and not decision.answer.cancelled():
                permits = decision.answer.result()
                for permit in [] if isinstance(permits, Full) else permits:
                    permit.release()
            raise

    def serve(self) -> None:
        """Places may have come: those who wait take them, in their order."""
        for decision in list(self._line):
            rooms = self._rooms(decision)
            if sum(rooms.values()) >= decision.queries and not decision.answer.done():
                self._line.remove(decision)
                decision.answer.set_result(self._take(decision, rooms))

    def _rooms(self, decision: _Decision) -> dict[str, int]:
        """What it may take now. A pool is only looked at once those before it have said what they have."""
        pools = list(self.tenancies)[: self._stage + 1]
        return {pool: self._room(pool, decision) for pool in pools if decision.may_use(pool)}

    def _room(self, pool: str, decision: _Decision) -> int:
        return self.queue.room(pool, trial=decision.trial, claimed=self._claimed.get((pool, decision.trial), 0))

    def _take(self, decision: _Decision, rooms: dict[str, int]) -> list[Permit]:
        taken = self.queue.take(decision.queries, rooms, trial=decision.trial)
        for pool in rooms:
            key = (pool, decision.trial)
            used = min(self._claimed.get(key, 0), sum(permit.pool == pool for permit in taken))
            if used:
                self._claimed[key] -= used
                self.tenancies[pool].settle(used)
        return taken

    async def _ask(self) -> None:
        try:
            while self._line:
                began = list(self._line)
                for stage, (pool, tenancy) in enumerate(self.tenancies.items()):
                    self._stage = stage
                    self.serve()
                    await self._ask_pool(pool, tenancy)
                    self.serve()
                self._stage = 0
                self._refuse(began)
                self._give_up_claims()
        finally:
            self._task = None

    async def _ask_pool(self, pool: str, tenancy: Tenancy) -> None:
        if not tenancy.holdings.exact and self.queue.has_more(pool):
            await tenancy.ask(self._missing(pool, trial=False) + self._missing(pool, trial=True))
        if tenancy.holdings.exact:
            for trial in (True, False):
                missing = self._missing(pool, trial=trial)
                if missing:
                    got = await tenancy.claim(missing, trial=trial)
                    self._claimed[pool, trial] = self._claimed.get((pool, trial), 0) + got

    def _missing(self, pool: str, *, trial: bool) -> int:
        asking = [decision for decision in self._line if decision.trial is trial and decision.may_use(pool)]
        if not asking:
            return 0
        room = max(sum(self._rooms(decision).values()) for decision in asking)
        return max(0, sum(decision.queries for decision in asking) - room)

    def _refuse(self, began: list[_Decision]) -> None:
        for decision in began:
            if decision in self._line:
                self._line.remove(decision)
                if not decision.answer.done():
                    free = sum(self._room(pool, decision) for pool in self.tenancies if decision.may_use(pool))
                    decision.answer.set_result(Full(decision.queries, min(free, decision.queries - 1)))

    def _give_up_claims(self) -> None:
        claims, self._claimed = self._claimed, {}
        for (pool, _), places in claims.items():
            if places:
                self.tenancies[pool].settle(places)
