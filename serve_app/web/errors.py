"""Errors as HTTP answers, in the format of the route's API: OpenAI, Cohere or Ollama; TEI's on all other routes."""

from __future__ import annotations

import math
from typing import Any, Literal

import orjson

from deployments.errors import (
    BodyTooLarge,
    Busy,
    Compressed,
    DeadlineExceeded,
    Defect,
    EmptyInput,
    InvalidInput,
    Unauthorized,
    Unavailable,
    UnknownModel,
    WindveError,
    WrongSpace,
)

Headers = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
Shape = Literal["openai", "cohere", "ollama", "tei"]
_COHERE = frozenset({"/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank"})
_OPENAI = frozenset(  # and vLLM's
    {"/embeddings", "/completions", "/chat/completions", "/models", "/pooling", "/score", "/classify", "/detokenize"}
)


class NoRoute(WindveError):
    status = 404
    code = "wrong_route"


class WrongMethod(WindveError):
    """The path is known, the method is not one of `allowed`."""

    status = 405
    code = "wrong_route"

    def __init__(self, message: str, *, allowed: list[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


# TEI's status codes: 400 for an empty input, 422 for other bad input, 424 for a failed engine. The first match wins.
_TEI: tuple[tuple[type[WindveError], int, str], ...] = (
    (EmptyInput, 400, "Empty"),
    (UnknownModel, 404, "Validation"),
    (BodyTooLarge, 413, "Validation"),
    (Compressed, 415, "Validation"),
    (InvalidInput, 422, "Validation"),
    (Unauthorized, 401, "Unauthorized"),
    (NoRoute, 404, "Validation"),
    (WrongMethod, 405, "Validation"),
    (WrongSpace, 409, "Validation"),
    (Busy, 429, "Overloaded"),
    (DeadlineExceeded, 504, "Timeout"),
    (Unavailable, 503, "Unhealthy"),
    (Defect, 500, "Backend"),
    (WindveError, 424, "Backend"),
)


def error_answer(error: WindveError, path: str) -> tuple[int, Headers, bytes]:
    """(status, headers, body) of an error on the route `path`."""
    status, content = error.status, openai_error(error)
    match error_shape(path):
        case "cohere":
            content = {"message": error.message}
        case "ollama":
            content = {"error": error.message}
        case "tei":
            status, kind = next((status, kind) for fits, status, kind in _TEI if isinstance(error, fits))
            content = {"error": error.message, "error_type": kind}
    return status, [*_headers(error), JSON], orjson.dumps(content)


def error_shape(path: str) -> Shape:
    """The API whose error format the route `path` uses. Routes of Jina and vLLM use OpenAI's."""
    if path in _COHERE:
        return "cohere"
    if path.startswith("/api/"):
        return "ollama"
    return "openai" if path.startswith(("/v1/", "/v2/", "/infinity/")) or path in _OPENAI else "tei"


def openai_error(error: WindveError) -> dict[str, Any]:
    """The error in OpenAI's format."""
    status = error.status
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _headers(error: WindveError) -> Headers:
    match error:
        case Busy():
            milliseconds = math.ceil(error.retry_after_s * 1000)
            seconds = max(1, math.ceil(error.retry_after_s))
            return [(b"retry-after-ms", b"%d" % milliseconds), (b"retry-after", b"%d" % seconds)]
        case Unavailable():
            return [(b"retry-after", b"1")]
        case Unauthorized():
            return [(b"www-authenticate", b"Bearer")]
        case WrongMethod():
            return [(b"allow", ", ".join(error.allowed).encode())]
    return []
