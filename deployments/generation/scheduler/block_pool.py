"""The allocation of a cache's blocks to answers. Pure.

A block holds the keys and values of `block_size` tokens of one answer, in every layer. All blocks are allocated once,
at the start. An answer takes more blocks as it grows, and returns all at its end. Several answers to one prompt share
the blocks that the prompt fills. A block that is still being written is never shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

# Tokens of a block: large enough to be read at full bandwidth; each sequence wastes half a block on average.
# `paged_attention.block_size_for` gives some devices larger ones. Those of a host and its accelerator are this large.
BLOCK = 128


class NoBlocks(Exception):
    """Too few blocks are free."""


class Blocks:
    """The free and the used blocks of a cache, by number."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count, self.block_size = count, block_size
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count  # how many tables a block is in

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int | None:
        """The block that will be taken next. None if all are taken."""
        return self._free[-1] if self._free else None

    def grow(self, table: list[int], tokens: int) -> None:
        """Add blocks to a sequence's table until it holds `tokens` tokens. Raises NoBlocks, and adds none, if too few
        are free.
        """
        missing = blocks_of(tokens, self.block_size) - len(table)
        if missing > len(self._free):
            raise NoBlocks(f"{missing} blocks are wanted, {len(self._free)} are free")
        for _ in range(missing):
            block = self._free.pop()
            self._holders[block] = 1
            table.append(block)

    def share(self, table: list[int], tokens: int) -> list[int]:
        """A new table that shares the blocks which the first `tokens` tokens of `table` fill."""
        shared = table[: tokens // self.block_size]
        for block in shared:
            self._holders[block] += 1
        return shared

    def hold(self, tables: Sequence[list[int]]) -> dict[int, int]:
        """Take blocks for another cache's tables, shared in the same way. Returns {its block: this cache's block}.

        Raises NoBlocks.
        """
        held = dict.fromkeys(chain.from_iterable(tables))
        if len(held) > len(self._free):
            raise NoBlocks(f"{len(held)} blocks are wanted, {len(self._free)} are free")
        ours = {block: self._free.pop() for block in held}
        for block in chain.from_iterable(tables):
            self._holders[ours[block]] += 1
        return ours

    def give_back(self, table: list[int]) -> None:
        """Return all blocks of a sequence, and empty its table. Blocks that other tables share stay in use."""
        for block in reversed(table):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
        table.clear()


def blocks_of(tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold `tokens` tokens."""
    return -(-tokens // block_size)
