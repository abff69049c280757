"""Runs a calibration of generation: measures planned steps, fits their times, finds the capacity, proves streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from calibration.generation.generation_result import GenerationOptions, GenerationResult
from calibration.generation.promise_proof import LOADS, PromiseStream, payload, prove
from calibration.generation.request_capacity import Arrival, Mix, capacity, longest_prompt
from calibration.generation.step_series import MeasuredStep, Seconds, StepFit, measure
from calibration.generation.token_stream import ClientStream, send_all
from calibration.load import request_bytes
from calibration.progress import Progress
from calibration.prove.in_force import PutInForce, trying_out
from calibration.service.application import Application, CalibrationFailed, check_replicas, notes_on_pools
from calibration.service.replicas import Replicas
from deployments.generation.planned_steps import PlannedStep
from deployments.generation.scheduler.step_time import StepLoad, StepTime

_TIMES = 3  # timed runs of each step, after one warm-up run
_TYPICAL = StepLoad(8, 8 * 512)
_NOISY = 0.15  # spread of equal steps from which on a note is printed


class GenerationCalibration:
    """One calibration of one application that generates."""

    def __init__(self, application: Application, options: GenerationOptions, progress: Progress) -> None:
        self._application = application
        self._progress = progress
        self.result = GenerationResult(application, application.info(), time.time(), options)
        for note in notes_on_pools(self.result.info["windve"]):
            self.result.note(note)

    async def measure(self, *, estimate_only: bool = False) -> None:
        """Find the step times and, unless `estimate_only`, prove the promise with them.

        Raises CalibrationFailed; the result keeps what was found until then.
        """
        replicas = Replicas.connect(self._application, self.result.pools, _warm_up_s)
        try:
            for pool in self.result.pools:
                await self._measure(pool, replicas)
        finally:
            await replicas.release()
        self._find_capacity()
        if not estimate_only:
            async with trying_out(self._application, self.result.note) as try_out:
                await self._prove(try_out)
            await asyncio.to_thread(check_replicas, self._application, self.result.pools)
            self.result.proven = True

    async def _measure(self, pool: str, replicas: Replicas) -> None:
        policy = self.result.policy

        async def ask(step: PlannedStep) -> tuple[Seconds, Seconds] | None:
            found = await replicas.time(pool, step, _TIMES)
            return None if found is None else (tuple(one.seconds for one in found), tuple(one.host_s for one in found))

        def on_step(step: MeasuredStep) -> None:
            self._progress.say(f"{step.series}: {1000 * step.median_s:.3g} ms")

        with self._progress.stage(f"measuring steps of the {pool} pool"):
            measured = await measure(self.result.room(pool), policy.longest_step_s, ask, on_step)
        if not measured:
            raise CalibrationFailed(f"no planned step fits into the {pool} pool's cache: increase its blocks")
        self.result.fits[pool] = fit = StepFit.of(measured, self.result.layers(pool))
        fit.check(pool, policy.tpot_s)
        if fit.noise > _NOISY:
            self.result.note(
                f"equal steps of the {pool} pool differ by {fit.noise:.0%}: is other work on the device or the machine?"
            )
        if fit.host is not None and not self.result.overlaps(pool):
            self.result.note(
                f"the {pool} pool's attention or linear layers were too fast to measure, so the report does not say "
                "whether its host pays off"
            )
        self._progress.done(
            f"{pool}: {len(measured)} steps, predicted to {fit.median_error:.1%} (median) and {fit.worst_error:.0%} "
            "(worst)"
        )

    def _find_capacity(self) -> None:
        result, options = self.result, self.result.options
        longest, context = longest_prompt(result.replicas, result.policy), result.info["max_input_length"]
        result.mix = mix = Mix(options.prompt_tokens, options.answer_tokens, longest, context)
        with self._progress.stage("finding the capacity in virtual time"):
            result.capacity = capacity(result.replicas, result.policy, mix, options.seed)
        if not result.capacity:
            raise CalibrationFailed(
                f"no request can get its first token within {result.policy.ttft_s:g} s and each further one within "
                f"{result.policy.tpot_s:g} s: increase ttft_s and tpot_s"
            )
        self._progress.done(
            f"capacity: {result.capacity:.3g} requests a second, prompts of {options.prompt_tokens} tokens and answers "
            f"of {options.answer_tokens} on average"
        )

    async def _prove(self, try_out: PutInForce) -> None:
        result, seed = self.result, self.result.options.seed
        assert result.mix is not None
        assert result.capacity is not None
        await try_out(result.changes())
        for times, bursts in LOADS:
            stream = PromiseStream.of(times, result.capacity, result.policy.ttft_s, bursts=bursts)
            arrivals = stream.arrivals(result.mix, result.policy.ttft_s, seed)
            with self._progress.stage(f"proving a {stream.name}, {len(arrivals)} requests"):
                proof = await prove(stream, arrivals, result.policy, self._send)
            result.proofs.append(proof)
            self._progress.done(
                f"{stream.name}: {len(proof.firsts_s)} of {proof.sent} admitted, {proof.late_firsts} first tokens and "
                f"{proof.late_paces} paces late"
            )
            proof.check(result.policy)

    async def _send(self, arrivals: Sequence[Arrival]) -> list[ClientStream]:
        application, model, seed = self._application, self.result.info["model_id"], self.result.options.seed
        path, host = f"{application.address.prefix}/v1/completions", application.address.netloc
        plan = [
            (one.at, request_bytes(payload(model, one, seed + number), path, application.headers, host))
            for number, one in enumerate(arrivals)
        ]
        return await send_all(application.address, plan)


def _warm_up_s(found: dict[str, Any]) -> float:
    """By a replica's warm-up, how long a typical step takes."""
    return StepTime(**found).seconds(_TYPICAL)
