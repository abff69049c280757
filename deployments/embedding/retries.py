"""Follows one request at the replicas: where its queries are, which are answered, and which are offered once more.

A query is offered a second time, with the same deadline, if

    its replica died            to any replica, a moment later
    its engine is broken        to another replica
    its replica hangs           to another replica, while the first offer stands; the first answer counts

The other parts of the request continue meanwhile. A query that is lost a second time fails with its error.

If only a hung replica has a query at its deadline, the query fails with 504. It is not called off: that would stop the
run, and the replica would never learn that its device has become slow.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from deployments.embedding.link import Answers, Candidates, Link, PendingOffer, Refused
from deployments.embedding.placer import Placer
from deployments.embedding.request import Request
from deployments.errors import DeadlineExceeded, EngineBroken, ReplicaLost, WindveError

TRIES = 2  # offers of a query whose replica died or failed
_NEWS_S = 0.05  # pause before the second: a dying node ends several replicas, and each is reported separately


@dataclass(slots=True, eq=False)
class Placement:
    """One request. `parts`: the offers that are at replicas now. `again`: queries that were offered a second time.
    `avoided`: replicas that are not asked again.
    """

    placer: Placer
    request: Request
    parts: list[PendingOffer] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    avoided: list[Link] = field(default_factory=list)
    _broken: EngineBroken | None = None

    async def answered(self) -> Answers:
        """Have all queries admitted or none, and return all answers.

        Raises Busy, Unavailable, DeadlineExceeded, EngineFailed or ReplicaLost.
        """
        left = list(range(len(self.request.ids)))
        try:
            while left or self.parts:
                if left:
                    left = await self._offer(left)
                    continue
                part = await self._next()
                left = await (self._take(part) if part.ended else self._hedge(part))
            return self.answers
        finally:
            for part in self.parts:  # after an error or a cancellation
                part.call_off()

    async def _offer(self, left: list[int]) -> list[int]:
        """Place these queries. Returns those that must be offered again."""
        if len(left) == 1 and not self.parts:
            return self._offer_one(left, self.placer.candidates(self.request, self.request.lengths(left)))
        try:
            parts = await self.placer.place(self.request, left, self.avoided)
        except ReplicaLost as error:
            return await self._lost(left, error)
        if not parts:
            raise self._no_room()
        self.parts += parts
        return []

    def _offer_one(self, left: list[int], candidates: Candidates) -> list[int]:
        """Offer a single query to the next of the candidates. `_take` hears whether it has room."""
        lengths = self.request.lengths(left)
        for link, ask in candidates:
            if link not in self.avoided and not self.placer.passes_over(self.request, link, ask, lengths):
                part = self.placer.send(self.request, link, left, partial=False)
                part.others = candidates
                self.parts.append(part)
                return []
        raise self._no_room()

    def _no_room(self) -> WindveError:
        if self._broken is not None and not self.request.asked:  # there is no other replica
            return self._broken
        return self.placer.busy(self.request)

    async def _next(self) -> PendingOffer:
        """Wait for the first part that has ended, or whose replica newly hangs."""
        while True:
            hanging = 0
            for part in self.parts:
                if part.ended or (part.overdue and part.link not in self.avoided):
                    return part
                hanging += part.overdue
            if len(self.parts) == 1 and not hanging:
                await self.parts[0].ends()
                return self.parts[0]
            now = asyncio.get_running_loop().time()
            left_s = self.request.due - now if hanging == len(self.parts) else None
            if left_s is not None and left_s <= 0:
                self.parts.clear()  # not called off: see the module's docstring
                raise DeadlineExceeded(
                    f"no answer within {self.request.allowed_s:g} s: the replica that had it made no progress, because "
                    "its host has no CPU time left or its device hangs; try again"
                )
            outcomes = [part.outcome for part in self.parts]
            await asyncio.wait(outcomes, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def _take(self, part: PendingOffer) -> list[int]:
        """Take the outcome of a part. Returns the queries that must be offered again."""
        self.parts.remove(part)
        error = part.outcome.exception()
        if isinstance(error, EngineBroken):
            self.placer.ejections.note_failed(part.link)
            self.avoided.append(part.link)
            self._broken = error
        if isinstance(error, EngineBroken | ReplicaLost):
            return await self._lost(part.indices, error)
        found = part.outcome.result()
        if isinstance(found, Refused):
            if part.others is None or part.overdue:  # it was assumed to have admitted the queries
                lost = ReplicaLost("the replica that had the query has no room for it; try again")
                return await self._lost(part.indices, lost)
            self.placer.note_full(self.request, part.link)
            if asyncio.get_running_loop().time() > self.request.due:
                raise self._no_room()
            return self._offer_one(part.indices, part.others)
        part.collect(found, self.answers)
        for other in [one for one in self.parts if self.answers.keys() >= set(one.indices)]:
            self.parts.remove(other)
            other.call_off()
        return []

    async def _lost(self, indices: list[int], error: WindveError) -> list[int]:
        """Those of the lost queries that no replica has now. Raises `error` if one was lost before, or if the deadline
        has passed.
        """
        elsewhere = {index for part in self.parts for index in part.indices}
        left = [index for index in indices if index not in self.answers and index not in elsewhere]
        if left and (not self.again.isdisjoint(left) or asyncio.get_running_loop().time() > self.request.due):
            raise error
        self.again.update(left)
        if left and isinstance(error, ReplicaLost):
            await asyncio.sleep(_NEWS_S)
        return left

    async def _hedge(self, part: PendingOffer) -> list[int]:
        """Offer the queries of a hung replica elsewhere, if another replica has room."""
        self.avoided.append(part.link)
        left = [index for index in part.indices if index not in self.answers and index not in self.again]
        if left and self.placer.hedges.spend(len(left)):
            parts = list[PendingOffer]()
            with contextlib.suppress(ReplicaLost):  # the first offer stands
                parts = await self.placer.place(self.request, left, self.avoided)
            if parts:
                self.parts += parts
                self.again.update(left)
            else:
                self.placer.hedges.give_back(len(left))
        return []
