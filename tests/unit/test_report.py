"""The report renders whatever a calibration may end with, and nothing foreign gets through unescaped."""

import copy
import io
import json
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import orjson
import pytest
from rich.console import Console

from calibration.report import plots, report
from calibration.report.report_model import CalibrationReport

VOID = {"meta", "img"}
MADE = orjson.loads((Path(__file__).parents[1] / "kit" / "calibration_report.json").read_bytes())  # V100 + Xeon at 2 s


def unfitted(pool):
    pool |= dict.fromkeys(("alpha_s", "beta_s", "r2", "noise", "estimate", "depth", "cost"))
    pool["band"] = []


def without(made, name):
    del made["pools"][name], made["verification"]["pools"][name]
    for burst in made["bursts"]:
        burst["latencies_s"] = {pool: taken for pool, taken in burst["latencies_s"].items() if pool != name}
    made["cpu_overflow"] = {"used": False, "reason": f"there is no {name} pool"}


cpu_only = partial(without, name="accelerator")
accelerator_only = partial(without, name="cpu")


def cpu_too_slow(made):
    unfitted(made["pools"]["cpu"])
    made["pools"]["cpu"] |= {"depth": 0}
    made["pools"]["cpu"]["samples"] = [{"concurrency": 1, "latency_s": 2.4, "outlier": False}]
    made["cpu_overflow"] = {"used": False, "reason": "the CPU cannot answer one query in time (Eq. 11)"}


def refused(made):
    made |= {"outcome": "refused", "reason": "another client sends queries", "verification": None}
    made |= {"streams": [], "bursts": [], "notes": []}
    made["written"] = {"config": None, "backup": None, "applied": False}
    for pool in made["pools"].values():
        unfitted(pool)
        pool["samples"] = []


def refused_before_any_pool(made):
    refused(made)
    made["pools"] = {}


def two_accelerators(made):
    made["pools"]["accelerator"]["replicas"] = 2


def emulated(made):
    """And without a sample."""
    made["application"]["emulated"] = True
    made["bursts"] = []
    for pool in made["pools"].values():
        pool["samples"] = []


def steady(made):
    made["settings"] |= {"shape": "steady"}
    made["bursts"] = []
    for pool in made["pools"].values():
        pool["depth"] = int((2 - 2 * pool["beta_s"]) / pool["alpha_s"])


def late(made):
    made["bursts"][-1]["latencies_s"]["cpu"] += [2.3, 900.0]


BOTH = "accelerator 95 + CPU 19 at an SLO of 2 s: +20.0 % concurrency on the same hardware"
VARIANTS = {
    None: BOTH,
    cpu_only: "CPU 19 at an SLO of 2 s",
    accelerator_only: "accelerator 95 at an SLO of 2 s, without the CPU: there is no cpu pool",
    cpu_too_slow: "accelerator 95 at an SLO of 2 s, without the CPU: the CPU cannot answer one query in time (Eq. 11)",
    refused: "refused: another client sends queries",
    refused_before_any_pool: "refused: another client sends queries",
    emulated: BOTH,
    late: BOTH,
    two_accelerators: "accelerator 2 x 95 + CPU 19 at an SLO of 2 s: +10.0 % concurrency on the same hardware",
    steady: "accelerator 81 + CPU 15 at an SLO of 2 s: +18.5 % concurrency on the same hardware",
}


class Page(HTMLParser):
    """The text of a page; fails where its tags do not nest or where it would load something."""

    def __init__(self, page):
        super().__init__()
        self.open, self.seen, self.text, self.pictures = [], [], "", 0
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        assert tag not in {"script", "link", "iframe", "object"}
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in {"href", "srcset", "style"}
            assert name != "src" or value.startswith("data:image/png;base64,iVBOR")
        self.pictures += tag == "img"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def changed(change):
    made = copy.deepcopy(MADE)
    if change is not None:
        change(made)
    return made


def typed(made):
    """As it is read from a file."""
    return CalibrationReport.parse(json.loads(orjson.dumps(made)))


