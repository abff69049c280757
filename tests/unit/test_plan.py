import copy
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from calibration.generation.generation_result import GenerationCalibrationReport
from calibration.planning import command, plan, texts
from calibration.planning.plan import Instance, TrafficDemand, make_plan
from deployments.errors import SettingsError

REPORT = json.loads((Path(__file__).parents[1] / "kit" / "calibration_report.json").read_text())
REPORT["application"]["emulated"] = True
REPORT["pools"]["accelerator"]["depth"] = 96  # as in the paper
REPORT["pools"]["cpu"] |= {"depth": 22, "cores": 48}
ASKED = ["--peak", "1000", "--average", "400", "--price", "2000"]
CPU, ACCELERATOR = ("pools", "cpu"), ("pools", "accelerator")
IDLE = (("cpu_overflow",), {"used": False, "reason": "cpu_overflow is false."})


def changed(*changes):
    """The report with `(path, value)` set, or deleted where the value is Ellipsis."""
    report = copy.deepcopy(REPORT)
    for path, value in changes:
        *parents, last = path
        place = report
        for key in parents:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return report


@pytest.fixture
def planned(tmp_path):
    """Run the sub-command on a report; what it prints."""

    def run(report=REPORT, asked=ASKED):
        (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
        return call([str(tmp_path), *asked])

    return run


def call(words):
    console = Console(file=io.StringIO(), width=100, highlight=False)
    assert command.run(command.parser().parse_args(words), console) == 0
    return console.file.getvalue()


@pytest.fixture
def plan_of(tmp_path):
    """The plan for a report."""

    def make(report=REPORT, **demand):
        (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
        return make_plan(
            Instance.read(tmp_path), TrafficDemand(**{"peak": 1000, "average": 400, "price": 2000.0} | demand)
        )

    return make


def test_the_papers_best_case(plan_of):
    found = plan_of()
    peak, average = found.peak, found.average
    assert (peak.alone.devices, peak.together.devices) == (11, 9)
    assert (peak.saved.devices, peak.saved.cost, peak.saved_share) == (2, 4000.0, 2 / 11)
    assert peak.saved_share_limit == pytest.approx(22 / 118)
    assert average.each_alone == pytest.approx(96 / 1.998)
    assert average.each_together == pytest.approx(96 / 1.998 + 22 / (22 * 0.0858 + 0.32))
    assert (average.alone.instances, average.together.instances) == (9, 7)
    assert found.windows[0] == 96
    assert found.bound.limit == pytest.approx(0.21, abs=0.005)
    assert found.bound.measured == 22 / 96
    assert [row.slo_s for row in found.slos] == [1, 2, 3, 4, 6, 8]
    assert [(row.accelerator, row.cpu) for row in found.slos[:2]] == [(40, 7), (96, 19)]
    assert found.instance.helper is not None


def test_the_tables_lead_with_the_conclusion(planned):
    lines = planned().splitlines()
    assert " ".join(line.strip() for line in lines[:2]) == (
        "For a peak of 1,000 queries at once, the CPU's help saves 2 of 11 devices (4,000 EUR, 18.2 %); "
        "for an average of 400 queries/s, 2 of 9 devices (4,000 EUR, 22.2 %)."
    )
    text = "\n".join(lines)
    assert plan.EMULATED in text
    for title in ("What to buy", "How much the CPU can add", "(Eq. 23)"):
        assert title in text
    assert "nears 18.6 % (peak)" in text
    assert "The verified depths pass the limit" in text
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in text


NO_HELP = (((*CPU, "depth"), 0), ((*CPU, "beta_s"), 2.2))


@pytest.mark.parametrize(
    ("changes", "asked", "sentence"),
    [
        ([], ["--price", "1999.5", "--currency", "[red]USD\x1b[0m"], "(3,999 [red]USD"),
        ([], ["--peak", "1", "--average", "0.5"], "the CPU's help saves nothing (1 device either way)"),
        ([], ["--peak", "10"], "deploy for the average"),
        ([((*CPU, "depth"), 19)], [], "lets this CPU add more than 21.0 %"),
        ([((*CPU, "beta_s"), 0.1)], [], "The premise does not hold"),
        ([((*ACCELERATOR, "alpha_s"), 0.0)], [], "does not rise"),
        (NO_HELP, [], "The CPU answers a first query from an SLO of 2.29 s on (Eq. 11)."),
    ],
)
def test_a_sentence_for_each_case(planned, changes, asked, sentence):
    text = planned(changed(*changes), [*ASKED, *asked])
    assert sentence in " ".join(text.split())
    assert "\x1b" not in text


def test_devices_per_instance(planned, plan_of):
    found = plan_of(devices_per_instance=4)
    assert (found.peak.alone.instances, found.peak.alone.devices, found.peak.alone.cost) == (11, 44, 44 * 2000)
    assert "88,000" in planned(asked=[*ASKED, "--devices-per-instance", "4"])


def test_an_instance_is_all_replicas_of_the_report(planned, plan_of):
    report = changed(((*ACCELERATOR, "replicas"), 4), ((*CPU, "replicas"), 2))
    found = plan_of(report)
    assert (found.devices_per_instance, found.peak.each_alone, found.peak.each_together) == (4, 384, 384 + 44)
    assert found.bound.measured == 44 / 384
    assert found.slos[1].cpu == 2 * 19
    assert "All replicas counted: 2 on CPUs beside 4 on accelerators." in planned(report)


def test_steady_traffic(plan_of):
    report = changed((("settings", "shape"), "steady"), ((*ACCELERATOR, "depth"), 81), ((*CPU, "depth"), 15))
    found = plan_of(report)
    assert found.average.each_alone == pytest.approx(81 / (81 * 0.018 + 0.54))
    assert (found.slos[1].accelerator, found.slos[1].cpu) == (81, 15)


# one kind of device


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (changed((CPU, ...), IDLE), "cpu_overflow is false"),
        (changed((CPU, ...), (("cpu_overflow",), {"used": False, "reason": None})), "the report has no CPU pool"),
        (changed(IDLE), "cpu_overflow is false"),
        (changed((("cpu_overflow", "used"), False)), "it was not in use when the report was made"),
        (changed(((*CPU, "depth"), 0), (("cpu_overflow", "used"), False)), "its queue depth is 0"),
        (changed(((*CPU, "depth"), 0)), "its queue depth is 0"),
        (changed(*NO_HELP), "a single query takes it up to 2.29 s, longer than the SLO of 2 s (Eq. 11)"),
        (changed(*(((*CPU, key), None) for key in ("depth", "alpha_s", "beta_s")), IDLE), "cpu_overflow is false"),
    ],
)
def test_a_cpu_that_does_not_help_and_why(planned, report, why):
    text = " ".join(planned(report).split())
    assert text.startswith("The accelerators alone need 11 devices (22,000 EUR) for a peak of 1,000 queries at once")
    assert f"the CPU does not help: {why}." in text
    assert "with the CPU's help" not in text


