"""A table that is shown in the terminal and kept as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
