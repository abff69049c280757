"""Builds the OpenAPI document of a service. The schemas of bodies come from the types that validate them.

`embedding/routes.py` lists the routes of embedding models, `generation/document.py` those of generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core.core_schema import WithDefaultSchema

from serve_app.version import VERSION
from serve_app.web.asgi import PROBES
from serve_app.web.errors import error_shape
from serve_app.web.request_headers import EXPECT_SPACE, PRIORITY, TIMEOUT
from serve_app.web.tokenizer_routes import DecodeRequest, DetokenizeRequest, TokenizePromptRequest, TokenizeRequest

Schema = dict[str, Any]

_COMPONENT = "#/components/schemas/{model}"
_BOUNDS = ("enum", "maximum", "maxItems")  # may hold the name of a value that only the server knows

MEANINGS = {
    400: "The request is invalid; the message says what to change.",
    401: "The API key is missing or invalid.",
    404: "There is no such model here.",
    409: f"The model's space is not the one in {EXPECT_SPACE}.",
    413: "The body is larger than the server accepts.",
    415: "The body is compressed.",
    422: "The request is invalid; the message says what to change.",
    424: "The model run failed, or the route is for models of another kind.",
    429: "Refused: no device has room before the deadline. Retry-After and retry-after-ms say when to come back.",
    500: "The model run failed, or the server has a defect.",
    503: "No pool can answer now.",
    504: f"The time that {TIMEOUT} allows has passed, or even idle devices could not answer in time.",
}


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", None: "null"}


def schema(like: Any) -> Schema:
    """The schema of JSON that is written as a Python value: a type, None, or a constant string; `[item]`;
    `(one, or_another)`; `{"key": value, "key that may be missing?": value}`; `{str: value}` for all keys.
    """
    if isinstance(like, dict):
        if str in like:
            return {"type": "object", "additionalProperties": schema(like[str])}
        properties = {key.removesuffix("?"): schema(value) for key, value in like.items()}
        return {"type": "object", "properties": properties, "required": [key for key in like if key[-1] != "?"]}
    if isinstance(like, list):
        return {"type": "array", "items": schema(like[0])}
    if isinstance(like, tuple):
        return {"anyOf": [schema(one) for one in like]}
    return {"const": like} if isinstance(like, str) else {"type": _TYPES[like]}


_ERROR_TYPE = ("invalid_request_error", "rate_limit_error", "server_error")
ERRORS = {
    "openai": {"error": {"message": str, "type": _ERROR_TYPE, "param": (str, None), "code": str}},
    "cohere": {"message": str},
    "ollama": {"error": str},
    "tei": {"error": str, "error_type": str},
}
_MODEL = {"id": str, "object": "model", "created": int, "owned_by": str}
_MODELS = {"object": "list", "data": [_MODEL]}
_TOKEN = {"id": int, "text": str, "special": bool, "start": (int, None), "stop": (int, None)}
_PROMPT_TOKENS = {"count": int, "max_model_len": int, "tokens": [int], "token_strs": None}


@dataclass(frozen=True, slots=True)
class Route:
    """- `name`: the operation's name, for code generators.
    - `answers`: the answer, as `schema` reads it; None if its body is empty.
    - `takes`: the type of the request's body; a route with one is a POST. `or_takes`: another accepted type.
    - `statuses`: the statuses of its errors, except 401.
    - `parameters`: the headers that it reads. `headers`: the headers of its answer.
    - `events`: the schema of a streamed answer, if there is one.
    """

    name: str
    summary: str
    answers: Any
    takes: type[BaseModel] | None = None
    statuses: tuple[int, ...] = ()
    tag: str = "about"
    parameters: Sequence[Schema] = ()
    headers: Schema | None = None
    events: Schema | None = None
    or_takes: type[BaseModel] | None = None

    @property
    def bodies(self) -> list[type[BaseModel]]:
        return [one for one in (self.takes, self.or_takes) if one is not None]


_tokenizer = partial(Route, tag="tokenizer", statuses=(400, 404, 413, 422))
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
ABOUT: Mapping[str, Route] = {  # the routes of every service
    "/tokenize": _tokenizer(
        "tokenize", "Texts -> tokens", ([[_TOKEN]], _PROMPT_TOKENS), TokenizeRequest, or_takes=TokenizePromptRequest
    ),
    "/decode": _tokenizer("decode", "Token ids -> texts", [str], DecodeRequest),
    "/detokenize": _tokenizer("detokenize", "Token ids -> a text (vLLM)", {"prompt": str}, DetokenizeRequest),
    "/v1/models": Route("models", "The model that is served", _MODELS),
    "/models": Route("models_unprefixed", "The model that is served", _MODELS),
    "/v1/models/{id}": Route("model", "The model, if it has this name", _MODEL, statuses=(404,), parameters=[_ID]),
    "/info": Route("info", "Model, limits, pools, counters", dict),
    "/version": Route("version", "The version of windve (vLLM)", {"version": str}),
    "/load": Route("load", "Queries or answers in progress at all replicas (vLLM)", {"server_load": int}),
    "/health": Route(
        "health",
        "200 while a pool can answer; degraded while another cannot",
        {"status": ("ok", "degraded"), "missing?": [str], "models?": dict},
        statuses=(503,),
    ),
    "/ping": Route("ping", "200 while the Router lives", None),
}


def admission_parameters(bulk: str, timeout: str) -> list[Schema]:
    """The headers of `web.request_headers`, with their descriptions for this service."""
    expected = "The space of the vectors that the client expects. Another one is answered 409."
    headers: list[tuple[str, Schema, str]] = [
        (PRIORITY, {"type": "string", "enum": ["normal", "bulk"]}, bulk),
        (TIMEOUT, {"type": "integer", "minimum": 1, "maximum": 999_999_999}, timeout),
        (EXPECT_SPACE, {"type": "string"}, expected),
    ]
    return [{"name": name, "in": "header", "schema": kind, "description": about} for name, kind, about in headers]


def build(summary: str, routes: Mapping[str, Route], *, api_keys: bool) -> dict[str, Any]:
    """The document of a service with these routes, with or without API keys. `filled` adds the server's bounds."""
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "windve", "version": VERSION, "summary": summary},
        "paths": {path: _operations(path, route, api_keys=api_keys) for path, route in routes.items()},
        "components": {"schemas": _request_schemas([body for route in routes.values() for body in route.bodies])},
    }
    if api_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operations(path: str, route: Route, *, api_keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary, "tags": [route.tag]}
    if route.takes:
        bodies: list[Schema] = [{"$ref": _COMPONENT.format(model=body.__name__)} for body in route.bodies]
        body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {"required": True, **_json(body)}
    if route.parameters:
        operation["parameters"] = route.parameters
    statuses = route.statuses
    if path in PROBES:
        operation["security"] = []
    elif api_keys:
        statuses = (401, *statuses)
    error = _json(schema(ERRORS[error_shape(path)]))
    bad = {str(status): {"description": MEANINGS[status], **error} for status in statuses}
    return {"post" if route.takes else "get": {**operation, "responses": {"200": _good(route), **bad}}}


