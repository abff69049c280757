"""Shows the progress of a long run: a live line on a terminal, plain lines in a job's log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Progress:
    """Shows one stage at a time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._stage = ""
        self._live: Status | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._stage = name
        if not self.console.is_terminal:
            self.console.print(name)
            yield
            return
        with self.console.status(Text(name)) as self._live:
            yield

    def say(self, news: str) -> None:
        """Show what has just happened. On a terminal, the next message replaces it."""
        if self._live is not None:
            self._live.update(Text(f"{self._stage}  {news}"))
        else:
            self.console.print(f"  {news}")

    def done(self, result: str) -> None:
        """End the stage with a line that stays."""
        self.console.print(result)
