"""The report of a calibration of generation as one type. Times are in seconds, shares are between 0 and 1, and None
means unknown.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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


class OverlapReport(ReportPart):
    """APEX's prediction (`generation.overlap`) with the accelerator's cache full of answers of `context` tokens each:
    does the host's attention pay off, with two batches that take turns? Rates are in tokens per second. `blocks`: host
    cache blocks that keep the host busy.
    """

    context: int
    ratio: float  # N_G / N_C
    largest_ratio: float  # the right side of (6)
    pays: bool
    alone_rate: float
    pipelined_rate: float
    asynchronous_rate: float
    pipelined_blocks: int
    asynchronous_blocks: int


class StepPoolReport(PoolHead):
    """One pool: its replicas, their step time (`StepTime`), and its errors against the measurements. If hosts hold part
    of the cache: their times (`HostTime`), and whether they pay off.
    """

    step_time: dict[str, float] | None = None
    host_time: dict[str, float] | None = None
    num_cpu_blocks: int = 0
    overlaps: list[OverlapReport] = Field(default_factory=list)
    median_error: float | None = None
    worst_error: float | None = None
    noise: float | None = None
    steps: list[StepReport] = Field(default_factory=list)


class ProofReport(ReportPart):
    """One stream, as its client saw it. Of the admitted requests: seconds to each first token, and between tokens."""

    name: str
    rate: float
    times: float
    together: int
    sent: int
    busy: int
    late_firsts: int
    late_paces: int
    firsts_s: list[float]
    paces_s: list[float]


class GenerationCalibrationReport(ReportHead):
    """`report.json`. `capacity`: requests per second of which 99 % are admitted, in virtual time."""

    emulated_means = (
        "The devices are EMULATED: the step times are true of the emulated tables, not of this machine's devices."
    )
    kind: Literal["generation"] = "generation"
    settings: PromiseReport
    pools: dict[str, StepPoolReport]
    capacity: float | None
    streams: list[ProofReport]
