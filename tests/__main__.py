"""`make test`: all tests, part after part. It continues after a failure, prints each part's time, and fails at the end.

python -m tests              all parts
python -m tests unit models  these
"""

import os
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
PARTS = {
    "unit": ("tests/unit", *SIDE_BY_SIDE),
    "models": ("tests/models", *SIDE_BY_SIDE),  # each process loads PyTorch
    # Each process has a Ray. Three keep two cores busy: emulated devices wait. tests/e2e/conftest.py sorts the files.
    "e2e": ("tests/e2e", "-n", "3", "--dist", "loadscope", "--no-loadscope-reorder"),
}


def main(chosen: list[str]) -> int:
    if unknown := set(chosen) - set(PARTS):
        print(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
        return 2
    table, failed = Table("part", "result", "seconds", box=None, pad_edge=False, padding=(0, 2, 0, 0)), False
    for part in chosen or PARTS:
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", *PARTS[part]]
        status = subprocess.run(command, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""}, check=False).returncode
        table.add_row(part, "failed" if status else "passed", f"{time.monotonic() - started:.0f}")
        failed |= status != 0
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
