"""TEI's gRPC calls, and the standard health check. What carries queries ends in `Router.embed`, as in `http_api.py`."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import lru_cache, wraps
from typing import Any, TypeVar

import grpc
import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext

from deployments.errors import BodyTooLarge, Busy, EmptyInput, InvalidInput, Unavailable, UnknownModel, WindveError
from deployments.models.tokenizer import Side, Token
from deployments.placement.request import Embedded, Wanted
from deployments.router import Router
from serve_app.answers import describe, shape_vectors
from serve_app.api_keys import ApiKeys
from serve_app.fields import check_dimensions
from serve_app.grpc_services import SERVICES
from serve_app.kinds import routes_of
from serve_app.proto.tei_pb2 import (
    DecodeRequest,
    DecodeResponse,
    EmbedRequest,
    EmbedResponse,
    EncodeRequest,
    EncodeResponse,
    InfoRequest,
    InfoResponse,
    ModelType,
    SimpleToken,
    TruncationDirection,
)
from serve_app.requests import admission
from serve_app.several_models import ByModel

_LARGEST_DETAILS = 2_000  # bytes; each may take three in an HTTP/2 header, and clients take 8 KiB of headers
_UNAVAILABLE_RETRY_S = 1.0
_MODEL_TYPES = {  # by the one key of `model_type` in /info
    "embedding": ModelType.MODEL_TYPE_EMBEDDING,
    "classifier": ModelType.MODEL_TYPE_CLASSIFIER,
    "reranker": ModelType.MODEL_TYPE_RERANKER,
}
_ROUTE_OF = {"Embed": "/embed"}  # the HTTP route to the same, of what not every kind of model has
_SIDES: dict[int, Side] = {
    TruncationDirection.TRUNCATION_DIRECTION_RIGHT: "right",
    TruncationDirection.TRUNCATION_DIRECTION_LEFT: "left",
}

Received = Message | InvalidInput  # what `grpc_services.reader` makes of a client's bytes
Request = TypeVar("Request", bound=Message)
Method = Callable[["GrpcApi", Request, RayServegRPCContext], Awaitable[Message]]


def _unary(method: Method[Request]) -> Callable[[GrpcApi, Received, RayServegRPCContext], Awaitable[Message]]:
    """A call with one request and one answer. What is wrong becomes its status: Serve would log what is raised."""

    @wraps(method)
    async def call(self: GrpcApi, request: Received, grpc_context: RayServegRPCContext) -> Message:
        try:
            self.let_in(grpc_context)
            return await method(self.meant(method.__name__, grpc_context), self.checked(request), grpc_context)
        except WindveError as error:
            set_status(grpc_context, error)
            return Empty()  # gRPC sends none where the status is not OK

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
            self.let_in(grpc_context)
            api = self.meant(method.__name__.removesuffix("Stream"), grpc_context)
            async with aclosing(in_order(requests, answer, api.window)) as answers:
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

    def __init__(self, router: Router, api_keys: ApiKeys | None = None) -> None:
        self._router = router
        self._all = ByModel({router.card.name: self})
        self._api_keys = api_keys
        self._max_bytes = router.settings.limits.max_body_bytes
        self._emulated = [("x-windve-emulated", "true")] if router.settings.emulated else []

    @classmethod
    def of_models(cls, routers: ByModel[Router], api_keys: ApiKeys | None) -> GrpcApi:
        """The calls to all of these models: the metadata `model` say which one is meant."""
        apis = routers.each(lambda router: cls(router, api_keys))
        for api in apis:
            api.join(apis)
        return apis.first

    def join(self, apis: ByModel[GrpcApi]) -> None:
        """Let these, which include it, answer the calls that are for their models."""
        self._all = apis

    def meant(self, call: str, context: RayServegRPCContext) -> GrpcApi:
        """Of the model that the metadata name, or of the first that has this call. Raises UnknownModel."""
        name = _metadata(context, "model")
        if name is not None:
            return self._all.named(name)
        return next((api for api in self._all if api.has(call)), self)

    def has(self, call: str) -> bool:
        """The call is for models of this kind."""
        return call not in _ROUTE_OF or _ROUTE_OF[call] in routes_of(self._router.card.kinds)

    @property
    def can_answer(self) -> bool:
        return self._router.can_answer

    @_unary
    async def Info(self, request: InfoRequest, grpc_context: RayServegRPCContext) -> InfoResponse:
        await self._router.hear_replicas()
        return info_response(describe(self._router))

    @_unary
    async def Embed(self, request: EmbedRequest, grpc_context: RayServegRPCContext) -> EmbedResponse:
        done = await self._embed(request, _asked(grpc_context))
        grpc_context.set_trailing_metadata([("x-windve-pool", ",".join(done.pools)), *self._emulated])
        return embed_response(done, request)

    @_stream
    async def EmbedStream(self, request: EmbedRequest, grpc_context: RayServegRPCContext) -> EmbedResponse:
        """Bulk, unless the client says otherwise: a stream waits for room, and leaves half of it to others."""
        return embed_response(await self._embed(request, {"bulk": True, **_asked(grpc_context)}), request)

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

    async def Check(self, request: Received, grpc_context: RayServegRPCContext) -> Message:
        """The standard health check (grpc.health.v1). It needs no key, as `/health` needs none."""
        if not isinstance(request, HealthCheckRequest) or request.service not in {"", *SERVICES}:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"there is no such service here, only {', '.join(SERVICES)}")
            return Empty()
        name = _metadata(grpc_context, "model")
        try:
            asked = [self._all.named(name)] if name is not None else list(self._all)
        except UnknownModel as error:
            set_status(grpc_context, error)
            return Empty()
        good = any(api.can_answer for api in asked)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if good else HealthCheckResponse.NOT_SERVING)

    async def _embed(self, request: EmbedRequest, asked: dict[str, Any]) -> Embedded:
        side = _SIDES.get(request.truncation_direction)
        if side is None:
            raise InvalidInput(
                f"truncation_direction must be 0 (right) or 1 (left), not {request.truncation_direction}"
            )
        check_dimensions(_given(request, "dimensions"), self._router.card.dimension)
        wanted = Wanted(
            truncate=request.truncate, truncation_direction=side, prompt_name=_given(request, "prompt_name"), **asked
        )
        return await self._router.embed([_text(request.inputs)], wanted)

    async def _tokenize(self, request: EncodeRequest) -> EncodeResponse:
        (tokens,) = await self._router.tokenize(
            [_text(request.inputs)],
            special_tokens=request.add_special_tokens,
            prompt_name=_given(request, "prompt_name"),
        )
        return encode_response(tokens)

    async def _decode(self, request: DecodeRequest) -> DecodeResponse:
        (text,) = await self._router.decode([list(request.ids)], skip_special_tokens=request.skip_special_tokens)
        return DecodeResponse(text=text)

    @property
    def window(self) -> int:
        """Requests of one stream that are worked on at once: more than fits into the queues is not read."""
        return max(1, self._router.capacity)

    def let_in(self, context: RayServegRPCContext) -> None:
        """Raises Unauthorized."""
        if self._api_keys is not None:
            self._api_keys.check(_metadata(context, "authorization"))

    def checked(self, request: Received) -> Any:
        """The message, if it is one and not larger than an HTTP body may be. Raises InvalidInput."""
        if isinstance(request, InvalidInput):
            raise request
        if request.ByteSize() > self._max_bytes:
            raise BodyTooLarge(
                f"the message is larger than this server takes ({self._max_bytes} bytes); send less text"
            )
        return request


async def in_order(
    requests: AsyncIterator[Received], answer: Callable[[Received], Awaitable[Message]], most: int
) -> AsyncGenerator[Message, None]:
    """The answers to `requests`, at most `most` of them worked on at once. Raises what the first bad one raises."""
    answers: deque[asyncio.Future[Message]] = deque()
    coming: deque[asyncio.Future[Received | None]] = deque([asyncio.ensure_future(anext(requests, None))])  # or nothing
    try:
        while answers or coming:
            reads = coming if len(answers) < most else ()
            await asyncio.wait([*list(answers)[:1], *reads], return_when=asyncio.FIRST_COMPLETED)
            if reads and coming[0].done():
                request = coming.popleft().result()
                if request is not None:
                    answers.append(asyncio.ensure_future(answer(request)))
                    coming.append(asyncio.ensure_future(anext(requests, None)))
            while answers and answers[0].done():
                yield answers.popleft().result()
    finally:
        left: list[asyncio.Future[Any]] = [*answers, *coming]
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _metadata(context: RayServegRPCContext, name: str) -> str | None:
    return next((value for key, value in context.invocation_metadata() if key == name), None)


def _asked(context: RayServegRPCContext) -> dict[str, Any]:
    """What a call's metadata ask for beyond what is usual: the same names as HTTP's headers. Raises InvalidInput."""
    metadata: Sequence[tuple[str, str | bytes]] = context.invocation_metadata()
    return admission({key.encode(): value.encode() for key, value in metadata if isinstance(value, str)})


def set_status(context: RayServegRPCContext, error: WindveError) -> None:
    """An error as a call's status; with it, when to come back, for gRPC's own retries (gRFC A6) too."""
    context.set_code(grpc.StatusCode[error.grpc_status])
    context.set_details(error.message.encode()[:_LARGEST_DETAILS].decode(errors="ignore"))
    retry_after_s = error.retry_after_s if isinstance(error, Busy) else _UNAVAILABLE_RETRY_S
    if isinstance(error, (Busy, Unavailable)):
        milliseconds = str(math.ceil(retry_after_s * 1000))
        context.set_trailing_metadata([("retry-after-ms", milliseconds), ("grpc-retry-pushback-ms", milliseconds)])


def embed_response(done: Embedded, request: EmbedRequest) -> EmbedResponse:
    """A query's vector, bit for bit, and where its time went."""
    unit = _given(request, "normalize") is not False
    (vector,) = shape_vectors(done, unit=unit, dimensions=_given(request, "dimensions"))
    # A vector is in memory as protobuf has packed floats on the wire; number by number it would take 40 times as long.
    answer = EmbedResponse.FromString(_field_head(len(vector)) + vector.astype("<f4", copy=False).tobytes())
    metadata = answer.metadata
    metadata.compute_chars = done.characters
    metadata.compute_tokens = done.tokens
    metadata.total_time_ns = _ns(done.total_s)
    metadata.tokenization_time_ns = _ns(done.tokenization_s)
    metadata.queue_time_ns = _ns(done.queue_s)
    metadata.inference_time_ns = _ns(done.compute_s)
    return answer


