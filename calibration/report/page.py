"""One page that loads nothing: tables and facts in HTML, pictures inlined, no script, every foreign text escaped."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from html import escape
from typing import Any

from pydantic import BaseModel

from calibration.report.tables import DASH, Sheet, plain

UNITS = {"_s": "s", "_ms": "ms", "_gib": "GiB", "_bytes": "bytes"}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --line: #d5dae0; --page: #ffffff; --tint: #f4f6f8;
  --mark: #00694e; --warn: #9a3412; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e7ec; --soft: #9aa5b1; --line: #38414b; --page: #14181d;
  --tint: #1d232a; --mark: #56c9a4; --warn: #f2a172; } }
body { max-width: 46rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.3; margin: 0 0 .5rem; color: var(--mark); }
h1.refused, .warn { color: var(--warn); }
.warn { font-weight: 600; border-left: 4px solid; padding-left: .75rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
header p, caption, figcaption { color: var(--soft); }
caption { text-align: left; padding-bottom: .4rem; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .6rem; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; font-weight: normal; }
thead th, thead th:first-child { color: var(--soft); font-weight: 600; font-size: .9rem; }
table.facts :is(td, th) { text-align: left; overflow-wrap: anywhere; }
table.facts th:first-child { width: 34%; }
tr.final > * { font-weight: 700; background: var(--tint); }
figure { margin: 1rem 0; padding: .75rem; background: #fff; border: 1px solid var(--line); border-radius: 8px; }
figure img { display: block; width: 100%; height: auto; }
@media print { body { max-width: none; padding: 0; } figure, table { break-inside: avoid; } }
"""


def facts(title: str, part: BaseModel) -> Sheet:
    """A part of the report as two columns, a key's unit in words."""
    rows = [[_label(key), text(value)] for key, value in part.model_dump().items()]
    return Sheet(title, ["", ""], rows, facts=True)


def _label(key: str) -> str:
    """`slo_s` as `slo, s`."""
    for suffix, unit in UNITS.items():
        if key.endswith(suffix):
            return f"{key.removesuffix(suffix).replace('_', ' ')}, {unit}"
    return key.replace("_", " ")


def text(value: Any) -> str:
    """Foreign text on one line: no control characters, so no escape sequence reaches a terminal; null is a dash."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return plain(value)


def number(value: float | None, spec: str = "") -> str:
    return DASH if value is None or not math.isfinite(value) else format(value, spec)


def seconds(value: float | None) -> str:
    return number(value, ".3f")


def html_table(sheet: Sheet | None) -> str:
    if sheet is None:
        return ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in sheet.columns)
    head = f"<thead><tr>{head}</tr></thead>\n" if any(sheet.columns) else ""
    body = ""
    for place, (first, *others) in enumerate(sheet.rows):
        cells = f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in others)
        body += f'<tr class="final">{cells}</tr>\n' if place in sheet.styles else f"<tr>{cells}</tr>\n"
    caption = f"<caption>{escape(sheet.caption)}</caption>\n" if sheet.caption else ""
    kind = ' class="facts"' if sheet.facts else ""
    return (
        f'<section>\n<h2>{escape(sheet.title)}</h2>\n<div class="scroll"><table{kind}>\n{caption}'
        f"{head}<tbody>\n{body}</tbody>\n</table></div>\n</section>\n"
    )


def html_picture(alt: str, png: bytes) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<figure><img src="{source}" alt="{escape(alt)}"></figure>\n'


def document(sentence: str, body: Iterable[str]) -> str:
    """The whole page; `sentence` is escaped already, as the body is."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<title>windve calibration: {sentence}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{''.join(body)}</body>\n</html>\n"
    )
