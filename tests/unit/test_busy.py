"""The share of time in which a thread is busy, from readings at a clock that the test sets."""

import time

import pytest

from deployments.serving.router import BusyMeter, read_busy_s


class Thread:
    """A thread that a test makes busy."""

    def __init__(self):
        self.now, self.busy_s = 100.0, 7.0
        self.meter = BusyMeter(lambda: self.busy_s, lambda: self.now)

    def spend(self, seconds, share):
        self.now += seconds
        self.busy_s += seconds * share
        return self.meter.share


@pytest.mark.parametrize(
    ("spent", "share"),
    [
        ([], 0.0),  # no time has passed
        ([(0.5, 0.4)], 0.4),
        ([(1, 1.0), (1, 0.2)], 0.2),  # the last second alone
        ([(0.5, 1.0), (0.5, 0.0)], 0.5),
        ([(0.1, 1.0)] * 10 + [(0.1, 0.0)] * 5, 0.5),
        ([(0.001, 1.0)] * 1000 + [(0.001, 0.0)] * 1000, 0.0),  # read often
        ([(1, 1.0), (30, 0.1)], 0.1),  # read seldom
        ([(2, 1.3)], 1.0),  # clocks differ
    ],
)
def test_the_share_covers_the_last_second(spent, share):
    thread = Thread()
    assert thread.meter.share == 0.0
    last = 0.0
    for seconds, busy in spent:
        last = thread.spend(seconds, busy)
    assert last == pytest.approx(share, abs=0.11 if len(spent) > 10 else 1e-9)


def test_few_readings_are_kept():
    thread = Thread()
    for _ in range(10_000):
        thread.spend(0.001, 0.5)
    assert len(thread.meter._readings) < 15


def test_a_thread_is_busy_while_it_runs_or_waits_for_a_core(tmp_path):
    (tmp_path / "schedstat").write_bytes(b"1500000000 250000000 42\n")
    assert read_busy_s(tmp_path / "schedstat") == pytest.approx(1.75)


@pytest.mark.parametrize("text", [None, b"", b"a b c"])
def test_without_the_kernels_count_it_is_the_cpu_time(tmp_path, text):
    if text is not None:
        (tmp_path / "schedstat").write_bytes(text)
    before = time.thread_time()
    assert before <= read_busy_s(tmp_path / "schedstat") <= time.thread_time()
