"""Runs `windve check --devices`: its tasks with a progress bar, the page and the JSON."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from calibration.devices.page import page
from calibration.devices.tasks import PARTS, Plan, Task, find_device, tasks
from calibration.devices.workers import run_tasks
from deployments.errors import SettingsError
from deployments.hardware.device_detector import probe_machine
from serve_app.version import VERSION

_TIMEOUT_S = 600.0  # of one task
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
