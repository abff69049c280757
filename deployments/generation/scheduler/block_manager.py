"""Manages the blocks of one cache, a device's or its host's: whom it admits, and which row gets blocks now. Pure.

The cache is overbooked: the admitted generations may together need more blocks than there are, if the learned lengths
of answers (`answer_lengths`) predict that they will not. If no block is free after all, a row waits, more is reserved
for a while, and with the next step its generation moves to the host's cache, if there is one with room (`host_cache`),
or it gets blocks of another row (`preemption`).

A prompt that begins like an earlier sequence uses its full blocks again. Room is counted as if nobody shared a block
with another generation, so it does not matter which of them ends first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deployments.generation.scheduler.answer_lengths import AnswerLengths
from deployments.generation.scheduler.block_pool import BLOCK, Blocks, blocks_of
from deployments.generation.scheduler.sequences import Generation, Row

_EXTRA_STEP, _MOST_EXTRA = 0.1, 0.5  # of the likely blocks, reserved on top: added after each stalled step; the most
_EXTRA_DECAY = 0.01  # of it, with each generation that ends


@dataclass(slots=True, eq=False)
class BlockManager:
    """The blocks of one cache, of `block_size` tokens. `reserved`: the most that all admitted generations may need."""

    block_count: int
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    bulk_lengths: AnswerLengths = field(default_factory=AnswerLengths)
    block_size: int = BLOCK
    reserved: int = 0
    _blocks: Blocks = field(init=False)
    _admitted: list[Generation] = field(default_factory=list)  # those that have not ended
    _reserved_bulk: int = 0
    _extra: float = 0.0  # share of the likely blocks that is reserved on top

    def __post_init__(self) -> None:
        self._blocks = Blocks(self.block_count, self.block_size)

    def fits(self, generation: Generation, kept: Sequence[Generation], bulk_share: float) -> bool:
        """Whether blocks will be free for it, and for those for which room is `kept`. Bulk may use `bulk_share`."""
        if generation.most_blocks(self.block_size) > self.block_count:  # only the other cache may hold it
            return False
        ordinary = self.likely_blocks(kept if generation.bulk else (generation, *kept))
        bulk = self.likely_blocks((generation,) if generation.bulk else (), bulk=True)
        return ordinary + bulk <= self.block_count and not (generation.bulk and bulk > bulk_share * self.block_count)

    def likely_blocks(self, more: Iterable[Generation], *, bulk: bool = False) -> float:
        """The likely peak of the blocks that all ordinary, or all bulk, generations hold, with `more` among them."""
        reserved = self._reserved_bulk if bulk else self.reserved - self._reserved_bulk
        most = reserved + sum(one.most_blocks(self.block_size) for one in more)
        found: list[tuple[int, int, int]] = []  # for each answer: tokens so far, those it may still get, those it reads
        for one in (*(one for one in self._admitted if one.bulk is bulk), *more):
            if one.first_at is None:
                found += [(0, one.most_tokens, one.prompt_tokens - 1)] * one.answers
            else:
                found += [(row.picked, row.left, row.length - 1) for row in one.rows]
        if not found:
            return 0.0
        learned = self.bulk_lengths if bulk else self.lengths
        tokens, lefts, lengths = zip(*found, strict=True)
        return min(most, (1 + self._extra) * learned.most_blocks(tokens, lefts, lengths, self.block_size))

    def spare_block(self) -> int | None:
        """A free block that may be overwritten, without taking it. None if there is none."""
        return self._blocks.spare()

    def admit(self, generation: Generation) -> None:
        """Reserve blocks for it, so that its rows may take them. The first one gets those of the tokens `cached`."""
        self._admitted.append(generation)
        self._reserve(generation, generation.most_blocks(self.block_size))
        if generation.cached:
            row = generation.rows[0]
            row.table = self._blocks.reuse(generation.keys[: generation.cached // self.block_size])
            row.computed = generation.cached

    def _reserve(self, generation: Generation, blocks: int) -> None:
        self.reserved += blocks
        if generation.bulk:
            self._reserved_bulk += blocks

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return self._blocks.free

    def needed_to_begin(self, row: Row) -> int:
        """How many blocks must be free for a row without any: for its tokens, and, if it had some before, one for each
        other row, so that it does not lose them again soon.
        """
        others = sum(bool(row.table) for one in self._admitted for row in one.rows)
        own = blocks_of(row.to_compute, self.block_size)
        return own + (others if row.generation.first_at is not None else 0)

    def preempt(self, row: Row) -> None:
        """Take a row's blocks. Its tokens must be computed again."""
        self._blocks.give_back(row.table)
        row.computed = 0

    def grow(self, row: Row, tokens: int, others: Iterable[Row]) -> None:
        """Grow the row's table to hold `tokens` tokens. The `others` share the blocks that these tokens fill, and get
        their own last block.
        """
        self._blocks.grow(row.table, tokens)
        for other in others:
            other.table = self._blocks.share(row.table, tokens)
            self._blocks.grow(other.table, tokens)

    def may_move_in(self, generation: Generation, bulk_share: float, left: float = 0.0) -> bool:
        """Whether a generation of the other cache may move here: it would be admitted, a share `left` of all blocks
        stays free.
        """
        free = self._blocks.free - generation.held_blocks()
        return free >= left * self.block_count and self.fits(generation, (), bulk_share)

    def move_in(self, generation: Generation, there: BlockManager) -> dict[int, int]:
        """Move a generation, with all its blocks, from the cache `there`. Returns {block there: block here}."""
        ours = self._blocks.hold([row.table for row in generation.rows])
        blocks = generation.needed_blocks(self.block_size)
        for row in generation.rows:
            table = [ours[block] for block in row.table]
            there._blocks.give_back(row.table)
            row.table = table
        there._reserve(generation, -blocks)
        there._admitted.remove(generation)
        self._admitted.append(generation)
        self._reserve(generation, blocks)
        return ours

    def count_cached(self, generation: Generation) -> int:
        """How many tokens of an offered generation's prompt are in full blocks here. The last is always computed, for
        its logits.
        """
        most = (generation.prompt_tokens - 1) // self.block_size
        return self._blocks.count_found(generation.keys[:most]) * self.block_size

    def filled(self, row: Row, start: int) -> list[tuple[int, bytes]]:
        """The row's blocks that are full since it had `start` tokens, with their keys. `mark_computed`: a step
        computed their contents.
        """
        full = slice(start // self.block_size, row.computed // self.block_size)
        named = list(zip(row.table[full], row.generation.keys[full], strict=False))
        for block, key in named:
            self._blocks.name(block, key)
        return named

    def mark_computed(self, named: Iterable[tuple[int, bytes]]) -> None:
        """The contents of these blocks are computed, so that they are found again."""
        for block, key in named:
            self._blocks.mark_computed(block, key)

    def forget_contents(self) -> None:
        """What was computed so far is not found again: something may be wrong with it."""
        self._blocks.forget()

    def forget_contents_of(self, generation: Generation) -> None:
        """The same of what this generation, which is here, has computed or found."""
        for row in generation.rows:
            self._blocks.forget_table(row.table)

    def reserve_more(self) -> None:
        """Reserve more, because rows of a step have to wait for blocks."""
        self._extra = min(_MOST_EXTRA, self._extra + _EXTRA_STEP)

    def goes_on(self, row: Row) -> None:
        """Note that a row has one more token."""
        (self.bulk_lengths if row.generation.bulk else self.lengths).goes_on(row.picked)

    def end(self, row: Row, *, cut_off: bool) -> None:
        """Free the blocks of a row that was removed from its generation. `cut_off`: see `StepScheduler.remove`."""
        generation = row.generation
        if generation.first_at is not None and not cut_off:
            lengths = self.bulk_lengths if generation.bulk else self.lengths
            lengths.ended(row.picked, generation.most_tokens)
        self._blocks.give_back(row.table)
        self._reserve(generation, -generation.row_blocks(self.block_size))
        if not generation.rows:
            self._reserve(generation, -generation.shared_blocks(self.block_size))
            self._admitted.remove(generation)
            self._extra *= 1 - _EXTRA_DECAY

    def clear(self) -> None:
        """Forget all generations, and free all blocks."""
        self._blocks, self._admitted = Blocks(self.block_count, self.block_size), []
        self.reserved = self._reserved_bulk = 0


class BlockPlan:
    """The blocks that rows will get in the step that is being composed. Caches do not change before `commit`.
    `stalled`: rows that must wait for blocks.
    """

    def __init__(self, caches: Sequence[BlockManager]) -> None:
        """`caches`: the accelerator's, then the host's, if there is one."""
        self.stalled: list[Row] = []
        self._caches = caches
        self._grants: list[tuple[Row, int, Sequence[Row]]] = []  # arguments for `BlockManager.grow`
        self._blocks: dict[Row, int] = {}  # the future size of tables that grow
        self._planned = [0] * len(caches)  # additional blocks of each cache

    def take(self, row: Row, tokens: int) -> bool:
        """Plan for the row's table to hold `tokens` tokens; at the end of a prompt also the tables of the other
        answers. Blocks that are held or planned already are not taken again. Returns False if the row must wait for
        blocks.
        """
        generation, prompt = row.generation, row.generation.prompt_tokens
        cache = self._caches[generation.on_host]
        held = blocks_of(tokens, cache.block_size)
        ends = generation.first_at is None and tokens == prompt
        others = [one for one in generation.rows[1:] if not (one.table or one in self._blocks)] if ends else []
        missing = max(0, held - (self._blocks.get(row) or len(row.table)))
        blocks = missing + len(others) * (held - prompt // cache.block_size)
        needed = blocks if row.table or generation.first_at is None else cache.needed_to_begin(row)
        if blocks and needed > cache.free - self._planned[generation.on_host]:
            self.stalled.append(row)
            return False
        if missing or others:
            self._grants.append((row, tokens, others))
            self._blocks.update(dict.fromkeys((row, *others), held))
            self._planned[generation.on_host] += blocks
        return True

    def commit(self) -> None:
        """Grow the tables. If a row of the accelerator that has blocks must wait, its cache reserves more."""
        for row, tokens, others in self._grants:
            self._caches[row.generation.on_host].grow(row, tokens, others)
        if any(row.table and not row.generation.on_host for row in self.stalled):
            self._caches[0].reserve_more()
