"""Which blocks of the cache are whose. Pure.

A block holds the keys and values of `BLOCK` tokens of one answer, in every layer. All blocks are made once, at the
start; an answer takes more as it grows and gives all back at its end. Several answers to one prompt share the blocks
that the prompt fills; a block that is still written is never shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

BLOCK = 128  # tokens: as quick to read as one piece of memory, and half a block is lost to each sequence


class NoBlocks(Exception):
    """Too few blocks are free."""


class Blocks:
    """Free and taken ones, by number."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count  # tables that a block is in

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int | None:
        """The block that is taken next; None where all are taken."""
        return self._free[-1] if self._free else None

    def grow(self, table: list[int], tokens: int) -> None:
        """Add blocks to a sequence's table until it holds so many tokens; none where not all are there.

        Raises NoBlocks.
        """
        missing = blocks_of(tokens) - len(table)
        if missing > len(self._free):
            raise NoBlocks(f"{missing} blocks are wanted, {len(self._free)} are free")
        for _ in range(missing):
            block = self._free.pop()
            self._holders[block] = 1
            table.append(block)

    def share(self, table: list[int], tokens: int) -> list[int]:
        """A second table, with those blocks of the first that its first `tokens` tokens fill."""
        shared = table[: tokens // BLOCK]
        for block in shared:
            self._holders[block] += 1
        return shared

    def hold(self, tables: Sequence[list[int]]) -> dict[int, int]:
        """Blocks for what another cache holds in these tables, shared as they are there: {its block: ours}.

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
        """All of a sequence's blocks; its table is empty afterwards. Those that others hold stay theirs."""
        for block in reversed(table):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
        table.clear()


def blocks_of(tokens: int) -> int:
    """How many hold so many tokens."""
    return -(-tokens // BLOCK)
