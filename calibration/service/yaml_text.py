"""Changes values in a YAML text, and keeps its layout.

PyYAML parses the text, as it does for Ray Serve. ruamel.yaml keeps comments, order and quotes. A line that needs no
change stays as it is, even if ruamel.yaml would write it differently. Each result is parsed again and compared before
it is returned.

Pure: no files.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from difflib import SequenceMatcher
from itertools import pairwise, takewhile
from pprint import saferepr
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, PlainScalarString, ScalarString

from deployments.errors import SettingsError

FILE = "<config>"  # the key in errors about the whole text

# Columns: a mapping in a mapping; an item in a list; the item's dash.
_LAYOUTS = ((2, 4, 2), (2, 2, 0), (4, 4, 0), (4, 4, 2), (4, 6, 2))


def load(text: str, key: str = FILE) -> list[Any]:
    """The documents of a YAML text, as Ray Serve reads them. If it is not YAML, raises SettingsError with `key`."""
    try:
        return list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2026-13-45
        raise SettingsError(key, f"is not valid YAML: {' '.join(str(error).split())}") from None


def rewrite(text: str, number: int, wanted: Any) -> str:
    """The text with its document `number` changed to the content `wanted`. JSON stays JSON.

    Raises SettingsError if the text is not YAML, if a comment would be lost, or if another place would change too,
    because of an anchor with aliases or a merge key.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    newline = "\r\n" if "\r\n" in text else "\n"
    plain = text.removeprefix(mark).replace("\r\n", "\n")
    documents = load(plain)
    start, end = _span(plain, number)
    body = plain[start:end]
    ending = "" if body.endswith("\n") else "\n"
    unedited, edited = _round_trips(body + ending, documents[number], wanted)
    for changed in (_keep_lines(body + ending, unedited, edited), edited):
        after = plain[:start] + changed.removesuffix(ending) + plain[end:]
        problem = _problem(after, [*documents[:number], wanted, *documents[number + 1 :]])
        if problem is None and not (lost := _comments(body) - _comments(unedited) - _comments(changed)):
            return mark + after.replace("\n", newline)
    raise problem or SettingsError(FILE, f"the comment '{min(lost)}' would be lost; move it out of the braces")


def _span(text: str, number: int) -> tuple[int, int]:
    """The start and end of a document's content, without its `---` and `...`."""
    events = list(yaml.parse(text))
    begins: list[Any] = [event for event in events if isinstance(event, yaml.DocumentStartEvent)]
    ends: list[Any] = [event for event in events if isinstance(event, yaml.DocumentEndEvent)]
    start, end = begins[number].end_mark.index, ends[number].start_mark.index
    if not begins[number].explicit:
        return text.rfind("\n", 0, start) + 1, end
    return end - len(text[start:end].lstrip(" ").removeprefix("\n")), end


def _problem(text: str, wanted: list[Any]) -> SettingsError | None:
    """The error if the text's content is not `wanted`; else None."""
    try:
        found = load(text)
    except SettingsError as error:
        return SettingsError(FILE, f"cannot be edited safely: the result {error.problem}")
    if same(found, wanted):
        return None
    place = re.sub(r"^\[\d+\]\.?", "", _difference(found, wanted)) or FILE
    return SettingsError(place, "would change too, perhaps due to an anchor (&) and an alias (*); write it out here")


def _comments(text: str) -> set[str]:
    """The comments, which are between the tokens of the text."""
    tokens: list[Any] = list(yaml.scan(text))
    gaps = (text[one.end_mark.index : other.start_mark.index] for one, other in pairwise(tokens))
    return {comment.strip() for gap in gaps for comment in re.findall("#.*", gap)}


def same(one: Any, other: Any) -> bool:
    """Whether both are equal, except for the order of keys, and of the same types: 1, 1.0 and True differ; nan equals
    nan.
    """
    return saferepr(one) == saferepr(other)


