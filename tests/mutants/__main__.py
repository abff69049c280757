"""Plants one fault after another in pure modules and says which of them no test notices.

`table.py` names the tests of each module. A fault is planted in memory, in a process that is forked from one that has
the libraries loaded; the tests run until the first one fails. A fault that makes them hang counts as found.
`equivalent.txt` lists faults that change nothing that anybody could see, each with its reason; they are not planted.

    python -m tests.mutants                      all faults; prints a table by file; fails below the bar in any folder
    python -m tests.mutants fair_share           those of the files whose path holds these words
    python -m tests.mutants --minutes 2          a sample; fails if so few found cannot be chance
    python -m tests.mutants limits --constants   module-level constants only
"""

import argparse
import ast
import importlib
import math
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from deployments.hardware.affinity import read_cpu_shape
from tests.mutants.faults import Fault, faults
from tests.mutants.table import MODULES

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
BAR = 0.85  # of the faults in a folder that change anything: so many must be found
LIBRARIES = "numpy hypothesis.strategies pydantic yaml orjson psutil rich.console hypothesis.extra.numpy _pytest.mark"
LIBRARIES_ARE_LOADED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
LEAST_TIMEOUT_S = 20.0
NOT_PLANTED = 99  # the status of a child that failed before its tests
MOST_BYTES = 8 * 2**30  # of a child's address space
TIMEOUT_RUNS = 10  # times as long as without a fault: it hangs
CHANCE = 3.0  # standard errors below the bar, that a sample of good tests may find by chance


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the files' paths; all files unless given")
    parser.add_argument("--minutes", type=float, help="a sample in random order, as many as fit")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) // 86_400, help="of the sample; another one each day"
    )
    parser.add_argument("--constants", action="store_true", help="only constants at the top of a module")
    parser.add_argument("--jobs", type=int, default=read_cpu_shape().usable, help="processes at the same time")
    given = parser.parse_args()
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the time of a short test
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a fork in which numpy's threads are missing could hang
    for name in LIBRARIES.split():
        importlib.import_module(name)
    console = Console(highlight=False, soft_wrap=True, width=100)  # what the table needs
    chosen = [file for file in MODULES if not given.words or any(word in file for word in given.words)]
    if not chosen:
        print(f"no file of table.py is called so: {' '.join(given.words)}")
        return 2
    reasons = equivalent()
    everything = [fault for file in chosen for fault in faults(file, Path(file).read_text(encoding="utf-8"))[1]]
    if stale := reasons.keys() - {fault.key for fault in everything} - {key for key in reasons if key[0] not in chosen}:
        print(*(f"equivalent.txt: there is no such fault: {file} {name}" for file, name in sorted(stale)), sep="\n")
        return 2
    if given.constants:
        everything = [fault for fault in everything if fault.name.startswith("module |")]
    same = Counter(fault.file for fault in everything if fault.key in reasons)
    planted = [fault for fault in everything if fault.key not in reasons]
    if given.minutes:
        random.Random(given.seed).shuffle(planted)
    if given.minutes:
        print(f"a sample, --seed {given.seed}")
    timeouts = timeouts_of(sorted({fault.file for fault in planted}), given.jobs)
    ends = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
    tried, found = Counter[str](), Counter[str]()
    for fault, was_found in outcomes(planted, timeouts, given.jobs, ends):
        tried[fault.file] += 1
        found[fault.file] += was_found
        if not was_found:
            console.print(f"{fault.file}:{fault.line} {fault.name}", markup=False)
    return verdict(console, tried, found, same, is_sample=bool(given.minutes))


def timeouts_of(files: Sequence[str], jobs: int) -> dict[str, float]:
    """By file. Its tests pass as it is; else nothing can be said of its faults."""
    timeouts = {}
    nothing = {file: Fault(file, 0, "nothing planted", lambda: None) for file in files}
    started = time.monotonic()
    for fault, failed in outcomes(list(nothing.values()), dict.fromkeys(files, 600.0), jobs, float("inf"), timeouts):
        if failed:
            sys.exit(f"the tests of {fault.file} fail as it is: pytest {' '.join(tests_of(fault.file))}")
    print(f"{len(files)} files; their tests as they are took {time.monotonic() - started:.0f} s", flush=True)
    return {file: max(LEAST_TIMEOUT_S, TIMEOUT_RUNS * took) for file, took in timeouts.items()}


def outcomes(
    planted: Sequence[Fault], timeouts: dict[str, float], jobs: int, ends: float, took: dict[str, float] | None = None
) -> Iterator[tuple[Fault, bool]]:
    """Each fault, and whether a test failed. `took` gets the seconds of the last run of each file."""
    waiting, running = list(reversed(planted)), dict[int, tuple[Fault, float]]()
    try:
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
            if os.waitstatus_to_exitcode(status) == NOT_PLANTED:
                sys.exit(f"cannot be planted: {fault.file} {fault.name}")
            yield fault, status != 0
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run_tests(fault: Fault, timeout_s: float) -> None:
    """In the child: plants the fault and ends with the status of its tests; the alarm's signal ends it if they hang."""
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))  # a loop that never ends may also take memory
    status = NOT_PLANTED
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        plant(fault)
        status = int(pytest.ExitCode.INTERNAL_ERROR)  # where pytest itself is broken by the fault
        status = int(pytest.main([*tests_of(fault.file), "-x", "-q", "-p", "no:cacheprovider", *LIBRARIES_ARE_LOADED]))
    finally:
        os._exit(status)


def tests_of(file: str) -> list[str]:
    return [f"tests/unit/{name}.py" for name in MODULES[file].split()]


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


def equivalent() -> dict[tuple[str, str], str]:
    """{(file, name): reason}, of equivalent.txt: a line with the file, then for each fault its name and its reason."""
    reasons, file, name = {}, "", ""
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("        "):
            reasons[file, name] = line.strip()
        elif line.startswith("    "):
            name = line.strip()
        elif line and not line.startswith("#"):
            file = line
    return reasons


def verdict(console: Console, tried: Counter[str], found: Counter[str], same: Counter[str], *, is_sample: bool) -> int:
    """Prints the table. Returns the exit status."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("file", "planted", "found", "share", "no effect"):
        table.add_column(column, justify="left" if column == "file" else "right", no_wrap=True)

    def add(name: str, files: Sequence[str]) -> float:
        planted, noticed = sum(tried[file] for file in files), sum(found[file] for file in files)
        table.add_row(
            name, str(planted), str(noticed), f"{noticed / max(1, planted):.2f}", str(sum(same[file] for file in files))
        )
        return noticed / max(1, planted)

    files = sorted(tried, key=lambda file: (str(Path(file).parent), file))
    shares = {}
    for folder, its_files in groupby(files, lambda file: str(Path(file).parent)):
        members = list(its_files)
        for file in members:
            add(file, [file])
        shares[folder] = add(f"[bold]{folder}/[/bold]", members)
    shares = {"all": add("[bold]all[/bold]", files)} if is_sample else shares
    console.print(table, soft_wrap=True)
    bar = BAR - CHANCE * math.sqrt(BAR * (1 - BAR) / max(1, sum(tried.values()))) if is_sample else BAR
    low = [name for name, share in shares.items() if share < bar]
    for name in low:
        console.print(f"{name}: of the faults that change anything, less than {bar:.2f} are found")
    return int(bool(low))


if __name__ == "__main__":
    sys.exit(main())
