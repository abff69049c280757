"""Section IV-D of WindVE: which cores a CPU instance runs on. The plan is pure; reading and applying it are at the end.

High core indices first (the framework runs on the low ones), no NUMA node crossed if possible, and the low quarter of
the cores left to the framework and the accelerator.
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
    """Cores this process may use.

    `allowed`: core indices of the process's affinity mask; `numa_nodes`: their NUMA nodes, each a tuple of core
    indices; `quota`: CPUs that the cgroup grants (a container's limit), or None.
    """

    allowed: tuple[int, ...]
    numa_nodes: tuple[tuple[int, ...], ...]
    quota: float | None = None

    @property
    def usable(self) -> int:
        """Cores that can run at once: the affinity mask, cut to the cgroup's quota, at least 1."""
        if self.quota is None:
            return len(self.allowed)
        return max(1, min(len(self.allowed), math.floor(self.quota)))


@dataclass(frozen=True, slots=True)
class AffinityPlan:
    """`instances[i]`: cores of the i-th CPU instance, in the order they were chosen; `reserved`: left to the rest."""

    instances: tuple[tuple[int, ...], ...]
    reserved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CpuPart:
    """What the CPU instances of one model want of a machine.

    `share`: a weight among the models; `cores`: for each instance (None: all that the model has there);
    `per_numa_node`: an instance for each NUMA node instead of one.
    """

    share: float = 1.0
    cores: int | None = None
    per_numa_node: bool = False


def plan_affinity(shape: CpuShape, parts: Sequence[CpuPart]) -> list[AffinityPlan]:
    """Choose cores for the CPU instances of one machine: for each part its own instances.

    Parts have no core in common unless there are fewer cores than parts. With a cgroup quota below the mask, as many
    cores are taken as the quota pays for. Raises SettingsError where a part's `cores` cannot be had.
    """
    reserved_count = shape.usable // 4
    ordered = sorted(shape.allowed)
    # The quota may pay for fewer cores than the mask shows: the low ones beyond it are nobody's.
    reserved = ordered[:reserved_count]
    candidates = ordered[len(ordered) - (shape.usable - reserved_count) :]
    groups = _by_numa_node(shape.numa_nodes, candidates)
    if any(part.per_numa_node for part in parts):  # each has its share of each node
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


def _divide(cores: Sequence[int], shares: Sequence[float]) -> list[Sequence[int]]:
    """A slice of `cores` for each share, in their proportion and none empty. Where there are fewer cores than shares,
    each is one core, and some are the same.
    """
    if len(cores) < len(shares):
        return [[cores[index % len(cores)]] for index in range(len(shares))]
    sizes = [1] * len(shares)
    for _ in range(len(cores) - len(shares)):  # the next core goes to whom most is missing
        sizes[max(range(len(shares)), key=lambda index: shares[index] / (sizes[index] + 0.5))] += 1
    ends = list(itertools.accumulate(sizes, initial=0))
    return [cores[start:end] for start, end in itertools.pairwise(ends)]


def _by_numa_node(numa_nodes: Sequence[Sequence[int]], candidates: Sequence[int]) -> list[list[int]]:
    """The candidates of each NUMA node, highest index first; the nodes likewise; those without any are left out."""
    chosen = set(candidates)
    groups = [sorted(chosen.intersection(node), reverse=True) for node in numa_nodes]
    known = {core for group in groups for core in group}
    groups.append(sorted(chosen - known, reverse=True))  # cores the kernel names no node for
    return sorted((group for group in groups if group), key=lambda group: group[0], reverse=True)


def _pick(groups: Sequence[Sequence[int]], candidates: Sequence[int], wanted: int) -> tuple[int, ...]:
    if not 1 <= wanted <= len(candidates):
        raise SettingsError(
            "args.cpu.cores",
            f"the config asks for {wanted} cores, but {len(candidates)} are free for an instance here",
        )
    for group in groups:
        if len(group) >= wanted:  # one node is enough: do not cross
            return tuple(group[:wanted])
    fullest_first = sorted(groups, key=len, reverse=True)
    return tuple([core for group in fullest_first for core in group][:wanted])


def read_cpu_shape(root: Path = Path("/")) -> CpuShape:
    """The cores of this process, their NUMA nodes (sysfs) and the cgroup's CPU limit (v2 `cpu.max`, v1 `cpu.cfs_*`)."""
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
    """The smallest CPU limit on the way from this process's cgroup to the root, in CPUs, or None."""
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
    """Bind the calling thread, and those it will start, to `cores`. Returns why it could not, or None."""
    if not hasattr(os, "sched_setaffinity"):
        return "this system has no core affinity"
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        return f"cores {list(cores)} could not be bound: {error}"
    return None


def thread_environment(threads: int) -> Mapping[str, str]:
    """Thread counts that must be set before the engine's library is imported: Ray sets them from num_cpus."""
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
