"""Manages the blocks of one cache, a device's or its host's: whom it admits, and which row gets blocks now. Pure.

The cache is overbooked: the admitted generations may together need more blocks than there are, if the learned lengths
of answers (`answer_lengths`) predict that they will not. A row gets a block only if all generations could still end
with the remaining ones (`BlockPlan`). Otherwise the row waits, and the learned lengths are trusted less for a while.
With a host, its generation moves to the host's cache if that has room (`host_cache`). No generation is evicted, and
nothing is computed twice.

A prompt that begins like an earlier sequence uses its full blocks again. Room is counted as if nobody shared a block
with another generation, so it does not matter which of them ends first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deployments.generation.scheduler.answer_lengths import AnswerLengths
from deployments.generation.scheduler.block_pool import BLOCK, Blocks, blocks_of
from deployments.generation.scheduler.sequences import Generation, Row

_DOUBTED, _TRUSTED = 0.5, 0.01  # a stalled step halves the trust in learned lengths; each ended generation restores 1 %
_OVERBOOKED = 1.5  # times the blocks: the most that all admitted generations may need


@dataclass(slots=True, eq=False)
class BlockManager:
    """The blocks of one cache, of `block_size` tokens. `reserved`: the most that all admitted generations may need."""

    block_count: int
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    block_size: int = BLOCK
    reserved: int = 0
    _blocks: Blocks = field(init=False)
    _admitted: list[Generation] = field(default_factory=list)  # those that have not ended
    _reserved_bulk: int = 0
    _trust: float = 1.0  # in `lengths`; at 0 each answer needs room for its maximum

    def __post_init__(self) -> None:
        self._blocks = Blocks(self.block_count, self.block_size)

    def fits(self, generation: Generation, kept: Sequence[Generation], bulk_share: float) -> bool:
        """Whether blocks will be free for it, and for those for which room is `kept`. Bulk may use `bulk_share`."""
        own, *others = (one.most_blocks(self.block_size) for one in (generation, *kept))
        if own > self.block_count:  # only the other cache may hold it
            return False
        if generation.bulk and self._reserved_bulk + own > bulk_share * self.block_count:
            return False
        most = self.reserved + own + sum(others)
        if most <= self.block_count or generation.bulk:
            return most <= self.block_count
        if most > _OVERBOOKED * self.block_count:
            return False
        likely = self._reserved_bulk + self._likely_blocks([generation, *kept])
        return most - self._trust * max(0.0, most - likely) <= self.block_count

    def _likely_blocks(self, more: Iterable[Generation]) -> float:
        """The likely peak of the blocks that all but bulk generations hold, with `more` among them."""
        found: list[tuple[int, int, int]] = []  # for each answer: tokens so far, those it may still get, those it reads
        for one in [*self._admitted, *more]:
            if one.bulk:
                continue
            if one.first_at is None:
                found += [(0, one.most_tokens, one.prompt_tokens - 1)] * one.answers
            else:
                found += [(row.picked, row.left, row.length - 1) for row in one.rows]
        tokens, lefts, lengths = zip(*found, strict=True)
        return self.lengths.most_blocks(tokens, lefts, lengths, self.block_size)

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

    def may_take(self, generation: Generation, blocks: int, planned: Mapping[Generation, int]) -> bool:
        """Whether it may take `blocks` more, besides those `planned` for a step: all generations could then still end,
        one after another, each with the most blocks that it may need. So no generation waits forever, and nothing is
        computed twice (the banker's algorithm: Dijkstra, EWD 108, 1964).
        """
        if self.reserved <= self.block_count:
            return True
        more = {**planned, generation: planned.get(generation, 0) + blocks}
        return self._all_can_end(
            (one.needed_blocks(self.block_size), one.held_blocks(self.block_size) + more.get(one, 0))
            for one in self._admitted
        )

    def _all_can_end(self, generations: Iterable[tuple[int, int]]) -> bool:
        """Whether all can end, one after another: (the most blocks that it needs, those that it holds) for each."""
        left = sorted((most - has, has) for most, has in generations)
        free = self.block_count - sum(has for _, has in left)
        for need, has in left:
            if need > free:
                return False
            free += has
        return True

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
        stays free, and all generations could still end with these.
        """
        free = self._blocks.free - generation.held_blocks(self.block_size)
        if free < left * self.block_count or not self.fits(generation, (), bulk_share):
            return False
        size, every = self.block_size, [*self._admitted, generation]
        return self._all_can_end((one.needed_blocks(size), one.held_blocks(size)) for one in every)

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

    def cached(self, generation: Generation) -> int:
        """How many tokens of an offered generation's prompt are in full blocks here. The last is always computed, for
        its logits. If all could not end with these blocks in use, none of them is.
        """
        size = self.block_size
        blocks = self._blocks.found(generation.keys[: (generation.prompt_tokens - 1) // size])
        every = [(one.needed_blocks(size), one.held_blocks(size)) for one in self._admitted] if blocks else []
        return blocks * size * self._all_can_end([*every, (generation.most_blocks(size), blocks)])

    def filled(self, row: Row, start: int) -> list[tuple[int, bytes]]:
        """The row's blocks that are full since it had `start` tokens, with their keys. `computed`: a step computed
        their contents.
        """
        full = slice(start // self.block_size, row.computed // self.block_size)
        named = list(zip(row.table[full], row.generation.keys[full], strict=False))
        for block, key in named:
            self._blocks.name(block, key)
        return named

    def computed(self, named: Iterable[tuple[int, bytes]]) -> None:
        """The contents of these blocks are computed, so that they are found again."""
        for block, key in named:
            self._blocks.computed(block, key)

    def forget_contents(self) -> None:
        """What was computed so far is not found again: something may be wrong with it."""
        self._blocks.forget()

    def doubt(self) -> None:
        """Trust the learned lengths less, because rows of a step have to wait for blocks."""
        self._trust *= _DOUBTED

    def goes_on(self, row: Row) -> None:
        """Note that a row has one more token."""
        if not row.generation.bulk:
            self.lengths.goes_on(row.picked)

    def end(self, row: Row, *, cut_off: bool) -> None:
        """Free the blocks of a row that was removed from its generation. `cut_off`: see `StepScheduler.remove`."""
        generation = row.generation
        if generation.first_at is not None and not (generation.bulk or cut_off):
            self.lengths.ended(row.picked, generation.most_tokens)
        self._blocks.give_back(row.table)
        self._reserve(generation, -generation.row_blocks(self.block_size))
        if not generation.rows:
            self._reserve(generation, -generation.shared_blocks(self.block_size))
            self._admitted.remove(generation)
            self._trust += _TRUSTED * (1 - self._trust)

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
        self._planned: dict[Generation, int] = {}  # additional blocks

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
        if blocks and not cache.may_take(generation, blocks, self._planned):
            self.stalled.append(row)
            return False
        if missing or others:
            self._grants.append((row, tokens, others))
            self._blocks.update(dict.fromkeys((row, *others), held))
            self._planned[generation] = self._planned.get(generation, 0) + blocks
        return True

    def commit(self) -> None:
        """Grow the tables. If a row of the accelerator must wait, its cache trusts the learned lengths less."""
        for row, tokens, others in self._grants:
            self._caches[row.generation.on_host].grow(row, tokens, others)
        if any(not row.generation.on_host for row in self.stalled):
            self._caches[0].doubt()
