"""The OpenAPI document of embedding models: what each route takes and answers (`routes`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deployments.models.model_files import ModelCard
from serve_app.embedding import ollama
from serve_app.embedding.routes import ROOT, routes_of
from serve_app.web.errors import error_shape
from serve_app.web.fields import Rules
from serve_app.web.openapi import ABOUT, Route, admission_parameters, build, filled

_OPENAI = (400, 404, 409, 413, 415, 429, 500, 503, 504)
_TEI = (400, 409, 413, 415, 422, 424, 429, 503, 504)
_TIMES = ("compute-time", "compute-characters", "compute-tokens", "total-time", "tokenization-time", "queue-time",
          "inference-time")  # fmt: skip
_PARAMETERS = admission_parameters(
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


def document(served: Sequence[tuple[Rules, ModelCard]], *, api_keys: bool) -> dict[str, Any]:
    """The document of a service of these models, with or without API keys. With several models it has the routes of
    all, and the loosest bound of any.
    """
    several = len(served) > 1
    asking = {path: route for _, card in served for path, route in routes_of(card.kinds).items()}
    routes: dict[str, Route] = {
        path: replace(
            route,
            tag="embed",
            statuses=_TEI if error_shape(path) == "tei" else _OPENAI,
            parameters=_PARAMETERS,
            headers=_HEADERS,
        )
        for path, route in {**asking, "/": ROOT[served[0][1].kind]}.items()
    }
    if any(card.kind == "embedding" for _, card in served):
        routes |= ollama.ABOUT
    routes = {path: _named(path, route, several=several) for path, route in {**routes, **ABOUT}.items()}
    summary = "Embeddings, reranking, classification: accelerator first, CPU for the overflow."
    found = build(summary, routes, api_keys=api_keys)
    if several:
        found["info"]["description"] = _ABOUT_SEVERAL
        for body in (body for route in routes.values() for body in route.bodies):
            found["components"]["schemas"][body.__name__]["properties"].setdefault("model", _NAMED)
    values = _values(served)
    return {key: filled(part, values) for key, part in found.items()}


def _named(path: str, route: Route, *, several: bool) -> Route:
    """With TEI's name, and, of several models, with the status of an unknown one, which any body may name."""
    if route.takes is None:
        return route
    tei = " (text-embeddings-inference)" if error_shape(path) == "tei" else ""
    statuses = sorted({*route.statuses, 404}) if several else route.statuses
    return replace(route, summary=f"{route.summary}{tei}", statuses=tuple(statuses))


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
    }
