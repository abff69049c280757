"""What a query asks of the model, there and back: from rows of all queries to the numbers of each, and to its rows."""

import numpy as np
import pytest

from deployments.models.outputs import join, split

WIDTHS = {"tokens": 3, "sparse": 1, "multi_vector": 2}
LENGTHS = [2, 1, 4]


def rows_of(output):
    count, width = (len(LENGTHS), 5) if output == "text" else (sum(LENGTHS), WIDTHS[output])
    return np.random.default_rng(len(output)).random((count, width), np.float32)


@pytest.mark.parametrize(
    "outputs",
    [
        ("text",),
        ("tokens",),
        ("multi_vector",),
        ("text", "sparse"),
        ("sparse", "text", "multi_vector"),
        ("multi_vector", "tokens"),
    ],
)
def test_the_rows_of_each_query_come_back(outputs):
    found = [rows_of(output) for output in outputs]
    numbers = join(found, outputs, LENGTHS)
    assert len(numbers) == len(LENGTHS)
    ends = np.cumsum(LENGTHS)
    for index, (length, end) in enumerate(zip(LENGTHS, ends, strict=True)):
        assert numbers[index].ndim == 1
        came = split(numbers[index], outputs, length, WIDTHS)
        assert tuple(came) == outputs
        for output, rows in zip(outputs, found, strict=True):
            mine = rows[index : index + 1] if output == "text" else rows[end - length : end]
            assert np.array_equal(came[output], mine)
