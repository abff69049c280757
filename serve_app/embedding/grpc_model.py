"""TEI's gRPC calls to one model: turns messages into requests to its Router, and answers into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.embedding.request import Embedded, Wanted
from deployments.embedding.router import Router
from deployments.errors import BodyTooLarge, EmptyInput, InvalidInput
from deployments.models.text_pairs import Pair, Side
from deployments.models.tokenizer import Query
from serve_app.embedding.facts import record_of
from serve_app.embedding.grpc_answers import encode_response, given, info_response
from serve_app.embedding.output_shapes import describe
from serve_app.embedding.routes import routes_of
from serve_app.grpc_services import METHODS
from serve_app.observe.observer import current_request
from serve_app.proto.tei_pb2 import (
    DecodeRequest,
    DecodeResponse,
    EncodeRequest,
    EncodeResponse,
    InfoRequest,
    InfoResponse,
    RerankRequest,
    TruncationDirection,
)
from serve_app.rpc.service import is_live
from serve_app.web.fields import check_dimensions
from serve_app.web.json_values import MOST_VALUES

_ROUTE_OF = {  # the HTTP route of each call that only some kinds of models have
    "Embed": "/embed",
    "EmbedSparse": "/embed_sparse",
    "EmbedAll": "/embed_all",
    "Predict": "/predict",
    "PredictPair": "/predict",
    "Rerank": "/rerank",
}
_SIDES: dict[int, Side | None] = {
    TruncationDirection.TRUNCATION_DIRECTION_RIGHT: None,  # also if a client leaves it out
    TruncationDirection.TRUNCATION_DIRECTION_LEFT: "left",
}


class ModelCalls:
    """The calls to one model. `asked`: fields of `Wanted` that the call and its metadata set."""

    def __init__(self, router: Router) -> None:
        self._router, self.card, self.space = router, router.card, router.space

    @property
    def window(self) -> int:
        """How many requests of one stream are in progress at once: no more are read than the queues hold."""
        return max(1, self._router.capacity)

    def has(self, call: str) -> bool:
        """Whether this kind of model has the call."""
        return call not in _ROUTE_OF or _ROUTE_OF[call] in routes_of(self.card.kinds)

    def serves(self, service: str) -> bool:
        """Whether the model answers calls of this service now. `service` may also name a pool."""
        calls = [call for call, full in METHODS.items() if full.startswith(f"{service}/")]
        if calls and not any(call in _ROUTE_OF for call in calls):
            return True  # they need no replica
        return is_live(service, self._router.live_pools) and (
            not calls or any(self.has(call) for call in calls if call in _ROUTE_OF)
        )

    async def info(self, _: InfoRequest) -> InfoResponse:
        await self._router.hear_replicas()
        return info_response(describe(self._router))

    async def query(self, request: Any, asked: Mapping[str, Any]) -> Embedded:
        """Answer a message with one text or pair. Raises EmptyInput and what `ask` raises."""
        check_dimensions(given(request, "dimensions"), self.card.dimension)
        return await self.ask(request, [query_of(request.inputs)], asked)

    async def rank(self, request: RerankRequest, asked: Mapping[str, Any]) -> Embedded:
        """Score all texts. They are admitted or refused together."""
        check_count(request.texts, self._router.settings.limits.max_inputs_per_request)
        pairs = [Pair(request.query, text) for text in request.texts]
        return await self.ask(request, pairs, {"kinds": ("reranker",), **asked})

    async def ask(self, request: Any, queries: Sequence[Query], asked: Mapping[str, Any]) -> Embedded:
        """Send the queries to the Router. Raises what `Router.embed` raises."""
        if request.truncation_direction not in _SIDES:
            raise InvalidInput(
                f"truncation_direction must be 0 (right) or 1 (left), not {request.truncation_direction}"
            )
        wanted = Wanted(
            truncate=request.truncate,
            truncation_direction=_SIDES[request.truncation_direction],
            prompt_name=given(request, "prompt_name"),
            record=record_of(current_request()),
            **asked,
        )
        return await self._router.embed(queries, wanted)

    async def tokenize(self, request: EncodeRequest) -> EncodeResponse:
        (tokens,) = await self._router.tokenize(
            [text_of(request.inputs)],
            special_tokens=request.add_special_tokens,
            prompt_name=given(request, "prompt_name"),
        )
        return encode_response(tokens)

    async def decode(self, request: DecodeRequest) -> DecodeResponse:
        if len(request.ids) > MOST_VALUES:
            raise BodyTooLarge(f"ids has {len(request.ids)} token ids, this server accepts {MOST_VALUES}; send fewer")
        (text,) = await self._router.decode([list(request.ids)], skip_special_tokens=request.skip_special_tokens)
        return DecodeResponse(text=text)


def check_count(texts: Sequence[str], most: int) -> None:
    """Raises EmptyInput or InvalidInput."""
    if not texts:
        raise EmptyInput("texts is an empty list; send at least one item")
    if len(texts) > most:
        raise InvalidInput(
            f"texts has {len(texts)} items and this server accepts {most} per request; send fewer at once"
        )


def query_of(inputs: str | Sequence[str]) -> Query:
    """The query in a text, in a list of one text, or in a pair. Raises EmptyInput or InvalidInput."""
    if isinstance(inputs, str):
        return text_of(inputs)
    if len(inputs) not in {1, 2}:
        raise InvalidInput(f"inputs is a list of {len(inputs)} strings; send one text, or the two texts of a pair")
    return text_of(inputs[0]) if len(inputs) == 1 else Pair(*inputs)


def text_of(inputs: str) -> str:
    if not inputs:
        raise EmptyInput("inputs is an empty string; send text")
    return inputs
