"""The Router of generation has a replica admit each generation (`placer`), and turns its tokens into text.

Start reading at `GenerationRouter.begin`. Each replica decides for itself what it admits (`scheduler`). A generation
that has tokens never moves: if its replica dies, it ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tokenizers import Tokenizer

from deployments.errors import EngineBroken, EngineFailed, ReplicaLost, SettingsError, TimedOut
from deployments.generation.charge import GenerationCharge
from deployments.generation.frames import NewToken
from deployments.generation.metrics import GenerationPoolState, GenerationRouterMetrics, Promise, Streamed
from deployments.generation.placer import GenerationPlacer, GenerationRequest
from deployments.generation.pool import GenerationPool
from deployments.generation.request import Finish, Piece, WantedGeneration
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.prefix_keys import PrefixKeys
from deployments.generation.settings import GenerationRouterConfig, GenerationSettings
from deployments.generation.text.detokenizer import Detokenizer
from deployments.generation.text.model_card import GenerationCard, read_generation_card, with_end_of
from deployments.generation.text.sampling import Picked
from deployments.hardware.device_detector import CPU, Topology
from deployments.models.space import space_of
from deployments.models.tokenizer_check import ask_once, checked_tokenizer
from deployments.serving.router import BaseRouter, Handles, RouterContext

logger = logging.getLogger("ray.serve")

_SECRET = secrets.token_bytes(32)
_BEGUN = Piece(0, "", ())  # consumed by `begin`, never returned to callers


class GenerationRouter(BaseRouter[GenerationSettings, GenerationRouterConfig, GenerationPool, GenerationCard]):
    """One replica of the Router deployment. `handles[pool]` is (name, handle) of the pool's deployment."""

    pool_type = GenerationPool

    def __init__(
        self,
        settings: GenerationSettings,
        topology: Topology,
        handles: Handles,
        context: RouterContext[GenerationCard, Tokenizer] | None = None,
    ) -> None:
        context = context or _context(settings)
        super().__init__(settings, topology, handles, context)
        self.tokenizer = context.tokenizer
        self.metrics = GenerationRouterMetrics(context.instruments)
        self._placer = GenerationPlacer(self.pools, context.card, settings.limits.default_tokens)
        self._told: set[tuple[str, str]] = set()  # by pool, what was logged of promises that cannot be kept

    def _parse(self, user_config: Any) -> GenerationRouterConfig:
        return GenerationRouterConfig.parse(user_config)

    def _put_in_force(self, config: GenerationRouterConfig) -> str:
        self._placer.config = config
        for name, pool in self.pools.items():
            pool.put_in_force(config.policy(name))
        return f"first token within {config.ttft_s:g} s, then {config.tpot_s:g} s a token"

    def _replicas_changed(self) -> None:
        self._placer.ejections.replicas_changed()
        for pool, problem in self._placer.shortfalls.items():
            if problem is not None and (pool, problem.sentence) not in self._told:
                self._told.add((pool, problem.sentence))
                logger.warning("the %s pool: %s", pool, problem.sentence)

    async def joined(self) -> None:
        await super().joined()
        found = [problem for problem in self._placer.shortfalls.values() if problem is not None and problem.is_total]
        if found and len(found) == len(self.pools):
            raise SettingsError(f"user_config.{found[0].key}", found[0].problem)

    # --- the path of a generation -------------------------------------------------------------------------------------

    async def begin(self, wanted: WantedGeneration) -> AsyncGenerator[Piece, None]:
        """Have a generation admitted. Returns a generator of its answers' pieces.

        Raises Busy (or its kind OverQuota), InvalidInput, DeadlineExceeded or Unavailable. The generator raises
        EngineFailed, ReplicaLost or TimedOut. Closing the generator frees its slot at the replica, even before its
        first piece was requested.
        """
        request = self._open(wanted)
        try:
            if request.charge is not None:
                self._placer.charge(request.charge, let_in=wanted.let_in)
            await self._placer.place(request)
        except BaseException as error:
            if request.charge is not None:
                request.charge.failed(error)
            request.over(error)
            raise
        is_first = not wanted.let_in  # a request counts once, whatever number of prompts it has
        self.placed += is_first
        pieces = self._pieces(request, is_first=is_first)
        await anext(pieces)  # start it, so that closing it always frees the slot
        return pieces

    def _open(self, wanted: WantedGeneration) -> GenerationRequest:
        config, now = self.config, wanted.received
        if now is None:
            now = asyncio.get_running_loop().time()
        promise = Promise(None, None) if wanted.bulk else Promise(wanted.timeout_s or config.ttft_s, config.tpot_s)
        streamed = Streamed(
            self.metrics,
            now,
            promise,
            prompt_tokens=len(wanted.ids),
            answers=wanted.answers,
            client=None if wanted.client is None else wanted.client.tenant.name,
        )
        before = wanted.ids if wanted.continues else ()
        least = wanted.sampling.min_tokens
        texts = [Detokenizer(self.tokenizer, wanted.stops, before, least) for _ in range(wanted.answers)]
        ends = now + config.request_timeout_s
        due = ends if promise.ttft_s is None else now + promise.ttft_s
        charge, scored = None, wanted.prompt_logprobs is not None
        if wanted.client is not None:
            charge = GenerationCharge(wanted.client.quota, prompt_tokens=len(wanted.ids), scored=scored)
        wanted.record.streamed = streamed
        keys = () if wanted.cache_scope is None else PrefixKeys(_SECRET, wanted.cache_scope, BLOCK, wanted.ids)
        return GenerationRequest(wanted, texts, now, due, ends, streamed, charge, keys=keys)

    async def _pieces(self, request: GenerationRequest, *, is_first: bool) -> AsyncGenerator[Piece, None]:
        problem: BaseException | None = None
        try:
            yield _BEGUN
            while not request.is_over:
                try:
                    new = await self._next(request)
                    if not new:
                        request = await self._placer.place_beside(request)
                        continue
                except (ReplicaLost, EngineBroken) as error:
                    if request.begun:
                        raise
                    await self._placer.place_again(request, error)
                    continue
                for piece in _spoken(request, new):
                    if piece.finish is not None:
                        self._ended(request, piece)
                    yield piece
        except BaseException as error:
            problem = asyncio.CancelledError() if isinstance(error, GeneratorExit) else error
            raise
        finally:
            self.placed -= is_first
            request.call_off()
            over = None if request.is_over else problem
            if request.charge is not None:
                request.charge.failed(over)
            request.over(over)

    async def _next(self, request: GenerationRequest) -> list[NewToken]:
        """Wait for new tokens. Empty: the first one is overdue. Raises EngineFailed, ReplicaLost or TimedOut."""
        assert request.pending is not None
        is_watched = not request.begun and request.overdue_at < request.due
        try:
            async with asyncio.timeout_at(request.overdue_at if is_watched else request.ends):
                return await request.pending.tokens()
        except TimeoutError:
            if is_watched:
                return []
            timeout_s = self.config.request_timeout_s
            raise TimedOut(f"the answer has not ended within {timeout_s:g} s (request_timeout_s)") from None

    def _ended(self, request: GenerationRequest, piece: Piece) -> None:
        """Note that an answer has ended. At a stop string, which the replica does not know, stop it there as well."""
        assert piece.finish is not None
        request.ended.add(piece.answer)
        request.streamed.ended(piece.answer, piece.finish)
        if request.texts[piece.answer].stopped and request.link is not None and request.pending is not None:
            request.link.stop(request.pending, piece.answer)

    # --- status -------------------------------------------------------------------------------------------------------

    @property
    def live_pools(self) -> Mapping[str, bool]:
        """For each pool, whether it has a live replica."""
        return {name: pool.may_answer for name, pool in self.pools.items()}

    @property
    def load(self) -> int:
        """Running answers and waiting generations of all Routers."""
        return sum(pool.in_flight for pool in self.pools.values())

    def describe(self) -> dict[str, Any]:
        """The service as `/info` shows it."""
        return {
            "kind": "generation",
            "emulated": self.settings.emulated,
            "topology": self.topology.reason,
            "router": self.replica,
            **self.about_process(),
            "ttft_s": self.config.ttft_s,
            "tpot_s": self.config.tpot_s,
            "config_problem": self.config_problem,
            "routers": self._placer.routers,
            "refused": self._placer.refused,
            "recent": self.metrics.recent.describe(),
            "pools": self.describe_pools(),
        }

    def _about(self, pool: str) -> dict[str, Any]:
        """`promise_problem`: see `GenerationPlacer.shortfalls`. `step_time`, `host_time`: the calibrated ones; None:
        each replica uses what it measured at its start.
        """
        settings = self.settings.cpu if pool == CPU else self.settings.accelerator
        problem = self._placer.shortfalls[pool]
        step_time, host_time = self.config.step_time(pool), self.config.host_time(pool)
        return {
            "promise_problem": None if problem is None else problem.sentence,
            "step_time": None if step_time is None else asdict(step_time),
            "host_time": None if host_time is None else asdict(host_time),
            "num_cpu_blocks": 0 if pool == CPU else self.settings.accelerator.num_cpu_blocks,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
        }

    def _publish(self) -> None:
        figures = {
            name: GenerationPoolState(
                pool.may_answer, len(pool.live), len(pool.ejected()), self.config.step_time(name) is not None
            )
            for name, pool in self.pools.items()
        }
        self.metrics.publish(Promise(self.config.ttft_s, self.config.tpot_s), figures)


