"""What an engine is asked to compute in a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.generation.scheduler.step_time import StepLoad


class Copy(NamedTuple):
    """A copy of one block, in all layers, before a step: from block `source` of the accelerator's cache, or of the
    host's if `from_host`, to block `target` of the accelerator's cache, or of the host's if `to_host`.
    """

    source: int
    target: int
    from_host: bool = False
    to_host: bool = False


class Scoring(NamedTuple):
    """Which log probabilities to return with a chunk of a prompt. `following`: int32, the prompt's tokens after each of
    the chunk's; at the prompt's end one fewer. `alternatives`: how many of the likeliest tokens to report beside each.
    """

    following: npt.NDArray[np.int32]
    alternatives: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a sequence to compute.

    - `ids`: int32 [tokens]; the first is at position `start`. All tokens before it are in the cache.
    - `table`: the sequence's blocks, with room for these tokens. If `on_host`, they are the host cache's.
    - `wanted`: return the logits of the next token.
    - `scoring`: return log probabilities of the prompt's tokens.
    """

    ids: npt.NDArray[np.int32]
    start: int
    table: Sequence[int]
    wanted: bool = True
    on_host: bool = False
    scoring: Scoring | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def first_row(self) -> int:
        """The index of the first token whose logits are needed. Those of all later tokens are needed, too."""
        return 0 if self.scoring is not None else len(self.ids) - self.wanted


class Work(NamedTuple):
    """The work of one step: first `copies`, in order, then `chunks`, at most one per sequence. The other fields are for
    a host that holds a part of the cache.

    - `second`: host rows, in chunks of one token. They take turns with `chunks` at the accelerator, layer by layer
      (NEO, arXiv:2411.01142, Section 3.2).
    - `parking`: host rows that park in this step, each under a number. The host computes their attention in one layer,
      and nobody waits for it.
    - `joins`: parked rows whose attention is done join this step, up to the attention of the next layer, where they
      park again (APEX, arXiv:2506.03296, Section 3.3).
    - `called_off`: numbers of parked rows that are not wanted any more. This step may reuse their blocks.
    """

    chunks: Sequence[Chunk]
    copies: Sequence[Copy] = ()
    second: Sequence[Chunk] = ()
    parking: Sequence[tuple[int, Chunk]] = ()
    called_off: Sequence[int] = ()
    joins: bool = False


class ComputeSeconds(NamedTuple):
    """How long both sides computed in a step: the accelerator its layers, without waits for the host and without copies
    between the caches; the host its attention. 0 if it is not measured: both without a host, the first on an NPU.
    """

    accelerator_s: float = 0.0
    host_s: float = 0.0


UNTIMED = ComputeSeconds()


def load_of(chunks: Sequence[Chunk], copy_token_s: float = 0.0) -> StepLoad:
    """The load of a step with these chunks. A chunk of one token counts as a row. `copy_token_s`: see `HostTime`."""
    load = StepLoad()
    for chunk in chunks:
        scored = chunk.scoring is not None
        load = load.with_piece(chunk.start, len(chunk.ids), copy_token_s * chunk.on_host, scored=scored)
    return load
