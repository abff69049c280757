"""Bulk requests: their queries wait at the Router until replicas have room for them."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from deployments.embedding.link import Answers, Link, PendingOffer, Refused
from deployments.embedding.placer import Placer
from deployments.embedding.request import Request
from deployments.embedding.retries import TRIES
from deployments.errors import Busy, EngineBroken, ReplicaLost
from deployments.serving.frames import CUT_BYTES

_LOOK = 0.1  # of the SLO: how often the bulk request whose turn it is tries again


@dataclass(slots=True, eq=False)
class _Bulk:
    """A bulk request. `missing`: queries that no replica has; `tries`: how often each query was sent; `news`: set when
    it should look again.
    """

    request: Request
    missing: deque[int]
    tries: list[int]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    parts: list[PendingOffer] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)
    avoided: list[Link] = field(default_factory=list)  # their engines failed


class BulkQueue:
    """A Router's bulk requests, served first come, first served."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._waiting: deque[_Bulk] = deque()

    def check(self, more: int) -> None:
        """Raises Busy if `more` further queries would exceed `bulk.max_waiting`."""
        limits = self._placer.config.bulk
        waiting = sum(len(bulk.missing) for bulk in self._waiting)
        if waiting + more <= limits.max_waiting:
            return
        self._placer.refused += 1
        queries_s = sum(pool.queries_per_s for pool in self._placer.pools.values()) * limits.share
        raise Busy(
            f"{waiting} bulk queries are already waiting (bulk.max_waiting: {limits.max_waiting}); "
            "send fewer at once, or retry later",
            retry_after_s=max(self._placer.config.slo_s, waiting / max(queries_s, 1e-6)),
        )

    async def answer(self, request: Request) -> Answers:
        """Send the queries as replicas have room for them, and wait for all answers.

        Raises Busy, Unavailable, EngineFailed or ReplicaLost.
        """
        self.check(len(request.ids))
        request.due = request.started + min(self._placer.config.bulk.timeout_s, request.timeout_s or math.inf)
        count = len(request.ids)
        bulk = _Bulk(request, deque(range(count)), [0] * count)
        self._waiting.append(bulk)
        try:
            while len(bulk.answers) < count:
                await self._advance(bulk)
            return bulk.answers
        finally:
            for part in bulk.parts:
                part.call_off()
                part.link.bulk_parts -= 1
            self._waiting.remove(bulk)
            self.reconsider()

    async def _advance(self, bulk: _Bulk) -> None:
        """Send the queries that have room now, wait for news, and take the answers."""
        bulk.news.clear()
        if not bulk.parts and self._avoids_all(bulk):
            bulk.avoided.clear()  # the others are gone
        if self._next is bulk:
            self._spread(bulk)
        if bulk.missing and not bulk.parts and not self._placer.can_answer:
            raise self._placer.unavailable()
        try:
            async with asyncio.timeout(_LOOK * self._placer.config.slo_s if self._next is bulk else None):
                await bulk.news.wait()
        except TimeoutError:
            pass
        for part in list(bulk.parts):
            self._take_answers(bulk, part)

    def _spread(self, bulk: _Bulk) -> None:
        """Offer each replica as many queries as it has room for. If no replica has any of the request's queries, offer
        at least one: the report in reply says how much room there is.
        """
        for pool in self._placer.pools.values():
            for link in pool.live if pool.is_open else ():
                if not bulk.missing:
                    break
                now = asyncio.get_running_loop().time()
                if link.bulk_again_at > now or link.view.is_out(now) or link in bulk.avoided:
                    continue
                if indices := self._fitting(bulk, link):
                    self._send(bulk, link, indices)
        if not bulk.missing:
            self.reconsider()

    def _fitting(self, bulk: _Bulk, link: Link) -> list[int]:
        """Take as many missing queries as that replica has room for."""
        indices: list[int] = []
        by_count, size = link.by_count, 0
        room = link.view.bulk_room(by_count=by_count)
        while bulk.missing and size < CUT_BYTES:
            ids = bulk.request.ids[bulk.missing[0]]
            room -= link.view.model.alpha_s if by_count else link.view.model.cost(len(ids))
            if room < 0 and (indices or bulk.parts or link.bulk_parts):
                break
            size += ids.nbytes
            indices.append(bulk.missing.popleft())
        return indices

    def _send(self, bulk: _Bulk, link: Link, indices: list[int]) -> None:
        for index in indices:
            bulk.tries[index] += 1
        part = self._placer.send(bulk.request, link, indices, partial=True)
        assert part.admitted is not None
        part.admitted.add_done_callback(lambda _: bulk.news.set())
        part.outcome.add_done_callback(lambda _: bulk.news.set())
        bulk.parts.append(part)
        link.bulk_parts += 1

    def _take_answers(self, bulk: _Bulk, part: PendingOffer) -> None:
        """Take the outcome of a part: its answers, and the queries that are missing again because they were not
        admitted or were lost with their replica.
        """
        admitted = part.admitted
        if admitted is not None and admitted.done() and admitted.result() < len(part.indices):
            for index in reversed(part.indices[admitted.result() :]):
                bulk.tries[index] -= 1
                bulk.missing.appendleft(index)
            del part.indices[admitted.result() :]
        if not part.ended:
            return
        bulk.parts.remove(part)
        part.link.bulk_parts -= 1
        try:
            found = part.outcome.result()
        except (ReplicaLost, EngineBroken) as error:
            if isinstance(error, EngineBroken):
                self._placer.ejections.note_failed(part.link)
                bulk.avoided.append(part.link)
                if self._avoids_all(bulk):
                    raise
            if any(bulk.tries[index] >= TRIES for index in part.indices):
                raise
            bulk.missing.extendleft(reversed(part.indices))
            return
        if isinstance(found, Refused):
            part.link.bulk_again_at = asyncio.get_running_loop().time() + _LOOK * self._placer.config.slo_s
        else:
            part.collect(found, bulk.answers)

    def _avoids_all(self, bulk: _Bulk) -> bool:
        pools = self._placer.pools.values()
        return all(link in bulk.avoided for pool in pools if pool.is_open for link in pool.live)

    @property
    def _next(self) -> _Bulk | None:
        """The bulk request whose turn it is."""
        return next((bulk for bulk in self._waiting if bulk.missing), None)

    def reconsider(self) -> None:
        """Wake the bulk request whose turn it is: there may be room."""
        if (bulk := self._next) is not None:
            bulk.news.set()
