"""The OpenAPI document: what each route takes, by the types in `requests.py`, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core.core_schema import WithDefaultSchema

from serve_app.web.admission_headers import TIMEOUT

Schema = dict[str, Any]

_COMPONENT = "#/components/schemas/{model}"
_BOUNDS = ("enum", "maximum", "maxItems")  # may have the name of a value that only the server knows

MEANINGS = {
    400: "The request must change; the sentence says how.",
    401: "No API key, or none of this service's.",
    403: "A trial without the secret of a calibration that runs.",
    404: "There is no such model here.",
    413: "The body is larger than the server takes.",
    422: "The request must change; the sentence says how.",
    424: "The model run failed, or the route is for models of another kind.",
    429: "Busy: no device has room before the deadline. Retry-After and retry-after-ms say when to come back.",
    500: "The model run failed.",
    503: "No pool can answer now.",
    504: f"The time that {TIMEOUT} allows has passed, or one query alone takes longer than its deadline.",
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


def json_content(schema: Schema | None) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def reference(kind: type[BaseModel]) -> Schema:
    """To a type that `request_schemas` describes."""
    return {"$ref": _COMPONENT.format(model=kind.__name__)}


class _RequestSchema(GenerateJsonSchema):
    def default_schema(self, schema: WithDefaultSchema) -> Schema:
        """A field that may be left out may be null, too."""
        found = super().default_schema(schema)
        default = found.pop("default", None)
        found = self.get_union_of_schemas([found, {"type": "null"}])
        return found if default is None else {**found, "default": default}


def request_schemas(types: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """By their names, those of fields within fields too."""
    _, found = models_json_schema(
        [(kind, "validation") for kind in types], ref_template=_COMPONENT, schema_generator=_RequestSchema
    )
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def filled(schema: Any, values: Mapping[str, Any]) -> Any:
    """A schema with this server's own values in the place of their names; None: there is no such bound."""
    if isinstance(schema, list):
        return [filled(item, values) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = {key: values[name] for key, name in schema.items() if key in _BOUNDS and isinstance(name, str)}
    all_of_them = {key: filled(item, values) for key, item in schema.items()} | named
    return {key: item for key, item in all_of_them.items() if item is not None or key not in _BOUNDS}
