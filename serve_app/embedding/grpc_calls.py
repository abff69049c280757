"""TEI's gRPC calls, unary and streaming. Each is answered as the HTTP route of the same content, by the same types."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from deployments.embedding.request import Embedded
from deployments.embedding.router import Router
from deployments.errors import BodyTooLarge, EmptyInput, InvalidInput, WindveError
from deployments.models.model_files import ModelCard
from serve_app.api_keys import ApiKeys
from serve_app.config.models import ByModel
from serve_app.embedding.asking import Asking, describe
from serve_app.embedding.grpc_answers import (
    embed_response,
    encode_response,
    info_response,
    predict_response,
    rerank_response,
    sparse_response,
    together,
    tokens_response,
)
from serve_app.embedding.routes import ROUTES, routes_of
from serve_app.grpc_services import METHODS, SERVICES
from serve_app.observe.observer import Observer, current_request
from serve_app.proto import tei_pb2 as tei
from serve_app.rpc import (
    CallScope,
    GrpcService,
    Received,
    asked_by,
    check_size,
    headers_to_trace,
    in_order,
    is_live,
    metadata_of,
    say,
    set_status,
)
from serve_app.web.json_values import MOST_VALUES
from serve_app.web.request_headers import SPACE
from serve_app.web.tokenizer_routes import TokenizeRequest

Context = RayServegRPCContext
_ROUTE_OF = {  # the HTTP route of each call that only some kinds of models have
    "Embed": "/embed",
    "EmbedSparse": "/embed_sparse",
    "EmbedAll": "/embed_all",
    "Predict": "/predict",
    "PredictPair": "/predict",
    "Rerank": "/rerank",
}
_SIDES: dict[int, dict[str, str]] = {
    tei.TruncationDirection.TRUNCATION_DIRECTION_RIGHT: {},  # also if a client leaves it out
    tei.TruncationDirection.TRUNCATION_DIRECTION_LEFT: {"truncation_direction": "left"},
}
T = TypeVar("T")
Reply = Callable[[Embedded, Any, ModelCard], Message]  # turns an answer into a message
Method = Callable[["TeiCalls", "ModelCalls", Any, Context], Awaitable[Message]]  # answers one message


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


def _both(name: str, reply: Reply) -> tuple[Any, Any]:
    """A call for a text or a pair that a device answers as HTTP's route does, and its stream, whose queries are bulk
    unless the client says otherwise.
    """
    path = _ROUTE_OF[name]

    async def method(self: TeiCalls, model: ModelCalls, request: Any, context: Context) -> Message:
        asked, done = await model.ask_as(path, fields_of(request), self.asked_by(context, model))
        self.say_pool(done, model, context)
        return reply(done, asked, model.card)

    async def in_stream(self: TeiCalls, model: ModelCalls, request: Any, context: Context) -> Message:
        admission = {"bulk": True, **self.asked_by(context, model)}
        asked, done = await model.ask_as(path, fields_of(request), admission)
        return reply(done, asked, model.card)

    return _unary(name, method), _stream(f"{name}Stream", in_stream)


def _plain(answer: Callable[[ModelCalls, Any], Awaitable[Message]]) -> Method:
    """A call that needs no device."""

    async def method(_: TeiCalls, model: ModelCalls, request: Any, __: Context) -> Message:
        return await answer(model, request)

    return method


class ModelCalls(Asking):
    """The calls to one model."""

    @property
    def space(self) -> str:
        return self.router.space

    @property
    def window(self) -> int:
        """How many requests of one stream are in progress at once: no more are read than the queues hold."""
        return max(1, self.router.capacity)

    def has(self, call: str) -> bool:
        """Whether this kind of model has the call."""
        return call not in _ROUTE_OF or _ROUTE_OF[call] in routes_of(self.card.kinds)

    def serves(self, service: str) -> bool:
        """Whether the model answers calls of this service now. `service` may also name a pool."""
        calls = [call for call, full in METHODS.items() if full.startswith(f"{service}/")]
        if calls and not any(call in _ROUTE_OF for call in calls):
            return True  # they need no replica
        return is_live(service, self.router.live_pools) and (
            not calls or any(self.has(call) for call in calls if call in _ROUTE_OF)
        )

    async def ask_as(self, path: str, fields: dict[str, Any], admission: dict[str, Any]) -> tuple[Any, Embedded]:
        """The request as the HTTP route `path` reads it, and its answer. Raises what either raises."""
        route = ROUTES[path]
        asked: Any = route.takes.parse(fields, self.rules)
        return asked, await self.ask(route, asked, asked.queries, current_request(), **admission)

    async def info(self, _: tei.InfoRequest) -> tei.InfoResponse:
        await self.router.hear_replicas()
        return info_response(describe(self.router))

    async def tokenize(self, request: tei.EncodeRequest) -> tei.EncodeResponse:
        asked = TokenizeRequest.parse(fields_of(request), self.rules)
        (tokens,) = await self.router.encoder.tokenize(
            asked.texts, special_tokens=asked.add_special_tokens, prompt_name=asked.prompt_name
        )
        return encode_response(tokens)

    async def decode(self, request: tei.DecodeRequest) -> tei.DecodeResponse:
        if len(request.ids) > MOST_VALUES:
            raise BodyTooLarge(f"ids has {len(request.ids)} token ids, this server accepts {MOST_VALUES}; send fewer")
        (text,) = await self.router.encoder.decode([list(request.ids)], skip_special_tokens=request.skip_special_tokens)
        return tei.DecodeResponse(text=text)


def fields_of(message: Message) -> dict[str, Any]:
    """A message as the JSON of the same HTTP route."""
    found = {}
    for field in message.DESCRIPTOR.fields:
        if not field.has_presence or message.HasField(field.name):
            value = getattr(message, field.name)
            found[field.name] = value if isinstance(value, str | int) else list(value)
    if (side := found.pop("truncation_direction", 0)) not in _SIDES:
        raise InvalidInput(f"truncation_direction must be 0 (right) or 1 (left), not {side}")
    return {**found, **_SIDES[side]}


class TeiCalls(GrpcService):
    """The calls to all models of one Router replica. The metadata `model` selects the model. Serve finds each call by
    its name in `proto/tei.proto`.
    """

    Info = _unary("Info", _plain(ModelCalls.info))
    Embed, EmbedStream = _both("Embed", embed_response)
    EmbedSparse, EmbedSparseStream = _both("EmbedSparse", sparse_response)
    EmbedAll, EmbedAllStream = _both("EmbedAll", tokens_response)
    Predict, PredictStream = _both("Predict", predict_response)
    PredictPair, PredictPairStream = _both("PredictPair", predict_response)
    Rerank = _both("Rerank", rerank_response)[0]
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

    async def _rank(self, requests: AsyncIterator[Received], model: ModelCalls, context: Context) -> tei.RerankResponse:
        """Rank the texts of a stream. Raises the error of the first bad request."""
        admission = {"bulk": True, **self.asked_by(context, model)}

        async def answer(request: Received) -> tuple[tei.RerankStreamRequest, Any, Embedded]:
            sent = self.checked(request)
            return sent, *await model.ask_as("/rerank", {**fields_of(sent), "texts": [sent.text]}, admission)

        found: list[tuple[tei.RerankStreamRequest, Any, Embedded]] = []
        size = 0
        async with aclosing(self.each("RerankStream", requests, answer, model, context)) as answers:
            async for one in answers:
                found.append(one)
                size += one[0].ByteSize()
                check_size(size, self._max_bytes)
        if not found:
            raise EmptyInput("the stream contains no text; send at least one")
        first = found[0][1].model_copy(update={"texts": [sent.text for sent, *_ in found]})
        done = together([done for *_, done in found])
        self.say_pool(done, model, context)
        return rerank_response(done, first, model.card)

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
