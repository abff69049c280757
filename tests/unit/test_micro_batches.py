import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines import TokenBatch
from deployments.engines.micro_batches import cut_batch, even_slices, padded_slices, window_tokens

lengths = st.lists(st.integers(1, 600), min_size=1, max_size=300).map(lambda them: np.array(them, np.int32))
longest_first = lengths.map(lambda them: -np.sort(-them))
most_tokens = st.integers(1, 5000)
at_once = st.integers(1, 9)
FORMS = pytest.mark.parametrize("padded", [False, True])


def covers(slices, lengths):
    """Every query is in exactly one slice, in order, and no slice is empty."""
    assert [i for one in slices for i in range(one.start, one.stop)] == list(range(len(lengths)))
    assert all(one.stop > one.start for one in slices)


@given(lengths, st.integers(1, 400))
def test_even_slices(lengths, number):
    slices = list(even_slices(lengths, number))
    covers(slices, lengths)
    assert len(slices) <= number
    assert all(lengths[one].sum() <= lengths.sum() / number + lengths[one].max() for one in slices)


@given(longest_first, most_tokens, at_once)
def test_padded_slices(lengths, most_tokens, number):
    slices = list(padded_slices(lengths, most_tokens, number))
    covers(slices, lengths)
    for one in slices:
        count = one.stop - one.start
        assert count == 1 or int(lengths[one.start]) * count <= most_tokens


@FORMS
@given(lengths, most_tokens, at_once)
def test_every_query_is_in_one_pass(padded, lengths, most_tokens, at_once):
    passes = cut_batch(lengths, most_tokens, at_once, padded=padded)
    assert sorted(np.concatenate(passes).tolist()) == list(range(len(lengths)))
    assert all(len(queries) for queries in passes)


@FORMS
@given(lengths, most_tokens, at_once)
def test_a_pass_is_bounded(padded, lengths, most_tokens, at_once):
    for queries in cut_batch(lengths, most_tokens, at_once, padded=padded):
        longest = int(lengths[queries].max())
        if padded:
            assert len(queries) == 1 or longest * len(queries) <= most_tokens
        else:
            assert lengths[queries].sum() <= most_tokens + 2 * lengths.max()


@FORMS
@given(lengths, most_tokens, at_once)
def test_a_query_starts_at_most_a_window_later_than_one_behind_it(padded, lengths, most_tokens, at_once):
    """Counted in tokens that start before it, though they stand behind it, its own window's included."""
    passes = cut_batch(lengths, most_tokens, at_once, padded=padded)
    longest = int(lengths.max())
    window = window_tokens(max(most_tokens, longest), at_once, padded=padded) + longest
    order = np.concatenate(passes)
    begun = np.zeros(len(lengths), bool)
    for query in order:
        assert lengths[query:][begun[query:]].sum() <= window
        begun[query] = True


@FORMS
@given(st.integers(1, 100), st.integers(1, 300), most_tokens, at_once)
def test_like_queries_keep_their_order(padded, queries, tokens, most_tokens, at_once):
    passes = cut_batch(np.full(queries, tokens, np.int32), most_tokens, at_once, padded=padded)
    assert np.concatenate(passes).tolist() == list(range(queries))


@FORMS
@pytest.mark.parametrize("queries", [13, 16, 27, 32, 50, 55, 64, 100, 128, 206])
def test_no_core_waits_for_a_last_pass_of_another(padded, queries):
    assert len(cut_batch(np.full(queries, 75, np.int32), 1024, 2, padded=padded)) % 2 == 0


@given(st.integers(1, 200), st.integers(1, 8))
def test_like_queries_are_shared_out_evenly(queries, at_once):
    passes = cut_batch(np.full(queries, 75, np.int32), 1024, at_once, padded=False)
    sizes = [len(queries) for queries in passes]
    assert len(passes) % at_once == 0 or len(passes) == queries
    assert max(sizes) - min(sizes) <= 1


def test_in_a_window_the_longest_come_first():
    lengths = np.array([10, 40, 20, 30, 11, 41, 21, 31], np.int32)
    passes = cut_batch(lengths, 51, 2, padded=False)
    assert [queries.tolist() for queries in passes] == [[1], [3, 2, 0], [5], [7, 6, 4]]


@pytest.mark.parametrize("output", ["text", "tokens"])
def test_select(output):
    batch = TokenBatch.pack([np.full(length, length, np.int32) for length in (3, 9, 4, 5)], (output,))
    chosen = batch.select(np.array([3, 0, 1]))
    assert chosen.lengths.tolist() == [5, 3, 9]
    assert [set(query.tolist()) for query in chosen.queries()] == [{5}, {3}, {9}]
    assert chosen.outputs == (output,)
    rows = batch.rows(np.array([3, 0]), output).tolist()
    assert rows == ([16, 17, 18, 19, 20, 0, 1, 2] if output == "tokens" else [3, 0])
