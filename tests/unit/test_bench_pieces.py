"""What comparisons share: samples measured in pieces, tables, goals, and servers that are started and stopped."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from rich.console import Console

from benchmarks.costs.replica_cost import query_us
from benchmarks.costs.way_cost import parts_us
from benchmarks.kit import serving
from benchmarks.kit.bench import Bench, NotAvailable
from benchmarks.kit.goal import Goal, goal_sheet
from benchmarks.kit.registry import ABOUT, comparison
from benchmarks.kit.serving import ROOT, running, settled
from benchmarks.kit.sheet import table

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def piece(tmp_path):
    def make(commit, **more):
        bench = Bench("x", Console(quiet=True), tmp_path, **more)
        bench.found["machine"] |= {"commit": commit, "cpu": "a CPU"}
        return bench

    return make


def test_pieces_add_up_and_name_their_commits(piece, tmp_path):
    first = piece("a")
    first.go_on()  # nothing is there yet
    first.sample({"contestant": "one", "batch": 1}, {"rate": 1.0}, "")
    first.sample({"contestant": "two", "batch": 1}, {"rate": 2.0}, "")
    first.missing("three", "not installed")
    second = piece("b")
    second.go_on()
    for rate in (4.0, 5.0):
        second.sample({"contestant": "two", "batch": 1}, {"rate": rate}, "")
    second.sample({"contestant": "three", "batch": 1}, {"rate": 3.0}, "")
    found = json.loads((tmp_path / "x.json").read_text())
    assert [(sample["contestant"], sample["rate"]) for sample in found["samples"]] == [
        ("one", 1.0), ("two", 4.0), ("two", 5.0), ("three", 3.0)
    ]  # fmt: skip
    assert (found["machine"]["commit"], found["missing"]) == ("a, b", {})


def test_pieces_of_another_machine_or_other_rounds_do_not_add_up(piece):
    piece("a").save()
    other = piece("a")
    other.found["machine"]["cpu"] = "another CPU"
    with pytest.raises(NotAvailable, match="another machine"):
        other.go_on()
    with pytest.raises(NotAvailable, match="quick"):
        piece("a", quick=True).go_on()


def test_a_table_shows_what_is_missing():
    columns = {"name": "{name}", "p50": "{p50_s:.2f} s", "late": "{router[late]:.1%}"}
    whole = {"name": "one", "p50_s": 0.5, "router": {"late": 0.01}}
    sheet = table("Found", columns, [whole, {"name": "two", "p50_s": None, "router": {}}])
    assert sheet.rows == [["one", "0.50 s", "1.0%"], ["two", "-", "-"]]
    assert sheet.markdown()[2:5] == ["| name | p50 | late |", "|---|---|---|", "| one | 0.50 s | 1.0% |"]


@pytest.mark.parametrize(
    ("reached", "at_most", "shown"),
    [
        (0.5, False, ["late", "at least 1 %", "0.50 %", "no"]),
        (0.5, True, ["late", "at most 1 %", "0.50 %", "yes"]),
        (None, True, ["late", "at most 1 %", "not available", "-"]),
    ],
)
def test_a_goal_beside_what_was_reached(reached, at_most, shown):
    assert goal_sheet([Goal("late", 1.0, reached, "%", at_most=at_most)]).rows == [shown]


def test_a_server_is_waited_for_and_stopped():
    command = [sys.executable, "-uc", "import os, time; print('ready', os.getpid()); time.sleep(60)"]
    with running(command, lambda told: told.endswith("\n"), {}) as told:
        pid = int(told.removeprefix("ready"))
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_a_server_that_ends_says_why():
    command = [sys.executable, "-c", "raise SystemExit('the port is taken')"]
    with pytest.raises(RuntimeError, match="the port is taken"), running(command, lambda _: False, {}):
        pass


def test_what_is_counted_is_read_until_it_stays(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=partial(tick, clock)))
    counts = iter([1, 1, 2, 2, 2])  # every half second
    assert settled(lambda: next(counts), 1.0) == 2
    assert list(counts) == []


def tick(clock, seconds):
    clock[0] += seconds


def pictured():
    return [name for name in ABOUT if (RESULTS / f"{name}.json").exists() and hasattr(comparison(name), "plot")]


@pytest.mark.parametrize("name", pictured())
def test_a_picture_shows_all_of_its_data(name):
    """One once ended at half of its curves, and another's dotted line was above its axis."""
    figure = comparison(name).plot(json.loads((RESULTS / f"{name}.json").read_text()))
    for axes in figure.axes:
        low, high = axes.get_ylim()
        for line in axes.lines:
            if line.get_transform() == axes.transData:  # not a vertical line, whose y is a share of the axis
                found = np.asarray(line.get_ydata(), dtype=float)
                assert ((low <= found) & (found <= high) | np.isnan(found)).all(), (axes.get_title(), line.get_label())
            elif line.get_transform() == axes.get_yaxis_transform(which="grid"):  # a level line
                assert low <= line.get_ydata()[0] <= high, axes.get_title()


@pytest.mark.parametrize(("queries", "of_offer"), [(1, 1), (64, 32)])
def test_a_query_at_a_replica_is_timed_from_frame_to_frame(queries, of_offer):
    assert min(query_us(queries, of_offer, runs=2).values()) > 0  # it raises if any query is not answered


def test_a_request_s_way_through_a_router_is_timed_part_by_part():
    assert min(parts_us("1 text, base64", requests=8).values()) > 0  # it raises if a part has another name now
