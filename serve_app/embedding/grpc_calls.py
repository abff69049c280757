"""TEI's gRPC calls, unary and streaming: checks the caller and selects the model. `grpc_model.py` asks the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from deployments.embedding.request import Embedded
from deployments.embedding.router import Router
from deployments.errors import EmptyInput, WindveError
from deployments.models.model_files import ModelCard
from deployments.models.text_pairs import Pair
from serve_app.api_keys import ApiKeys
from serve_app.config.models import ByModel
from serve_app.embedding.grpc_answers import (
    embed_response,
    predict_response,
    rerank_response,
    sparse_response,
    together,
    tokens_response,
)
from serve_app.embedding.grpc_model import ModelCalls
from serve_app.grpc_services import METHODS, SERVICES
from serve_app.observe.observer import Observer
from serve_app.proto.tei_pb2 import RerankRequest, RerankResponse, RerankStreamRequest
from serve_app.rpc.calls import (
    CallScope,
    Received,
    asked_by,
    check_size,
    headers_to_trace,
    in_order,
    metadata_of,
    say,
    set_status,
)
from serve_app.rpc.service import GrpcService
from serve_app.web.admission_headers import SPACE

Context = RayServegRPCContext
_SCORING = ("reranker", "classifier")
T = TypeVar("T")
Reply = Callable[[Embedded, Any, ModelCard], Message]  # turns an answer into a message
Method = Callable[["TeiCalls", ModelCalls, Any, Context], Awaitable[Message]]  # answers one message


def _unary(name: str, method: Method) -> Callable[[TeiCalls, Received, Context], Awaitable[Message]]:
    """A call with one request and one answer."""
    full_name = METHODS[name]

    async def call(self: TeiCalls, request: Received, grpc_context: Context) -> Message:
        with CallScope(self.observer, full_name, grpc_context) as scope:
            scope.came_from(self.let_in(grpc_context))
            return await method(self, self.model_of(name, grpc_context), self.checked(request), grpc_context)
        return Empty()

    return call


def _stream(
    name: str, method: Method
) -> Callable[[TeiCalls, AsyncIterator[Received], Context], AsyncGenerator[Message, None]]:
    """A call with many requests, answered in order. The first refused request ends the call."""

    async def call(
        self: TeiCalls, requests: AsyncIterator[Received], grpc_context: Context
    ) -> AsyncGenerator[Message, None]:
        async def answer(request: Received) -> Message:
            return await method(self, model, self.checked(request), grpc_context)

        try:
            model = self.open_stream(name, grpc_context)
            say(grpc_context, (SPACE, model.space), *self._emulated)
            async with aclosing(self.each(name, requests, answer, model, grpc_context)) as answers:
                async for message in answers:
                    yield message
        except WindveError as error:
            set_status(grpc_context, error)
            raise  # Serve's own proxy reads the status only then; else the stream would end as a success

    return call


def _query(reply: Reply, **wanted: Any) -> Method:
    """A text or a pair that a device answers."""

    async def method(self: TeiCalls, model: ModelCalls, request: Any, context: Context) -> Message:
        asked = self.asked_by(context, model)
        asked.update(wanted)
        done = await model.query(request, asked)
        self.say_pool(done, model, context)
        return reply(done, request, model.card)

    return method


def _query_in_stream(reply: Reply, **wanted: Any) -> Method:
    """As `_query`, for streams: their queries are bulk unless the client says otherwise."""
    wanted["bulk"] = True

    async def method(self: TeiCalls, model: ModelCalls, request: Any, context: Context) -> Message:
        done = await model.query(request, {**wanted, **self.asked_by(context, model)})
        return reply(done, request, model.card)

    return method


async def _rerank(self: TeiCalls, model: ModelCalls, request: RerankRequest, context: Context) -> Message:
    done = await model.rank(request, self.asked_by(context, model))
    self.say_pool(done, model, context)
    return rerank_response(done, request.texts, raw=request.raw_scores, return_text=request.return_text)


def _plain(answer: Callable[[ModelCalls, Any], Awaitable[Message]]) -> Method:
    """A call that needs no device."""

    async def method(_: TeiCalls, model: ModelCalls, request: Any, __: Context) -> Message:
        return await answer(model, request)

    return method


class TeiCalls(GrpcService):
    """The calls to all models of one Router replica. The metadata `model` selects the model. Serve finds each call by
    its name in `proto/tei.proto`.
    """

    Info = _unary("Info", _plain(ModelCalls.info))
    Embed = _unary("Embed", _query(embed_response))
    EmbedStream = _stream("EmbedStream", _query_in_stream(embed_response))
    EmbedSparse = _unary("EmbedSparse", _query(sparse_response, kinds=("sparse",)))
    EmbedSparseStream = _stream("EmbedSparseStream", _query_in_stream(sparse_response, kinds=("sparse",)))
    EmbedAll = _unary("EmbedAll", _query(tokens_response, outputs=("tokens",)))
    EmbedAllStream = _stream("EmbedAllStream", _query_in_stream(tokens_response, outputs=("tokens",)))
    Predict = _unary("Predict", _query(predict_response, kinds=_SCORING))
    PredictStream = _stream("PredictStream", _query_in_stream(predict_response, kinds=_SCORING))
    PredictPair = _unary("PredictPair", _query(predict_response, kinds=_SCORING))
    PredictPairStream = _stream("PredictPairStream", _query_in_stream(predict_response, kinds=_SCORING))
    Rerank = _unary("Rerank", _rerank)
    Tokenize = _unary("Tokenize", _plain(ModelCalls.tokenize))
    TokenizeStream = _stream("TokenizeStream", _plain(ModelCalls.tokenize))
    Decode = _unary("Decode", _plain(ModelCalls.decode))
    DecodeStream = _stream("DecodeStream", _plain(ModelCalls.decode))

    def __init__(
        self, routers: ByModel[Router], api_keys: ApiKeys | None = None, observer: Observer | None = None
    ) -> None:
        settings = routers.first.settings  # the two settings used here are the same for all models
        super().__init__(
            SERVICES, api_keys, observer, max_bytes=settings.limits.max_body_bytes, emulated=settings.emulated
        )
        self._models = routers.each(ModelCalls)

    def model_of(self, call: str, context: Context) -> ModelCalls:
        """The model named in the metadata, or the first that has this call. Raises UnknownModel."""
        name = metadata_of(context, "model")
        if name is not None:
            return self._models.named(name)
        return next((model for model in self._models if model.has(call)), self._models.first)

    def is_served(self, service: str, model: str | None) -> bool:
        """Whether this model, or any model (None), serves the service now. Raises UnknownModel."""
        asked = self._models if model is None else [self._models.named(model)]
        return any(one.serves(service) for one in asked)

    async def RerankStream(self, requests: AsyncIterator[Received], grpc_context: Context) -> Message:
        """As in other streams, the queries are bulk and admitted one by one. All are answered in one message."""
        try:
            return await self._rank(requests, self.open_stream("RerankStream", grpc_context), grpc_context)
        except WindveError as error:
            set_status(grpc_context, error)
            return Empty()

    async def _rank(self, requests: AsyncIterator[Received], model: ModelCalls, context: Context) -> RerankResponse:
        """Rank the texts of a stream. Raises the error of the first bad request."""
        asked = {"kinds": ("reranker",), "bulk": True, **self.asked_by(context, model)}

        async def answer(request: Received) -> tuple[RerankStreamRequest, Embedded]:
            sent = self.checked(request)
            return sent, await model.ask(sent, [Pair(sent.query, sent.text)], asked)

        found: list[tuple[RerankStreamRequest, Embedded]] = []
        size = 0
        async with aclosing(self.each("RerankStream", requests, answer, model, context)) as answers:
            async for sent, done in answers:
                found.append((sent, done))
                size += sent.ByteSize()
                check_size(size, self._max_bytes)
        if not found:
            raise EmptyInput("the stream contains no text; send at least one")
        first, texts = found[0][0], [sent.text for sent, _ in found]
        done = together([done for _, done in found])
        self.say_pool(done, model, context)
        return rerank_response(done, texts, raw=first.raw_scores, return_text=first.return_text)

    def open_stream(self, call: str, context: Context) -> ModelCalls:
        """Check the caller of a stream and select its model. Raises Unauthorized or UnknownModel."""
        try:
            self.let_in(context)
            return self.model_of(call.removesuffix("Stream"), context)
        except WindveError as error:
            if self.observer.on and (traced := self.observer.begin_call(headers_to_trace(context))) is not None:
                self.observer.end_call(traced, METHODS[call], error)
            raise

    def each(
        self,
        call: str,
        requests: AsyncIterator[Received],
        answer: Callable[[Received], Awaitable[T]],
        model: ModelCalls,
        context: Context,
    ) -> AsyncGenerator[T, None]:
        """The answers to a stream's requests, in order. Each request has its own trace."""
        if self.observer.on:
            answer = self.observer.tracing_each(METHODS[call], headers_to_trace(context), answer)
        return in_order(requests, answer, model.window)

    def asked_by(self, context: Context, model: ModelCalls) -> dict[str, Any]:
        asked = asked_by(context, model.space)
        asked["client"] = self.let_in(context)
        return asked

    def say_pool(self, done: Embedded, model: ModelCalls, context: Context) -> None:
        say(context, ("x-windve-pool", ",".join(done.pools)), (SPACE, model.space), *self._emulated)
