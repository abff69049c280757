"""A calibration from beginning to end: measure each pool, estimate, fine-tune both, verify, write, apply, report."""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from calibration import serve_config
from calibration.application import Application, CalibrationFailed
from calibration.fine_tune import Tuned, fine_tune
from calibration.journal import Burst, Journal
from calibration.latency_model import CONFIDENCE, NotLinear, Sample, Shape
from calibration.levels import Aim
from calibration.progress import Progress
from calibration.proof import Promise, Step, Verification, tune, verify
from calibration.sweep import Estimate, stress_test, sweep
from calibration.trials import Trials
from deployments.device_detector import ACCELERATOR, CPU, probe_machine
from deployments.errors import SettingsError

_MAX_ONGOING = 1_000_000  # requests at the Router: above all depths, or overload would wait in the proxy unrefused
_PLACES_BEFORE_PROXY = 10  # times all depths together, at least
_NOISY = 0.08  # standard deviation of a burst's latency, a share of it: worth a word
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
        return Aim(self.slo_s, self.shape, self.most)


@dataclass(slots=True)
class Found:
    """What a run has found so far; a run that is refused leaves the rest empty."""

    estimates: dict[str, Estimate]
    stress: dict[str, tuple[int, int]]
    steps: list[Step]
    notes: list[str]
    tuned: Tuned | None = None
    verification: Verification | None = None
    why_without_cpu: str | None = None

    @property
    def depths(self) -> dict[str, int]:
        """The proven depths."""
        return self.verification.depths if self.verification else {}


