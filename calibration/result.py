"""The result of a calibration: the changes to the Serve config, and the report."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from calibration.fit.curve import Curve
from calibration.fit.levels import Aim
from calibration.measure.sweep import Estimate
from calibration.report.report_model import (
    ApplicationReport,
    Burst,
    CalibrationOptions,
    CalibrationReport,
    CostReport,
    CpuOverflowReport,
    MachineReport,
    PoolReport,
    SampleReport,
    StreamReport,
    VerificationReport,
    WrittenReport,
)
from calibration.service.application import Application
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.hardware.device_detector import ACCELERATOR, CPU

_MAX_ONGOING = 1_000_000  # requests at the Router: must exceed all depths, or overload waits in the proxy
_PROXY_FACTOR = 10  # it is at least this many times all depths together
_DIGITS = 6  # significant digits of alpha and beta


@dataclass(slots=True)
class RunResult:
    """What a run has found so far. `info`: the application's `/info` at the start; `started`: Unix time."""

    application: Application
    info: dict[str, Any]
    started: float
    notes: list[str] = field(default_factory=list, kw_only=True)

    @property
    def pools(self) -> dict[str, dict[str, Any]]:
        """The application's pools, as in `/info`."""
        pools: dict[str, dict[str, Any]] = self.info["windve"]["pools"]
        return pools

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def devices(self, pool: str) -> list[str]:
        return sorted({str(member["device"]) for member in self.pools[pool]["replicas"].values()})

    def head(self, problem: str | None, written: WrittenReport, *, proven: bool) -> dict[str, Any]:
        """The fields of `ReportHead` for a run that ends now. `problem`: why it failed."""
        finished = time.time()
        return {
            "windve": importlib.metadata.version("windve"),
            "started": _utc(self.started),
            "finished": _utc(finished),
            "seconds": round(finished - self.started, 1),
            "outcome": "refused" if problem is not None else "calibrated" if proven else "estimated",
            "reason": problem,
            "notes": self.notes,
            "application": ApplicationReport(
                name=self.application.name,
                model=self.info["model_id"],
                emulated=self.info["windve"]["emulated"],
                url=str(self.application.address),
            ),
            "machine": MachineReport.probe(),
            "written": written,
        }

    def pool_head(self, pool: str) -> dict[str, Any]:
        """The fields of `PoolHead`."""
        found = self.pools[pool]
        first: dict[str, Any] = next(iter(found["replicas"].values()), {})
        about = {key: first.get(key) for key in ("engine", "dtype")}
        return {**about, "devices": self.devices(pool), "replicas": found["live_replicas"]}


