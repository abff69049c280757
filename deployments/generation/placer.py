"""Chooses the replica of a generation: which ones the Router asks, in which order, and the error if none admits it.

Replicas decide; the Router only asks: the accelerator's first, then the CPU's; within a pool the one first whose first
token would come soonest.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from deployments.errors import (
    Busy,
    DeadlineExceeded,
    EngineBroken,
    InvalidInput,
    ReplicaLost,
    Unavailable,
    WindveError,
)
from deployments.generation.channel import PendingGeneration
from deployments.generation.charge import GenerationCharge
from deployments.generation.frames import GenerationOffer, NewToken, RefusedOffer
from deployments.generation.link import GenerationLink
from deployments.generation.metrics import Streamed
from deployments.generation.pool import GenerationPool
from deployments.generation.record import Outcome
from deployments.generation.request import WantedGeneration
from deployments.generation.settings import GenerationRouterConfig
from deployments.generation.text.detokenizer import Detokenizer
from deployments.generation.text.model_card import GenerationCard
from deployments.generation.view import GenerationView
from deployments.serving.ejections import Ejections

logger = logging.getLogger("ray.serve")

_ASKED = 4  # replicas of a pool for one generation
_ANSWERS_S = 1.0  # a replica that neither admits nor refuses nor says anything else is passed over
_LATER = 0.02  # of `ttft_s`: who comes back the moment that there is room comes too soon
_SHORTEST_RETRY_S = 0.05
_UNHURRIED = 0.75  # of the promise is left as it is offered: who refuses it then for ever means it


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One generation on its way. Times are the loop's, in seconds. `due`: of its first token; `ends`: of all."""

    wanted: WantedGeneration
    texts: list[Detokenizer]
    started: float
    due: float
    ends: float
    streamed: Streamed
    charge: GenerationCharge | None
    link: GenerationLink | None = None  # where it is admitted
    offered: list[GenerationLink] = field(default_factory=list)  # to these it was
    is_second: bool = False  # it was admitted before, by a replica that died or failed
    broken: GenerationLink | None = None  # that replica, where it failed
    refusals: list[RefusedOffer] = field(default_factory=list)
    retry_s: float = math.inf
    ended: set[int] = field(default_factory=set)  # answers
    begun: bool = False  # a token has come
    hurried: bool = False  # somebody was offered it late, or did not answer: what is refused now may do another time

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self.wanted.answers

    def over(self, error: BaseException | None) -> None:
        """It ends; by this error, if there is one."""
        device_s = 0.0 if self.charge is None else self.charge.device_s
        self.streamed.over(asyncio.get_running_loop().time(), error, device_s)

    def on_token(self, token: NewToken) -> None:
        """As its frame comes."""
        self.begun = True
        if self.charge is not None and self.link is not None and self.link.view.state is not None:
            self.charge.came(self.link.view.state, token.answer)
        if token.answer not in self.ended:
            self.streamed.arrived(asyncio.get_running_loop().time(), token.answer, 1)


class Placed(NamedTuple):
    """Where it is admitted."""

    link: GenerationLink
    pending: PendingGeneration


