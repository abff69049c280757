"""The routes to an embedding model, reranker or classifier: what each takes (`requests`), answers (`dialects`,
`scoring`), and which models have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from deployments.embedding.request import Embedded
from deployments.models.model_files import ModelCard
from deployments.models.outputs import Outputs
from deployments.settings import Kind
from serve_app.embedding import dialects, ollama, requests, scoring, scoring_requests
from serve_app.web.fields import Fields
from serve_app.web.openapi import Route

Reply = Callable[[Any, Embedded, ModelCard, dialects.Named], Any]


@dataclass(frozen=True, slots=True)
class ModelRoute(Route):
    """A route that asks the model.

    - `reply`: (request, answer, model card, `HttpRequest.named`) -> JSON.
    - `kinds`: the kinds of model that have it.
    - `outputs`: what to compute, if not what the kind or the request says.
    """

    takes: type[Fields]
    reply: Reply = field(kw_only=True)
    kinds: tuple[Kind, ...] = field(kw_only=True)
    outputs: Outputs = ()


_USAGE = {"prompt_tokens": int, "total_tokens": int}
_NUMBERS = [float]


def _listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's list."""
    return {"object": "list", "data": [{"index": int, **item}], "model": str, "usage": _USAGE}


def _vllm_list(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**_listed(item), "id": str, "created": int}


def _results(document: Any) -> dict[str, Any]:
    result = {"index": int, "relevance_score": float, "document?": document}
    return {"id": str, "model": str, "results": [result], "meta": dict, "usage": _USAGE}


_EMBEDDINGS = _listed({"object": "embedding", "embedding": (_NUMBERS, str)})
_TYPED = {**{f"{kind}?": [_NUMBERS] for kind in ("float", "int8", "uint8", "binary", "ubinary")}, "base64?": [str]}
_COHERE_EMBEDDINGS = {
    "id": str, "response_type": str, "embeddings": (_TYPED, [_NUMBERS]), "texts": [str], "meta": dict
}  # fmt: skip
_OLLAMA_EMBEDDINGS = {
    "model": str, "embeddings": [_NUMBERS], "total_duration": int, "load_duration": int, "prompt_eval_count": int
}  # fmt: skip
_PREDICTION = {"score": float, "label": str}
_RANKS = [{"index": int, "score": float, "text?": str}]
_RESULTS, _INFINITY_RESULTS = _results({"text": str}), _results(str)
_SEVERAL = {"dense_vecs?": [_NUMBERS], "lexical_weights?": [{str: float}], "colbert_vecs?": [[_NUMBERS]]}
_MULTI_VECTORS = _listed({"object": "embeddings", "embeddings": [_NUMBERS]})
_POOLING = _vllm_list({"object": "pooling", "data": [_NUMBERS]})
_SCORES = _vllm_list({"object": "score", "score": float})
_CLASSES = _vllm_list({"label": str, "probs": _NUMBERS, "num_classes": int})

