"""Which planned steps a calibration measures of a device that generates, and what it makes of their times. Pure.

A series grows. It ends where a step takes longer than steps are allowed to, or where the replica has no room for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from calibration.service.application import CalibrationFailed
from deployments.generation.planned_steps import PlannedStep
from deployments.generation.scheduler.block_pool import blocks_of
from deployments.generation.scheduler.step_time import HostTime, StepTime

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FEW_ROWS = (1, 4, 16, 64, 256)
_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_FEW_TOKENS = (16, 64, 256, 1024)
_COPIED = (0, 2, 8, 32, 128)  # blocks
_COPIES = "blocks to the host and back"
_NEAR, _MIDDLE, _FAR = 64, 1024, 4096  # tokens in the cache, where the model takes so many
_FEWEST = 8  # steps, of which six numbers are to be found
_WORST_MEDIAN = 0.15  # error of a fit that is written; beyond it promises would hold by luck
_DIGITS = 6

Seconds = tuple[float, ...]


class StepRoom(NamedTuple):
    """What fits into a replica's cache, into a step, and into the host's part of the cache. `context`: tokens of a
    prompt and its answer.
    """

    blocks: int
    max_num_batched_tokens: int
    context: int
    num_cpu_blocks: int = 0


def all_series(room: StepRoom) -> dict[str, list[PlannedStep]]:
    """By what they show: answers alone, prompts alone, each behind more and more of a context, and both together; then
    answers whose attention the host computes, and what it takes to get there. With a host as many answers as fill the
    cache with long texts are measured behind short ones, too: so the attention shows in all series alike.
    """
    near, middle, far = (
        min(tokens, room.context * share // 8) for tokens, share in ((_NEAR, 2), (_MIDDLE, 4), (_FAR, 6))
    )
    full = {max(1, min(_ROWS[-1], room.blocks // blocks_of(far + 1)))} if room.num_cpu_blocks else set[int]()
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
    """One planned step of a series; what it took each time, s, and how long the host computed attention in it."""

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
    """All series. `ask` runs a step a few times: what it took, and the host in it; None: it does not fit. No step that
    is longer than one that took more than `longest_s` is asked for.
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
    """A pool's step time, its host's where this holds a part of the cache, and the steps that they were fitted to."""

    time: StepTime
    measured: Sequence[MeasuredStep]
    host: HostTime | None = None

    @classmethod
    def of(cls, measured: Sequence[MeasuredStep], layers: int = 1) -> StepFit:
        """With the digits that are written: what is proven is what is written. `layers`: of the model.

        Raises ValueError for no steps.
        """
        time = StepTime.fit((one.step.load, one.median_s) for one in measured if not one.step.asks_host)
        attention = [(one.step.host_load, median(one.host_seconds)) for one in measured if one.step.host_rows]
        copying = [one for one in measured if one.series == _COPIES]
        copies = [(one.step.copied_tokens, one.median_s - copying[0].median_s) for one in copying]
        host = HostTime.fit(attention, copies, layers) if attention else None
        return cls(StepTime(*_written(time)), measured, None if host is None else HostTime(*_written(host)))

    def seconds(self, step: PlannedStep) -> float:
        """As predicted."""
        return step.seconds(self.time, self.host)

    @property
    def kv_token_s(self) -> float:
        """Of the accelerator's attention alone, for each token that is read: by how much steps with as many answers
        differ. What a row costs besides, as the picking of its token, is not in it; in that of `time` it may be.
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
        """Of each step: predicted over measured, less 1."""
        return [self.seconds(one.step) / one.median_s - 1 for one in self.measured]

    @property
    def median_error(self) -> float:
        return median(map(abs, self.errors))

    @property
    def worst_error(self) -> float:
        return max(map(abs, self.errors))

    @property
    def noise(self) -> float:
        """By how much equal steps differ: the median of (slowest - quickest) / median."""
        return median((max(one.seconds) - min(one.seconds)) / one.median_s for one in self.measured)

    def settings(self) -> dict[str, dict[str, float]]:
        """As of a pool in a config."""
        found = {"step_time": asdict(self.time)}
        return found if self.host is None else {**found, "host_time": asdict(self.host)}

    def check(self, pool: str, tpot_s: float) -> None:
        """Raises CalibrationFailed where nothing can be promised by it."""
        lone = next((one for one in self.measured if one.step.rows == 1), None)
        if lone is not None and lone.median_s > tpot_s:
            raise CalibrationFailed(
                f"the {pool} pool takes {lone.median_s:.3g} s for one token of one answer, and tpot_s promises "
                f"{tpot_s:g} s: no answer can be admitted there"
            )
        if len(self.measured) < _FEWEST:
            raise CalibrationFailed(
                f"only {len(self.measured)} steps of the {pool} pool fit into its cache and into the time that a step "
                f"may take; {_FEWEST} are needed: give it more blocks, or loosen ttft_s and tpot_s"
            )
        if self.median_error > _WORST_MEDIAN:
            raise CalibrationFailed(
                f"the steps of the {pool} pool follow no formula: half of them are predicted wrong by more than "
                f"{self.median_error:.0%} (equal ones differ by {self.noise:.0%}). Calibrate when it is quiet"
            )


def _written(times: StepTime | HostTime) -> Iterator[Any]:
    return (type(value)(f"{value:.{_DIGITS}g}") for value in astuple(times))
