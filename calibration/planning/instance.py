"""The instance that a report measured: all replicas of all pools that serve together. Plans multiply it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from calibration.fit.curve import Shape
from calibration.planning.cost import PoolCapacity
from calibration.report.report_model import CalibrationReport
from calibration.report.tables import POOLS, plain
from deployments.errors import SettingsError
from deployments.hardware.device_detector import ACCELERATOR, CPU


@dataclass(frozen=True, slots=True)
class Instance:
    """The pools of the report in `path`. `cpu_idle`: why the CPU takes no queries beside the accelerator, or None.

    A pool is None if the report does not have it. The CPU's is also None if it has no curve and takes no queries.
    """

    path: Path
    report: CalibrationReport
    accelerator: PoolCapacity | None
    cpu: PoolCapacity | None
    cpu_idle: str | None

    @classmethod
    def read(cls, path: Path) -> Instance:
        """The instance of the report in `path`, a report.json or its folder. Raises SettingsError that says what is
        wrong with the report.
        """
        try:
            path = path / "report.json" if path.is_dir() else path
            content = path.read_bytes()
        except OSError as error:
            where, why = error.filename or path, error.strerror or error
            raise SettingsError("REPORT", f"{where} cannot be read: {why}") from None
        report = CalibrationReport.parse(content, str(path))
        _check_calibrated(path, report)
        accelerator, cpu = _pool(report, ACCELERATOR), _pool(report, CPU)
        if accelerator is None and cpu is None:
            raise SettingsError("REPORT.pools", "has neither an accelerator nor a CPU with a curve")
        instance = cls(path, report, accelerator, cpu, _cpu_idle(report, cpu) if accelerator else None)
        if not instance.base.capacity:
            depth = f"depth 0 at an SLO of {instance.slo_s:g} s"
            raise SettingsError("REPORT", f"{path} gives the {instance.base_name} {depth}: nothing to plan with")
        return instance

    @property
    def slo_s(self) -> float:
        return self.report.settings.slo_s

    @property
    def shape(self) -> Shape:
        return self.report.settings.shape

    @property
    def base(self) -> PoolCapacity:
        """The pool to buy: the accelerator, or the CPU if there is no accelerator."""
        pool = self.accelerator or self.cpu
        assert pool is not None
        return pool

    @property
    def base_name(self) -> str:
        return POOLS[ACCELERATOR if self.accelerator else CPU]

    @property
    def helper(self) -> PoolCapacity | None:
        """The CPU, if it takes the accelerator's overflow."""
        return self.cpu if self.accelerator is not None and self.cpu_idle is None else None


def _check_calibrated(path: Path, report: CalibrationReport) -> None:
    if report.outcome == "estimated":
        raise SettingsError("REPORT", f"{path} has estimates that were not proven: calibrate without --estimate-only")
    if report.outcome == "refused":
        reason = plain(report.reason or "it gives no reason").rstrip(".")
        raise SettingsError("REPORT", f"{path} has no depths to plan with, because the calibration failed: {reason}")


def _pool(report: CalibrationReport, name: str) -> PoolCapacity | None:
    """The pool with its curve and depth; None if there is no curve."""
    found = report.pools.get(name)
    if found is None:
        return None
    if found.curve is None and found.depth:
        raise SettingsError(f"REPORT.pools.{name}", "has a depth but no alpha_s and beta_s")
    if found.curve is not None and not found.curve.latency_s(1):
        raise SettingsError(f"REPORT.pools.{name}", "has a curve that takes no time")
    return PoolCapacity(found.curve, found.depth or 0, found.replicas) if found.curve else None


def _cpu_idle(report: CalibrationReport, cpu: PoolCapacity | None) -> str | None:
    """Why the CPU takes no queries, in the report's words if it has any; None if it takes some."""
    if report.capacity(CPU):
        return None
    if report.cpu_overflow.reason:
        return plain(report.cpu_overflow.reason).rstrip(".")
    if CPU not in report.pools:
        return "the report has no CPU pool"
    if cpu is not None and cpu.capacity:
        return "it was not in use when the report was made"
    slo_s, shape = report.settings.slo_s, report.settings.shape
    if cpu is not None and (alone_s := cpu.curve.latency_s(1, shape)) > slo_s:
        return f"a single query takes it up to {alone_s:.2f} s, longer than the SLO of {slo_s:g} s (Eq. 11)"
    return "its queue depth is 0"
