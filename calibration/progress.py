"""Shows the progress of a long run: a live line on a terminal, plain lines in a job's log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """Shows one stage at a time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = console.is_terminal
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if not self._live:
            self.console.print(name)
            yield
            return
        self._bars.start()
        bar = self._bars.add_task(name, total=None, news="")
        try:
            yield
        finally:
            self._bars.remove_task(bar)
            self._bars.stop()

    def advance(self, done: int, total: int) -> None:
        """Show how far a stage of known length is."""
        if self._live:
            self._bars.update(self._bars.task_ids[-1], completed=done, total=total, news=f"{done} of {total}")
        else:
            self.console.print(f"  {done} of {total}")

    def say(self, news: str) -> None:
        """Show what has just happened. On a terminal, the next message replaces it."""
        if self._live:
            self._bars.update(self._bars.task_ids[-1], news=news)
        else:
            self.console.print(f"  {news}")

    def done(self, result: str) -> None:
        """End the stage with a line that stays."""
        self.console.print(result)
