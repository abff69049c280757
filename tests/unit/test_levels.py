"""Which burst comes next, at the boundaries of each rule. The goals of whole sweeps are in test_estimator.py."""

import pytest

from calibration.fit.latency_model import Sample
from calibration.fit.levels import Aim, Bounds, _close, _where_it_helps, bounds, limit_s, next_level


def samples(**levels):
    """`_6=[0.4, 0.5]`: bursts of 6 queries took so long."""
    return [Sample(int(level[1:]), latency_s) for level, found in levels.items() for latency_s in found]


def on_line(*levels, alpha_s=0.01, beta_s=0.1, off=0.0):
    """Each burst longer than the line says, or shorter, in turn, by a share of `off`."""
    return [Sample(level, (alpha_s * level + beta_s) * (1 + off * (-1) ** at)) for at, level in enumerate(levels)]


# Lone queries, and the climb from there


@pytest.mark.parametrize(
    ("lone", "level"),
    [
        ([], 1),
        ([0.1], 1),
        ([1.0, 1.0], 3),  # just in time
        ([1.1, 1.1], 1),  # too slow twice: once more
        ([1.1, 1.1, 1.1], None),
        ([1.1, 1.1, 1.1, 1.1], None),
        ([1.1, 1.0], 2),  # one was slow by accident: 3 s of work by their median
        ([0.1, 0.1], 6),  # six times at most
        ([0.5, 0.5], 6),  # of three seconds' work
        ([0.51, 0.51], 5),
        ([0.76, 0.76], 3),
        ([0.9, 4.0], 2),  # one more at least
    ],
)
def test_two_lone_queries_then_a_quick_climb(lone, level):
    assert next_level(samples(_1=lone), Aim(1.0)) == level


@pytest.mark.parametrize(("most", "level"), [(1, None), (2, 2), (5, 5), (6, 6), (7, 6)])
def test_never_more_at_once_than_may_be_sent(most, level):
    assert next_level(samples(_1=[0.1, 0.1]), Aim(1.0, most=most)) == level


@pytest.mark.parametrize(
    ("alpha_s", "beta_s", "aim", "expected"),
    [
        (0.018, 0.27, Aim(1.0), [1, 1, 6, 36, 40]),
        (0.018, 0.27, Aim(1.0, "steady"), [1, 1, 6, 25, 25, 12]),  # the depth again, then half of it
        (0.01, 0.1, Aim(3.0), [1, 1, 6, 36, 216, 290]),
        (0.0858, 0.32, Aim(1.0), [1, 1, 6, 7, 3, 7, 7, 3]),  # a small depth: eight, which are cheap
        (0.0752, 0.85, Aim(1.0), [1, 1, 3, 1, 1, 1, 1, 1]),
        (0.0752, 0.85, Aim(1.0, "steady"), [1, 1, 3, 1, 1, 1, 1, 1]),  # a depth of none is tried by lone queries
        (0.0001, 0.01, Aim(1.0, most=64), [1, 1, 6, 36, 64]),
        (0.00001, 0.01, Aim(1.0), [1, 1, 6, 36, 216, 1296, 2048]),
    ],
)
def test_a_line_takes_a_handful_of_bursts(alpha_s, beta_s, aim, expected):
    found = []
    while (level := next_level(found, aim)) is not None:
        found += on_line(level, alpha_s=alpha_s, beta_s=beta_s)
    assert [sample.concurrency for sample in found] == expected


# When it is enough


@pytest.mark.parametrize(
    ("found", "aim", "level"),
    [
        (on_line(1, 1, 90), Aim(1.0), 90),
        (on_line(1, 1, 36, 90), Aim(1.0), None),  # four where the depth is 16 or more
        (on_line(1, 1, 16, 16), Aim(0.26), None),
        (on_line(1, 1, 15, 15), Aim(0.25), 7),
        (on_line(1, 1, 15, 15, 15, 15, 15), Aim(0.25), 7),
        (on_line(1, 1, 15, 15, 15, 15, 15, 15), Aim(0.25), None),  # eight below that
        ([*on_line(1, 1, 90), Sample(1, 0.9)], Aim(1.0), 90),  # an outlier does not count
        (on_line(1, 1, 12, 24, 24, off=0.002), Aim(0.34), None),  # within half a query
        (on_line(1, 1, 12, 24, 24, off=0.006), Aim(0.34), 23),  # within 0.6
        (on_line(1, 1, 1, 1, 76), Aim(1.0), 90),  # within a fiftieth, 1.8 of 90; but it is 1.9
        (on_line(1, 1, 24, off=0.1), Aim(0.34, bursts=4), 20),
        (on_line(1, 1, 24, 24, off=0.1), Aim(0.34, bursts=4), None),
        (on_line(*[1, 1, 90, 90] * 10, off=0.1), Aim(1.0, bursts=41), 45),
        (on_line(*[1, 1, 90, 90] * 10, off=0.1), Aim(1.0), None),  # forty bursts at most
    ],
)
def test_it_ends_when_the_depth_is_known_or_the_bursts_are_spent(found, aim, level):
    assert next_level(found, aim) == level