class Calibration:
    """One run against one application."""

    def __init__(self, application: Application, wishes: Wishes, progress: Progress) -> None:
        self._application = application
        self._wishes = wishes
        self._progress = progress
        self.info = application.info()
        self.pools: dict[str, dict[str, Any]] = self.info["windve"]["pools"]
        self.found = Found({}, {}, [], [])
        self.bursts: list[Burst] = []
        self.started = time.time()
        self._check_ready()

    def _check_ready(self) -> None:
        for name, pool in self.pools.items():
            if not pool["live_replicas"]:
                raise CalibrationFailed(f"the {name} pool has no live replica: see `serve status`, then run it again")
            if pool["live_replicas"] < pool["expected_replicas"]:
                self._note(
                    f"the {name} pool has {pool['live_replicas']} of {pool['expected_replicas']} replicas: "
                    "the others may be slower"
                )
            if pool["in_flight"]:
                self._note("other traffic is being served: latencies include it, and its clients are told busy")

    @property
    def about(self) -> dict[str, Any]:
        """What makes another run the same: an interrupted one is resumed only then."""
        replicas = {name: sorted(pool["replicas"]) for name, pool in self.pools.items()}
        return {"application": self._application.name, "replicas": replicas, "wishes": asdict(self._wishes)}

    async def measure(self, journal: Journal, *, estimate_only: bool = False) -> None:
        """Find the depths, and prove them unless `estimate_only`.

        Raises CalibrationFailed or SettingsError; what was found until then is kept.
        """
        secret = await asyncio.to_thread(self._application.issue_pass)
        replicas = {name: pool["live_replicas"] for name, pool in self.pools.items()}
        wishes = self._wishes
        trials = Trials(self._application.address, secret, journal, replicas, wishes.tokens, wishes.seed)
        self.bursts = journal.bursts
        try:
            await trials.prepare(self.info["max_input_length"])
            for pool in self.pools:
                await self._sweep(trials, pool)
            estimates = self._usable_estimates()
            if not estimate_only:
                await self._tune(trials, estimates)
                await self._verify(trials)
        finally:
            trials.close()
            await asyncio.shield(asyncio.to_thread(self._application.withdraw_pass))

    async def _sweep(self, trials: Trials, pool: str) -> None:
        aim, quantile = self._wishes.aim, self._wishes.quantile

        def on_sample(samples: list[Sample]) -> None:
            self._progress.say(f"{samples[-1].concurrency} at once: {samples[-1].latency_s:.3f} s")

        with self._progress.stage(f"measuring the {pool} pool alone"):
            try:
                estimate = await sweep(trials, pool, aim, quantile, on_sample)
            except NotLinear as error:
                raise CalibrationFailed(f"the {pool} pool: {error}") from None
        self.found.estimates[pool] = estimate
        if estimate.line is not None and estimate.line.noise > _NOISY:
            self._note(
                f"the {pool} pool's latencies scatter by {estimate.line.noise:.0%}: is other work on the device or the "
                "machine? A calibration when it is quiet finds larger depths"
            )
        line = estimate.line
        if line is None:
            self._progress.done(f"{pool}: one query takes {estimate.lone_s:.3f} s, more than the SLO")
        else:
            self._progress.done(
                f"{pool}: {line.model.alpha_s:.5f} C + {line.model.beta_s:.4f} s, R2 {line.r2:.4f}, depth about "
                f"{estimate.depth} ({len(estimate.samples)} bursts, {estimate.queries} queries)"
            )
        if self._wishes.stress_step:
            with self._progress.stage(f"stress test of the {pool} pool, step {self._wishes.stress_step}"):
                self.found.stress[pool] = await stress_test(trials, pool, aim, quantile, self._wishes.stress_step)
            depth, spent = self.found.stress[pool]
            self._progress.done(f"{pool}: a stress test says {depth} ({spent} queries)")

    def _usable_estimates(self) -> dict[str, int]:
        """The estimated depths. Raises CalibrationFailed where the preferred pool cannot meet the SLO at all."""
        first, *others = self.found.estimates.values()
        slo_s = self._wishes.slo_s
        if not first.depth:
            raise CalibrationFailed(
                f"an SLO of {slo_s:g} s cannot be met: one query on the {first.pool} pool takes {first.lone_s:.3g} s; "
                f"the smallest SLO that works here is about {_round_up(first.smallest_slo_s(self._wishes.aim)):g} s"
            )
        for estimate in others:
            if not estimate.depth:
                self._without_cpu(
                    f"one query on the {estimate.pool} pool takes {estimate.lone_s:.3g} s, more than the SLO of "
                    f"{slo_s:g} s (Eq. 11)"
                )
        return {pool: estimate.depth for pool, estimate in self.found.estimates.items()}

    async def _tune(self, trials: Trials, estimates: Mapping[str, int]) -> None:
        def on_step(step: Step) -> None:
            self.found.steps.append(step)
            held = ", ".join(
                f"{pool} {depth} {'holds' if step.held[pool] else 'late'} ({step.slowest_s[pool]:.3f} s)"
                for pool, depth in step.depths.items()
                if depth
            )
            self._progress.say(held)

        with self._progress.stage("fine-tuning, all pools at work"):
            tuned = await tune(trials, fine_tune(estimates, self._wishes.most), self._promise, on_step)
        self.found.tuned = tuned
        for note in tuned.notes:
            self._note(note)
        first = next(iter(tuned.depths))
        if not tuned.depths[first]:
            raise CalibrationFailed(
                f"an SLO of {self._wishes.slo_s:g} s does not hold even for one query on the {first} pool when all "
                "pools are at work"
            )
        if tuned.depths.get(CPU) == 0 and ACCELERATOR in tuned.depths:
            self._without_cpu(tuned.notes[0] if tuned.notes else "not one query on it met the SLO under load")
        self._progress.done("fine-tuned: " + _depths_text(tuned.depths))

    async def _verify(self, trials: Trials) -> None:
        assert self.found.tuned is not None
        with self._progress.stage("verifying, with more queries than places") as task:
            self.found.verification = await verify(trials, self.found.tuned.depths, self._promise, task.count)
        if self.found.depths.get(CPU) == 0 and ACCELERATOR in self.found.depths:
            self._without_cpu("not one query on it met the SLO in the verification")
        self._progress.done(f"verified: {self.verified}")

    @property
    def _promise(self) -> Promise:
        return Promise(self._wishes.aim, self._wishes.quantile)

    @property
    def verified(self) -> str:
        """The verification in one phrase."""
        proof = self.found.verification
        assert proof is not None
        admitted, late = sum(proof.admitted.values()), sum(proof.late.values())
        return f"{admitted - late} of {admitted} admitted queries within {self._wishes.slo_s:g} s"

    def _without_cpu(self, reason: str) -> None:
        if self.found.why_without_cpu is None:
            self.found.why_without_cpu = reason
            self._note(
                f"heterogeneous computing is switched off (cpu.queue_depth: 0): {reason}; args.heterogeneous: false "
                "frees the CPU replica's memory too, at the next restart"
            )

    def _note(self, text: str) -> None:
        if text not in self.found.notes:
            self.found.notes.append(text)

    def changes(self) -> dict[str, Any]:
        """What is written into the Router's entry of a Serve config."""
        user_config: dict[str, Any] = {"slo_s": self._wishes.slo_s}
        for pool, depth in self.found.depths.items():
            line = self.found.estimates[pool].line
            user_config[pool] = {"queue_depth": depth}
            if line is not None:
                user_config[pool] |= {"alpha_s": _round(line.model.alpha_s), "beta_s": _round(line.model.beta_s)}
        user_config["calibration"] = self._record()
        places = sum(depth * self.pools[pool]["live_replicas"] for pool, depth in self.found.depths.items())
        return {"max_ongoing_requests": max(_MAX_ONGOING, _PLACES_BEFORE_PROXY * places), "user_config": user_config}

    def _record(self) -> dict[str, Any]:
        lines = {pool: estimate.line for pool, estimate in self.found.estimates.items()}
        record: dict[str, Any] = {
            "at": _utc(time.time()),
            "where": "; ".join([socket.gethostname(), *(f"{pool} {', '.join(self._devices(pool))}" for pool in lines)]),
            "shape": self._wishes.shape,
            "slo_s": self._wishes.slo_s,
            "tokens": self._wishes.tokens,
            "quantile": self._wishes.quantile,
            "r2": {pool: round(line.r2, 5) for pool, line in lines.items() if line is not None},
            "verified": self.verified,
        }
        if self.found.why_without_cpu is not None:
            record["heterogeneous"] = f"off: {self.found.why_without_cpu}"
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
            "outcome": "refused" if problem is not None else "calibrated" if self.found.verification else "estimated",
            "reason": problem,
            "notes": self.found.notes,
            "application": {
                "name": self._application.name,
                "model": self.info["model_id"],
                "emulated": self.info["windve"]["emulated"],
                "url": str(self._application.address),
            },
            "machine": _machine(),
            "settings": {**asdict(self._wishes), "confidence": CONFIDENCE},
            "pools": {pool: self._pool(pool) for pool in self.pools},
            "heterogeneous": {
                "used": bool(self.found.depths.get(CPU)) and ACCELERATOR in self.found.depths,
                "reason": self.found.why_without_cpu,
            },
            "fine_tuning": [
                {**step.depths, "slowest_s": step.slowest_s, "held": step.held} for step in self.found.steps
            ],
            "verification": self._verification(),
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
        told |= dict.fromkeys(("alpha_s", "beta_s", "r2", "noise", "regression_depth", "estimate", "stress_depth"))
        told |= {"fine_tuned": self.found.depths.get(pool), "samples": [], "queries": 0, "note": None}
        estimate = self.found.estimates.get(pool)
        if estimate is None:
            return told
        line, aim = estimate.line, self._wishes.aim
        outliers = line.outliers if line else frozenset()
        told["samples"] = [
            {**asdict(sample), "outlier": index in outliers} for index, sample in enumerate(estimate.samples)
        ]
        told |= {"queries": estimate.queries, "estimate": estimate.depth, "regression_depth": 0}
        if pool in self.found.stress:
            told["stress_depth"], told["stress_queries"] = self.found.stress[pool]
        if line is not None:
            model = line.model
            highest = max(sample.concurrency for sample in estimate.samples)
            told |= {"alpha_s": model.alpha_s, "beta_s": model.beta_s, "r2": line.r2, "noise": line.noise}
            told["regression_depth"] = model.depth(aim.slo_s, aim.shape, aim.most)
            told["band"] = [
                [concurrency, model.latency_s(concurrency) - margin_s, model.latency_s(concurrency) + margin_s]
                for concurrency in np.linspace(1, highest, 24).tolist()
                for margin_s in [line.margin_s(concurrency)]
            ]
        if pool == CPU:
            told["note"] = self.found.why_without_cpu
        return told

    def _verification(self) -> dict[str, Any] | None:
        proof = self.found.verification
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


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The Serve config, or the RayService manifest that carries one, that is to be written; its text as it was."""

    path: Path
    text: str
    application: str

    @classmethod
    def read(cls, path: Path, application: Application) -> ConfigFile:
        """Raises SettingsError where it cannot be edited: said before anything is measured."""
        found = cls(path, serve_config.read_text(path), application.name)
        found.edited({"user_config": {"slo_s": 1.0}})
        return found

    def edited(self, changes: Mapping[str, Any]) -> str:
        """Raises SettingsError that names the file and the key."""
        try:
            return serve_config.edit(self.text, self.application, changes)
        except SettingsError as error:
            key = str(self.path) if error.key == "<config>" else f"{self.path}: {error.key}"
            raise SettingsError(key, error.problem) from None

    def differs(self, application: Application) -> bool:
        """The file describes another application than the one that runs: its depths may not be for it."""
        for document in yaml.safe_load_all(self.text):
            inner = (document or {}).get("spec", {}).get("serveConfigV2")
            config = yaml.safe_load(inner) if isinstance(inner, str) else document
            for found in (config or {}).get("applications") or []:
                if found.get("name", "default") == self.application:
                    return bool(found.get("args") != application.deployed.get("args"))
        return False


def _depths_text(depths: Mapping[str, int]) -> str:
    return " + ".join(f"{pool} {depth}" for pool, depth in depths.items())


def _machine() -> dict[str, Any]:
    machine = probe_machine()
    return {
        "hostname": socket.gethostname(),
        "cpu_model": machine.cpu_model,
        "architecture": machine.architecture,
        "cores": len(machine.cpu.allowed),
        "memory_gib": machine.memory_gib,
        "python": platform.python_version(),
        "ray": importlib.metadata.version("ray"),
    }


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _round_up(seconds: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / unit) * unit


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
