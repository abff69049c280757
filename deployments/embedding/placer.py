"""Chooses replicas for a request: which ones the Router asks, pool by pool (within a pool: `Pool.soonest`), and the
error if none admits, with Retry-After.

Replicas decide; the Router only asks. A request of several queries may be spread over replicas. Once all parts are
admitted, the Router confirms them; otherwise it calls them off. Meanwhile their replicas delay the next run a little.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from deployments.admission.quota import Unit
from deployments.embedding.config import RouterConfig
from deployments.embedding.frames import Offer
from deployments.embedding.link import Answers, Candidates, Link, PendingOffer
from deployments.embedding.pool import Pool
from deployments.embedding.request import Request
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS
from deployments.embedding.view import Ask
from deployments.errors import Busy, DeadlineExceeded, OverShare, ReplicaLost, Unavailable, WindveError
from deployments.serving.ejections import Ejections
from deployments.serving.replica_set import ASKED

_RETRY = 0.5  # of the SLO: when a refused client should come back at the earliest


@dataclass(slots=True)
class Hedges:
    """A budget of queries that may be offered elsewhere while their first offer stands: a replica that is merely slow
    computes them as well. It is a fifth of all queries, plus 100 at the start, as Finagle's `RetryBudget`.
    """

    SHARE, MOST = 0.2, 100.0

    left: float = MOST

    def earn(self, queries: int) -> None:
        if self.left < self.MOST:
            self.left = min(self.MOST, self.left + self.SHARE * queries)

    def spend(self, queries: int) -> bool:
        """Spend `queries` of the budget. Returns False, and spends nothing, if less is left."""
        if self.left < queries:
            return False
        self.left -= queries
        return True

    def give_back(self, queries: int) -> None:
        """Return `queries` to the budget: no replica had room for them."""
        self.left = min(self.MOST, self.left + queries)


class Placer:
    """A Router's placer. It asks `pools` in their order. `refused` counts the requests answered busy. `draw` returns a
    random number from 0 to 1.
    """

    def __init__(self, pools: Mapping[str, Pool], draw: Callable[[], float] = random.random) -> None:
        self.pools, self.draw = pools, draw
        self.config: RouterConfig  # set by the Router
        self.refused = 0
        self.hedges, self.ejections = Hedges(), Ejections(pools)

    # --- capacity -----------------------------------------------------------------------------------------------------

    @property
    def can_answer(self) -> bool:
        return any(pool.is_open for pool in self.pools.values())

    @property
    def capacity(self) -> float:
        """How many queries of 75 tokens may be in flight at once."""
        return sum(pool.capacity(QUERY_TOKENS, self.config.slo_s) for pool in self.pools.values())

    def fits(self, request: Request, tokens: float) -> bool:
        """Whether idle replicas would admit all queries of the request at once, in the rest of its SLO. `tokens`: the
        mean length. Looks at no more replicas than it needs, about one for each query.
        """
        left_s = self.config.slo_s - (asyncio.get_running_loop().time() - request.started)
        return self.idle_take(len(request.queries), tokens, left_s)

    def idle_take(self, queries: float, tokens: float, left_s: float) -> bool:
        """Whether idle replicas would admit so many queries of `tokens` tokens with `left_s` to their deadline."""
        for pool in self.pools.values():
            if queries > 0:
                queries -= pool.capacity(tokens, left_s, queries)
        return queries <= 0

    def room_now(self, now: float, tokens: float, enough: float = math.inf) -> float:
        """For how many queries of `tokens` tokens the replicas have room now. It counts up to `enough` of them."""
        room = 0.0
        for pool in self.pools.values():
            if room < enough:
                room += pool.room_now(now, tokens, enough - room)
        return room

    def is_idle(self, now: float) -> bool:
        """Whether a replica is idle."""
        return any(pool.is_idle(now) for pool in self.pools.values())

    @property
    def routers(self) -> int:
        """The number of live Routers, including this one, as far as a few replicas know."""
        states = [link.view.state for pool in self.pools.values() for link in pool.live[:ASKED]]
        return max((state.routers for state in states if state is not None), default=1)

    def price(self, lengths: Sequence[int], unit: Unit, answers: Answers | None = None) -> float:
        """The cost of queries of these lengths, in tokens or in device seconds. Device seconds follow the cost models
        of the pools that answered or, without `answers`, of the first open pool.
        """
        if unit == "tokens":
            return float(sum(lengths))
        if answers is None:
            return next((pool.model.work(lengths) for pool in self.pools.values() if pool.is_open), 0.0)
        return sum(self.pools[pool].model.cost(lengths[index]) for index, (pool, _) in answers.items())

    # --- place --------------------------------------------------------------------------------------------------------

    async def place(self, request: Request, left: list[int], avoided: Collection[Link] = ()) -> list[PendingOffer]:
        """Have all queries in `left` admitted. Returns their parts.

        If there is not enough room, all of them are called off, and it returns none or raises ReplicaLost. It does not
        ask the replicas in `avoided`.
        """
        lost, placed = None, list[PendingOffer]()
        try:
            for link, ask in self.candidates(request, request.lengths(left)):
                if link in avoided or self.passes_over(request, link, ask, request.lengths(left)):
                    continue
                part = self.send(request, link, left, partial=True)
                placed.append(part)
                assert part.admitted is not None
                count = await part.admitted
                part.indices, left = left[:count], left[count:]
                if not count:
                    placed.remove(part)
                    found = part.outcome.exception() or part.outcome.result()
                    lost = found if isinstance(found, ReplicaLost) else lost
                if not left:
                    for part in placed[:-1]:
                        part.link.confirm(part)
                    return placed
                self.note_full(request, link)
        finally:
            if left:
                for part in placed:
                    part.call_off()
        if lost is not None:
            raise lost
        return []

    def candidates(self, request: Request, lengths: Sequence[int]) -> Candidates:
        """The replicas to ask, pool by pool, and within a pool by predicted finish. `lengths`: tokens of each query."""
        for pool in self.pools.values():
            if pool.is_open:
                depth = pool.config.queue_depth if pool.by_count else None
                slo_s, now = max(self.config.slo_s, request.allowed_s), asyncio.get_running_loop().time()
                ask = self._ask(now, request, lengths[0])
                for link in pool.soonest(now, lengths, ASKED, ask=ask, slo_s=slo_s, depth=depth):
                    yield link, ask

    def passes_over(self, request: Request, link: Link, ask: Ask, lengths: Sequence[int]) -> bool:
        """Whether not to ask this replica: it is not connected, or has reported no room for the first query. Its pool
        then hears of the refused work.
        """
        if request.deferrable or link.view.has_room(asyncio.get_running_loop().time(), ask):
            return not link.is_live
        if request.last_pool != link.pool.name:
            link.refuse_here(lengths, request.allowed_s, request.tenant)
        self.note_full(request, link)
        return True

    def note_full(self, request: Request, link: Link) -> None:
        """Note in the request that this replica has no room for its queries."""
        request.asked += 1
        request.last_pool = link.pool.name
        request.is_over_share |= link.view.is_over_share(request.tenant)

    def send(self, request: Request, link: Link, indices: list[int], *, partial: bool) -> PendingOffer:
        """Offer these queries of the request to that replica."""
        self.hedges.earn(len(indices))
        now = asyncio.get_running_loop().time()
        offer = Offer(
            number=0,
            left_s=max(0.0, request.due - now),
            queries=[request.ids[index] for index in indices],
            outputs=request.outputs,
            bulk=request.bulk,
            partial=partial,
            again=request.last_pool == link.pool.name,
            tenant=request.tenant,
        )
        finish_s = link.view.finish_s(now, request.lengths(indices))  # before the offer counts as work that is there
        request.predicted_s = now - request.started + finish_s
        part = link.offer(offer, indices)
        part.predicted_s = finish_s
        if request.parts is not None:
            request.parts.append(part)
        return part

    # --- refuse -------------------------------------------------------------------------------------------------------

    def is_full(self, request: Request, tokens: int) -> bool:
        """Whether no replica has reported room for a query of `tokens` tokens."""
        now = asyncio.get_running_loop().time()
        ask = self._ask(now, request, tokens)
        for pool in self.pools.values():  # noqa: SIM110 - as in `Pool.is_full`
            if pool.is_open and not pool.is_full(now, ask):
                return False
        return True

    def busy_everywhere(self, request: Request, lengths: Sequence[int]) -> WindveError:
        """The error for a request that is refused because of `is_full`. Counts its work as refused for each replica.
        `lengths`: the estimated tokens of each query.
        """
        for link, ask in self.candidates(request, lengths):
            self.passes_over(request, link, ask, lengths)
        return self.busy(request)

    def _ask(self, now: float, request: Request, tokens: int) -> Ask:
        """What to ask of a replica for a query of `tokens` tokens of this request, sent now."""
        allowed_s = request.allowed_s
        lag_s = now - request.started - max(0.0, allowed_s - self.config.slo_s)
        return Ask(tokens, allowed_s, lag_s, request.tenant)

    def busy(self, request: Request) -> WindveError:
        """Why the request is not admitted: Busy, which says when to come back; Unavailable; or DeadlineExceeded, if
        even idle devices would be late.

        A refused client should come back in a half to one and a half SLOs, at random. So those that are refused
        together do not return together.
        """
        if not self.can_answer:
            return self.unavailable()
        lengths = request.lengths(range(len(request.ids)))
        if self.is_never(request, lengths):
            count, longest = len(lengths), max(lengths)
            what = (
                f"{count} queries of up to {longest} tokens take" if count > 1 else f"a query of {longest} tokens takes"
            )
            reading = f" ({request.tokenizing_s:.2g} s to tokenize)" if request.tokenizing_s else ""
            return DeadlineExceeded(
                f"{what} longer than {request.allowed_s:g} s here{reading}, even on an idle device; "
                "allow more time with the header x-request-timeout-ms, or send less"
            )
        self.refused += 1
        retry_after_s = self.config.slo_s * (_RETRY + self.draw())
        if request.is_over_share:
            return OverShare(
                "busy: all capacity is in use, and this API key exceeds its fair share; retry in "
                f"{retry_after_s:.2f} s",
                retry_after_s=retry_after_s,
            )
        return Busy(
            f"busy: there is no room for {len(request.queries)} more within {request.allowed_s:g} s; "
            f"retry in {retry_after_s:.2f} s",
            retry_after_s=retry_after_s,
        )

    def is_never(self, request: Request, lengths: Sequence[int]) -> bool:
        """Whether idle devices at their best known speed could not answer queries of these lengths in the time that the
        request allows, less the time that tokenizing took.
        """
        if not lengths or request.bulk or not self.can_answer:
            return False
        left_s, longest, share = request.allowed_s - request.tokenizing_s, max(lengths), 0.0
        takes_longest = False
        for link in (link for pool in self.pools.values() if pool.is_open for link in pool.live):
            room, model = link.view.best_room(left_s), link.view.model
            if link.by_count or link.view.state is None:
                return False
            takes_longest |= room >= model.cost(longest)
            share += max(0.0, room) / max(1e-9, model.work(lengths))
            if takes_longest and share >= 1:
                return False
        return True

    def unavailable(self) -> Unavailable:
        return Unavailable("no pool can answer now: no live replica with an open queue; try again later")
