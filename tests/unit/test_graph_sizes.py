import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.graph_sizes import TOKENS, GraphSize, sizes, smallest

SIZES = [size for size, _ in sizes(512)]


@pytest.mark.parametrize(
    ("tokens", "queries", "taken"),
    [(1, 1, 16), (16, 4, 16), (16, 5, 32), (17, 1, 32), (128, 32, 128), (129, 1, 192), (512, 32, 512), (513, 1, 768),
     (512, 33, 768), (600, 48, 768), (600, 49, 1024), (4096, 256, 4096), (4096, 257, None), (4097, 1, None)],
)  # fmt: skip
def test_smallest_that_holds_the_pass(tokens, queries, taken):
    at = smallest(SIZES, tokens, queries)
    assert (None if at is None else SIZES[at].tokens) == taken


@given(st.sampled_from(TOKENS), st.sampled_from([2, 17, 128, 512, 8192]), st.data())
def test_inputs_say_where_each_token_lies(tokens, most, data):
    size = GraphSize(tokens, min(tokens, most))
    lengths = data.draw(st.lists(st.integers(1, size.longest), min_size=1, max_size=size.queries))
    while sum(lengths) > tokens:
        lengths.pop()
    ids = np.arange(100, 100 + sum(lengths), dtype=np.int32)
    inputs = np.full(sum(size.parts), -1, np.int32)
    size.fill(inputs, ids, np.array(lengths, np.int32))
    own, positions, bounds = np.split(inputs, np.cumsum(size.parts)[:-1])
    assert own.tolist() == [*ids, *[0] * (tokens - len(ids))]
    assert positions.tolist() == [*(at for length in lengths for at in range(length)), *[0] * (tokens - len(ids))]
    assert np.diff(bounds)[: len(lengths)].tolist() == lengths
    assert (bounds[0], bounds[-1], len(bounds)) == (0, tokens, size.slots + 1)  # no row is left out
    assert 0 <= np.diff(bounds).min() <= np.diff(bounds).max() <= size.longest


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("most", [5, 20, 33, 128, 512, 8192])
def test_a_mixed_batch_takes_most_of_the_tokens(tokens, most):
    size = GraphSize(tokens, min(tokens, most))
    lengths = size.mixed()
    assert 0 < lengths.min() < size.longest / 2 < lengths.max() <= size.longest
    assert len(lengths) <= size.queries
    assert lengths.sum() <= tokens
    assert lengths.sum() > tokens / 2 or most < 32


@pytest.mark.parametrize("longest", [20, 100, 512])
def test_each_size_is_tried_with_the_most_padding(longest):
    tried = list(sizes(longest))
    assert [lengths.sum() for _, lengths in tried] == [1, *(tokens + 1 for tokens in TOKENS[:-1])]
    for at, (size, lengths) in enumerate(tried):
        assert lengths.max() <= longest
        assert smallest([one for one, _ in tried], lengths.sum(), len(lengths)) == at
        assert size.longest == min(size.tokens, longest)
