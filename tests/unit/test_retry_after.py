"""A refused client is told its own time to return. If it returns then, it finds room."""

import math

import pytest

from deployments.embedding.retry_after import RetryLine, Supply

STEADY = [Supply(0.5, 4.0)]  # opens in 0.5 s, and takes a request every 0.25 s
AT_ONCE = [Supply(0.2, 10.0, 0.4)]  # opens in 0.2 s, and then every 0.4 s for four: 3.4 of them are for the line
EXACT = 1 / 256  # the relative error of a time


def told(line, now=0.0, key=None, supplies=STEADY, **how):
    return line.join(now, key, supplies, **how)


@pytest.mark.parametrize(
    ("supply", "time_s", "share", "requests"),
    [
        (Supply(0.5, 4.0), 0.4, 1.0, 0.0),
        (Supply(0.5, 4.0), 0.75, 1.0, 1.0),
        (Supply(0.5, 4.0), 0.75, 0.5, 0.5),
        (Supply(0.2, 10.0, 0.4), 0.19, 1.0, 0.0),
        (Supply(0.2, 10.0, 0.4), 0.2, 1.0, 4.0),
        (Supply(0.2, 10.0, 0.4), 0.59, 1.0, 4.0),
        (Supply(0.2, 10.0, 0.4), 0.61, 1.0, 8.0),
        (Supply(0.2, 10.0, 0.4), 0.2, 0.3, 3.4),
    ],
)
def test_what_a_replica_can_take(supply, time_s, share, requests):
    assert supply.until(time_s, share) == pytest.approx(requests)


def test_between_bursts_nine_tenths_are_for_the_line():
    line = RetryLine()
    waits = [told(line, key=number) for number in range(6)]
    assert waits == pytest.approx([0.5 + 0.25 / 0.9 * number for number in range(6)], rel=EXACT)


def test_in_a_stream_three_tenths_are_for_the_line():
    line = RetryLine()
    times = [0.1 * number for number in range(101)]
    for number, now in enumerate(times):
        wait_s = told(line, now, number, [Supply(0.0, 1000.0)])
        line.claim(now + wait_s, number)
    first = told(line, 10.1, "a")
    second = told(line, 10.1, "b")
    assert second - first == pytest.approx(0.25 / 0.3, rel=4 * EXACT)


def test_each_opening_at_once_is_told_to_as_many_as_it_has_room_for():
    line = RetryLine()
    waits = [told(line, key=number, supplies=AT_ONCE) for number in range(9)]
    assert waits == pytest.approx([0.2] * 4 + [0.6] * 4 + [1.0], rel=2 * EXACT)


def test_the_time_is_that_of_all_devices_together():
    line = RetryLine()
    waits = [told(line, key=number, supplies=[*STEADY, *AT_ONCE]) for number in range(6)]
    assert waits == pytest.approx([0.2] * 4 + [0.6] * 2, rel=EXACT)


def test_a_replica_that_opens_much_later_does_not_blur_the_time():
    line = RetryLine()
    waits = [told(line, key=number, supplies=[*STEADY, Supply(300.0, 4.0)]) for number in range(6)]
    assert waits == pytest.approx([0.5 + 0.25 / 0.9 * number for number in range(6)], rel=EXACT)


def test_when_more_replicas_join_the_line_is_shorter_and_less_room_is_kept():
    line, ten = RetryLine(), [Supply(0.0, 400.0, 0.0, 800.0)]
    for number in range(10):
        told(line, key=number, supplies=[Supply(0.04, 40.0, 0.0, 80.0)])
    assert line.kept_s(0.0) == pytest.approx(1 / 40)
    assert told(line, key="next", supplies=ten) == pytest.approx(10 / 400 / 0.9, rel=EXACT)
    assert line.kept_s(0.0) == pytest.approx(2 / 400)  # the next one is due as well
    large = [Supply(0.0, 200.0, 0.0, 800.0)]
    assert told(line, key="large", supplies=large) == pytest.approx(11 / 400 / 0.9, rel=EXACT)
    assert told(line, key="last", supplies=ten) == pytest.approx((11 + 2) / 400 / 0.9, rel=EXACT)


