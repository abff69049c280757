"""TEI's gRPC calls to one model: messages as requests of its Router, answers as messages."""

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


class ModelCalls:
    """What calls ask of one model. `asked`: fields of `Wanted`, by the call itself and by its metadata."""

    def __init__(self, router: Router) -> None:
        self._router, self.card = router, router.card

    @property
    def window(self) -> int:
        """Requests of one stream that are worked on at once: more than fits into the queues is not read."""
        return max(1, self._router.capacity)

    def has(self, call: str) -> bool:
        """The call is for models of this kind."""
        return call not in _ROUTE_OF or _ROUTE_OF[call] in routes_of(self.card.kinds)

    def serves(self, service: str) -> bool:
        """Calls of this service to the model are answered now; of a pool's name: that pool answers."""
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
        """What a message with one text or pair asks. Raises what `ask` raises, and EmptyInput."""
        check_dimensions(given(request, "dimensions"), self.card.dimension)
        return await self.ask(request, [query_of(request.inputs)], asked)

    async def rank(self, request: RerankRequest, asked: Mapping[str, Any]) -> Embedded:
        """All texts are one admission decision."""
        check_count(request.texts, self._router.settings.limits.max_inputs_per_request)
        pairs = [Pair(request.query, text) for text in request.texts]
        return await self.ask(request, pairs, {"kinds": ("reranker",), **asked})

    async def ask(self, request: Any, queries: Sequence[Query], asked: Mapping[str, Any]) -> Embedded:
        """Of the Router. Raises what `Router.embed` raises."""
        side = _SIDES.get(request.truncation_direction)
        if side is None:
            raise InvalidInput(
                f"truncation_direction must be 0 (right) or 1 (left), not {request.truncation_direction}"
            )
        wanted = Wanted(
            truncate=request.truncate,
            truncation_direction=side,
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
            raise BodyTooLarge(f"ids has {len(request.ids)} token ids and this server takes {MOST_VALUES}; send fewer")
        (text,) = await self._router.decode([list(request.ids)], skip_special_tokens=request.skip_special_tokens)
        return DecodeResponse(text=text)


def check_count(texts: Sequence[str], most: int) -> None:
    """Raises EmptyInput or InvalidInput."""
    if not texts:
        raise EmptyInput("texts is an empty list; send at least one item")
    if len(texts) > most:
        raise InvalidInput(
            f"texts has {len(texts)} items and this server takes {most} in one request; send fewer at once"
        )


def query_of(inputs: str | Sequence[str]) -> Query:
    """A text, or a list of one text or of a pair. Raises EmptyInput or InvalidInput."""
    if isinstance(inputs, str):
        return text_of(inputs)
    if len(inputs) not in {1, 2}:
        raise InvalidInput(f"inputs is a list of {len(inputs)} strings; send a text, or the two of a pair")
    return text_of(inputs[0]) if len(inputs) == 1 else Pair(*inputs)


def text_of(inputs: str) -> str:
    if not inputs:
        raise EmptyInput("inputs is an empty string; send text")
    return inputs
