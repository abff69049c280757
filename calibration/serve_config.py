"""Writes the found depths into a Serve config or a KubeRay RayService manifest, and changes nothing else in the file.

Comments, order, quoting, number formats and line ends survive byte for byte: PyYAML says where each value stands, and
only those slices of the text are replaced. Each result is read back and compared before anyone sees it, so that a bug
here refuses the edit and never damages a file.

Pure: no ray, no torch, no files.
"""

from __future__ import annotations

import copy
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral, Real
from typing import Any

import yaml

from deployments.errors import SettingsError

IMPORT_PATH = "serve_app.app:build"  # serve_app.service_config says the same, but imports ray
DEPLOYMENT = "Router"
WHOLE = ("user_config", "calibration")  # ours as a whole: replaced, not merged, so that no old key stays in it
LINE = 110  # columns; a longer new mapping is written over several lines

_CONFIG = "<config>"
_CARRIED = ("spec", "serveConfigV2")
_WHERE = ".".join(_CARRIED)
_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")  # what YAML 1.1 takes for the end of a line
_ANCHOR = re.compile(r"&[0-9A-Za-z_-]+[ \t]*")
_LITERAL = re.compile(r"(?:[&!]\S*[ \t]+)*\|")
_PLAIN = re.compile(r"[A-Za-z_][\w./+-]*(?: [\w./+-]+)*", re.ASCII)
# Strings for PyYAML when they stand bare, but not for every YAML reader (KubeRay's is written in Go).
_DOUBTFUL = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
_STR = "tag:yaml.org,2002:str"


def edit(text: str, application: str, changes: Mapping[str, Any]) -> str:
    """The text with `changes` merged into the Router entry of the named application, all else byte for byte the same.

    `text` is a Serve config, or a file with RayService manifests that carry one in `spec.serveConfigV2`. A mapping
    merges into a mapping, another value replaces one, a missing key is inserted; `user_config.calibration` is replaced
    whole. Values are mappings, lists, strings, numbers, bools and None; others raise TypeError.

    Raises SettingsError: the file is not YAML, has no or no single such application, or says something that cannot be
    changed in place (an alias, a key given twice, a quoted `serveConfigV2`).
    """
    wanted = _plain(changes)
    documents = _load(text, _CONFIG)
    place = _find(documents, application)
    source = _Source.of(text)
    root = source.documents[place.document]
    if place.manifest:
        node = _descend(source, root, _CARRIED, "")
        block = _Literal.of(source, node)
        inner = _Source.of(block.text)
        changed = [block.outside(one) for one in _router_edits(inner, inner.documents[0], place, wanted)]
    else:
        changed = _router_edits(source, root, place, wanted)
    try:
        after = _apply(text, changed)
        good = _same(_opened(_load(after, _CONFIG), place), _expected(documents, place, wanted))
    except (SettingsError, LookupError, TypeError, ValueError):
        good = False
    if not good:
        raise SettingsError(_CONFIG, f"cannot be edited safely; set the depths by hand: {_flow(wanted)}")
    return after


def router_application(text: str, application: str) -> dict[str, Any]:
    """The application that `edit` would edit, as it stands in the text. Raises SettingsError as `edit` does."""
    place = _find(_load(text, _CONFIG), application)
    found: dict[str, Any] = place.config["applications"][place.application]
    return found


# Where the values stand.


