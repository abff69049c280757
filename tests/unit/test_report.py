"""The report renders whatever a calibration may end with, and nothing foreign gets through unescaped."""

import copy
import io
from html.parser import HTMLParser

import numpy as np
import orjson
import pytest
from rich.console import Console

from calibration.report import plots, report
from calibration.report.report_model import Report

CURVES = {"accelerator": (0.018, 0.27), "cpu": (0.0858, 0.32)}  # V100 and Xeon, s per query and s
DEVICES = {"accelerator": "cuda:0 Tesla V100", "cpu": "2 x Xeon E5-2690"}
VOID = {"meta", "img"}


def made_pool(name, depth, slo_s, rng):
    alpha_s, beta_s = CURVES[name]
    levels = np.unique(np.linspace(1, depth * 1.03, 8).astype(int)).repeat(3)
    samples = [
        {"concurrency": int(c), "latency_s": float((alpha_s * c + beta_s) * rng.normal(1, 0.015)), "outlier": False}
        for c in levels
    ]
    middle = samples[len(samples) // 2]
    middle |= {"latency_s": middle["latency_s"] * 1.3, "outlier": True}
    band = [[c, 0.98 * (alpha_s * c + beta_s), 1.02 * (alpha_s * c + beta_s)] for c in range(1, depth + 2)]
    return {
        "devices": [DEVICES[name]], "engine": "torch", "dtype": "float16", "replicas": 1, "cores": None,
        "alpha_s": alpha_s, "beta_s": beta_s, "r2": 0.9987, "noise": 0.015, "band": band,
        "regression_depth": depth + 1, "estimate": depth - 1, "stress_depth": None, "stress_queries": None,
        "fine_tuned": depth, "samples": samples, "queries": 181, "note": None,
        "cost": {"query_s": 0.1 * alpha_s, "token_s": 0.9 * alpha_s / 75, "token2_s": 0.0, "beta_s": beta_s,
                 "samples": [],
                 "by_tokens": [[tokens, alpha_s * (0.1 + 0.9 * tokens / 75)] for tokens in (10, 75, 225)]},
    }  # fmt: skip


def made_report(slo_s=2.0):
    """V100 + Xeon at 2 s, 1.5 % noise, an outlier each."""
    rng = np.random.default_rng(7)
    depths = {"accelerator": 95, "cpu": 19}
    last = {"accelerator": (0.85 * slo_s, 0.99 * slo_s), "cpu": (0.9 * slo_s, 0.98 * slo_s)}
    verify = {name: rng.uniform(*last[name], depths[name]).tolist() for name in depths}
    return {
        "format": 1, "windve": "0.1.0", "started": "2026-11-20T23:59:00Z", "finished": "2026-11-21T00:00:14Z",
        "seconds": 74.2, "outcome": "calibrated", "reason": None,
        "notes": ["the accelerator keeps its depth while the CPU works"],
        "application": {"name": "windve", "model": "all-MiniLM-L6-v2", "emulated": False,
                        "url": "http://127.0.0.1:8000"},
        "machine": {"hostname": "n1", "cpu_model": "AMD EPYC", "architecture": "x86_64", "cores": 2, "memory_gib": 23.5,
                    "python": "3.11.7", "ray": "2.60.0"},
        "settings": {"slo_s": slo_s, "shape": "burst", "tokens": 75, "quantile": 1.0, "most": 2048, "seed": 0,
                     "stress_step": 0, "confidence": 0.975},
        "pools": {name: made_pool(name, depth, slo_s, rng) for name, depth in depths.items()},
        "heterogeneous": {"used": True, "reason": None},
        "fine_tuning": [
            {"accelerator": 94, "cpu": 20, "slowest_s": {"accelerator": 1.961, "cpu": 2.036},
             "held": {"accelerator": True, "cpu": False}},
            {**depths, "slowest_s": {"accelerator": 1.98, "cpu": 1.951}, "held": {"accelerator": True, "cpu": True}},
        ],
        "verification": {
            "bursts": 5, "queries": 700, "admitted": 570, "busy": 130, "failed": 0, "within_slo": 570, "share": 1.0,
            "pools": {"accelerator": {"admitted": 475, "late": 0, "p50_s": 1.84, "p99_s": 1.97, "slowest_s": 1.983},
                      "cpu": {"admitted": 95, "late": 0, "p50_s": 1.88, "p99_s": 1.95, "slowest_s": 1.957}},
        },
        "streams": [
            {"name": name, "rate": 86.2, "tokens": 75, "mixed": name != "stream", "sent": 1724, "admitted": 1210,
             "late": 3, "busy": 514, "p50_s": 1.21, "p99_s": 1.952, "slowest_s": 2.013}
            for name in ("stream", "stream of mixed lengths")
        ],
        "bursts": [
            {"stage": "sweep", "at": 1795219140.2, "depths": {"accelerator": 16, "cpu": 0}, "sent": 16, "busy": 0,
             "failed": 0, "latencies_s": {"accelerator": [0.55] * 16, "cpu": []}},
            *({"stage": "verify", "at": 1795219180.2, "depths": depths, "sent": 140, "busy": 26, "failed": 0,
               "latencies_s": verify} for _ in range(5)),
        ],
        "written": {"config": "serve_app/config.yaml", "backup": None, "applied": True},
    }  # fmt: skip


def unfitted(pool):
    pool |= dict.fromkeys(("alpha_s", "beta_s", "r2", "noise", "regression_depth", "estimate", "fine_tuned", "cost"))
    pool["band"] = []


def without(made, name):
    del made["pools"][name], made["verification"]["pools"][name]
    for burst in made["bursts"]:
        burst["latencies_s"] = {pool: taken for pool, taken in burst["latencies_s"].items() if pool != name}
    for step in made["fine_tuning"]:
        del step["slowest_s"][name], step["held"][name]
        step[name] = None
    made["heterogeneous"] = {"used": False, "reason": f"there is no {name} pool"}


def cpu_only(made):
    without(made, "accelerator")


def accelerator_only(made):
    without(made, "cpu")


def cpu_too_slow(made):
    unfitted(made["pools"]["cpu"])
    made["pools"]["cpu"] |= {"fine_tuned": 0, "note": "one query alone takes 2.4 s"}
    made["pools"]["cpu"]["samples"] = [{"concurrency": 1, "latency_s": 2.4, "outlier": False}]
    made["heterogeneous"] = {"used": False, "reason": "the CPU cannot answer one query in time (Eq. 11)"}


def refused(made):
    made |= {
        "outcome": "refused",
        "reason": "another client sends queries",
        "verification": None,
        "fine_tuning": [],
        "streams": [],
    }
    made |= {"bursts": [], "notes": [], "written": {"config": None, "backup": None, "applied": False}}
    for pool in made["pools"].values():
        unfitted(pool)
        pool["samples"] = []


def refused_before_any_pool(made):
    refused(made)
    made["pools"] = {}


def emulated(made):
    made["application"]["emulated"] = True
    made["bursts"] = []


def steady(made):
    made["settings"] |= {"shape": "steady", "quantile": 0.99}
    made["bursts"] = []
    for pool in made["pools"].values():
        pool["fine_tuned"] = int((2 - 2 * pool["beta_s"]) / pool["alpha_s"])


def without_a_sample(made):
    for pool in made["pools"].values():
        pool["samples"] = []
    made["bursts"] = []


def late(made):
    made["bursts"][-1]["latencies_s"]["cpu"] = [*made["bursts"][-1]["latencies_s"]["cpu"], 2.3, 900.0]
    made["verification"] |= {"within_slo": 568, "share": 568 / 570}


VARIANTS = {
    None: "accelerator 95 + CPU 19 at an SLO of 2 s: +20.0 % concurrency on the same hardware",
    cpu_only: "CPU 19 at an SLO of 2 s",
    accelerator_only: "accelerator 95 at an SLO of 2 s, without the CPU: there is no cpu pool",
    cpu_too_slow: "accelerator 95 at an SLO of 2 s, without the CPU: the CPU cannot answer one query in time (Eq. 11)",
    refused: "refused: another client sends queries",
    refused_before_any_pool: "refused: another client sends queries",
    emulated: "accelerator 95 + CPU 19 at an SLO of 2 s: +20.0 % concurrency on the same hardware",
    steady: "accelerator 81 + CPU 15 at an SLO of 2 s: +18.5 % concurrency on the same hardware",
    without_a_sample: "accelerator 95 + CPU 19 at an SLO of 2 s: +20.0 % concurrency on the same hardware",
    late: "accelerator 95 + CPU 19 at an SLO of 2 s: +20.0 % concurrency on the same hardware",
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
    return Report.parse(orjson.dumps(made), "report.json")


def shown(made, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    report.show(console, typed(made))
    return console.file.getvalue()


def row(text, start):
    """The cells of the first line that starts with `start`."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return line.strip().removeprefix(start).split()


MADE = made_report()


@pytest.fixture
def plain(monkeypatch):
    """Pictures in low resolution, for speed."""
    monkeypatch.setattr(plots, "DOTS_PER_INCH", 30)


@pytest.mark.parametrize("change", VARIANTS, ids=lambda change: getattr(change, "__name__", "both_pools"))
def test_every_outcome_renders(change, tmp_path, plain):
    made = changed(change)
    page = report.write(tmp_path / "new" / "folder", typed(made))
    assert page == tmp_path / "new" / "folder" / "report.html"
    assert orjson.loads((page.parent / "report.json").read_bytes()) == made
    drawn = {f"fit-{name}.png" for name in made["pools"]} | ({"verification.png"} if made["bursts"] else set())
    assert {path.name for path in page.parent.iterdir()} == {"report.json", "report.html", *drawn}
    read = Page(page.read_text(encoding="utf-8"))
    assert read.pictures == len(drawn)
    assert read.seen.count("h1") == 1
    assert VARIANTS[change] in read.text
    assert ("EMULATED" in read.text) == (change is emulated)
    terminal = shown(made)
    assert terminal.splitlines()[-1] == VARIANTS[change]
    assert ("EMULATED" in terminal) == (change is emulated)
    assert all(len(line) <= 100 for line in terminal.splitlines()[:-1])


def test_a_report_of_an_earlier_version_is_read():
    made = changed(None)
    del made["streams"]
    for pool in made["pools"].values():
        del pool["stress_queries"], pool["band"], pool["cost"]
    del made["fine_tuning"][0]["cpu"]
    read = typed(made)
    assert (read.streams, read.pools["cpu"].cost, read.pools["cpu"].band) == ([], None, [])
    assert shown(made).splitlines()[-1] == VARIANTS[None]
    made = changed(None)
    del made["pools"]["cpu"]["cost"]["beta_s"]
    assert shown(made) == shown(changed(None))


def test_what_a_later_version_adds_is_ignored():
    made = changed(None)
    made["later"] = made["pools"]["cpu"]["later"] = [1]
    assert typed(made) == typed(changed(None))


def test_the_terminal_has_the_tables_of_the_paper():
    made = changed(None)
    made["pools"]["accelerator"]["stress_depth"] = 91
    text = shown(made)
    assert row(text, "linear regression") == ["96", "20"]
    assert row(text, "stress test") == ["91", "–"]
    assert row(text, "estimate") == ["94", "18"]
    assert row(text, "fine-tuned") == ["95", "19"]
    assert row(text, "with the CPU, queries at once") == ["95", "+", "19"]
    assert row(text, "hardware saved at peak load, up to (Eq. 6)") == ["16.7", "%"]
    assert row(text, "throughput gained at average load, up to (Eq. 5)") == ["+20.0", "%"]
    assert row(text, "CPU  ") == ["95", "0", "1.880", "1.950", "1.957"]
    assert row(text, "10  ") == ["3.96", "18.88"]
    assert row(text, "225  ") == ["50.4", "240.2"]
    assert row(text, "stream of mixed lengths") == ["86.2", "1210", "3", "514", "1.210", "1.952", "2.013"]
    assert "Tesla V100" in text


def test_the_page_has_the_numbers():
    text = Page(report._page(typed(MADE), {})).text
    for number in (
        "95 + 19",
        "+20.0 %",
        "16.7 %",
        "0.018",
        "0.99870",
        "2.036",
        "missed",
        "570 of 570",
        "23.5",
        "240.2",
        "1210",
    ):
        assert number in text
    for word in ("serve_app/config.yaml", "memory, GiB", "AMD EPYC", "keeps its depth while the CPU works"):
        assert word in text


def test_no_late_query_is_rounded_away():
    made = changed(None)
    made["verification"] |= {"within_slo": 9999, "admitted": 10000, "share": 0.9999}
    assert "9999 of 10000 admitted within the SLO (99.9 %)" in shown(made)


def test_replicas_count():
    made = changed(None)
    made["pools"]["accelerator"]["replicas"] = 2
    assert report.verdict(typed(made)).startswith("accelerator 2 x 95 + CPU 19 at an SLO of 2 s: +10.0 %")
    assert "per replica" in shown(made)


def test_foreign_text_stays_text(tmp_path, plain):
    foreign = "<script src=http://evil>$\\frac{$ [red]x[/red] \x1b[31m\n \u6607\u817e & \"'"
    made = changed(None)
    made["application"] |= {"name": foreign, "model": foreign}
    made["machine"]["cpu_model"] = foreign
    made["notes"] = [foreign]
    made["heterogeneous"]["reason"] = foreign
    made["written"]["config"] = foreign
    made["bursts"] = []
    for pool in made["pools"].values():
        pool |= {"devices": [foreign, foreign], "engine": foreign, "note": foreign}
    page = report.write(tmp_path, typed(made)).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "\x1b" not in page
    assert "<script src=http://evil>$\\frac{$ [red]x[/red]" in Page(page).text
    terminal = shown(made)
    assert "\x1b" not in terminal
    assert "[red]x[/red]" in terminal
    made |= {"outcome": "refused", "reason": foreign}
    page = report._page(typed(made), {})
    assert "<script" not in page
    assert "refused: <script src=http://evil>" in Page(page).text


def test_pictures_leave_no_state_behind(plain):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    assert plots.fit(typed(MADE), "cpu").startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before
