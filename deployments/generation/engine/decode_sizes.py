"""The sizes for which a step of generation is recorded as a CUDA graph, and how a step fills a size's inputs. Pure.

Only steps that get each answer one token more are recorded. A step takes the smallest size that holds it. The rows that
it leaves free repeat the row with the fewest tokens: they write the same numbers to the same place once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.generation.scheduler.block_pool import blocks_of
from deployments.generation.scheduler.work import Chunk

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS, _TIMES = 1024, 4  # of the longest row in the smallest sizes, and how often more in the next ones

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """`rows`, each with at most so many `blocks` of `block_size` tokens."""

    rows: int
    blocks: int
    block_size: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """How many numbers of the inputs are ids, positions and block tables."""
        return self.rows, self.rows, self.rows * self.blocks

    @property
    def tokens(self) -> int:
        """The most tokens in the cache of all rows."""
        return self.rows * self.blocks * self.block_size

    def fill(self, inputs: Ints, chunks: Sequence[Chunk]) -> None:
        """Write chunks of one token into `inputs`, int64 [sum of `parts`]. A table ends with repetitions of its first
        block.
        """
        ids, positions, tables = np.split(inputs, np.cumsum(self.parts)[:-1])
        tables = tables.reshape(self.rows, self.blocks)
        for row, chunk in enumerate(chunks):
            count = blocks_of(chunk.end, self.block_size)
            ids[row], positions[row] = chunk.ids[0], chunk.start
            tables[row, :count], tables[row, count:] = chunk.table[:count], chunk.table[0]
        fewest = positions[: len(chunks)].argmin()
        for part in (ids, positions, tables):
            part[len(chunks) :] = part[fewest]


def sizes(context: int, blocks: int, block_size: int) -> Iterator[tuple[DecodeSize, list[list[Chunk]]]]:
    """Each size for a model with such a `context` and a cache of so many blocks, in ascending order of blocks and then
    rows; with the chunks of two steps on which to try it: of those that take it the largest, and about the smallest.
    """
    most, before = min(blocks_of(context, block_size), blocks), 0
    while before < most:
        width = min(most, _TIMES * before or blocks_of(_TOKENS, block_size))
        fewer = 0
        for rows in (rows for rows in ROWS if rows <= blocks):
            steps = ((rows, width), (fewer + 1, before + 1))
            size = DecodeSize(rows, width, block_size)
            yield size, [_step(count, most_blocks, blocks, block_size) for count, most_blocks in steps]
            fewer = rows
        before = width


def _step(rows: int, most: int, blocks: int, block_size: int) -> list[Chunk]:
    """A step of ragged rows with at most `most` blocks each, of a cache's `blocks`. Rows write to different blocks."""
    chunks = []
    for row, end in enumerate(np.linspace(most * block_size, 1, rows).astype(int).tolist()):
        before = [(row + 1 + at) % blocks for at in range(blocks_of(end, block_size) - 1)]
        chunks.append(Chunk(np.full(1, row, np.int32), end - 1, [*before, row]))
    return chunks


def smallest(some: Sequence[DecodeSize], chunks: Sequence[Chunk]) -> int | None:
    """The index of the first size that holds a step of these chunks. None: it is too large, or there are others than
    chunks of one token whose next one is wanted.
    """
    if any(len(chunk.ids) > 1 or not chunk.wanted for chunk in chunks):
        return None
    rows, longest = len(chunks), max((chunk.end for chunk in chunks), default=0)
    found = (at for at, size in enumerate(some) if rows <= size.rows and longest <= size.blocks * size.block_size)
    return next(found, None)
