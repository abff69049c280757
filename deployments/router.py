"""The Router: tokenise, place, answer. The way of a query is `embed`, top to bottom.

It decides nothing about room: each replica admits for itself (`queueing.schedule`). A query is offered to the
accelerators' replicas, the one first that would finish first, then to the CPUs', and is busy when all have refused. A
replica that said when it opens again is not asked before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

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
from deployments.metrics import RouterMetrics, publish_again_and_again
from deployments.model_files import ModelCard, read_model_card
from deployments.pairs import Pair
from deployments.pool import Link, Pool
from deployments.queueing.schedule import PATIENT
from deployments.settings import Kind, RouterConfig, Settings
from deployments.tokenising import ON_LOOP, Tokenising, estimated_tokens
from deployments.tokenizer import Query, Side, Token, TokenIds, Tokenizer, check_texts
from deployments.transport.channel import Placed, Refused
from deployments.transport.frames import CUT_BYTES, Answered, Offer
from deployments.trial import Trial

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

_CHARACTERS_TO_TOKENIZE = 100_000  # each token that is told costs some hundred bytes, and time of the interpreter
_NUMBERS_OF_TOKENS = 4_000_000  # 10,000 tokens of 384 numbers; as text about 45 MB
_TRIES = 2  # a query whose replica died is admitted once more
_NEWS_S = 0.05  # wait so long before: a node that dies takes several replicas with it, and the news of each comes alone
_ASKED = 4  # replicas of a pool, at most, for one query
_RETRY_LATER = 0.02  # of the SLO after the opening, at least the cost of a query: at the opening itself many come back
_SHORTEST_RETRY_S = 0.01
_WAY_SLOS = 2.0  # the way there and back is believed at once, and forgotten over so many SLOs: it is longest for the
# last answers of a run that come together, and the first of the next run say nothing about these
_LONGEST_WAY = 0.25  # of the SLO
_AHEAD, _SPARE = 1.5, 8  # queries are tokenised for so many times the room, and a few more: an estimate may be wrong
_BULK_LOOK = 0.1  # of the SLO: so often a bulk request that has nothing anywhere asks again


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a request is to be answered. `kinds` of model are those whose answers the caller understands.

    `truncate` cuts too long inputs (None: as `limits.auto_truncate` says) on the side that `truncation_direction` says;
    `prompt_name` is the prompt to put before each (None: the default, if any); `bulk` asks to be bulk; `trial` asks to
    be admitted by a calibration's rule, and is never bulk; `timeout_s` is how long the caller will wait, its deadline
    in place of the SLO. `each_token` asks for the vectors of a query's tokens, [tokens, dimension], not normalised.
    """

    kinds: tuple[Kind, ...] = ("embedding",)
    truncate: bool | None = None
    truncation_direction: Side = "right"
    prompt_name: str | None = None
    bulk: bool = False
    trial: Trial | None = None
    timeout_s: float | None = None
    each_token: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    """One request on its way. Times are the loop's."""

    queries: Sequence[Query]
    wanted: Wanted
    prompt: str
    started: float
    due: float
    patient: bool
    bulk: bool
    ids: list[TokenIds] = field(default_factory=list)
    tokenised: float = 0.0
    retry_s: float = math.inf  # the earliest that a replica that refused opens
    asked: int = 0  # replicas, or known to be full
    pool: str | None = None  # of the last of them
    never: int = 0  # of these, those on which it would never end in time


@dataclass(slots=True, eq=False)
class _Part:
    """Some queries of a request at one replica."""

    link: Link
    pool: str
    placed: Placed
    indices: list[int]


@dataclass(slots=True, eq=False)
class _Bulk:
    """A bulk request: the queries that are nowhere yet, and word that it should look again."""

    request: _Request
    missing: deque[int]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    parts: list[_Part] = field(default_factory=list)


_Answers = dict[int, tuple[str, Answered]]  # by the query's index: the pool that answered, and what


