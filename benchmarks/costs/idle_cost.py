"""`python -m benchmarks.costs.idle_cost [SECONDS]`: CPU time of each process of `make serve`, asked nothing and loaded.

all-MiniLM-L6-v2 on the CPU. First nobody asks for SECONDS (60), then 128 connections ask for a quarter of that time,
75 tokens a query. Prints JSON: milliseconds of a core each second for each process, and queries a second.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.comparisons.contestants import ROUTE, WINDVE, contestant
from benchmarks.kit.closed_loop import ask_again_and_again
from benchmarks.kit.cpu_time import RAY, role_of
from benchmarks.kit.texts import of_tokens
from calibration.load import request_bytes

_SECONDS, _SETTLES_S = 60.0, 10.0
_CONNECTIONS, _TEXTS, _TOKENS = 128, 512, 75
_NAME = re.compile(r"ray::[\w:.]+|ray-dashboard-\w+|[\w-]+\.py\b|gcs_server|raylet|haproxy|forkserver|resource_tracker")


def name_of(command: str) -> str:
    """What people call the process with this command line."""
    found = _NAME.search(command)
    return found[0] if found else command.split(" ", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1]


def measure(work: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of a core each second that each process of ours takes while `work` lasts, the largest first; what
    processes of one name take is one sum.
    """
    before, started = _used(), time.perf_counter()
    result = work()
    lasted, after = time.perf_counter() - started, _used()
    spent: Counter[str] = Counter()
    ray = 0.0
    for process, (command, used) in after.items():
        taken = 1000 * (used - before.get(process, ("", 0.0))[1]) / lasted
        spent[name_of(command)] += taken  # type: ignore[assignment]
        ray += taken if role_of(command) == RAY else 0.0
    each = {name: round(taken, 1) for name, taken in spent.most_common()}
    return {"rest of Ray": round(ray, 1), "each": each, "result": result}


def _used() -> dict[tuple[int, float], tuple[str, float]]:
    """(command line, CPU seconds so far) of each process that this one started, by pid and time of start."""
    used = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[process.pid, process.create_time()] = (" ".join(process.cmdline()), times.user + times.system)
    return used


def main(seconds: float) -> None:
    requests = [request_bytes({"input": of_tokens(_TOKENS, seed)}, ROUTE) for seed in range(_TEXTS)]

    def ask(lasts: float) -> float:
        told = ask_again_and_again(url, requests, connections=_CONNECTIONS, seconds=lasts)
        return float(told["requests_s"])

    with contestant(WINDVE) as url:
        ask(_SETTLES_S / 2)
        time.sleep(_SETTLES_S)
        told = {"asked nothing": measure(lambda: time.sleep(seconds)), "loaded": measure(lambda: ask(seconds / 4))}
    told["asked nothing"].pop("result")
    told["loaded"]["queries_s"] = round(told["loaded"].pop("result"), 1)
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else _SECONDS)
