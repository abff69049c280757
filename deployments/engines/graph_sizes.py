"""The sizes for which a model's pass is recorded as a CUDA graph, and how a pass fills a size's inputs. Pure.

A graph has fixed shapes. A pass takes the smallest size that holds it. The rows that it leaves free become queries of
their own, of padding, and the slots that are then left become empty queries: both are cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.engines.micro_batches import Lengths

# In tokens. Larger passes last longer than their kernels' launches on each card known.
TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_TYPICAL = 128  # tokens; the queries of a batch on which a graph is tried have at most as many

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GraphSize:
    """`tokens` of a pass, its queries and padding together. `longest`: tokens of the longest query of the model."""

    tokens: int
    longest: int

    @property
    def queries(self) -> int:
        """The most queries. Attention's kernel has a block for each slot, so large passes of tiny queries do without a
        graph.
        """
        return max(min(self.tokens // 4, 32), self.tokens // 16)

    @property
    def slots(self) -> int:
        """Queries and those of padding, which are no longer than `longest` either."""
        return self.queries - (-self.tokens // self.longest)

    @property
    def parts(self) -> tuple[int, int, int]:
        """How many numbers of the inputs are ids, positions and bounds."""
        return self.tokens, self.tokens, self.slots + 1

    def mixed(self) -> Lengths:
        """Lengths of a batch of long and short queries that takes most of the tokens."""
        pairs, short = min(self.tokens // self.longest, self.queries // 2), -(-self.longest // 4)
        return np.tile(np.array([self.longest - short, short], np.int32), pairs)

    def fill(self, inputs: Ints, ids: Ints, lengths: Lengths) -> None:
        """Write a pass into `inputs`, int32 [sum of `parts`]: the id of each token, its position in its query, and
        where each query begins, with the end. Each row of padding has the position 0.
        """
        all_ids, positions, bounds = np.split(inputs, np.cumsum(self.parts)[:-1])
        ends = np.cumsum(lengths)
        all_ids[: len(ids)], all_ids[len(ids) :] = ids, 0
        positions[: len(ids)] = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
        positions[len(ids) :] = 0
        bounds[0], bounds[1 : len(lengths) + 1] = 0, ends
        padding = bounds[len(lengths) + 1 :]
        padding[:] = np.minimum(len(ids) + self.longest * np.arange(1, len(padding) + 1), self.tokens)


def sizes(longest: int) -> Iterator[tuple[GraphSize, Lengths]]:
    """Each size with lengths of a batch on which to time it: the fewest tokens for which a pass takes it."""
    before = 0
    for tokens in TOKENS:
        most = min(_TYPICAL, longest)
        whole, rest = divmod(before + 1, most)
        yield GraphSize(tokens, min(tokens, longest)), np.array([most] * whole + [rest] * (rest > 0), np.int32)
        before = tokens


def smallest(some: Sequence[GraphSize], tokens: int, queries: int) -> int | None:
    """The index of the smallest size, of those in ascending order, for such a pass. None: it is too large."""
    return next((at for at, size in enumerate(some) if tokens <= size.tokens and queries <= size.queries), None)
