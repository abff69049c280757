"""The HTTP routes to one embedding model, reranker or classifier, in the dialects of OpenAI, TEI, Cohere, Jina, vLLM,
Infinity and Ollama. All call the Router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deployments.embedding.request import Embedded
from deployments.embedding.router import Router
from deployments.errors import InvalidInput, WindveError, WrongKind
from deployments.models.model_files import ModelCard
from deployments.models.tokenizer import Query
from serve_app.api_keys import ApiKeys
from serve_app.embedding import ollama
from serve_app.embedding.asking import Asking, describe
from serve_app.embedding.burst import Bursts
from serve_app.embedding.document import document
from serve_app.embedding.routes import A_MODEL, ALL_ROUTES, ROOT, ROUTES, VLLM_RERANK, ModelRoute, routes_of
from serve_app.embedding.scoring_requests import ScoreRequest
from serve_app.observe.observer import Observer
from serve_app.web.about import ModelApi, Routes
from serve_app.web.asgi import Answer, HttpRequest, dumps, dumps_in_turns, json_answer
from serve_app.web.errors import JSON, Headers
from serve_app.web.fields import Rules, says
from serve_app.web.request_headers import admission
from serve_app.web.tokenizer_routes import TokenizerRoutes

_NUMBERS_AT_ONCE = 64_000  # writing these takes 2 ms
_NOTHING = Embedded([], [], (), 0, 0, 0.0, 0.0, 0.0, 0.0)  # to a request without text, as Ollama accepts it


class HttpApi(ModelApi):
    """The routes to one model in one Router replica."""

    def __init__(self, router: Router, api_keys: ApiKeys | None = None, observer: Observer | None = None) -> None:
        self._router, self._asking = router, Asking(router)
        rules, settings = self._asking.rules, router.settings
        self._max_body_bytes = settings.limits.max_body_bytes
        super().__init__(rules, router, api_keys, observer, emulated=settings.emulated, has_page=settings.page)
        self._bursts = Bursts(router)
        self._document = document([self.served], api_keys=api_keys is not None)

    def _own_routes(self) -> Routes:
        card = self._router.card
        own = {"/rerank": self.rerank, "/score": self.score, "/v1/score": self.score}
        asking = {path: own.get(path) or partial(self._ask, route) for path, route in routes_of(card.kinds).items()}
        asking["/"] = self.rerank if card.kind == "reranker" else partial(self._ask, ROOT[card.kind])
        more: Routes = {}
        if card.kind == "embedding":
            more = {**ollama_lists([self]), ("GET", "/api/version"): self.version, ("POST", "/api/show"): self.show}
            if self._has_page and self._router.settings.emulated:
                more = {**more, ("POST", "/burst"): self.burst}
        return {
            **{("POST", path): handler for path, handler in asking.items()},
            **more,
            **TokenizerRoutes(self._router.encoder, card.max_tokens, self._rules, self._max_body_bytes).handlers,
        }

    async def answer(self, request: HttpRequest) -> Answer:
        try:
            return await super().answer(request)
        except InvalidInput as error:
            self._router.count_invalid(error)
            raise

    @property
    def served(self) -> tuple[Rules, ModelCard]:
        """For the OpenAPI document."""
        return self._rules, self._router.card

    def describe(self) -> dict[str, Any]:
        return describe(self._router)

    def _no_route(self, path: str) -> WindveError:
        if path not in ALL_ROUTES:
            return super()._no_route(path)
        card = self._router.card
        has = ", ".join(routes_of(card.kinds))
        cosines = ": /score gives the cosines" if card.kind == "embedding" and path.endswith("rerank") else ""
        return WrongKind(f"{path} does not work with {A_MODEL[card.kind]}{cosines}; use one of {has}")

    async def _ask(self, route: ModelRoute, request: HttpRequest) -> Answer:
        """Parse a request of the route's type, and answer it in the route's form."""
        asked: Any = route.takes.parse(await request.body(self._max_body_bytes), self._rules)
        return await self._answered(route, asked, asked.queries, request)

    async def rerank(self, request: HttpRequest) -> Answer:
        """With `documents`: as vLLM or, if the body has `raw_scores`, as Infinity. Otherwise as TEI."""
        sent = await request.json_object(self._max_body_bytes)
        route = ROUTES["/rerank"]
        if says(sent, "documents") and not says(sent, "texts"):
            route = ROUTES["/infinity/rerank"] if says(sent, "raw_scores") else VLLM_RERANK
        return await self._ask(route, request)

    async def score(self, request: HttpRequest) -> Answer:
        """As vLLM: a reranker's scores of pairs, or the cosines of an embedding model's vectors."""
        asked = ScoreRequest.parse(await request.body(self._max_body_bytes), self._rules)
        are_pairs = self._router.card.kind == "reranker"
        queries = asked.queries if are_pairs else asked.texts(self._rules.max_inputs)
        return await self._answered(ROUTES["/score"], asked, queries, request)

    async def _answered(self, route: ModelRoute, asked: Any, queries: Sequence[Query], request: HttpRequest) -> Answer:
        """The Router's answer in the route's form. The queries are admitted or refused together. A large answer is
        written in parts, so that other requests are not held up.
        """
        card = self._router.card
        if not queries:
            return json_answer(route.reply(asked, _NOTHING, card, request.named))
        done = await self._asking.ask(
            route, asked, queries, request.traced, client=request.client, **admission(request.headers)
        )
        content = route.reply(asked, done, card, request.named)
        is_small = sum(vector.size for vector in done.vectors) <= _NUMBERS_AT_ONCE
        return _timing(done), dumps(content) if is_small else await dumps_in_turns(content)

    async def show(self, request: HttpRequest) -> Answer:
        """Ollama's description of the model."""
        ollama.OllamaShowRequest.parse(await request.body(self._max_body_bytes), self._rules)
        return json_answer(ollama.shown(self._router.card, self._router.started))

    async def burst(self, request: HttpRequest) -> Answer:
        """For the page. Requires JSON: pages of other sites cannot send it without a CORS preflight."""
        if request.headers.get(b"content-type") != b"application/json":
            raise InvalidInput("send the content type application/json")
        return json_answer(await request.while_here(self._bursts.send(request.client)))


def ollama_lists(parts: Sequence[ModelApi]) -> Routes:
    """Ollama's lists of the models that embed."""

    async def listed(entry: Callable[[ModelCard, float], Any], _: HttpRequest) -> Answer:
        routers = [part.router for part in parts if part.router.card.kind == "embedding"]
        return json_answer({"models": [entry(router.card, router.started) for router in routers]})

    return {("GET", "/api/tags"): partial(listed, ollama.listed), ("GET", "/api/ps"): partial(listed, ollama.running)}


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