@pytest.mark.parametrize("supplies", [[], [Supply(math.inf, 4.0)]])
def test_the_wait_is_an_slo_while_no_replica_will_open(supplies):
    assert told(RetryLine(slo_s=2.0), supplies=supplies) == 2.0


def test_nobody_is_told_to_come_after_more_than_thirty_slos():
    line = RetryLine()
    waits = [told(line, key=number) for number in range(130)]
    assert waits[100] < 29
    assert waits[-1] == 30.0


def test_a_crowd_behind_a_full_line_leaves_with_it():
    line = RetryLine()
    waits = [told(line, key=number) for number in range(2000)]
    assert sum(wait_s < 30 for wait_s in waits) == pytest.approx(30 * 4 * 0.9, abs=2)
    assert not line.claim(30.0, 1999)
    assert line.kept_s(30.0) < 0.25  # for few of those before
    assert told(line, 31.1, "next") == 0.5


def test_several_routers_share_the_devices():
    line = RetryLine()
    told(line, key="a", routers=3)
    assert told(line, key="b", routers=3) == pytest.approx(0.5 + 3 * 0.25 / 0.9, rel=EXACT)


def test_with_several_routers_a_client_may_return_to_another():
    line = RetryLine(returning=0.4)
    told(line, key="a")
    assert told(line, key="b", routers=2) == pytest.approx(0.5 + 0.8 * 2 * 0.25 / 0.9, rel=EXACT)
    assert told(line, key="c", routers=3) == pytest.approx(0.5 + 1.0 * 3 * 2 * 0.25 / 0.9, rel=EXACT)


@pytest.mark.parametrize(
    ("came_at", "key", "recognized"),
    [
        (0.4989, "mine", False),
        (0.4991, "mine", True),
        (0.5, "other", False),
        (1.54, "mine", True),
        (1.7, "mine", False),
    ],
)
def test_a_client_is_recognized_from_its_time_to_a_second_later(came_at, key, recognized):
    line = RetryLine()
    told(line, key="mine")
    assert bool(line)
    assert line.claim(came_at, key) is recognized
    assert line.claim(came_at, key) is False  # once


def test_clients_that_send_the_same_have_a_place_each():
    line = RetryLine()
    for _ in range(2):
        told(line, key="same")
    assert [line.claim(now, "same") for now in (0.5, 0.6, 0.8, 0.9)] == [True, False, True, False]
    assert not line


def test_an_early_place_of_those_that_send_the_same_does_not_wait_for_a_later_one():
    line = RetryLine()
    for number in range(9):
        told(line, key=number)
    assert told(line, key="same") == pytest.approx(0.5 + 9 * 0.25 / 0.9, rel=EXACT)
    assert told(line, key="same", again=True) == 0.5
    assert line.claim(0.5, "same") is True
    assert line.claim(0.5, "same") is False
    assert line.claim(3.0, "same") is True


def test_room_is_kept_around_its_time():
    line, supplies = RetryLine(), [Supply(0.5, 40.0)]
    told(line, key="mine", supplies=supplies)
    assert [line.kept_s(now) for now in (0.44, 0.46, 0.54, 0.56)] == [0.0, 0.025, 0.025, 0.0]
    assert line.claim(1.0, "mine")  # late
    told(line, 1.0, "mine", supplies)
    assert line.kept_s(1.5) == pytest.approx(0.025, rel=0.02)
    assert line.claim(1.5, "mine")
    assert line.kept_s(1.5) == 0.0


def test_for_a_large_request_no_more_room_is_kept_than_comes_in_that_time():
    line = RetryLine()
    told(line, key="large")  # 0.25 s
    assert line.kept_s(0.5) == pytest.approx(0.1)
    assert line.claim(0.5, "large")
    assert line.kept_s(0.5) == 0.0


def test_no_room_is_kept_for_one_that_returns_before_any_was():
    line = RetryLine(slo_s=0.01)
    for key in "ab":
        told(line, key=key, supplies=[Supply(0.01, 4e3)])
    assert line.claim(0.0091, "a")  # 0.9 ms early
    assert line.kept_s(0.0098) == pytest.approx(1 / 4e3)