class GenerationPlacer:
    """One Router's. `pools` are asked in their order; `refused` counts the generations that were answered busy."""

    def __init__(self, pools: Mapping[str, GenerationPool], card: GenerationCard) -> None:
        self.pools, self._card = pools, card
        self.ejections = Ejections(pools)
        self.config: GenerationRouterConfig  # the Router's, once it has one
        self.refused = 0

    async def place(self, request: GenerationRequest) -> Placed:
        """Raises Busy, InvalidInput, DeadlineExceeded or Unavailable."""
        for pool, link in self.candidates(request):
            record, clock = request.wanted.record, asyncio.get_running_loop().time
            now = clock()
            offered = None if record is None else record.offer(pool.name, link.view.replica, now)
            first_s = link.view.first_s(now, len(request.wanted.ids))
            request.streamed.predicted_s = now - request.started + first_s
            request.offered.append(link)
            found = await self._ask(request, pool, link)
            if offered is not None:
                offered.ends(clock(), _outcome(found))
            if isinstance(found, PendingGeneration):
                self._admitted(request, pool, link)
                return Placed(link, found)
            if found is None:
                request.hurried = True
                continue
            request.refusals.append(found)
            if not found.never:
                request.retry_s = min(request.retry_s, found.opens_s)
        raise self._refusal(request)

    def _came(self, request: GenerationRequest, pool: GenerationPool, link: GenerationLink, token: NewToken) -> None:
        """A token, perhaps in one turn of the loop with the admission, which is looked at in the next."""
        self._admitted(request, pool, link)
        request.on_token(token)

    async def _ask(
        self, request: GenerationRequest, pool: GenerationPool, link: GenerationLink
    ) -> PendingGeneration | RefusedOffer | None:
        """What a replica decides; None: it hangs, it died, or it could not. Another may."""
        came = partial(self._came, request, pool, link)
        pending = link.offer(self._offer(request), self.config.max_buffered_tokens, came)
        try:
            refused = await self._decision(request, link, pending)
        except (TimeoutError, WindveError) as error:
            logger.info("the %s pool's replica %s did not answer an offer: %r", pool.name, link.view.replica, error)
            link.call_off(pending)
            return None
        except BaseException:
            link.call_off(pending)
            raise
        return pending if refused is None else refused

    async def _decision(
        self, request: GenerationRequest, link: GenerationLink, pending: PendingGeneration
    ) -> RefusedOffer | None:
        """What the replica says to an offer; None: it is admitted. As long as the replica says anything at all, it is
        alive, and decides on others. If it does not come to this offer in time, that is a refusal: come back after as
        long. In time is while half of what the request had left is still left for another replica; where there is no
        other, when the first token is due. Raises TimeoutError where it says nothing for `_ANSWERS_S`, and what its
        connection ended with.
        """
        clock = asyncio.get_running_loop().time
        began = since = clock()
        until = began + min(_ANSWERS_S, max(0.0, request.due - began) / 2)
        while True:
            ends = min(until, since + _ANSWERS_S) if clock() < until else since + _ANSWERS_S
            await asyncio.wait([pending.outcome], timeout=max(0.0, ends - clock()))
            if pending.outcome.done():
                return pending.outcome.result()
            now = clock()
            if now >= until and link.view.heard_at > began:
                if now >= request.due or self._others(request):
                    link.call_off(pending)
                    return RefusedOffer(pending.number, opens_s=max(now - began, link.view.opens_s(now)))
                until = request.due
            elif now >= since + _ANSWERS_S:
                if link.view.heard_at < since:
                    raise TimeoutError(f"nothing for {_ANSWERS_S:g} s")
                since = now

    def _others(self, request: GenerationRequest) -> bool:
        """There are replicas that it was not offered to."""
        now = asyncio.get_running_loop().time()
        links = (link for pool in self.pools.values() for link in pool.live)
        return any(link not in (*request.offered, request.broken) and not link.view.is_out(now) for link in links)

    def _admitted(self, request: GenerationRequest, pool: GenerationPool, link: GenerationLink) -> None:
        if request.link is link:
            return
        if request.charge is not None and request.link is None and link.view.state is not None:
            request.charge.prompt(link.view.state)
        request.link = link
        request.streamed.admitted(pool.name)

    async def place_again(
        self, request: GenerationRequest, placed: Placed, error: ReplicaLost | EngineBroken
    ) -> Placed:
        """Before any token had come its replica died, or its engine turned out to be broken: elsewhere, once, and only
        while its first token may be in time. Raises the error, or one of its kind that says why no other takes it.
        """
        if isinstance(error, EngineBroken):
            self.ejections.note_failed(placed.link)
            request.broken = placed.link
        if request.is_second or asyncio.get_running_loop().time() > request.due:
            raise error
        request.is_second = True
        request.refusals.clear()
        request.offered.clear()
        try:
            return await self.place(request)
        except WindveError as refusal:
            raise type(error)(f"{error}; no other replica takes this: {refusal}") from None

    def candidates(self, request: GenerationRequest) -> Iterator[tuple[GenerationPool, GenerationLink]]:
        for pool in self.pools.values():
            now = asyncio.get_running_loop().time()
            for link in islice(pool.soonest(now, len(request.wanted.ids)), _ASKED):
                if link.is_live and link is not request.broken:  # it may have died while others were asked
                    yield pool, link

    def _offer(self, request: GenerationRequest) -> GenerationOffer:
        wanted, now = request.wanted, asyncio.get_running_loop().time()
        request.hurried |= request.due - now < _UNHURRIED * (request.due - request.started)
        return GenerationOffer(
            number=0,
            left_s=max(0.0, request.due - now),
            ids=wanted.ids,
            most_tokens=wanted.most_tokens,
            sampling=wanted.sampling,
            answers=wanted.answers,
            logprobs=wanted.logprobs,
            end_tokens=() if wanted.ignore_end else self._card.end_tokens,
            tpot_s=None if wanted.bulk else self.config.tpot_s,
            bulk=wanted.bulk,
            tenant=None if wanted.client is None else wanted.client.tenant,
        )

    def _refusal(self, request: GenerationRequest) -> WindveError:
        """Why nobody has admitted it."""
        if not request.refusals:
            return Unavailable("no pool can answer now: no live replica answers; try again later")
        if all(refused.never for refused in request.refusals) and not request.hurried:
            return self._never(request, max(refused.longest for refused in request.refusals))
        self.refused += 1
        opens_s = request.retry_s if math.isfinite(request.retry_s) else self.config.ttft_s
        retry_after_s = max(_SHORTEST_RETRY_S, opens_s + _LATER * self.config.ttft_s)
        whys = (refused.why for refused in request.refusals if refused.why)
        why = next(whys, "there is no room for this request within its time")
        return Busy(f"busy: {why}; retry in {retry_after_s:.2f} s", retry_after_s=retry_after_s)

    def _never(self, request: GenerationRequest, longest: int) -> WindveError:
        """An idle device would not do."""
        wanted, prompt = request.wanted, len(request.wanted.ids)
        allowed_s = request.due - request.started
        if not wanted.bulk and longest < prompt:
            if wanted.timeout_s is not None:
                less = f", or send at most {longest} tokens" if longest > 0 else ""
                return DeadlineExceeded(
                    f"the first token after a prompt of {prompt} tokens takes longer than {allowed_s:g} s here, "
                    f"even on an idle device; allow more time{less}"
                )
            return InvalidInput(
                f"a prompt of {prompt} tokens is too long for a first token within {allowed_s:g} s here; send "
                f"at most {longest} tokens, or allow more time with the header x-request-timeout-ms"
            )
        answers = f"{wanted.answers} answers" if wanted.answers > 1 else "an answer"
        return InvalidInput(
            f"{answers} of up to {wanted.most_tokens} tokens to a prompt of {prompt} can be generated by no replica "
            "here, even an idle one; request fewer tokens or fewer answers"
        )

    @property
    def routers(self) -> int:
        """Routers that live, this one included, as far as the replicas know."""
        return max((view.routers for view in self._views), default=1)

    @property
    def _views(self) -> list[GenerationView]:
        return [link.view for pool in self.pools.values() for link in pool.live]

    def charge(self, charge: GenerationCharge, *, let_in: bool) -> None:
        """The prompt at once, so that the next request finds less: as the first live replica computes it. Each Router
        that is connected to the replicas grants its part of a quota. Raises OverQuota.
        """
        views = self._views
        if not let_in:
            charge.check(asyncio.get_running_loop().time(), self.routers)
        if views and views[0].state is not None:
            charge.prompt(views[0].state)


def _outcome(found: PendingGeneration | RefusedOffer | None) -> Outcome:
    """What a replica decided, in one word."""
    match found:
        case None:
            return "lost"
        case RefusedOffer():
            return "never" if found.never else "refused"
    return "admitted"
