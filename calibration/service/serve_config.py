"""Edits a Serve config, or a KubeRay RayService manifest with one, and keeps the layout of the file.

Pure: no ray, no torch, no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.service.yaml_text import FILE, load, rewrite
from deployments.errors import SettingsError
from serve_app.config.models import IMPORT_PATHS

DEPLOYMENT = "Router"

_WHOLE = {"accelerator", "cpu", "calibration"}  # parts of a `user_config` that calibrations write: no old key stays
_CARRIED = "spec.serveConfigV2"


def edit(text: str, application: str, changes: Mapping[str, Any]) -> str:
    """The text with `changes` merged into the Router entry of the named application. Nothing else changes.

    `text` is a Serve config, or a file with RayService manifests that carry one in `spec.serveConfigV2`. A mapping
    merges into a mapping, another value replaces one, a missing key is added; what `user_config`, or a model's own part
    of it, says of a pool and of the calibration is replaced whole. Comments, order and quotes stay.

    Raises SettingsError if the file is not YAML, does not have exactly one such application, or has something that
    cannot be changed in place (an alias, a merge key, a comment within braces). Raises TypeError if `changes` contain
    anything but mappings with string keys, lists, strings, numbers, bools and None.
    """
    documents = load(text)
    place = _find(documents, application)
    router = _at(place.config, place.path)
    merged = _merged(router, json.loads(json.dumps(changes)), place.where)
    wanted = _replaced(place.config, place.path, merged)
    if place.manifest:
        manifest = documents[place.document]
        try:
            carried = rewrite(manifest["spec"]["serveConfigV2"], 0, wanted)
        except SettingsError as error:
            raise SettingsError(_CARRIED if error.key == FILE else f"{_CARRIED}.{error.key}", error.problem) from None
        wanted = _replaced(manifest, ("spec", "serveConfigV2"), carried)
    return rewrite(text, place.document, wanted)


def router_application(text: str, application: str) -> dict[str, Any]:
    """The application that `edit` would change, as it is in the text. Raises SettingsError as `edit` does."""
    place = _find(load(text), application)
    found: dict[str, Any] = _at(place.config, place.path[:2])
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of the Router entry: the document in the file, whether it is a manifest, and the path in the config."""

    document: int
    manifest: bool
    config: dict[str, Any]
    path: tuple[str | int, ...]

    @property
    def where(self) -> str:
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return f"{_CARRIED}{steps}" if self.manifest else steps.removeprefix(".")


def _find(documents: Sequence[Any], application: str) -> _Place:
    """Find the only Router entry of the only application of that name. Raises SettingsError."""
    ours = [
        (number, manifest, config, index, found)
        for number, document in enumerate(documents)
        for manifest, config in _configs(document)
        for index, found in enumerate(_list(config.get("applications")))
        if isinstance(found, dict) and found.get("import_path") in IMPORT_PATHS
    ]
    named = [one for one in ours if one[4].get("name", "default") == application]
    if not named:
        names = ", ".join(str(one[4].get("name", "default")) for one in ours)
        there_are = f"there are: {names}" if names else "there are none with that import_path"
        raise SettingsError(
            "applications",
            f"no application with import_path: {' or '.join(IMPORT_PATHS)} is named {application}; {there_are}",
        )
    if len(named) > 1:
        raise SettingsError("applications", f"{len(named)} applications are named {application} in this file")
    number, manifest, config, index, found = named[0]
    entries = [
        at
        for at, entry in enumerate(_list(found.get("deployments")))
        if isinstance(entry, dict) and entry.get("name") == DEPLOYMENT
    ]
    if len(entries) != 1:
        how_many = f"{len(entries)} deployments" if entries else "no deployment"
        raise SettingsError(
            "applications", f"the application {application} has {how_many} named {DEPLOYMENT} in this file"
        )
    return _Place(number, manifest, config, ("applications", index, "deployments", entries[0]))


def _configs(document: Any) -> Iterable[tuple[bool, dict[str, Any]]]:
    """Yields (is a manifest, Serve config) for a document that is a Serve config or a manifest with one."""
    if not isinstance(document, dict):
        return
    if document.get("kind") != "RayService":
        yield False, document
        return
    spec = document.get("spec")
    carried = spec.get("serveConfigV2") if isinstance(spec, dict) else None
    if isinstance(carried, str):
        inner = load(carried, _CARRIED)
        if len(inner) == 1 and isinstance(inner[0], dict):
            yield True, inner[0]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(value: Any, path: Iterable[str | int]) -> Any:
    for step in path:
        value = value[step]
    return value


def _replaced(value: Any, path: Sequence[str | int], new: Any) -> Any:
    """A copy of the value with `new` at the path. An alias elsewhere keeps the old value."""
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = _replaced(value[path[0]], path[1:], new)
    return changed


def _merged(old: dict[str, Any], changes: dict[str, Any], where: str, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy of `old`, which is at `path` in the Router's entry, with the changes merged in. Raises SettingsError: only
    one of the two has a mapping.
    """
    merged = dict(old)
    for key, new in changes.items():
        there, inside, place = old.get(key), f"{where}.{key}", (*path, key)
        if there is not None and isinstance(new, dict) != isinstance(there, dict):
            kind = "a mapping" if isinstance(new, dict) else "a single value"
            raise SettingsError(inside, f"should be {kind} in this file")
        merges = isinstance(new, dict) and isinstance(there, dict) and not _is_whole(place)
        merged[key] = _merged(old[key], new, inside, place) if merges else new
    return merged


def _is_whole(path: tuple[str, ...]) -> bool:
    match path:
        case ("user_config", key) | ("user_config", "models", _, key):
            return key in _WHOLE
    return False
