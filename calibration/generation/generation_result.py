"""The result of a calibration of generation: the changes to the Serve config, and the report. Times are in seconds,
shares are between 0 and 1, and None means unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from calibration.generation.overlap import Overlap
from calibration.generation.promise_proof import PromiseProof
from calibration.generation.request_capacity import Mix, SimulatedReplica
from calibration.generation.step_series import StepFit, StepRoom
from calibration.report.report_model import PoolHead, ReportHead, ReportPart, WrittenReport
from calibration.result import RunResult
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.state import StepPolicy

_CONTEXTS = (256, 1024, 4096)  # contexts for which the overlap is shown, besides the mix's


class GenerationOptions(ReportPart):
    """The options: the mean tokens of the requests that the capacity is for."""

    prompt_tokens: int
    answer_tokens: int
    seed: int


class PromiseReport(GenerationOptions):
    """The promise, and the mix of requests with the longest prompt that can be admitted."""

    ttft_s: float
    tpot_s: float
    longest_prompt: int | None


class StepReport(ReportPart):
    """One planned step: the `seconds` of each run, and the fit's prediction."""

    series: str
    rows: int
    cached: int
    chunks: list[tuple[int, int]]  # tokens before, tokens
    host_rows: int
    copied: int
    seconds: list[float]
    host_seconds: list[float]
    predicted_s: float


class StepPoolReport(PoolHead):
    """One pool: its replicas, their step time (`StepTime`), the blocks of each one's cache, and the errors against the
    measurements. If hosts hold part of the cache: their times (`HostTime`), and whether they pay off.
    """

    step_time: dict[str, float] | None = None
    host_time: dict[str, float] | None = None
    blocks: int = 0
    block_size: int = BLOCK
    num_cpu_blocks: int = 0
    overlaps: tuple[Overlap, ...] = ()
    median_error: float | None = None
    worst_error: float | None = None
    noise: float | None = None
    steps: tuple[StepReport, ...] = ()


class GenerationCalibrationReport(ReportHead):
    """`report.json`. `capacity`: requests per second of which 99 % are admitted, in virtual time."""

    emulated_means = (
        "The devices are EMULATED: the step times are true of the emulated tables, not of this machine's devices."
    )
    kind: Literal["generation"] = "generation"
    settings: PromiseReport
    pools: dict[str, StepPoolReport]
    capacity: float | None
    streams: list[PromiseProof]


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
            min(member["block_size"] for member in found["replicas"].values()),
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
        longest = None if self.mix is None else self.mix.longest_prompt
        promise: dict[str, Any] = {"ttft_s": self.policy.ttft_s, "tpot_s": self.policy.tpot_s}
        return GenerationCalibrationReport(
            **self.head(problem, written, proven=self.proven),
            settings=PromiseReport(**promise, longest_prompt=longest, **self.options.model_dump()),
            pools={pool: self._pool(pool) for pool in self.pools},
            capacity=self.capacity,
            streams=self.proofs,
        )

    def _pool(self, pool: str) -> StepPoolReport:
        fit = self.fits.get(pool)
        if fit is None:
            return StepPoolReport(**self.pool_head(pool))
        steps = (
            StepReport(
                series=one.series,
                **one.step._asdict(),
                seconds=list(one.seconds),
                host_seconds=list(one.host_seconds),
                predicted_s=fit.seconds(one.step),
            )
            for one in fit.measured
        )
        room = self.room(pool)
        return StepPoolReport(
            **self.pool_head(pool) | fit.settings(),
            blocks=room.blocks,
            block_size=room.block_size,
            num_cpu_blocks=room.num_cpu_blocks,
            overlaps=tuple(self.overlaps(pool)),
            median_error=fit.median_error,
            worst_error=fit.worst_error,
            noise=fit.noise,
            steps=tuple(steps),
        )
