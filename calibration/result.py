"""The result of a calibration: the changes to the Serve config, and the report."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from calibration.fit.curve import Curve
from calibration.fit.levels import Aim
from calibration.measure.burst import Burst
from calibration.measure.sweep import Estimate
from calibration.prove.proof import Verification
from calibration.prove.stream import StreamProof
from calibration.report.report_model import (
    CalibrationOptions,
    CalibrationReport,
    CostReport,
    CpuOverflowReport,
    LatenciesReport,
    PoolReport,
    RunResult,
    SampleReport,
    StreamReport,
    VerificationReport,
    WrittenReport,
    utc,
)
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.hardware.device_detector import ACCELERATOR, CPU

_MAX_ONGOING = 1_000_000  # requests at the Router: must exceed all depths, or overload waits in the proxy
_PLACES_BEFORE_PROXY = 10  # it is at least this many times all depths together
_DIGITS = 6  # significant digits of alpha and beta


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
    streams: list[StreamProof] = field(default_factory=list)
    router_request_s: float | None = None
    verification: Verification | None = None
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
    def most_replicas(self) -> int:
        """The replicas of all pools together."""
        return sum(pool["live_replicas"] for pool in self.pools.values())

    @property
    def verified(self) -> str:
        """The verification in one phrase."""
        proof = self.verification
        assert proof is not None
        in_time = proof.admitted - sum(proof.late.values())
        return f"{in_time} of {proof.admitted} admitted queries within {self.options.slo_s:g} s"

    @property
    def proved(self) -> list[str]:
        """The loads that met the SLO, for the calibration record."""
        loads = ["bursts" if self.options.shape == "burst" else "steady"]
        return [*loads, *("mixed lengths" if proof.stream.mixed else "stream" for proof in self.streams)]

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
        places = sum(depth * self.pools[pool]["live_replicas"] for pool, depth in depths.items())
        return {"max_ongoing_requests": max(_MAX_ONGOING, _PLACES_BEFORE_PROXY * places), "user_config": user_config}

    def _record(self) -> dict[str, Any]:
        lines = {pool: estimate.line for pool, estimate in self.estimates.items()}
        record: dict[str, Any] = {
            "at": utc(time.time()),
            "where": "; ".join([platform.node(), *(f"{pool} {', '.join(self.devices(pool))}" for pool in lines)]),
            "shape": self.options.shape,
            "slo_s": self.options.slo_s,
            "tokens": self.options.tokens,
            "r2": {pool: round(line.r2, 5) for pool, line in lines.items() if line is not None},
            "verified": self.verified,
            "proved": self.proved,
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
            verification=self._verification(),
            streams=[
                StreamReport(
                    **asdict(proof),
                    **asdict(proof.stream),
                    **_quantiles(proof.latencies_s),
                    admitted=len(proof.latencies_s),
                )
                for proof in self.streams
            ],
            router_request_s=self.router_request_s,
            bursts=self.bursts,
        )

    def _pool(self, pool: str) -> PoolReport:
        members = self.pools[pool]["replicas"].values()
        cores = min((len(member["cores"]) for member in members if member.get("cores")), default=None)
        found = PoolReport(**self.pool_head(pool), cores=cores, depth=self.depths.get(pool))
        if pool in self.estimates:
            self._add_estimate(found, self.estimates[pool])
        return found

    def _add_estimate(self, found: PoolReport, estimate: Estimate) -> None:
        """Add what was measured on the pool alone."""
        line, pool = estimate.line, estimate.pool
        outliers = line.outliers if line else frozenset()
        found.samples = [
            SampleReport(**asdict(sample), outlier=index in outliers) for index, sample in enumerate(estimate.samples)
        ]
        found.queries, found.estimate = estimate.queries, estimate.depth
        if pool in self.stress:
            found.stress_depth, found.stress_queries = self.stress[pool]
        if line is not None:
            curve = line.curve
            highest = max(sample.concurrency for sample in estimate.samples)
            found.alpha_s, found.beta_s, found.r2, found.noise = curve.alpha_s, curve.beta_s, line.r2, line.noise
            found.cost = self._cost(pool)
            found.band = [
                (concurrency, curve.latency_s(concurrency) - margin_s, curve.latency_s(concurrency) + margin_s)
                for concurrency in np.linspace(1, highest, 24).tolist()
                for margin_s in [line.margin_s(concurrency)]
            ]

    def _cost(self, pool: str) -> CostReport | None:
        cost = self.costs.get(pool)
        if cost is None:
            return None
        return CostReport(**asdict(cost), by_tokens=[(tokens, cost.cost_s(tokens)) for tokens in self.lengths])

    def _verification(self) -> VerificationReport | None:
        proof = self.verification
        if proof is None:
            return None
        return VerificationReport(
            bursts=len(proof.bursts),
            admitted=proof.admitted,
            busy=sum(burst.busy for burst in proof.bursts),
            share=proof.share,
            pools={
                pool: LatenciesReport(admitted=len(found), late=proof.late[pool], **_quantiles(found))
                for pool, found in proof.latencies_s.items()
            },
        )


def _quantiles(latencies_s: Sequence[float]) -> dict[str, Any]:
    """The median, the 99 % quantile and the maximum of the latencies, in s; None if there are none."""
    names = ("p50_s", "p99_s", "slowest_s")
    if not latencies_s:
        return dict.fromkeys(names)
    return dict(zip(names, np.quantile(latencies_s, (0.5, 0.99, 1)).tolist(), strict=True))


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
