"""The allocation of a cache's blocks to answers. Pure.

A block holds the keys and values of `block_size` tokens of one answer, in every layer. All blocks are allocated once,
at the start. An answer takes more blocks as it grows, and returns all at its end. Several answers to one prompt share
the blocks that the prompt fills. A block that is still being written is never shared.

A full block may have a key, which stands for all tokens up to its end (`prefix_keys`). A later answer whose prompt
begins with the same tokens finds it by this key, in use or free. A free block with a key counts as free. It is taken
when no other is left, the least recently used first, and its key is forgotten then.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import chain, takewhile

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
        self._kept: dict[int, None] = {}  # free ones with a key, the least recently used first
        self._holders = [0] * count  # how many tables a block is in
        self._keys: dict[int, bytes] = {}
        self._found: dict[bytes, int] = {}  # the blocks with a key whose contents are computed

    @property
    def free(self) -> int:
        return len(self._free) + len(self._kept)

    def spare(self) -> int | None:
        """A free block that may be overwritten, which stays free; its contents are forgotten. None if all are taken."""
        if not self._free and self._kept:
            self._free.append(self._take())
        return self._free[-1] if self._free else None

    def grow(self, table: list[int], tokens: int) -> None:
        """Add blocks to a sequence's table until it holds `tokens` tokens. Raises NoBlocks, and adds none, if too few
        are free.
        """
        missing = blocks_of(tokens, self.block_size) - len(table)
        self._check(missing)
        for _ in range(missing):
            block = self._take()
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
        self._check(len(held))
        ours = {block: self._take() for block in held}
        for block in chain.from_iterable(tables):
            self._holders[ours[block]] += 1
        return ours

    def give_back(self, table: list[int]) -> None:
        """Return all blocks of a sequence, and empty its table. Blocks that other tables share stay in use."""
        for block in reversed(table):  # so that of those with keys, which need the ones before them, the last go first
            self._holders[block] -= 1
            if not self._holders[block]:
                if block in self._keys:
                    self._kept[block] = None
                else:
                    self._free.append(block)
        table.clear()

    def _check(self, wanted: int) -> None:
        if wanted > self.free:
            raise NoBlocks(f"{wanted} blocks are wanted, {self.free} are free")

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block = next(iter(self._kept))
        del self._kept[block]
        self._forget(block)
        return block

    # --- keys ---------------------------------------------------------------------------------------------------------

    def name(self, block: int, key: bytes) -> None:
        """Give a used block its key. It is found from `mark_computed` on."""
        self._keys[block] = key

    def mark_computed(self, block: int, key: bytes) -> None:
        """The contents of a block that got this key are computed. Nothing happens if it has been taken since."""
        if self._keys.get(block) != key or self._found.setdefault(key, block) == block:
            return
        self._forget(block)  # another block has the same contents
        if block in self._kept:
            del self._kept[block]
            self._free.append(block)

    def count_found(self, keys: Iterable[bytes]) -> int:
        """How many leading ones of these keys have blocks."""
        return leading(keys, self._found)

    def reuse(self, keys: Iterable[bytes]) -> list[int]:
        """A new table of the blocks with these keys."""
        table = [self._found[key] for key in keys]
        for block in table:
            self._kept.pop(block, None)
            self._holders[block] += 1
        return table

    def forget_table(self, table: list[int]) -> None:
        """Forget the keys of a sequence's blocks: what was computed in them is not found again."""
        for block in table:
            self._forget(block)

    def forget(self) -> None:
        """Forget all keys: nothing that was computed so far is found again."""
        self._keys.clear()
        self._found.clear()
        self._free += reversed(self._kept)
        self._kept.clear()

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None and self._found.get(key) == block:
            del self._found[key]


def leading(keys: Iterable[bytes], known: Container[bytes]) -> int:
    """How many of the keys are known, up to the first that is not."""
    return sum(1 for _ in takewhile(known.__contains__, keys))


def blocks_of(tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold `tokens` tokens."""
    return -(-tokens // block_size)
