"""Chooses the replica of a generation: which ones the Router asks, in which order, and the error if none admits it.

Replicas decide; the Router only asks. It asks accelerator replicas first, then CPU replicas. Within a pool, the
earliest predicted first token comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

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
from deployments.generation.metrics import Streamed
from deployments.generation.pool import GenerationLink, GenerationPool
from deployments.generation.request import OfferRecord, Outcome, WantedGeneration
from deployments.generation.scheduler.promises import Shortfall, shortfall
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepTime
from deployments.generation.settings import GenerationRouterConfig
from deployments.generation.text.detokenizer import Detokenizer
from deployments.generation.text.model_card import GenerationCard
from deployments.generation.view import GenerationView
from deployments.serving.ejections import Ejections
from deployments.serving.frames import known
from deployments.serving.replica_set import ASKED
from deployments.serving.replica_view import hangs_after_s

logger = logging.getLogger("ray.serve")

_ANSWERS_S = 1.0  # a replica that sends nothing at all for this time is passed over
_LATER = 0.02  # of `ttft_s`, added to Retry-After: at the very moment of the opening, a client comes too early
_SHORTEST_RETRY_S = 0.05
_HURRIED = 0.25  # of the promised time: if others delayed an offer by more, a refusal as "never" may be due to that


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A generation in the Router. Times are the loop's, in seconds. `due`: when its first token is due; `ends`: when it
    is stopped at the latest.
    """

    wanted: WantedGeneration
    texts: list[Detokenizer]
    started: float
    due: float
    ends: float
    streamed: Streamed
    charge: GenerationCharge | None
    link: GenerationLink | None = None  # the replica that has admitted it
    pending: PendingGeneration | None = None  # its generation there
    offered_at: float = 0.0
    offered: list[GenerationLink] = field(default_factory=list)  # replicas that it was offered to
    is_second: bool = False  # it was admitted before, by a replica that died, failed or hung
    broken: GenerationLink | None = None  # that replica, if it failed or hung
    refusals: list[RefusedOffer] = field(default_factory=list)
    retry_s: float = math.inf
    predicted_s: float = 0.0  # from its arrival to its first token, where it was last offered
    overdue_at: float = math.inf  # if no token has come by then, its replica seems to hang, and others are asked
    asking: asyncio.Timeout | None = None  # ends the offers to those others, once a token has come after all
    ended: set[int] = field(default_factory=set)  # answers that have ended
    begun: bool = False  # a token has come
    keys: Sequence[bytes] = ()  # of its prompt's full blocks, the Router's own; empty: none may be in a cache
    hurried: bool = False  # an offer was late or got no reply: a refusal as "never" may not hold at another time

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self.wanted.answers

    @property
    def is_overtaken(self) -> bool:
        """Whether the other of the two replicas that have it sent the first token. Their requests share `streamed`
        (`GenerationPlacer.place_beside`).
        """
        return not self.begun and self.streamed.first_at is not None

    def call_off(self) -> None:
        """Free its slot at the replica that has admitted it."""
        if self.link is not None and self.pending is not None:
            self.link.call_off(self.pending)

    def over(self, error: BaseException | None) -> None:
        """Note its end, with the error if there is one."""
        device_s = 0.0 if self.charge is None else self.charge.device_s
        self.streamed.over(asyncio.get_running_loop().time(), error, device_s)

    def on_token(self, token: NewToken) -> None:
        """Count and charge a token when its frame comes."""
        if self.asking is not None and not self.begun:
            self.asking.reschedule(0.0)
        self.begun = True
        if self.charge is not None and self.link is not None and self.link.view.state is not None:
            self.charge.came(self.link.view.state, token.answer)
        if token.answer not in self.ended:
            self.streamed.arrived(asyncio.get_running_loop().time(), token.answer)


