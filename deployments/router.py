"""The Router: tokenise, admit, batch, dispatch. The way of a query is `embed`, top to bottom."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deployments.batcher import Answer, Job
from deployments.device_detector import Topology
from deployments.errors import (
    Busy,
    DeadlineExceeded,
    InvalidInput,
    ReplicaLost,
    SettingsError,
    TimedOut,
    Unavailable,
    WindveError,
    WrongKind,
)
from deployments.metrics import RouterMetrics, counted, publish_again_and_again
from deployments.model_files import ModelCard, read_model_card
from deployments.pairs import Pair
from deployments.pool import Pool
from deployments.queue_manager import Full, Permit, QueueManager, Short
from deployments.retry_after import retry_after_s
from deployments.settings import Kind, RouterConfig, Settings
from deployments.shortage import Shortage
from deployments.tokenizer import Query, Side, Token, TokenIds, Tokenizer, check_texts
from deployments.trial import Trial

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

# Tokenising this many characters takes about a millisecond: more than that leaves the event loop.
_CHARACTERS_ON_LOOP = 4_000
_CHARACTERS_TO_TOKENIZE = 100_000  # each token that is told costs some hundred bytes, and time of the interpreter
_NUMBERS_OF_TOKENS = 4_000_000  # 10,000 tokens of 384 numbers; as text about 45 MB
_TRIAL_LEASE_S = 10.0  # trial depths lapse so long after the last trial query: a run that was killed leaves nothing
_TRIES = 2  # a query whose replica died is admitted once more
_NEWS_S = 0.05  # but not sooner: a node that dies takes several replicas with it, and the news of each comes by itself


@dataclass(frozen=True, slots=True)
class Embedded:
    """A request's answer: unit `vectors` float32 [dimension] in the order of its queries, the `norms` they had, and
    where the time went (seconds, the slowest query's).

    For other kinds than embedding `vectors` are logits float32 [labels], or rows for `sparse.unpack`.
    """

    vectors: Sequence[npt.NDArray[np.float32]]
    norms: Sequence[float]
    pools: tuple[str, ...]
    tokens: int
    characters: int
    tokenization_s: float
    queue_s: float
    compute_s: float
    total_s: float


@dataclass(slots=True, eq=False)
class _BulkRequest:
    """A bulk request: the queries that wait for a permit, those that have one, and word that it should look again."""

    missing: deque[int]
    news: asyncio.Event
    jobs: dict[Job, int] = field(default_factory=dict)


class Router:
    """One replica of the Router deployment. `handles[pool]` is (name, handle) of the pool's embedder deployment."""

    def __init__(
        self, settings: Settings, topology: Topology, handles: Mapping[str, tuple[str, DeploymentHandle[Any]]]
    ) -> None:
        import ray
        from ray import serve
        from ray.serve import metrics as instruments

        self.pools: dict[str, Pool] = {}
        context = serve.get_replica_context()
        self.settings = settings
        self.topology = topology
        self.card: ModelCard = read_model_card(settings.model)
        self.config: RouterConfig | None = None
        self.config_problem: str | None = None
        self.started = time.time()
        self.refused = 0
        self._tokenizer = Tokenizer(self.card)
        self._tokenizer.encode(["warm"], truncate=True)
        self._queue = QueueManager(topology.pools, self._on_release, self._on_low)
        self._bulk: deque[_BulkRequest] = deque()
        self._trial_depths: Mapping[str, int] | None = None
        self._trial_ends = 0.0
        self._handles = handles
        self.replica = context.replica_tag
        self._actor = context.replica_id.to_full_id_str()
        self._node = ray.get_runtime_context().get_node_id()
        self._shortage = Shortage(self._queue, {})
        self._shares = False  # there are other Routers
        self._census: dict[str, dict[str, Any]] = {}
        self.metrics = RouterMetrics(instruments)

    async def reconfigure(self, user_config: Any) -> None:
        """Called by Serve with the `user_config`: at the start, and in place whenever it changes.

        At the start a bad config refuses to start (SettingsError names the key). Later it changes nothing: what runs
        goes on with the config before it, and the log and `/info` say what is wrong with the new one.
        """
        try:
            config = RouterConfig.parse(user_config, self.topology.pools)
        except SettingsError as error:
            if self.config is None:
                raise
            self.config_problem = str(error)
            logger.error("the new user_config is refused, the one before stays in force: %s", error)  # noqa: TRY400
            return
        if not self.pools:
            self._connect()
        self.config, self.config_problem = config, None
        self._queue.bulk_share = config.bulk.share
        for name, pool in self.pools.items():
            pool_config = config.pool(name)
            assert pool_config is not None
            pool.configure(pool_config)
        self._try_depths(None)
        logger.info("depths in force: %s", {name: pool.config.queue_depth for name, pool in self.pools.items()})
        self._on_release()

    def _connect(self) -> None:
        for name, (deployment, handle) in self._handles.items():
            self.pools[name] = Pool(
                name,
                deployment=deployment,
                handle=handle,
                queue=self._queue,
                router=self.replica,
                actor=self._actor,
                node=self._node,
                on_change=self._on_change,
            )
        self._shortage.tenancies = {name: pool.tenancy for name, pool in self.pools.items()}
        for pool in self.pools.values():
            pool.connect()
        asyncio.get_running_loop().call_soon(publish_again_and_again, self._publish)  # by then there is a config

    @counted
    async def embed(
        self,
        queries: Sequence[Query],
        *,
        kinds: tuple[Kind, ...] = ("embedding",),
        truncate: bool | None = None,
        truncation_direction: Side = "right",
        prompt_name: str | None = None,
        bulk: bool = False,
        trial: Trial | None = None,
        timeout_s: float | None = None,
        each_token: bool = False,
    ) -> Embedded:
        """Answer one request of 1..n queries, and count it: embed them, or what else the model is for.

        `kinds` of model are those whose answers the caller understands.
        `truncate` cuts too long inputs (None: as `limits.auto_truncate` says) on the side that `truncation_direction`
        says; `prompt_name` is the prompt to put before each (None: the default, if any); `bulk` asks to be bulk;
        `trial` asks to be admitted by other depths, and is never bulk; `timeout_s` is how long the caller will wait,
        where that is less than the settings allow: queries that still wait then are given up, and no device sees them.
        `each_token` asks for the vectors of a query's tokens, [tokens, dimension], not normalised, in place of one.
        Raises WrongKind, InvalidInput, Forbidden, Busy, Unavailable, TimedOut, DeadlineExceeded or EngineFailed.
        """
        assert self.config is not None
        if self.card.kind not in kinds:
            raise WrongKind(
                f"this is for models of the kind {' or '.join(kinds)}; {self.card.name} is {self.card.kind}"
            )
        started = time.monotonic()
        if timeout_s is not None and timeout_s <= 0:
            raise self._too_late(timeout_s)
        prompt = self._prompt(prompt_name)
        if trial is not None:
            self._enter_trial(trial)
            bulk = False
            free = self._queue.trial_free(trial.only)
        else:
            free = self._queue.free
            bulk = bulk or len(queries) > self._queue.capacity
        if not bulk and len(queries) > free and not self._may_ask(trial):
            raise self._refusal(Full(len(queries), free))  # before any expensive work
        most_s = self.config.bulk.timeout_s if bulk else self.config.request_timeout_s
        try:
            async with asyncio.timeout(most_s if timeout_s is None else min(timeout_s, most_s)):
                cut = self.settings.limits.auto_truncate if truncate is None else truncate
                token_ids = await self._tokenise(queries, prompt, cut, truncation_direction)
                tokenised = time.monotonic()
                if each_token:
                    self._check_numbers(token_ids)
                answers = await (
                    self._embed_bulk(token_ids, each_token)
                    if bulk
                    else self._embed_at_once(token_ids, trial, each_token)
                )
        except TimeoutError:
            if timeout_s is not None and timeout_s < most_s:
                raise self._too_late(timeout_s) from None
            key = "bulk.timeout_s" if bulk else "request_timeout_s"
            raise TimedOut(f"no answer within {most_s:g} s ({key}); please try again later") from None
        total_s = time.monotonic() - started
        queue_s = max(answer.queue_s for answer in answers)
        self.metrics.answered([answer.pool for answer in answers], tokenization_s=tokenised - started, queue_s=queue_s)
        if not bulk and trial is None:
            self.metrics.promised(total_s, self.config.slo_s)
        return Embedded(
            vectors=[answer.vector for answer in answers],
            norms=[answer.norm for answer in answers],
            pools=tuple(sorted({answer.pool for answer in answers})),
            tokens=sum(map(len, token_ids)),
            characters=sum(len(query) for query in queries if isinstance(query, str | Pair)),
            tokenization_s=tokenised - started,
            queue_s=queue_s,
            compute_s=max(answer.compute_s for answer in answers),
            total_s=total_s,
        )

    async def tokenize(
        self, texts: Sequence[str], *, special_tokens: bool = True, prompt_name: str | None = None
    ) -> list[list[Token]]:
        """Each text's tokens, its prompt's too, nothing cut. Raises EmptyInput or InvalidInput."""
        prompt = self._prompt(prompt_name)
        characters = sum(map(len, texts)) + len(prompt) * len(texts)
        if characters > _CHARACTERS_TO_TOKENIZE:
            raise InvalidInput(
                f"the inputs have {characters} characters and {_CHARACTERS_TO_TOKENIZE} are tokenized in one request; "
                "send fewer at once",
                param="inputs",
            )
        check_texts(texts)
        prompted = [prompt + text for text in texts]
        return await asyncio.to_thread(self._tokenizer.tokens, prompted, special_tokens=special_tokens)

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Token ids back into texts. Raises EmptyInput or InvalidInput."""
        return await asyncio.to_thread(self._tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)

    def _prompt(self, name: str | None) -> str:
        """What is put before a text. Raises InvalidInput."""
        prompts = self.card.prompts
        name = self.card.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in prompts:
            there = f"only {', '.join(prompts)}" if prompts else "the model has none"
            raise InvalidInput(f"there is no prompt named '{name}': {there}", param="prompt_name")
        return prompts[name]

    def _check_numbers(self, token_ids: Sequence[TokenIds]) -> None:
        """Raises InvalidInput where the vectors of all tokens would be too many numbers for one answer."""
        tokens = sum(map(len, token_ids))
        most = max(_NUMBERS_OF_TOKENS // self.card.dimension, self.card.max_tokens)
        if tokens > most:
            raise InvalidInput(
                f"the inputs have {tokens} tokens, and the vectors of {most} are answered at once; send fewer at once",
                param="inputs",
            )

    @staticmethod
    def _too_late(timeout_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no answer within the {timeout_s:g} s that the request allows; allow more, or send less"
        )

    def _enter_trial(self, trial: Trial) -> None:
        """Raises Forbidden or InvalidInput."""
        assert self.config is not None
        trial.check(self.config.trial, self.topology.pools, time.time())
        loop = asyncio.get_running_loop()
        self._trial_ends = loop.time() + _TRIAL_LEASE_S
        if self._trial_depths is None:
            loop.call_at(self._trial_ends, self._end_trial, context=contextvars.Context())
        if trial.depths != self._trial_depths:
            self._try_depths(trial.depths)

    def _end_trial(self) -> None:
        loop = asyncio.get_running_loop()
        if self._trial_depths is not None and loop.time() < self._trial_ends:
            loop.call_at(self._trial_ends, self._end_trial, context=contextvars.Context())
        else:
            self._try_depths(None)

    def _try_depths(self, depths: Mapping[str, int] | None) -> None:
        self._trial_depths = depths
        self._queue.set_trial(depths)
        for name, pool in self.pools.items():
            pool.try_depth(None if depths is None else depths.get(name, 0))

    async def _tokenise(self, queries: Sequence[Query], prompt: str, truncate: bool, side: Side) -> list[TokenIds]:
        if sum(map(len, queries)) + len(prompt) * len(queries) <= _CHARACTERS_ON_LOOP:
            return self._token_ids(queries, prompt, truncate, side)
        return await asyncio.to_thread(self._token_ids, queries, prompt, truncate, side)

    def _token_ids(self, queries: Sequence[Query], prompt: str, truncate: bool, side: Side) -> list[TokenIds]:
        if prompt:
            queries = [prompt + self._text(query, index) for index, query in enumerate(queries)]
        if all(isinstance(query, str) for query in queries):
            return self._tokenizer.encode(queries, truncate=truncate, side=side)  # type: ignore[arg-type]
        if all(isinstance(query, Pair) for query in queries):
            return self._tokenizer.encode_pairs(queries, truncate=truncate, side=side)  # type: ignore[arg-type]
        return [self._ids_of(query, index, truncate, side) for index, query in enumerate(queries)]

    def _ids_of(self, query: Query, index: int, truncate: bool, side: Side) -> TokenIds:
        if isinstance(query, str):
            return self._tokenizer.encode([query], truncate=truncate, side=side, first=index)[0]
        if isinstance(query, Pair):
            return self._tokenizer.encode_pairs([query], truncate=truncate, side=side, first=index)[0]
        return self._tokenizer.check(query, index, truncate=truncate, side=side)

    def _text(self, query: Query, index: int) -> str:
        """A query that gets a prompt as text; token ids become the text that they stand for, as with TEI."""
        if isinstance(query, str):
            check_texts([query], index)
            return query
        assert not isinstance(query, Pair)  # kinds that read pairs have no prompts
        return self._tokenizer.decode([query], skip_special_tokens=True)[0]

    async def _embed_at_once(
        self, token_ids: Sequence[TokenIds], trial: Trial | None, each_token: bool
    ) -> list[Answer]:
        """Admit all queries in one decision or none. Those whose replica died with them are admitted once more."""
        answers: dict[int, Answer] = {}
        left = list(range(len(token_ids)))
        lost: ReplicaLost | None = None
        for _ in range(_TRIES):
            if lost is not None:
                await asyncio.sleep(_NEWS_S)
            permits = self._admit(len(left), trial)
            if isinstance(permits, Short):  # never where this Router is alone
                only = None if trial is None else trial.only
                permits = await self._shortage.decide(len(left), trial=trial is not None, only=only)
            if isinstance(permits, Full):
                raise self._refusal(permits)
            ran = await self._run([token_ids[i] for i in left], permits, each_token)
            outcomes = dict(zip(left, ran, strict=True))
            for i, outcome in outcomes.items():
                if isinstance(outcome, Answer):
                    answers[i] = outcome
                elif isinstance(outcome, ReplicaLost):
                    lost = outcome
                else:
                    raise outcome
            left = [i for i in left if i not in answers]
            if not left:
                return [answers[i] for i in range(len(token_ids))]
        assert lost is not None
        raise lost

    def _admit(self, queries: int, trial: Trial | None) -> list[Permit] | Full | Short:
        return self._queue.admit(queries) if trial is None else self._queue.admit_trial(queries, trial.only)

    def _may_ask(self, trial: Trial | None) -> bool:
        """Other Routers may hold places that this one lacks, and not too many queries wait for these already."""
        if trial is not None:
            return self._queue.trial_has_more(trial.only)
        return self._queue.has_more() and self._shortage.waiting < self._queue.capacity

    async def _run(
        self, token_ids: Sequence[TokenIds], permits: Sequence[Permit], each_token: bool
    ) -> list[Answer | BaseException]:
        """Hand admitted queries to their pools' batchers and wait for all; if the caller goes, so do they."""
        jobs = self._submit(token_ids, permits, each_token)
        try:
            if len(jobs) == 1:  # the common case, without a gather
                return [await jobs[0].answer]
            return await asyncio.gather(*(job.answer for job in jobs), return_exceptions=True)
        except WindveError as error:
            return [error]
        except asyncio.CancelledError:
            self._leave(jobs)
            raise

    def _submit(self, token_ids: Sequence[TokenIds], permits: Sequence[Permit], each_token: bool) -> list[Job]:
        """From here on each permit is its job's, and the batcher releases it."""
        loop = asyncio.get_running_loop()
        pairs = zip(token_ids, permits, strict=True)
        jobs = [Job(ids, permit, loop.create_future(), each_token) for ids, permit in pairs]
        for name, pool in self.pools.items():
            mine = [job for job in jobs if job.permit.pool == name]
            if mine:
                pool.batcher.submit(mine)
        return jobs

    def _leave(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these jobs any more."""
        for job in jobs:
            if not job.answer.cancel() and not job.answer.cancelled():
                job.answer.exception()  # seen, so that asyncio does not complain
        for name, pool in self.pools.items():
            pool.batcher.leave([job for job in jobs if job.permit.pool == name])

    async def _embed_bulk(self, token_ids: Sequence[TokenIds], each_token: bool) -> list[Answer]:
        """Let the queries in as room comes free, after the single ones, first come first served among bulk."""
        assert self.config is not None
        if not self._queue.capacity:
            raise self._unavailable()
        waiting = sum(len(request.missing) for request in self._bulk)
        if waiting + len(token_ids) > self.config.bulk.max_waiting:
            self.refused += 1
            share = self.config.bulk.share
            raise Busy(
                f"{waiting} bulk queries wait already (bulk.max_waiting: {self.config.bulk.max_waiting}); "
                "please send fewer at once or come back later",
                retry_after_s=self._retry_after_s(waiting + len(token_ids), share=share),
            )
        request = _BulkRequest(deque(range(len(token_ids))), asyncio.Event())
        self._bulk.append(request)
        try:
            return await self._fill(request, token_ids, each_token)
        finally:
            self._leave(list(request.jobs))
            self._leave_waiting_room(request)

    async def _fill(self, request: _BulkRequest, token_ids: Sequence[TokenIds], each_token: bool) -> list[Answer]:
        """Submit what gets permits, collect what is answered, take up again what a dead replica lost, until all is."""
        answers: dict[int, Answer] = {}
        tries = [0] * len(token_ids)
        while len(answers) < len(token_ids):
            request.news.clear()
            if request.missing and self._bulk[0] is request:
                permits = self._queue.admit_bulk(len(request.missing))
                indices = [request.missing.popleft() for _ in permits]
                jobs = self._submit([token_ids[i] for i in indices], permits, each_token)
                for index, job in zip(indices, jobs, strict=True):
                    tries[index] += 1
                    request.jobs[job] = index
                    job.answer.add_done_callback(lambda _: request.news.set())
                if request.missing:
                    self._ask_ahead(len(request.missing))
                else:
                    self._leave_waiting_room(request)
            if self._collect(request, answers, tries):
                await asyncio.sleep(_NEWS_S)
            if request.missing and request not in self._bulk:
                self._bulk.append(request)
            elif len(answers) < len(token_ids):
                await request.news.wait()
        return [answers[index] for index in range(len(token_ids))]

    @staticmethod
    def _collect(request: _BulkRequest, answers: dict[int, Answer], tries: Sequence[int]) -> bool:
        """Take what is answered. Returns whether a replica died with queries, which are then missing again."""
        lost = False
        for job in [job for job in request.jobs if job.answer.done()]:
            index = request.jobs.pop(job)
            failed = job.answer.exception()
            if failed is None:
                answers[index] = job.answer.result()
            elif isinstance(failed, ReplicaLost) and tries[index] < _TRIES:
                request.missing.append(index)
                lost = True
            else:
                raise failed
        return lost

    def _leave_waiting_room(self, request: _BulkRequest) -> None:
        if request in self._bulk:
            self._bulk.remove(request)
            self._on_release()

    def _on_release(self) -> None:
        """Room may have come free: the first bulk request looks again."""
        if self._bulk:
            self._bulk[0].news.set()
        if self._shares:
            self._shortage.serve()
            for pool in self.pools.values():
                pool.tenancy.released()

    def _on_change(self) -> None:
        """Replicas or places have come or gone."""
        self._shares = any(pool.tenancy.holdings.shared for pool in self.pools.values())
        self._on_release()

    def _on_low(self, pool: str) -> None:
        self.pools[pool].tenancy.ask_ahead()

    def _ask_ahead(self, queries: int) -> None:
        for pool in self.pools.values():
            pool.tenancy.ask_ahead(queries)

    def _refusal(self, full: Full) -> Busy | Unavailable:
        if not self._queue.capacity:
            return self._unavailable()
        self.refused += 1
        retry_after_s = self._retry_after_s(full.asked)
        depths = " and ".join(f"{name} {self._queue.capacity_of(name)}" for name in self.pools)
        return Busy(
            f"busy: {full.asked} asked for, {full.free} places free of {depths}; come back in {retry_after_s:.2f} s",
            retry_after_s=retry_after_s,
        )

    def _unavailable(self) -> Unavailable:
        return Unavailable("no pool can answer now: no live replica with a queue depth above 0; please try again later")

    def _retry_after_s(self, queries: int, *, share: float = 1.0) -> float:
        return retry_after_s(queries, self._queue.free, [pool.load(share) for pool in self.pools.values()])

    @property
    def trial_depths(self) -> Mapping[str, int] | None:
        """Trial depths in force here, or at another Router (by the last census)."""
        if self._trial_depths is not None:
            return self._trial_depths
        tried = {
            pool: told["trial_depth"]
            for pool, census in self._census.items()
            for told in census.values()
            if told["trial_depth"] is not None
        }
        return tried or None

    @property
    def can_answer(self) -> bool:
        return self._queue.capacity > 0

    @property
    def capacity(self) -> int:
        """Queries that may be in flight at once, all pools together."""
        return self._queue.capacity

    async def take_census(self) -> None:
        """Before `describe_pools`: what other Routers have in the pools. Costs nothing where there are none."""
        pools = self.pools if self._shares else {}
        told = await asyncio.gather(*(pool.census() for pool in pools.values()))
        self._census = dict(zip(pools, told, strict=True))

    def __del__(self) -> None:
        """Called by Serve when it shuts this replica down, after the last answer: its places go back."""
        for pool in self.pools.values():
            pool.tenancy.leave()

    async def check_health(self) -> None:
        """Called by Serve: a Router whose loop turns is healthy; pools have their own checks."""

    def _publish(self) -> None:
        assert self.config is not None
        self.metrics.publish(self.config.slo_s, {name: pool.state() for name, pool in self.pools.items()})

    def describe_pools(self) -> dict[str, dict[str, Any]]:
        """Each pool as `/info` shows it."""
        return {name: self._describe(pool) for name, pool in self.pools.items()}

    def _describe(self, pool: Pool) -> dict[str, Any]:
        alpha_s, beta_s = pool.latency_model
        counters = pool.batcher.counters
        census = self._census.get(pool.name, {})
        owners = {replica: {"places": told} for replica, told in census.items()}
        routers = {name: word for told in census.values() for name, word in told["routers"].items()}
        routers[self.replica] = {"in_flight": self._queue.in_flight(pool.name), "waiting": pool.batcher.waiting}
        return {
            "queue_depth": pool.config.queue_depth,
            "live_replicas": len(pool.members),
            "expected_replicas": self.topology.replicas[pool.name],
            # of all Routers; the counters below are this one's
            "in_flight": sum(router["in_flight"] for router in routers.values()),
            "waiting": sum(router["waiting"] for router in routers.values()),
            "routers": routers,
            "latency_model": {
                "alpha_s": round(alpha_s, 6),
                "beta_s": round(beta_s, 6),
                "source": "calibrated" if pool.calibrated else "measured at warm-up",
            },
            "queries": counters.queries,
            "batches": counters.batches,
            "failed_batches": counters.failed_batches,
            "largest_batch": counters.largest_batch,
            "questions": pool.tenancy.asks,
            "replicas": {
                replica: {
                    **member,
                    **owners.get(replica, {}),
                    "channel": f"port {member['channel']['port']}",
                    "queries": counters.by_replica.get(replica, 0),
                }
                for replica, member in pool.members.items()  # the channel's secret stays here
            },
        }
