"""TEI's gRPC calls, and the standard health check. What carries queries ends in `Router.embed`, as in `api.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from deployments.admission.quota import Client
from deployments.embedding.request import Embedded, Wanted
from deployments.embedding.router import Router
from deployments.errors import EmptyInput, InvalidInput, WindveError
from deployments.models.model_files import ModelCard
from deployments.models.text_pairs import Pair, Side
from deployments.models.tokenizer import Query
from serve_app.api_keys import ApiKeys
from serve_app.config.models import ByModel
from serve_app.embedding.answers import describe
from serve_app.embedding.grpc_answers import (
    embed_response,
    encode_response,
    given,
    info_response,
    predict_response,
    rerank_response,
    sparse_response,
    together,
    tokens_response,
)
from serve_app.embedding.routes import routes_of
from serve_app.grpc_services import METHODS, SERVICES
from serve_app.observe.observer import Observer, current_record
from serve_app.proto.tei_pb2 import (
    DecodeRequest,
    DecodeResponse,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    EncodeRequest,
    EncodeResponse,
    InfoRequest,
    InfoResponse,
    PredictPairRequest,
    PredictRequest,
    RerankRequest,
    RerankResponse,
    RerankStreamRequest,
    TruncationDirection,
)
from serve_app.rpc.calls import (
    Received,
    asked_by,
    check_count,
    check_size,
    headers_to_follow,
    in_order,
    metadata_of,
    query_of,
    say,
    set_status,
    text_of,
)
from serve_app.rpc.health import POOL_SERVICES, HealthCalls
from serve_app.web.fields import check_dimensions

_ROUTE_OF = {  # the HTTP route to the same, of what not every kind of model has
    "Embed": "/embed",
    "EmbedSparse": "/embed_sparse",
    "EmbedAll": "/embed_all",
    "Predict": "/predict",
    "PredictPair": "/predict",
    "Rerank": "/rerank",
}
_SIDES: dict[int, Side] = {
    TruncationDirection.TRUNCATION_DIRECTION_RIGHT: "right",
    TruncationDirection.TRUNCATION_DIRECTION_LEFT: "left",
}


class _Call(NamedTuple):
    """What a call with one text or pair asks of the Router (`wanted`), and what makes a message of the answer."""

    reply: Callable[[Embedded, Any, ModelCard], Message]
    wanted: Mapping[str, Any]


_EMBED = _Call(embed_response, {})
_SPARSE = _Call(sparse_response, {"kinds": ("sparse",)})
_ALL = _Call(tokens_response, {"outputs": ("tokens",)})
_PREDICT = _Call(predict_response, {"kinds": ("reranker", "classifier")})

Request = TypeVar("Request", bound=Message)
Method = Callable[["GrpcApi", Request, RayServegRPCContext], Awaitable[Message]]


def _unary(method: Method[Request]) -> Callable[[GrpcApi, Received, RayServegRPCContext], Awaitable[Message]]:
    """A call with one request and one answer. What is wrong becomes its status: Serve would log what is raised."""
    name = method.__name__

    @wraps(method)
    async def call(self: GrpcApi, request: Received, grpc_context: RayServegRPCContext) -> Message:
        followed = self.observer.begin_call(headers_to_follow(grpc_context)) if self.observer.on else None
        problem: BaseException | None = None
        try:
            client = self.let_in(grpc_context)
            if followed is not None and client is not None:
                followed.key = client.tenant.name
            return await method(self.meant(name, grpc_context), self.checked(request), grpc_context)
        except WindveError as error:
            problem = error
            set_status(grpc_context, error)
            return Empty()  # gRPC sends none where the status is not OK
        except BaseException as error:
            problem = error
            raise
        finally:
            if followed is not None:
                self.observer.end_call(followed, name, problem)

    return call


def _stream(
    method: Method[Request],
) -> Callable[[GrpcApi, AsyncIterator[Received], RayServegRPCContext], AsyncGenerator[Message, None]]:
    """A call with many requests, answered by `method` in their order. The first that is refused ends it."""

    @wraps(method)
    async def call(
        self: GrpcApi, requests: AsyncIterator[Received], grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Message, None]:
        async def answer(request: Received) -> Message:
            return await method(api, self.checked(request), grpc_context)

        try:
            api = self.open_stream(method.__name__, grpc_context)
            each: Callable[[Received], Awaitable[Message]] = answer
            if self.observer.on:
                each = self.observer.following(method.__name__, headers_to_follow(grpc_context), answer)
            async with aclosing(in_order(requests, each, api.window)) as answers:
                async for message in answers:
                    yield message
        except WindveError as error:
            set_status(grpc_context, error)
            raise  # Serve's own proxy looks at what was set only then, and would end the stream as if all were answered

    return call


class GrpcApi:
    """The calls to one model, of one Router replica: each method has the name of its call, and Serve's name for the
    context.
    """

    def __init__(self, router: Router, api_keys: ApiKeys | None = None, observer: Observer | None = None) -> None:
        self._router = router
        self.observer = observer or Observer()
        self._all = ByModel({router.card.name: self})
        self._api_keys = api_keys
        self._max_bytes = router.settings.limits.max_body_bytes
        self._emulated = [("x-windve-emulated", "true")] if router.settings.emulated else []
        health = HealthCalls(SERVICES, self._is_served)
        self.Check, self.Watch = health.Check, health.Watch

    @classmethod
    def of_models(cls, routers: ByModel[Router], api_keys: ApiKeys | None, observer: Observer | None = None) -> GrpcApi:
        """The calls to all of these models: the metadata `model` say which one is meant."""
        apis = routers.each(lambda router: cls(router, api_keys, observer))
        for api in apis:
            api.join(apis)
        return apis.first

    def join(self, apis: ByModel[GrpcApi]) -> None:
        """Let these, which include it, answer the calls that are for their models."""
        self._all = apis

    def meant(self, call: str, context: RayServegRPCContext) -> GrpcApi:
        """Of the model that the metadata name, or of the first that has this call. Raises UnknownModel."""
        name = metadata_of(context, "model")
        if name is not None:
            return self._all.named(name)
        return next((api for api in self._all if api.has(call)), self)

    def has(self, call: str) -> bool:
        """The call is for models of this kind."""
        return call not in _ROUTE_OF or _ROUTE_OF[call] in routes_of(self._router.card.kinds)

    def serves(self, service: str) -> bool:
        """Calls of this service to its model are answered now; of a pool's name: that pool answers."""
        if service in POOL_SERVICES:
            return self._router.live_pools.get(POOL_SERVICES[service], False)
        calls = [call for call, full in METHODS.items() if full.startswith(f"{service}/")]
        if calls and not any(call in _ROUTE_OF for call in calls):
            return True  # they need no replica
        return self._router.can_answer and (not calls or any(self.has(call) for call in calls if call in _ROUTE_OF))

    @_unary
    async def Info(self, request: InfoRequest, grpc_context: RayServegRPCContext) -> InfoResponse:
        await self._router.hear_replicas()
        return info_response(describe(self._router))

    @_unary
    async def Embed(self, request: EmbedRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_EMBED, request, grpc_context)

    @_stream
    async def EmbedStream(self, request: EmbedRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_EMBED, request, grpc_context, in_stream=True)

    @_unary
    async def EmbedSparse(self, request: EmbedSparseRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_SPARSE, request, grpc_context)

    @_stream
    async def EmbedSparseStream(self, request: EmbedSparseRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_SPARSE, request, grpc_context, in_stream=True)

    @_unary
    async def EmbedAll(self, request: EmbedAllRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_ALL, request, grpc_context)

    @_stream
    async def EmbedAllStream(self, request: EmbedAllRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_ALL, request, grpc_context, in_stream=True)

    @_unary
    async def Predict(self, request: PredictRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_PREDICT, request, grpc_context)

    @_stream
    async def PredictStream(self, request: PredictRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_PREDICT, request, grpc_context, in_stream=True)

    @_unary
    async def PredictPair(self, request: PredictPairRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_PREDICT, request, grpc_context)

    @_stream
    async def PredictPairStream(self, request: PredictPairRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer(_PREDICT, request, grpc_context, in_stream=True)

    @_unary
    async def Rerank(self, request: RerankRequest, grpc_context: RayServegRPCContext) -> RerankResponse:
        """All texts are one admission decision."""
        check_count(request.texts, self._router.settings.limits.max_inputs_per_request)
        pairs = [Pair(request.query, text) for text in request.texts]
        done = await self._ask(request, pairs, kinds=("reranker",), **self._asked_by(grpc_context))
        self._say_pool(done, grpc_context)
        return rerank_response(done, request.texts, raw=request.raw_scores, return_text=request.return_text)

    async def RerankStream(self, requests: AsyncIterator[Received], grpc_context: RayServegRPCContext) -> Message:
        """As the queries of other streams these are bulk, each admitted by itself; all are answered at once."""
        try:
            return await self.open_stream("RerankStream", grpc_context).rank(requests, grpc_context)
        except WindveError as error:
            set_status(grpc_context, error)
            return Empty()

    @_unary
    async def Tokenize(self, request: EncodeRequest, grpc_context: RayServegRPCContext) -> EncodeResponse:
        return await self._tokenize(request)

    @_stream
    async def TokenizeStream(self, request: EncodeRequest, grpc_context: RayServegRPCContext) -> EncodeResponse:
        return await self._tokenize(request)

    @_unary
    async def Decode(self, request: DecodeRequest, grpc_context: RayServegRPCContext) -> DecodeResponse:
        return await self._decode(request)

    @_stream
    async def DecodeStream(self, request: DecodeRequest, grpc_context: RayServegRPCContext) -> DecodeResponse:
        return await self._decode(request)

    def _is_served(self, service: str, model: str | None) -> bool:
        """By one of these models, or by any (None). Raises UnknownModel."""
        asked = list(self._all) if model is None else [self._all.named(model)]
        return any(api.serves(service) for api in asked)

    async def _answer(
        self, call: _Call, request: Any, context: RayServegRPCContext, *, in_stream: bool = False
    ) -> Message:
        """A stream's queries are bulk, unless its client says otherwise: it waits for room, and leaves others half."""
        check_dimensions(given(request, "dimensions"), self._router.card.dimension)
        asked = {"bulk": True, **self._asked_by(context)} if in_stream else self._asked_by(context)
        done = await self._ask(request, [query_of(request.inputs)], **call.wanted, **asked)
        if not in_stream:
            self._say_pool(done, context)
        return call.reply(done, request, self._router.card)

    async def _ask(self, request: Any, queries: Sequence[Query], **asked: Any) -> Embedded:
        side = _SIDES.get(request.truncation_direction)
        if side is None:
            raise InvalidInput(
                f"truncation_direction must be 0 (right) or 1 (left), not {request.truncation_direction}"
            )
        wanted = Wanted(
            truncate=request.truncate,
            truncation_direction=side,
            prompt_name=given(request, "prompt_name"),
            record=current_record() if self.observer.on else None,
            **asked,
        )
        return await self._router.embed(queries, wanted)

    async def rank(self, requests: AsyncIterator[Received], context: RayServegRPCContext) -> RerankResponse:
        """The texts of a stream, against its queries. Raises what the first bad one raises."""
        asked = {"kinds": ("reranker",), "bulk": True, **self._asked_by(context)}

        async def answer(request: Received) -> tuple[RerankStreamRequest, Embedded]:
            sent = self.checked(request)
            return sent, await self._ask(sent, [Pair(sent.query, sent.text)], **asked)

        found: list[tuple[RerankStreamRequest, Embedded]] = []
        size = 0
        each: Callable[[Received], Awaitable[tuple[RerankStreamRequest, Embedded]]] = answer
        if self.observer.on:
            each = self.observer.following("RerankStream", headers_to_follow(context), answer)
        async with aclosing(in_order(requests, each, self.window)) as answers:
            async for sent, done in answers:
                found.append((sent, done))
                size += sent.ByteSize()
                check_size(size, self._max_bytes)
        if not found:
            raise EmptyInput("the stream holds no text; send at least one")
        first, texts = found[0][0], [sent.text for sent, _ in found]
        done = together([done for _, done in found])
        self._say_pool(done, context)
        return rerank_response(done, texts, raw=first.raw_scores, return_text=first.return_text)

    def _say_pool(self, done: Embedded, context: RayServegRPCContext) -> None:
        say(context, ("x-windve-pool", ",".join(done.pools)), *self._emulated)

    async def _tokenize(self, request: EncodeRequest) -> EncodeResponse:
        (tokens,) = await self._router.tokenize(
            [text_of(request.inputs)],
            special_tokens=request.add_special_tokens,
            prompt_name=given(request, "prompt_name"),
        )
        return encode_response(tokens)

    async def _decode(self, request: DecodeRequest) -> DecodeResponse:
        (text,) = await self._router.decode([list(request.ids)], skip_special_tokens=request.skip_special_tokens)
        return DecodeResponse(text=text)

    @property
    def window(self) -> int:
        """Requests of one stream that are worked on at once: more than fits into the queues is not read."""
        return max(1, self._router.capacity)

    def open_stream(self, call: str, context: RayServegRPCContext) -> GrpcApi:
        """The calls to the model that a stream is for. Raises Unauthorized or UnknownModel."""
        try:
            self.let_in(context)
            return self.meant(call.removesuffix("Stream"), context)
        except WindveError as error:
            if self.observer.on and (followed := self.observer.begin_call(headers_to_follow(context))) is not None:
                self.observer.end_call(followed, call, error)
            raise

    def let_in(self, context: RayServegRPCContext) -> Client | None:
        """Who asks, where API keys have names. Raises Unauthorized."""
        return None if self._api_keys is None else self._api_keys.check(metadata_of(context, "authorization"))

    def _asked_by(self, context: RayServegRPCContext) -> dict[str, Any]:
        return {**asked_by(context), "client": self.let_in(context)}

    def checked(self, request: Received) -> Any:
        """The message, if it is one and not larger than an HTTP body may be. Raises InvalidInput."""
        if isinstance(request, InvalidInput):
            raise request
        check_size(request.ByteSize(), self._max_bytes)
        return request
