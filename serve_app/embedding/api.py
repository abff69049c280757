"""The routes of OpenAI, TEI, Cohere and Ollama, and the routes that describe the server. All call the Router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from deployments.embedding.request import Embedded, Wanted
from deployments.embedding.router import Router
from deployments.errors import InvalidInput, WindveError, WrongKind
from deployments.models.model_files import ModelCard
from deployments.models.sparse import unpack
from deployments.models.tokenizer import Query
from deployments.settings import Kind
from serve_app.api_keys import ApiKeys
from serve_app.embedding import dialects, ollama, scoring
from serve_app.embedding.burst import Bursts
from serve_app.embedding.document import document
from serve_app.embedding.facts import record_of
from serve_app.embedding.input_types import prompt_names
from serve_app.embedding.ollama_requests import OllamaEmbedRequest, OllamaPromptRequest, OllamaShowRequest
from serve_app.embedding.options import AnyOptions
from serve_app.embedding.output_shapes import cut_rows, describe
from serve_app.embedding.requests import (
    CohereEmbedRequest,
    EmbedRequest,
    EncodeRequest,
    InfinityRequest,
    MultiVectorRequest,
    OpenAIRequest,
    PoolingRequest,
    RootRequest,
    SeveralRequest,
    SimilarityRequest,
)
from serve_app.embedding.routes import A_MODEL, ALL_ROUTES, ROOT, SEVERAL, routes_of
from serve_app.embedding.scoring_requests import (
    ClassifyRequest,
    CohereRerankRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
)
from serve_app.observe.observer import Observer
from serve_app.web.about import ModelApi
from serve_app.web.admission_headers import admission
from serve_app.web.asgi import Answer, Handler, HttpRequest, dumps, dumps_in_turns, json_answer
from serve_app.web.errors import JSON, Headers
from serve_app.web.fields import Rules, says
from serve_app.web.tokenizer_routes import TokenizerRoutes

_NUMBERS_AT_ONCE = 64_000  # writing these takes 2 ms
_RANKING: tuple[Kind, ...] = ("reranker",)
_SCORING: tuple[Kind, ...] = ("reranker", "classifier")


class HttpApi(ModelApi):
    """The routes to one model in one Router replica."""

    def __init__(self, router: Router, api_keys: ApiKeys | None = None, observer: Observer | None = None) -> None:
        self._router = router
        limits, card, called = router.settings.limits, router.card, router.settings.model
        rules = Rules(card.name, card.dimension, limits.max_inputs_per_request, tuple(called.aliases), called.any_name)
        settings, self._max_body_bytes = router.settings, limits.max_body_bytes
        super().__init__(rules, router, api_keys, observer, emulated=settings.emulated, has_page=settings.page)
        self._prompt_names = prompt_names(card.prompts)
        self._bursts = Bursts(router)
        self._document = document([(rules, card)], api_keys=api_keys is not None)

    def _own_routes(self) -> dict[tuple[str, str], Handler]:
        card, handlers = self._router.card, self._handlers()
        chosen = {("POST", path): handlers[path] for path in routes_of(card.kinds)}
        if card.kind == "embedding":
            chosen |= {
                ("GET", "/api/tags"): self.ollama_tags,
                ("GET", "/api/ps"): self.ollama_ps,
                ("GET", "/api/version"): self.version,
                ("POST", "/api/show"): self.ollama_show,
            }
            if self._has_page and self._router.settings.emulated:
                chosen["POST", "/burst"] = self.burst
        return {
            **chosen,
            ("POST", "/"): handlers[ROOT[card.kind]],
            **TokenizerRoutes(self._router, card.max_tokens, self._rules, self._max_body_bytes).handlers,
            ("GET", "/info"): self.info,
        }

    async def answer(self, request: HttpRequest) -> Answer:
        try:
            return await super().answer(request)
        except InvalidInput as error:
            self._router.count_invalid(error)
            raise

    def _handlers(self) -> dict[str, Handler]:
        """The handlers of all routes, whatever the kind of model."""
        openai = partial(self._vectors, OpenAIRequest, dialects.openai)
        infinity = partial(self._vectors, InfinityRequest, dialects.openai)
        classify = partial(self._scored, ClassifyRequest, scoring.classes, _SCORING)
        return {
            "/": partial(self._vectors, RootRequest, dialects.root),
            "/v1/embeddings": openai,
            "/embeddings": infinity,
            "/infinity/embeddings": infinity,
            "/infinity/rerank": partial(self._scored, CohereRerankRequest, scoring.infinity_ranks, _RANKING),
            "/v1/embed": partial(self._vectors, CohereEmbedRequest, partial(dialects.cohere, version="1")),
            "/v2/embed": partial(self._vectors, CohereEmbedRequest, partial(dialects.cohere, version="2")),
            "/api/embed": partial(self._ollama, OllamaEmbedRequest, dialects.ollama, {"embeddings": []}),
            "/api/embeddings": partial(self._ollama, OllamaPromptRequest, dialects.ollama_prompt, {"embedding": []}),
            "/embed": partial(self._vectors, EmbedRequest, dialects.tei),
            "/embed_all": self.embed_all,
            "/similarity": partial(self._vectors, SimilarityRequest, dialects.cosines),
            "/rerank": self.rerank,
            "/v1/rerank": partial(self._scored, CohereRerankRequest, partial(scoring.ranks, version="1"), _RANKING),
            "/v2/rerank": partial(self._scored, CohereRerankRequest, partial(scoring.ranks, version="2"), _RANKING),
            "/predict": partial(self._scored, PredictRequest, scoring.predictions, _SCORING),
            "/score": self.score,
            "/v1/score": self.score,
            "/classify": classify,
            "/v1/classify": classify,
            "/embed_sparse": self.embed_sparse,
            "/v1/multi-vector": self.multi_vector,
            "/pooling": self.pooling,
            SEVERAL: self.encode,
        }

    @property
    def served(self) -> tuple[Rules, ModelCard]:
        """For the OpenAPI document."""
        return self._rules, self._router.card

    def _no_route(self, path: str) -> WindveError:
        if path not in ALL_ROUTES:
            return super()._no_route(path)
        card = self._router.card
        has = " and ".join(routes_of(card.kinds))
        cosines = ": /score gives the cosines" if card.kind == "embedding" and path.endswith("rerank") else ""
        return WrongKind(f"{path} does not work with {A_MODEL[card.kind]}{cosines}; use {has}")

    async def _vectors(
        self, takes: Any, reply: Callable[[Any, Embedded, ModelCard], Any], request: HttpRequest
    ) -> Answer:
        """Parse a request of type `takes`, and answer with its vectors in the form of `reply` (see `dialects.py`)."""
        asked = takes.parse(await request.body(self._max_body_bytes), self._rules)
        return await self._reply(asked, reply, request)

    async def _reply(
        self, asked: Any, reply: Callable[[Any, Embedded, ModelCard], Any], request: HttpRequest
    ) -> Answer:
        done = await self._embed(asked.queries, asked.query_options, request)
        return await _large(done, reply(asked, done, self._router.card))

    async def _ollama(
        self,
        takes: Any,
        reply: Callable[[Any, Embedded, ModelCard], Any],
        nothing: Mapping[str, Any],
        request: HttpRequest,
    ) -> Answer:
        """As `_vectors`. `nothing` is the answer to a request without text."""
        asked = takes.parse(await request.body(self._max_body_bytes), self._rules)
        if not asked.queries:
            return json_answer({"model": self._rules.model, **nothing})
        return await self._reply(asked, reply, request)

    async def ollama_tags(self, _: HttpRequest) -> Answer:
        return json_answer({"models": self.ollama_models(ollama.listed)})

    async def ollama_ps(self, _: HttpRequest) -> Answer:
        return json_answer({"models": self.ollama_models(ollama.running)})

    async def ollama_show(self, request: HttpRequest) -> Answer:
        OllamaShowRequest.parse(await request.body(self._max_body_bytes), self._rules)
        return json_answer(ollama.shown(self._router.card, self._router.started))

    def ollama_models(self, tell: Callable[[ModelCard, float], Any]) -> list[Any]:
        """The model as Ollama's routes list it, if it embeds. `tell`: builds the entry."""
        card = self._router.card
        return [tell(card, self._router.started)] if card.kind == "embedding" else []

    async def embed_all(self, request: HttpRequest) -> Answer:
        """The vector of each token, not normalized."""
        asked = EncodeRequest.parse(await request.body(self._max_body_bytes), self._rules)
        done = await self._embed(asked.queries, asked, request, outputs=("tokens",))
        return await _large(done, done.vectors)

    async def multi_vector(self, request: HttpRequest) -> Answer:
        """A unit vector for each token, in the form of Jina's API."""
        asked = MultiVectorRequest.parse(await request.body(self._max_body_bytes), self._rules)
        done = await self._embed(asked.queries, asked, request, kinds=("multi_vector",), role=asked.input_type)
        vectors = cut_rows(done.vectors, asked.dimensions)
        answer = {
            "object": "list",
            "data": [
                {"object": "embeddings", "index": index, "embeddings": rows} for index, rows in enumerate(vectors)
            ],
            "model": self._rules.model,
            "usage": dialects.usage(done),
        }
        return await _large(done, answer)

    async def pooling(self, request: HttpRequest) -> Answer:
        """A unit vector for each token, in the form of vLLM's API."""
        asked = PoolingRequest.parse(await request.body(self._max_body_bytes), self._rules)
        done = await self._embed(asked.queries, asked, request, kinds=("multi_vector",), role=asked.embedding_mode)
        vectors = cut_rows(done.vectors, asked.dimensions)
        rows = [{"object": "pooling", "data": one} for one in vectors]
        answer = dialects.vllm_list(f"pool-{request.named(asked.request_id)}", rows, done, self._router.card)
        return await _large(done, answer)

    async def encode(self, request: HttpRequest) -> Answer:
        """Several kinds of answer from one batch, with the names of FlagEmbedding's bge-m3."""
        asked = SeveralRequest.parse(await request.body(self._max_body_bytes), self._rules)
        done = await self._embed(asked.queries, asked, request, kinds=self._router.card.kinds, outputs=asked.outputs)
        found = {asked.outputs[0]: done.vectors, **done.others}
        answer: dict[str, Any] = {}
        if "text" in found:
            answer["dense_vecs"] = [np.ascontiguousarray(vector) for vector in found["text"]]
        if "sparse" in found:
            pairs = map(unpack, found["sparse"])
            answer["lexical_weights"] = [dict(zip(map(str, ids), weights, strict=True)) for ids, weights in pairs]
        if "multi_vector" in found:
            answer["colbert_vecs"] = found["multi_vector"]
        return await _large(done, answer)

    async def _scored(
        self,
        takes: Any,
        reply: Callable[[Any, Embedded, ModelCard, str], Any],
        kinds: tuple[Kind, ...],
        request: HttpRequest,
    ) -> Answer:
        """Parse a request of type `takes`, and answer with its scores in the form of `reply` (see `scoring.py`)."""
        asked = takes.parse(await request.body(self._max_body_bytes), self._rules)
        return await self._judge(asked, asked.queries, reply, kinds, request)

    async def _judge(
        self,
        asked: Any,
        queries: Sequence[Query],
        reply: Callable[[Any, Embedded, ModelCard, str], Any],
        kinds: tuple[Kind, ...],
        request: HttpRequest,
    ) -> Answer:
        """Score the queries. They are admitted or refused together."""
        done = await self._embed(queries, asked, request, kinds=kinds)
        name = request.named(getattr(asked, "request_id", None))
        return _timing(done), dumps(reply(asked, done, self._router.card, name))

    async def rerank(self, request: HttpRequest) -> Answer:
        """With `documents`: as vLLM or, if the body has `raw_scores`, as Infinity. Otherwise as TEI."""
        sent = await request.json_object(self._max_body_bytes)
        if says(sent, "documents") and not says(sent, "texts"):
            vllm = partial(scoring.ranks, version="2", documents=True)
            ranks = scoring.infinity_ranks if says(sent, "raw_scores") else vllm
            return await self._scored(CohereRerankRequest, ranks, _RANKING, request)
        return await self._scored(RerankRequest, scoring.tei_ranks, _RANKING, request)

    async def score(self, request: HttpRequest) -> Answer:
        """As vLLM: a reranker's scores of pairs, or the cosines of an embedding model's vectors."""
        asked = ScoreRequest.parse(await request.body(self._max_body_bytes), self._rules)
        if self._router.card.kind == "reranker":
            return await self._judge(asked, asked.queries, scoring.pair_scores, _RANKING, request)
        texts = asked.texts(self._rules.max_inputs)
        return await self._judge(asked, texts, scoring.pair_cosines, ("embedding",), request)

    async def embed_sparse(self, request: HttpRequest) -> Answer:
        asked = EncodeRequest.parse(await request.body(self._max_body_bytes), self._rules)
        done = await self._embed(asked.queries, asked, request, kinds=("sparse",))
        answer = [
            [{"index": index, "value": value} for index, value in zip(indices.tolist(), weights, strict=True)]
            for indices, weights in map(unpack, done.vectors)
        ]
        return _timing(done), dumps(answer)

    async def _embed(
        self, queries: Sequence[Query], options: AnyOptions, request: HttpRequest, **more: Any
    ) -> Embedded:
        purpose = options.purpose
        wanted = Wanted(
            truncate=options.cut,
            truncation_direction=options.side,
            bounds=options.bounds,
            prompt_name=options.prompt_name if purpose is None else self._prompt_names[purpose],
            record=record_of(request.traced),
            client=request.client,
            **more,
            **admission(request.headers),
        )
        return await self._router.embed(queries, wanted)

    async def burst(self, request: HttpRequest) -> Answer:
        """For the page. Requires JSON: pages of other sites cannot send it without a CORS preflight."""
        if request.headers.get(b"content-type") != b"application/json":
            raise InvalidInput("send the content type application/json")
        return json_answer(await request.while_here(self._bursts.send(request.client)))

    async def info(self, _: HttpRequest) -> Answer:
        await self._router.hear_replicas()
        return json_answer(describe(self._router))


async def _large(done: Embedded, content: Any) -> Answer:
    """Write an answer; a large one is written in parts, so that other requests are not held up."""
    is_small = sum(vector.size for vector in done.vectors) <= _NUMBERS_AT_ONCE
    return _timing(done), dumps(content) if is_small else await dumps_in_turns(content)


def _timing(done: Embedded) -> Headers:
    """The headers that say which pool answered, and TEI's times in whole milliseconds."""
    total = _ms(done.total_s)
    return [
        JSON,
        (b"x-windve-pool", ",".join(done.pools).encode()),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % done.characters),
        (b"x-compute-tokens", b"%d" % done.tokens),
        (b"x-total-time", total),
        (b"x-tokenization-time", _ms(done.tokenization_s)),
        (b"x-queue-time", _ms(done.queue_s)),
        (b"x-inference-time", _ms(done.compute_s)),
    ]


def _ms(seconds: float) -> bytes:
    return b"%d" % round(seconds * 1000)
