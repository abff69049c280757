"""What a step computes of one sequence, and who computes it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deployments.generation.scheduling.step_time import StepLoad

Logits = npt.NDArray[np.float32]
Copies = Sequence[tuple[int, int]]  # (from, to): blocks of the cache


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens `ids`, int32 [tokens], of a sequence, the first of them at position `start`; all before are in the
    cache. `table` has the sequence's blocks, with room for these. `wanted`: the next token's logits are asked for.
    """

    ids: npt.NDArray[np.int32]
    start: int
    table: Sequence[int]
    wanted: bool = True

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class Steps(Protocol):
    """Computes steps: a model, or an emulated device. Called in the engine's thread."""

    def step(self, chunks: Sequence[Chunk], copies: Copies = ()) -> Logits:
        """Copy blocks of the cache, then put the chunks' tokens into it, no two of one sequence. Returns [chunks that
        are wanted, vocabulary]: the logits of each one's next token, valid until the next step.
        """


def load_of(chunks: Sequence[Chunk]) -> StepLoad:
    """What a step with these chunks has to compute: a chunk of one token continues an answer."""
    load = StepLoad()
    for chunk in chunks:
        load = load.with_piece(chunk.start, len(chunk.ids))
    return load
