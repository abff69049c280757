"""The planned steps that a calibration of generation measures, and the fit to their times. Pure.

The steps of a series grow. A series ends when a step takes longer than allowed, or the replica has no room for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from calibration.service.application import CalibrationFailed
from deployments.generation.planned_steps import PlannedStep
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.step_time import HostTime, StepTime

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FEW_ROWS = (1, 4, 16, 64, 256)
_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_FEW_TOKENS = (16, 64, 256, 1024)
_COPIED = (0, 2, 8, 32, 128)  # blocks
_COPIES = "blocks to the host and back"
_NEAR, _MIDDLE, _FAR = 64, 1024, 4096  # tokens in the cache, if the context is long enough
_FEWEST = 8  # steps for a fit of six numbers
_WORST_MEDIAN = 0.15  # largest median error of a fit that is written; beyond it, promises would hold only by luck
_DIGITS = 6

Seconds = tuple[float, ...]


class StepRoom(NamedTuple):
    """The room in a replica's cache, in a step, and in the host's part of the cache. `context`: most tokens of a prompt
    and its answer; `block_size`: tokens of a block.
    """

    blocks: int
    max_num_batched_tokens: int
    context: int
    num_cpu_blocks: int = 0
    block_size: int = BLOCK


def all_series(room: StepRoom) -> dict[str, list[PlannedStep]]:
    """All series by name: answers alone and prompts alone, each with more and more context before, then both together.
    With a host: answers whose attention the host computes, and copies to the host. With a host, the number of answers
    that fill the cache with long contexts is also measured with short ones, so that the difference is the attention.
    """
    near, middle, far = (
        min(tokens, room.context * share // 8) for tokens, share in ((_NEAR, 2), (_MIDDLE, 4), (_FAR, 6))
    )
    full = {max(1, min(_ROWS[-1], room.blocks // blocks_of(far + 1, BLOCK)))} if room.num_cpu_blocks else set[int]()
    few_rows = sorted({*_FEW_ROWS, *full})
    found = {
        "answers": [PlannedStep(rows, near) for rows in sorted({*_ROWS, *full})],
        f"answers behind {middle} tokens": [PlannedStep(rows, middle) for rows in few_rows],
        f"answers behind {far} tokens": [PlannedStep(rows, far) for rows in few_rows],
        "prompts": [PlannedStep(chunks=((0, tokens),)) for tokens in _TOKENS],
        f"prompts behind {middle} tokens": [PlannedStep(chunks=((middle, tokens),)) for tokens in _FEW_TOKENS],
        f"prompts behind {far} tokens": [PlannedStep(chunks=((far, tokens),)) for tokens in _FEW_TOKENS],
        "prompts beside 8 answers": [PlannedStep(8, middle, ((0, tokens),)) for tokens in _FEW_TOKENS],
        "prompts beside 32 answers": [PlannedStep(32, near, ((0, tokens),)) for tokens in _FEW_TOKENS],
    }
    if room.num_cpu_blocks:
        for tokens in dict.fromkeys((near, middle, far)):
            found[f"the host's answers behind {tokens} tokens"] = [
                PlannedStep(0, tokens, host_rows=rows) for rows in _FEW_ROWS
            ]
        found[_COPIES] = [PlannedStep(1, near, copied=blocks) for blocks in _COPIED]
    return {name: [step for step in steps if step.fits(*room)] for name, steps in found.items()}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One planned step of a series: the seconds of each run, and those in which the host computed attention."""

    series: str
    step: PlannedStep
    seconds: Seconds
    host_seconds: Seconds = (0.0,)

    @property
    def median_s(self) -> float:
        return median(self.seconds)


Ask = Callable[[PlannedStep], Awaitable[tuple[Seconds, Seconds] | None]]


async def measure(
    room: StepRoom, longest_s: float, ask: Ask, on_step: Callable[[MeasuredStep], None] = lambda _: None
) -> list[MeasuredStep]:
    """Measure all series. `ask` runs a step a few times and returns its seconds and the host's, or None if the step
    does not fit. A series ends after a step that takes more than `longest_s`.
    """
    found = []
    for name, steps in all_series(room).items():
        for step in steps:
            took = await ask(step)
            if took is None:
                break
            found.append(MeasuredStep(name, step, *took))
            on_step(found[-1])
            if found[-1].median_s > longest_s:
                break
    return found


