"""An embedding model's answers in the form of each API: request, vectors, model card -> JSON. Pure, except for ids and
the time of day.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deployments.embedding.request import Embedded
from deployments.models.model_files import ModelCard
from deployments.models.outputs import unpack
from serve_app.embedding import requests
from serve_app.embedding.ollama import OllamaEmbedRequest, OllamaPromptRequest
from serve_app.embedding.output_shapes import Vector, as_base64, cut_rows, narrow, quantize, shape_vectors

Named = Callable[[str | None], str]  # `HttpRequest.named`: the end of an answer's id


def openai(asked: requests.OpenAIRequest, done: Embedded, card: ModelCard, _: Named) -> dict[str, Any]:
    """OpenAI's `/v1/embeddings`. `embedding_type` is NIM's; `embed_dtype`, `endianness` and the id are vLLM's."""
    unit = card.normalize if asked.normalize is None else asked.normalize
    vectors = shape_vectors(done, unit=unit, dimensions=asked.dimensions)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(_encoded(vectors, asked))
        ],
        "model": card.name,
        "usage": usage(done),
        **({"id": f"embd-{asked.request_id}"} if asked.request_id else {}),
    }


def usage(done: Embedded) -> dict[str, int]:
    """OpenAI's `usage` of an embeddings answer."""
    return {"prompt_tokens": done.tokens, "total_tokens": done.tokens}


def vllm_list(name: str, items: Sequence[Mapping[str, Any]], done: Embedded, card: ModelCard) -> dict[str, Any]:
    """The list of vLLM with one item per query. `name`: the answer's id."""
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": card.name,
        "data": [{"index": index, **item} for index, item in enumerate(items)],
        "usage": {**usage(done), "completion_tokens": 0},
    }


def _encoded(vectors: Sequence[Vector], asked: requests.OpenAIRequest) -> Sequence[Any]:
    in_text = "base64" in {asked.encoding_format, asked.embedding_type}
    if asked.embedding_type != "float" and asked.embedding_type != "base64":  # noqa: PLR1714 - mypy narrows by it
        quantized = quantize(np.stack(vectors), asked.embedding_type)
        return [as_base64(vector) for vector in quantized] if in_text else list(quantized)
    if in_text:
        return [as_base64(narrow(vector, asked.embed_dtype, asked.endianness)) for vector in vectors]
    return [np.ascontiguousarray(vector) for vector in vectors]


def tei(asked: requests.EmbedRequest | requests.RootRequest, done: Embedded, *_: Any) -> Sequence[Vector]:
    """TEI's `/embed`."""
    vectors = shape_vectors(done, unit=asked.normalize, dimensions=asked.dimensions)
    return [np.ascontiguousarray(vector) for vector in vectors]


def bare(_: Any, done: Embedded, *__: Any) -> Sequence[Vector]:
    """TEI's `/embed_all`: as the model gives them."""
    return done.vectors


def sparse(_: Any, done: Embedded, *__: Any) -> list[Any]:
    """TEI's `/embed_sparse`."""
    return [
        [{"index": index, "value": value} for index, value in zip(indices.tolist(), weights, strict=True)]
        for indices, weights in map(unpack, done.vectors)
    ]


def cosines(_: requests.SimilarityRequest | requests.RootRequest, done: Embedded, *__: Any) -> Vector:
    """TEI's `/similarity`: cosines of the first query's vector with each other vector."""
    source, *others = done.vectors
    found: Vector = np.clip(np.stack(others) @ source, -1, 1)
    return found


def root(asked: requests.RootRequest, done: Embedded, *_: Any) -> Sequence[Vector] | Vector:
    """`/`: answers as `/similarity` if sentences were sent, else as `/embed`."""
    return (cosines if isinstance(asked.inputs, requests.Sentences) else tei)(asked, done)


def cohere(
    asked: requests.CohereEmbedRequest, done: Embedded, card: ModelCard, _: Named, *, version: str
) -> dict[str, Any]:
    """Cohere's `/v2/embed` and `/v1/embed`. Without `embedding_types`, version 1 answers bare floats."""
    vectors = np.stack(shape_vectors(done, unit=card.normalize, dimensions=asked.output_dimension))
    types = asked.embedding_types or (["float"] if version == "2" else [])
    return {
        "id": str(uuid.uuid4()),
        "response_type": "embeddings_by_type" if types else "embeddings_floats",
        "embeddings": {kind: _typed(vectors, kind) for kind in types} if types else vectors,
        "texts": asked.texts or [],
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"input_tokens": done.tokens},
            "tokens": {"input_tokens": done.tokens, "output_tokens": 0},
        },
    }


def _typed(vectors: Vector, kind: requests.CohereType) -> Any:
    return [as_base64(vector) for vector in vectors] if kind == "base64" else quantize(vectors, kind)


def ollama(asked: OllamaEmbedRequest, done: Embedded, card: ModelCard, _: Named) -> dict[str, Any]:
    """Ollama's `/api/embed`: always unit vectors. Times are in nanoseconds."""
    vectors = shape_vectors(done, unit=True, dimensions=asked.dimensions)
    return {
        "model": card.name,
        "embeddings": [np.ascontiguousarray(vector) for vector in vectors],
        "total_duration": round(done.total_s * 1e9),
        "load_duration": 0,
        "prompt_eval_count": done.tokens,
    }


def ollama_prompt(_: OllamaPromptRequest, done: Embedded, card: ModelCard, __: Named) -> dict[str, Any]:
    """Ollama's `/api/embeddings`: an empty prompt gets an empty vector."""
    vectors = shape_vectors(done, unit=card.normalize, dimensions=None)
    return {"embedding": vectors[0] if len(vectors) else []}


def multi_vectors(asked: requests.MultiVectorRequest, done: Embedded, card: ModelCard, _: Named) -> dict[str, Any]:
    """Jina's `/v1/multi-vector`."""
    vectors = cut_rows(done.vectors, asked.dimensions)
    return {
        "object": "list",
        "data": [{"object": "embeddings", "index": index, "embeddings": rows} for index, rows in enumerate(vectors)],
        "model": card.name,
        "usage": usage(done),
    }


def pooling(asked: requests.PoolingRequest, done: Embedded, card: ModelCard, named: Named) -> dict[str, Any]:
    """VLLM's `/pooling`."""
    rows = [{"object": "pooling", "data": one} for one in cut_rows(done.vectors, asked.dimensions)]
    return vllm_list(f"pool-{named(asked.request_id)}", rows, done, card)


def several(asked: requests.SeveralRequest, done: Embedded, *_: Any) -> dict[str, Any]:
    """`/encode`, with the names of FlagEmbedding's bge-m3."""
    found = {asked.outputs[0]: done.vectors, **done.others}
    answer: dict[str, Any] = {}
    if "text" in found:
        answer["dense_vecs"] = [np.ascontiguousarray(vector) for vector in found["text"]]
    if "sparse" in found:
        pairs = map(unpack, found["sparse"])
        answer["lexical_weights"] = [dict(zip(map(str, ids), weights, strict=True)) for ids, weights in pairs]
    if "multi_vector" in found:
        answer["colbert_vecs"] = found["multi_vector"]
    return answer
