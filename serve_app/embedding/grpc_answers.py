"""Answers as TEI's messages. Pure.

A vector has the same layout in memory as protobuf's packed floats on the wire, so it is copied as a whole. Setting the
numbers one by one would take 40 times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from deployments.embedding.request import Embedded
from deployments.models.model_files import ModelCard
from deployments.models.outputs import unpack
from deployments.models.tokenizer import Token
from serve_app.embedding.output_shapes import Vector, best_first, scores, shape_vectors
from serve_app.embedding.requests import EmbedRequest
from serve_app.embedding.scoring_requests import PredictRequest, RerankRequest
from serve_app.proto import tei_pb2 as tei

_MODEL_TYPES = {  # by the one key of `model_type` in /info
    "embedding": tei.ModelType.MODEL_TYPE_EMBEDDING,
    "classifier": tei.ModelType.MODEL_TYPE_CLASSIFIER,
    "reranker": tei.ModelType.MODEL_TYPE_RERANKER,
}
_Floats = TypeVar("_Floats", tei.EmbedResponse, tei.TokenEmbedding)


def embed_response(done: Embedded, asked: EmbedRequest, _: ModelCard) -> tei.EmbedResponse:
    """A query's vector."""
    (vector,) = shape_vectors(done, unit=asked.normalize, dimensions=asked.dimensions)
    answer = _packed(tei.EmbedResponse, vector)
    _set_metadata(answer.metadata, done)
    return answer


def tokens_response(done: Embedded, *_: Any) -> tei.EmbedAllResponse:
    """The vector of each token of a query."""
    answer = tei.EmbedAllResponse(token_embeddings=[_packed(tei.TokenEmbedding, row) for row in done.vectors[0]])
    _set_metadata(answer.metadata, done)
    return answer


def sparse_response(done: Embedded, *_: Any) -> tei.EmbedSparseResponse:
    """The weights of a query's words."""
    indices, weights = unpack(done.vectors[0])
    pairs = zip(indices.tolist(), weights.tolist(), strict=True)
    answer = tei.EmbedSparseResponse(
        sparse_embeddings=[tei.SparseValue(index=index, value=value) for index, value in pairs]
    )
    _set_metadata(answer.metadata, done)
    return answer


def predict_response(done: Embedded, asked: PredictRequest, card: ModelCard) -> tei.PredictResponse:
    """Each label with its score, the likeliest first."""
    (row,) = scores(done, raw=asked.raw_scores)
    answer = tei.PredictResponse(
        predictions=[tei.Prediction(score=float(score), label=card.labels[index]) for index, score in best_first(row)]
    )
    _set_metadata(answer.metadata, done)
    return answer


def rerank_response(done: Embedded, asked: RerankRequest, _: ModelCard) -> tei.RerankResponse:
    """The scores of the texts, the best first."""
    answer = tei.RerankResponse(
        ranks=[
            tei.Rank(index=index, text=asked.texts[index] if asked.return_text else None, score=float(score))
            for index, score in best_first(scores(done, raw=asked.raw_scores)[:, 0])
        ]
    )
    _set_metadata(answer.metadata, done)
    return answer


def together(answers: Sequence[Embedded]) -> Embedded:
    """Merge the answers to several requests: sum tokens and characters, and take the longest of each time."""
    return Embedded(
        vectors=[vector for done in answers for vector in done.vectors],
        norms=[norm for done in answers for norm in done.norms],
        pools=tuple(sorted({pool for done in answers for pool in done.pools})),
        tokens=sum(done.tokens for done in answers),
        characters=sum(done.characters for done in answers),
        tokenization_s=max(done.tokenization_s for done in answers),
        queue_s=max(done.queue_s for done in answers),
        compute_s=max(done.compute_s for done in answers),
        total_s=max(done.total_s for done in answers),
    )


def encode_response(tokens: Sequence[Token]) -> tei.EncodeResponse:
    """A text's tokens. Special tokens have no `start` and no `stop`."""
    return tei.EncodeResponse(
        tokens=[
            tei.SimpleToken(id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop)
            for token in tokens
        ]
    )


def info_response(info: dict[str, Any]) -> tei.InfoResponse:
    """The content of `/info` as TEI's message."""
    shared = ("version", "model_id", "max_concurrent_requests", "max_input_length", "max_batch_tokens",
              "max_client_batch_size", "tokenization_workers")  # fmt: skip
    return tei.InfoResponse(
        **{name: info[name] for name in shared},
        model_sha=info["model_sha"],
        model_dtype=info["model_dtype"] or "",
        model_type=_MODEL_TYPES[next(iter(info["model_type"]))],
    )


def _packed(kind: type[_Floats], vector: Vector) -> _Floats:
    """A message whose first field holds these floats."""
    return kind.FromString(_field_head(len(vector)) + vector.astype("<f4", copy=False).tobytes())


@lru_cache
def _field_head(numbers: int) -> bytes:
    """The bytes before packed floats in a message's first field: the field number and the size."""
    return tei.EmbedResponse(embeddings=np.zeros(numbers)).SerializeToString()[: -4 * numbers]


def _set_metadata(metadata: tei.Metadata, done: Embedded) -> None:
    """Fill in the tokens, the characters and the times."""
    metadata.compute_chars = done.characters
    metadata.compute_tokens = done.tokens
    metadata.total_time_ns = _ns(done.total_s)
    metadata.tokenization_time_ns = _ns(done.tokenization_s)
    metadata.queue_time_ns = _ns(done.queue_s)
    metadata.inference_time_ns = _ns(done.compute_s)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