@dataclass(frozen=True, slots=True)
class StepFit:
    """A pool's step time, its host's times if the host holds part of the cache, and the steps that were fitted."""

    time: StepTime
    measured: Sequence[MeasuredStep]
    host: HostTime | None = None

    @classmethod
    def of(cls, measured: Sequence[MeasuredStep], layers: int = 1) -> StepFit:
        """Fit the steps, rounded to the digits that are written, so that the proof uses what is written. `layers`: the
        model's. Raises ValueError if there are no steps.
        """
        time = StepTime.fit((one.step.load, one.median_s) for one in measured if not one.step.asks_host)
        attention = [(one.step.host_load, median(one.host_seconds)) for one in measured if one.step.host_rows]
        copying = [one for one in measured if one.series == _COPIES]
        copies = [(one.step.copied_tokens, one.median_s - copying[0].median_s) for one in copying]
        host = HostTime.fit(attention, copies, layers) if attention else None
        return cls(StepTime(*_written(time)), measured, None if host is None else HostTime(*_written(host)))

    def seconds(self, step: PlannedStep) -> float:
        """The predicted seconds of a step."""
        return step.seconds(self.time, self.host)

    @property
    def kv_token_s(self) -> float:
        """Seconds of the accelerator's attention per token read, from steps with equally many answers. Unlike that of
        `time`, it excludes other costs per row, such as sampling.
        """
        groups: dict[int, list[tuple[float, float]]] = {}
        for one in self.measured:
            if one.step.rows and not (one.step.chunks or one.step.asks_host):
                groups.setdefault(one.step.rows, []).append((one.step.load.kv_tokens, one.median_s))
        shared = above = 0.0
        for group in groups.values():
            tokens, seconds = (np.array(values) - np.mean(values) for values in zip(*group, strict=True))
            shared, above = shared + float(tokens @ tokens), above + float(tokens @ seconds)
        return max(0.0, above / shared) if shared else self.time.kv_token_s

    @property
    def errors(self) -> list[float]:
        """For each step: predicted over measured seconds, minus 1."""
        return [self.seconds(one.step) / one.median_s - 1 for one in self.measured]

    @property
    def median_error(self) -> float:
        return median(map(abs, self.errors))

    @property
    def worst_error(self) -> float:
        return max(map(abs, self.errors))

    @property
    def noise(self) -> float:
        """The spread of equal steps: the median of (slowest - fastest) / median."""
        return median((max(one.seconds) - min(one.seconds)) / one.median_s for one in self.measured)

    def settings(self) -> dict[str, dict[str, float]]:
        """The settings of a pool in the config."""
        found = {"step_time": asdict(self.time)}
        return found if self.host is None else {**found, "host_time": asdict(self.host)}

    def check(self, pool: str, tpot_s: float) -> None:
        """Raises CalibrationFailed if no promise can be based on this fit."""
        lone = next((one for one in self.measured if one.step.rows == 1), None)
        if lone is not None and lone.median_s > tpot_s:
            raise CalibrationFailed(
                f"the {pool} pool takes {lone.median_s:.3g} s for one token of one answer, but tpot_s is "
                f"{tpot_s:g} s: no answer could be admitted; increase tpot_s"
            )
        if len(self.measured) < _FEWEST:
            raise CalibrationFailed(
                f"only {len(self.measured)} steps of the {pool} pool fit into its cache and the time that a step "
                f"may take; {_FEWEST} are needed: increase its blocks, or ttft_s and tpot_s"
            )
        if self.median_error > _WORST_MEDIAN:
            raise CalibrationFailed(
                f"the steps of the {pool} pool do not fit the formula: half of the predictions are off by more than "
                f"{self.median_error:.0%} (equal steps differ by {self.noise:.0%}). Calibrate when traffic is low"
            )


def _written(times: StepTime | HostTime) -> Iterator[Any]:
    return (type(value)(f"{value:.{_DIGITS}g}") for value in astuple(times))