@dataclass(slots=True)
class CalibrationResult(RunResult):
    """What was found. A run that fails leaves the rest empty."""

    options: CalibrationOptions
    way: Curve | None = None
    estimates: dict[str, Estimate] = field(default_factory=dict)
    stress: dict[str, tuple[int, int]] = field(default_factory=dict)
    bursts: list[Burst] = field(default_factory=list)
    costs: dict[str, CostModel] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    streams: list[StreamReport] = field(default_factory=list)
    verification: VerificationReport | None = None
    why_without_cpu: str | None = None

    @property
    def aim(self) -> Aim:
        return Aim(self.options.slo_s, self.options.shape, self.options.most)

    @property
    def device_aim(self) -> Aim:
        """The aim of a device's own time: the SLO without the way."""
        return replace(self.aim, slo_s=self.options.slo_s - (self.way.beta_s if self.way else 0.0))

    @property
    def depths(self) -> dict[str, int]:
        return self.verification.depths if self.verification else {}

    @property
    def verified(self) -> str:
        """The verification in one phrase."""
        proof = self.verification
        assert proof is not None
        return f"{proof.admitted - proof.late} of {proof.admitted} admitted queries within {self.options.slo_s:g} s"

    def leave_cpu_out(self, reason: str) -> None:
        if self.why_without_cpu is None:
            self.why_without_cpu = reason
            self.note(
                f"the CPU takes no overflow (cpu.queue_depth: 0): {reason}; set args.cpu_overflow: false to also free "
                "the CPU replica's memory at the next restart"
            )

    def changes(self) -> dict[str, Any]:
        """The changes to the Router's entry in the Serve config."""
        found = self.changes_for(self.depths)
        return {**found, "user_config": {**found["user_config"], "calibration": self._record()}}

    def changes_for(self, depths: Mapping[str, int]) -> dict[str, Any]:
        """The same for these depths, without the record of a proof."""
        user_config: dict[str, Any] = {"slo_s": self.options.slo_s}
        for pool, depth in depths.items():
            line = self.estimates[pool].line
            user_config[pool] = {"queue_depth": depth}
            if line is not None and line.curve.rises:  # otherwise the Router uses what the warm-up measures
                cost = {key: _round(value) for key, value in asdict(self.costs[pool]).items()}
                user_config[pool] |= {"alpha_s": _round(line.curve.alpha_s), "beta_s": cost.pop("beta_s"), "cost": cost}
        slots = sum(depth * self.pools[pool]["live_replicas"] for pool, depth in depths.items())
        return {"max_ongoing_requests": max(_MAX_ONGOING, _PROXY_FACTOR * slots), "user_config": user_config}

    def _record(self) -> dict[str, Any]:
        """The calibration record. `proved`: the loads that met the SLO."""
        lines = {pool: estimate.line for pool, estimate in self.estimates.items()}
        bursts = "bursts" if self.options.shape == "burst" else "steady"
        record: dict[str, Any] = {
            "at": _utc(time.time()),
            "where": "; ".join([platform.node(), *(f"{pool} {', '.join(self.devices(pool))}" for pool in lines)]),
            **self.options.model_dump(include={"shape", "slo_s", "tokens"}),
            "r2": {pool: round(line.r2, 5) for pool, line in lines.items() if line is not None},
            "verified": self.verified,
            "proved": [bursts, *("mixed lengths" if proof.mixed else "stream" for proof in self.streams)],
        }
        if self.why_without_cpu is not None:
            record["cpu_overflow"] = f"off: {self.why_without_cpu}"
        return record

    def report(self, problem: str | None, written: WrittenReport) -> CalibrationReport:
        """The report. `problem`: why the calibration failed; None if it did not."""
        return CalibrationReport(
            **self.head(problem, written, proven=bool(self.verification)),
            settings=self.options,
            way=self.way,
            pools={pool: self._pool(pool) for pool in self.pools},
            cpu_overflow=CpuOverflowReport(
                used=bool(self.depths.get(CPU)) and ACCELERATOR in self.depths, reason=self.why_without_cpu
            ),
            verification=self.verification,
            streams=self.streams,
            bursts=self.bursts,
        )

    def _pool(self, pool: str) -> PoolReport:
        members = self.pools[pool]["replicas"].values()
        cores = min((len(member["cores"]) for member in members if member.get("cores")), default=None)
        found = PoolReport(**self.pool_head(pool), cores=cores, depth=self.depths.get(pool))
        if (estimate := self.estimates.get(pool)) is None:
            return found
        line = estimate.line
        found.samples = [
            SampleReport(**asdict(sample), outlier=line is not None and index in line.outliers)
            for index, sample in enumerate(estimate.samples)
        ]
        found.queries, found.estimate = estimate.queries, estimate.depth
        found.stress_depth, found.stress_queries = self.stress.get(pool, (None, None))
        if line is not None:
            found.alpha_s, found.beta_s, found.r2, found.noise = *astuple(line.curve), line.r2, line.noise
            levels = np.linspace(1, max(sample.concurrency for sample in estimate.samples), 24).tolist()
            at = [(level, line.curve.latency_s(level), line.margin_s(level)) for level in levels]
            found.band = [(level, took_s - margin_s, took_s + margin_s) for level, took_s, margin_s in at]
        if (cost := self.costs.get(pool)) is not None:
            by_tokens = [(tokens, cost.cost(tokens)) for tokens in self.lengths]
            found.cost = CostReport(**asdict(cost), by_tokens=by_tokens)
        return found


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _utc(seconds: float) -> str:
    """Unix time as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
