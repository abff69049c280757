"""Runs `windve check --devices`: its tasks in processes of their own with a progress bar, the page and the JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from calibration.devices.page import page
from calibration.devices.tasks import PARTS, Plan, Task, find_device, tasks
from deployments.errors import SettingsError, WindveError, first_line
from deployments.hardware.device_detector import probe_machine
from serve_app.version import VERSION

_TIMEOUT_S = 600.0  # of one task
_END_S = 120.0  # to stop a service that it runs
_NAME = "device-check"  # of both files

Found = dict[str, Any]


def check_devices(device: str, only: str, out: Path, *, quick: bool) -> int:
    """Check the device, show the page, and write it into the folder `out` with the JSON. `only`: parts, separated by
    commas; empty for all, or with `quick` for all but the service. Returns 1 if something failed, else 0. Raises
    SettingsError.
    """
    parts = _parts(only, quick=quick)
    console = Console(highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="windve-check-") as scratch,
        Progress(*columns, console=console, transient=True) as bar,
    ):
        found = check(device, parts, Path(scratch), bar, quick=quick)
    text = page(found)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{_NAME}.md").write_text(text, encoding="utf-8")
    (out / f"{_NAME}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(Markdown(text))
    console.print(
        f"\n{out / _NAME}.md has this page. Please send {out / _NAME}.json to windve's developers.", soft_wrap=True
    )
    return int(any("error" in row for row in found["rows"]))


def check(device: str, parts: tuple[str, ...], scratch: Path, bar: Progress, *, quick: bool) -> Found:
    """What is saved: the machine, the device, and a row for each task."""
    machine, began = probe_machine(), time.monotonic()
    found: Found = {
        "windve": VERSION,
        "commit": _commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "busy_cores": round(psutil.cpu_percent(1.0) / 100 * (psutil.cpu_count() or 1), 2),
        "machine": {
            "cpu": machine.cpu_model,
            "architecture": machine.architecture,
            "cores": machine.cpu.usable,
            "numa_nodes": machine.numa_nodes,
            "memory_gib": machine.memory_gib,
            "npu_problem": machine.npu_problem,
        },
    }
    shown = bar.add_task("device", total=None)
    (about,) = run_tasks([Task("device", "", partial(find_device, device))], scratch, _TIMEOUT_S)
    if "error" in about:
        raise SettingsError("--device", about["error"])
    wanted = list(tasks(Plan.of(about["device"], scratch, quick=quick), parts))
    bar.update(shown, total=len(wanted))

    def rows() -> Iterator[Found]:
        for row in run_tasks(
            wanted, scratch, _TIMEOUT_S, lambda task: bar.update(shown, description=f"{task.part}: {task.name}")
        ):
            bar.advance(shown)
            yield row

    return found | {"device": about, "rows": list(rows()), "took_s": round(time.monotonic() - began, 1)}


def _parts(only: str, *, quick: bool) -> tuple[str, ...]:
    if not only:
        return tuple(part for part in PARTS if not (quick and part == "service"))
    wanted = tuple(only.split(","))
    if strange := [part for part in wanted if part not in PARTS]:
        raise SettingsError("--only", f"there is no part {strange[0]!r}; choose from {','.join(PARTS)}")
    return wanted


def _commit() -> str:
    """The commit of the repository that this code is in, or "a package"."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "a package"
    try:
        words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"


def run_tasks(
    tasks: Iterable[Task], scratch: Path, timeout_s: float, say: Callable[[Task], None] = lambda _: None
) -> Iterator[Found]:
    """A row for each task: its figures, or `error` in one sentence. Each part gets a new process, as does what comes
    after an error. `timeout_s`: how long a task may take. `say` is called before each task.
    """
    worker: _Worker | None = None
    part = ""
    try:
        for task in tasks:
            say(task)
            if worker is not None and (worker.is_spent or task.part != part):
                worker.end()
                worker = None
            worker, part = worker or _Worker(scratch), task.part
            began = time.monotonic()
            found = worker.run(task, timeout_s)
            yield {"part": task.part, "name": task.name, "took_s": round(time.monotonic() - began, 2), **found}
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    """A process that runs one task after another, so that one that fails, dies or hangs does not disturb the others: an
    error of CUDA, for example, stays with its process. `is_spent`: a task has failed, and may have left it unusable.
    """

    def __init__(self, scratch: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.is_spent = False
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, scratch))
        self._process.start()
        there.close()

    def run(self, task: Task, timeout_s: float) -> Found:
        found: Found
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
