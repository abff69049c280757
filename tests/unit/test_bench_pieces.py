"""A comparison that is measured in pieces: what is measured anew takes the place of what was kept."""

import json

import pytest
from rich.console import Console

from benchmarks.kit.bench import Bench, NotAvailable


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
