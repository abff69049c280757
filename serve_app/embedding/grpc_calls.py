"""TEI's gRPC calls, single and in streams: which model each is for, who may call. `grpc_model.py` asks the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from deployments.embedding.request import Embedded
from deployments.embedding.router import Router
from deployments.errors import EmptyInput, WindveError
from deployments.models.text_pairs import Pair
from serve_app.api_keys import ApiKeys
from serve_app.config.models import ByModel
from serve_app.embedding.grpc_answers import rerank_response, together
from serve_app.embedding.grpc_model import ALL, EMBED, PREDICT, SPARSE, Call, ModelCalls
from serve_app.grpc_services import METHODS, SERVICES
from serve_app.observe.observer import Observer
from serve_app.proto.tei_pb2 import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    EncodeRequest,
    InfoRequest,
    PredictPairRequest,
    PredictRequest,
    RerankRequest,
    RerankResponse,
    RerankStreamRequest,
)
from serve_app.rpc.calls import Received, asked_by, check_size, headers_to_trace, in_order, metadata_of, say, set_status
from serve_app.rpc.service import GrpcService

Context = RayServegRPCContext
Request = TypeVar("Request", bound=Message)
T = TypeVar("T")
Method = Callable[["TeiCalls", ModelCalls, Request, Context], Awaitable[Message]]


def _unary(method: Method[Request]) -> Callable[[TeiCalls, Received, Context], Awaitable[Message]]:
    """A call with one request and one answer, of the model that it is for."""
    name = method.__name__
    full_name = METHODS[name]

    @wraps(method)
    async def call(self: TeiCalls, request: Received, grpc_context: Context) -> Message:
        with self.call(full_name, grpc_context) as scope:
            scope.came_from(self.let_in(grpc_context))
            return await method(self, self.model_of(name, grpc_context), self.checked(request), grpc_context)
        return Empty()

    return call


def _stream(
    method: Method[Request],
) -> Callable[[TeiCalls, AsyncIterator[Received], Context], AsyncGenerator[Message, None]]:
    """A call with many requests, answered by `method` in their order. The first that is refused ends it."""
    name = method.__name__

    @wraps(method)
    async def call(
        self: TeiCalls, requests: AsyncIterator[Received], grpc_context: Context
    ) -> AsyncGenerator[Message, None]:
        async def answer(request: Received) -> Message:
            return await method(self, model, self.checked(request), grpc_context)

        try:
            model = self.open_stream(name, grpc_context)
            async with aclosing(self.each(name, requests, answer, model, grpc_context)) as answers:
                async for message in answers:
                    yield message
        except WindveError as error:
            set_status(grpc_context, error)
            raise  # Serve's own proxy looks at what was set only then, and would end the stream as if all were answered

    return call


class TeiCalls(GrpcService):
    """The calls to all models of one Router replica; the metadata `model` say which one is meant. Each method has the
    name of its call, and Serve's name for the context.
    """

    def __init__(
        self, routers: ByModel[Router], api_keys: ApiKeys | None = None, observer: Observer | None = None
    ) -> None:
        settings = routers.first.settings  # both that are used here are the same for all models
        super().__init__(
            SERVICES, api_keys, observer, max_bytes=settings.limits.max_body_bytes, emulated=settings.emulated
        )
        self._models = routers.each(ModelCalls)

    def model_of(self, call: str, context: Context) -> ModelCalls:
        """The model that the metadata name, or the first that has this call. Raises UnknownModel."""
        name = metadata_of(context, "model")
        if name is not None:
            return self._models.named(name)
        return next((model for model in self._models if model.has(call)), self._models.first)

    def is_served(self, service: str, model: str | None) -> bool:
        """By one of these models, or by any (None). Raises UnknownModel."""
        asked = self._models if model is None else [self._models.named(model)]
        return any(one.serves(service) for one in asked)

    @_unary
    async def Info(self, model: ModelCalls, request: InfoRequest, grpc_context: Context) -> Message:
        return await model.info()

    @_unary
    async def Embed(self, model: ModelCalls, request: EmbedRequest, grpc_context: Context) -> Message:
        return await self._answer(EMBED, model, request, grpc_context)

    @_stream
    async def EmbedStream(self, model: ModelCalls, request: EmbedRequest, grpc_context: Context) -> Message:
        return await self._answer_in_stream(EMBED, model, request, grpc_context)

    @_unary
    async def EmbedSparse(self, model: ModelCalls, request: EmbedSparseRequest, grpc_context: Context) -> Message:
        return await self._answer(SPARSE, model, request, grpc_context)

    @_stream
    async def EmbedSparseStream(self, model: ModelCalls, request: EmbedSparseRequest, grpc_context: Context) -> Message:
        return await self._answer_in_stream(SPARSE, model, request, grpc_context)

    @_unary
    async def EmbedAll(self, model: ModelCalls, request: EmbedAllRequest, grpc_context: Context) -> Message:
        return await self._answer(ALL, model, request, grpc_context)

    @_stream
    async def EmbedAllStream(self, model: ModelCalls, request: EmbedAllRequest, grpc_context: Context) -> Message:
        return await self._answer_in_stream(ALL, model, request, grpc_context)

    @_unary
    async def Predict(self, model: ModelCalls, request: PredictRequest, grpc_context: Context) -> Message:
        return await self._answer(PREDICT, model, request, grpc_context)

    @_stream
    async def PredictStream(self, model: ModelCalls, request: PredictRequest, grpc_context: Context) -> Message:
        return await self._answer_in_stream(PREDICT, model, request, grpc_context)

    @_unary
    async def PredictPair(self, model: ModelCalls, request: PredictPairRequest, grpc_context: Context) -> Message:
        return await self._answer(PREDICT, model, request, grpc_context)

    @_stream
    async def PredictPairStream(self, model: ModelCalls, request: PredictPairRequest, grpc_context: Context) -> Message:
        return await self._answer_in_stream(PREDICT, model, request, grpc_context)

    @_unary
    async def Rerank(self, model: ModelCalls, request: RerankRequest, grpc_context: Context) -> Message:
        done, message = await model.rerank(request, self._asked_by(grpc_context))
        self._say_pool(done, grpc_context)
        return message

    async def RerankStream(self, requests: AsyncIterator[Received], grpc_context: Context) -> Message:
        """As the queries of other streams these are bulk, each admitted by itself; all are answered at once."""
        try:
            return await self._rank(requests, self.open_stream("RerankStream", grpc_context), grpc_context)
        except WindveError as error:
            set_status(grpc_context, error)
            return Empty()

    @_unary
    async def Tokenize(self, model: ModelCalls, request: EncodeRequest, grpc_context: Context) -> Message:
        return await model.tokenize(request)

    @_stream
    async def TokenizeStream(self, model: ModelCalls, request: EncodeRequest, grpc_context: Context) -> Message:
        return await model.tokenize(request)

    @_unary
    async def Decode(self, model: ModelCalls, request: DecodeRequest, grpc_context: Context) -> Message:
        return await model.decode(request)

    @_stream
    async def DecodeStream(self, model: ModelCalls, request: DecodeRequest, grpc_context: Context) -> Message:
        return await model.decode(request)

    async def _answer(self, call: Call, model: ModelCalls, request: Any, context: Context) -> Message:
        done, message = await model.answer(call, request, self._asked_by(context))
        self._say_pool(done, context)
        return message

    async def _answer_in_stream(self, call: Call, model: ModelCalls, request: Any, context: Context) -> Message:
        """A stream's queries are bulk, unless its client says otherwise: it waits for room, and leaves others half."""
        return (await model.answer(call, request, {"bulk": True, **self._asked_by(context)}))[1]

    async def _rank(self, requests: AsyncIterator[Received], model: ModelCalls, context: Context) -> RerankResponse:
        """The texts of a stream, against its queries. Raises what the first bad one raises."""
        asked = {"kinds": ("reranker",), "bulk": True, **self._asked_by(context)}

        async def answer(request: Received) -> tuple[RerankStreamRequest, Embedded]:
            sent = self.checked(request)
            return sent, await model.ask(sent, [Pair(sent.query, sent.text)], **asked)

        found: list[tuple[RerankStreamRequest, Embedded]] = []
        size = 0
        async with aclosing(self.each("RerankStream", requests, answer, model, context)) as answers:
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

    def open_stream(self, call: str, context: Context) -> ModelCalls:
        """The calls to the model that a stream is for. Raises Unauthorized or UnknownModel."""
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
        """The answers to a stream's requests, in their order; each request is traced by itself."""
        if self.observer.on:
            answer = self.observer.tracing_each(METHODS[call], headers_to_trace(context), answer)
        return in_order(requests, answer, model.window)

    def _asked_by(self, context: Context) -> dict[str, Any]:
        return {**asked_by(context), "client": self.let_in(context)}

    def _say_pool(self, done: Embedded, context: Context) -> None:
        say(context, ("x-windve-pool", ",".join(done.pools)), *self._emulated)