@dataclass(frozen=True, slots=True)
class _Place:
    """The Router entry: which document of the file, whether that is a manifest, and the indices within the config."""

    document: int
    manifest: bool
    config: dict[str, Any]
    application: int
    deployment: int

    @property
    def path(self) -> tuple[str | int, ...]:
        return ("applications", self.application, "deployments", self.deployment)

    @property
    def where(self) -> str:
        return _WHERE if self.manifest else ""

    @property
    def entry(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["applications"][self.application]["deployments"][self.deployment]
        return found


def _find(documents: Sequence[Any], application: str) -> _Place:
    """The one Router entry of the one application of that name."""
    ours = [
        (number, manifest, config, index, found)
        for number, document in enumerate(documents)
        for manifest, config in _configs(document)
        for index, found in enumerate(_list(config.get("applications")))
        if isinstance(found, dict) and found.get("import_path") == IMPORT_PATH
    ]
    named = [one for one in ours if one[4].get("name", "default") == application]
    if not named:
        names = ", ".join(str(one[4].get("name", "default")) for one in ours)
        there_are = f"there are: {names}" if names else "there are none with that import_path"
        raise SettingsError(
            "applications", f"no application with import_path: {IMPORT_PATH} is named {application}; {there_are}"
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
    return _Place(number, manifest, config, index, entries[0])


def _configs(document: Any) -> Iterable[tuple[bool, dict[str, Any]]]:
    """The Serve config that a document is, or that it carries as a manifest (then with True)."""
    if not isinstance(document, dict):
        return
    if document.get("kind") != "RayService":
        yield False, document
        return
    spec = document.get("spec")
    carried = spec.get("serveConfigV2") if isinstance(spec, dict) else None
    if isinstance(carried, str):
        inner = _load(carried, _WHERE)
        if len(inner) == 1 and isinstance(inner[0], dict):
            yield True, inner[0]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _load(text: str, what: str) -> list[Any]:
    """The documents of a YAML text. Raises SettingsError."""
    try:
        return list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2026-13-45
        raise SettingsError(what, f"is not valid YAML: {' '.join(str(error).split())}") from None


@dataclass(frozen=True, slots=True)
class _Source:
    """A text with its nodes, and those of its tokens that stand in it as characters, in order."""

    text: str
    documents: list[yaml.Node]
    tokens: list[yaml.Token]
    starts: list[int]
    shared: frozenset[int]  # ids of nodes that an alias uses again

    @classmethod
    def of(cls, text: str) -> _Source:
        documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        tokens = [token for token in yaml.scan(text) if token.start_mark.index < token.end_mark.index]
        return cls(text, documents, tokens, [token.start_mark.index for token in tokens], _shared(documents))

    def line_end(self, at: int) -> int:
        """Where the line ends that holds `at`, before its line break."""
        found = _BREAK.search(self.text, at)
        return found.start() if found else len(self.text)

    def newline(self, at: int) -> str:
        """The line break that ends the line of `at`; at the end of the file, the file's first one."""
        found = _BREAK.search(self.text, at) or _BREAK.search(self.text)
        return found[0] if found and found[0] in {"\n", "\r\n"} else "\n"

    def last_token(self, node: yaml.Node) -> int:
        """Index of the last token of a node. A block's own end mark comes later, behind comments and blank lines."""
        end: int = node.end_mark.index
        return bisect_left(self.starts, end) - 1

    def content_end(self, node: yaml.Node, column: int) -> int:
        """Where the last content of a node ends. `column` is that of the mapping around it."""
        token = self.tokens[self.last_token(node)]
        start: int = token.start_mark.index
        end: int = token.end_mark.index
        if not isinstance(token, yaml.ScalarToken) or token.style not in {"|", ">"}:
            return end
        # The token of a block scalar takes in the blank lines behind it; they are content only with the indicator +.
        header = self.text[start : self.line_end(start)].partition("#")[0]
        blank = f"(?:{_BREAK.pattern})" if "+" in header else f"(?:(?:{_BREAK.pattern}) {{0,{column}}})+"
        behind = re.compile(blank + r"\Z").search(self.text, start, end)
        return behind.start() if behind else end

    def entry(self, mapping: yaml.MappingNode, key: str) -> tuple[yaml.Node, yaml.Node] | None:
        """Key and value of an entry that is written out in the mapping."""
        return next((pair for pair in mapping.value if pair[0].tag == _STR and pair[0].value == key), None)

    def check_private(self, node: yaml.Node, where: str) -> None:
        if id(node) in self.shared:
            raise SettingsError(where, "is shared by an anchor (&) and an alias (*); write it out in this place")

    def check_mapping(self, node: yaml.Node, where: str) -> yaml.MappingNode:
        """The node as a mapping that can be edited. Raises SettingsError."""
        self.check_private(node, where or _CONFIG)
        assert isinstance(node, yaml.MappingNode)  # where the way goes was read as a dict
        keys = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, _ in node.value:
            name = _join(where, str(key.value))
            self.check_private(key, name)
            if isinstance(key, yaml.ScalarNode) and keys[key.tag, key.value] > 1:
                raise SettingsError(name, "is given twice; remove one of the two")
        return node


def _shared(documents: Iterable[yaml.Node]) -> frozenset[int]:
    """Ids of the nodes that are met more than once: PyYAML gives an alias the very node of its anchor."""
    met: Counter[int] = Counter()
    ahead = list(documents)
    while ahead:
        node = ahead.pop()
        met[id(node)] += 1
        if met[id(node)] == 1:
            ahead += _children(node)
    return frozenset(key for key, times in met.items() if times > 1)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _descend(source: _Source, node: yaml.Node, path: Iterable[str | int], where: str) -> yaml.Node:
    """The node at the end of a path. Raises SettingsError where the way goes through an alias or a merge key."""
    for step in path:
        if isinstance(step, int):
            where = f"{where}[{step}]"
            node = node.value[step]
        else:
            pair = source.entry(source.check_mapping(node, where), step)
            where = _join(where, step)
            if pair is None:
                raise _merged_in(where)
            node = pair[1]
        source.check_private(node, where)
    return node


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _merged_in(where: str) -> SettingsError:
    return SettingsError(where, "comes from a merge key (<<); write it out in this place")


# What is to change.


@dataclass(frozen=True, slots=True)
class _Edit:
    """`new` in place of `text[start:end]`."""

    start: int
    end: int
    new: str


def _apply(text: str, changed: Iterable[_Edit]) -> str:
    """Raises LookupError if edits overlap. Those at one place keep their order."""
    parts, at = [], 0
    for one in sorted(changed, key=lambda one: one.start):
        if one.start < at:
            raise LookupError("two edits overlap")
        parts += [text[at : one.start], one.new]
        at = one.end
    return "".join([*parts, text[at:]])


def _router_edits(source: _Source, root: yaml.Node, place: _Place, wanted: dict[str, Any]) -> list[_Edit]:
    router = _descend(source, root, place.path, place.where)
    where = place.where
    for step in place.path:
        where = f"{where}[{step}]" if isinstance(step, int) else _join(where, step)
    return _merge_edits(_Scope(source, (), where), router, place.entry, wanted)


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where in the Router entry an edit is: `path` from the entry on, `where` from the root on, for a person."""

    source: _Source
    path: tuple[str, ...]
    where: str

    def key(self, key: str) -> _Scope:
        return _Scope(self.source, (*self.path, key), _join(self.where, key))


def _merge_edits(scope: _Scope, node: yaml.Node, old: dict[str, Any], changes: dict[str, Any]) -> list[_Edit]:
    """Edits that merge `changes` into a mapping whose content is `old`.

    Those of existing entries come first: where one place takes several insertions, the inner ones stand before.
    """
    mapping = scope.source.check_mapping(node, scope.where)
    edits: list[_Edit] = []
    missing: dict[str, Any] = {}
    for key, new in changes.items():
        inside = scope.key(key)
        if key in old and _same(old[key], _merged(old[key], new, inside.path)):
            continue
        pair = scope.source.entry(mapping, key)
        merges = isinstance(new, dict) and isinstance(old.get(key), dict) and inside.path != WHOLE
        if pair is None:
            if merges:
                raise _merged_in(inside.where)
            missing[key] = new
        elif merges and not _is_blank(scope.source, mapping, pair[1]):
            edits += _merge_edits(inside, pair[1], old[key], new)
        else:
            edits += _replace_edits(inside, mapping, pair, old[key], new)
    if missing:
        insert = _flow_insert if mapping.flow_style else _block_insert
        edits += insert(scope, mapping, missing)
    return edits


def _is_blank(source: _Source, parent: yaml.MappingNode, node: yaml.Node) -> bool:
    """An empty `{}` in a block mapping has no style to keep: it is replaced, like a null."""
    inside = source.text[node.start_mark.index : node.end_mark.index]
    return not parent.flow_style and re.fullmatch(r"\{[ \t]*\}", inside) is not None


def _replace_edits(
    scope: _Scope, mapping: yaml.MappingNode, pair: tuple[yaml.Node, yaml.Node], old: Any, new: Any
) -> list[_Edit]:
    """Edits that put `new` in the place of an entry's value. A comment behind the value or the key stays."""
    source, (key, node) = scope.source, pair
    if scope.path != WHOLE:
        _check_kinds(scope.where, old, new)
    for part in _all(node):
        source.check_private(part, scope.where)
    colon = bisect_left(source.starts, key.end_mark.index)
    if colon == len(source.tokens) or not isinstance(source.tokens[colon], yaml.ValueToken):
        raise SettingsError(scope.where, "is a key without a colon; write `key: value`")
    behind = source.tokens[colon].end_mark.index
    column = mapping.value[0][0].start_mark.column
    was_block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    start, end = _span(source, node, behind, column)
    if mapping.flow_style or _fits(scope.path[-1], new, column):
        if was_block:
            return [_Edit(behind, behind, f" {_flow(new)}"), _Edit(source.line_end(behind), source.line_end(end), "")]
        return [_Edit(start, end, ("" if start < end else " ") + _flow(new))]
    lines = _block(new, column + 2, source.newline(behind))
    if was_block:
        return [_Edit(source.line_end(behind), source.line_end(end), lines)]
    blank = max(behind, len(source.text[:start].rstrip()))
    line_end = source.line_end(end)
    return [_Edit(blank, end, ""), _Edit(line_end, line_end, lines)]


def _span(source: _Source, node: yaml.Node, behind: int, column: int) -> tuple[int, int]:
    """Where a value stands in the text, without its anchor; just behind the colon if there is none."""
    start = node.start_mark.index
    if start == node.end_mark.index:
        return behind, behind
    end = source.content_end(node, column)
    anchor = _ANCHOR.match(source.text, start, end)
    return (anchor.end() if anchor else start), end


def _all(node: yaml.Node) -> Iterable[yaml.Node]:
    met, ahead = set(), [node]
    while ahead:
        one = ahead.pop()
        if id(one) not in met:
            met.add(id(one))
            ahead += _children(one)
            yield one


def _check_kinds(where: str, old: Any, new: Any) -> None:
    if isinstance(new, dict) and not (old is None or isinstance(old, dict)):
        raise SettingsError(where, "should be a mapping in this file")
    if isinstance(old, dict) and not isinstance(new, dict):
        raise SettingsError(where, "should be a single value in this file, not a mapping")


def _block_insert(scope: _Scope, mapping: yaml.MappingNode, missing: dict[str, Any]) -> list[_Edit]:
    """New lines behind the last line with content; what stands after it (comments, blank lines) stays after."""
    column = mapping.value[0][0].start_mark.column
    end = scope.source.line_end(scope.source.content_end(mapping, column))
    return [_Edit(end, end, _block(missing, column, scope.source.newline(end)))]


def _flow_insert(scope: _Scope, mapping: yaml.MappingNode, missing: dict[str, Any]) -> list[_Edit]:
    """Behind the last entry; on lines of their own where the last entry has one and the brace does not follow it."""
    source = scope.source
    entries = [_pair(key, value) for key, value in missing.items()]
    close = source.last_token(mapping)
    if not isinstance(source.tokens[close], yaml.FlowMappingEndToken):  # a pair without braces: [name: Router]
        raise SettingsError(scope.where, "is a mapping without braces; write it as {key: value}")
    last = source.tokens[close - 1]
    comma = isinstance(last, yaml.FlowEntryToken)
    end = source.tokens[close - 2 if comma else close - 1].end_mark.index
    if not mapping.value:
        return [_Edit(end, end, ", ".join(entries))]
    at = last.end_mark.index
    key_start = mapping.value[-1][0].start_mark.index
    pad = _BREAK.split(source.text[:key_start])[-1]
    line_end = source.line_end(at)
    if pad.strip() or line_end > source.tokens[close].start_mark.index or source.line_end(end) < at:
        return [_Edit(end, end, "".join(f", {entry}" for entry in entries))]
    lines = ",".join(f"{source.newline(at)}{pad}{entry}" for entry in entries)
    return [_Edit(end, end, "" if comma else ","), _Edit(line_end, line_end, lines + ("," if comma else ""))]


# A Serve config inside of a manifest.


@dataclass(frozen=True, slots=True)
class _Literal:
    """A literal block scalar: its text without the indentation, and where each of its lines stands in the file."""

    text: str
    indent: int
    inner: list[int]  # where each line starts in `text`
    outer: list[int]  # where the same character stands in the file

    @classmethod
    def of(cls, source: _Source, node: yaml.Node) -> _Literal:
        """Raises SettingsError for a scalar of another style."""
        header = node.start_mark.index
        if not _LITERAL.match(source.text, header):
            raise SettingsError(
                _WHERE,
                "is written in quotes or folded, where lines cannot be edited in place; write it as `serveConfigV2: |`",
            )
        begin = source.line_end(header)
        first = _BREAK.match(source.text, begin)
        begin = first.end() if first else begin
        value = _lines(node.value)  # without the blank lines at the end that the header takes away
        lines = _lines(source.text[begin : node.end_mark.index])[: len(value)]
        at = next(number for number, line in enumerate(value) if line.strip())
        indent = len(_BREAK.split(lines[at])[0]) - len(_BREAK.split(value[at])[0])
        removed = [min(indent, len(line) - len(line.lstrip(" "))) for line in lines]
        inner = [line[cut:] for line, cut in zip(lines, removed, strict=True)]
        if not _BREAK.search(value[-1]):
            inner[-1] = _BREAK.split(inner[-1])[0]
        starts = accumulate(map(len, lines), initial=begin)
        return cls(
            "".join(inner),
            indent,
            list(accumulate(map(len, inner[:-1]), initial=0)),
            [start + cut for start, cut in zip(starts, removed, strict=False)],
        )

    def outside(self, one: _Edit) -> _Edit:
        """The same edit, in the text around."""
        new = _BREAK.sub(lambda found: found[0] + " " * self.indent, one.new)
        return _Edit(self._outside(one.start), self._outside(one.end), new)

    def _outside(self, at: int) -> int:
        line = bisect_right(self.inner, at) - 1
        return self.outer[line] + at - self.inner[line]


def _lines(text: str) -> list[str]:
    """The lines of a text, each with its line break."""
    cuts = [0, *(found.end() for found in _BREAK.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


# The merge of plain values, which the result must equal.


def _plain(value: Any) -> Any:
    """The value with nothing but Python's own types in it (a number of numpy's is a number). Raises TypeError."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key of a Serve config is a string")
        return {str.__str__(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    raise TypeError(f"a {type(value).__name__} cannot be written to a Serve config")


def _merged(old: Any, new: Any, path: tuple[str, ...]) -> Any:
    if not isinstance(new, dict) or not isinstance(old, dict) or path == WHOLE:
        return new
    return {**old, **{key: _merged(old.get(key), value, (*path, key)) for key, value in new.items()}}


def _expected(documents: Sequence[Any], place: _Place, wanted: dict[str, Any]) -> list[Any]:
    """What the edited file must say, with a manifest's config opened."""
    expected = _opened(documents, place)
    config = expected[place.document]["spec"]["serveConfigV2"] if place.manifest else expected[place.document]
    config["applications"][place.application]["deployments"][place.deployment] = _merged(place.entry, wanted, ())
    return expected


def _opened(documents: Sequence[Any], place: _Place) -> list[Any]:
    """A copy of the documents, with a manifest's config as a mapping in place of its text."""
    opened = copy.deepcopy(list(documents))
    if place.manifest:
        spec = opened[place.document]["spec"]
        (spec["serveConfigV2"],) = _load(spec["serveConfigV2"], _WHERE)
    return opened


def _same(one: Any, other: Any, met: set[tuple[int, int]] | None = None) -> bool:
    """Equal, and of the same types: 1, 1.0 and True differ, nan equals nan. Values may contain themselves."""
    met = set() if met is None else met
    if type(one) is not type(other):
        return False
    if not isinstance(one, (dict, list)):
        return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - nan
    if (id(one), id(other)) in met:
        return True
    met.add((id(one), id(other)))
    if isinstance(one, list):
        return len(one) == len(other) and all(_same(a, b, met) for a, b in zip(one, other, strict=True))
    return one.keys() == other.keys() and all(_same(value, other[key], met) for key, value in one.items())


# Values as YAML.


def _block(mapping: dict[str, Any], column: int, newline: str) -> str:
    """The entries of a mapping, each on new lines."""
    return "".join(
        f"{newline}{' ' * column}"
        + (_pair(key, value) if _fits(key, value, column) else f"{_scalar(key)}:{_block(value, column + 2, newline)}")
        for key, value in mapping.items()
    )


def _fits(key: str, value: Any, column: int) -> bool:
    """One line, and not a block: all but mappings that hold mappings, or that are long."""
    if not isinstance(value, dict):
        return True
    return not any(isinstance(one, dict) for one in value.values()) and column + len(_pair(key, value)) <= LINE


def _pair(key: str, value: Any) -> str:
    return f"{_scalar(key)}: {_flow(value)}"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_pair(key, one) for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """A scalar that PyYAML reads back as exactly this value, anywhere in a block or a flow."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if _is_plain(value) else _quoted(value)
    if isinstance(value, float):
        return _float(value)
    return str(value)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    digits, e, exponent = repr(value).partition("e")
    # YAML 1.1 asks for the point: 1e-05 is a string there.
    return f"{digits}{'' if '.' in digits else '.0'}{e}{exponent}"


def _is_plain(value: str) -> bool:
    if not _PLAIN.fullmatch(value) or value.lower() in _DOUBTFUL:
        return False
    return isinstance(yaml.safe_load(value), str)


def _quoted(value: str) -> str:
    dumped = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf)
    return str(dumped).removesuffix("\n")
