"""Scores and labels in the form of each API (see `routes.ModelRoute`). Pure, except for the time of day."""

from __future__ import annotations

from typing import Any

import numpy as np

from deployments.embedding.request import Embedded
from deployments.models.model_files import ModelCard
from serve_app.embedding import scoring_requests as requests
from serve_app.embedding.dialects import Named, usage, vllm_list
from serve_app.embedding.output_shapes import best_first, scores


def tei_ranks(asked: requests.RerankRequest, done: Embedded, *_: Any) -> list[dict[str, Any]]:
    """TEI's `/rerank`: the best first."""
    return [
        {"index": index, "score": score} | ({"text": asked.texts[index]} if asked.return_text else {})
        for index, score in best_first(scores(done, raw=asked.raw_scores)[:, 0])[: asked.top_n or None]
    ]


def infinity_ranks(
    asked: requests.CohereRerankRequest, done: Embedded, card: ModelCard, named: Named
) -> dict[str, Any]:
    """Infinity's `/rerank`: as Cohere's, but its documents are strings."""
    found = ranks(asked, done, card, named, version="2")
    for result in found["results"]:
        if "document" in result:
            result["document"] = result["document"]["text"]
    return found


def ranks(
    asked: requests.CohereRerankRequest,
    done: Embedded,
    card: ModelCard,
    named: Named,
    *,
    version: str,
    documents: bool = False,
) -> dict[str, Any]:
    """The `/rerank` of Cohere and vLLM. `documents`: return them too, unless the request says otherwise."""
    texts = asked.texts if (documents if asked.return_documents is None else asked.return_documents) else None
    results = [
        {"index": index, "relevance_score": score} | ({} if texts is None else {"document": {"text": texts[index]}})
        for index, score in best_first(scores(done, raw=asked.raw)[:, 0])[: asked.top_n or None]
    ]
    return {
        "id": named(asked.request_id),
        "model": card.name,
        "results": results,
        "meta": {"api_version": {"version": version}, "tokens": {"input_tokens": done.tokens, "output_tokens": 0}},
        "usage": usage(done),
    }


def predictions(asked: requests.PredictRequest, done: Embedded, card: ModelCard, _: Named) -> list[Any]:
    """TEI's `/predict`: each label with its score, the likeliest first."""
    found = [
        [{"score": score, "label": card.labels[index]} for index, score in best_first(row)]
        for row in scores(done, raw=asked.raw_scores)
    ]
    return found[0] if asked.single else found


def pair_scores(asked: requests.ScoreRequest, done: Embedded, card: ModelCard, named: Named) -> dict[str, Any]:
    """The `/score` of vLLM: a reranker's scores of pairs, or the cosines of `ScoreRequest.texts`."""
    if card.kind == "reranker":
        found = scores(done, raw=asked.raw)[:, 0]
    else:
        first, rows = len(asked.sides[0]), np.stack(done.vectors)
        found = np.clip((rows[:first] * rows[first:]).sum(-1), -1, 1)
    scored = [{"object": "score", "score": score} for score in found]
    return vllm_list(f"score-{named(asked.request_id)}", scored, done, card)


def classes(asked: requests.ClassifyRequest, done: Embedded, card: ModelCard, named: Named) -> dict[str, Any]:
    """The `/classify` of vLLM."""
    rows = scores(done, raw=asked.use_activation is False)
    labels = [{"label": card.labels[row.argmax()], "probs": row, "num_classes": len(row)} for row in rows]
    return vllm_list(f"classify-{named(asked.request_id)}", labels, done, card)
