"""The OpenAPI document of a service that generates, built from the types of its request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from serve_app.generation.requests import ChatRequest, CompletionRequest, CompletionRules
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
_TIMES: Schema = list_of({"anyOf": [list_of(NUMBER), {"type": "null"}]})


def _answer(kind: str, **choice: Schema) -> Schema:
    one = object_of(index=WHOLE, **choice, finish_reason=_FINISH)
    head = {"id": STRING, "object": {"const": kind}, "created": WHOLE, "model": STRING, "system_fingerprint": STRING}
    return object_of(**head, choices=list_of(one), usage=_USAGE)


_generating = partial(
    Route,
    tag="generate",
    statuses=(400, 404, 409, 413, 415, 429, 500, 503, 504),
    parameters=admission_parameters(
        bulk="bulk: runs after all others, with neither a first token nor a time per output token promised.",
        timeout="How long the client waits for the first token.",
    ),
    events={"description": "With `stream`: chunks, and `data: [DONE]` at the end.", "type": "string"},
)
_CHAT = _generating(
    "chat", "Answer a chat (OpenAI)", _answer("chat.completion", message=_MESSAGE, logprobs=_CHAT_LOGPROBS), ChatRequest
)
_COMPLETION = _generating(
    "completions",
    "Continue a text (OpenAI)",
    _answer("text_completion", text=STRING, logprobs=_TEXT_LOGPROBS),
    CompletionRequest,
)
_ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": _CHAT,
    "/chat/completions": replace(_CHAT, name="chat_unprefixed"),
    "/v1/completions": _COMPLETION,
    "/completions": replace(_COMPLETION, name="completions_unprefixed"),
    **ABOUT,
}


def document(rules: CompletionRules, vocab_size: int, *, api_keys: bool) -> dict[str, Any]:
    """The document, with or without API keys."""
    values = {
        "models": None if rules.any_name else [*rules.names, None],
        "max_inputs": rules.max_inputs,
        "max_answers": rules.max_answers,
        "most_messages": rules.most_messages,
        "largest_id": vocab_size - 1,
        "prompts": ["", None],
    }
    found = build("Text generation with promised time to first token and per output token.", _ROUTES, api_keys=api_keys)
    return {key: filled(part, values) for key, part in found.items()}
