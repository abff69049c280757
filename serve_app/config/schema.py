"""The JSON Schema of a Serve config: Ray's own schema, with windve's settings for `args` and `user_config`.

`make manifests` writes it to `schema.json`, which `windve schema` prints. It refuses the same keys, types and bounds
as `check_config`. Only `check_config` finds settings that contradict each other.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from ray.serve.schema import ServeDeploySchema

from deployments.embedding.config import RouterConfig
from deployments.generation.settings import GenerationRouterConfig, GenerationSettings
from deployments.settings import Settings, Strict
from serve_app.config.models import EMBEDDINGS, GENERATION, SHARED_CONFIG, SeveralSettings

PATH = Path(__file__).with_name("schema.json")
_OURS: tuple[type[BaseModel], ...] = (
    Settings,
    SeveralSettings,
    RouterConfig,
    GenerationSettings,
    GenerationRouterConfig,
)
_STRICT_OF_RAY = (
    "ServeApplicationSchema",
    "DeploymentSchema",
    "HTTPOptionsSchema",
    "gRPCOptionsSchema",
    "LoggingConfig",
    "AutoscalingConfig",
    "RayActorOptionsSchema",
)


def schema() -> dict[str, Any]:
    """The schema, in draft 2020-12. Descriptions come from class docstrings and from the comments of settings."""
    models: list[type[BaseModel]] = [ServeDeploySchema, *_OURS]
    whole: dict[str, Any] = models_json_schema([(model, "validation") for model in models])[1]
    kinds: dict[str, Any] = whole["$defs"]
    for model in _every(Strict):
        if model.__name__ in kinds:
            for name, comment in _comments(model).items():
                kinds[model.__name__]["properties"][name]["description"] = comment
    kinds["EmulatedWithHost"].pop("required")  # its `device` may give the values that are left out
    root = kinds.pop("ServeDeploySchema")
    for kind in (root, *(kinds[name] for name in _STRICT_OF_RAY)):
        kind["additionalProperties"] = False  # Ray would ignore them; windve refuses them
    scaling = kinds["DeploymentSchema"]["properties"]["autoscaling_config"]
    scaling["anyOf"] = [one for one in scaling["anyOf"] if one.get("type") != "object"]  # Ray takes any mapping
    kinds["SeveralRouterConfig"] = _config_of_several(kinds["RouterConfig"])
    kinds["ServeApplicationSchema"]["allOf"] = [
        _application(EMBEDDINGS, ["Settings", "SeveralSettings"], ["RouterConfig", "SeveralRouterConfig"]),
        _application(GENERATION, ["GenerationSettings"], ["GenerationRouterConfig"]),
    ]
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Serve config of windve"}
    return {**about, **_without_titles(root), "$defs": _without_titles(kinds)}


def text() -> str:
    """The schema as stored: one line per definition."""
    *others, definitions = schema().items()
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in others]
    inner = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in definitions[1].items()]
    return "{{\n{},\n{}: {{\n{}\n}}\n}}\n".format(",\n".join(lines), json.dumps(definitions[0]), ",\n".join(inner))


def _application(import_path: str, args: list[str], user_config: list[str]) -> dict[str, Any]:
    """The rules for an application of this import path: its `args`, and its Router's `user_config`."""
    router = {"if": _says("name", "Router"), "then": {"properties": {"user_config": _one_of(user_config)}}}
    properties = {"args": _one_of(args), "deployments": {"items": router}}
    return {"if": _says("import_path", import_path), "then": {"required": ["args"], "properties": properties}}


def _says(key: str, value: str) -> dict[str, Any]:
    return {"properties": {key: {"const": value}}, "required": [key]}


def _one_of(names: list[str]) -> dict[str, Any]:
    references = [{"$ref": f"#/$defs/{name}"} for name in names]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _config_of_several(one: dict[str, Any]) -> dict[str, Any]:
    """The `user_config` for several models: shared settings, and under `models` the settings of each by name."""
    own = {"type": ["object", "null"], "properties": one["properties"], "additionalProperties": False}
    return {
        "description": "The Router's `user_config` if it serves several models.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{key: one["properties"][key] for key in SHARED_CONFIG},
            "models": {"description": "Settings of one model, by its name.", "additionalProperties": own},
        },
    }


def _without_titles(of: Any) -> Any:
    """Without pydantic's titles, which only repeat the keys."""
    if isinstance(of, dict):
        return {
            key: _without_titles(value) for key, value in of.items() if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(one) for one in of] if isinstance(of, list) else of


def _every(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for inner in model.__subclasses__():
        yield inner
        yield from _every(inner)


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """The comments beside or above the settings of a class and its base classes."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Strict):
            found |= _own_comments(textwrap.dedent(inspect.getsource(base)))
    return {name: comment for name, comment in found.items() if name in model.model_fields}


def _own_comments(source: str) -> dict[str, str]:
    lines, comments = source.splitlines(), {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# noqa"):
            comments[token.start[0]] = token.string.removeprefix("#").strip()
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while lines[first - 2].strip().startswith("#"):
                first -= 1
            last = node.end_lineno or node.lineno
            if said := [comments[line] for line in range(first, last + 1) if line in comments]:
                found[node.target.id] = " ".join(said)
    return found


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
