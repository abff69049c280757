"""The OpenAPI document of a service that generates, built from the types of its request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from serve_app.generation.requests import ChatRequest, CompletionRequest, CompletionRules
from serve_app.web.openapi import (
    ABOUT,
    Route,
    admission_parameters,
    build,
    filled,
)

_TOKENS = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int}
_USAGE = {**_TOKENS, "prompt_tokens_details": {"cached_tokens": int}}
_TOKEN = {"token": str, "logprob": (float, None), "bytes": [int]}  # and its `top_logprobs`
_CALL = {"id": str, "type": "function", "function": {"name": str, "arguments": str}}
_MESSAGE = {"role": "assistant", "content": (str, None), "refusal?": None, "tool_calls?": [_CALL]}
_CHAT_LOGPROBS = ({"content": [_TOKEN], "refusal?": None}, None)
_TEXT_LOGPROBS = (
    {"tokens": [str], "token_logprobs": [(float, None)], "top_logprobs": [({str: float}, None)], "text_offset": [int]},
    None,
)
_SCORED = {"logprob": float, "rank": int, "decoded_token": str}
_OF_PROMPT = {"prompt_token_ids?": [int], "prompt_logprobs?": [({str: _SCORED}, None)]}


def _answer(kind: str, **choice: Any) -> dict[str, Any]:
    one = {"index": int, **choice, "token_ids?": [int], "finish_reason": ("stop", "length", "tool_calls", None)}
    head: dict[str, Any] = _OF_PROMPT if kind.startswith("chat") else {}
    head = {**head, "id": str, "object": kind, "created": int, "model": str, "system_fingerprint": str}
    return {**head, "choices": [one], "usage": _USAGE}


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
    _answer("text_completion", text=str, logprobs=_TEXT_LOGPROBS, **_OF_PROMPT),
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
        "most_stop_ids": rules.most_stop_ids,
        "most_tools": rules.most_tools,
        "largest_id": vocab_size - 1,
        "prompts": ["", None],
    }
    found = build("Text generation with promised time to first token and per output token.", _ROUTES, api_keys=api_keys)
    return {key: filled(part, values) for key, part in found.items()}