@pytest.mark.parametrize("emulated", [True, False])
def test_cpu_only(planned, plan_of, emulated):
    report = changed(
        (ACCELERATOR, ...),
        (("cpu_overflow",), {"used": False, "reason": "no accelerator was found: CPU only"}),
        (("application", "emulated"), emulated),
    )
    text = " ".join(planned(report).split())
    assert text.startswith("Without an accelerator in the report, the CPU alone serves: 46 devices (92,000 EUR)")
    assert ("EMULATED" in text) == emulated
    found = plan_of(report)
    assert (found.instance.base_name, found.instance.helper, found.bound) == ("CPU", None, None)
    assert {row.accelerator for row in found.slos} == {None}


def test_a_latency_that_does_not_rise_is_planned_without_extrapolation(plan_of):
    found = plan_of(changed(((*ACCELERATOR, "alpha_s"), 0.0)))
    assert (found.slos, found.bound) == ([], None)
    assert found.average.each_alone == pytest.approx(96 / 0.27)


# mistakes


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("--peak", "0"), ("--peak", "-3"), ("--peak", "9" * 400), ("--average", "0"), ("--average", "nan")],
        *[("--average", "inf"), ("--price", "0"), ("--price", "-1"), ("--devices-per-instance", "0")],
    ],
)
def test_numbers_that_cannot_be(planned, option, value):
    with pytest.raises(SettingsError, match=r"should be above 0") as caught:
        planned(asked=[*ASKED, option, value])
    assert caught.value.key == option
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (changed((("outcome",), "refused"), (("reason",), "latency is not linear.")), "failed: latency is not linear"),
        (changed((("outcome",), "refused")), "failed: it gives no reason"),
        ([], "should be a mapping of settings, not a list"),
        (changed((("settings",), ...)), "settings: missing"),
        (changed((("settings", "slo_s"), 0)), "settings.slo_s: should be greater than 0, not 0"),
        (changed((("pools",), {})), "pools: has neither"),
        (changed((("outcome",), "estimated")), "estimates that were not proven"),
        (changed(((*ACCELERATOR, "alpha_s"), None)), "pools.accelerator: has a depth but no alpha_s"),
        (changed(((*ACCELERATOR, "alpha_s"), -1)), "pools.accelerator.alpha_s: should be greater than or equal to 0"),
        (changed(((*ACCELERATOR, "alpha_s"), 0), ((*ACCELERATOR, "beta_s"), 0)), "takes no time"),
        (changed(((*ACCELERATOR, "replicas"), 0)), "replicas: should be greater than or equal to 1, not 0"),
        (changed(((*ACCELERATOR, "depth"), 0)), "gives the accelerator depth 0 at an SLO of 2 s"),
        (changed((ACCELERATOR, ...), ((*CPU, "depth"), 0)), "gives the CPU depth 0 at an SLO of 2 s"),
    ],
)
def test_reports_that_cannot_be_planned_with(planned, report, problem):
    with pytest.raises(SettingsError, match=problem) as caught:
        planned(report)
    assert str(caught.value).startswith("REPORT")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("report.json", b"{", "not JSON"),
        ("report.json", b"[" * 100_000, "not JSON"),
        ("report.json", b"\x1f\x8b\x08\x00\x80", "not text"),
        ("a" * 5000, None, r"REPORT: .* cannot be read: "),
        ("", None, r"REPORT: .* cannot be read: "),
    ],
)
def test_files_that_are_no_report(tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=problem):
        call([str(tmp_path / name), *ASKED])


