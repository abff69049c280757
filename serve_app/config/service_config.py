"""Reads the Serve config file and checks it before anything starts. Unlike Ray's schema, it refuses unknown keys."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)
from yaml.composer import ComposerError

from deployments.errors import SettingsError
from deployments.settings import parse_settings
from serve_app.config.models import EMBEDDINGS, IMPORT_PATHS, ApplicationArgs, Args
from serve_app.config.overrides import NONE, Overrides

_INSIDE: dict[type[BaseModel], dict[str, type[BaseModel]]] = {  # a list of the last where Serve's schema has a list
    ServeDeploySchema: {
        "http_options": HTTPOptionsSchema,
        "grpc_options": gRPCOptionsSchema,
        "logging_config": LoggingConfig,
        "applications": ServeApplicationSchema,
    },
    ServeApplicationSchema: {"logging_config": LoggingConfig, "deployments": DeploymentSchema},
    DeploymentSchema: {
        "autoscaling_config": AutoscalingConfig,
        "logging_config": LoggingConfig,
        "ray_actor_options": RayActorOptionsSchema,
    },
}
_LISTS = ("applications", "deployments")


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML's own loaders take the last one and say nothing."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise ComposerError(None, None, f"the key {key.value} is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node


def load_config(path: Path, overrides: Overrides = NONE) -> dict[str, Any]:
    """Read a Serve config file, apply `overrides` and check the result. Raises SettingsError that names the file, the
    option or the key.
    """
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe one
    except OSError as error:
        raise SettingsError(str(path), f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or a date such as 2026-13-45
        raise SettingsError(str(path), f"is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise SettingsError(str(path), "is not a Serve config (a mapping with `applications`)")
    _check_keys(config, ServeDeploySchema, "")
    overrides.apply(config, ours(config))
    check_config(config)
    return config


def check_config(config: dict[str, Any]) -> None:
    """Refuse unknown keys at every level, and settings that would fail later. Raises SettingsError."""
    _check_keys(config, ServeDeploySchema, "")
    try:
        parse_settings(ServeDeploySchema, config, "")
    except SettingsError as error:
        raise SettingsError(error.key.removeprefix("."), error.problem) from None
    applications = args_of(config)
    if not applications:
        raise SettingsError("applications", f"none is a windve application (import_path: {' or '.join(IMPORT_PATHS)})")
    for args, application in zip(applications.values(), ours(config), strict=True):
        args.router_configs(router_config(application))


def args_of(config: dict[str, Any]) -> dict[str, ApplicationArgs]:
    """The `args` of each windve application in a Serve config, by its name. Raises SettingsError."""
    return {application.get("name", "default"): _args(application) for application in ours(config)}


def _args(application: dict[str, Any]) -> ApplicationArgs:
    if application["import_path"] == EMBEDDINGS:
        return Args(application.get("args"))
    from serve_app.config.generation import GenerationArgs

    return GenerationArgs(application.get("args"))


def ours(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The windve applications of a Serve config."""
    return [found for found in config.get("applications") or [] if found.get("import_path") in IMPORT_PATHS]


def router_config(application: dict[str, Any]) -> dict[str, Any] | None:
    """The Router's `user_config` in an application of a Serve config."""
    for deployment in application.get("deployments") or []:
        if deployment.get("name") == "Router":
            found: dict[str, Any] | None = deployment.get("user_config")
            return found
    return None


def _check_keys(given: Any, schema: type[BaseModel], where: str) -> None:
    """Refuse keys that Serve would ignore, here and in all that is inside."""
    if not isinstance(given, dict):
        raise SettingsError(where, "should be a mapping")
    known = set(schema.model_fields) | {str(field.alias) for field in schema.model_fields.values() if field.alias}
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(f"{where}.{key}".lstrip("."), f"is not a setting of Serve, which would ignore it{hint}")
    for key, inner in _INSIDE.get(schema, {}).items():
        at, found = f"{where}.{key}".lstrip("."), given.get(key)
        if found is None:
            continue
        if key not in _LISTS:
            _check_keys(found, inner, at)
        elif isinstance(found, list):
            for index, entry in enumerate(found):
                _check_keys(entry, inner, f"{at}[{index}]")
        else:
            raise SettingsError(at, "should be a list")
    _check_names_differ(given.get("deployments") or [], where)


def _check_names_differ(deployments: list[dict[str, Any]], where: str) -> None:
    names = set[str]()
    for index, deployment in enumerate(deployments):
        if (name := str(deployment.get("name"))) in names:
            problem = f"there is a deployment {name} before it; put both into one entry"
            raise SettingsError(f"{where}.deployments[{index}].name", problem)
        names.add(name)
