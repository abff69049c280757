"""Records where the cores' time goes during a measurement: to our processes by role, to others, or idle."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.kit.sheet import Sheet, table

SERVER, ENGINE, PROXY, RAY, LOAD, OTHERS, IDLE = ROLES = (
    "server",  # the process that answers: the Router, the floor, a peer
    "embedder",  # windve's, where the engine runs, also one that generates
    "proxy",
    "rest of Ray",
    "load",  # the load generator
    "others",  # processes with no part in the measurement
    "idle",
)
Sample = Mapping[str, Any]
Count = Callable[[Sample], float]
_REPLICA = re.compile(r"ServeReplica:\w+:(\w+)")


class CpuTime:
    """A context around a measurement. Afterwards `seconds[role]` is the core time of each role's processes, and
    `others` is the share of all cores' time used by processes that this one did not start.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.others = 0.0

    def __enter__(self) -> Self:
        self._before = _used()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before, after = self._before, _used()
        self.seconds = dict.fromkeys(ROLES, 0.0)
        everything, idle = after.everything_s - before.everything_s, after.idle_s - before.idle_s
        for pid, (role, used_s) in after.ours.items():
            spent_s = used_s - before.ours.get(pid, (role, 0.0))[1]
            self.seconds[role] += spent_s
        others_s = max(0.0, everything - idle - sum(self.seconds.values()))
        self.seconds |= {IDLE: idle, OTHERS: others_s}
        self.others = others_s / everything if everything else 0.0


@dataclass(slots=True)
class _Used:
    """Core seconds so far. `ours`: (role, seconds) by pid, of this process and all that it started."""

    everything_s: float
    idle_s: float
    ours: dict[int, tuple[str, float]] = field(default_factory=dict)


def time_sheet(title: str, samples: Mapping[str, Sequence[Sample]], count: Count, form: str) -> Sheet:
    """A table of core milliseconds per role and item. `count`: how many items a sample has processed."""
    rows = [
        {"name": name, **dict(zip(ROLES, milliseconds_each(some, count), strict=True))}
        for name, some in samples.items()
        if some
    ]
    return table(title, {"": "{name}", **{role: f"{{{role}:{form}}}" for role in ROLES}}, rows)


def milliseconds_each(samples: Sequence[Sample], count: Count) -> list[float]:
    """Core milliseconds per item for each role, in the order of ROLES. `count`: items that a sample has processed."""
    done = sum(map(count, samples))
    return [1000 * sum(sample["cpu_s"][role] for sample in samples) / done for role in ROLES]


def role_of(command: str) -> str:
    """The role of the process with this command line."""
    replica = _REPLICA.search(command)
    if replica:
        return ENGINE if replica[1].endswith(("Embedder", "Generator")) else SERVER
    if "haproxy" in command or "HAProxy" in command or "ProxyActor" in command:
        return PROXY
    return RAY if "ray::" in command or "/ray/" in command else SERVER


def _used() -> _Used:
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    used = _Used(sum(getattr(times, name) for name in names), times.idle + times.iowait)
    mine = os.times()  # children that have ended, as `wrk`, are the load's too
    used.ours[os.getpid()] = (LOAD, mine.user + mine.system + mine.children_user + mine.children_system)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            taken, command = process.cpu_times(), " ".join(process.cmdline())
            total = taken.user + taken.system + taken.children_user + taken.children_system
            used.ours[process.pid] = (role_of(command), total)
    return used
