"""The OpenAPI document of an embedding model: what each route takes (`requests`) and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployments.models.model_files import ModelCard
from serve_app.embedding import ollama_requests, requests, scoring_requests
from serve_app.embedding.routes import ALL_ROUTES, ROOT, SEVERAL, routes_of
from serve_app.web.errors import error_shape
from serve_app.web.fields import Rules
from serve_app.web.openapi import (
    ABOUT,
    NUMBER,
    STRING,
    WHOLE,
    Route,
    Schema,
    admission_parameters,
    build,
    filled,
    list_of,
    object_of,
)

_OPENAI = (400, 404, 409, 413, 415, 429, 500, 503, 504)
_TEI = (400, 409, 413, 415, 422, 424, 429, 503, 504)
_TIMES = ("compute-time", "compute-characters", "compute-tokens", "total-time", "tokenization-time", "queue-time",
          "inference-time")  # fmt: skip
_BULK, *_OTHERS = admission_parameters(
    bulk="bulk: the queries are admitted after single ones, as room becomes free.",
    timeout="How long the client waits. Queries that have not started by then are dropped and answered 504.",
)
_HEADERS = {
    "x-windve-pool": {"schema": {"type": "string"}, "description": "Which pool answered: accelerator, cpu, or both."},
    "x-windve-space": {"schema": {"type": "string"}, "description": "The space of the vectors."},
    **{f"x-{name}": {"schema": {"type": "integer"}} for name in _TIMES},
}
_ABOUT_SEVERAL = (
    "Several models are served. The field `model` of the body selects one. Without it, the first model that has the "
    "route answers. /models/NAME has the routes and the document of one model."
)
_NAMED: dict[str, Any] = {"enum": "models", "description": "Null: the first model that has the route."}
_NUMBERS = list_of(NUMBER)
_USAGE = object_of(prompt_tokens=WHOLE, total_tokens=WHOLE)
_VECTOR = {"anyOf": [_NUMBERS, {"type": "string", "format": "byte"}]}
_VECTORS = list_of(_NUMBERS)
_TYPED = object_of(
    {**dict.fromkeys(("float", "int8", "uint8", "binary", "ubinary"), _VECTORS), "base64": list_of(STRING)}
)
_COHERE_EMBEDDINGS = object_of(
    id=STRING,
    response_type=STRING,
    embeddings={"anyOf": [_TYPED, _VECTORS]},
    texts=list_of(STRING),
    meta={"type": "object"},
)
_OLLAMA_EMBEDDINGS = object_of(
    dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), WHOLE), model=STRING, embeddings=_VECTORS
)
_TOKEN_VECTORS = list_of(list_of(_NUMBERS))
_EMBEDDING = object_of(object={"const": "embedding"}, index=WHOLE, embedding=_VECTOR)
_EMBEDDINGS = object_of(object={"const": "list"}, data=list_of(_EMBEDDING), model=STRING, usage=_USAGE)


def _vllm_list(**item: Schema) -> Schema:
    one = object_of(index=WHOLE, **item)
    return object_of(id=STRING, object={"const": "list"}, created=WHOLE, model=STRING, data=list_of(one), usage=_USAGE)


_POOLING = _vllm_list(object={"const": "pooling"}, data=list_of(_NUMBERS))
_MULTI_VECTORS = object_of(
    object={"const": "list"},
    data=list_of(object_of(object={"const": "embeddings"}, index=WHOLE, embeddings=list_of(_NUMBERS))),
    model=STRING,
    usage=_USAGE,
)
_SEVERAL = object_of(
    {
        "dense_vecs": list_of(_NUMBERS),
        "lexical_weights": list_of({"type": "object", "additionalProperties": NUMBER}, "By token id."),
        "colbert_vecs": _TOKEN_VECTORS,
    }
)
_RANKS = list_of(object_of({"text": STRING}, index=WHOLE, score=NUMBER), "The best first.")


def _results(document: Schema) -> Schema:
    result = object_of({"document": document}, index=WHOLE, relevance_score=NUMBER)
    results = list_of(result, "The best first.")
    return object_of(id=STRING, model=STRING, results=results, meta={"type": "object"}, usage=_USAGE)


_RESULTS, _INFINITY_RESULTS = _results(object_of(text=STRING)), _results(STRING)
_ONE_PREDICTION = list_of(object_of(score=NUMBER, label={"enum": "labels"}), "The likeliest first.")
_PREDICTIONS: Schema = {"anyOf": [_ONE_PREDICTION, list_of(_ONE_PREDICTION)]}
_WEIGHTS = list_of(object_of(index=WHOLE, value=NUMBER))
_OLLAMA_MODELS = object_of(models=list_of(object_of(name=STRING, model=STRING, modified_at=STRING, size=WHOLE)))
_OLLAMA_ABOUT: Mapping[str, Route] = {
    "/api/tags": Route("ollama_tags", "The models that embed (Ollama)", _OLLAMA_MODELS),
    "/api/ps": Route("ollama_ps", "The models that are loaded: all (Ollama)", _OLLAMA_MODELS),
    "/api/version": Route("ollama_version", "The version of windve (Ollama)", object_of(version=STRING)),
    "/api/show": Route(
        "ollama_show",
        "What a model is (Ollama)",
        object_of(details={"type": "object"}, model_info={"type": "object"}, capabilities=list_of(STRING)),
        ollama_requests.OllamaShowRequest,
        statuses=(400, 404, 413),
    ),
}
_SCORE = Route(
    "score",
    "Score pairs of texts (vLLM)",
    _vllm_list(object={"const": "score"}, score=NUMBER),
    scoring_requests.ScoreRequest,
)
_CLASSIFY = Route(
    "classify",
    "The likeliest label of each text, and how likely each is (vLLM)",
    _vllm_list(label={"enum": "labels"}, probs=_NUMBERS, num_classes=WHOLE),
    scoring_requests.ClassifyRequest,
)
_ROUTES: Mapping[str, Route] = {
    "/v1/embeddings": Route("openai_embeddings", "Embed texts (OpenAI)", _EMBEDDINGS, requests.OpenAIRequest),
    "/embeddings": Route("embeddings", "Embed texts (OpenAI, Infinity)", _EMBEDDINGS, requests.InfinityRequest),
    "/infinity/embeddings": Route(
        "infinity_embeddings", "Embed texts (Infinity)", _EMBEDDINGS, requests.InfinityRequest
    ),
    "/v1/embed": Route(
        "cohere_embed_1", "Embed texts (Cohere, version 1)", _COHERE_EMBEDDINGS, requests.CohereEmbedRequest
    ),
    "/v2/embed": Route(
        "cohere_embed_2", "Embed texts (Cohere, version 2)", _COHERE_EMBEDDINGS, requests.CohereEmbedRequest
    ),
    "/api/embed": Route("ollama_embed", "Embed texts (Ollama)", _OLLAMA_EMBEDDINGS, ollama_requests.OllamaEmbedRequest),
    "/api/embeddings": Route(
        "ollama_embeddings", "Embed a text (Ollama)", object_of(embedding=_NUMBERS), ollama_requests.OllamaPromptRequest
    ),
    "/": Route("root", "Embed texts, or compare them", {"anyOf": [_VECTORS, _NUMBERS]}, requests.RootRequest),
    "/embed": Route("embed", "Embed texts", _VECTORS, requests.EmbedRequest),
    "/embed_all": Route("embed_all", "The vectors of each text's tokens", _TOKEN_VECTORS, requests.EncodeRequest),
    "/similarity": Route("similarity", "Cosines of a source sentence and others", _NUMBERS, requests.SimilarityRequest),
    "/rerank": Route(
        "rerank",
        "Score texts by a query",
        {"anyOf": [_RANKS, _RESULTS, _INFINITY_RESULTS]},
        scoring_requests.RerankRequest,
        or_takes=scoring_requests.CohereRerankRequest,
    ),
    "/v1/rerank": Route(
        "cohere_rerank_1", "Score texts by a query (Cohere, version 1)", _RESULTS, scoring_requests.CohereRerankRequest
    ),
    "/v2/rerank": Route(
        "cohere_rerank_2", "Score texts by a query (Cohere, version 2)", _RESULTS, scoring_requests.CohereRerankRequest
    ),
    "/infinity/rerank": Route(
        "infinity_rerank",
        "Score texts by a query (Infinity)",
        _INFINITY_RESULTS,
        scoring_requests.CohereRerankRequest,
    ),
    "/predict": Route("predict", "Classify texts", _PREDICTIONS, scoring_requests.PredictRequest),
    "/score": _SCORE,
    "/v1/score": replace(_SCORE, name="score_1"),
    "/classify": _CLASSIFY,
    "/v1/classify": replace(_CLASSIFY, name="classify_1"),
    "/embed_sparse": Route("embed_sparse", "Texts -> weights of words", list_of(_WEIGHTS), requests.EncodeRequest),
    "/v1/multi-vector": Route(
        "multi_vector", "A unit vector of each token (Jina)", _MULTI_VECTORS, requests.MultiVectorRequest
    ),
    "/pooling": Route("pooling", "A unit vector of each token (vLLM)", _POOLING, requests.PoolingRequest),
    SEVERAL: Route("encode", "Dense, sparse and multi-vector answers from one run", _SEVERAL, requests.SeveralRequest),
}


def document(served: Sequence[tuple[Rules, ModelCard]], *, api_keys: bool) -> dict[str, Any]:
    """The document of a service of these models, with or without API keys. With several models it has the routes of
    all, and the loosest bound of any.
    """
    others = ALL_ROUTES.difference(*(routes_of(card.kinds) for _, card in served))
    routes = {path: _asking(path, route) for path, route in _ROUTES.items() if path not in others}
    routes["/"] = _asking("/", replace(_ROUTES[ROOT[served[0][1].kind]], name="root"))
    if any(card.kind == "embedding" for _, card in served):
        routes |= _OLLAMA_ABOUT
    routes |= {path: _named_after_tei(path, route) for path, route in ABOUT.items()}
    if len(served) > 1:  # a body may name an unknown model, even on TEI's routes, which have no such field
        routes = {path: _may_name(route) for path, route in routes.items()}
    summary = "Embeddings, reranking, classification: accelerator first, CPU for the overflow."
    found = build(summary, routes, api_keys=api_keys)
    if len(served) > 1:
        found["info"]["description"] = _ABOUT_SEVERAL
        for body in (body for route in routes.values() for body in route.bodies):
            found["components"]["schemas"][body.__name__]["properties"].setdefault("model", _NAMED)
    values = _values(served)
    return {key: filled(part, values) for key, part in found.items()}


def _asking(path: str, route: Route) -> Route:
    """A route that takes queries, under this path."""
    statuses = _TEI if error_shape(path) == "tei" else _OPENAI
    parameters = [_BULK, *_OTHERS]
    route = replace(route, tag="embed", statuses=statuses, parameters=parameters, headers=_HEADERS)
    return _named_after_tei(path, route)


def _named_after_tei(path: str, route: Route) -> Route:
    if route.takes is None or error_shape(path) != "tei":
        return route
    return replace(route, summary=f"{route.summary} (text-embeddings-inference)")


def _may_name(route: Route) -> Route:
    return replace(route, statuses=tuple(sorted({*route.statuses, 404}))) if route.takes else route


def _values(served: Sequence[tuple[Rules, ModelCard]]) -> dict[str, Any]:
    """The values for the placeholders in schemas."""
    rules, cards = zip(*served, strict=True)
    return {
        "models": None if any(rule.any_name for rule in rules) else [*(n for rule in rules for n in rule.names), None],
        "dimension": max(rule.dimension for rule in rules),
        "max_inputs": rules[0].max_inputs,  # the same for all
        "max_sentences": rules[0].max_sentences,
        "largest_id": max(card.vocab_size for card in cards) - 1,
        "prompts": [*dict.fromkeys(prompt for card in cards for prompt in card.prompts), "", None],
        "labels": list(dict.fromkeys(label for card in cards for label in card.labels)),
    }
