"""Queries that want the same of the model run together, inside windows only."""

import pytest

from deployments.embedding.run import by_output
from deployments.models.outputs import TEXT

SPARSE, TOKENS = ("sparse",), ("tokens",)
MIXED = [SPARSE, TEXT, TOKENS, TEXT, SPARSE, TEXT]


@pytest.mark.parametrize(
    ("outputs", "lengths", "window_tokens", "groups"),
    [
        ([TEXT] * 4, [10] * 4, 10, [[0, 1, 2, 3]]),  # one kind: the engine cuts it
        (MIXED, [10] * 6, 0, [[1, 3, 5], [0, 4], [2]]),  # all leave together
        (MIXED, [10] * 6, 60, [[1, 3, 5], [0, 4], [2]]),
        (MIXED, [10] * 6, 30, [[1], [0], [2], [3, 5], [4]]),
        (MIXED, [10] * 6, 29, [[1], [0], [3], [2], [5], [4]]),
        (MIXED, [10, 99, 10, 10, 10, 10], 30, [[0], [1], [3], [2], [4], [5]]),  # a long one is a window
    ],
)
def test_what_the_engine_computes_together(outputs, lengths, window_tokens, groups):
    assert list(by_output(outputs, lengths, window_tokens)) == groups
