"""The goals and tables of `windve bench door`, over made-up measurements."""

import pytest

from benchmarks.comparisons import door
from benchmarks.comparisons.door import BUSY, CLOSED, MINILM, PEAK, QUICK, name_of, of_each, shares

ONE = name_of(QUICK, 1)
CAPACITY_S = 100.0


def measured(**more):
    """What the load generator says of a load of 10 s: all answered in time at the capacity."""
    times = {"p50": None, "p90": None, "p99": None, "max": None}
    found = {
        "seconds": 10.0, "requests": 1000, "offered_s": 100.0, "answered": 1000, "in_time": 1000, "in_time_s": 100.0,
        "late": 0, "late_worst_s": 0.0, "refused_429": 0, "refused_503": 0, "other": {}, "broken": 0, "unanswered": 0,
        "answer_ms": times, "refusal_ms": times, "client_cores": 0.004,
    } | more  # fmt: skip
    return found | {"capacity_s": CAPACITY_S} | shares(found, CAPACITY_S)


def sample(contestant, load, number=0, **more):
    load = load if isinstance(load, str) else f"{load:g} times"
    return {"contestant": contestant, "load": load, "round": number, **measured(**more)}


def found_with(*more):
    loads = {
        ONE: (CLOSED, 0.8, 1.1, 1.5, 2, 4, 10),
        name_of(QUICK, 2): (1.1,),
        name_of(MINILM, 1): (1.1, 1.7, 2.8, 5, "bursts of 206", "bursts of 1,200", PEAK),
        name_of(MINILM, 2): (1.1,),
        BUSY: (1.1,),
    }
    usual = [sample(name, load) for name, some in loads.items() for load in some]
    return {"samples": [*usual, *more], "nice": {ONE: 15}, "settings": {"mosec": "batch 8"}}


def test_all_goals_are_met_where_all_is_in_time():
    met = {goal.what: goal.met for goal in door.goals(found_with())}
    assert [what for what, yes in met.items() if yes is not True] == [f"{ONE}: p99 of refusals, most of any load"]
    assert len(met) == 20
    assert {goal.met for goal in door.goals({"samples": []})} == {None}


@pytest.mark.parametrize(
    ("worse", "missed"),
    [
        (sample(ONE, 2, 1, in_time_s=70.0), [f"{ONE}: in time at 2 times the capacity"]),
        (sample(ONE, 10, 1, in_time_s=10.0), []),
        (sample(ONE, 10, 1, in_time=999, late=1), [f"{ONE}: late, most of any load"]),
        (sample(ONE, 4, 1, refused_429=9, refusal_ms={"p50": 9.0, "p99": 90.0}),
         [f"{ONE}: p99 of refusals, most of any load"]),
        (sample(ONE, 0.8, 1, refused_503=1), [f"{ONE}: refused at 0.8 times the capacity"]),
        (sample(name_of(MINILM, 2), 1.1, 1, late=6), [f"{name_of(MINILM, 2)}: late, most of any load"]),
        (sample(name_of(MINILM, 1), "bursts of 206", 1, in_time=999),
         [f"{name_of(MINILM, 1)}: answered in time of bursts of 206"]),
        (sample(BUSY, 1.1, 1, in_time_s=30.0), [f"{BUSY}: in time, of what is answered alone"]),
    ],
)  # fmt: skip
def test_the_worst_round_counts(worse, missed):
    assert [goal.what for goal in door.goals(found_with(worse)) if goal.met is False] == missed


def test_tables_show_the_worst_of_what_should_not_be_and_medians_of_rates():
    more = {"late": 10, "late_worst_s": 0.5, "other": {"504": 3}, "unanswered": 2}
    worse = sample(ONE, 2, 1, in_time_s=50.0, refusal_ms={"p50": 5.0, "p99": 70.0}, refused_429=7, **more)
    sheet = door.sheets(found_with(worse))[0]
    assert sheet.title == f"{ONE}: as it comes, engine at nice 15, capacity 100/s; 2 rounds"
    row = dict(zip(sheet.head, next(row for row in sheet.rows if row[0] == "2 times"), strict=True))
    assert row == {
        "load": "2 times", "offered/s": "100", "in time/s": "75", "of the capacity": "0.75", "late": "1.00%",
        "by at most, s": "0.50", "refused: 429": "7", "503": "0", "refused within, p50, ms": "5", "p99": "70",
        "answered within, p50, ms": "-", "p99 ": "-", "others": "3", "broken, unanswered": "2",
        "client's cores": "0.00",
    }  # fmt: skip
    silent = {"samples": [sample(ONE, 2, answered=0, in_time=0, in_time_s=0.0, unanswered=1000)]}
    assert door.sheets(silent)[0].rows[0][2:5] == ["0", "0.00", "-"]
    assert door.plot(found_with(worse)).axes


def test_answers_are_counted_for_each_burst(tmp_path):
    (tmp_path / "samples").write_text(
        "0.0 0.5 200\n0.0 1.5 200\n0.0 0.01 429\n0.3 0.1 200\n10.0 0.1 200\n10.0 0.2 200\n"
    )
    assert of_each(tmp_path / "samples") == [1, 2]
