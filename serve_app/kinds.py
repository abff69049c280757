"""Which routes a model has, by its kind."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.settings import Kind

ROUTES: Mapping[Kind, tuple[str, ...]] = {
    "embedding": ("/v1/embeddings", "/embeddings", "/embed", "/embed_all", "/similarity"),
    "reranker": ("/rerank", "/v1/rerank", "/v2/rerank", "/predict"),
    "classifier": ("/predict",),
    "sparse": ("/embed_sparse",),
}
ROOT: Mapping[Kind, str] = {  # the route that is also `/`, as with TEI
    "embedding": "/embed",
    "reranker": "/rerank",
    "classifier": "/predict",
    "sparse": "/embed_sparse",
}
A_MODEL: Mapping[Kind, str] = {
    "embedding": "an embedding model",
    "reranker": "a reranker",
    "classifier": "a classifier",
    "sparse": "a sparse embedding model",
}