@pytest.mark.parametrize(("target", "near"), [(100, 85), (7, 6), (6, 5), (4, 3), (2, 1)])
def test_a_level_is_near_another_within_a_sixth_or_one_query(target, near):
    assert _close(near, target)
    assert not _close(near - 1, target)


@pytest.mark.parametrize(
    ("levels", "target", "level"),
    [
        ([100], 100, 100),
        ([100, 100], 100, 50),
        ([100, 85], 100, 50),
        ([100, 84], 100, 100),
        ([100, 100, 35], 100, 100),
        ([100, 100, 34], 100, 50),
        ([100, 100, 65], 100, 100),
        ([100, 100, 66], 100, 50),
        ([100, 100, 100, 50], 100, 100),
        ([100, 100, 100, 100, 50], 100, 50),
        ([3, 3], 3, 3),  # half is 1, and lone queries are known
        ([4, 4, 4, 4], 4, 2),
        ([1, 1, 1], 1, 1),
    ],
)
def test_for_two_bursts_at_the_depth_there_is_one_at_half_of_it(levels, target, level):
    assert _where_it_helps(on_line(*levels), target) == level


# On no line


def test_a_level_off_the_line_is_measured_twice_before_the_line_is_given_up():
    line, off = on_line(1, 1, 6, 36, 90), Sample(45, 0.7)
    assert next_level([*line, off], Aim(1.0)) == 45
    assert next_level([*line, off, off], Aim(1.0)) == 180  # 90 holds: up by doubling
    assert next_level([*line, off, off], Aim(1.0, most=100)) == 100
    assert next_level([*line, off, off], Aim(1.0, most=90)) == 90


@pytest.mark.parametrize(
    ("found", "aim", "level"),
    [
        ({"_50": [0.9]}, Aim(1.0, most=50), 50),  # once more, as it may be an accident
        ({"_50": [0.9, 0.9]}, Aim(1.0, most=50), None),
        ({"_50": [0.9], "_101": [1.05, 1.05]}, Aim(1.0), 75),  # the middle
        ({"_50": [0.9], "_52": [1.05]}, Aim(1.0), 51),
        ({"_50": [0.9], "_51": [1.05]}, Aim(1.0), 51),  # once more
        ({"_50": [0.9], "_51": [1.05, 0.9]}, Aim(1.0), 51),  # as many late as not
        ({"_50": [0.9], "_51": [1.05, 1.05]}, Aim(1.0), 50),
        ({"_50": [0.9, 0.9], "_51": [1.05, 1.05]}, Aim(1.0), None),
        ({"_50": [0.9], "_101": [1.05, 1.05]}, Aim(1.0, bursts=10), 75),
        ({"_50": [0.9], "_101": [1.05, 1.05]}, Aim(1.0, bursts=9), None),
    ],
)
def test_bisection_finds_the_depth_of_what_is_on_no_line(found, aim, level):
    bent = samples(_1=[0.9] * 4, _6=[0.5, 0.5])
    assert next_level(bent + samples(**found), aim) == level


# What the samples say without a line


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"_1": [0.1], "_6": [0.4]}, Bounds(6, None)),
        ({"_1": [0.1], "_6": [1.0]}, Bounds(6, None)),  # just in time
        ({"_1": [0.1], "_6": [1.1]}, Bounds(1, 6)),
        ({"_1": [0.1], "_6": [1.1, 0.4]}, Bounds(1, 6)),  # as many were late: undecided
        ({"_1": [0.1], "_6": [1.1, 0.4, 0.4]}, Bounds(6, None)),
        ({"_1": [0.1], "_6": [1.1, 1.1, 0.4], "_9": [0.4]}, Bounds(1, 6)),  # the lower level counts
        ({"_1": [0.1], "_6": [1.1, 1.1], "_9": [1.1, 1.1]}, Bounds(1, 6)),
        ({"_1": [1.1, 1.1]}, Bounds(0, 1)),
    ],
)
def test_the_bounds_of_a_depth(found, expected):
    assert bounds(samples(**found), Aim(1.0)) == expected


@pytest.mark.parametrize(
    ("holds", "misses", "close"),
    [
        (5, None, False),
        (0, 1, True),
        (5, 6, True),
        (99, 101, False),
        (100, 102, True),  # a fiftieth
        (100, 103, False),
        (150, 153, True),
    ],
)
def test_bounds_within_a_fiftieth_are_close(holds, misses, close):
    assert Bounds(holds, misses).close is close


def test_of_steady_traffic_a_query_waits_for_a_running_batch():
    lone = samples(_1=[0.1, 0.3, 0.2], _6=[0.5])
    assert limit_s(lone, Aim(1.0)) == 1.0
    assert limit_s(lone, Aim(1.0, "steady")) == pytest.approx(0.8)
