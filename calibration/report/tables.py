"""Code that the report and the plan share: tables, names of pools, percentages, foreign text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

DASH = "\N{EN DASH}"
POOLS = {"accelerator": "accelerator", "cpu": "CPU"}  # in order of preference -> display name


def percent(share: float | None, spec: str = ".1f") -> str:
    return DASH if share is None or not math.isfinite(share) else f"{100 * share:{spec}} %"


def plain(value: Any) -> str:
    """Foreign text on one line, without control characters, so without terminal escape sequences."""
    return "".join(sign if sign.isprintable() else " " for sign in str(value))


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table, for the page and the terminal. `styles`: rich's, by row. `facts`: align text to the left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    styles: Mapping[int, str] = field(default_factory=dict)
    facts: bool = False


def print_sheet(console: Console, sheet: Sheet) -> None:
    """Print the title, the table, the caption and an empty line. No header if no column has a name."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=any(sheet.columns))
    for number, column in enumerate(sheet.columns):
        table.add_column(Text(column), justify="right" if number else "left", overflow="fold")
    for number, row in enumerate(sheet.rows):
        table.add_row(*map(Text, row), style=sheet.styles.get(number))
    console.print(Text(sheet.title, style="bold"))
    console.print(table)
    console.print(Text(f"{sheet.caption}\n" if sheet.caption else "", style="dim"))
