"""Runs tasks in a process of their own, so that one that fails, dies or hangs does not disturb the others: an error of
CUDA, for example, stays with its process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from calibration.devices.tasks import Task
from deployments.errors import WindveError, first_line

Row = dict[str, Any]

_END_S = 120.0  # to stop a service that it runs


def run_tasks(
    tasks: Iterable[Task], scratch: Path, timeout_s: float, say: Callable[[Task], None] = lambda _: None
) -> Iterator[Row]:
    """A row for each task: its figures, or `error` in one sentence. Each part gets a new process, as does what comes
    after an error. `timeout_s`: how long a task may take. `say` is called before each task.
    """
    worker: Worker | None = None
    part = ""
    try:
        for task in tasks:
            say(task)
            if worker is not None and (worker.is_spent or task.part != part):
                worker.end()
                worker = None
            worker, part = worker or Worker(scratch), task.part
            began = time.monotonic()
            found = worker.run(task, timeout_s)
            yield {"part": task.part, "name": task.name, "took_s": round(time.monotonic() - began, 2), **found}
    finally:
        if worker is not None:
            worker.end()


class Worker:
    """A process that runs one task after another. `is_spent`: a task has failed, and may have left it unusable."""

    def __init__(self, scratch: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.is_spent = False
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, scratch))
        self._process.start()
        there.close()

    def run(self, task: Task, timeout_s: float) -> Row:
        found: Row
        try:
            self._connection.send(task.run)
            if self._connection.poll(timeout_s):
                found = self._connection.recv()
            else:
                found = {"error": f"it has not ended within {timeout_s:g} s"}
        except (EOFError, OSError):
            self._process.join(_END_S)
            found = {"error": f"its process has ended with status {self._process.exitcode}"}
        self.is_spent = "error" in found
        return found

    def end(self) -> None:
        """End the process: it stops what it has started."""
        self._connection.close()  # ends one that waits for a task
        if self.is_spent and self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _work(connection: Connection, scratch: Path) -> None:
    """What the process does. Its output goes to a file, and its cache ends with the check: races are always run."""
    os.environ["HF_HOME"] = str(scratch)  # before libraries read it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with (scratch / "output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    while True:
        try:
            run = connection.recv()
        except EOFError:
            return
        try:
            found = run()
        except WindveError as error:
            found = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever a device raises is the result
            found = {"error": f"{type(error).__name__}: {first_line(error)}"}
        connection.send(found)
