"""The calibration's report as one type. The calibration writes it, the page and the pictures show it, plans read it.

Times are in seconds, shares are between 0 and 1, and None means unknown: a pool that was not measured has no `alpha_s`.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field

from calibration.fit.curve import Curve, Shape
from calibration.report.tables import DASH, plain
from deployments.errors import SettingsError
from deployments.hardware.device_detector import ACCELERATOR, CPU, probe_machine
from deployments.settings import parse_settings

MOST = 10**12  # upper bound of all counts and times; anything larger is a typing error

Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Depth = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Band = tuple[float, float, float]  # concurrency; lower and upper bound of the line's latency, s
Seconds = Annotated[float, Field(strict=True, ge=0, le=MOST, allow_inf_nan=False)]


class ReportPart(BaseModel):
    """A part of a report."""


def read_document(path: Path) -> tuple[Path, Any]:
    """The JSON of a report.json or of that in a folder, and the file. Raises SettingsError that says what is wrong."""
    try:
        path = path / "report.json" if path.is_dir() else path
        return path, json.loads(path.read_bytes())
    except OSError as error:
        where, why = error.filename or path, error.strerror or error
        raise SettingsError("REPORT", f"{where} cannot be read: {why}") from None
    except (ValueError, RecursionError) as error:
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise SettingsError("REPORT", f"{path} is not a calibration report: it is not JSON ({why})") from None


class ApplicationReport(ReportPart):
    """The calibrated application."""

    name: str
    model: str
    emulated: bool
    url: str


class MachineReport(ReportPart):
    """The machine that the calibration ran on."""

    hostname: str
    cpu_model: str
    architecture: str
    cores: int  # those that this process may use
    memory_gib: float
    python: str
    ray: str

    @classmethod
    def probe(cls) -> Self:
        """Describe the machine that this runs on."""
        machine = probe_machine()
        return cls(
            hostname=machine.hostname,
            cpu_model=machine.cpu_model,
            architecture=machine.architecture,
            cores=len(machine.cpu.allowed),
            memory_gib=machine.memory_gib,
            python=platform.python_version(),
            ray=importlib.metadata.version("ray"),
        )


class CalibrationOptions(ReportPart):
    """The options of the calibration. `stress_step` 0: no stress test."""

    slo_s: Annotated[Seconds, Field(gt=0)]
    shape: Shape
    tokens: int
    most: int
    seed: int
    stress_step: int


class SampleReport(ReportPart):
    """One burst of the sweep: `concurrency` queries at once per replica. The fit leaves outliers out."""

    concurrency: int
    latency_s: float
    outlier: bool


class CostReport(ReportPart):
    """Device seconds of a query of n tokens: `query_s + token_s * n + token2_s * n^2`, besides beta."""

    query_s: float
    token_s: float
    token2_s: float
    by_tokens: list[tuple[int, float]]  # tokens, seconds per query


class PoolHead(ReportPart):
    """The fields of a pool in reports of both kinds."""

    devices: list[str]
    engine: str | None
    dtype: str | None
    replicas: Count

    @property
    def devices_in_words(self) -> str:
        """The first device's name, and the number of others."""
        first, *others = self.devices or [DASH]
        return plain(first) + (f" and {len(others)} more" if others else "")


class PoolReport(PoolHead):
    """One pool: its replicas, its curve (Eq. 12), and the queue depths per replica.

    `cores`: of the replica with the fewest. `band`: the fitted line's confidence interval. `depth`: that was
    verified; None without a verification, 0 if the pool takes no queries.
    """

    cores: Count | None = None
    alpha_s: Seconds | None = None
    beta_s: Seconds | None = None
    r2: float | None = None
    noise: float | None = None
    estimate: int | None = None
    stress_depth: int | None = None
    stress_queries: int | None = None
    cost: CostReport | None = None
    depth: Depth | None
    samples: list[SampleReport] = []
    queries: int = 0
    band: list[Band] = []

    @property
    def curve(self) -> Curve | None:
        """The fitted line, or None."""
        return None if self.alpha_s is None or self.beta_s is None else Curve(self.alpha_s, self.beta_s)


