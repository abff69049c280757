"""The last five minutes of a Router, by a clock that the test moves."""

from deployments.serving.recent import BUCKET_S, BUCKETS, LATE, REFUSED, Recent


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def recent():
    clock = Clock()
    return Recent(clock), clock


def test_counts_fall_into_buckets_and_out_of_the_window():
    found, clock = recent()
    found.add("cpu")
    found.add(REFUSED, 3)
    clock.now += BUCKET_S
    found.add("accelerator", 2)
    found.add("cpu")
    found.add(LATE)
    told = found.describe()
    assert (told["bucket_s"], BUCKET_S * BUCKETS) == (5, 300)
    assert list(told["answered"]) == ["accelerator", "cpu"]
    assert told["answered"]["accelerator"] == [0] * (BUCKETS - 1) + [2]
    assert told["answered"]["cpu"] == [0] * (BUCKETS - 2) + [1, 1]
    assert told["refused"] == [0] * (BUCKETS - 2) + [3, 0]
    assert told["late"] == [0] * (BUCKETS - 1) + [1]
    clock.now += BUCKET_S * (BUCKETS - 1)
    told = found.describe()
    assert told["answered"]["cpu"] == [1] + [0] * (BUCKETS - 1)
    assert sum(told["refused"]) == 0
    clock.now += BUCKET_S
    found.add("cpu")
    assert found.describe()["answered"] == {"cpu": [0] * (BUCKETS - 1) + [1]}
    assert len(found._buckets) == 1


def test_finishes_are_a_sample_that_ages():
    found, clock = recent()
    for number in range(1, 41):
        found.finished(number, 1.0, "cpu", late=False)
    assert [predicted for predicted, *_ in found.describe()["finishes"]] == [*range(1, 17), 24, 32, 40]
    clock.now += BUCKET_S * BUCKETS
    found.finished(0.123456, 0.234567, "cpu", late=False)
    assert found.describe()["finishes"] == [[0.1235, 0.2346, "cpu"]]
    clock.now += BUCKET_S * (BUCKETS - 1)
    assert len(found.describe()["finishes"]) == 1
    for number in range(2000):
        found.finished(number, number, "cpu", late=False)
    assert len(found.describe()["finishes"]) == 200
    clock.now += BUCKET_S * BUCKETS
    assert found.describe()["finishes"] == []


def test_no_late_finish_is_left_out():
    """However many were in time. It once was: 30 late, and one of them in the picture."""
    found, clock = recent()
    for number in range(500):
        found.finished(number, 1.0, "cpu", late=number % 10 == 0)
    assert [predicted for predicted, *_ in found.describe()["late_finishes"]] == [*range(0, 500, 10)]
    clock.now += BUCKET_S * BUCKETS
    assert found.describe()["late_finishes"] == []
