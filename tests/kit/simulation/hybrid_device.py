"""An accelerator and its host, layer by layer: when a step ends whose attention both of them compute. Pure.

Two machines, each doing one thing at a time in the order in which it comes. The accelerator goes through the stages of
a step: what lies between two layers' attention, and its own attention. The host computes the attention of one batch, in
one layer, after the other. Nothing here knows the formulas by which a schedule plans (NEO's and APEX's): how long the
first layer takes that nothing hides, and the last one that hides nothing, comes out of the events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from deployments.generation.scheduler.step import ComputeSeconds
from deployments.generation.scheduler.step_time import HostTime, StepLoad


class StageTimes(Protocol):
    """Of a step on the accelerator, over all layers."""

    def linear_s(self, load: StepLoad) -> float: ...
    def attention_s(self, load: StepLoad) -> float: ...


class SubBatch(NamedTuple):
    """What goes through the layers together: `all` of it has linear work, of which the accelerator attends `own`, and
    the host `rows` rows, which read `kv_tokens` tokens.
    """

    all: StepLoad = StepLoad()
    own: StepLoad = StepLoad()
    rows: int = 0
    kv_tokens: int = 0

    def with_piece(self, start: int, tokens: int, *, on_host: bool) -> SubBatch:
        """And a chunk. The accelerator attends it, unless it is one token whose cache the host has."""
        every = self.all.with_piece(start, tokens)
        if on_host and tokens == 1:
            return self._replace(all=every, rows=self.rows + 1, kv_tokens=self.kv_tokens + start + 1)
        return self._replace(all=every, own=self.own.with_piece(start, tokens))


class HybridWork(NamedTuple):
    """One step, see `step.Work`. `parking`: numbers of rows that park, and the tokens that these read. `copied`:
    tokens whose keys and values go from one memory to the other before the step.
    """

    first: SubBatch = SubBatch()
    second: SubBatch = SubBatch()
    parking: Sequence[tuple[int, int]] = ()
    called_off: Sequence[int] = ()
    joins: bool = False
    copied: int = 0


class HybridStep(NamedTuple):
    """What came of it: seconds that it took, rows whose token is there, and how long each side computed."""

    seconds: float
    arrived: Sequence[int]
    compute_s: ComputeSeconds


@dataclass(slots=True)
class _Parked:
    """A row whose attention in `layer` has ended at `ready`. It came there in the step of this number."""

    layer: int
    kv_tokens: int
    ready: float
    step: int


@dataclass(slots=True)
class HybridDevice:
    """`opening`: of a layer's linear work, the share that comes before its attention. The rest comes behind it, joined
    to what the next layer has before its own.
    """

    times: StageTimes
    host: HostTime
    opening: float = 0.25
    _parked: dict[int, _Parked] = field(default_factory=dict)
    _jobs: list[tuple[float, float]] = field(default_factory=list)  # of the host, that may reach into a later step
    _steps: int = 0
    _slow: float = 1.0

    def step(self, now: float, work: HybridWork, slow: float = 1.0) -> HybridStep:
        """Runs it, `slow` times as long as it should take. With nothing but parked rows it waits for the first
        attention that ends.
        """
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
                attention_s = slow * self.times.attention_s(batch.own) / layers
                clock, computed_s = clock + attention_s, computed_s + attention_s
        for number in arrived:
            del self._parked[number]
        return HybridStep(clock - now, arrived, ComputeSeconds(computed_s, self._worked(now, clock)))

    def _begin(self, now: float, work: HybridWork) -> float:
        """When the first stage begins."""
        for number in work.called_off:
            self._parked.pop(number, None)
        self._steps += 1
        begins = now + self._slow * self.host.copy_token_s * work.copied
        if self._parked and work.joins and not work.parking and work[:2] == (SubBatch(), SubBatch()):
            return max(begins, min(one.ready for one in self._parked.values()))
        return begins

    def _guests(self, clock: float, stage: int, work: HybridWork) -> Sequence[tuple[int, int]]:
        """The parked rows that go through this stage, and the tokens that they read."""
        if stage == 0:
            return work.parking
        if not work.joins:
            return []
        here = ((number, one) for number, one in self._parked.items() if one.layer == stage - 1)
        return [(number, one.kv_tokens) for number, one in here if one.step < self._steps and one.ready <= clock]

    def _attend(self, clock: float, rows: int, kv_tokens: int) -> float:
        """When the host has computed the attention of these in one layer, behind all that it was asked for before."""
        began = max(clock, self._jobs[-1][1]) if self._jobs else clock
        seconds = self._slow * self.host.seconds(rows, kv_tokens) / self.host.layers
        self._jobs.append((began, began + seconds))
        return self._jobs[-1][1]

    def _worked(self, since: float, now: float) -> float:
        """Seconds that the host worked from then to now; what has ended by now is forgotten."""
        seconds = sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in self._jobs)
        self._jobs = [job for job in self._jobs if job[1] > now]
        return seconds