def _context(settings: GenerationSettings) -> RouterContext[GenerationCard, Tokenizer]:
    """The environment of the current Serve replica, with the model's tokenizer."""
    card = read_generation_card(settings.model)
    tokenizer = checked_tokenizer(card.model, settings.model.tokenizer, ask_once)
    return RouterContext.of_serve(with_end_of(card, tokenizer), tokenizer, space_of(card.model))


def _spoken(request: GenerationRequest, new: list[NewToken]) -> Iterator[Piece]:
    """Turn new tokens into one piece per answer. A token with `finish` "stop" is an end token, which has no text.

    Raises EngineFailed if scores of the prompt were requested and did not come, because the replica's version is older.
    """
    tokens: dict[int, list[Picked]] = {}
    said: dict[int, str] = {}
    finished: dict[int, Finish] = {}
    scores = None if request.pending is None else request.pending.scores
    if scores is None and request.wanted.prompt_logprobs is not None:
        raise EngineFailed("this replica computes no log probabilities of prompts yet; try again after the upgrade")
    for token in new:
        answer, picked, finish = token.answer, token.picked, token.finish
        if answer in request.ended or answer in finished:
            continue
        text = request.texts[answer]
        tokens.setdefault(answer, []).append(picked)
        said[answer] = said.get(answer, "") + ("" if finish == "stop" else text.add(picked.id))
        if text.stopped:
            finished[answer] = "stop"
        elif finish is not None:
            said[answer] += text.end()
            finished[answer] = finish
    for answer, some in tokens.items():
        yield Piece(answer, said[answer], tuple(some), finished.get(answer), scores)
