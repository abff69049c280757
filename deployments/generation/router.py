"""The Router of generation: offers each one to replicas until one admits it, and makes text of the tokens that come.

Start reading at `GenerationRouter.begin`. Each replica decides for itself what it admits (`scheduler`). The Router
asks the accelerator's replicas first, then the CPU's; within a pool the one first whose first token would come soonest.
Once tokens have come a generation stays where it is: if its replica dies, it ends with one error.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer

from deployments.admission.trial import HEADER, Trial, Trials
from deployments.errors import (
    Busy,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    ReplicaLost,
    SettingsError,
    TimedOut,
    Unavailable,
    WindveError,
)
from deployments.generation.channel import Streaming
from deployments.generation.charge import Charged
from deployments.generation.frames import GenerationOffer, NewToken, RefusedOffer
from deployments.generation.metrics import GenerationMetrics, Promise, Streamed
from deployments.generation.metrics import GenerationPool as PoolFigures
from deployments.generation.pool import GenerationLink, GenerationPool
from deployments.generation.record import Outcome
from deployments.generation.request import Asked, Finish, Piece
from deployments.generation.settings import GenerationConfig, GenerationSettings
from deployments.generation.text.detokenizer import TextStream
from deployments.generation.text.model_card import GenerationCard, read_generation_card
from deployments.generation.text.sampling import Picked
from deployments.generation.timed_steps import PlannedStep
from deployments.hardware.device_detector import CPU, Topology
from deployments.models.tokenizer_cache import ask_once
from deployments.models.tokenizer_check import true_tokenizer
from deployments.serving.metrics import Instruments, OfModel, publish_again_and_again

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

_ASKED = 4  # replicas of a pool for one generation
_TIMED_S = 60.0  # a replica that takes longer to time planned steps hangs
_ANSWERS_S = 1.0  # a replica that neither admits nor refuses nor says anything else is passed over
_LATER = 0.02  # of `ttft_s`: who comes back the moment that there is room comes too soon
_SHORTEST_RETRY_S = 0.05
_UNHURRIED = 0.75  # of the promise is left as it is offered: who refuses it then for ever means it
_BEGUN = Piece(0, "", ())  # is never given out


class GenerationHost(NamedTuple):
    """What a Router finds where it runs: the names of its replica and node, Serve's metrics, and the model's files."""

    replica: str
    node: str
    instruments: Instruments
    card: GenerationCard
    tokenizer: Tokenizer

    @classmethod
    def of_serve(cls, settings: GenerationSettings) -> GenerationHost:
        """Within a replica of Serve."""
        import ray
        from ray import serve
        from ray.serve import metrics

        card = read_generation_card(settings.model)
        tokenizer = true_tokenizer(card.model, settings.model.tokenizer, ask_once)
        node = ray.get_runtime_context().get_node_id()
        return cls(serve.get_replica_context().replica_tag, node, OfModel(metrics, card.name), card, tokenizer)


@dataclass(slots=True, eq=False)
class Request:
    """One generation on its way. Times are the loop's, in seconds. `due`: of its first token; `ends`: of all."""

    asked: Asked
    texts: list[TextStream]
    started: float
    due: float
    ends: float
    record: Streamed
    charged: Charged | None
    link: GenerationLink | None = None  # where it is admitted
    offered: list[GenerationLink] = field(default_factory=list)  # to these it was
    refusals: list[RefusedOffer] = field(default_factory=list)
    retry_s: float = math.inf
    ended: set[int] = field(default_factory=set)  # answers
    begun: bool = False  # a token has come
    hurried: bool = False  # somebody was offered it late, or did not answer: what is refused now may do another time

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self.asked.answers

    def over(self, error: BaseException | None) -> None:
        """It ends; by this error, if there is one."""
        device_s = 0.0 if self.charged is None else self.charged.device_s
        self.record.over(asyncio.get_running_loop().time(), error, device_s)

    def on_token(self, token: NewToken) -> None:
        """As its frame comes."""
        self.begun = True
        if self.charged is not None and self.link is not None and self.link.view.state is not None:
            self.charged.came(self.link.view.state, token.answer)
        if token.answer not in self.ended:
            self.record.arrived(asyncio.get_running_loop().time(), token.answer, 1)


