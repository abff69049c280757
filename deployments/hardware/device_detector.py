"""Algorithm 2 of WindVE, as described in Section IV-C, and the detection of a machine's devices.

The algorithm as printed assigns the CPU if an accelerator is present and heterogeneous computing is off. The text
("only NPUs/GPUs will establish a queue") is right, and `decide_topology`, which is pure, follows it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.hardware.affinity import CpuShape, read_cpu_shape

ACCELERATOR = "accelerator"
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Topology:
    """Which pools exist, preferred one first, and why.

    `replicas[pool]`: how many replicas to start. `cpu_overflow`: the value in force, which may differ from the setting.
    """

    pools: tuple[str, ...]
    replicas: Mapping[str, int]
    cpu_overflow: bool
    reason: str


def decide_topology(accelerators: int, cpu_instances: int, *, cpu_overflow: bool) -> Topology:
    """Algorithm 2, for the devices and CPU instances that were found, and the setting `cpu_overflow`.

    - One kind of device: one queue, and cpu_overflow is forced off.
    - Both kinds, cpu_overflow off: only the accelerator's queue.
    - Both kinds, cpu_overflow on: both queues.

    Raises ValueError if there is neither.
    """
    if accelerators and cpu_instances and cpu_overflow:
        return Topology(
            (ACCELERATOR, CPU),
            {ACCELERATOR: accelerators, CPU: cpu_instances},
            cpu_overflow=True,
            reason="accelerator first, CPU for the overflow",
        )
    if accelerators:
        reason = "cpu_overflow is false: accelerator only" if cpu_instances else "no CPU instance: accelerator only"
        return Topology((ACCELERATOR,), {ACCELERATOR: accelerators}, cpu_overflow=False, reason=reason)
    if cpu_instances:
        return Topology((CPU,), {CPU: cpu_instances}, cpu_overflow=False, reason="no accelerator was found: CPU only")
    raise ValueError("neither an accelerator nor a CPU instance is available")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's properties: only strings and numbers, because they are sent between nodes and into reports."""

    hostname: str
    architecture: str
    cpu_model: str
    cpu: CpuShape
    memory_gib: float
    npu_problem: str | None

    @property
    def numa_nodes(self) -> int:
        return len(self.cpu.numa_nodes)


def probe_machine() -> Machine:
    """Inspect this machine. Imports torch-npu only if an Ascend NPU is present, to find out why it does not load."""
    import psutil

    return Machine(
        hostname=platform.node(),
        architecture=platform.machine(),
        cpu_model=cpu_model(),
        cpu=read_cpu_shape(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        npu_problem=_npu_problem(),
    )


def cpu_model() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    for key in ("model name", "Model", "Hardware"):  # x86, some ARM kernels
        for line in lines:
            if line.startswith(key) and ":" in line:
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def quick_cpu_dtype() -> tuple[str, str]:
    """The narrow dtype that this CPU computes quickly, and the reason."""
    if _cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"}:
        return "bfloat16", "the CPU has bfloat16 instructions"
    return "float32", "the CPU has no bfloat16 instructions"


def _cpu_flags() -> set[str]:
    """Instruction-set names of the first core: x86 `flags`, ARM `Features`. Empty without /proc/cpuinfo."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return set(line.split(":", 1)[1].split())
    return set()


def _npu_problem() -> str | None:
    """Why an Ascend NPU that is present cannot be used. None if there is none, or if it works."""
    if not any(Path("/dev").glob("davinci[0-9]*")):
        return None
    if importlib.util.find_spec("torch_npu") is None:
        return "an Ascend NPU is present but torch-npu is not installed (pip install windve[npu])"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # without CANN, `import torch` itself would fail
    try:
        torch_npu = importlib.import_module("torch_npu")
    except Exception as error:  # noqa: BLE001 - whatever the vendor's library raises is the reason we report
        return f"an Ascend NPU is present but torch-npu does not load: {error}"
    return None if torch_npu.npu.is_available() else "an Ascend NPU is present but torch-npu reports it as unavailable"