def shown(made, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    report.shown(typed(made)).show(console)
    return console.file.getvalue()


def row(text, start):
    """The cells of the first line that starts with `start`."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return line.strip().removeprefix(start).split()


@pytest.fixture
def plain(monkeypatch):
    """Pictures in low resolution, for speed. They leave no state behind."""
    monkeypatch.setattr(plots, "DOTS_PER_INCH", 30)
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("change", VARIANTS, ids=lambda change: getattr(change, "__name__", None))
def test_every_outcome_renders(change, tmp_path, plain):
    made = changed(change)
    page = report.shown(typed(made)).write(tmp_path / "new" / "folder")
    assert page == tmp_path / "new" / "folder" / "report.html"
    assert orjson.loads((page.parent / "report.json").read_bytes()) == made
    drawn = {f"fit-{name}.png" for name in made["pools"]} | ({"verification.png"} if made["bursts"] else set())
    assert {path.name for path in page.parent.iterdir()} == {"report.json", "report.html", *drawn}
    read = Page(page.read_text(encoding="utf-8"))
    assert read.pictures == len(drawn)
    assert read.seen.count("h1") == 1
    assert VARIANTS[change] in read.text
    assert ("EMULATED" in read.text) == (change is emulated)
    if change is None:
        numbers = "95 + 19|+20.0 %|16.7 %|0.018|0.99870|570 of 570|23.5|240.2|1210"
        words = "serve_app/config.yaml|memory, GiB|AMD EPYC|keeps its depth while the CPU works"
        assert all(said in read.text for said in f"{numbers}|{words}".split("|"))
    terminal = shown(made)
    assert terminal.splitlines()[-1] == VARIANTS[change]
    assert ("EMULATED" in terminal) == (change is emulated)
    assert all(len(line) <= 100 for line in terminal.splitlines()[:-1])


def test_the_terminal_has_the_tables_of_the_paper():
    made = changed(None)
    made["pools"]["accelerator"]["stress_depth"] = 91
    text = shown(made)
    assert row(text, "stress test") == ["91", "–"]
    assert row(text, "estimate") == ["96", "19"]
    assert row(text, "verified") == ["95", "19"]
    assert row(text, "with the CPU, queries at once") == ["95", "+", "19"]
    assert row(text, "hardware saved at peak load, up to (Eq. 6)") == ["16.7", "%"]
    assert row(text, "throughput gained at average load, up to (Eq. 5)") == ["+20.0", "%"]
    assert row(text, "CPU  ") == ["95", "0", "1.880", "1.950", "1.957"]
    assert row(text, "10  ") == ["3.96", "18.88"]
    assert row(text, "225  ") == ["50.4", "240.2"]
    assert row(text, "stream of mixed lengths") == ["86.2", "1210", "3", "514", "1.210", "1.952", "2.013"]
    assert "Tesla V100" in text


def test_no_late_query_is_rounded_away():
    made = changed(None)
    made["verification"] |= {"admitted": 10000, "share": 0.9999}
    made["verification"]["pools"]["cpu"]["late"] = 1
    assert "9999 of 10000 admitted within the SLO (99.9 %)" in shown(made)


def test_foreign_text_stays_text(tmp_path, plain):
    foreign = "<script src=http://evil>$\\frac{$ [red]x[/red] \x1b[31m\n \u6607\u817e & \"'"
    made = changed(None)
    made["application"] |= {"name": foreign, "model": foreign}
    made["machine"]["cpu_model"] = foreign
    made["notes"] = [foreign]
    made["cpu_overflow"]["reason"] = foreign
    made["written"]["config"] = foreign
    made |= {"bursts": [], "outcome": "refused", "reason": foreign}
    for pool in made["pools"].values():
        pool |= {"devices": [foreign, foreign], "engine": foreign}
    page = report.shown(typed(made)).write(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "\x1b" not in page
    assert "<script src=http://evil>$\\frac{$ [red]x[/red]" in Page(page).text
    terminal = shown(made)
    assert "\x1b" not in terminal
    assert "[red]x[/red]" in terminal
