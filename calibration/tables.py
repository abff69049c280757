"""What the tables of the report and of the plan share: names of pools, shares, foreign text, and how a table looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

DASH = "\N{EN DASH}"
POOLS = {"accelerator": "accelerator", "cpu": "CPU"}  # in order of preference, and as they are written


def percent(share: float | None, spec: str = ".1f") -> str:
    return DASH if share is None or not math.isfinite(share) else f"{100 * share:{spec}} %"


def plain(value: Any) -> str:
    """Foreign text on one line, without control characters: no escape sequence reaches a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in str(value))


def new_table(columns: Sequence[str]) -> Table:
    """A table without rows; without a head where no column has a name."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if number else "left", overflow="fold")
    return table


def add_row(table: Table, cells: Sequence[str], style: str | None = None) -> None:
    table.add_row(*map(Text, cells), style=style)
