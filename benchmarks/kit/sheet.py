"""Tables that are shown in the terminal and kept as Markdown."""

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
        """Its lines, the title as a heading of the second level."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        return [*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""]


def table(title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> Sheet:
    """A line for each of `rows`. `columns`: head -> format of a row's keys, as "{p50_s:.2f} s", "{router[cpu]:.0f}". A
    figure that a row lacks, or that is None, is shown as "-".
    """
    return Sheet(title, list(columns), [[_cell(how, row) for how in columns.values()] for row in rows])


def _cell(how: str, row: Mapping[str, Any]) -> str:
    try:
        return how.format_map(row)
    except (KeyError, TypeError):
        return "-"
