"""The result of a calibration of generation: the changes to the Serve config, and the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from calibration.generation.overlap import Overlap
from calibration.generation.promise_proof import PromiseProof
from calibration.generation.request_capacity import Mix, SimulatedReplica
from calibration.generation.step_report_model import (
    GenerationCalibrationReport,
    PromiseReport,
    StepPoolReport,
    StepReport,
)
from calibration.generation.step_series import StepFit, StepRoom
from calibration.report.report_model import RunResult, WrittenReport
from deployments.generation.scheduler.state import StepPolicy

_CONTEXTS = (256, 1024, 4096)  # contexts for which the overlap is shown, besides the mix's


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The options: the mean tokens of the requests that the capacity is for."""

    prompt_tokens: int
    answer_tokens: int
    seed: int


@dataclass(slots=True)
class GenerationResult(RunResult):
    """What was found. A run that fails leaves the rest empty."""

    options: GenerationOptions
    fits: dict[str, StepFit] = field(default_factory=dict)
    mix: Mix | None = None
    capacity: float | None = None
    proofs: list[PromiseProof] = field(default_factory=list)
    proven: bool = False

    @property
    def policy(self) -> StepPolicy:
        """The promise in force."""
        return StepPolicy(self.info["windve"]["ttft_s"], self.info["windve"]["tpot_s"])

    def room(self, pool: str) -> StepRoom:
        """The room in the pool's smallest replica."""
        found = self.pools[pool]
        return StepRoom(
            found["blocks"], found["max_num_batched_tokens"], self.info["max_input_length"], found["num_cpu_blocks"],
            max(member["block_size"] for member in found["replicas"].values()),
        )  # fmt: skip

    def layers(self, pool: str) -> int:
        """The model's number of layers, if a host computes part of its attention."""
        times = [member["host_warm_up"] for member in self.pools[pool]["replicas"].values()]
        return next((int(one["layers"]) for one in times if one is not None), 1)

    @property
    def replicas(self) -> list[SimulatedReplica]:
        """The replicas of all measured pools, in the order in which the Router asks them."""
        return [
            SimulatedReplica(fit.time, room.blocks, room.max_num_batched_tokens, room.block_size)
            for pool, fit in self.fits.items()
            for room in [self.room(pool)]
            for _ in range(self.pools[pool]["live_replicas"])
        ]

    def changes(self) -> dict[str, Any]:
        """The changes to the Router's entry in the Serve config."""
        return {"user_config": {pool: fit.settings() for pool, fit in self.fits.items()}}

    def overlaps(self, pool: str) -> list[Overlap]:
        """APEX's verdict on a pool and its hosts, for the mix's mean answer and then for `_CONTEXTS`."""
        fit, options = self.fits[pool], self.options
        if fit.host is None:
            return []
        mean = options.prompt_tokens + options.answer_tokens // 2
        contexts = dict.fromkeys([mean, *_CONTEXTS])
        room = self.room(pool)
        found = [Overlap.of(fit.time, fit.host, room.blocks, context, fit.kv_token_s) for context in contexts]
        return [one for one in found if one is not None and one.context <= self.info["max_input_length"]]

    def report(self, problem: str | None, written: WrittenReport) -> GenerationCalibrationReport:
        """The report. `problem`: why the calibration failed; None if it did not."""
        promise = self.policy
        return GenerationCalibrationReport(
            **self.head(problem, written, proven=self.proven),
            settings=PromiseReport(
                ttft_s=promise.ttft_s,
                tpot_s=promise.tpot_s,
                longest_prompt=None if self.mix is None else self.mix.longest_prompt,
                **asdict(self.options),
            ),
            pools={pool: self._pool(pool) for pool in self.pools},
            capacity=self.capacity,
            streams=self.proofs,
        )

    def _pool(self, pool: str) -> StepPoolReport:
        found = StepPoolReport(**self.pool_head(pool))
        if (fit := self.fits.get(pool)) is not None:
            found.step_time, found.host_time = fit.settings()["step_time"], fit.settings().get("host_time")
            found.num_cpu_blocks = self.room(pool).num_cpu_blocks
            found.overlaps = self.overlaps(pool)
            found.median_error, found.worst_error, found.noise = fit.median_error, fit.worst_error, fit.noise
            found.steps = [
                StepReport(
                    series=one.series,
                    **one.step._asdict(),
                    seconds=list(one.seconds),
                    host_seconds=list(one.host_seconds),
                    predicted_s=fit.seconds(one.step),
                )
                for one in fit.measured
            ]
        return found
