"""Plants one fault after another in pure modules and says which of them no test notices.

`table.py` names the tests of each module. A fault is planted in memory, in a process that is forked from one that has
the libraries loaded; the tests run until the first one fails. A fault that makes them hang counts as found.
`survivors.txt` lists the faults that no test finds: those that change nothing, each with its reason, and the others.

    python -m tests.mutants                      all faults; prints a table by file; fails below the bar in any folder
    python -m tests.mutants queueing/shares      those of the files whose path holds these words
    python -m tests.mutants --minutes 2          a sample; fails only for a survivor that survivors.txt does not list
    python -m tests.mutants --write              and write survivors.txt anew; reasons that are there stay
    python -m tests.mutants pacing --constants   module-level constants only
"""

import argparse
import ast
import contextlib
import importlib
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.mutants.faults import Fault, faults
from tests.mutants.table import MODULES

ROOT = Path(__file__).parents[2]
SURVIVORS = Path(__file__).with_name("survivors.txt")
BAR = 0.85  # of the faults in a folder that change anything: so many must be found
LIBRARIES = "numpy hypothesis.strategies pydantic yaml orjson psutil rich.console hypothesis.extra.numpy _pytest.mark"
LIBRARIES_ARE_LOADED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
LEAST_TIMEOUT_S, TIMEOUT_RUNS = (
    20.0,
    10,
)  # a test run that takes longer, or so many times as long as without a fault, hangs
UNNOTICED = "no test notices it"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the files' paths; all files unless given")
    parser.add_argument("--minutes", type=float, help="a sample in random order, as many as fit")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) // 86_400, help="of the sample; another one each day"
    )
    parser.add_argument("--constants", action="store_true", help="only constants at the top of a module")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at the same time")
    parser.add_argument("--write", action="store_true", help="write survivors.txt anew for these files")
    given = parser.parse_args()
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the time of a short test
    for name in LIBRARIES.split():
        importlib.import_module(name)
    console = Console(highlight=False, soft_wrap=True)
    chosen = [file for file in MODULES if not given.words or any(word in file for word in given.words)]
    timeouts = timeouts_of(chosen, given.jobs)
    planted = [fault for file in chosen for fault in faults(file, Path(file).read_text(encoding="utf-8"))[1]]
    if given.constants:
        planted = [fault for fault in planted if fault.name.startswith("module |")]
    if given.minutes:
        random.Random(given.seed).shuffle(planted)
    ends = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
    known = known_survivors()
    tried, lived = Counter[str](), defaultdict[str, list[Fault]](list)
    for fault, found in outcomes(planted, timeouts, given.jobs, ends):
        tried[fault.file] += 1
        if not found:
            lived[fault.file].append(fault)
            if (fault.file, fault.name) not in known:
                console.print(f"{fault.file}:{fault.line} {fault.name}", markup=False)
    if given.write:
        write_survivors(known, lived, chosen)
        known = known_survivors()
    return verdict(console, tried, lived, known, whole=not given.minutes)


def timeouts_of(files: Sequence[str], jobs: int) -> dict[str, float]:
    """By file. Its tests pass as it is; else nothing can be said of its faults."""
    timeouts = {}
    nothing = {file: Fault(file, 0, "nothing planted", lambda: None) for file in files}
    started = time.monotonic()
    for fault, failed in outcomes(list(nothing.values()), dict.fromkeys(files, 600.0), jobs, float("inf"), timeouts):
        if failed:
            sys.exit(f"the tests of {fault.file} fail as it is: {MODULES[fault.file]}")
    print(f"{len(files)} files; their tests as they are took {time.monotonic() - started:.0f} s", flush=True)
    return {file: max(LEAST_TIMEOUT_S, TIMEOUT_RUNS * took) for file, took in timeouts.items()}


def outcomes(
    planted: Sequence[Fault], timeouts: dict[str, float], jobs: int, ends: float, took: dict[str, float] | None = None
) -> Iterator[tuple[Fault, bool]]:
    """Each fault, and whether a test failed. `took` gets the seconds of the last run of each file."""
    waiting, running = list(reversed(planted)), dict[int, tuple[Fault, float]]()
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < ends:
            fault = waiting.pop()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                run_tests(fault, timeouts[fault.file])
            running[pid] = fault, time.monotonic()
        if not running:
            return
        pid, status = os.wait()
        fault, started = running.pop(pid)
        if took is not None:
            took[fault.file] = time.monotonic() - started
        yield fault, status != 0


