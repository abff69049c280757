"""Edits a Serve config, or a KubeRay RayService manifest with one, and keeps the layout of the file.

PyYAML, with which Ray Serve reads the file, says where each value stands. Only the text of changed values is written
anew, and the result is read again and compared before it is returned. Pure: no ray, no torch, no files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pprint import saferepr
from textwrap import indent
from typing import Any

import yaml

from deployments.errors import SettingsError
from serve_app.config.models import IMPORT_PATHS

DEPLOYMENT = "Router"
FILE = "<config>"  # the key in errors about the whole text

_WHOLE = {"accelerator", "cpu", "calibration"}  # parts of a `user_config` that calibrations write: no old key stays
_CARRIED = ("spec", "serveConfigV2")  # where a manifest has its Serve config, as a text

_Path = tuple[str | int, ...]
_Cut = tuple[int, int, str]  # start, end, and the text in its place


def edit(text: str, application: str, changes: Mapping[str, Any]) -> str:
    """The text with `changes` merged into the Router entry of the named application. Nothing else changes.

    `text` is a Serve config, or a file with RayService manifests that carry one in `spec.serveConfigV2`. A mapping
    merges into a mapping, another value replaces one, a missing key is added; what `user_config`, or a model's own part
    of it, says of a pool and of the calibration is replaced whole. Comments, order and quotes stay; braces that get or
    lose a key are written anew.

    Raises SettingsError if the file is not YAML, does not have exactly one such application, has a mapping where the
    changes have a single value or the other way round, or cannot be changed in place (an alias, a comment within
    braces).
    """
    documents = load(text)
    number, carried, path, _ = _find(documents, application)
    document = list(yaml.compose_all(text, yaml.SafeLoader))[number]
    if carried is None:
        new = merged(_at(documents[number], path), changes)
        cuts = list(_cuts(text, _node(document, path), _at(documents[number], path), new))
    else:
        path = _CARRIED
        try:
            new = edit(carried, application, changes)
        except SettingsError as error:
            inside = () if error.key == FILE else (error.key,)
            raise SettingsError(".".join((*_CARRIED, *inside)), error.problem) from None
        cuts = [_carried(text, _node(document, path), new)]
    for at, comment in _comments(text):
        if any(what and start < at < end for start, end, what in cuts):
            raise SettingsError(FILE, f"the comment '{comment}' would be lost; move it out of the braces")
    after = text
    for start, end, what in sorted(cuts, reverse=True):
        after = after[:start] + (what.replace("\n", "\r\n") if "\r\n" in text else what) + after[end:]
    with suppress(SettingsError):
        if _same(load(after), _replaced(documents, (number, *path), new)):
            return after
    raise SettingsError(
        FILE, "cannot be edited in place, perhaps due to an anchor (&) and an alias (*): write out the Router's entry"
    )


def router_application(text: str, application: str) -> dict[str, Any]:
    """The application that `edit` would change, as it is in the text. Raises SettingsError as `edit` does."""
    return _find(load(text), application)[3]


def load(text: str, key: str = FILE) -> list[Any]:
    """The documents of a YAML text, as Ray Serve reads them. If it is not YAML, raises SettingsError with `key`."""
    try:
        return list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2026-13-45
        raise SettingsError(key, f"is not valid YAML: {' '.join(str(error).split())}") from None


# Which values change.


def _find(documents: Sequence[Any], application: str) -> tuple[int, str | None, _Path, dict[str, Any]]:
    """The document with the only application of that name, the text of the config that it carries (None: it is one),
    the path of the only Router entry in the config, and the application. Raises SettingsError.
    """
    ours = [
        (number, carried, index, found)
        for number, document in enumerate(documents)
        for carried, config in _configs(document)
        for index, found in enumerate(_list(config.get("applications")))
        if isinstance(found, dict) and found.get("import_path") in IMPORT_PATHS
    ]
    named = [one for one in ours if one[3].get("name", "default") == application]
    if not named:
        names = ", ".join(str(one[3].get("name", "default")) for one in ours)
        there_are = f"there are: {names}" if names else "there are none with that import_path"
        none = f"no application with import_path: {' or '.join(IMPORT_PATHS)} is named {application}"
        raise SettingsError("applications", f"{none}; {there_are}")
    if len(named) > 1:
        raise SettingsError("applications", f"{len(named)} applications are named {application} in this file")
    number, carried, index, found = named[0]
    deployments = enumerate(_list(found.get("deployments")))
    entries = [at for at, entry in deployments if isinstance(entry, dict) and entry.get("name") == DEPLOYMENT]
    if len(entries) != 1:
        has = f"has {len(entries) or 'no'} deployment{'s' * (len(entries) > 1)} named {DEPLOYMENT}"
        raise SettingsError("applications", f"the application {application} {has} in this file")
    return number, carried, ("applications", index, "deployments", entries[0]), found


def _configs(document: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yields (its text, Serve config) for a manifest that carries one, (None, config) for a Serve config."""
    if not isinstance(document, dict):
        return
    if document.get("kind") != "RayService":
        yield None, document
    elif isinstance(document.get("spec"), dict) and isinstance(carried := document["spec"].get("serveConfigV2"), str):
        yield from ((carried, config) for config in load(carried, ".".join(_CARRIED)) if isinstance(config, dict))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(value: Any, path: _Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _replaced(value: Any, path: _Path, new: Any) -> Any:
    """A copy of the value with `new` at the path. An alias elsewhere keeps the old value."""
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = _replaced(value[path[0]], path[1:], new)
    return changed


def merged(old: Any, changes: Any, path: tuple[str, ...] = ()) -> Any:
    """A copy of `old`, which is at `path` in the Router's entry, with the changes merged in (see `edit`). Raises
    SettingsError.
    """
    if old is not None and isinstance(old, dict) != isinstance(changes, Mapping):
        kind = "a mapping" if isinstance(changes, Mapping) else "a single value"
        raise SettingsError(".".join(path), f"should be {kind} in this file")
    match path:
        case ("user_config", key) | ("user_config", "models", _, key) if key in _WHOLE:
            return changes
    if not isinstance(old, dict) or not isinstance(changes, Mapping):
        return changes
    return old | {key: merged(old.get(key), new, (*path, key)) for key, new in changes.items()}


def _same(one: Any, other: Any) -> bool:
    """Whether both are equal, except for the order of keys, and of the same types: 1, 1.0 and True differ; nan equals
    nan.
    """
    return saferepr(one) == saferepr(other)


# How they are written.


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Where each comment begins, and its words: comments are between the tokens of the text."""
    tokens: list[Any] = list(yaml.scan(text))
    for one, other in pairwise(tokens):
        for found in re.finditer(r"#.*", text[one.end_mark.index : other.start_mark.index]):
            yield one.end_mark.index + found.start(), found.group().strip()


def _node(node: yaml.Node, path: _Path) -> yaml.Node:
    for step in path:
        node = node.value[step] if isinstance(step, int) else _pairs(node)[step][1]
    return node


def _pairs(node: yaml.Node) -> dict[str | int, tuple[yaml.Node, yaml.Node]]:
    """The nodes of a mapping's keys and values, by the key."""
    return {key.value: (key, value) for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}


def _cuts(text: str, node: yaml.Node, old: Any, wanted: Any) -> Iterator[_Cut]:
    """What to change in the text so that the node, which says `old`, says what is wanted."""
    if _same(old, wanted):
        return
    now = old if isinstance(old, dict) and isinstance(wanted, dict) else {}
    pairs = {key: pair for key, pair in _pairs(node).items() if key in now}
    stay = [pair for key, pair in pairs.items() if key in wanted]
    if not stay:
        yield _anew(node, wanted)
        return
    more = {key: new for key, new in wanted.items() if key not in pairs and not (key in now and _same(now[key], new))}
    if not _is_block(node) and (more or len(stay) < len(pairs)):
        yield _anew(node, wanted)
        return
    for key, (name, value) in pairs.items():
        if key in wanted:
            yield from _cuts(text, value, old[key], wanted[key])
        else:
            yield name.start_mark.index - name.start_mark.column, _line_end(text, value) + 1, ""
    if more:
        at = _line_end(text, stay[-1][1])
        yield at, at, "\n" + _block(more, node.start_mark.column)


def _anew(node: yaml.Node, wanted: Any) -> _Cut:
    """A node that is written anew: in the lines of a block, or on the line where it is."""
    start, end = node.start_mark.index, _end(node)
    if _is_block(node) and isinstance(wanted, dict) and wanted:
        return start, end, _block(wanted, node.start_mark.column).lstrip()
    flow = _dump(wanted, flow=True).removesuffix("\n").removesuffix("\n...")
    return start, end, " " * (start == end) + flow  # an empty value is at its key's colon


def _block(value: dict[str, Any], column: int) -> str:
    """A mapping as YAML, a line a key: a value of scalars is within braces on its line, others on several."""
    parts = (_dump({key: one}, flow=None if isinstance(one, (dict, list)) else False) for key, one in value.items())
    return indent("".join(parts), " " * column).removesuffix("\n")


def _dump(value: Any, *, flow: bool | None) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=flow, sort_keys=False, width=math.inf, allow_unicode=True)
    return text


def _is_block(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode) and bool(node.value) and not node.flow_style


def _end(node: yaml.Node) -> int:
    """Where a node's own text ends. PyYAML counts blank lines and comments after a block as its own."""
    while _is_block(node):
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    return int(node.end_mark.index)


def _line_end(text: str, node: yaml.Node) -> int:
    """Where the last line of a node ends."""
    found = text.find("\n", max(0, _end(node) - 1))  # - 1: a literal ends with its last line end
    at = len(text) if found < 0 else found
    return at - text[:at].endswith("\r")


def _carried(text: str, carrier: yaml.Node, inner: str) -> _Cut:
    """The config in a manifest: a literal stays one, with its indentation and the line of its `|`."""
    start, end = carrier.start_mark.index, carrier.end_mark.index
    if not isinstance(carrier, yaml.ScalarNode) or carrier.style != "|":
        return start, end, json.dumps(inner, ensure_ascii=False)
    header, *lines = text[start:end].splitlines()
    first = next(line for line in lines if line.strip())
    return start, end, f"{header}\n{indent(inner, first[: -len(first.lstrip())])}".removesuffix("\n") + "\n"
