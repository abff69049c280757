"""The room in one cache, a device's or its host's: which generations it holds, and which row gets blocks now. Pure.

All that are admitted may together need more blocks than there are, as far as what has been learned of the lengths of
answers (`answer_lengths`) says that they will not. A row gets a block only if all can still end with the rest (`take`).
Else it waits for a step, and what was learned is trusted less for a while; beside a host its generation moves to the
host's cache, if there is room (`host_cache`). Nobody is pushed out for others, nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deployments.generation.scheduler.answer_lengths import AnswerLengths
from deployments.generation.scheduler.block_pool import BLOCK, Blocks, blocks_of
from deployments.generation.scheduler.sequences import Generation, Row

_DOUBTED, _TRUSTED = 0.5, 0.01  # what trust in learned lengths is left by a step with a stall; what each end gives back
_OVERBOOKED = 1.5  # times the blocks: the most that all that are admitted may need


@dataclass(slots=True, eq=False)
class CacheRoom:
    """`reserved`: blocks, the most that all may need. `stalls`: rows that had to wait for one, each step counted."""

    block_count: int
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    reserved: int = 0
    stalls: int = 0  # since the start
    _blocks: Blocks = field(init=False)
    _admitted: list[Generation] = field(default_factory=list)  # that have not ended
    _reserved_bulk: int = 0
    _trust: float = 1.0  # in `lengths`; 0: each answer is to have the room for the most that it may get

    def __post_init__(self) -> None:
        self._blocks = Blocks(self.block_count)

    def fits(self, generation: Generation, kept: Sequence[Generation], bulk_share: float) -> bool:
        """Its blocks will be free, and those of the ones that room is `kept` for. Bulk takes `bulk_share` at most."""
        blocks = sum(one.most_blocks for one in (generation, *kept))
        if generation.most_blocks > self.block_count:  # only the other cache can hold it
            return False
        if generation.bulk and self._reserved_bulk + generation.most_blocks > bulk_share * self.block_count:
            return False
        most = self.reserved + blocks
        if most <= self.block_count or generation.bulk:
            return most <= self.block_count
        if most > _OVERBOOKED * self.block_count:
            return False
        likely = self._reserved_bulk + self._likely_blocks([generation, *kept])
        return most - self._trust * max(0.0, most - likely) <= self.block_count

    def _likely_blocks(self, more: Iterable[Generation]) -> float:
        """That all but bulk hold with these, when they hold most."""
        found: list[tuple[int, int, int]] = []  # tokens that an answer has, may have beside, and reads
        for one in [*self._admitted, *more]:
            if one.bulk:
                continue
            if one.first_at is None:
                found += [(0, one.most_tokens, one.prompt_tokens - 1)] * one.answers
            else:
                found += [(row.picked, one.most_tokens - row.picked, row.length - 1) for row in one.rows]
        tokens, lefts, lengths = zip(*found, strict=True)
        return self.lengths.most_blocks(tokens, lefts, lengths)

    def admit(self, generation: Generation) -> None:
        """Its rows may take blocks from now on."""
        self._admitted.append(generation)
        self._reserve(generation, generation.most_blocks)

    def _reserve(self, generation: Generation, blocks: int) -> None:
        self.reserved += blocks
        if generation.bulk:
            self._reserved_bulk += blocks

    def take(self, row: Row, tokens: int) -> bool:
        """The row's table holds so many tokens from now on; at the end of a prompt those of its other answers do, too.
        False, and nothing is changed, where it has to wait for blocks. What is held already is not taken again.
        """
        generation, prompt = row.generation, row.generation.prompt_tokens
        ends = generation.first_at is None and tokens == prompt
        others = [other for other in generation.rows[1:] if not other.table] if ends else []
        missing = max(0, blocks_of(tokens) - len(row.table))
        if not self._may_take(generation, missing + len(others) * (blocks_of(prompt) - prompt // BLOCK)):
            self.stalls += 1
            return False
        self._blocks.grow(row.table, tokens)
        for other in others:
            other.table = self._blocks.share(row.table, tokens)
            self._blocks.grow(other.table, tokens)
        return True

    def _may_take(self, generation: Generation, blocks: int) -> bool:
        """With so many blocks fewer all can still end, one after another, each with the most that it may need: nobody
        waits for ever, and nothing is computed twice (Dijkstra's banker: EWD 108, 1964).
        """
        if not blocks or self.reserved <= self.block_count:
            return True
        held = [one.held_blocks + (blocks if one is generation else 0) for one in self._admitted]
        return _all_can_end(self._blocks.free - blocks, self._admitted, held)

    def may_move_in(self, generation: Generation, bulk_share: float, left: float = 0.0) -> bool:
        """It would be admitted here, its blocks leave `left`, a share of all that are here, free, and all can still end
        with the rest.
        """
        free = self._blocks.free - generation.held_blocks
        if free < left * self.block_count or not self.fits(generation, (), bulk_share):
            return False
        every = [*self._admitted, generation]
        return _all_can_end(free, every, [one.held_blocks for one in every])

    def move_in(self, generation: Generation, there: CacheRoom) -> dict[int, int]:
        """It moves here from the cache `there`, with all its blocks. Returns {its block there: its block here}."""
        ours = self._blocks.hold([row.table for row in generation.rows])
        blocks = generation.needed_blocks
        for row in generation.rows:
            table = [ours[block] for block in row.table]
            there._blocks.give_back(row.table)
            row.table = table
        there._reserve(generation, -blocks)
        there._admitted.remove(generation)
        self._admitted.append(generation)
        self._reserve(generation, blocks)
        return ours

    def doubt(self) -> None:
        """A step has been composed in which rows wait for blocks."""
        self._trust *= _DOUBTED

    def goes_on(self, row: Row) -> None:
        """It has one token more."""
        if not row.generation.bulk:
            self.lengths.goes_on(row.picked)

    def end(self, row: Row, *, cut_off: bool) -> None:
        """Its blocks are free; it is no longer among its generation's rows. `cut_off`: see `StepSchedule.remove`."""
        generation = row.generation
        if generation.first_at is not None and not (generation.bulk or cut_off):
            self.lengths.ended(row.picked, generation.most_tokens)
        self._blocks.give_back(row.table)
        self._reserve(generation, -generation.row_blocks)
        if not generation.rows:
            self._reserve(generation, -generation.shared_blocks)
            self._admitted.remove(generation)
            self._trust += _TRUSTED * (1 - self._trust)

    def clear(self) -> None:
        """Nothing is admitted any more."""
        self._blocks, self._admitted = Blocks(self.block_count), []
        self.reserved = self._reserved_bulk = 0


def _all_can_end(free: int, generations: Sequence[Generation], held: Sequence[int]) -> bool:
    """One after another, with so many blocks `free` and `held` by each."""
    for need, has in sorted((one.needed_blocks - has, has) for one, has in zip(generations, held, strict=True)):
        if need > free:
            return False
        free += has
    return True
