from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines import TokenBatch
from deployments.engines.passes import longest_first, packed_passes, padded_passes

lengths = st.lists(st.integers(1, 600), min_size=1, max_size=300).map(
    lambda them: np.array(sorted(them)[::-1], np.int32)
)
most_tokens = st.integers(1, 5000)


def covers(passes, lengths):
    """Every query is in exactly one pass, in order, and no pass is empty."""
    assert [i for one in passes for i in range(one.start, one.stop)] == list(range(len(lengths)))
    assert all(one.stop > one.start for one in passes)


@given(lengths, most_tokens, st.integers(1, 9))
def test_packed_passes(lengths, most_tokens, at_once):
    passes = list(packed_passes(lengths, most_tokens, at_once))
    covers(passes, lengths)
    longest = int(lengths[0])
    assert all(lengths[one].sum() <= most_tokens + longest for one in passes)


@pytest.mark.parametrize("queries", [13, 16, 27, 32, 50, 55, 64, 100, 128])
def test_no_core_waits_for_a_last_pass_of_another(queries):
    like = np.full(queries, 75, np.int32)
    assert [len(list(cut(like, 1024, 2))) % 2 for cut in (packed_passes, padded_passes)] == [0, 0]


@given(st.integers(1, 200), st.integers(1, 8))
def test_like_queries_are_shared_out_evenly(queries, at_once):
    passes = list(packed_passes(np.full(queries, 75, np.int32), 1024, at_once))
    sizes = [one.stop - one.start for one in passes]
    assert len(passes) % at_once == 0 or len(passes) == queries
    assert max(sizes) - min(sizes) <= 1


@given(lengths, most_tokens, st.integers(1, 9))
def test_padded_passes(lengths, most_tokens, at_once):
    passes = list(padded_passes(lengths, most_tokens, at_once))
    covers(passes, lengths)
    for one in passes:
        count = one.stop - one.start
        assert count == 1 or int(lengths[one.start]) * count <= most_tokens


def test_longest_first():
    batch = TokenBatch.pack([np.full(length, length, np.int32) for length in (3, 9, 3, 5)])
    order, ordered = longest_first(batch)
    assert order.tolist() == [1, 3, 0, 2]
    assert ordered.lengths.tolist() == [9, 5, 3, 3]
    assert [query[0] for query in ordered.queries()] == [9, 5, 3, 3]
    assert longest_first(ordered)[1] is ordered
