"""Orders the work of a step on an accelerator whose host computes the attention of some rows. Pure.

A step's tokens form one *batch* or two. A batch passes through the layers, half a layer at a time: `begin` computes
what precedes the attention and starts it; `end` takes its result and computes the rest. Between the two, another batch
may use the accelerator. This hides the host's attention in two ways:

- Two batches take turns (NEO, arXiv:2411.01142, Section 3.2): while the host computes for one, the accelerator computes
  the other. The accelerator's order is begin 0, begin 1, end 0, begin 0, end 1, begin 1, ...
- A row *parks* in a layer while the host computes its attention there, and nobody waits for it (APEX, arXiv:2506.03296,
  Section 3.3, asynchronous overlap). It *joins* the first batch of a later step, from after the attention of this layer
  to the attention of the next, where it parks again. After the last layer it *arrives*. Its token takes at least as
  many steps as the model has layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from deployments.generation.engine.steps import Computed, DeviceLogits, Logits
from deployments.generation.scheduler.work import Chunk, ComputeSeconds, Copy, Work
from deployments.generation.text.prompt_scores import PromptScores


class Batch(Protocol):
    """The tokens of some chunks on their way through the layers."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows of a parked batch, by index. Without rows, its attention need not be computed. What the
        host still computes for the others may read any block, but writes none.
        """


B = TypeVar("B", bound=Batch)


class Stages(Protocol[B]):
    """A model on an accelerator and its host, half a layer at a time. Called in the engine's thread."""

    @property
    def layers(self) -> int: ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy blocks. Called before anything else in a step."""

    def batch(self, chunks: Sequence[Chunk]) -> B:
        """A batch of at least one chunk, with its tokens embedded."""
        ...

    def begin(self, layer: int, batches: Sequence[B]) -> None:
        """Compute query, key and value of all batches together, put keys and values into the caches, and start the
        attention.
        """

    def end(self, layer: int, batches: Sequence[B]) -> None:
        """Wait for the attention, and compute the rest of the layer for all batches together. Raises what the host's
        thread raised.
        """

    def ready(self, batches: Sequence[B]) -> Sequence[B]:
        """Wait for what the accelerator has begun. Returns the batches whose attention the host has done by then."""
        ...

    def wait(self, batches: Sequence[B]) -> None:
        """Wait until the first of them is ready."""

    def logits(self, batches: Sequence[B]) -> tuple[Logits | DeviceLogits, Sequence[PromptScores]]:
        """The logits after the last layer, float32 [wanted chunks of each batch in turn, vocabulary], and the scores of
        the chunks with `scoring`.
        """
        ...

    def compute_s(self) -> ComputeSeconds:
        """Computing time since the start. Waits for what the accelerator has begun."""
        ...


@dataclass(slots=True, eq=False)
class _Parked(Generic[B]):
    """Rows that parked in the same step. They stay together."""

    numbers: list[int]
    batch: B
    layer: int = 0
    since: int = 0  # the step in which the attention of this layer was begun


class HybridSteps(Generic[B]):
    """`steps.Steps` on these stages. After a failed step nothing is parked any more: rows that have not arrived must be
    computed again.
    """

    def __init__(self, stages: Stages[B]) -> None:
        self._stages = stages
        self._parked: list[_Parked[B]] = []
        self._arrived: list[_Parked[B]] = []
        self._count = 0

    def step(self, work: Work) -> Computed:
        """See `steps.Steps`. The token of a row that parks is always wanted."""
        self._count += 1
        self._arrived = []
        before = self._stages.compute_s()
        try:
            self._call_off(work.called_off)
            logits, scores = self._compute(work)
        except BaseException:
            self._call_off([number for parked in self._parked for number in parked.numbers])
            raise
        arrived = [number for parked in self._arrived for number in parked.numbers]
        compute_s = (now - then for now, then in zip(self._stages.compute_s(), before, strict=True))
        return Computed(logits, arrived, ComputeSeconds(*compute_s), scores)

    def _compute(self, work: Work) -> tuple[Logits | DeviceLogits, Sequence[PromptScores]]:
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
        """Take a batch, or none, and the parked rows that join it, through the layers. Yields when another batch may
        continue.
        """
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
        """Take out those parked in this layer that can go on."""
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
