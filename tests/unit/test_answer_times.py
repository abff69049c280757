"""The times that an answer tells of."""

import numpy as np
import pytest

from deployments.embedding.frames import Answered
from deployments.embedding.request import Request, Wanted, embedded
from tests.kit.virtual_time import run


def answered(query, queue_s, compute_s):
    return "cpu", Answered(1, query, np.ones(2, np.float32), 1.0, queue_s, compute_s, queue_s + compute_s, 1, 4)


@pytest.mark.parametrize(
    ("ended_at", "total_s"),
    [
        (3.0, 3.0),
        (2.2, 2.25),  # the loop's clock lags behind the replica's
    ],
)
def test_the_whole_is_not_less_than_its_parts(ended_at, total_s):
    request = Request(["a", "b"], Wanted(), "", started=-ended_at, due=9.0, patient=False, bulk=False)
    request.ids, request.tokenised = [[1, 2], [1, 3]], request.started + 0.5

    async def answer():
        return embedded(request, {0: answered(0, 0.0, 1.5), 1: answered(1, 1.25, 0.5)}, lambda *_: {})

    done = run(answer())
    told = done.tokenization_s, done.queue_s, done.compute_s, done.total_s
    assert told == pytest.approx((0.5, 1.25, 1.5, total_s))