class GenerationPlacer:
    """A Router's placer. It asks `pools` in their order. `refused` counts the generations answered busy."""

    def __init__(self, pools: Mapping[str, GenerationPool], card: GenerationCard, default_tokens: int) -> None:
        self.pools, self._card, self._default_tokens = pools, card, default_tokens
        self.ejections = Ejections(pools)
        self.config: GenerationRouterConfig  # set by the Router
        self.refused = 0

    @property
    def shortfalls(self) -> dict[str, Shortfall | None]:
        """For each pool, what none of its live replicas can keep of the promise."""
        return {name: self._shortfall(pool) for name, pool in self.pools.items()}

    def _shortfall(self, pool: GenerationPool) -> Shortfall | None:
        config, tokens = self.config, (self._default_tokens, self._card.context)
        found = []
        for state in (link.view.state for link in pool.live if link.view.state is not None):
            model = config.step_time(pool.name) or known(StepTime, state.model)
            found.append(shortfall(model, StepPolicy(config.ttft_s, config.tpot_s), *tokens))
        return None if None in found else min(filter(None, found), default=None)

    async def place(self, request: GenerationRequest) -> None:
        """Have a replica admit it. Raises Busy, InvalidInput, DeadlineExceeded or Unavailable."""
        if not await self._placed(request):
            raise self._refusal(request)

    async def _placed(self, request: GenerationRequest) -> bool:
        """Whether a replica admits it. If not, all refuse or do not answer, or another has sent its first token."""
        for pool, link in self.candidates(request):
            clock = asyncio.get_running_loop().time
            now = clock()
            offered = OfferRecord(pool.name, link.view.replica, now)
            request.wanted.record.offers.append(offered)
            tokens, cached = len(request.wanted.ids), link.likely_cached(request.keys)
            first_s = link.view.first_s(now, tokens)  # a hang shows only after the whole prompt's time
            request.predicted_s = now - request.started + link.view.first_s(now, tokens - cached)
            request.offered.append(link)
            found = await self._ask(request, pool, link, cached)
            if request.is_overtaken and isinstance(found, PendingGeneration):
                link.call_off(found)
                return False
            offered.decided, offered.outcome = clock(), _outcome(found)
            if isinstance(found, PendingGeneration):
                self._admitted(request, pool, link)
                self._cached(request, link, found.cached)
                request.pending, request.offered_at = found, now
                request.overdue_at = now + hangs_after_s(first_s, request.due - request.started)
                return True
            if found is None:
                request.hurried = True
                continue
            request.refusals.append(found)
            if not found.never:
                request.retry_s = min(request.retry_s, found.opens_s)
        return False

    def _came(self, request: GenerationRequest, pool: GenerationPool, link: GenerationLink, token: NewToken) -> None:
        """Take a token, unless the first one came from another replica. It may come in the same turn of the loop as the
        admission, which is handled one turn later.
        """
        if not request.is_overtaken:
            self._admitted(request, pool, link)
            request.on_token(token)

    async def _ask(
        self, request: GenerationRequest, pool: GenerationPool, link: GenerationLink, cached: int
    ) -> PendingGeneration | RefusedOffer | None:
        """A replica's decision. None: it hangs, died or failed, and another may be asked. `cached`: see
        `GenerationLink.offer`.
        """
        came = partial(self._came, request, pool, link)
        pending = link.offer(self._offer(request), self.config.max_buffered_tokens, came, cached)
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
        """Wait for the replica's decision. Returns its refusal, or None if it has admitted the generation.

        A replica that sends anything at all is alive and busy with other offers. If it does not decide in time, that
        counts as a refusal, with a retry after the same time. The limit is half of the request's remaining time, at
        most `_ANSWERS_S`, so that another replica can be asked; without another replica, it is when the first token is
        due.

        Raises TimeoutError if the replica sends nothing for `_ANSWERS_S`, and the error with which its connection
        ended.
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
        """Whether there are replicas that it was not offered to."""
        now = asyncio.get_running_loop().time()
        links = (link for pool in self.pools.values() for link in pool.live)
        return any(link not in (*request.offered, request.broken) and not link.view.is_out(now) for link in links)

    def _admitted(self, request: GenerationRequest, pool: GenerationPool, link: GenerationLink) -> None:
        if request.link is link:
            return
        if request.charge is not None and request.link is None and link.view.state is not None:
            request.charge.prompt(link.view.state)
        request.link, request.streamed.predicted_s = link, request.predicted_s
        request.streamed.admitted(pool.name)

    def _cached(self, request: GenerationRequest, link: GenerationLink, tokens: int) -> None:
        """Its replica's cache held so many tokens of its prompt, and holds all full blocks of it from now on."""
        link.has_got(request.keys)
        request.wanted.record.cached_tokens = tokens
        if not tokens or request.is_second:  # its prompt was counted where it was admitted first
            return
        request.streamed.count_cached(tokens)
        if request.charge is not None and link.view.state is not None:
            request.charge.refund_cached(link.view.state, tokens)

    async def place_again(self, request: GenerationRequest, error: ReplicaLost | EngineBroken) -> None:
        """Place a generation elsewhere after its replica died or its engine broke, if no token has come. This happens
        once, and only before the first token is due. Raises `error`, or one of its type that says why no other
        replica admits it.
        """
        if isinstance(error, EngineBroken) and request.link is not None:
            self.ejections.note_failed(request.link)
            request.broken = request.link
        if request.is_second or asyncio.get_running_loop().time() > request.due:
            raise error
        request.is_second = True
        request.refusals.clear()
        request.offered.clear()
        try:
            await self.place(request)
        except WindveError as refusal:
            raise type(error)(f"{error}; no other replica takes this: {refusal}") from None

    async def place_beside(self, request: GenerationRequest) -> GenerationRequest:
        """Have another replica admit a generation whose first token is overdue, and call it off where it was. If no
        other admits it, or the first token comes meanwhile, it stays. Tokens of a replica that was called off are not
        counted. Returns the request where it is now.
        """
        request.overdue_at, is_placed = math.inf, False
        if request.is_second or request.begun:
            return request
        self._note_overdue(request)
        beside = replace(request, broken=request.link, is_second=True, offered=[], refusals=[])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as request.asking:
                is_placed = await self._placed(beside)
        request.asking = None
        if not is_placed:
            return request
        request.call_off()
        beside.overdue_at = math.inf
        return beside

    def _note_overdue(self, request: GenerationRequest) -> None:
        """Count an overdue first token as a failure of its replica, if another replica has room now."""
        assert request.link is not None
        now, late = asyncio.get_running_loop().time(), request.link.view
        has_room = any(view is not late and view.opens_s(now) <= 0 and not view.is_out(now) for view in self._views)
        if has_room and late.outlier.count_overdue(now, request.offered_at):
            self.ejections.note_failed(request.link)

    def candidates(self, request: GenerationRequest) -> Iterator[tuple[GenerationPool, GenerationLink]]:
        for pool in self.pools.values():
            now = asyncio.get_running_loop().time()
            for link in islice(pool.soonest(now, len(request.wanted.ids), request.keys), ASKED):
                if link.is_live and link is not request.broken:  # a link may have died while others were asked
                    yield pool, link

    def _offer(self, request: GenerationRequest) -> GenerationOffer:
        wanted, now = request.wanted, asyncio.get_running_loop().time()
        request.hurried |= now - request.started - wanted.tokenizing_s > _HURRIED * (request.due - request.started)
        return GenerationOffer(
            number=0,
            left_s=max(0.0, request.due - now),
            ids=wanted.ids,
            most_tokens=wanted.most_tokens,
            sampling=wanted.sampling,
            answers=wanted.answers,
            may_shorten=wanted.may_shorten,
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            end_tokens=wanted.stop_tokens if wanted.ignore_end else (*self._card.end_tokens, *wanted.stop_tokens),
            tpot_s=None if wanted.bulk else self.config.tpot_s,
            bulk=wanted.bulk,
            tenant=None if wanted.client is None else wanted.client.tenant,
            cache_scope=wanted.cache_scope,
        )

    def _refusal(self, request: GenerationRequest) -> WindveError:
        """The error for a generation that no replica has admitted."""
        if not request.refusals:
            return Unavailable("no pool can answer now: no live replica answers; try again later")
        now = asyncio.get_running_loop().time()
        is_never = all(refused.never for refused in request.refusals) and not request.hurried
        if is_never and not any(view.is_out(now) for view in self._views):  # one that is out may be larger
            return self._never(request, max(refused.longest for refused in request.refusals))
        self.refused += 1
        opens_s = request.retry_s if math.isfinite(request.retry_s) else self.config.ttft_s
        retry_after_s = max(_SHORTEST_RETRY_S, opens_s + _LATER * self.config.ttft_s)
        whys = (refused.why for refused in request.refusals if refused.why)
        why = next(whys, "there is no room for this request within its time")
        return Busy(f"busy: {why}; retry in {retry_after_s:.2f} s", retry_after_s=retry_after_s)

    def _never(self, request: GenerationRequest, longest: int) -> WindveError:
        """The error for a generation that even an idle device would refuse."""
        wanted, prompt = request.wanted, len(request.wanted.ids)
        allowed_s = request.due - request.started
        why = "".join(f" ({pool}: {problem.sentence})" for pool, problem in self.shortfalls.items() if problem)
        if not wanted.bulk and longest < prompt:
            if wanted.timeout_s is not None:
                less = f", or send at most {longest} tokens" if longest > 0 else ""
                return DeadlineExceeded(
                    f"the first token after a prompt of {prompt} tokens takes longer than {allowed_s:g} s here, "
                    f"even on an idle device; allow more time{less}{why}"
                )
            return InvalidInput(
                f"a prompt of {prompt} tokens is too long for a first token within {allowed_s:g} s here; send "
                f"at most {longest} tokens, or allow more time with the header x-request-timeout-ms{why}"
            )
        answers = f"{wanted.answers} answers" if wanted.answers > 1 else "an answer"
        return InvalidInput(
            f"{answers} of up to {wanted.most_tokens} tokens to a prompt of {prompt} can be generated by no replica "
            f"here, even an idle one; request fewer tokens or fewer answers{why}"
        )

    @property
    def routers(self) -> int:
        """The number of live Routers, including this one, as far as the replicas know."""
        return max((view.routers for view in self._views), default=1)

    @property
    def _views(self) -> list[GenerationView]:
        return [link.view for pool in self.pools.values() for link in pool.live]

    def charge(self, charge: GenerationCharge, *, let_in: bool) -> None:
        """Charge the prompt at once, so that the next request finds less quota, at the first live replica's cost. Each
        connected Router grants its part of the quota, and `let_in` skips the check. Raises OverQuota.
        """
        views = self._views
        if not let_in:
            charge.check(asyncio.get_running_loop().time(), self.routers)
        if views and views[0].state is not None:
            charge.prompt(views[0].state)


def _outcome(found: PendingGeneration | RefusedOffer | None) -> Outcome:
    """A replica's decision as an outcome."""
    match found:
        case None:
            return "lost"
        case RefusedOffer():
            return "never" if found.never else "refused"
    return "admitted"