class CpuOverflowReport(ReportPart):
    """Whether the CPU takes queries beside the accelerator, and why not."""

    used: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst and its outcome. `depths`: per live replica. `latencies_s`: by the pool that answered. `at`: Unix time,
    in seconds.
    """

    stage: str  # way, sweep, stress test, 10 tokens (a length), verify, stream
    at: float
    depths: dict[str, int]
    sent: int
    busy: int
    failed: int
    latencies_s: dict[str, list[float]]


class LatenciesReport(ReportPart):
    """How long admitted queries took, and how many were `late`; times are None if none was admitted."""

    admitted: int
    late: int
    p50_s: float | None
    p99_s: float | None
    slowest_s: float | None

    @classmethod
    def of(cls, latencies_s: Sequence[float], slo_s: float, **more: Any) -> Self:
        """Sum them up; `more`: the fields of a subclass."""
        import numpy as np

        taken = np.quantile(latencies_s, (0.5, 0.99, 1)).tolist() if latencies_s else [None] * 3
        times = dict(zip(("p50_s", "p99_s", "slowest_s"), taken, strict=True))
        return cls(admitted=len(latencies_s), late=sum(one > slo_s for one in latencies_s), **times, **more)


class VerificationReport(ReportPart):
    """The last run at the final depths, of so many `bursts`. `share`: of the admitted queries, those in time."""

    depths: dict[str, int]
    bursts: int
    admitted: int
    busy: int
    share: float
    pools: dict[str, LatenciesReport]

    @property
    def late(self) -> int:
        return sum(pool.late for pool in self.pools.values())


class StreamReport(LatenciesReport):
    """Queries that arrived one by one, `rate` per second, with `tokens` each (`mixed`: on average)."""

    name: str
    rate: float
    tokens: int
    mixed: bool
    sent: int
    busy: int


class WrittenReport(ReportPart):
    """The file or RayService with the depths, its backup, and whether they were `applied` to the application."""

    config: str | None = None
    backup: str | None = None
    applied: bool = False


class ReportHead(ReportPart):
    """The fields of reports of both kinds. `started`, `finished`: UTC, ISO 8601. `reason`: why the calibration failed.
    `emulated_means`: what emulated devices mean for the result.
    """

    emulated_means: ClassVar[str]
    windve: str
    started: str
    finished: str
    seconds: float
    outcome: Literal["refused", "estimated", "calibrated"]
    reason: str | None
    notes: list[str]
    application: ApplicationReport
    machine: MachineReport
    written: WrittenReport
    settings: ReportPart

    @property
    def is_refused(self) -> bool:
        return self.outcome == "refused"

    @classmethod
    def parse(cls, document: Any) -> Self:
        """The report in the JSON of its file. Raises SettingsError that says what is wrong."""
        return parse_settings(cls, document, "REPORT")


class CalibrationReport(ReportHead):
    """`report.json`."""

    emulated_means = (
        "The devices are EMULATED: the depths are true of the emulated curves, not of this machine's devices."
    )
    settings: CalibrationOptions
    way: Curve | None = None  # to the device and back: of a query, and of each other one that comes with it
    pools: dict[str, PoolReport]
    cpu_overflow: CpuOverflowReport
    verification: VerificationReport | None
    streams: list[StreamReport]
    bursts: list[Burst]

    def capacity(self, name: str) -> int:
        """Queries in flight on all replicas of a pool; 0 for a CPU that is not used beside an accelerator."""
        pool = self.pools.get(name)
        if pool is None or (name == CPU and ACCELERATOR in self.pools and not self.cpu_overflow.used):
            return 0
        return (pool.depth or 0) * pool.replicas