class Router:
    """One replica of the Router deployment. `handles[pool]` is (name, handle) of the pool's embedder deployment."""

    def __init__(
        self, settings: Settings, topology: Topology, handles: Mapping[str, tuple[str, DeploymentHandle[Any]]]
    ) -> None:
        import ray
        from ray import serve
        from ray.serve import metrics as instruments

        self.pools: dict[str, Pool] = {}
        self.settings = settings
        self.topology = topology
        self.card: ModelCard = read_model_card(settings.model)
        self.config: RouterConfig  # once `reconfigure` was called
        self.config_problem: str | None = None
        self.started = time.time()
        self.refused = 0
        self.replica = serve.get_replica_context().replica_tag
        self.metrics = RouterMetrics(instruments)
        self._tokenizer = Tokenizer(self.card)
        self._tokenizer.encode(["warm"], truncate=True)
        self._tokenising = Tokenising()
        self._handles = handles
        self._node = ray.get_runtime_context().get_node_id()
        self._bulk: deque[_Bulk] = deque()
        self._way_s = 0.0  # what the way to a replica and back takes of a deadline
        self._way_at = 0.0
        self._trial_at = -math.inf

    async def reconfigure(self, user_config: Any) -> None:
        """Called by Serve with the `user_config`: at the start, and in place whenever it changes.

        At the start a bad config refuses to start (SettingsError names the key). Later it changes nothing: what runs
        goes on with the config before it, and the log and `/info` say what is wrong with the new one.
        """
        try:
            config = RouterConfig.parse(user_config, self.topology.pools)
        except SettingsError as error:
            if not self.pools:
                raise
            self.config_problem = str(error)
            logger.error("the new user_config is refused, the one before stays in force: %s", error)  # noqa: TRY400
            return
        self.config, self.config_problem = config, None
        first = not self.pools
        if first:
            self.pools = {name: self._pool(name) for name in self._handles}
        terms = {"slo_s": config.slo_s, "admission": config.admission, "bulk_share": config.bulk.share}
        for name, pool in self.pools.items():
            pool.configure(config.pool(name), terms)
        if first:
            for pool in self.pools.values():
                pool.connect()
            asyncio.get_running_loop().call_soon(publish_again_and_again, self._publish)
        depths = {name: pool.config.queue_depth for name, pool in self.pools.items()}
        logger.info("in force: admission by %s, SLO %g s, depths %s", config.admission, config.slo_s, depths)

    def _pool(self, name: str) -> Pool:
        deployment, handle = self._handles[name]
        return Pool(
            name,
            deployment=deployment,
            handle=handle,
            router=self.replica,
            node=self._node,
            on_change=self._look_again,
        )

    async def embed(self, queries: Sequence[Query], wanted: Wanted) -> Embedded:
        """Answer one request of 1..n queries, and count it: embed them, or what else the model is for.

        Raises WrongKind, InvalidInput, Forbidden, Busy, Unavailable, TimedOut, DeadlineExceeded or EngineFailed.
        """
        try:
            return await self._embed(queries, wanted)
        except BaseException as error:
            self.metrics.failed(error, len(queries))
            raise

    async def _embed(self, queries: Sequence[Query], wanted: Wanted) -> Embedded:
        request = self._open(queries, wanted)
        most_s = self._most_s(request)
        try:
            async with asyncio.timeout_at(request.started + min(most_s, wanted.timeout_s or most_s)) as timeout:
                self._refuse_early(request)  # before any expensive work
                await self._tokenise(request)
                if (longer_s := self._most_s(request)) > most_s:  # it has turned out to be bulk
                    most_s = longer_s
                    timeout.reschedule(request.started + min(most_s, wanted.timeout_s or most_s))
                answers = await (self._answer_bulk(request) if request.bulk else self._answer(request))
        except TimeoutError:
            raise self._gave_up(request, most_s) from None
        return self._embedded(request, answers)

    def _open(self, queries: Sequence[Query], wanted: Wanted) -> _Request:
        """Raises WrongKind, InvalidInput, Forbidden or DeadlineExceeded."""
        if self.card.kind not in wanted.kinds:
            kinds = " or ".join(wanted.kinds)
            raise WrongKind(f"this is for models of the kind {kinds}; {self.card.name} is {self.card.kind}")
        if wanted.timeout_s is not None and wanted.timeout_s <= 0:
            raise self._too_late(wanted.timeout_s)
        prompt = self._prompt(wanted.prompt_name)
        now, slo_s = asyncio.get_running_loop().time(), self.config.slo_s
        allowed_s = slo_s if wanted.timeout_s is None else min(wanted.timeout_s, self.config.request_timeout_s)
        if wanted.trial is not None:
            self._enter_trial(wanted.trial)
            allowed_s = wanted.trial.finish_s or allowed_s
        patient = wanted.trial is None and self.config.admission == "finish" and allowed_s > PATIENT * slo_s
        bulk = wanted.bulk and wanted.trial is None
        return _Request(queries, wanted, prompt, now, now + allowed_s, patient, bulk)

    def _most_s(self, request: _Request) -> float:
        return self.config.bulk.timeout_s if request.bulk else self.config.request_timeout_s

    def _gave_up(self, request: _Request, most_s: float) -> DeadlineExceeded | TimedOut:
        timeout_s = request.wanted.timeout_s
        if timeout_s is not None and timeout_s < most_s:
            return self._too_late(timeout_s)
        key = "bulk.timeout_s" if request.bulk else "request_timeout_s"
        return TimedOut(f"no answer within {most_s:g} s ({key}); please try again later")

    def _embedded(self, request: _Request, answers: _Answers) -> Embedded:
        now = asyncio.get_running_loop().time()
        in_order = [answers[index] for index in range(len(request.queries))]
        pools, told = [pool for pool, _ in in_order], [answer for _, answer in in_order]
        total_s, tokenization_s = now - request.started, request.tokenised - request.started
        queue_s = max(answer.queue_s for answer in told)
        self.metrics.answered(pools, tokenization_s=tokenization_s, queue_s=queue_s)
        if not (request.bulk or request.wanted.trial):
            allowed_s = self.config.slo_s if request.wanted.timeout_s is None else request.due - request.started
            self.metrics.promised(total_s, allowed_s)
        each_token = request.wanted.each_token
        return Embedded(
            vectors=[answer.unit if each_token else answer.unit[0] for answer in told],
            norms=[1.0 if each_token else float(answer.norms[0]) for answer in told],
            pools=tuple(sorted(set(pools))),
            tokens=sum(map(len, request.ids)),
            characters=sum(len(query) for query in request.queries if isinstance(query, str | Pair)),
            tokenization_s=tokenization_s,
            queue_s=queue_s,
            compute_s=max(answer.compute_s for answer in told),
            total_s=total_s,
        )

    # --- tokenise -----------------------------------------------------------------------------------------------------

    async def _tokenise(self, request: _Request) -> None:
        """Fill `request.ids`, and see whether it is too large to be admitted at once."""
        wanted, prompt = request.wanted, request.prompt
        cut = self.settings.limits.auto_truncate if wanted.truncate is None else wanted.truncate

        def encode(queries: Sequence[Query], first: int) -> list[TokenIds]:
            return self._token_ids(queries, prompt, cut, wanted.truncation_direction, first)

        characters = sum(map(len, request.queries)) + len(prompt) * len(request.queries)
        request.ids = await self._tokenising.encode(request.queries, characters, encode)
        request.tokenised = asyncio.get_running_loop().time()
        if wanted.each_token:
            self._check_numbers(request.ids)
        if len(request.queries) > 1 and wanted.trial is None and not request.bulk:
            mean = sum(map(len, request.ids)) / len(request.ids)
            request.bulk = len(request.queries) > self._capacity(mean, request)

    def _token_ids(
        self, queries: Sequence[Query], prompt: str, truncate: bool, side: Side, first: int
    ) -> list[TokenIds]:
        if prompt:
            queries = [prompt + self._text(query, index) for index, query in enumerate(queries, first)]
        found: list[TokenIds] = []
        for kind, group in itertools.groupby(queries, type):
            some: Any = list(group)
            at = first + len(found)
            if kind is str:
                found += self._tokenizer.encode(some, truncate=truncate, side=side, first=at)
            elif kind is Pair:
                found += self._tokenizer.encode_pairs(some, truncate=truncate, side=side, first=at)
            else:
                check = self._tokenizer.check
                found += [check(ids, index, truncate=truncate, side=side) for index, ids in enumerate(some, at)]
        return found

    def _text(self, query: Query, index: int) -> str:
        """A query that gets a prompt as text; token ids become the text that they stand for, as with TEI."""
        if isinstance(query, str):
            check_texts([query], index)
            return query
        assert not isinstance(query, Pair)  # kinds that read pairs have no prompts
        return self._tokenizer.decode([query], skip_special_tokens=True)[0]

    # --- place --------------------------------------------------------------------------------------------------------

    def _refuse_early(self, request: _Request) -> None:
        """Raises Busy or Unavailable where no replica would admit it, before it is tokenised."""
        if request.wanted.trial is not None:
            return
        if not self.can_answer:
            raise self._unavailable()
        queries = request.queries
        if request.bulk:
            self._check_bulk(len(queries))
            return
        if len(queries) > 1 and len(queries) > self._capacity(self._estimated_tokens(queries), request):
            self._check_bulk(len(queries))
            return
        if request.patient:
            return  # it waits behind the others
        now = asyncio.get_running_loop().time()
        if all(pool.is_full(now) for pool in self.pools.values() if pool.is_open):
            for _ in self._candidates(request, [round(self._estimated_tokens(queries))] * len(queries)):
                pass  # each is full, and is told what it missed
            raise self._busy(request)
        characters = sum(map(len, queries)) + len(request.prompt) * len(queries)
        if characters > ON_LOOP:
            left_s, tokens = request.due - now, self._estimated_tokens(queries)
            room = sum(pool.room_queries(now, tokens, left_s) for pool in self.pools.values())
            ahead = self._tokenising.queries + len(queries)
            if ahead > _AHEAD * room + _SPARE or self._tokenising.waiting_s > left_s:
                request.retry_s = self._tokenising.waiting_s
                raise self._busy(request)

    def _estimated_tokens(self, queries: Sequence[Query]) -> float:
        return estimated_tokens(queries, self.card.max_tokens)

    async def _answer(self, request: _Request) -> _Answers:
        """Admit all queries or none. What a dead replica lost is admitted once more, by the same deadline."""
        answers: _Answers = {}
        left = list(range(len(request.ids)))
        for attempt in range(1, _TRIES + 1):
            parts: list[_Part] = []
            try:
                await self._place(request, left, parts)
                for part in parts:
                    self._collect(request, part, await part.placed.outcome, answers)
                break
            except ReplicaLost:
                if attempt == _TRIES:
                    raise
                for part in parts:  # what the others answer counts
                    if isinstance(found := await _settled(part.placed), list):
                        self._collect(request, part, found, answers)
                left = [index for index in left if index not in answers]
                await asyncio.sleep(_NEWS_S)
            finally:
                for part in parts:  # whoever leaves early takes its queries along
                    part.link.call_off(part.placed)
        return answers

    async def _place(self, request: _Request, left: list[int], parts: list[_Part]) -> None:
        """Fill `parts` with places for all of `left`. Raises Busy, Unavailable or DeadlineExceeded where there are not,
        and ReplicaLost.
        """
        alone = len(left) == 1
        lost: ReplicaLost | None = None
        for pool, link in self._candidates(request, [len(request.ids[index]) for index in left]):
            offer = self._offer(request, pool.name, left, part=not alone)
            part = _Part(link, pool.name, link.offer(offer), left)
            parts.append(part)
            if alone:
                count = int(not isinstance(await part.placed.outcome, Refused))
            else:
                assert part.placed.admitted is not None
                count = await part.placed.admitted
            part.indices, left = left[:count], left[count:]
            if not count:
                parts.remove(part)
                found = await _settled(part.placed)
                lost = found if isinstance(found, ReplicaLost) else lost
                request.never += part.placed.never and self._is_too_long(request, link, offer)
            if not left:
                for held in parts[:-1]:
                    held.link.confirm(held.placed)
                return
            self._note_full(request, pool, link)
        if lost is not None:
            for held in parts:
                held.link.call_off(held.placed)
            parts.clear()
            raise lost
        raise self._busy(request)

    @staticmethod
    def _is_too_long(request: _Request, link: Link, offer: Offer) -> bool:
        """Not only for what is left of the time that the request allows."""
        model = link.view.model
        return model.beta_s + max(model.cost_s(len(ids)) for ids in offer.queries) > request.due - request.started

    def _candidates(self, request: _Request, lengths: Sequence[int]) -> Iterator[tuple[Pool, Link]]:
        """Replicas in the order in which they are asked: the accelerators', then the CPUs', those first that would
        finish first. One that said when it opens is left out until then, and told of the work that it missed.
        """
        trial = request.wanted.trial
        for pool in self.pools.values():
            if not (pool.is_open if trial is None else trial.may_use(pool.name)):
                continue
            loop = asyncio.get_running_loop()
            depth = pool.config.queue_depth if pool.by_count else None
            if trial is not None:
                depth = trial.depth(pool.name)
            slo_s = max(pool.terms["slo_s"], request.due - request.started)
            for link in pool.by_finish(loop.time(), lengths, _ASKED, slo_s=slo_s, depth=depth):
                now = loop.time()  # the one before has been asked meanwhile
                if trial is None and not request.patient and link.view.opens_s(now) > 0:
                    if request.pool != pool.name:
                        link.refuse_here(link.view.model.work_s(lengths))
                    self._note_full(request, pool, link)
                elif link.is_live:
                    yield pool, link

    def _note_full(self, request: _Request, pool: Pool, link: Link) -> None:
        request.asked += 1
        request.pool = pool.name
        now = asyncio.get_running_loop().time()
        later_s = max(_RETRY_LATER * self.config.slo_s, link.view.model.alpha_s)
        request.retry_s = min(request.retry_s, self._opens_s(link, now, request) + later_s)

    def _opens_s(self, link: Link, now: float, request: _Request) -> float:
        """Seconds until that replica would admit such a request."""
        lengths = list(map(len, request.ids)) or [1]
        misses_s = link.view.finish_s(now, lengths) - (request.due - request.started)
        return max(link.view.opens_s(now), misses_s)

    def _offer(self, request: _Request, pool: str, indices: Sequence[int], *, part: bool) -> Offer:
        trial = request.wanted.trial
        now = asyncio.get_running_loop().time()
        return Offer(
            number=0,
            left_s=max(0.0, request.due - now - (0.0 if request.bulk else self._way_s)),
            queries=[request.ids[index] for index in indices],
            each_token=request.wanted.each_token,
            bulk=request.bulk,
            part=part,
            again=request.pool == pool,
            depth=None if trial is None else trial.depth(pool),
            trial=trial is not None,
        )

    def _collect(self, request: _Request, part: _Part, found: list[Answered] | Refused, answers: _Answers) -> None:
        """Raises ReplicaLost where the replica has let a part go that waited too long for the others."""
        if isinstance(found, Refused):
            raise ReplicaLost("a part of the request waited too long for the rest; please try again")
        for index, answer in zip(part.indices, found, strict=True):
            answers[index] = (part.pool, answer)
        if not request.bulk:
            now, slo_s = part.placed.settled_at, self.config.slo_s
            way_s = now - part.placed.sent_at - max(a.stay_s for a in found)
            forgotten_s = self._way_s * math.exp((self._way_at - now) / (_WAY_SLOS * slo_s))
            self._way_s, self._way_at = min(max(way_s, forgotten_s), _LONGEST_WAY * slo_s), now

    # --- bulk ---------------------------------------------------------------------------------------------------------

    async def _answer_bulk(self, request: _Request) -> _Answers:
        """Let the queries in as the replicas have room for them, first come first served among bulk requests."""
        self._check_bulk(len(request.ids))
        request.due = request.started + min(self.config.bulk.timeout_s, request.wanted.timeout_s or math.inf)
        bulk = _Bulk(request, deque(range(len(request.ids))))
        self._bulk.append(bulk)
        try:
            return await self._fill(bulk)
        finally:
            for part in bulk.parts:
                part.link.call_off(part.placed)
                part.link.bulk_parts -= 1
            self._bulk.remove(bulk)
            self._look_again()

    async def _fill(self, bulk: _Bulk) -> _Answers:
        answers: _Answers = {}
        tries = [0] * len(bulk.request.ids)
        while len(answers) < len(tries):
            bulk.news.clear()
            if bulk.missing and self._next_bulk is bulk:
                self._spread(bulk, tries)
            if bulk.missing and not bulk.parts and not self.can_answer:
                raise self._unavailable()
            try:
                async with asyncio.timeout(_BULK_LOOK * self.config.slo_s if bulk.missing else None):
                    await bulk.news.wait()
            except TimeoutError:
                pass
            self._take_answers(bulk, answers, tries)
        return answers

    def _spread(self, bulk: _Bulk, tries: list[int]) -> None:
        """Offer each replica as much as it has room for; where nothing is anywhere, a query at least, for its word."""
        for name, pool in self.pools.items():
            for link in pool.live if pool.is_open else ():
                now = asyncio.get_running_loop().time()
                if link.bulk_again_at > now or link.view.is_silent(now):
                    continue
                indices: list[int] = []
                room_s, size = link.view.bulk_room_s(by_count=pool.by_count), 0
                while bulk.missing and size < CUT_BYTES:
                    ids = bulk.request.ids[bulk.missing[0]]
                    room_s -= link.view.model.alpha_s if pool.by_count else link.view.model.cost_s(len(ids))
                    if room_s < 0 and (indices or bulk.parts or link.bulk_parts):
                        break
                    size += ids.nbytes
                    indices.append(bulk.missing.popleft())
                if indices:
                    for index in indices:
                        tries[index] += 1
                    placed = link.offer(self._offer(bulk.request, name, indices, part=True))
                    assert placed.admitted is not None
                    placed.admitted.add_done_callback(lambda _: bulk.news.set())
                    placed.outcome.add_done_callback(lambda _: bulk.news.set())
                    bulk.parts.append(_Part(link, name, placed, indices))
                    link.bulk_parts += 1
        if not bulk.missing:
            self._look_again()

    def _take_answers(self, bulk: _Bulk, answers: _Answers, tries: list[int]) -> None:
        """What is answered, and what is missing again: not admitted, or lost with its replica."""
        for part in list(bulk.parts):
            admitted = part.placed.admitted
            if admitted is not None and admitted.done() and admitted.result() < len(part.indices):
                for index in reversed(part.indices[admitted.result() :]):
                    tries[index] -= 1
                    bulk.missing.appendleft(index)
                del part.indices[admitted.result() :]
            if not part.placed.ended:
                continue
            bulk.parts.remove(part)
            part.link.bulk_parts -= 1
            try:
                found = part.placed.outcome.result()
            except ReplicaLost:
                if any(tries[index] >= _TRIES for index in part.indices):
                    raise
                bulk.missing.extendleft(reversed(part.indices))
                continue
            if isinstance(found, Refused):
                part.link.bulk_again_at = asyncio.get_running_loop().time() + _BULK_LOOK * self.config.slo_s
            else:
                self._collect(bulk.request, part, found, answers)

    @property
    def _next_bulk(self) -> _Bulk | None:
        """The bulk request whose turn it is."""
        return next((bulk for bulk in self._bulk if bulk.missing), None)

    def _look_again(self) -> None:
        """There may be room for bulk requests."""
        if (bulk := self._next_bulk) is not None:
            bulk.news.set()

    # --- refuse -------------------------------------------------------------------------------------------------------

    def _busy(self, request: _Request) -> WindveError:
        if not self.can_answer and request.wanted.trial is None:
            return self._unavailable()
        if request.asked and request.never == request.asked:
            tokens = max(map(len, request.ids))
            allowed_s = request.due - request.started
            return DeadlineExceeded(
                f"a query of {tokens} tokens takes longer than {allowed_s:g} s here, whatever else is served; allow "
                "more time with the header x-request-timeout-ms, or send less"
            )
        self.refused += 1
        retry_s = request.retry_s if math.isfinite(request.retry_s) else self.config.slo_s
        retry_after_s = max(_SHORTEST_RETRY_S, retry_s)
        return Busy(
            f"busy: what is admitted already leaves no room for {len(request.queries)} more within "
            f"{request.due - request.started:g} s; come back in {retry_after_s:.2f} s",
            retry_after_s=retry_after_s,
        )

    def _check_bulk(self, more: int) -> None:
        """Raises Busy where too many bulk queries wait here already."""
        waiting = sum(len(bulk.missing) for bulk in self._bulk)
        if waiting + more <= self.config.bulk.max_waiting:
            return
        self.refused += 1
        queries_s = sum(pool.queries_s for pool in self.pools.values()) * self.config.bulk.share
        raise Busy(
            f"{waiting} bulk queries wait already (bulk.max_waiting: {self.config.bulk.max_waiting}); "
            "please send fewer at once or come back later",
            retry_after_s=max(self.config.slo_s, waiting / max(queries_s, 1e-6)),
        )

    def _unavailable(self) -> Unavailable:
        return Unavailable("no pool can answer now: no live replica with an open queue; please try again later")

    @property
    def can_answer(self) -> bool:
        return any(pool.is_open for pool in self.pools.values())

    @property
    def capacity(self) -> int:
        """Queries of 75 tokens that may be in flight at once, all pools together."""
        return int(self._capacity(75))

    def _capacity(self, tokens: float, request: _Request | None = None) -> float:
        """Of queries of so many tokens; with what is left of the SLO for those of this request."""
        slo_s = self.config.slo_s
        if request is not None:
            slo_s -= self._way_s + asyncio.get_running_loop().time() - request.started
        return sum(pool.capacity(tokens, slo_s) for pool in self.pools.values())

    # --- trials and telling -------------------------------------------------------------------------------------------

    def _enter_trial(self, trial: Trial) -> None:
        """Raises Forbidden or InvalidInput."""
        trial.check(self.config.trial, self.topology.pools, time.time())
        self._trial_at = asyncio.get_running_loop().time()

    @property
    def trial_seconds_ago(self) -> float | None:
        """Since the last trial query here: a calibration runs. None: there was none."""
        ago_s = asyncio.get_running_loop().time() - self._trial_at
        return ago_s if math.isfinite(ago_s) else None

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

    async def hear_replicas(self) -> None:
        """Before `describe_pools`: each replica's word as it is now."""
        links = [link for pool in self.pools.values() for link in pool.live]
        await asyncio.gather(*(link.ask_word() for link in links))

    def _publish(self) -> None:
        self.metrics.publish(self.config.slo_s, {name: pool.state() for name, pool in self.pools.items()})

    def describe_pools(self) -> dict[str, dict[str, Any]]:
        """Each pool as `/info` shows it."""
        return {name: self._describe(pool) for name, pool in self.pools.items()}

    def _describe(self, pool: Pool) -> dict[str, Any]:
        alpha_s, beta_s = pool.latency_model
        words = [link.view.word for link in pool.live if link.view.word is not None]
        return {
            "queue_depth": pool.config.queue_depth,
            "live_replicas": len(pool.live),
            "expected_replicas": self.topology.replicas[pool.name],
            "in_flight": sum(word.in_flight for word in words),  # of all Routers
            "waiting": sum(word.waiting for word in words),
            "latency_model": {
                "alpha_s": round(alpha_s, 6),
                "beta_s": round(beta_s, 6),
                "source": "calibrated" if pool.calibrated else "measured at warm-up",
            },
            "replicas": {link.view.replica: link.describe() for link in pool.live},
        }


async def _settled(placed: Placed) -> list[Answered] | Refused | Exception:
    """Its outcome, an error as a value."""
    try:
        return await placed.outcome
    except WindveError as error:
        return error