def _good(route: Route) -> dict[str, Any]:
    if route.answers is None:
        return {"description": "Success; the body is empty."}
    good: dict[str, Any] = {"description": "The answer.", **_json(schema(route.answers))}
    if route.events is not None:
        good["content"]["text/event-stream"] = {"schema": route.events}
    return good if route.headers is None else {**good, "headers": route.headers}


def _json(content: Schema) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": content}}}


class _RequestSchema(GenerateJsonSchema):
    def default_schema(self, schema: WithDefaultSchema) -> Schema:
        """A field that may be left out may also be null."""
        found = super().default_schema(schema)
        default = found.pop("default", None)
        found = self.get_union_of_schemas([found, {"type": "null"}])
        return found if default is None else {**found, "default": default}


def _request_schemas(types: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """The schemas by name, including those of nested fields."""
    _, found = models_json_schema(
        [(kind, "validation") for kind in types], ref_template=_COMPONENT, schema_generator=_RequestSchema
    )
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def filled(found: Any, values: Mapping[str, Any]) -> Any:
    """The schema with the server's values in place of their names. A bound whose value is None is left out."""
    if isinstance(found, list):
        return [filled(item, values) for item in found]
    if not isinstance(found, dict):
        return found
    named = {key: values[name] for key, name in found.items() if key in _BOUNDS and isinstance(name, str)}
    all_of_them = {key: filled(item, values) for key, item in found.items()} | named
    return {key: item for key, item in all_of_them.items() if item is not None or key not in _BOUNDS}
