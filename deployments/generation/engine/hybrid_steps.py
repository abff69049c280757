"""Steps of an accelerator whose host computes the attention of some rows: who goes through which layer when. Pure.

A step's tokens are one *batch* or two. A batch goes through the layers, each a half at a time: `begin` computes what
comes before the attention and starts it, `end` takes what it gave and computes what comes behind. Between the two
another may use the accelerator. There are two ways to hide the host's attention there:

- Two batches take turns (NEO, arXiv:2411.01142, Section 3.2): while the host computes for one, the accelerator computes
  the other. The accelerator's order is begin 0, begin 1, end 0, begin 0, end 1, begin 1, ...
- A row *parks* in a layer while the host computes its attention there, and nobody waits for it (APEX, arXiv:2506.03296,
  Section 3.3, asynchronous overlap). It *joins* the first batch of a later step: from behind the attention of this
  layer to that of the next one, where it parks again. Behind the last layer it *arrives*: its token takes as many
  steps as the model has layers, or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from deployments.generation.scheduler.step import Chunk, Computed, ComputeSeconds, Copy, DeviceLogits, Logits, Work


class Batch(Protocol):
    """Tokens of some chunks on their way through the layers."""

    def keep(self, rows: Sequence[int]) -> None:
        """Of a parked one only these rows, by their places in it, go on. Of none, its attention need not be computed.
        What the host still computes for the others may read any block, and writes none.
        """


B = TypeVar("B", bound=Batch)


class Stages(Protocol[B]):
    """A model on an accelerator and its host, half a layer at a time. Called in the engine's thread."""

    @property
    def layers(self) -> int: ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Before anything else of a step."""

    def batch(self, chunks: Sequence[Chunk]) -> B:
        """Of at least one chunk, their tokens embedded."""
        ...

    def begin(self, layer: int, batches: Sequence[B]) -> None:
        """Of all together: up to query, key and value; key and value into their cache; the attention is started."""

    def end(self, layer: int, batches: Sequence[B]) -> None:
        """Of all together: what comes behind the attention, which is waited for. Raises what the host's thread did."""

    def ready(self, batches: Sequence[B]) -> Sequence[B]:
        """Those for which the host has computed the attention when the accelerator has done all that was begun."""
        ...

    def wait(self, batches: Sequence[B]) -> None:
        """Until the first of them is ready."""

    def logits(self, batches: Sequence[B]) -> Logits | DeviceLogits:
        """Behind the last layer, float32 [wanted chunks of each in turn, vocabulary]."""
        ...

    def compute_s(self) -> ComputeSeconds:
        """Since the start, up to now. It waits for what the accelerator has begun."""
        ...


@dataclass(slots=True, eq=False)
class _Parked(Generic[B]):
    """Rows that parked in the same step. They stay together."""

    numbers: list[int]
    batch: B
    layer: int = 0
    since: int = 0  # the step in which the attention of this layer was begun


class HybridSteps(Generic[B]):
    """`step.Steps` of such stages. After a step that failed nothing is parked any more: rows that have not arrived are
    to be computed anew.
    """

    def __init__(self, stages: Stages[B]) -> None:
        self._stages = stages
        self._parked: list[_Parked[B]] = []
        self._arrived: list[_Parked[B]] = []
        self._count = 0

    def step(self, work: Work) -> Computed:
        """See `step.Steps`. The token of a row that parks is always wanted."""
        self._count += 1
        self._arrived = []
        before = self._stages.compute_s()
        try:
            self._call_off(work.called_off)
            logits = self._compute(work)
        except BaseException:
            self._call_off([number for parked in self._parked for number in parked.numbers])
            raise
        arrived = [number for parked in self._arrived for number in parked.numbers]
        compute_s = (now - then for now, then in zip(self._stages.compute_s(), before, strict=True))
        return Computed(logits, arrived, ComputeSeconds(*compute_s))

    def _compute(self, work: Work) -> Logits | DeviceLogits:
        stages = self._stages
        stages.copy(work.copies)
        if work.joins and self._parked and not (work.chunks or work.second or work.parking):
            stages.wait([parked.batch for parked in self._parked])
        first, second = ([stages.batch(chunks)] if chunks else [] for chunks in (work.chunks, work.second))
        walks = [self._walk(first, work.parking, joins=work.joins), self._walk(second)]
        while walks:
            walks = [walk for walk in walks if next(walk, False)]
        return stages.logits([*first, *second, *(parked.batch for parked in self._arrived)])

    def _walk(
        self, batch: Sequence[B], parking: Sequence[tuple[int, Chunk]] = (), *, joins: bool = False
    ) -> Iterator[bool]:
        """The way of one batch, or none, and of those whom it takes along; yields where another may go on."""
        beside: list[_Parked[B]] = []
        if parking:
            numbers, chunks = zip(*parking, strict=True)
            beside.append(_Parked(list(numbers), self._stages.batch(chunks)))
        for layer in range(self._stages.layers):
            if together := [*batch, *(parked.batch for parked in beside)]:
                self._stages.begin(layer, together)
            for parked in beside:
                parked.layer, parked.since = layer, self._count
            self._parked += beside
            yield True
            beside = self._joining(layer) if joins else []
            if together := [*batch, *(parked.batch for parked in beside)]:
                self._stages.end(layer, together)
        self._arrived += beside

    def _joining(self, layer: int) -> list[_Parked[B]]:
        """Those parked in this layer that can go on; they are parked no more."""
        here = {parked.batch: parked for parked in self._parked if parked.layer == layer and parked.since < self._count}
        joining = [here[batch] for batch in self._stages.ready(list(here))] if here else []
        self._parked = [parked for parked in self._parked if parked not in joining]
        return joining

    def _call_off(self, numbers: Sequence[int]) -> None:
        gone = set(numbers)
        for parked in self._parked:
            rows = [row for row, number in enumerate(parked.numbers) if number not in gone]
            if len(rows) < len(parked.numbers):
                parked.batch.keep(rows)
                parked.numbers = [parked.numbers[row] for row in rows]
        self._parked = [parked for parked in self._parked if parked.numbers]
