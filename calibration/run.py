"""Runs a calibration: measures each pool alone, verifies with all pools loaded, proves streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing

from calibration.fit.latency_model import Sample
from calibration.fit.lengths import fit_cost, other_lengths
from calibration.fit.levels import Aim
from calibration.measure.sweep import Estimate, PlannedBursts, measure_length, measure_way, stress_test, sweep
from calibration.measure.traffic import Traffic
from calibration.progress import Progress
from calibration.prove.in_force import trying_out
from calibration.prove.proof import Load, most_at_once, most_rate, verify
from calibration.prove.stream import OVERLOAD, Stream, prove
from calibration.report.report_model import CalibrationOptions
from calibration.result import CalibrationResult
from calibration.service.application import Application, CalibrationFailed, check_replicas, notes_on_pools
from calibration.service.replicas import Replicas
from deployments.embedding.config import RouterConfig
from deployments.hardware.device_detector import ACCELERATOR, CPU

_TIMEOUT_MARGIN_S = 30.0  # beyond the application's own timeout
_TYPICAL = 32  # queries
_NOISY = 0.08  # relative standard deviation of a burst's latency from which on a note is printed


class Calibration:
    """One calibration of one application."""

    def __init__(self, application: Application, options: CalibrationOptions, progress: Progress) -> None:
        self._application = application
        self._progress = progress
        self._router = RouterConfig.parse(application.router_config())
        self.result = CalibrationResult(application, application.info(), time.time(), options)
        if options.slo_s >= self._router.request_timeout_s:
            raise CalibrationFailed(
                f"an SLO of {options.slo_s:g} s cannot be measured: the application drops a query after "
                f"{self._router.request_timeout_s:g} s; increase user_config.request_timeout_s"
            )
        for note in notes_on_pools(self.result.info["windve"]):
            self.result.note(note)

    async def measure(self, *, estimate_only: bool = False) -> None:
        """Find the depths and, unless `estimate_only`, prove them.

        Raises CalibrationFailed or SettingsError; the result keeps what was found until then.
        """
        options, kind = self.result.options, self.result.info["windve"]["kind"]
        timeout_s = self._router.request_timeout_s + _TIMEOUT_MARGIN_S
        application, pools, bursts = self._application, list(self.result.pools), self.result.bursts
        replicas = Replicas.connect(application, self.result.pools, _typical_run_s)
        runs = PlannedBursts(replicas, bursts, options.tokens)
        traffic = Traffic(
            application.address, application.headers, bursts, pools, options.tokens, options.seed, timeout_s, kind
        )
        with closing(traffic):
            await traffic.prepare(self.result.info["max_input_length"])
            try:
                await self._measure(traffic, runs)
            finally:
                await replicas.release()
            if not estimate_only:
                await self._prove(traffic, self._usable_estimates())
                await asyncio.to_thread(check_replicas, application, self.result.pools)

    async def _measure(self, traffic: Traffic, runs: PlannedBursts) -> None:
        first = next(iter(self.result.pools))
        with self._progress.stage("measuring the way to the devices"):
            self.result.way = way = await measure_way(traffic, runs, first)
        self._progress.done(
            f"the way: {1000 * way.beta_s:.3g} ms for one query, at most about {1 / way.alpha_s:.0f} queries/s"
        )
        if self.result.device_aim.slo_s <= 0:
            raise CalibrationFailed(
                f"an SLO of {self.result.options.slo_s:g} s cannot be met: the way to the device and back alone takes "
                f"{way.beta_s:.3g} s"
            )
        for pool in self.result.pools:
            await self._sweep(runs, pool)
        self._usable_estimates()
        await self._measure_lengths(runs)

    async def _prove(self, traffic: Traffic, depths: Mapping[str, int]) -> None:
        """Prove the depths with ordinary traffic while they are in force."""
        way, options = self.result.way, self.result.options
        assert way is not None
        replicas = {name: pool["live_replicas"] for name, pool in self.result.pools.items()}
        load = Load(traffic, replicas, most_at_once(way, options.slo_s))
        if (slots := sum(depth * replicas[pool] for pool, depth in depths.items())) > load.most:
            self.result.note(
                f"the devices have {slots} slots, but only about {1 / way.alpha_s:.0f} queries a second reach them: "
                "the proof sends no more than that; add Routers (num_replicas) or cores for them"
            )
        async with trying_out(self._application, self.result.note) as try_out:

            async def put_in_force(depths: Mapping[str, int]) -> None:
                await try_out(self.result.changes_for(depths))

            await self._verify(load, depths, put_in_force)
            if self._router.admission == "deadline":
                await self._prove_streams(traffic, replicas)

    async def _sweep(self, runs: PlannedBursts, pool: str) -> None:
        options = self.result.options

        def on_sample(samples: list[Sample]) -> None:
            self._progress.say(f"{samples[-1].concurrency} at once: {samples[-1].latency_s:.3f} s")

        with self._progress.stage(f"measuring the {pool} pool alone"):
            self.result.estimates[pool] = estimate = await sweep(runs, pool, self.result.device_aim, on_sample)
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
                self.result.stress[pool] = await stress_test(runs, pool, self.result.device_aim, options.stress_step)
            depth, spent = self.result.stress[pool]
            self._progress.done(f"{pool}: a stress test says {depth} ({spent} queries)")

    async def _measure_lengths(self, runs: PlannedBursts) -> None:
        """Measure the cost of a query by its length, on each pool that has a line."""
        aim, tokens = self.result.aim, self.result.options.tokens
        lined = {pool: estimate for pool, estimate in self.result.estimates.items() if estimate.line is not None}
        with self._progress.stage("measuring queries of other lengths"):
            others = other_lengths(tokens, self.result.info["max_input_length"])
            self.result.lengths = sorted([*others, tokens])
            for pool, estimate in lined.items():
                assert estimate.line is not None
                samples = {length: await measure_length(runs, estimate, length, aim) for length in others}
                self.result.costs[pool] = cost = fit_cost(samples, estimate.line.curve, tokens)
                shown = ", ".join(f"{1000 * cost.cost(n):.3g} ms at {n}" for n in self.result.lengths)
                self._progress.done(f"{pool}: a query costs by its tokens {shown}")

    def _usable_estimates(self) -> dict[str, int]:
        """The estimated depths. Raises CalibrationFailed if the preferred pool cannot meet the SLO at all."""
        first, *others = self.result.estimates.values()
        slo_s, aim = self.result.options.slo_s, self.result.device_aim
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

    async def _verify(
        self, load: Load, depths: Mapping[str, int], put_in_force: Callable[[Mapping[str, int]], Awaitable[None]]
    ) -> None:
        with self._progress.stage("verifying, with more queries than slots"):
            aim, say = self.result.aim, self._progress.say
            self.result.verification = await verify(load, depths, aim, put_in_force, say)
        if self.result.depths.get(CPU) == 0 and ACCELERATOR in self.result.depths:
            self.result.leave_cpu_out("no query on it met the SLO in the verification")
        depths_text = " + ".join(f"{pool} {depth}" for pool, depth in self.result.depths.items())
        self._progress.done(f"verified: {depths_text}, {self.result.verified}")

    async def _prove_streams(self, traffic: Traffic, replicas: Mapping[str, int]) -> None:
        """Prove the SLO with streams of equal and of mixed lengths, more than the pools can answer."""
        options, depths, way = self.result.options, self.result.depths, self.result.way
        assert way is not None
        capacity = sum(
            self.result.estimates[pool].queries_per_second(depth) * replicas[pool] for pool, depth in depths.items()
        )
        rate = min(OVERLOAD * capacity, most_rate(way))
        for name, mixed in (("stream", False), ("stream of mixed lengths", True)):
            stream = Stream(name, rate, options.tokens, mixed)
            arrivals = stream.arrivals(options.slo_s, self.result.info["max_input_length"], options.seed)
            with self._progress.stage(f"proving a {name}, {rate:.3g} queries a second"):
                proof = await prove(traffic, stream, arrivals, options.slo_s)
            self.result.streams.append(proof)
            self._progress.done(f"{name}: {proof.late} of {proof.admitted} admitted queries late, {proof.busy} refused")


def _typical_run_s(found: Mapping[str, float]) -> float:
    """Seconds of a typical run, from the latency model that a replica measured at its warm-up."""
    return _TYPICAL * found["alpha_s"] + found["beta_s"]


def _takes(estimate: Estimate, aim: Aim) -> str:
    """A phrase that says how long one query takes."""
    if aim.shape == "steady":
        return f"takes up to {estimate.smallest_slo_s(aim):.3g} s if it waits for a running batch"
    return f"takes {estimate.lone_s:.3g} s"


def _round_up(seconds: float) -> float:
    """Round up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / unit) * unit