@lru_cache
def _field_head(numbers: int) -> bytes:
    """What protobuf writes before the packed floats of `embeddings`: the field's number and the size."""
    return EmbedResponse(embeddings=np.zeros(numbers)).SerializeToString()[: -4 * numbers]


def encode_response(tokens: Sequence[Token]) -> EncodeResponse:
    """A text's tokens; a special one has no place in it."""
    return EncodeResponse(
        tokens=[
            SimpleToken(id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop)
            for token in tokens
        ]
    )


def info_response(info: dict[str, Any]) -> InfoResponse:
    """What `/info` says, as TEI's message has it."""
    shared = ("version", "model_id", "max_concurrent_requests", "max_input_length", "max_batch_tokens",
              "max_client_batch_size", "tokenization_workers")  # fmt: skip
    return InfoResponse(
        **{name: info[name] for name in shared},
        model_sha=info["model_sha"],
        model_dtype=info["model_dtype"] or "",
        model_type=_MODEL_TYPES[next(iter(info["model_type"]))],
    )


def _text(inputs: str) -> str:
    if not inputs:
        raise EmptyInput("inputs is an empty string; send text")
    return inputs


def _given(request: Message, field: str) -> Any:
    """An optional field's value, or None."""
    return getattr(request, field) if request.HasField(field) else None


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
