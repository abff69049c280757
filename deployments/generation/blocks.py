"""Which blocks of the cache are whose. Pure.

A block holds the keys and values of `BLOCK` tokens of one sequence, in every layer. All blocks are made once, at the
start; a sequence takes more as it grows and gives all back at its end.
"""

from __future__ import annotations

BLOCK = 128  # tokens: as quick to read as one piece of memory, and half a block is lost to each sequence


class NoBlocks(Exception):
    """Too few blocks are free."""


class Blocks:
    """Free and taken ones, by number."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, table: list[int], tokens: int) -> None:
        """Add blocks to a sequence's table until it holds so many tokens; none where not all are there.

        Raises NoBlocks.
        """
        missing = blocks_of(tokens) - len(table)
        if missing > len(self._free):
            raise NoBlocks(f"{missing} blocks are wanted, {len(self._free)} are free")
        table.extend(self._free.pop() for _ in range(missing))

    def give_back(self, table: list[int]) -> None:
        """All of a sequence's blocks; its table is empty afterwards."""
        self._free += reversed(table)
        table.clear()


def blocks_of(tokens: int) -> int:
    """How many hold so many tokens."""
    return -(-tokens // BLOCK)
