"""The replay of NEO's and APEX's figures: rates between points, latencies from a queue at the door, spread ends."""

from itertools import islice

import numpy as np
import pytest

from benchmarks.comparisons.hybrid import WIDE, Point
from benchmarks.paper_hybrid import ALONE, CODE, CONVERSATION, LOADS, Workload, _begun, _world, latency, sustained
from benchmarks.simulation.step_world import Arrival

MACHINE = Point(4, 1.0).machine(28_000)


@pytest.mark.parametrize(
    ("means", "rate"),
    [([0.1, 0.1, 10.0], 3.0), ([0.1, 1.0, 1.0], None), ([2.0, 3.0, 4.0], None), ([0.5, 2.0, 8.0], 1.5)],
)
def test_the_rate_at_a_latency_lies_between_its_points(means, rate):
    rows = [{"rate": at, ALONE: {"mean": mean}} for at, mean in zip((1, 2, 4), means, strict=True)]
    assert sustained(rows, ALONE, 1.0) == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(("trace", "prompt", "answer"), [(CODE, 2048, 28), (CONVERSATION, 1155, 211)])
def test_lengths_have_the_published_means(trace, prompt, answer):
    """Means of Azure's traces of 2023, as counted in their files."""
    assert (round(np.mean(trace.prompts)), round(np.mean(trace.answers))) == pytest.approx((prompt, answer), abs=1)


def test_all_that_wait_at_the_door_are_answered_in_their_order():
    arrivals = [Arrival(0.01 * number, 500, 20, (20,)) for number in range(120)]
    sent = _world(MACHINE, ALONE).queued(arrivals)
    assert [one.arrival for one in sent] == arrivals
    assert all(one.counts == {0: 20} for one in sent)
    firsts = [one.came_at for one in sent]
    assert firsts == sorted(firsts)
    assert firsts[-1] - sent[-1].arrival.at > WIDE.ttft_s / 10, "nobody waited"


def test_an_idle_device_that_refuses_is_named():
    with pytest.raises(ValueError, match="an idle device refuses"):
        _world(MACHINE, ALONE).queued([Arrival(0.0, 40_000, 20, (20,))])


def test_the_first_answers_end_at_different_times():
    begun = list(islice(_begun(Workload.about(1000, 200), 24_000, bulk=False), 40))
    assert {one.prompt_tokens + one.most_tokens for one in begun} <= set(range(1080, 1321))
    assert np.std([one.most_tokens for one in begun[:20]]) > 30
    assert all(one.most_tokens >= 180 for one in begun[25:])


def test_more_load_takes_longer():
    load = next(one for one in LOADS if one.figure == "6b, 7")
    low, high = (latency(load, ALONE, rate, quick=True)["mean"] for rate in (0.5, 5.0))
    assert low < high
