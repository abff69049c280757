"""A running comparison: saves its samples at once, shows its progress, and names the machine."""

import fcntl
import json
import logging
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.kit.cpu_time import CpuTime
from benchmarks.kit.serving import ROOT
from deployments.hardware.device_detector import probe_machine, quick_cpu_dtype

Found = dict[str, Any]  # what is kept as JSON: name, machine, quick, samples, and what a comparison adds


QUIET = 0.12  # largest share of all cores' time that other processes may take
_ATTEMPTS = 2


class NotAvailable(Exception):
    """Something cannot be measured here; the text says why."""


@dataclass(slots=True)
class Bench:
    """`turns`: a file that is locked during measurements, for machines on which others measure too."""

    name: str
    console: Console
    out: Path
    quick: bool = False
    only: frozenset[str] = frozenset()
    turns: Path | None = None
    found: Found = field(default_factory=dict)
    _kept: list[dict[str, Any]] = field(default_factory=list)
    _fresh: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found = {"name": self.name, "quick": self.quick, "machine": describe_machine(), "samples": []}

    def wants(self, contestant: str) -> bool:
        return not self.only or contestant in self.only

    def sample(self, about: Mapping[str, Any], figures: Mapping[str, Any], show: str) -> None:
        """Save a sample and show it as a line. `about`: what was measured. `show`: the result in words."""
        self._kept = [sample for sample in self._kept if not about.items() <= sample.items()]
        self._fresh.append({**about, **figures})
        self.found.get("missing", {}).pop(about.get("contestant"), None)
        self.found["samples"] = [*self._kept, *self._fresh]
        self.save()
        others = float(figures.get("others", 0.0))
        noise = f" [yellow](others took {others:.0%} of the machine)[/yellow]" if others > QUIET else ""
        self.console.print(f"{', '.join(map(str, about.values()))}: {show}{noise}")

    def go_on(self) -> None:
        """Add to the saved results. New samples replace those they repeat; both commits are named. Raises NotAvailable
        if the saved results are of another machine or kind of run.
        """
        file = self.out / f"{self.name}.json"
        if not file.exists():
            return
        kept: Found = json.loads(file.read_text(encoding="utf-8"))
        now = self.found["machine"]
        for key in ("cpu", "cores"):
            if kept["machine"][key] != now[key]:
                raise NotAvailable(f"{file} is of another machine, {key} {kept['machine'][key]}: move it away")
        if kept["quick"] != self.quick:
            raise NotAvailable(f"{file} has other rounds: --quick is for all of its pieces or for none")
        commits = kept["machine"]["commit"].split(", ")
        now["commit"] = ", ".join(dict.fromkeys([*commits, now["commit"]]))
        self.found = kept | {"machine": now}
        self._kept = kept["samples"].copy()

    def missing(self, contestant: str, why: str) -> None:
        """Note that a contestant could not be measured. The others continue."""
        self.found.setdefault("missing", {})[contestant] = why.splitlines()[-1]
        self.save()
        self.console.print(f"[yellow]{contestant} could not be measured: {why}[/yellow]")

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{self.name}.json").write_text(json.dumps(self.found) + "\n", encoding="utf-8")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock on the machine, among those who use the same file."""
        with ExitStack() as held:
            if self.turns is not None:
                fcntl.flock(held.enter_context(self.turns.open("a", encoding="utf-8")), fcntl.LOCK_EX)
            yield

    def measure(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run `call` on an idle machine; returns its result and where the cores' time went (`CpuTime`). If other
        processes disturbed it, runs it again and returns the less disturbed attempt.
        """
        found: list[dict[str, Any]] = []
        for _ in range(_ATTEMPTS):
            settle()
            with CpuTime() as cpu:
                told = call()
            found.append({**told, "others": cpu.others, "cpu_s": cpu.seconds})
            if cpu.others <= QUIET:
                break
        return min(found, key=lambda told: float(told["others"]))

    @contextmanager
    def steps(self, total: int) -> Iterator[Callable[[str], None]]:
        """Yields a function to call at the start of each of `total` steps, with a description of the step."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(self.name, total=total)
            done = -1

            def step(what: str) -> None:
                nonlocal done
                done += 1
                progress.update(task, completed=done, description=f"{self.name}: {what}")

            yield step


def describe_machine() -> dict[str, Any]:
    machine = probe_machine()
    return {
        "cpu": machine.cpu_model,
        "architecture": machine.architecture,
        "cores": len(machine.cpu.allowed),
        "narrow": quick_cpu_dtype()[1],
        "memory_gib": machine.memory_gib,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _changed() else ""),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{package: version(package) for package in ("ray", "torch")},
    }


def machine_line(found: Found) -> str:
    machine = found["machine"]
    narrow = f"; {machine['narrow']}" if "narrow" in machine else ""
    return (
        f"{machine['cpu']} ({machine['architecture']}), {machine['cores']} cores, {machine['memory_gib']} GiB{narrow}; "
        f"load generator on the same cores. Commit {machine['commit']}, {machine['at']}, Ray {machine['ray']}, "
        f"PyTorch {machine['torch']}."
    )


def noise_line(found: Found) -> str:
    """How quiet the machine was."""
    shares = [sample["others"] for sample in found["samples"] if "others" in sample]
    noisy = sum(share > QUIET for share in shares)
    return (
        f"In {noisy} of {len(shares)} samples others took more than {QUIET:.0%} of the machine; those are left out "
        "where there are quieter ones."
    )


def all_of(found: Found, **about: Any) -> list[dict[str, Any]]:
    """The matching samples, in the order in which they were taken."""
    return [sample for sample in found["samples"] if all(sample.get(key) == value for key, value in about.items())]


def one_of(found: Found, **about: Any) -> dict[str, Any] | None:
    return next(iter(all_of(found, **about)), None)


def median(found: Found, figure: str, **about: Any) -> float | None:
    """The median over the matching samples; None if there are none."""
    values = values_of(found, figure, **about)
    return statistics.median(values) if values else None


def values_of(found: Found, figure: str, **about: Any) -> list[float]:
    """A figure of each matching sample, in the order in which they were taken. Disturbed samples are left out if there
    are undisturbed ones.
    """
    return [sample[figure] for sample in samples_of(found, figure, **about)]


def samples_of(found: Found, figure: str, **about: Any) -> list[dict[str, Any]]:
    """The samples that `values_of` uses."""
    samples = [sample for sample in all_of(found, **about) if sample.get(figure) is not None]
    quiet = [sample for sample in samples if sample.get("others", 0.0) <= QUIET]
    return quiet or samples


def quiet_ray() -> None:
    """Let Ray log only warnings, because code in virtual time logs as a service does."""
    import ray.serve  # noqa: F401 - it sets its logger's level as it is imported

    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def settle(most_s: float = 4.0) -> None:
    """Wait until the machine is idle: processes work on for a while after they have started or loaded something."""
    ends = time.monotonic() + most_s
    while psutil.cpu_percent(interval=0.5) / 100 > QUIET and time.monotonic() < ends:
        pass


def _changed() -> bool:
    """Whether the tree has changes, apart from results."""
    return bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"))


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603, S607
    except (OSError, subprocess.CalledProcessError):
        return "" if words[0] == "status" else "unknown"
    return done.stdout.strip()
