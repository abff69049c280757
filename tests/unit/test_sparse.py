import numpy as np
import pytest

from deployments.models.outputs import pack, unpack


@pytest.mark.parametrize("density", [0, 0.005, 1])
def test_what_is_packed_comes_out_as_it_was(density):
    random = np.random.default_rng(0)
    weights = random.random((7, 2000), np.float32) * (random.random((7, 2000)) < density)
    weights[3] = 0
    packed = pack(weights)
    assert packed.dtype == np.float32
    assert packed.shape == (7, 2 * max(1, np.count_nonzero(weights, axis=1).max()))
    for row, wanted in zip(packed, weights, strict=True):
        indices, values = unpack(row)
        assert np.array_equal(indices, np.flatnonzero(wanted))
        assert np.array_equal(values, wanted[indices])


def test_the_largest_vocabularies_have_exact_indices():
    weights = np.zeros((1, 300_000), np.float32)
    weights[0, [262_143, 299_999]] = 0.1, 0.2
    indices, values = unpack(pack(weights)[0])
    assert indices.tolist() == [262_143, 299_999]
    assert values.tolist() == weights[0, [262_143, 299_999]].tolist()
