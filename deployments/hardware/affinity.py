"""Section IV-D of WindVE: the cores of each CPU instance. The plan is pure; reading and applying it are at the end.

High core indices come first, since the framework runs on the low ones. An instance does not cross NUMA nodes if
possible. The lowest quarter of the cores is left to the framework and the accelerator, unless a config asks for more.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments.errors import SettingsError


@dataclass(frozen=True, slots=True)
class CpuShape:
    """The cores that this process may use.

    `allowed`: core indices in the process's affinity mask; `numa_nodes`: their NUMA nodes, each a tuple of core
    indices; `quota`: CPUs that the cgroup grants (a container's limit), or None.
    """

    allowed: tuple[int, ...]
    numa_nodes: tuple[tuple[int, ...], ...]
    quota: float | None = None

    @property
    def usable(self) -> int:
        """How many cores can run at once: those in the affinity mask, limited by the cgroup's quota, at least 1."""
        if self.quota is None:
            return len(self.allowed)
        return max(1, min(len(self.allowed), math.floor(self.quota)))


@dataclass(frozen=True, slots=True)
class AffinityPlan:
    """`instances[i]`: cores of the i-th CPU instance, in the order of choice. `reserved`: cores left to everything
    else.
    """

    instances: tuple[tuple[int, ...], ...]
    reserved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CpuPart:
    """What the CPU instances of a model want on each machine.

    `share`: the model's weight among all models; `cores`: for each instance, or None for all cores that the model has
    on the machine; `per_numa_node`: one instance per NUMA node instead of one per machine.
    """

    share: float = 1.0
    cores: int | None = None
    per_numa_node: bool = False


def plan_affinity(shape: CpuShape, parts: Sequence[CpuPart]) -> list[AffinityPlan]:
    """Choose cores for the CPU instances of one machine. Returns a plan for each part.

    Parts share no cores unless there are fewer cores than parts. If the cgroup's quota is smaller than the mask, only
    as many cores are used as the quota allows. Raises SettingsError if a part asks for more cores than it can have.
    """
    reserved_count = _reserved(shape.usable, parts)
    ordered = sorted(shape.allowed)
    # The quota may allow fewer cores than the mask has. The cores in between are not used.
    reserved = ordered[:reserved_count]
    candidates = ordered[len(ordered) - (shape.usable - reserved_count) :]
    groups = _by_numa_node(shape.numa_nodes, candidates)
    if any(part.per_numa_node for part in parts):  # each part gets its share of each node
        blocks = [_divide(group, [part.share for part in parts]) for group in groups]
    else:
        blocks = [_divide([core for group in groups for core in group], [part.share for part in parts])]
    plans = []
    for index, part in enumerate(parts):
        own = {core for block in blocks for core in block[index]}
        nodes = [kept for group in groups if (kept := [core for core in group if core in own])]
        asked = nodes if part.per_numa_node else [[core for node in nodes for core in node]]
        plans.append(
            AffinityPlan(
                tuple(_pick([one] if part.per_numa_node else nodes, one, part.cores or len(one)) for one in asked),
                tuple(reserved),
            )
        )
    return plans


def _reserved(usable: int, parts: Sequence[CpuPart]) -> int:
    """How many cores are left to the framework: a quarter, or fewer if the parts name more cores for one instance each.
    From four cores on, one always stays. The paper reserves a quarter on Arm, and uses up to 44 of a Xeon's 48 cores
    before the CPU gets slower (Figure 6).
    """
    quarter = usable // 4
    if any(part.cores is None or part.per_numa_node for part in parts):
        return quarter
    asked = sum(part.cores or 0 for part in parts)
    return min(quarter, max(1, usable - asked))


def _divide(cores: Sequence[int], shares: Sequence[float]) -> list[Sequence[int]]:
    """A slice of `cores` for each share, in proportion, none empty. If there are fewer cores than shares, each gets one
    core, and some get the same.
    """
    if len(cores) < len(shares):
        return [[cores[index % len(cores)]] for index in range(len(shares))]
    sizes = [1] * len(shares)
    for _ in range(len(cores) - len(shares)):  # the next core goes to the share that lacks most
        sizes[max(range(len(shares)), key=lambda index: shares[index] / (sizes[index] + 0.5))] += 1
    ends = list(itertools.accumulate(sizes, initial=0))
    return [cores[start:end] for start, end in itertools.pairwise(ends)]


def _by_numa_node(numa_nodes: Sequence[Sequence[int]], candidates: Sequence[int]) -> list[list[int]]:
    """The candidates of each NUMA node. Cores and nodes are sorted, highest first; nodes without candidates are left
    out.
    """
    chosen = set(candidates)
    groups = [sorted(chosen.intersection(node), reverse=True) for node in numa_nodes]
    known = {core for group in groups for core in group}
    groups.append(sorted(chosen - known, reverse=True))  # cores for which the kernel names no node
    return sorted((group for group in groups if group), key=lambda group: group[0], reverse=True)


def _pick(groups: Sequence[Sequence[int]], candidates: Sequence[int], wanted: int) -> tuple[int, ...]:
    if not 1 <= wanted <= len(candidates):
        raise SettingsError(
            "args.cpu.cores", f"the config asks for {wanted} cores, but {len(candidates)} are free for an instance here"
        )
    for group in groups:
        if len(group) >= wanted:  # one node is enough
            return tuple(group[:wanted])
    fullest_first = sorted(groups, key=len, reverse=True)
    return tuple([core for group in fullest_first for core in group][:wanted])


def read_cpu_shape(root: Path = Path("/")) -> CpuShape:
    """Read this process's cores, their NUMA nodes (sysfs) and its cgroup CPU limit (v2 `cpu.max`, v1 `cpu.cfs_*`)."""
    if hasattr(os, "sched_getaffinity"):
        allowed = tuple(sorted(os.sched_getaffinity(0)))
    else:  # macOS: no affinity, no cgroup
        allowed = tuple(range(os.cpu_count() or 1))
    nodes = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cores = tuple(core for core in parse_core_list((folder / "cpulist").read_text()) if core in allowed)
        if cores:
            nodes.append(cores)
    return CpuShape(allowed, tuple(nodes) or (allowed,), _cgroup_quota(root))


def parse_core_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: `0-3,8` -> (0, 1, 2, 3, 8)."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _cgroup_quota(root: Path) -> float | None:
    """The smallest CPU limit from this process's cgroup up to the root, in CPUs, or None."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2
            base, names = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for end in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:end])
            values = " ".join(_read(folder / name) for name in names).split()
            if len(values) == 2 and values[0] not in {"max", "-1"}:
                quota_us, period_us = map(int, values)
                limits.append(quota_us / period_us)
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def pin_thread(cores: Sequence[int]) -> str | None:
    """Pin the calling thread, and threads that it starts, to `cores`. Returns the problem if that fails, or None."""
    if not hasattr(os, "sched_setaffinity"):
        return "this system has no core affinity"
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        return f"cores {list(cores)} could not be bound: {error}"
    return None


def thread_environment(threads: int) -> Mapping[str, str]:
    """Variables for thread counts, which Ray sets from num_cpus. Set them before the engine's library is imported."""
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
