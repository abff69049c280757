"""What a schedule asks of an engine, step by step, and what it gets: the interface between the two. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from deployments.generation.scheduler.step_time import StepLoad
from deployments.generation.text.sampling import Picked, RowSamplers

Logits = npt.NDArray[np.float32]


class DeviceLogits(Protocol):
    """Logits, float32 [rows, vocabulary], that stay on the accelerator: tokens are drawn there, and only they are
    copied to the host. `engine.device_sampling` has the one that there is.
    """

    def pick(self, samplers: Sequence[RowSamplers]) -> list[list[Picked] | None]:
        """Of each row what `sampling.pick` gives of it. `samplers`: one for each row, else ValueError."""
        ...


class Copy(NamedTuple):
    """A block that is to be copied before a step, in all layers: from block `source` of the accelerator's cache, or of
    the host's (`from_host`), to block `target` of the accelerator's or of the host's (`to_host`).
    """

    source: int
    target: int
    from_host: bool = False
    to_host: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens `ids`, int32 [tokens], of a sequence, the first of them at position `start`; all before are in the
    cache. `table` has the sequence's blocks, with room for these, of the host's cache where it is `on_host`. `wanted`:
    the next token's logits are asked for.
    """

    ids: npt.NDArray[np.int32]
    start: int
    table: Sequence[int]
    wanted: bool = True
    on_host: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class Work(NamedTuple):
    """One step: `copies`, in their order, then `chunks`, no two of one sequence. The rest is for a host that holds a
    part of the cache.

    `second`: host rows, chunks of one token, that take turns with `chunks` at the accelerator, layer by layer (NEO,
    arXiv:2411.01142, Section 3.2).
    `parking`: host rows that park in this step, each under a number. The host computes their attention of one layer,
    and nobody waits for it. A later step that `joins` takes along those whose attention is done, up to the attention
    of the next layer, where they are parked again (APEX, arXiv:2506.03296, Section 3.3).
    `called_off`: numbers of parked rows that nobody wants any more; their blocks may be others' in this step.
    """

    chunks: Sequence[Chunk]
    copies: Sequence[Copy] = ()
    second: Sequence[Chunk] = ()
    parking: Sequence[tuple[int, Chunk]] = ()
    called_off: Sequence[int] = ()
    joins: bool = False


class ComputeSeconds(NamedTuple):
    """How long both sides computed in a step: the accelerator the layers, without waiting for the host and without
    copies between the caches; the host attention. 0 where nobody measures it: without a host, and on an NPU the first.
    """

    accelerator_s: float = 0.0
    host_s: float = 0.0


UNTIMED = ComputeSeconds()


class Computed(NamedTuple):
    """What a step gave. `logits`: of the next token, [rows, vocabulary], valid until the next step. The rows are the
    `chunks` that are wanted, then those of `second`, then the parked rows that have `arrived`: their numbers.
    """

    logits: Logits | DeviceLogits
    arrived: Sequence[int] = ()
    compute_s: ComputeSeconds = UNTIMED


class Steps(Protocol):
    """Computes steps: a model, or an emulated device. Called in the engine's thread."""

    def step(self, work: Work) -> Computed:
        """Copy, then compute. With nothing but parked rows that join it waits until one of them can."""


def load_of(chunks: Sequence[Chunk]) -> StepLoad:
    """What a step with these chunks has to compute: a chunk of one token continues an answer."""
    load = StepLoad()
    for chunk in chunks:
        load = load.with_piece(chunk.start, len(chunk.ids))
    return load