_embeds = partial(ModelRoute, kinds=("embedding",))
_ranks = partial(ModelRoute, takes=scoring_requests.CohereRerankRequest, kinds=("reranker",))
_scores = partial(ModelRoute, kinds=("reranker", "classifier"))
_sparse = partial(ModelRoute, kinds=("sparse",))
_multi_vector = partial(ModelRoute, kinds=("multi_vector",))
_openai = partial(_embeds, answers=_EMBEDDINGS, reply=dialects.openai)
_cohere = partial(_embeds, answers=_COHERE_EMBEDDINGS, takes=requests.CohereEmbedRequest)
_SCORE = ModelRoute(
    "score", "Score pairs of texts (vLLM)", _SCORES, scoring_requests.ScoreRequest, reply=scoring.pair_scores,
    kinds=("reranker", "embedding"),
)  # fmt: skip
_CLASSIFY = _scores(
    "classify", "The likeliest label of each text, and how likely each is (vLLM)", _CLASSES,
    scoring_requests.ClassifyRequest, reply=scoring.classes,
)  # fmt: skip
ROUTES: Mapping[str, ModelRoute] = {
    "/v1/embeddings": _openai("openai_embeddings", "Embed texts (OpenAI)", takes=requests.OpenAIRequest),
    "/embeddings": _openai("embeddings", "Embed texts (OpenAI, Infinity)", takes=requests.InfinityRequest),
    "/infinity/embeddings": _openai("infinity_embeddings", "Embed texts (Infinity)", takes=requests.InfinityRequest),
    "/embed": _embeds("embed", "Embed texts", [_NUMBERS], requests.EmbedRequest, reply=dialects.tei),
    "/embed_all": _embeds(
        "embed_all", "The vectors of each text's tokens, not normalized", [[_NUMBERS]], requests.EncodeRequest,
        reply=dialects.bare, outputs=("tokens",),
    ),
    "/similarity": _embeds(
        "similarity", "Cosines of a source sentence and others", _NUMBERS, requests.SimilarityRequest,
        reply=dialects.cosines,
    ),
    "/v2/embed": _cohere(
        "cohere_embed_2", "Embed texts (Cohere, version 2)", reply=partial(dialects.cohere, version="2")
    ),
    "/v1/embed": _cohere(
        "cohere_embed_1", "Embed texts (Cohere, version 1)", reply=partial(dialects.cohere, version="1")
    ),
    "/api/embed": _embeds(
        "ollama_embed", "Embed texts (Ollama)", _OLLAMA_EMBEDDINGS, ollama.OllamaEmbedRequest, reply=dialects.ollama
    ),
    "/api/embeddings": _embeds(
        "ollama_embeddings", "Embed a text (Ollama)", {"embedding": _NUMBERS}, ollama.OllamaPromptRequest,
        reply=dialects.ollama_prompt,
    ),
    "/rerank": _ranks(
        "rerank", "Score texts by a query, the best first", (_RANKS, _RESULTS, _INFINITY_RESULTS),
        takes=scoring_requests.RerankRequest, or_takes=scoring_requests.CohereRerankRequest, reply=scoring.tei_ranks,
    ),
    "/v1/rerank": _ranks(
        "cohere_rerank_1", "Score texts by a query (Cohere, version 1)", _RESULTS,
        reply=partial(scoring.ranks, version="1"),
    ),
    "/v2/rerank": _ranks(
        "cohere_rerank_2", "Score texts by a query (Cohere, version 2)", _RESULTS,
        reply=partial(scoring.ranks, version="2"),
    ),
    "/infinity/rerank": _ranks(
        "infinity_rerank", "Score texts by a query (Infinity)", _INFINITY_RESULTS, reply=scoring.infinity_ranks
    ),
    "/predict": _scores(
        "predict", "Classify texts, the likeliest label first", ([_PREDICTION], [[_PREDICTION]]),
        scoring_requests.PredictRequest, reply=scoring.predictions,
    ),
    "/score": _SCORE,
    "/v1/score": replace(_SCORE, name="score_1"),
    "/classify": _CLASSIFY,
    "/v1/classify": replace(_CLASSIFY, name="classify_1"),
    "/embed_sparse": _sparse(
        "embed_sparse", "The weights of each text's words", [[{"index": int, "value": float}]], requests.EncodeRequest,
        reply=dialects.sparse,
    ),
    "/v1/multi-vector": _multi_vector(
        "multi_vector", "A unit vector of each token (Jina)", _MULTI_VECTORS, requests.MultiVectorRequest,
        reply=dialects.multi_vectors,
    ),
    "/pooling": _multi_vector(
        "pooling", "A unit vector of each token (vLLM)", _POOLING, requests.PoolingRequest, reply=dialects.pooling
    ),
}  # fmt: skip
SEVERAL = "/encode"  # of models of several kinds: all their answers from one batch
_ENCODE = ModelRoute(
    "encode", "Dense, sparse and multi-vector answers from one batch", _SEVERAL, requests.SeveralRequest,
    reply=dialects.several, kinds=("embedding", "sparse", "multi_vector"),
)  # fmt: skip
VLLM_RERANK = replace(ROUTES["/v2/rerank"], reply=partial(scoring.ranks, version="2", documents=True))
_ROOT: Mapping[Kind, ModelRoute] = {
    "embedding": _embeds(
        "root", "Embed texts, or compare them", ([_NUMBERS], _NUMBERS), requests.RootRequest, reply=dialects.root
    ),
    "reranker": ROUTES["/rerank"],
    "classifier": ROUTES["/predict"],
    "sparse": ROUTES["/embed_sparse"],
    "multi_vector": ROUTES["/v1/multi-vector"],
}
ROOT = {kind: replace(route, name="root") for kind, route in _ROOT.items()}  # the route `/` of each kind, as with TEI
A_MODEL: Mapping[Kind, str] = {
    "embedding": "an embedding model",
    "reranker": "a reranker",
    "classifier": "a classifier",
    "sparse": "a sparse embedding model",
    "multi_vector": "a multi-vector model",
}
ALL_ROUTES = frozenset({*ROUTES, SEVERAL})


def routes_of(kinds: Sequence[Kind]) -> dict[str, ModelRoute]:
    """The routes of a model of these kinds, by path."""
    found = {path: route for path, route in ROUTES.items() if not set(kinds).isdisjoint(route.kinds)}
    return {**found, **({SEVERAL: _ENCODE} if len(kinds) > 1 else {})}
