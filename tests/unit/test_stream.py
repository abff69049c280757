"""The proof by streams, against an application that is a formula."""

import asyncio
import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_load import BUSY, OK, serve

from calibration.load import Address
from calibration.measure.traffic import Traffic
from calibration.prove.stream import Stream, prove
from calibration.report.report_model import Burst
from calibration.service.application import CalibrationFailed

EQUAL, MIXED = Stream("stream", 60.0, 75, mixed=False), Stream("stream of mixed lengths", 60.0, 75, mixed=True)


def test_equal_lengths_arrive_at_random_moments_for_ten_slos():
    arrivals = EQUAL.arrivals(2.0, 512, seed=1)
    gaps = np.diff([at for at, _ in arrivals])
    assert arrivals[0][0] == 0
    assert 19 <= arrivals[-1][0] < 20
    assert len(arrivals) == pytest.approx(1200, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15)  # Poisson
    assert {tokens for _, tokens in arrivals} == {75}


def test_mixed_lengths_have_the_same_mean_and_fit_the_model():
    tokens = [tokens for _, tokens in MIXED.arrivals(20.0, 512, seed=1)]
    assert np.mean(tokens) == pytest.approx(75, rel=0.1)
    assert min(tokens) >= 3
    assert max(tokens) <= 512
    assert np.quantile(tokens, 0.9) > 5 * np.quantile(tokens, 0.1)


class Answers:
    """Streams end with these many late of a hundred each, one after the other."""

    problem = "503 gone"

    def __init__(self, *late, failed=0):
        self.late, self.failed, self.asked = iter(late), failed, []

    async def stream(self, stage, slo_s, arrivals):
        late = next(self.late)
        self.asked.append((stage, slo_s))
        latencies = {"accelerator": [1.1 * slo_s] * late + [0.9 * slo_s] * (90 - late), "cpu": [slo_s] * 10}
        return Burst(stage, 0.0, {}, len(arrivals), len(arrivals) - 100, self.failed, latencies)


def proved(answers):
    arrivals = EQUAL.arrivals(2.0, 512, seed=1)
    return asyncio.run(prove(answers, EQUAL, arrivals, 2.0))


@pytest.mark.parametrize(("late", "tries"), [((0,), 1), ((1,), 1), ((2, 1), 2), ((90, 0), 2)])
def test_one_in_a_hundred_may_be_late_and_one_more_try_is_given(late, tries):
    answers = Answers(*late)
    proof = proved(answers)
    assert answers.asked == [("stream", 2.0)] * tries
    assert (proof.late, proof.admitted) == (late[-1], 100)


def test_what_is_late_twice_is_refused():
    with pytest.raises(CalibrationFailed, match=r"a stream of 60 queries a second: 3 of 100 .* nothing was written"):
        proved(Answers(2, 3))


def test_failures_are_no_proof():
    with pytest.raises(CalibrationFailed, match=r"1 of \d+ queries of a stream failed .* 503 gone"):
        proved(Answers(0, failed=1))


def tried(load, *answers):
    """What `load(traffic)` through HTTP ends with, and the server it went to."""
    done = []

    async def test(address: Address):
        bursts = []
        traffic = Traffic(address, (), bursts, ["accelerator", "cpu"], 75, 0, 5.0, _words={10: 8, 75: 73})
        try:
            done.append(await load(traffic))
        finally:
            traffic.close()
        assert bursts == done

    server = serve(test, *answers)
    return done[0], [request for _, request in server.asked if request.startswith(b"POST")]


def streamed(*answers, arrivals):
    return tried(lambda traffic: traffic.stream("stream", 1.5, arrivals), *answers)


def test_each_query_of_a_stream_has_its_length():
    found, asked = streamed(OK, arrivals=[(0.0, 75), (0.0, 10), (0.001, 200)])
    words = [len(request.partition(b'"input": "')[2].split(b'"')[0].split()) for request in asked]
    assert sorted(words) == [8, 73, 198]
    assert (found.sent, found.busy, found.failed, len(found.latencies_s["cpu"])) == (3, 0, 0, 3)


def test_busy_answers_of_a_stream_are_counted():
    ping = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    found, _ = streamed(*[ping] * 4, OK, BUSY, arrivals=[(0.0, 75)] * 4)
    assert (found.sent, found.busy, len(found.latencies_s["cpu"])) == (4, 3, 1)


DEPTHS = {"accelerator": 2, "cpu": 1}


@pytest.mark.parametrize(
    "load",
    [
        lambda traffic: traffic.burst("verify", DEPTHS, 4),
        lambda traffic: traffic.steady("verify", DEPTHS, 4, seconds=6.0, pause_s=0.0),
    ],
    ids=["burst", "steady"],
)
def test_loads_are_ordinary_queries(monkeypatch, load):
    clock = SimpleNamespace(monotonic=itertools.count().__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr("calibration.load.time", clock)  # a second for each look at it
    found, asked = tried(load, OK)
    heads = [request.partition(b"\r\n\r\n")[0].split(b"\r\n") for request in asked]
    assert {line.partition(b":")[0] for head in heads for line in head[1:]} == {
        b"host", b"content-type", b"content-length"
    }  # fmt: skip
    assert (found.sent, found.busy, found.failed, len(found.latencies_s["cpu"])) == (4, 0, 0, len(asked))
