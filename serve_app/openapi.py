"""What `/docs` shows of each route. The checks themselves are in `requests.py`; these are their description."""

from __future__ import annotations

from typing import Any

_TEXTS = {
    "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                ]
            },
        },
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
    ],
}
_DIMENSIONS = {
    "type": ["integer", "null"],
    "minimum": 1,
    "description": "Keep the first so many numbers (Matryoshka models), at most the model's own.",
}
_TRUNCATE = {"type": ["boolean", "null"], "description": "Cut inputs longer than the model takes, or refuse them."}
_BULK = {
    "name": "x-windve-priority",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "enum": ["normal", "bulk"]},
    "description": "bulk: the queries enter as room comes free, after single ones.",
}
_TRIAL = {
    "name": "x-windve-trial",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "The secret of a calibration that runs, and the depths by which it wants this request admitted.",
}
_TIMEOUT = {
    "name": "x-request-timeout-ms",
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": 999999999},
    "description": "How long the client waits: what still waits for a device then is given up, and answered 504.",
}
_OPENAI_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_TEI_ERROR = {"type": "object", "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}}}
_MEANINGS = {
    400: "The request must change; the sentence says how.",
    401: "No API key, or none of this service's (only where it wants one).",
    403: "A trial without the secret of a calibration that runs.",
    404: "There is no such model here.",
    413: "The body is larger than the server takes.",
    422: "The request must change; the sentence says how.",
    424: "The model run failed.",
    429: "Busy: the accelerator's and the CPU's queues are full. Retry-After and retry-after-ms say when to come back.",
    500: "The model run failed.",
    503: "No pool can answer now.",
    504: "The time that x-request-timeout-ms allowed has passed.",
}


def _responses(error: dict[str, Any], *statuses: int) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": error}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def _body(properties: dict[str, Any], required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [required]}
    return {
        "parameters": [_BULK, _TRIAL, _TIMEOUT],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
    }


OPENAI: dict[str, Any] = {
    "summary": "Embed texts (OpenAI)",
    "tags": ["embed"],
    "responses": _responses(_OPENAI_ERROR, 400, 401, 403, 404, 413, 429, 500, 503, 504),
    "openapi_extra": _body(
        {
            "input": _TEXTS,
            "model": {"type": ["string", "null"], "description": "This server's model name, or nothing."},
            "encoding_format": {"enum": ["float", "base64", None]},
            "dimensions": _DIMENSIONS,
            "truncate": _TRUNCATE,
            "user": {"type": ["string", "null"]},
        },
        "input",
    ),
}
TEI: dict[str, Any] = {
    "summary": "Embed texts (text-embeddings-inference)",
    "tags": ["embed"],
    "responses": _responses(_TEI_ERROR, 400, 401, 403, 413, 422, 424, 429, 503, 504),
    "openapi_extra": _body(
        {
            "inputs": _TEXTS,
            "normalize": {"type": ["boolean", "null"], "default": True},
            "dimensions": _DIMENSIONS,
            "truncate": _TRUNCATE,
        },
        "inputs",
    ),
}
MODELS: dict[str, Any] = {"summary": "The model that is served", "tags": ["about"]}
INFO: dict[str, Any] = {"summary": "Model, limits, pools, depths, counters", "tags": ["about"]}
HEALTH: dict[str, Any] = {
    "summary": "200 while a pool can answer, else 503",
    "tags": ["about"],
    "responses": _responses(_TEI_ERROR, 503),
}
PING: dict[str, Any] = {"summary": "200 while the Router lives", "tags": ["about"]}
