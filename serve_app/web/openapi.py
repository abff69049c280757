"""Builds the OpenAPI document of a service. The schemas of bodies come from the types that validate them.

`embedding/document.py` and `generation/document.py` list their routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core.core_schema import WithDefaultSchema

from serve_app.version import VERSION
from serve_app.web.admission_headers import EXPECT_SPACE, PRIORITY, TIMEOUT
from serve_app.web.asgi import PROBES
from serve_app.web.errors import error_shape
from serve_app.web.tokenizer_requests import DecodeRequest, DetokenizeRequest, TokenizePromptRequest, TokenizeRequest

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


def object_of(optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def list_of(item: Schema, description: str | None = None) -> Schema:
    return {"type": "array", "items": item, **({"description": description} if description else {})}


STRING: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
_ERROR_TYPE: Schema = {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]}
_OPENAI_ERROR = object_of(
    error=object_of(message=STRING, type=_ERROR_TYPE, param={"type": ["string", "null"]}, code=STRING)
)
ERRORS = {
    "openai": _OPENAI_ERROR,
    "cohere": object_of(message=STRING),
    "ollama": object_of(error=STRING),
    "tei": object_of(error=STRING, error_type=STRING),
}
MODEL = object_of(id=STRING, object={"const": "model"}, created=WHOLE, owned_by=STRING)
HEALTH = object_of({"missing": list_of(STRING), "models": {"type": "object"}}, status={"enum": ["ok", "degraded"]})
MODELS = object_of(object={"const": "list"}, data=list_of(MODEL))
TOKENS = list_of(
    object_of(
        id=WHOLE,
        text=STRING,
        special={"type": "boolean"},
        start={"type": ["integer", "null"], "description": "In bytes of the text as UTF-8, its prompt included."},
        stop={"type": ["integer", "null"]},
    )
)


PROMPT_TOKENS = object_of(count=WHOLE, max_model_len=WHOLE, tokens=list_of(WHOLE), token_strs={"type": "null"})


@dataclass(frozen=True, slots=True)
class Route:
    """- `name`: the operation's name, for code generators.
    - `answers`: the schema of the answer; None if its body is empty.
    - `takes`: the type of the request's body; a route with one is a POST. `or_takes`: another accepted type.
    - `statuses`: the statuses of its errors, except 401.
    - `parameters`: the headers that it reads. `headers`: the headers of its answer.
    - `events`: the schema of a streamed answer, if there is one.
    """

    name: str
    summary: str
    answers: Schema | None
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


ABOUT: Mapping[str, Route] = {  # the routes of every service
    "/tokenize": Route(
        "tokenize",
        "Texts -> tokens",
        {"anyOf": [list_of(TOKENS), PROMPT_TOKENS]},
        TokenizeRequest,
        (400, 404, 413, 422),
        "tokenizer",
        or_takes=TokenizePromptRequest,
    ),
    "/decode": Route("decode", "Token ids -> texts", list_of(STRING), DecodeRequest, (400, 413, 422), "tokenizer"),
    "/detokenize": Route(
        "detokenize",
        "Token ids -> a text (vLLM)",
        object_of(prompt=STRING),
        DetokenizeRequest,
        (400, 404, 413),
        "tokenizer",
    ),
    "/v1/models": Route("models", "The model that is served", MODELS),
    "/models": Route("models_unprefixed", "The model that is served", MODELS),
    "/v1/models/{id}": Route(
        "model",
        "The model, if it has this name",
        MODEL,
        statuses=(404,),
        parameters=[{"name": "id", "in": "path", "required": True, "schema": STRING}],
    ),
    "/info": Route("info", "Model, limits, pools, counters", {"type": "object"}),
    "/version": Route("version", "The version of windve (vLLM)", object_of(version=STRING)),
    "/load": Route("load", "Queries or answers in progress at all replicas (vLLM)", object_of(server_load=WHOLE)),
    "/health": Route("health", "200 while a pool can answer; degraded while another cannot", HEALTH, statuses=(503,)),
    "/ping": Route("ping", "200 while the Router lives", None),
}


def admission_parameters(bulk: str, timeout: str) -> list[Schema]:
    """The headers of `web.admission_headers`, with their descriptions for this service."""
    priority: Schema = {"type": "string", "enum": ["normal", "bulk"]}
    milliseconds: Schema = {"type": "integer", "minimum": 1, "maximum": 999_999_999}
    expected = "The space of the vectors that the client expects. Another one is answered 409."
    return [
        header(PRIORITY, priority, bulk),
        header(TIMEOUT, milliseconds, timeout),
        header(EXPECT_SPACE, STRING, expected),
    ]


def header(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "header", "schema": schema, "description": description}


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
    error = _json(ERRORS[error_shape(path)])
    bad = {str(status): {"description": MEANINGS[status], **error} for status in statuses}
    return {"post" if route.takes else "get": {**operation, "responses": {"200": _good(route), **bad}}}


def _good(route: Route) -> dict[str, Any]:
    if route.answers is None:
        return {"description": "Success; the body is empty."}
    good: dict[str, Any] = {"description": "The answer.", **_json(route.answers)}
    if route.events is not None:
        good["content"]["text/event-stream"] = {"schema": route.events}
    return good if route.headers is None else {**good, "headers": route.headers}


def _json(schema: Schema) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


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


def filled(schema: Any, values: Mapping[str, Any]) -> Any:
    """The schema with the server's values in place of their names. A bound whose value is None is left out."""
    if isinstance(schema, list):
        return [filled(item, values) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = {key: values[name] for key, name in schema.items() if key in _BOUNDS and isinstance(name, str)}
    all_of_them = {key: filled(item, values) for key, item in schema.items()} | named
    return {key: item for key, item in all_of_them.items() if item is not None or key not in _BOUNDS}