def test_a_client_that_came_in_time_and_was_refused_waits_before_the_rest():
    line = RetryLine()
    for number in range(9):
        told(line, key=number)
    now = [Supply(0.0, 4.0)]
    assert line.claim(0.5, 0)
    assert told(line, 0.5, 0, now, again=True) == 0.15
    assert line.claim(0.8, 1)
    assert told(line, 0.8, 1, [Supply(0.3, 4.0)], again=True) == pytest.approx(0.3)
    assert line.claim(1.1, 2)
    assert told(line, 1.1, 2, now, again=True) == pytest.approx(0.25, rel=EXACT)  # behind the one before


def test_the_share_that_returns_is_learned():
    line = RetryLine()
    told(line, key="never comes")
    line.kept_s(9.0)
    assert line.returning == 0.99


def test_the_line_is_as_long_as_the_share_that_returns():
    line = RetryLine()
    for number in range(300):  # every second one returns
        now = 2.0 * number
        wait_s = told(line, now, number)
        if number % 2:
            line.claim(now + wait_s, number)
    assert line.returning == pytest.approx(0.5, abs=0.1)
    waits = [told(line, 2000.0, number) for number in range(3)]
    assert waits[2] - waits[1] == pytest.approx(0.25 / 0.9 * line.returning, rel=4 * EXACT)
    assert line.kept_s(2000.5) == pytest.approx(0.1 * line.returning, rel=0.05)


def test_it_does_not_grow_for_ever():
    line = RetryLine()
    for number in range(10_050):
        told(line, key=number, supplies=[Supply(0.5, 1000.0)])
    assert len(line._places) == 10_000
    assert not line.claim(40.0, "nobody")  # all are long past
    assert not line
    assert line.kept_s(40.0) == 0.0


def test_the_line_starts_empty():
    line = RetryLine()
    assert not line
    assert line.kept_s(0.0) == 0.0
    assert told(line) == 0.5
    assert told(RetryLine(), again=True) == 0.5


def test_how_far_apart_refusals_are_decides_the_share():
    """0.8 s, or 1.6 at an SLO of 2 s: newcomers come in half of the time, over the last SLO."""
    for slo_s in (1.0, 2.0):
        line = RetryLine(slo_s=slo_s)
        told(line, key="before")
        line.claim(0.5, "before")
        share = 0.9 - 0.6 * 0.5 * (1 - math.exp(-0.8))
        waits = [told(line, 0.8 * slo_s, key) for key in "ab"]
        assert waits == pytest.approx([0.5, 0.5 + 0.25 / share], rel=EXACT)


def test_with_room_to_spare_all_the_time_is_for_the_line():
    line = RetryLine()
    for _ in range(19):
        line.saw(spare=True)  # for 0.44 of the requests: twice as much is less than the usual share
    assert [told(line, key=key) for key in "ab"] == pytest.approx([0.5, 0.5 + 0.25 / 0.9], rel=EXACT)
    for _ in range(5):
        line.saw(spare=True)  # for 0.52
    assert told(line, key="c") == pytest.approx(0.5 + 2 * 0.25, rel=EXACT)
    for _ in range(100):
        line.saw(spare=False)
    assert told(line, key="d") == pytest.approx(0.5 + 3 * 0.25 / 0.9, rel=EXACT)


def test_who_is_late_is_ahead_of_nobody():
    line = RetryLine()
    told(line, key="late")
    assert told(line, 5.0, "next") == 0.5


def test_all_times_but_the_whole_second_are_in_slos():
    line = RetryLine(slo_s=2.0)
    told(line, key="mine", supplies=[Supply(0.5, 2.0)])
    assert [line.kept_s(now) for now in (0.39, 0.41, 0.59, 0.61)] == pytest.approx([0.0, 0.2, 0.2, 0.0])
    assert line.claim(1.59, "mine")
    assert told(line, 1.59, "mine", [Supply(0.0, 4.0)], again=True) == pytest.approx(0.3)
    assert line.claim(2.0, "mine")
    assert told(line, 10.0, "late") == 0.5
    assert not line.claim(11.61, "late")
    waits = [told(line, 20.0, number) for number in range(250)]
    assert 30 < waits[125] < 60
    assert waits[-1] == 60.0
