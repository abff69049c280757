"""The routes of each kind of model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.settings import Kind

ROUTES: Mapping[Kind, tuple[str, ...]] = {
    "embedding": (
        *("/v1/embeddings", "/embeddings", "/infinity/embeddings", "/embed", "/embed_all", "/similarity"),
        *("/v2/embed", "/v1/embed", "/api/embed", "/api/embeddings", "/score", "/v1/score"),
    ),
    "reranker": (
        *("/rerank", "/v1/rerank", "/v2/rerank", "/infinity/rerank", "/predict"),
        *("/score", "/v1/score", "/classify", "/v1/classify"),
    ),
    "classifier": ("/predict", "/classify", "/v1/classify"),
    "sparse": ("/embed_sparse",),
    "multi_vector": ("/v1/multi-vector", "/pooling"),
}
SEVERAL = "/encode"  # for models of several kinds: all their answers from one batch
ROOT: Mapping[Kind, str] = {  # the route that is also `/`, as with TEI
    "embedding": "/",  # takes a body of /embed or of /similarity
    "reranker": "/rerank",
    "classifier": "/predict",
    "sparse": "/embed_sparse",
    "multi_vector": "/v1/multi-vector",
}
A_MODEL: Mapping[Kind, str] = {
    "embedding": "an embedding model",
    "reranker": "a reranker",
    "classifier": "a classifier",
    "sparse": "a sparse embedding model",
    "multi_vector": "a multi-vector model",
}


def routes_of(kinds: Sequence[Kind]) -> tuple[str, ...]:
    """The routes of a model of these kinds."""
    routes = [route for kind in kinds for route in ROUTES[kind]]
    return (*dict.fromkeys(routes), *([SEVERAL] if len(kinds) > 1 else []))


ALL_ROUTES = frozenset(routes_of(tuple(ROUTES)))
