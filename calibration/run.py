"""Runs a calibration: measures each pool alone, fine-tunes with all pools loaded, verifies, proves streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

from calibration.fit.latency_model import Sample
from calibration.fit.lengths import fit_cost, other_lengths
from calibration.fit.levels import Aim
from calibration.measure.journal import Journal
from calibration.measure.sweep import Estimate, measure_length, stress_test, sweep
from calibration.measure.trials import TrialLoads, granted_trials
from calibration.progress import Progress
from calibration.prove.fine_tune import fine_tune
from calibration.prove.proof import TuningStep, tune, verify
from calibration.prove.stream import OVERLOAD, Stream, prove
from calibration.result import CalibrationOptions, CalibrationResult
from calibration.service.application import Application, CalibrationFailed
from calibration.service.live_pools import check_replicas, notes_on_pools
from deployments.embedding.config import RouterConfig
from deployments.hardware.device_detector import ACCELERATOR, CPU

_TIMEOUT_MARGIN_S = 30.0  # beyond the application's own timeout
_NOISY = 0.08  # relative standard deviation of a burst's latency from which on a note is printed


class Calibration:
    """One calibration of one application."""

    def __init__(self, application: Application, options: CalibrationOptions, progress: Progress) -> None:
        self._application = application
        self._progress = progress
        self.result = CalibrationResult(application, application.info(), time.time(), options)
        self._check_ready()

    def _check_ready(self) -> None:
        info, slo_s = self.result.info["windve"], self.result.options.slo_s
        if slo_s >= self._router.request_timeout_s:
            raise CalibrationFailed(
                f"an SLO of {slo_s:g} s cannot be measured: the application drops a query after "
                f"{self._router.request_timeout_s:g} s; increase user_config.request_timeout_s"
            )
        for note in notes_on_pools(info):
            self.result.note(note)

    @property
    def _router(self) -> RouterConfig:
        return RouterConfig.parse(self._application.router_config())

    @property
    def about(self) -> dict[str, Any]:
        """Identifies the run: an interrupted run is resumed only if all of this is equal."""
        replicas = {name: sorted(pool["replicas"]) for name, pool in self.result.pools.items()}
        options = asdict(self.result.options)
        # Earlier versions, whose interrupted runs can be resumed too, named these "wishes".
        model = {} if self._application.model is None else {"model": self._application.model}
        return {"application": self._application.name, **model, "replicas": replicas, "wishes": options}

    async def measure(self, journal: Journal, *, estimate_only: bool = False) -> None:
        """Find the depths and, unless `estimate_only`, prove them.

        Raises CalibrationFailed or SettingsError; the result keeps what was found until then.
        """
        replicas = {name: pool["live_replicas"] for name, pool in self.result.pools.items()}
        options = self.result.options
        timeout_s = self._router.request_timeout_s + _TIMEOUT_MARGIN_S
        at, headers = self._application.address, self._application.headers
        kind = self.result.info["windve"]["kind"]
        self.result.bursts = journal.bursts
        async with granted_trials(self._application, self.result.note) as secret:
            trials = TrialLoads(at, headers, secret, journal, replicas, options.tokens, options.seed, timeout_s, kind)
            with closing(trials):
                await trials.prepare(self.result.info["max_input_length"])
                for pool in self.result.pools:
                    await self._sweep(trials, pool)
                estimates = self._usable_estimates()
                await self._measure_lengths(trials)
                if not estimate_only:
                    await self._tune(trials, estimates)
                    await self._verify(trials)
                    if self._router.admission == "deadline":
                        await self._prove_streams(trials)
                    await asyncio.to_thread(check_replicas, self._application, self.result.pools)

    async def _sweep(self, trials: TrialLoads, pool: str) -> None:
        options = self.result.options

        def on_sample(samples: list[Sample]) -> None:
            self._progress.say(f"{samples[-1].concurrency} at once: {samples[-1].latency_s:.3f} s")

        with self._progress.stage(f"measuring the {pool} pool alone"):
            estimate = await sweep(trials, pool, options.aim, on_sample)
        self.result.estimates[pool] = estimate
        if estimate.bent is not None:
            self.result.note(
                f"the {pool} pool's {estimate.bent}: its depth was found by bisection, and alpha and beta are those of "
                "the lowest line on or above the measurements up to it"
            )
        if estimate.line is not None and estimate.line.noise > _NOISY:
            self.result.note(
                f"the {pool} pool's latencies scatter by {estimate.line.noise:.0%}: is other work on the device or the "
                "machine? Calibrate when traffic is low to find larger depths"
            )
        line = estimate.line
        if line is None:
            self._progress.done(f"{pool}: one query takes {estimate.lone_s:.3f} s")
        else:
            self._progress.done(
                f"{pool}: {line.curve.alpha_s:.5f} C + {line.curve.beta_s:.4f} s, R2 {line.r2:.4f}, depth about "
                f"{estimate.depth} ({len(estimate.samples)} bursts, {estimate.queries} queries)"
            )
        if options.stress_step:
            with self._progress.stage(f"stress test of the {pool} pool, step {options.stress_step}"):
                self.result.stress[pool] = await stress_test(trials, pool, options.aim, options.stress_step)
            depth, spent = self.result.stress[pool]
            self._progress.done(f"{pool}: a stress test says {depth} ({spent} queries)")

    async def _measure_lengths(self, trials: TrialLoads) -> None:
        """Measure the cost of a query by its length, on each pool that has a line."""
        aim, tokens = self.result.options.aim, self.result.options.tokens
        lined = {pool: estimate for pool, estimate in self.result.estimates.items() if estimate.line is not None}
        with self._progress.stage("measuring queries of other lengths"):
            others = other_lengths(tokens, self.result.info["max_input_length"])
            lengths = [await trials.nearest(length) for length in others]
            for pool, estimate in lined.items():
                assert estimate.line is not None
                samples = self.result.length_samples.setdefault(pool, [])
                for length in lengths:
                    samples += await measure_length(trials, estimate, length, aim)
                self.result.costs[pool] = cost = fit_cost(samples, estimate.line.curve, tokens)
                shown = ", ".join(f"{1000 * cost.cost_s(n):.3g} ms at {n}" for n in sorted([*lengths, tokens]))
                self._progress.done(f"{pool}: a query costs by its tokens {shown}")

    def _usable_estimates(self) -> dict[str, int]:
        """The estimated depths. Raises CalibrationFailed if the preferred pool cannot meet the SLO at all."""
        first, *others = self.result.estimates.values()
        slo_s, aim = self.result.options.slo_s, self.result.options.aim
        if not first.depth:
            raise CalibrationFailed(
                f"an SLO of {slo_s:g} s cannot be met: one query on the {first.pool} pool {_takes(first, aim)}; "
                f"the smallest SLO that works here is about {_round_up(first.smallest_slo_s(aim)):g} s"
            )
        for estimate in others:
            if not estimate.depth:
                self.result.leave_cpu_out(
                    f"one query on the {estimate.pool} pool {_takes(estimate, aim)}, the SLO is {slo_s:g} s (Eq. 11)"
                )
        return {pool: estimate.depth for pool, estimate in self.result.estimates.items()}

    async def _tune(self, trials: TrialLoads, estimates: Mapping[str, int]) -> None:
        def on_step(step: TuningStep) -> None:
            self.result.steps.append(step)
            held = ", ".join(
                f"{pool} {depth} {'holds' if step.held[pool] else 'late'} ({step.slowest_s[pool]:.3f} s)"
                for pool, depth in step.depths.items()
                if depth
            )
            self._progress.say(held)

        with self._progress.stage("fine-tuning, all pools loaded"):
            tuned = await tune(trials, fine_tune(estimates, self.result.options.most), self.result.options.aim, on_step)
        self.result.tuned = tuned
        for note in tuned.notes:
            self.result.note(note)
        first = next(iter(tuned.depths))
        if not tuned.depths[first]:
            raise CalibrationFailed(
                f"the {first} pool misses an SLO of {self.result.options.slo_s:g} s even with one query when all pools "
                "are loaded: increase --slo"
            )
        if tuned.depths.get(CPU) == 0 and ACCELERATOR in tuned.depths:
            self.result.leave_cpu_out(tuned.notes[0] if tuned.notes else "no query on it met the SLO under load")
        self._progress.done("fine-tuned: " + _depths_text(tuned.depths))

    async def _verify(self, trials: TrialLoads) -> None:
        assert self.result.tuned is not None
        with self._progress.stage("verifying, with more queries than slots"):
            depths, advance = self.result.tuned.depths, self._progress.advance
            self.result.verification = await verify(trials, depths, self.result.options.aim, advance)
        if self.result.depths.get(CPU) == 0 and ACCELERATOR in self.result.depths:
            self.result.leave_cpu_out("no query on it met the SLO in the verification")
        self._progress.done(f"verified: {self.result.verified}")

    async def _prove_streams(self, trials: TrialLoads) -> None:
        """Prove the SLO with streams of equal and of mixed lengths, more than the pools can answer."""
        options, depths = self.result.options, self.result.depths
        rate = OVERLOAD * sum(
            self.result.estimates[pool].queries_per_second(depth) * trials.replicas[pool]
            for pool, depth in depths.items()
        )
        first = next(iter(depths))
        only = None if all(depths.values()) else first  # a pool that will be closed must not help in the proof
        for name, mixed in (("stream", False), ("stream of mixed lengths", True)):
            stream = Stream(name, rate, options.tokens, mixed)
            arrivals = stream.arrivals(options.slo_s, self.result.info["max_input_length"], options.seed)
            with self._progress.stage(f"proving a {name}, {rate:.3g} queries a second"):
                proof = await prove(trials, stream, arrivals, options.slo_s, only)
            self.result.streams.append(proof)
            self._progress.done(
                f"{name}: {proof.late} of {len(proof.latencies_s)} admitted queries late, {proof.busy} refused"
            )


def _depths_text(depths: Mapping[str, int]) -> str:
    return " + ".join(f"{pool} {depth}" for pool, depth in depths.items())


def _takes(estimate: Estimate, aim: Aim) -> str:
    """A phrase that says how long one query takes."""
    if aim.shape == "steady":
        return f"takes up to {estimate.smallest_slo_s(aim):.3g} s if it waits for a running batch"
    return f"takes {estimate.lone_s:.3g} s"


def _round_up(seconds: float) -> float:
    """Round up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / unit) * unit
