"""The OpenAPI document of a service that generates: what its routes take, by their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from serve_app.embedding.routes import PROBES
from serve_app.generation.requests import ChatRequest, CompletionRequest, CompletionRules
from serve_app.generation.steps_request import StepsRequest
from serve_app.web.admission_headers import PRIORITY, TIMEOUT
from serve_app.web.errors import error_shape
from serve_app.web.openapi import (
    ERRORS,
    HEALTH,
    MEANINGS,
    MODEL,
    MODELS,
    NUMBER,
    STRING,
    TOKENS,
    WHOLE,
    Schema,
    filled,
    json_content,
    list_of,
    object_of,
    reference,
    request_schemas,
)
from serve_app.web.tokenizer_requests import DecodeRequest, TokenizeRequest

_USAGE = object_of(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE)
_FINISH: Schema = {"enum": ["stop", "length", None]}
_LOGPROB: Schema = {"type": ["number", "null"]}
_TOKEN = object_of(token=STRING, logprob=_LOGPROB, bytes=list_of(WHOLE))
_CHAT_LOGPROBS: Schema = {
    "anyOf": [
        object_of({"refusal": {"type": "null"}}, content=list_of({**_TOKEN, "description": "With `top_logprobs`."})),
        {"type": "null"},
    ]
}
_TEXT_LOGPROBS: Schema = {
    "anyOf": [
        object_of(
            tokens=list_of(STRING),
            token_logprobs=list_of(_LOGPROB),
            top_logprobs=list_of({"type": "object", "additionalProperties": NUMBER}),
            text_offset=list_of(WHOLE),
        ),
        {"type": "null"},
    ]
}
_MESSAGE = object_of({"refusal": {"type": "null"}}, role={"const": "assistant"}, content=STRING)
_PARAMETERS = [
    {
        "name": PRIORITY,
        "in": "header",
        "schema": {"type": "string", "enum": ["normal", "bulk"]},
        "description": "bulk: behind all others, and at no promised pace.",
    },
    {
        "name": TIMEOUT,
        "in": "header",
        "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
        "description": "How long the client waits for the first token.",
    },
]
_TIMES: Schema = list_of({"anyOf": [list_of(NUMBER), {"type": "null"}]})
_ERRORS = (400, 404, 413, 429, 500, 503, 504)


def _answer(kind: str, **choice: Schema) -> Schema:
    one = object_of(index=WHOLE, **choice, finish_reason=_FINISH)
    head = {"id": STRING, "object": {"const": kind}, "created": WHOLE, "model": STRING}
    return object_of(**head, choices=list_of(one), usage=_USAGE)


class _Route(NamedTuple):
    name: str
    summary: str
    answers: Schema | None
    takes: type[BaseModel] | None = None
    statuses: tuple[int, ...] = ()


_ROUTES: Mapping[str, _Route] = {
    "/v1/chat/completions": _Route(
        "chat",
        "Answer a chat (OpenAI)",
        _answer("chat.completion", message=_MESSAGE, logprobs=_CHAT_LOGPROBS),
        ChatRequest,
        _ERRORS,
    ),
    "/v1/completions": _Route(
        "completions",
        "Go on with a text (OpenAI)",
        _answer("text_completion", text=STRING, logprobs=_TEXT_LOGPROBS),
        CompletionRequest,
        _ERRORS,
    ),
    "/tokenize": _Route("tokenize", "Texts -> tokens", list_of(TOKENS), TokenizeRequest, (400, 413, 422)),
    "/decode": _Route("decode", "Token ids -> texts", list_of(STRING), DecodeRequest, (400, 413, 422)),
    "/calibration/steps": _Route(
        "time_steps",
        "What planned steps take (a calibration's)",
        object_of(pool=STRING, replica=STRING, seconds=_TIMES, host_seconds=_TIMES),
        StepsRequest,
        (403, 413, 422, 424, 503),
    ),
    "/v1/models": _Route("models", "The model that is served", MODELS),
    "/v1/models/{id}": _Route("model", "The model, if it has this name", MODEL, None, (404,)),
    "/info": _Route("info", "Model, limits, pools, counters", {"type": "object"}),
    "/health": _Route("health", "200 while a pool can answer; degraded while another cannot", HEALTH, None, (503,)),
    "/ping": _Route("ping", "200 while the Router lives", None),
}


def generation_document(rules: CompletionRules, vocab_size: int, version: str, *, api_keys: bool) -> dict[str, Any]:
    """The document, with or without API keys."""
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "windve", "version": version, "summary": "Generation: first token and pace promised."},
        "paths": {path: _operation(path, route, api_keys=api_keys) for path, route in _ROUTES.items()},
        "components": {"schemas": request_schemas([route.takes for route in _ROUTES.values() if route.takes])},
    }
    if api_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    values = {
        "models": None if rules.any_name else [*rules.names, None],
        "max_inputs": rules.max_inputs,
        "most_answers": rules.most_answers,
        "most_messages": rules.most_messages,
        "largest_id": vocab_size - 1,
        "prompts": ["", None],
    }
    return {key: filled(part, values) for key, part in found.items()}


def _operation(path: str, route: _Route, *, api_keys: bool) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "It is so; the body is empty."}
    if route.answers is not None:
        good = {"description": "The answer.", **json_content(route.answers)}
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary, "tags": ["about"]}
    if route.takes is not None:
        operation |= {"requestBody": {"required": True, **json_content(reference(route.takes))}, "tags": ["generate"]}
    if route.statuses == _ERRORS:
        operation["parameters"] = _PARAMETERS
        events = {"description": "With `stream`: chunks, and `data: [DONE]` at the end.", "type": "string"}
        good["content"]["text/event-stream"] = {"schema": events}
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": STRING}]
    statuses = route.statuses
    if path in PROBES:
        operation["security"] = []
    elif api_keys:
        statuses = (401, *statuses)
    error = json_content(ERRORS[error_shape(path)])
    bad = {str(status): {"description": MEANINGS[status], **error} for status in statuses}
    return {"post" if route.takes else "get": {**operation, "responses": {"200": good, **bad}}}
