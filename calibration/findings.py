"""What a calibration has found: what of it is written into the Serve config, and what the report says."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from calibration.application import Application
from calibration.curve import Shape
from calibration.fine_tune import Tuned
from calibration.journal import Burst
from calibration.latency_model import CONFIDENCE
from calibration.lengths import LengthSample
from calibration.levels import Aim
from calibration.proof import Step, Verification
from calibration.stream import StreamProof
from calibration.sweep import Estimate
from deployments.hardware.device_detector import ACCELERATOR, CPU, probe_machine
from deployments.queueing.cost_model import CostModel

_MAX_ONGOING = 1_000_000  # requests at the Router: above all depths, or overload would wait in the proxy unrefused
_PLACES_BEFORE_PROXY = 10  # times all depths together, at least
_DIGITS = 6  # of alpha and beta


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the calibration is asked for. `stress_step` 0 spares the stress test."""

    slo_s: float
    shape: Shape
    tokens: int
    quantile: float
    most: int
    seed: int
    stress_step: int

    @property
    def aim(self) -> Aim:
        return Aim(self.slo_s, self.shape, self.most, quantile=self.quantile)


@dataclass(slots=True)
class Findings:
    """What a run has found so far about an application; a run that is refused leaves the rest empty."""

    application: Application
    info: dict[str, Any]
    wishes: Wishes
    started: float
    estimates: dict[str, Estimate] = field(default_factory=dict)
    stress: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bursts: Sequence[Burst] = ()
    costs: dict[str, CostModel] = field(default_factory=dict)
    length_samples: dict[str, list[LengthSample]] = field(default_factory=dict)
    streams: list[StreamProof] = field(default_factory=list)
    tuned: Tuned | None = None
    verification: Verification | None = None
    why_without_cpu: str | None = None

    @property
    def depths(self) -> dict[str, int]:
        """The proven depths."""
        return self.verification.depths if self.verification else {}

    @property
    def pools(self) -> dict[str, dict[str, Any]]:
        """The application's pools as `/info` told of them."""
        pools: dict[str, dict[str, Any]] = self.info["windve"]["pools"]
        return pools

    @property
    def most_replicas(self) -> int:
        """Replicas of all pools together."""
        return sum(pool["live_replicas"] for pool in self.pools.values())

    @property
    def verified(self) -> str:
        """The verification in one phrase."""
        proof = self.verification
        assert proof is not None
        admitted, late = sum(proof.admitted.values()), sum(proof.late.values())
        return f"{admitted - late} of {admitted} admitted queries within {self.wishes.slo_s:g} s"

    @property
    def proved(self) -> list[str]:
        """What held the SLO, in the words of the record."""
        loads = ["bursts" if self.wishes.shape == "burst" else "steady"]
        return [*loads, *("mixed lengths" if proof.stream.mixed else "stream" for proof in self.streams)]

    def leave_cpu_out(self, reason: str) -> None:
        if self.why_without_cpu is None:
            self.why_without_cpu = reason
            self.note(
                f"heterogeneous computing is switched off (cpu.queue_depth: 0): {reason}; args.heterogeneous: false "
                "frees the CPU replica's memory too, at the next restart"
            )

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def changes(self) -> dict[str, Any]:
        """What is written into the Router's entry of a Serve config."""
        user_config: dict[str, Any] = {"slo_s": self.wishes.slo_s}
        for pool, depth in self.depths.items():
            line = self.estimates[pool].line
            user_config[pool] = {"queue_depth": depth}
            if line is not None:
                cost = {key: _round(value) for key, value in asdict(self.costs[pool]).items()}
                user_config[pool] |= {"alpha_s": _round(line.curve.alpha_s), "beta_s": cost.pop("beta_s"), "cost": cost}
        user_config["calibration"] = self._record()
        places = sum(depth * self.pools[pool]["live_replicas"] for pool, depth in self.depths.items())
        return {"max_ongoing_requests": max(_MAX_ONGOING, _PLACES_BEFORE_PROXY * places), "user_config": user_config}

    def _record(self) -> dict[str, Any]:
        lines = {pool: estimate.line for pool, estimate in self.estimates.items()}
        record: dict[str, Any] = {
            "at": _utc(time.time()),
            "where": "; ".join([platform.node(), *(f"{pool} {', '.join(self._devices(pool))}" for pool in lines)]),
            "shape": self.wishes.shape,
            "slo_s": self.wishes.slo_s,
            "tokens": self.wishes.tokens,
            "quantile": self.wishes.quantile,
            "r2": {pool: round(line.r2, 5) for pool, line in lines.items() if line is not None},
            "verified": self.verified,
            "proved": self.proved,
        }
        if self.why_without_cpu is not None:
            record["heterogeneous"] = f"off: {self.why_without_cpu}"
        return record

    def _devices(self, pool: str) -> list[str]:
        return sorted({str(member["device"]) for member in self.pools[pool]["replicas"].values()})

    def report(self, problem: str | None, written: Mapping[str, Any]) -> dict[str, Any]:
        """All that was found, as `report.json` has it."""
        finished = time.time()
        return {
            "format": 1,
            "windve": importlib.metadata.version("windve"),
            "started": _utc(self.started),
            "finished": _utc(finished),
            "seconds": round(finished - self.started, 1),
            "outcome": "refused" if problem is not None else "calibrated" if self.verification else "estimated",
            "reason": problem,
            "notes": self.notes,
            "application": {
                "name": self.application.name,
                "model": self.info["model_id"],
                "emulated": self.info["windve"]["emulated"],
                "url": str(self.application.address),
            },
            "machine": _machine(),
            "settings": {**asdict(self.wishes), "confidence": CONFIDENCE},
            "pools": {pool: self._pool(pool) for pool in self.pools},
            "heterogeneous": {
                "used": bool(self.depths.get(CPU)) and ACCELERATOR in self.depths,
                "reason": self.why_without_cpu,
            },
            "fine_tuning": [{**step.depths, "slowest_s": step.slowest_s, "held": step.held} for step in self.steps],
            "verification": self._verification(),
            "streams": [_stream(proof) for proof in self.streams],
            "bursts": [asdict(burst) for burst in self.bursts],
            "written": dict(written),
        }

    def _pool(self, pool: str) -> dict[str, Any]:
        members = list(self.pools[pool]["replicas"].values())
        cores = [len(member["cores"]) for member in members if member.get("cores")]
        told: dict[str, Any] = {
            "devices": self._devices(pool),
            "engine": members[0]["engine"] if members else None,
            "dtype": members[0]["dtype"] if members else None,
            "replicas": self.pools[pool]["live_replicas"],
            "cores": min(cores) if cores else None,
        }
        told |= dict.fromkeys(
            ("alpha_s", "beta_s", "r2", "noise", "regression_depth", "estimate", "stress_depth", "cost")
        )
        told |= {"fine_tuned": self.depths.get(pool), "samples": [], "queries": 0, "note": None}
        estimate = self.estimates.get(pool)
        if estimate is None:
            return told
        line, aim = estimate.line, self.wishes.aim
        outliers = line.outliers if line else frozenset()
        told["samples"] = [
            {**asdict(sample), "outlier": index in outliers} for index, sample in enumerate(estimate.samples)
        ]
        told |= {"queries": estimate.queries, "estimate": estimate.depth, "regression_depth": 0}
        if pool in self.stress:
            told["stress_depth"], told["stress_queries"] = self.stress[pool]
        if line is not None:
            curve = line.curve
            highest = max(sample.concurrency for sample in estimate.samples)
            told |= {"alpha_s": curve.alpha_s, "beta_s": curve.beta_s, "r2": line.r2, "noise": line.noise}
            told["regression_depth"] = curve.depth(aim.slo_s, aim.shape, aim.most)
            told["cost"] = self._cost(pool)
            told["band"] = [
                [concurrency, curve.latency_s(concurrency) - margin_s, curve.latency_s(concurrency) + margin_s]
                for concurrency in np.linspace(1, highest, 24).tolist()
                for margin_s in [line.margin_s(concurrency)]
            ]
        if pool == CPU:
            told["note"] = self.why_without_cpu
        return told

    def _cost(self, pool: str) -> dict[str, Any] | None:
        cost = self.costs.get(pool)
        if cost is None:
            return None
        samples = self.length_samples[pool]
        lengths = sorted({self.wishes.tokens, *(sample.tokens for sample in samples)})
        by_tokens = [[tokens, cost.cost_s(tokens)] for tokens in lengths]
        return {**asdict(cost), "samples": [asdict(sample) for sample in samples], "by_tokens": by_tokens}

    def _verification(self) -> dict[str, Any] | None:
        proof = self.verification
        if proof is None:
            return None
        admitted = sum(proof.admitted.values())
        pools = {}
        for pool, count in proof.admitted.items():
            latencies = np.array([latency for burst in proof.bursts for latency in burst.latencies_s[pool]])
            pools[pool] = {
                "admitted": count,
                "late": proof.late[pool],
                "p50_s": float(np.quantile(latencies, 0.5)) if count else None,
                "p99_s": float(np.quantile(latencies, 0.99)) if count else None,
                "slowest_s": float(latencies.max()) if count else None,
            }
        busy = sum(burst.busy for burst in proof.bursts)
        return {
            "bursts": len(proof.bursts),
            "queries": admitted + busy + proof.failed,
            "admitted": admitted,
            "busy": busy,
            "failed": proof.failed,
            "within_slo": admitted - sum(proof.late.values()),
            "share": proof.share,
            "pools": pools,
        }


def _stream(proof: StreamProof) -> dict[str, Any]:
    p50_s, p99_s, slowest_s = np.quantile(proof.latencies_s, (0.5, 0.99, 1)).tolist()
    counts = {"sent": proof.sent, "admitted": len(proof.latencies_s), "late": proof.late, "busy": proof.busy}
    return {**asdict(proof.stream), **counts, "p50_s": p50_s, "p99_s": p99_s, "slowest_s": slowest_s}


def _machine() -> dict[str, Any]:
    machine = probe_machine()
    return {
        "hostname": machine.hostname,
        "cpu_model": machine.cpu_model,
        "architecture": machine.architecture,
        "cores": len(machine.cpu.allowed),
        "memory_gib": machine.memory_gib,
        "python": platform.python_version(),
        "ray": importlib.metadata.version("ray"),
    }


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
