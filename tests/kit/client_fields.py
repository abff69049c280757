"""Writes docs/clients.md: how windve handles every field of other APIs. `python -m tests.kit.client_fields`."""

import json
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import get_args

import yaml

from serve_app.embedding import ollama, routes
from serve_app.generation import document as generation
from serve_app.generation.requests import CompletionRequest
from serve_app.web.fields import Fields

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
PUBLISHED = yaml.safe_load((Path(__file__).parent / "published_fields.yaml").read_text())
ROUTES = {**generation._ROUTES, **ollama.ABOUT, **routes.ROUTES, "/encode": routes._ENCODE}
HEAD = """\
# Clients of other servers

How windve handles every request field in the APIs of other servers. For base URLs, code and retries see
[Use](use.md#clients). `python -m tests.kit.client_fields` writes this page from published schemas
(`tests/kit/published_fields.yaml`) and windve's types; a test compares.

- **Supported**: the field means the same as in that API, except for [a few values](#refused-values).
- **No effect**: the answer is the same with any value. The reason is below.
- **Refused**: 400 (422 on TEI's routes, `/rerank` and `/tokenize` too), with the field's name and the reason. Values
  that ask for what windve does anyway are accepted.

A field that none of these APIs has is ignored, because clients send all kinds of extras. A null field counts as absent.
"""
OTHERS = "Generation also refuses fields of other engines that would change the text:"


def body_of(api, paths, field):
    """The type of this API's body, or of the nested object, that has the field, and the field's name in it."""
    path = paths.partition(",")[0]
    route = ROUTES[path]
    kind = route.or_takes if route.or_takes is not None and api != "TEI" else route.takes
    *outer, name = field.split(".")
    for part in outer:
        annotation = kind.model_fields[part].annotation
        kind = next(
            one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, Fields)
        )
    return kind, name


def becomes(kind, name):
    """How a field of this type is handled: ["done"], ["unused"] or ["refused"]. Anything else is a mistake in the
    types.
    """
    places = {
        "done": name in kind.model_fields or name in kind.other_names,
        "unused": name in kind.unused,
        "refused": name in kind.unsupported,
    }
    return [place for place, is_here in places.items() if is_here]


def page():
    """The whole page."""
    known = {field for one in PUBLISHED for fields in one["routes"].values() for field in fields}
    others = textwrap.fill(f"{OTHERS} {_listed(sorted(CompletionRequest.unsupported.keys() - known))}.", 118)
    sections, reasons, refusals = [f"{HEAD}{others}\n"], defaultdict(set), defaultdict(set)
    for one in PUBLISHED:
        sections.append(f"\n## {one['api']}\n\nSource: {one['source']}.\n\n")
        sections.append(f"{_row('route', 'supported', 'no effect', 'refused')}|---|---|---|---|\n")
        for paths, fields in one["routes"].items():
            found = {"done": [], "unused": [], "refused": []}
            for field in fields:
                kind, name = body_of(one["api"], paths, field)
                (place,) = becomes(kind, name)
                found[place].append(f"`{field}`")
                if place != "done":
                    reasons[_reason(kind, name)].add(field)
                elif name in kind.refused:
                    refusals[f"`{field}`", *_refusal(kind, name)] |= set(paths.split(", "))
            sections.append(_row(_listed(paths.split(", ")), *(", ".join(names) or "-" for names in found.values())))
    sections.append(f"\n## Refused values\n\n{_row('field', 'refused', 'reason', 'routes')}|---|---|---|---|\n")
    sections += [_row(*about, _listed(sorted(paths))) for about, paths in sorted(refusals.items())]
    sections.append(f"\n## Reasons\n\n{_row('fields', 'handling', 'reason')}|---|---|---|\n")
    sections += [_row(*row) for row in sorted((_listed(sorted(fields)), *reason) for reason, fields in reasons.items())]
    return "".join(sections)


def _listed(names):
    return ", ".join(f"`{name}`" for name in names)


def _refusal(kind, name):
    """(what is refused of the field, why)"""
    why, values, when = kind.refused[name]
    return when or ", ".join(f"`{json.dumps(value)}`" for value in values), why


def _reason(kind, name):
    """(how the field is handled, why)"""
    if name in kind.unused:
        return "no effect", kind.unused[name]
    same, why = kind.unsupported[name]
    taken = ", ".join(f"`{json.dumps(value)}`" for value in same)
    return f"refused{taken and f', except {taken}'}", why or "not supported"


def _row(*cells):
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