def _difference(one: Any, other: Any) -> str:
    """The path to the first place where two values differ: `.a[0].b`."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        inside = ((f".{key}", one[key], other[key]) for key in one)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        inside = ((f"[{at}]", *pair) for at, pair in enumerate(zip(one, other, strict=True)))
    else:
        return ""
    return next((step + _difference(a, b) for step, a, b in inside if not same(a, b)), "")


# What ruamel.yaml writes.


class _AsWritten(VersionedResolver):
    """Keeps the characters of each scalar, so that `yes`, `0x40` and `1.00` are written as they were read."""

    @property
    def versioned_resolver(self) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
        return {"": [("tag:yaml.org,2002:null", re.compile("^$"))]}


def _round_trips(text: str, before: Any, wanted: Any) -> tuple[str, str]:
    """The text as ruamel.yaml writes it without and with the change, in the layout that changes the fewest lines."""
    if _is_json(text):
        return _json(before), _json(wanted)
    lines = Counter(text.split("\n"))
    try:
        trips = {layout: _round_trip(text, layout, before, before) for layout in _LAYOUTS}
        best = min(trips, key=lambda layout: (lines - Counter(trips[layout].split("\n"))).total())
        return trips[best], _round_trip(text, best, before, wanted)
    except (YAMLError, RecursionError) as error:
        problem = str(getattr(error, "problem", error)).partition("\n")[0]
        raise SettingsError(FILE, f"is not valid YAML: {problem}") from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _round_trip(text: str, layout: tuple[int, int, int], before: Any, wanted: Any) -> str:
    parser = YAML()
    parser.Resolver = _AsWritten
    parser.preserve_quotes = True
    parser.width = 2**31
    parser.indent(*layout)
    root = parser.load(text)
    _update(root, before, wanted)
    written = io.StringIO()
    parser.dump(root, written)
    return written.getvalue()


def _update(node: Any, before: Any, wanted: Any) -> None:
    """Change ruamel.yaml's `node`, whose content is `before`, where `wanted` differs."""
    old, new = (dict(enumerate(one)) if isinstance(one, list) else one for one in (before, wanted))
    for key in old.keys() - new.keys():
        node.pop(key, None)
    for key, value in new.items():
        if key in old and same(old[key], value):
            continue
        written_here = key in old and (isinstance(node, list) or key in node)  # not by a merge key
        there = node[key] if written_here else None
        if there is not None and _alike(old[key], value):
            _update(there, old[key], value)
        else:
            node[_key(key)] = _node(value, there)


def _alike(old: Any, new: Any) -> bool:
    """Whether both are non-empty mappings, or lists of equal length, so that only their items need to change."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new)
    return isinstance(old, dict) and isinstance(new, dict) and bool(old and new)


def _node(value: Any, there: Any = None) -> Any:
    """A value for ruamel.yaml. A mapping of scalars is put on one line. A string gets the quotes of the one `there`."""
    if isinstance(value, dict):
        node = CommentedMap({_key(key): _node(one) for key, one in value.items()})
        if not any(isinstance(one, dict) for one in value.values()):
            node.fa.set_flow_style()
        return node
    if isinstance(value, list):
        items = CommentedSeq(_node(one) for one in value)
        items.fa.set_flow_style()
        return items
    if isinstance(value, str):
        quoted = isinstance(there, ScalarString) and not isinstance(there, PlainScalarString)
        return type(there)(value) if quoted else DoubleQuotedScalarString(value)
    return PlainScalarString(yaml.safe_dump(value).partition("\n")[0])


def _key(key: Any) -> Any:
    """A key, in quotes if the plain text would be read as something else: a number, a date, `no`."""
    if not isinstance(key, str):
        return key
    read_as = yaml.SafeLoader("").resolve(yaml.ScalarNode, key, (True, False))  # type: ignore[no-untyped-call]
    return key if read_as == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG else DoubleQuotedScalarString(key)


# Which of these lines are taken.


def _keep_lines(text: str, unedited: str, edited: str) -> str:
    """The text with the lines that differ between `unedited` and `edited`; all other lines stay as they are.

    New lines go before the blank lines and comments that follow a changed place.
    """
    theirs, ours = unedited.split("\n"), edited.split("\n")
    stands_for = _stands_for(text.split("\n"), theirs)
    kept: list[str] = []
    for change, start, end, new_start, new_end in SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        old = [line for lines in stands_for[start:end] for line in lines]
        if change == "equal":
            kept += old
            continue
        new = ours[new_start:new_end]
        remarks = list(takewhile(_is_remark, reversed(kept + old)))[::-1]
        kept = kept[: len(kept) + len(old) - len(remarks)] + new
        kept += [line for line in remarks if line not in new]
    return "\n".join(kept)


def _stands_for(lines: list[str], written: list[str]) -> list[list[str]]:
    """For each written line, the original lines that it stands for."""
    made: list[list[str]] = [[] for _ in written]
    for _, start, end, at, to in SequenceMatcher(None, lines, written, autojunk=False).get_opcodes():
        first, one_by_one = at if to > at else max(at - 1, 0), end - start == to - at
        for offset, line in enumerate(lines[start:end]):
            made[first + offset * one_by_one].append(line)
    return made


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")
