import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.generation.engine.decode_sizes import ROWS, DecodeSize, sizes, smallest
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.work import Chunk


def chunk(end, table=(), tokens=1, **more):
    return Chunk(np.arange(end - tokens, end, dtype=np.int32), end - tokens, table, **more)


SIZES = [DecodeSize(2, 1, BLOCK), DecodeSize(4, 1, BLOCK), DecodeSize(2, 3, BLOCK)]


@pytest.mark.parametrize(
    ("chunks", "taken"),
    [([chunk(1)], 0), ([chunk(BLOCK), chunk(1)], 0), ([chunk(1)] * 3, 1), ([chunk(1)] * 4, 1), ([chunk(1)] * 5, None),
     ([chunk(BLOCK + 1)], 2), ([chunk(3 * BLOCK), chunk(1)], 2), ([chunk(3 * BLOCK + 1)], None),
     ([chunk(BLOCK + 1)] * 3, None), ([chunk(5, tokens=2)], None), ([chunk(1), chunk(1, wanted=False)], None)],
)  # fmt: skip
def test_smallest_that_holds_a_step_of_single_tokens(chunks, taken):
    assert smallest(SIZES, chunks) == taken


@given(st.integers(1, 6), st.integers(0, 3), st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=6))
def test_free_rows_repeat_the_one_with_the_fewest_tokens(free, taken_ahead, ends):
    size = DecodeSize(len(ends) + free, 3, BLOCK)
    tables = [tuple(range(9 * row, 9 * row + blocks_of(end, BLOCK) + taken_ahead)) for row, end in enumerate(ends)]
    inputs = np.full(sum(size.parts), -1)
    size.fill(inputs, [chunk(end, table) for end, table in zip(ends, tables, strict=True)])
    ids, positions, flat = np.split(inputs, np.cumsum(size.parts)[:-1])
    rows = [*range(len(ends)), *[int(np.argmin(ends))] * free]
    assert ids.tolist() == positions.tolist() == [ends[row] - 1 for row in rows]
    for row, table in zip(rows, flat.reshape(-1, 3).tolist(), strict=True):
        own = list(tables[row][: blocks_of(ends[row], BLOCK)])
        assert table == own + own[:1] * (3 - len(own))  # nobody else's blocks are read


@pytest.mark.parametrize(
    ("context", "blocks", "rows", "widths"),
    [(500, 10**6, ROWS, [4]), (1024, 10**6, ROWS, [8]), (1025, 10**6, ROWS, [8, 9]), (10**4, 10**6, ROWS, [8, 32, 79]),
     (10**4, 40, ROWS[:6], [8, 32, 40]), (10**4, 3, (1, 2), [3])],
)  # fmt: skip
def test_each_size_is_tried_with_a_step_that_takes_it(context, blocks, rows, widths):
    found = list(sizes(context, blocks, BLOCK))
    every = [size for size, _ in found]
    assert every == [DecodeSize(count, width, BLOCK) for width in widths for count in rows]
    for at, (size, (largest, fewest)) in enumerate(found):
        assert (len(largest), max(blocks_of(one.end, BLOCK) for one in largest)) == (size.rows, size.blocks)
        assert len(fewest) <= size.rows
        for chunks in (largest, fewest):
            assert smallest(every, chunks) == at
            assert [len(one.table) for one in chunks] == [blocks_of(one.end, BLOCK) for one in chunks]
            assert len({one.table[-1] for one in chunks}) == len(chunks)  # of several writers the last would win
            assert all(0 <= block < blocks for one in chunks for block in one.table)
    assert DecodeSize(4, 8, BLOCK).tokens == 32 * BLOCK