class Placed(NamedTuple):
    """Where it is admitted."""

    link: GenerationLink
    streaming: Streaming


class GenerationRouter:
    """One replica of the Router deployment. `handles[pool]` is (name, handle) of the pool's deployment.

    It is what `asked.Generates` describes.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        topology: Topology,
        handles: Mapping[str, tuple[str, DeploymentHandle[Any]]],
        host: GenerationHost | None = None,
    ) -> None:
        host = host or GenerationHost.of_serve(settings)
        self.settings, self.topology = settings, topology
        self.replica, self.card, self.tokenizer = host.replica, host.card, host.tokenizer
        self.config: GenerationConfig  # once `reconfigure` was called
        self.config_problem: str | None = None
        self.started = time.time()
        self.pools: dict[str, GenerationPool] = {}
        self.refused = 0  # generations answered busy since the start
        self.metrics = GenerationMetrics(host.instruments)
        self._node, self._handles = host.node, handles
        self._trials = Trials()

    async def reconfigure(self, user_config: Any) -> None:
        """Put a `user_config` in force: at the start, and in place whenever it changes.

        At the start a bad config refuses to start (SettingsError names the key). Later it changes nothing: what runs
        goes on with the config before it, and the log and `/info` say what is wrong with the new one.
        """
        try:
            config = GenerationConfig.parse(user_config)
        except SettingsError as error:
            if not self.pools:
                raise
            self.config_problem = str(error)
            logger.error("the new user_config is refused, the one before stays in force: %s", error)  # noqa: TRY400
        else:
            self.configure(config)

    def configure(self, config: GenerationConfig) -> None:
        """Put a config in force."""
        self.config, self.config_problem = config, None
        self._trials.configure(config.trial)
        first = not self.pools
        if first:
            self.pools |= {name: self._pool(name) for name in self._handles}
        for name, pool in self.pools.items():
            pool.configure(config.policy(name))
        if first:
            for pool in self.pools.values():
                pool.connect()
            asyncio.get_running_loop().call_soon(publish_again_and_again, self._publish)
        logger.info(
            "%s: in force: first token within %g s, then %g s a token", self.card.name, config.ttft_s, config.tpot_s
        )

    def _pool(self, name: str) -> GenerationPool:
        deployment, handle = self._handles[name]
        return GenerationPool(
            name,
            deployment=deployment,
            handle=handle,
            router=self.replica,
            node=self._node,
            on_change=lambda: None,
        )

    # --- the way of a generation --------------------------------------------------------------------------------------

    async def begin(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        """The answers' pieces; admitted when this returns. Closing the generator frees its place at the replica.

        Raises Busy (OverQuota among it), InvalidInput, DeadlineExceeded or Unavailable; the generator raises
        EngineFailed, ReplicaLost or TimedOut.
        """
        request = self._open(asked)
        try:
            if request.charged is not None:
                self._charge(request.charged, let_in=asked.let_in)
            placed = await self._place(request)
        except BaseException as error:
            if request.charged is not None:
                request.charged.give_back()
            request.over(error)
            raise
        pieces = self._pieces(request, placed)
        await anext(pieces)  # it has begun, so that closing it always frees the place
        return pieces

    def _open(self, asked: Asked) -> Request:
        config, now = self.config, asked.received
        if now is None:
            now = asyncio.get_running_loop().time()
        promise = Promise(None, None) if asked.bulk else Promise(asked.timeout_s or config.ttft_s, config.tpot_s)
        record = self.metrics.begin(
            now,
            prompt_tokens=len(asked.ids),
            answers=asked.answers,
            promise=promise,
            client=None if asked.client is None else asked.client.tenant.name,
        )
        texts = [TextStream(self.tokenizer, asked.stops) for _ in range(asked.answers)]
        ends = now + config.request_timeout_s
        due = ends if promise.ttft_s is None else now + promise.ttft_s
        charged = None if asked.client is None else Charged(asked.client.quota, len(asked.ids))
        if asked.record is not None:
            asked.record.streamed = record
        return Request(asked, texts, now, due, ends, record, charged)

    async def _pieces(self, request: Request, placed: Placed) -> AsyncGenerator[Piece, None]:
        problem: BaseException | None = None
        try:
            yield _BEGUN
            while not request.is_over:
                try:
                    new = await self._next(request, placed.streaming)
                except ReplicaLost:
                    if request.begun:
                        raise
                    placed = await self._place_again(request)
                    continue
                for piece in _spoken(request, new, self._ends(request.asked)):
                    if piece.finish is not None:
                        self._ended(request, placed, piece)
                    yield piece
        except BaseException as error:
            problem = asyncio.CancelledError() if isinstance(error, GeneratorExit) else error
            raise
        finally:
            placed.link.call_off(placed.streaming)
            over = None if request.is_over else problem
            if request.charged is not None and isinstance(over, WindveError) and not isinstance(over, TimedOut):
                request.charged.give_back()
            request.over(over)

    async def _next(self, request: Request, streaming: Streaming) -> list[NewToken]:
        """Raises EngineFailed, ReplicaLost or TimedOut."""
        try:
            async with asyncio.timeout_at(request.ends):
                return await streaming.tokens()
        except TimeoutError:
            timeout_s = self.config.request_timeout_s
            raise TimedOut(f"the answer has not ended within {timeout_s:g} s (request_timeout_s)") from None

    def _ended(self, request: Request, placed: Placed, piece: Piece) -> None:
        """An answer has ended; at a stop, which the replica does not know, the rest of it is called off."""
        assert piece.finish is not None
        request.ended.add(piece.answer)
        request.record.ended(piece.answer, piece.finish)
        if request.texts[piece.answer].stopped:
            placed.link.stop(placed.streaming, piece.answer)

    # --- which replica ------------------------------------------------------------------------------------------------

    async def _place(self, request: Request) -> Placed:
        """Raises Busy, InvalidInput, DeadlineExceeded or Unavailable."""
        for pool, link in self._candidates(request):
            record, clock = request.asked.record, asyncio.get_running_loop().time
            offered = None if record is None else record.offer(pool.name, link.view.replica, clock())
            request.offered.append(link)
            found = await self._ask(request, pool, link)
            if offered is not None:
                offered.ends(clock(), _outcome(found))
            if isinstance(found, Streaming):
                self._admitted(request, pool, link)
                return Placed(link, found)
            if found is None:
                request.hurried = True
                continue
            request.refusals.append(found)
            if not found.never:
                request.retry_s = min(request.retry_s, found.opens_s)
        raise self._refusal(request)

    def _came(self, request: Request, pool: GenerationPool, link: GenerationLink, token: NewToken) -> None:
        """A token, perhaps in one turn of the loop with the admission, which is looked at in the next."""
        self._admitted(request, pool, link)
        request.on_token(token)

    async def _ask(
        self, request: Request, pool: GenerationPool, link: GenerationLink
    ) -> Streaming | RefusedOffer | None:
        """What a replica decides; None: it hangs, it died, or it could not. Another may."""
        came = partial(self._came, request, pool, link)
        streaming = link.offer(self._offer(request), self.config.unread_tokens, came)
        try:
            refused = await self._decision(request, link, streaming)
        except (TimeoutError, WindveError) as error:
            logger.info("the %s pool's replica %s did not answer an offer: %r", pool.name, link.view.replica, error)
            link.call_off(streaming)
            return None
        except BaseException:
            link.call_off(streaming)
            raise
        return streaming if refused is None else refused

    async def _decision(self, request: Request, link: GenerationLink, streaming: Streaming) -> RefusedOffer | None:
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
            await asyncio.wait([streaming.outcome], timeout=max(0.0, ends - clock()))
            if streaming.outcome.done():
                return streaming.outcome.result()
            now = clock()
            if now >= until and link.view.heard_at > began:
                if now >= request.due or self._others(request):
                    link.call_off(streaming)
                    return RefusedOffer(streaming.number, opens_s=max(now - began, link.view.opens_s(now)))
                until = request.due
            elif now >= since + _ANSWERS_S:
                if link.view.heard_at < since:
                    raise TimeoutError(f"nothing for {_ANSWERS_S:g} s")
                since = now

    def _others(self, request: Request) -> bool:
        """There are replicas that it was not offered to."""
        links = (link for pool in self.pools.values() for link in pool.live)
        return any(link not in request.offered for link in links)

    def _admitted(self, request: Request, pool: GenerationPool, link: GenerationLink) -> None:
        if request.link is link:
            return
        if request.charged is not None and request.link is None and link.view.state is not None:
            request.charged.prompt(link.view.state)
        request.link = link
        request.record.admitted(pool.name)

    async def _place_again(self, request: Request) -> Placed:
        """Its replica died before any token had come. Raises ReplicaLost."""
        request.refusals.clear()
        request.offered.clear()
        try:
            return await self._place(request)
        except WindveError as error:
            raise ReplicaLost(f"the replica that had admitted this died, and no other takes it: {error}") from None

    def _candidates(self, request: Request) -> Iterator[tuple[GenerationPool, GenerationLink]]:
        for pool in self.pools.values():
            now = asyncio.get_running_loop().time()
            for link in islice(pool.soonest(now, len(request.asked.ids)), _ASKED):
                if link.is_live:  # it may have died while others were asked
                    yield pool, link

    def _offer(self, request: Request) -> GenerationOffer:
        asked, now = request.asked, asyncio.get_running_loop().time()
        request.hurried |= request.due - now < _UNHURRIED * (request.due - request.started)
        return GenerationOffer(
            number=0,
            left_s=max(0.0, request.due - now),
            ids=asked.ids,
            most_tokens=asked.most_tokens,
            sampling=asked.sampling,
            answers=asked.answers,
            logprobs=asked.logprobs,
            end_tokens=self._ends(asked),
            tpot_s=None if asked.bulk else self.config.tpot_s,
            bulk=asked.bulk,
            tenant=None if asked.client is None else asked.client.tenant,
        )

    def _ends(self, asked: Asked) -> tuple[int, ...]:
        return () if asked.ignore_end else self.card.end_tokens

    def _refusal(self, request: Request) -> WindveError:
        """Why nobody has admitted it."""
        if not request.refusals:
            return Unavailable("no pool can answer now: no live replica answers; please try again later")
        if all(refused.never for refused in request.refusals) and not request.hurried:
            return self._never(request, max(refused.longest for refused in request.refusals))
        self.refused += 1
        opens_s = request.retry_s if math.isfinite(request.retry_s) else self.config.ttft_s
        retry_after_s = max(_SHORTEST_RETRY_S, opens_s + _LATER * self.config.ttft_s)
        whys = (refused.why for refused in request.refusals if refused.why)
        why = next(whys, "what is admitted already leaves no room for this within its time")
        return Busy(f"busy: {why}; come back in {retry_after_s:.2f} s", retry_after_s=retry_after_s)

    def _never(self, request: Request, longest: int) -> WindveError:
        """An idle device would not do."""
        asked, prompt = request.asked, len(request.asked.ids)
        allowed_s = request.due - request.started
        if not asked.bulk and longest < prompt:
            if asked.timeout_s is not None:
                return DeadlineExceeded(
                    f"the first token after a prompt of {prompt} tokens takes longer than {allowed_s:g} s here, "
                    f"whatever else is served; allow more time, or send at most {longest} tokens"
                )
            return InvalidInput(
                f"a prompt of {prompt} tokens is too long for a first token within {allowed_s:g} s here; the longest "
                f"is {longest} tokens; send less, or allow more time with the header x-request-timeout-ms"
            )
        answers = f"{asked.answers} answers" if asked.answers > 1 else "an answer"
        return InvalidInput(
            f"{answers} of up to {asked.most_tokens} tokens to a prompt of {prompt} can be generated by no replica "
            "here, even an idle one; ask for fewer tokens or fewer answers"
        )

    def _charge(self, charged: Charged, *, let_in: bool) -> None:
        """The prompt at once, so that the next request finds less: as the first live replica computes it. Each Router
        that is connected to the replicas grants its part of a quota. Raises OverQuota.
        """
        views = [link.view for pool in self.pools.values() for link in pool.live]
        if not let_in:
            charged.check(asyncio.get_running_loop().time(), max((view.routers for view in views), default=1))
        if views and views[0].state is not None:
            charged.prompt(views[0].state)

    # --- calibration --------------------------------------------------------------------------------------------------

    async def time_steps(
        self, trial: Trial | None, pool: str, planned: Sequence[PlannedStep], times: int
    ) -> dict[str, Any]:
        """What the route `/calibration/steps` answers: the seconds that each of these steps takes a replica of the pool
        (`Stepper.time_steps`), which admits nothing meanwhile.

        Raises Forbidden, InvalidInput, Unavailable or EngineFailed.
        """
        if trial is None:
            raise Forbidden(f"steps are planned by calibrations only, with their secret in the header {HEADER}")
        self._trials.enter(trial, self.topology.pools, asyncio.get_running_loop().time(), time.time())
        if pool not in self._handles:
            raise InvalidInput(f"there is no pool named {pool}, only {' and '.join(self._handles)}", param="pool")
        _, handle = self._handles[pool]
        try:
            async with asyncio.timeout(_TIMED_S):
                found: dict[str, Any] | WindveError = await handle.options(method_name="time_steps").remote(
                    planned, times
                )
        except Exception as error:
            logger.warning("the %s pool timed no steps", pool, exc_info=error)
            raise Unavailable(f"no replica of the {pool} pool timed these steps: {type(error).__name__}") from None
        if isinstance(found, WindveError):
            raise found
        return found

    @property
    def trial_seconds_ago(self) -> float | None:
        """As of embeddings' Router."""
        return self._trials.seconds_ago(asyncio.get_running_loop().time())

    # --- how it is ----------------------------------------------------------------------------------------------------

    @property
    def live_pools(self) -> Mapping[str, bool]:
        """Of each pool, whether it has a live replica."""
        return {name: bool(pool.live) for name, pool in self.pools.items()}

    def describe(self) -> dict[str, Any]:
        """As `/info` shows it."""
        expected = self.topology.replicas
        return {
            "kind": "generation",
            "emulated": self.settings.emulated,
            "topology": self.topology.reason,
            "router": self.replica,
            "ttft_s": self.config.ttft_s,
            "tpot_s": self.config.tpot_s,
            "config_problem": self.config_problem,
            "trial_seconds_ago": self.trial_seconds_ago,
            "refused": self.refused,
            "pools": {
                name: {"expected_replicas": expected[name], **self._calibrated(name), **pool.describe()}
                for name, pool in self.pools.items()
            },
        }

    def _calibrated(self, pool: str) -> dict[str, Any]:
        """`step_time` and `host_time`: that are in force; None: what each replica measured at its start."""
        settings = self.settings.cpu if pool == CPU else self.settings.accelerator
        step_time, host_time = self.config.step_time(pool), self.config.host_time(pool)
        return {
            "step_time": None if step_time is None else asdict(step_time),
            "host_time": None if host_time is None else asdict(host_time),
            "host_blocks": 0 if pool == CPU else self.settings.accelerator.host_blocks,
            "step_tokens": settings.step_tokens,
        }

    def _publish(self) -> None:
        figures = {
            name: PoolFigures(bool(pool.live), len(pool.live), self.config.step_time(name) is not None)
            for name, pool in self.pools.items()
        }
        self.metrics.publish(Promise(self.config.ttft_s, self.config.tpot_s), figures)


def _outcome(found: Streaming | RefusedOffer | None) -> Outcome:
    """What a replica decided, in one word."""
    match found:
        case None:
            return "lost"
        case RefusedOffer():
            return "never" if found.never else "refused"
    return "admitted"


def _spoken(request: Request, new: list[NewToken], end_tokens: tuple[int, ...]) -> Iterator[Piece]:
    """One piece for each answer that has more. An end token is no text."""
    tokens: dict[int, list[Picked]] = {}
    said: dict[int, str] = {}
    finished: dict[int, Finish] = {}
    for _, answer, picked, finish in new:
        if answer in request.ended or answer in finished:
            continue
        text = request.texts[answer]
        tokens.setdefault(answer, []).append(picked)
        ends = finish == "stop" and picked.id in end_tokens
        said[answer] = said.get(answer, "") + ("" if ends else text.add(picked.id))
        if text.stopped:
            finished[answer] = "stop"
        elif finish is not None:
            said[answer] += text.end()
            finished[answer] = finish
    for answer, some in tokens.items():
        yield Piece(answer, said[answer], tuple(some), finished.get(answer))
