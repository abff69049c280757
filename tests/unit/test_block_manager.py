"""Blocks of one cache, and the room in it: who is let in, who gets a block, who moves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.generation.scheduler.block_manager import BlockManager, BlockPlan
from deployments.generation.scheduler.block_pool import BLOCK, Blocks, NoBlocks, blocks_of
from deployments.generation.scheduler.sequences import Generation, Row


class Likely:
    """In place of `AnswerLengths`: so many blocks are foreseen for all, whoever they are. Writes down what it hears."""

    def __init__(self, blocks):
        self.blocks, self.asked, self.heard = blocks, None, []

    def most_blocks(self, *asked):
        self.asked = asked
        return self.blocks

    def goes_on(self, tokens):
        self.heard.append(tokens)

    def ended(self, tokens, most_tokens):
        self.heard.append((tokens, most_tokens))


def needs(blocks, **more):
    """A generation of one answer that may need so many."""
    return Generation(1, blocks * BLOCK, 0.0, **more)


def room_with(*admitted, count=10, likely=0.0):
    room = BlockManager(count, Likely(likely), Likely(math.inf))
    for generation in admitted:
        admit(room, generation)
    return room


def take(room, row, tokens):
    """In a step of its own."""
    plan = BlockPlan([room])
    taken = plan.take(row, tokens)
    assert plan.stalled == [row] * (not taken)
    plan.commit()
    return taken


def admit(room, generation, holds=0, picked=None):
    """It runs if it has `picked` tokens already."""
    room.admit(generation)
    generation.rows = [Row(generation, number) for number in range(generation.answers)]
    generation.rows[0].length = generation.prompt_tokens
    if holds:
        assert take(room, generation.rows[0], holds * BLOCK)
    if picked is not None:
        generation.first_at = 0.0
        for row in generation.rows:
            row.length = generation.prompt_tokens + picked
    return generation


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2), (3 * BLOCK, 3)])
def test_a_block_holds_128_tokens(tokens, blocks):
    assert BLOCK == 128
    assert blocks_of(tokens, BLOCK) == blocks_of(2 * tokens, 2 * BLOCK) == blocks


def test_tables_grow_block_by_block_up_to_the_last_one():
    blocks, table, other = Blocks(4, BLOCK), [], []
    blocks.grow(table, BLOCK + 1)
    assert (table, blocks.free) == ([0, 1], 2)
    blocks.grow(table, 2 * BLOCK)
    assert table == [0, 1]
    with pytest.raises(NoBlocks, match="3 blocks are wanted, 2 are free"):
        blocks.grow(other, 3 * BLOCK)
    assert (other, blocks.free) == ([], 2)
    blocks.grow(other, 2 * BLOCK)
    assert (other, blocks.free) == ([2, 3], 0)
    blocks.give_back(table)
    assert (table, blocks.free) == ([], 2)
    blocks.grow(table, 1)
    assert table == [0]  # those that were given back last are the first to be taken


def test_a_block_is_free_when_the_last_of_its_holders_gives_it_back():
    blocks, table = Blocks(3, BLOCK), []
    blocks.grow(table, 2 * BLOCK + 5)
    assert blocks.share(table, 2 * BLOCK - 1) == [0]
    shared = blocks.share(table, 2 * BLOCK)
    assert shared == [0, 1]
    blocks.give_back(table)
    assert blocks.free == 1
    blocks.give_back(shared)
    assert blocks.free == 2


def test_another_cache_holds_what_is_shared_once():
    blocks, mine = Blocks(4, BLOCK), []
    blocks.grow(mine, 1)
    ours = blocks.hold([[7, 8], [7, 9]])
    assert (sorted(ours), sorted(ours.values())) == ([7, 8, 9], [1, 2, 3])
    with pytest.raises(NoBlocks, match="1 blocks are wanted, 0 are free"):
        blocks.hold([[5]])
    blocks.give_back([ours[7], ours[8]])
    assert blocks.free == 1  # the other table still has the first one
    blocks.give_back([ours[7], ours[9]])
    assert blocks.free == 3


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 600)), min_size=1, max_size=8))
def test_a_block_is_free_when_nobody_holds_it(tables):
    blocks = Blocks(60, BLOCK)
    held = []
    for tokens, shared in tables:
        if blocks_of(tokens, BLOCK) <= blocks.free:
            table = []
            blocks.grow(table, tokens)
            held += [table, blocks.share(table, min(tokens, shared))]
    for table in held:
        blocks.give_back(table)
    assert sorted(blocks._free) == list(range(60))


# --- what a generation needs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "most", "answers", "shared", "each", "whole"),
    [
        (BLOCK, 1, 1, 0, 1, 1),  # the last token never is in the cache
        (BLOCK, 2, 1, 0, 2, 2),
        (BLOCK - 1, BLOCK + 2, 1, 0, 2, 2),
        (BLOCK - 1, 3, 3, 0, 2, 6),  # nothing of the prompt fills a block
        (BLOCK, 2, 3, 1, 1, 4),
        (2 * BLOCK + 5, 9, 3, 2, 1, 5),
    ],
)
def test_blocks_of_a_generation(prompt, most, answers, shared, each, whole):
    one = Generation(prompt, most, 0.0, answers=answers)
    assert (one.shared_blocks(BLOCK), one.row_blocks(BLOCK), one.most_blocks(BLOCK)) == (shared, each, whole)
    tables = [[*range(shared), shared + number] for number in range(answers)]
    one.rows = [Row(one, number, table) for number, table in enumerate(tables)]
    assert (one.needed_blocks(BLOCK), one.held_blocks()) == (whole, shared + answers)
    one.rows[0].table = []
    assert one.held_blocks() == shared + answers - 1 or answers == 1
    one.rows[0].table = [90, 91]  # computed again: it shares nothing
    assert one.held_blocks() == shared + answers + 1 or answers == 1
    del one.rows[0]
    assert one.needed_blocks(BLOCK) == shared + (answers - 1) * each


@pytest.mark.parametrize(("bulk", "pace_s"), [(False, 0.1), (True, None)])
def test_bulk_has_no_pace(bulk, pace_s):
    one = Generation(10, 5, 0.0, 0.1, bulk=bulk)
    assert one.pace_s == pace_s
    assert Row(one, 0, length=13).picked == 3


# --- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admitted", "one", "kept", "share", "fits"),
    [
        ([], needs(10), [], 0.5, True),
        ([], needs(11), [], 0.5, False),
        ([needs(6)], needs(4), [], 0.5, True),
        ([needs(6)], needs(1), [needs(3)], 0.5, True),
        ([], needs(5, bulk=True), [], 0.5, True),
        ([], needs(6, bulk=True), [], 0.5, False),  # more than its share
        ([needs(2, bulk=True)], needs(3, bulk=True), [], 0.5, True),
        ([needs(2, bulk=True)], needs(4, bulk=True), [], 0.5, False),
        ([needs(6)], needs(4, bulk=True), [], 1.0, True),
        ([needs(6)], needs(10, bulk=True), [], 1.0, True),
        ([needs(9)] * 9, needs(10), [], 0.5, True),  # whatever their maxima are
        ([needs(9)] * 9, needs(3), [needs(10)] * 3, 0.5, True),
    ],
)
def test_who_fits_where_answers_are_known_to_be_short(admitted, one, kept, share, fits):
    assert room_with(*admitted).fits(one, kept, share) is fits


@pytest.mark.parametrize(
    ("most", "bulk", "stalls", "likely", "fits"),
    [
        (14, 0, 0, 10.0, True),
        (14, 0, 0, 10.1, False),
        (14, 2, 0, 8.0, True),  # what bulk may need is always counted
        (14, 2, 0, 8.1, False),
        (14, 0, 1, 9.0, True),  # a tenth more
        (14, 0, 1, 9.1, False),
        (14, 0, 2, 8.3, True),
        (14, 0, 2, 8.4, False),
        (14, 0, 9, 6.6, True),  # half as much again, at most
        (14, 0, 9, 6.7, False),
        (10, 0, 9, 20.0, True),  # never more than all may need
        (12, 0, 0, 20.0, False),
    ],
)
def test_who_fits_by_what_was_learned_as_far_as_it_is_trusted(most, bulk, stalls, likely, fits):
    room = room_with(needs(bulk, bulk=True), needs(9 - bulk), likely=likely) if bulk else room_with(needs(9))
    room.lengths.blocks = likely
    for _ in range(stalls):
        room.reserve_more()
    assert room.fits(needs(most - 9), (), 1.0) is fits


def test_each_end_takes_a_hundredth_of_what_is_reserved_on_top():
    room, gone = room_with(), needs(1, answers=2)
    admit(room, gone, picked=3)
    room.reserve_more()
    extras = []
    for _ in range(2):
        room.end(gone.rows.pop(), cut_off=False)
        extras.append(room._extra)
    assert extras == [0.1, pytest.approx(0.099)]  # a generation ends with its last answer


def test_lengths_are_asked_of_all_that_are_here_but_bulk():
    room = room_with(needs(1, bulk=True), Generation(100, 900, 0.0), count=22)
    admit(room, Generation(50, 400, 0.0, answers=2), picked=7)
    assert room.fits(Generation(30, 200, 0.0), [Generation(10, 300, 0.0)], 1.0)
    tokens, lefts, lengths, _ = room.lengths.asked
    assert list(zip(tokens, lefts, lengths, strict=True)) == [
        (0, 900, 99), (7, 393, 56), (7, 393, 56), (0, 200, 29), (0, 300, 9),
    ]  # fmt: skip
    assert room.fits(Generation(30, 200, 0.0, bulk=True), (), 1.0)
    assert room.bulk_lengths.asked[1] == (BLOCK, 200)  # those of bulk are learned apart


# --- blocks for rows --------------------------------------------------------------------------------------------------


def test_a_row_gets_free_blocks_and_waits_for_others():
    room = room_with(count=4)
    first, second = (admit(room, needs(3), holds=1) for _ in range(2))
    assert take(room, first.rows[0], 3 * BLOCK)
    assert room.reserved == 6
    assert not take(room, second.rows[0], BLOCK + 1)
    assert second.rows[0].table == [1]
    assert take(room, second.rows[0], BLOCK)  # what it has already
    room.end(first.rows.pop(), cut_off=True)
    assert take(room, second.rows[0], 3 * BLOCK)
    assert (room._extra, room.reserved) == (pytest.approx(0.1 * 0.99), 3)


@pytest.mark.parametrize(("others", "taken"), [(2, True), (3, False)])
def test_a_row_that_lost_its_blocks_comes_back_once_each_other_can_take_one_more(others, taken):
    room, first = room_with(count=10), needs(6)
    admit(room, first, holds=4, picked=3 * BLOCK)  # it reads 385 tokens: four blocks
    for _ in range(others):
        admit(room, needs(4), holds=2)
    room.preempt(first.rows[0])
    assert (room.free, first.rows[0].computed, first.rows[0].length) == (10 - 2 * others, 0, 3 * BLOCK + 1)
    assert take(room, first.rows[0], BLOCK) is taken
    assert room._extra == 0.0  # a row without blocks proves nothing more


def test_a_plan_changes_nothing_before_it_is_committed_and_counts_what_it_has_planned():
    room = room_with(count=4)
    first, second = (admit(room, needs(3), holds=1) for _ in range(2))
    plan = BlockPlan([room])
    assert plan.take(first.rows[0], 2 * BLOCK)
    assert plan.take(first.rows[0], BLOCK + 1)  # planned already
    assert not plan.take(second.rows[0], 3 * BLOCK)
    assert (plan.stalled, room._extra, room._blocks.free) == (second.rows, 0.0, 2)
    assert plan.take(first.rows[0], 3 * BLOCK)  # when a step is composed anew
    assert not plan.take(second.rows[0], BLOCK + 1)
    assert [len(one.rows[0].table) for one in (first, second)] == [1, 1]
    plan.commit()
    assert ([len(one.rows[0].table) for one in (first, second)], room._extra) == ([3, 1], 0.1)


def test_a_plan_counts_the_answers_of_one_prompt_together():
    """They need a block each. When the first two have one there is none left for the third."""
    room = room_with(count=7)
    one = admit(room, Generation(BLOCK, BLOCK + 1, 0.0, answers=3), holds=1)
    one.first_at = 0.0
    for row in one.rows[1:]:
        row.table = room._blocks.share(one.rows[0].table, BLOCK)
    other = admit(room, needs(5), holds=4)
    assert room.reserved == 4 + 5
    plan = BlockPlan([room])
    assert [plan.take(row, BLOCK + 1) for row in one.rows] == [True, True, False]
    assert not plan.take(other.rows[0], 5 * BLOCK)
    plan.commit()
    assert room._blocks.free == 0


def test_answers_share_their_prompt_once_where_a_step_is_composed_anew():
    room = room_with()
    one = admit(room, Generation(BLOCK + 5, 2, 0.0, answers=3))
    plan = BlockPlan([room])
    assert [plan.take(one.rows[0], BLOCK + 5) for _ in range(2)] == [True, True]
    plan.commit()
    assert [row.table for row in one.rows] == [[0, 1], [0, 2], [0, 3]]


def test_rows_of_the_host_wait_and_no_more_is_reserved():
    rooms = room_with(), room_with(count=3)
    first, second = (admit(rooms[1], needs(3, on_host=True)) for _ in range(2))
    for one in (first, second):
        rooms[1].grow(one.rows[0], BLOCK, ())
    plan = BlockPlan(rooms)
    assert [plan.take(one.rows[0], 2 * BLOCK) for one in (first, second)] == [True, False]
    plan.commit()
    assert (plan.stalled, [room._extra for room in rooms]) == (second.rows, [0.0, 0.0])
    assert (len(first.rows[0].table), rooms[0]._blocks.free) == (2, 10)


@pytest.mark.parametrize(("prompt", "tables"), [(BLOCK + 5, [[0, 1], [0, 2], [0, 3]]), (BLOCK, [[0], [0], [0]])])
def test_at_the_end_of_a_prompt_its_other_answers_get_their_blocks(prompt, tables):
    room = room_with()
    one = admit(room, Generation(prompt, 2, 0.0, answers=3))
    assert take(room, one.rows[0], prompt - 1)
    assert [len(row.table) for row in one.rows[1:]] == [0, 0]
    assert take(room, one.rows[0], prompt)
    assert [row.table for row in one.rows] == tables
    one.first_at = 0.0
    assert take(room, one.rows[0], prompt)  # its answers run: nothing is shared again
    assert one.held_blocks() == len({block for table in tables for block in table})


@pytest.mark.parametrize(("blocks", "taken"), [(4, False), (5, True)])
def test_the_blocks_of_the_other_answers_are_counted_before_they_are_taken(blocks, taken):
    room = room_with(count=blocks)
    one = admit(room, Generation(BLOCK + 5, 2, 0.0, answers=3))
    admit(room, needs(2), holds=1)
    assert take(room, one.rows[0], BLOCK + 5) is taken
    assert len(one.rows[0].table) == 2 * taken


# --- moves and ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admitted", "holds", "left", "moves"),
    [(0, 4, 0.6, True), (0, 4, 0.61, False), (6, 4, 0.0, True), (7, 4, 0.0, False)],
)
def test_what_moves_in_leaves_a_share_free_and_is_admitted(admitted, holds, left, moves):
    room, there = room_with(*[needs(admitted)] * bool(admitted), likely=99.0), room_with(count=20)
    one = admit(there, needs(4), holds=holds)
    assert room.may_move_in(one, 1.0, left) is moves


def test_bulk_moves_in_only_within_its_share():
    room, one = room_with(), admit(room_with(count=20), needs(5, bulk=True), holds=1)
    assert [room.may_move_in(one, share) for share in (0.5, 0.4)] == [True, False]


def test_a_generation_moves_with_all_that_it_holds():
    here, there = room_with(needs(2)), room_with()
    one = admit(there, Generation(BLOCK + 5, 2 * BLOCK, 0.0, answers=2, bulk=True))
    assert take(there, one.rows[0], BLOCK + 5)
    before = [list(row.table) for row in one.rows]
    ours = here.move_in(one, there)
    assert [[ours[block] for block in table] for table in before] == [row.table for row in one.rows]
    assert (here.reserved, here._reserved_bulk, here._blocks.free) == (2 + 7, 7, 10 - 3)
    assert (there.reserved, there._reserved_bulk, there._blocks.free, there._admitted) == (0, 0, 10, [])
    for row in list(one.rows):
        one.rows.remove(row)
        here.end(row, cut_off=False)
    assert (here.reserved, here._reserved_bulk, here._blocks.free, len(here._admitted)) == (2, 0, 10, 1)


@pytest.mark.parametrize(
    ("bulk", "cut_off", "picked", "heard"),
    [
        (False, False, 7, [7, (7, 2 * BLOCK)]),
        (False, True, 7, [7]),
        (False, False, None, [0]),  # it had no token yet
        (True, False, 7, []),
    ],
)
def test_lengths_are_learned_of_answers_that_end_by_themselves(bulk, cut_off, picked, heard):
    room = room_with()
    one = admit(room, needs(2, bulk=bulk), holds=1, picked=picked)
    room.goes_on(one.rows[0])
    room.end(one.rows.pop(), cut_off=cut_off)
    assert room.lengths.heard == heard
    assert (room.reserved, room._reserved_bulk, room._blocks.free, room._admitted) == (0, 0, 10, [])


def test_nothing_is_left_when_all_is_cleared():
    room = room_with(needs(2), needs(1, bulk=True))
    admit(room, needs(3), holds=3)
    room.clear()
    assert (room.reserved, room._reserved_bulk, room._blocks.free) == (0, 0, 10)
    assert room.may_move_in(admit(room_with(), needs(10), holds=10), 1.0)