def run_tests(fault: Fault, timeout_s: float) -> None:
    """In the child: plants the fault and ends with the status of its tests; the alarm's signal ends it if they hang."""
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    with contextlib.suppress(BaseException), Path(os.devnull).open("w") as silent:
        os.dup2(silent.fileno(), 1)
        os.dup2(silent.fileno(), 2)
        plant(fault)
        tests = [f"tests/unit/{name}.py" for name in MODULES[fault.file].split()]
        os._exit(int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", *LIBRARIES_ARE_LOADED])))
    os._exit(99)


def plant(fault: Fault) -> None:
    """The module is compiled with the fault when it is imported; nothing on disk changes."""
    if not fault.line:
        return
    path = str(ROOT / fault.file)
    tree, found = faults(fault.file, Path(path).read_text(encoding="utf-8"))
    next(one for one in found if one.name == fault.name).plant()
    compiled = compile(ast.fix_missing_locations(tree), path, "exec")
    get_code = SourceFileLoader.get_code

    def changed(loader: SourceFileLoader, name: str):
        return compiled if loader.path == path else get_code(loader, name)

    SourceFileLoader.get_code = changed


def known_survivors() -> dict[tuple[str, str], str]:
    """{(file, name): reason}, of survivors.txt: a line with the file, then for each fault its name and its reason."""
    known, file, name = {}, "", ""
    for line in SURVIVORS.read_text(encoding="utf-8").splitlines() if SURVIVORS.exists() else ():
        if line.startswith("        "):
            known[file, name] = line.strip()
        elif line.startswith("    "):
            name = line.strip()
            known[file, name] = UNNOTICED
        elif line and not line.startswith("#"):
            file = line
    return known


def write_survivors(known: dict[tuple[str, str], str], lived: dict[str, list[Fault]], chosen: Sequence[str]) -> None:
    """Those of the chosen files are the ones that lived now; those of the others stay."""
    survivors = {key: reason for key, reason in known.items() if key[0] not in chosen}
    survivors |= {
        (one.file, one.name): known.get((one.file, one.name), UNNOTICED) for file in lived for one in lived[file]
    }
    lines = ["# Faults that no test finds. A reason of its own: the fault changes nothing that anybody could see."]
    for file in MODULES:
        of_file = {name: reason for (at, name), reason in survivors.items() if at == file}
        lines += [file] if of_file else []
        for name, reason in of_file.items():
            lines += [f"    {name}"] + ([f"        {reason}"] if reason != UNNOTICED else [])
    SURVIVORS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def verdict(
    console: Console,
    tried: Counter[str],
    lived: dict[str, list[Fault]],
    known: dict[tuple[str, str], str],
    *,
    whole: bool,
) -> int:
    """Prints the table. Returns the exit status."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("file", "faults", "found", "change nothing", "live", "share"):
        table.add_column(column, justify="left" if column == "file" else "right")
    folders, problems = defaultdict[str, Counter[str]](Counter), []
    for file in tried:
        same = [one for one in lived[file] if known.get((file, one.name), UNNOTICED) != UNNOTICED]
        counts = Counter(faults=tried[file], found=tried[file] - len(lived[file]), same=len(same))
        folders[str(Path(file).parent)] += counts
        table.add_row(file, *row(counts))
        problems += [f"{file}:{one.line} {one.name}" for one in lived[file] if (file, one.name) not in known]
    for folder, counts in folders.items():
        table.add_row(f"[bold]{folder}/[/bold]", *row(counts))
    console.print(table, soft_wrap=True)
    if not whole:
        for problem in problems:
            console.print(f"nobody notices: {problem}", markup=False)
        return bool(problems)
    low = [folder for folder, counts in folders.items() if share(counts) < BAR]
    for folder in low:
        console.print(f"below {BAR} of the faults are found in {folder}")
    return bool(low)


def share(counts: Counter[str]) -> float:
    return counts["found"] / max(1, counts["faults"] - counts["same"])


def row(counts: Counter[str]) -> tuple[str, ...]:
    live = counts["faults"] - counts["found"] - counts["same"]
    return (*(str(counts[key]) for key in ("faults", "found", "same")), str(live), f"{share(counts):.2f}")


if __name__ == "__main__":
    sys.exit(main())
