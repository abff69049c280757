"""The report of a calibration of generation as one type. Times are in seconds, shares are between 0 and 1, and None
means unknown.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calibration.generation.overlap import Overlap
from calibration.generation.promise_proof import PromiseProof
from calibration.report.report_model import PoolHead, ReportHead, ReportPart


class PromiseReport(ReportPart):
    """The promise, and the mix of requests: mean tokens, and the longest prompt that can be admitted."""

    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    answer_tokens: int
    longest_prompt: int | None
    seed: int


class StepReport(ReportPart):
    """One planned step: the `seconds` of each run, and the fit's prediction."""

    series: str
    rows: int
    cached: int
    chunks: list[tuple[int, int]]  # tokens before, tokens
    host_rows: int = 0
    copied: int = 0
    seconds: list[float]
    host_seconds: list[float] = Field(default_factory=list)
    predicted_s: float


class StepPoolReport(PoolHead):
    """One pool: its replicas, their step time (`StepTime`), and its errors against the measurements. If hosts hold part
    of the cache: their times (`HostTime`), and whether they pay off.
    """

    step_time: dict[str, float] | None = None
    host_time: dict[str, float] | None = None
    num_cpu_blocks: int = 0
    overlaps: list[Overlap] = Field(default_factory=list)
    median_error: float | None = None
    worst_error: float | None = None
    noise: float | None = None
    steps: list[StepReport] = Field(default_factory=list)


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
