"""Tables for the terminal and for Markdown files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Sheet:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> Table:
        table = Table(*self.head, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> list[str]:
        """The table's lines, with the title as a second-level heading."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        return [*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""]


def table(title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> Sheet:
    """A table with a line per row. `columns`: head -> format of a row's keys, such as "{p50_s:.2f} s" or
    "{router[cpu]:.0f}". A figure that is missing or None is shown as "-".
    """
    return Sheet(title, list(columns), [[_cell(how, row) for how in columns.values()] for row in rows])


def _cell(how: str, row: Mapping[str, Any]) -> str:
    try:
        return how.format_map(row)
    except (KeyError, TypeError):
        return "-"
