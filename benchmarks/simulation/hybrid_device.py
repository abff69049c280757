"""Simulates an accelerator and its host layer by layer, to find when a step ends if both compute attention. Pure.

Each of the two machines does one thing at a time, in order of arrival. The accelerator runs the stages of a step: the
work between two layers' attention, and its own attention. The host computes the attention of one batch in one layer
after another. The formulas by which the scheduler plans (NEO's and APEX's) are not used: the effects of the first
layer, which nothing hides, and of the last one, which hides nothing, follow from the events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from deployments.generation.scheduler.step_time import HostTime, StepLoad
from deployments.generation.scheduler.work import ComputeSeconds


class StageTimes(Protocol):
    """Stage times of a step on the accelerator, summed over all layers."""

    def linear_s(self, load: StepLoad) -> float: ...
    def attention_s(self, load: StepLoad) -> float: ...


class SubBatch(NamedTuple):
    """A batch that goes through the layers together. `all`: its linear work. `own`: the part whose attention is on the
    accelerator. The host attends `rows` rows, which read `kv_tokens` tokens. `copied`: tokens whose keys and values go
    from one memory to the other, because the accelerator computes prompts whose cache is on the host.
    """

    all: StepLoad = StepLoad()
    own: StepLoad = StepLoad()
    rows: int = 0
    kv_tokens: int = 0
    copied: int = 0

    def with_piece(self, start: int, tokens: int, *, on_host: bool) -> SubBatch:
        """Add a chunk. The accelerator computes its attention, unless it is one token with its cache on the host."""
        every = self.all.with_piece(start, tokens)
        if on_host and tokens == 1:
            return self._replace(all=every, rows=self.rows + 1, kv_tokens=self.kv_tokens + start + 1)
        copied = self.copied + (start + tokens if on_host else 0)
        return self._replace(all=every, own=self.own.with_piece(start, tokens), copied=copied)


class HybridWork(NamedTuple):
    """One step; see `work.Work`. `parking`: (number, tokens to read) of rows that park. `copied`: tokens whose keys and
    values are copied between the memories before the step.
    """

    first: SubBatch = SubBatch()
    second: SubBatch = SubBatch()
    parking: Sequence[tuple[int, int]] = ()
    called_off: Sequence[int] = ()
    joins: bool = False
    copied: int = 0


class HybridStep(NamedTuple):
    """The result of a step: its seconds, the rows that have their token, and how long each side computed."""

    seconds: float
    arrived: Sequence[int]
    compute_s: ComputeSeconds


@dataclass(slots=True)
class _Parked:
    """A parked row whose attention in `layer` ends at `ready`. `step`: the number of the step that parked it there."""

    layer: int
    kv_tokens: int
    ready: float
    step: int


@dataclass(slots=True)
class HybridDevice:
    """`opening`: the share of a layer's linear work that comes before its attention. The rest comes after it, together
    with the opening of the next layer.
    """

    times: StageTimes
    host: HostTime
    opening: float = 0.25
    _parked: dict[int, _Parked] = field(default_factory=dict)
    _jobs: list[tuple[float, float]] = field(default_factory=list)  # of the host, that may reach into a later step
    _steps: int = 0
    _slow: float = 1.0

    def step(self, now: float, work: HybridWork, slow: float = 1.0) -> HybridStep:
        """Run a step in `slow` times its time. With only parked rows, wait for the first attention to end."""
        self._slow = slow
        clock = self._begin(now, work)
        attended = [clock, clock]  # by the host: of each batch in the layer before
        arrived: list[int] = []
        layers, computed_s = self.host.layers, 0.0
        for stage in range(layers + 1):
            share = (stage > 0) * (1 - self.opening) + (stage < layers) * self.opening
            for which, batch in enumerate((work.first, work.second)):
                clock = max(clock, attended[which])
                guests = [] if which else self._guests(clock, stage, work)
                load = batch.all
                for _, kv_tokens in guests:
                    load = load.with_row(kv_tokens)
                if load == StepLoad():
                    continue
                linear_s = slow * share * self.times.linear_s(load) / layers
                clock, computed_s = clock + linear_s, computed_s + linear_s
                if stage == layers:
                    arrived += [number for number, _ in guests]
                    continue
                if batch.rows:
                    attended[which] = self._attend(clock, batch.rows, batch.kv_tokens)
                if guests:
                    ready = self._attend(clock, len(guests), sum(kv_tokens for _, kv_tokens in guests))
                    self._parked |= {number: _Parked(stage, kv, ready, self._steps) for number, kv in guests}
                copied_s = self.host.copy_token_s * batch.copied
                attention_s = slow * (self.times.attention_s(batch.own) + copied_s) / layers
                clock, computed_s = clock + attention_s, computed_s + attention_s
        for number in arrived:
            del self._parked[number]
        return HybridStep(clock - now, arrived, ComputeSeconds(computed_s, self._worked(now, clock)))

    def _begin(self, now: float, work: HybridWork) -> float:
        """The time at which the first stage begins."""
        for number in work.called_off:
            self._parked.pop(number, None)
        self._steps += 1
        begins = now + self._slow * self.host.copy_token_s * work.copied
        if self._parked and work.joins and not work.parking and work[:2] == (SubBatch(), SubBatch()):
            return max(begins, min(one.ready for one in self._parked.values()))
        return begins

    def _guests(self, clock: float, stage: int, work: HybridWork) -> Sequence[tuple[int, int]]:
        """(number, tokens to read) of the parked rows that go through this stage."""
        if stage == 0:
            return work.parking
        if not work.joins:
            return []
        here = ((number, one) for number, one in self._parked.items() if one.layer == stage - 1)
        return [(number, one.kv_tokens) for number, one in here if one.step < self._steps and one.ready <= clock]

    def _attend(self, clock: float, rows: int, kv_tokens: int) -> float:
        """When the host ends the attention of these rows in one layer, after all its earlier work."""
        began = max(clock, self._jobs[-1][1]) if self._jobs else clock
        seconds = self._slow * self.host.seconds(rows, kv_tokens) / self.host.layers
        self._jobs.append((began, began + seconds))
        return self._jobs[-1][1]

    def _worked(self, since: float, now: float) -> float:
        """Seconds that the host worked from `since` to `now`. Forgets jobs that have ended."""
        seconds = sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in self._jobs)
        self._jobs = [job for job in self._jobs if job[1] > now]
        return seconds