def test_needs_neither_numpy_nor_plots_nor_ray():
    names = ("ray", "torch", "numpy", "scipy", "matplotlib")
    code = f"import sys, calibration.planning.command; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Generation: CPU or accelerator for long texts

STEPS = {"row_s": 0.0, "prompt_token_s": 1e-4, "pair_s": 0.0, "knee": 16}
POOL = {"devices": ["it"], "engine": "torch", "dtype": "bfloat16", "replicas": 2}


def of_generation(**changes):
    pools = {
        "accelerator": {**POOL, "blocks": 64, "step_time": {**STEPS, "beta_s": 0.01, "kv_token_s": 1e-8}},
        "cpu": {**POOL, "blocks": 4096, "step_time": {**STEPS, "beta_s": 0.03, "kv_token_s": 1e-7}},
    }
    shared = ("windve", "started", "finished", "seconds", "notes", "application", "machine")
    about = {key: REPORT[key] for key in shared} | {"kind": "generation"}
    settings = {
        "prompt_tokens": 1, "answer_tokens": 1, "seed": 0, "ttft_s": 2.0, "tpot_s": 0.05, "longest_prompt": None
    }  # fmt: skip
    told = {"outcome": "calibrated", "reason": None, "written": {}, "capacity": 1.0, "streams": []}
    return {**about, **told, "settings": settings, "pools": pools, **changes}


def test_the_latency_of_a_growing_text_is_ellms():
    """Section 2.2: t = e + (p + 1) a / 2."""
    report = GenerationCalibrationReport.parse(of_generation())
    found = texts.pace(report.pools["cpu"], 4096, 0.05)
    assert found.token_s == pytest.approx(0.03 + 4097 / 2 * 1e-7)
    rows = int(0.02 / (4097 / 2 * 1e-7))
    assert found.at_once == 2 * rows
    assert found.tokens_s == pytest.approx(2 * rows / (0.03 + rows * 4097 / 2 * 1e-7))


def test_long_texts_are_the_cpus(planned):
    """The accelerator's cache holds 8 texts of 1,024 tokens and none of 16,384."""
    said = planned(of_generation(), ["--price", "4", "--cpu-price", "1"])
    rows = [words for line in said.splitlines() if (words := line.split())[1:2] in (["accelerator"], ["CPU"])]
    assert [row[0] for row in rows] == [f"{1024 * 4**power:,}" for power in range(5) for _ in range(2)]
    assert rows[0][1:3] == ["accelerator", "16"]
    assert rows[4][1:4] == ["accelerator", "no", "room"]
    assert float(rows[1][-1]) > float(rows[0][-1]), "a cheap CPU gives more for the money"


@pytest.mark.parametrize(
    ("report", "asked", "problem"),
    [
        (of_generation(), ["--peak", "3"], "--peak: is for reports of embeddings"),
        (of_generation(), ["--price", "-1"], "--price: the price should be above 0"),
        (of_generation(pools={}), [], "has no step times to plan with"),
        (REPORT, [*ASKED, "--cpu-price", "1"], "--cpu-price: is for reports of generation"),
        (REPORT, ASKED[:4], "--price: missing"),
    ],
)
def test_an_option_or_report_of_the_other_kind_is_refused(planned, report, asked, problem):
    with pytest.raises(SettingsError, match=problem):
        planned(report, asked)
