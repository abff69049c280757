"""One request at the replicas: what is where, what is answered, and what is offered once more.

A query is offered a second time, at once and by the same deadline, when

    its replica died            elsewhere or there, a moment later
    its engine is broken        elsewhere
    its replica hangs           elsewhere, while the first offer stands: the first answer counts

Other parts of the request are waited for meanwhile. What is lost a second time fails with its error.

`Hedges` bound how many are offered elsewhere while the first offer stands: a replica that is only slow computes them,
too. What a hung replica alone has at its deadline is told so (504), but not called off: a run that nobody waits for is
stopped, and a device that has become slow would never be known to be slow.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployments.embedding.channel import Overdue, PendingOffer, Refused
from deployments.embedding.link import Link
from deployments.embedding.request import Answers, OfferedPart, Request
from deployments.errors import DeadlineExceeded, EngineBroken, ReplicaLost, WindveError

if TYPE_CHECKING:
    from deployments.embedding.placer import Placer

TRIES = 2  # of a query whose replica died or failed
_NEWS_S = 0.05  # pause before the second try: a dying node ends several replicas, and the news of each comes by itself


@dataclass(slots=True)
class Hedges:
    """How many queries may be offered elsewhere although their first offer stands: a fifth of all, and a hundred
    besides (Finagle's `RetryBudget`: 20 %, and 10 a second over 10 s).
    """

    SHARE, MOST = 0.2, 100.0

    left: float = MOST

    def earn(self, queries: int) -> None:
        if self.left < self.MOST:
            self.left = min(self.MOST, self.left + self.SHARE * queries)

    def spend(self, queries: int) -> bool:
        """False where there are not so many."""
        if self.left < queries:
            return False
        self.left -= queries
        return True

    def give_back(self, queries: int) -> None:
        """Nobody had room for so many."""
        self.left = min(self.MOST, self.left + queries)


@dataclass(slots=True, eq=False)
class Placement:
    """`parts`: what is at replicas now. `again`: queries that were offered a second time. `avoided`: replicas that are
    not asked any more.
    """

    placer: Placer
    request: Request
    parts: list[OfferedPart] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    avoided: list[Link] = field(default_factory=list)
    _broken: EngineBroken | None = None

    async def answered(self) -> Answers:
        """All answers. Raises Busy, Unavailable, DeadlineExceeded, EngineFailed or ReplicaLost."""
        left = list(range(len(self.request.ids)))
        try:
            while left or self.parts:
                if left:
                    left = await self._offer(left)
                    continue
                part = self.parts[0]
                if not part.pending.ended:
                    part = await self._next()
                left = await (self._take(part) if part.pending.ended else self._hedge(part))
            return self.answers
        finally:
            for part in self.parts:  # whoever leaves early takes its queries along
                part.link.call_off(part.pending)

    async def _offer(self, left: list[int]) -> list[int]:
        """Place these; what must be offered again of them."""
        try:
            partial = bool(self.parts)  # the others are looked at meanwhile
            if await self.placer.place(self.request, left, self.parts, avoided=self.avoided, partial=partial):
                return []
        except ReplicaLost as error:
            return await self._lost(left, error)
        if self._broken is not None and not self.request.asked:  # there is no other
            raise self._broken
        raise self.placer.busy(self.request)

    async def _next(self) -> OfferedPart:
        """The first part that has ended, or that hangs and was not noticed yet."""
        while True:
            hanging = 0
            for part in self.parts:
                if part.pending.ended or (part.pending.overdue and part.link not in self.avoided):
                    return part
                hanging += part.pending.overdue
            now = asyncio.get_running_loop().time()
            left_s = self.request.due - now if hanging == len(self.parts) else None
            if left_s is not None and left_s <= 0:
                for part in self.parts:  # what is there stays there
                    part.pending.outcome.add_done_callback(_look)
                self.parts.clear()
                raise DeadlineExceeded(
                    f"no answer within {self.request.allowed_s:g} s: the replica that had it does not answer; try again"
                )
            outcomes = [part.pending.outcome for part in self.parts]
            await asyncio.wait(outcomes, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def _take(self, part: OfferedPart) -> list[int]:
        """What a part has come to; the queries that must be offered again."""
        self.parts.remove(part)
        try:
            self.placer.collect(self.request, part, part.pending.outcome.result(), self.answers)
        except ReplicaLost as error:
            return await self._lost(part.indices, error)
        except EngineBroken as error:
            self.placer.ejections.note_failed(part.link)
            self.avoided.append(part.link)
            self._broken = error
            return await self._lost(part.indices, error)
        if self.parts:
            for other in [one for one in self.parts if self.answers.keys() >= set(one.indices)]:
                self.parts.remove(other)
                other.link.call_off(other.pending)
        return []

    async def _lost(self, indices: list[int], error: WindveError) -> list[int]:
        """Those of them that are nowhere now. Raises the error where one was lost before, or it is too late."""
        elsewhere = {index for part in self.parts for index in part.indices}
        left = [index for index in indices if index not in self.answers and index not in elsewhere]
        if left and (not self.again.isdisjoint(left) or asyncio.get_running_loop().time() > self.request.due):
            raise error
        self.again.update(left)
        if left and isinstance(error, ReplicaLost):
            await asyncio.sleep(_NEWS_S)
        return left

    async def _hedge(self, part: OfferedPart) -> list[int]:
        """Offer elsewhere what a replica has that hangs, if somebody has room."""
        self.avoided.append(part.link)
        left = [index for index in part.indices if index not in self.answers and index not in self.again]
        if left and self.placer.hedges.spend(len(left)):
            placed = False
            with contextlib.suppress(ReplicaLost):  # the first offer stands
                placed = await self.placer.place(self.request, left, self.parts, avoided=self.avoided, partial=True)
            if placed:
                self.again.update(left)
            else:
                self.placer.hedges.give_back(len(left))
        return []


def _look(outcome: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more: an error is no news."""
    if not outcome.cancelled():
        outcome.exception()


async def admitted(pending: PendingOffer) -> int:
    """How many of the offer's queries the replica has admitted. A single one is known by its outcome, or to be there
    where the replica hangs.
    """
    if pending.admitted is not None:
        return await pending.admitted
    try:
        return 0 if isinstance(await pending.outcome, Refused) else pending.size
    except (WindveError, Overdue):
        return pending.size
