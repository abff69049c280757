"""`windve check --devices`: processes that fail, what the page shows, and what is refused. The tasks themselves are in
`tests/models/test_device_check.py`.
"""

import json
import os
import threading
from pathlib import Path

import pytest

from calibration.devices import command
from calibration.devices.command import run_tasks
from calibration.devices.page import page
from calibration.devices.service_load import outcome_figures, seen_alone
from calibration.devices.tasks import PARTS, Plan, Task, tasks
from calibration.load import HttpReply
from deployments.errors import SettingsError
from deployments.models.disk_cache import cache_folder
from serve_app.cli.main import main

# --- processes


def works():
    return {"pid": os.getpid()}


def fails(*_):
    raise RuntimeError("CUDA error: an illegal memory access\nand more")


def refuses():
    raise SettingsError("args.model.id", "no such model")


def a_cpu(_):
    return {"device": "cpu"}


def dies():
    os._exit(7)


def hangs():
    threading.Event().wait()


def caches():
    return {"folder": str(cache_folder())}


def rows_of(folder, *calls, timeout_s=60.0):
    return list(run_tasks([Task(part, call.__name__, call) for part, call in calls], folder, timeout_s))


def test_what_fails_is_a_row_and_the_others_go_on(tmp_path):
    """Each part has a process of its own, as has what comes after an error. No cache is left."""
    of_peak = [("peak", call) for call in (works, works, fails, works, dies, refuses)]
    found = rows_of(tmp_path, *of_peak, ("service", works), ("service", caches))
    first, second, failed, third, dead, refused, other, cached = found
    assert first["pid"] == second["pid"] != third["pid"] != other["pid"]
    assert failed["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert refused["error"] == "args.model.id: no such model"
    assert dead["error"] == "its process has ended with status 7"
    assert [row["name"] for row in (failed, third)] == ["fails", "works"]
    assert Path(cached["folder"]).is_relative_to(tmp_path)
    (hung,) = rows_of(tmp_path, ("peak", hangs), timeout_s=0.1)
    assert hung["error"] == "it has not ended within 0.1 s"


# --- what is measured


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "npu:0"])
def test_the_tasks_of_all_parts_stand_in_their_order(tmp_path, device):
    wanted = list(tasks(Plan.of(device, tmp_path, quick=True), tuple(reversed(PARTS))))
    assert list(dict.fromkeys(task.part for task in wanted)) == list(PARTS)
    assert len({(task.part, task.name) for task in wanted}) == len(wanted)
    (only,) = tasks(Plan.of(device, tmp_path, quick=False), ("service",))
    assert only.part == "service"


def reply(status, seconds):
    return HttpReply(status, {}, b"", seconds)


def test_outcomes_are_counted_once_each():
    outcomes = [reply(200, 0.2), reply(200, 1.0), reply(200, 1.1), reply(429, 0.01), reply(504, 0.01), reply(500, 0.3)]
    figures = outcome_figures([*outcomes, TimeoutError()], texts=16, seconds=2.0)
    assert figures == {
        "offered_s": 56.0,
        "in_time_s": 16.0,
        "late_s": 8.0,
        "refused_s": 16.0,
        "failed_s": 16.0,
        "p50_ms": 1000.0,
        "p99_ms": 1000.0,
    }
    assert outcome_figures([], 1, 1.0)["p50_ms"] is None


# --- the page

FAMILY = {"part": "families", "form": "packed", "dtype": "bfloat16", "alone_ms": 1.5, "warnings": []}
FAMILY |= {"exact": 1.0, "narrow": "bfloat16", "cosine": 0.9995, "agrees": True}
LOAD = {"offered_s": 80.0, "in_time_s": 80.0, "late_s": 0.0, "refused_s": 0.0, "failed_s": 0.0}
ROWS = [
    {"part": "peak", "name": "square", "dtype": "bfloat16", "size": [8, 8, 8], "tflops": 200.0},
    {"part": "peak", "name": "up", "dtype": "bfloat16", "size": [8, 8, 4], "tflops": 100.0},
    {"part": "peak", "name": "square", "dtype": "float32", "error": "RuntimeError: no | memory"},
    {**FAMILY, "name": "BERT", "why": "native; packed 9 queries/s, padded 5"},
    {**FAMILY, "name": "T5", "why": "native; padded 3", "agrees": False, "warnings": ["left out: x"]},
    {"part": "encoder", "name": "form", "form": "packed", "dtype": "bfloat16", "shape": "MiniLM's", "why": "w"}
    | {"warnings": []},
    {"part": "encoder", "name": "75 tokens", "dtype": "bfloat16", "tokens": 75, "batch": 32, "queries_s": 1000.0}
    | {"tokens_s": 75_000.0, "tflops": 50.0, "p50_ms": 32.0},
    {"part": "generation", "name": "1 row", "shape": "Llama's", "dtype": "bfloat16", "why": "w", "rows": 1}
    | {"p50_ms": 2.5, "tokens_s": 400.0, "weights_gb_s": 990.0},
    {"part": "service", "name": "under load", "slo_s": 1.0, "texts": 16, "capacity_s": 100.0, "alone_p50_ms": 5.0}
    | {"loads": [{"share": 0.8, **LOAD, "p50_ms": 20.0, "p99_ms": 90.0, "client_cores": 0.3}]},
]
FOUND = {
    "windve": "1.0",
    "commit": "abc",
    "at": "2026-01-01",
    "quick": True,
    "busy_cores": 0.0,
    "took_s": 60.0,
    "machine": {"cpu": "EPYC", "cores": 2, "memory_gib": 24, "npu_problem": None},
    "device": {"device": "cuda:0", "name": "H200", "memory_gib": 139.8, "cuda": "13.0", "capability": "9.0"},
    "rows": ROWS,
}


@pytest.mark.parametrize(
    "line",
    [
        "# windve on H200 (cuda:0, 139.8 GiB)",
        "| square | bfloat16 | 8 x 8 x 8 | 200 |",
        "- **square failed**: RuntimeError: no \\| memory",
        "| form | dtype | alone ms | exact | narrow | cosine | agrees | name |",
        "| packed | bfloat16 | 1.5 | 1 | bfloat16 | 0.9995 | yes | BERT |",
        "| packed | bfloat16 | 1.5 | 1 | bfloat16 | 0.9995 | **NO** | T5 |",
        "- All: native.",
        "- BERT: packed 9 queries/s, padded 5.",
        "- T5: padded 3. **left out: x.**",
        "- form: w.",
        "| 75 tokens | bfloat16 | 75 | 32 | 1,000 | 75,000 | 50 | 32 | 0.25 |",
        "| name | shape | dtype | rows | p50 ms | tokens/s | weights gb/s |",
        "| 0.8 | 80 | 80 | 0 | 0 | 0 | 20 | 90 | 0.3 |",
    ],
)
def test_the_page_shows(line):
    assert line in page(FOUND).splitlines()
    assert "busy" not in page(FOUND)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"busy_cores": 1.0}, "kept 1.0 cores busy"),
        ({"machine": {**FOUND["machine"], "npu_problem": "an Ascend NPU"}}, "**an Ascend NPU.**"),
        ({"rows": [{"part": part, "name": part, "error": "no"} for part in PARTS]}, "- **service failed**: no"),
        ({"rows": ROWS[2:]}, "| 75 tokens | bfloat16 | 75 | 32 | 1,000 | 75,000 | 50 | 32 |"),  # no peak, no share
    ],
)
def test_the_page_says_what_disturbed_and_what_failed(changed, said):
    assert said in page({**FOUND, **changed})


# --- the command


def test_it_writes_both_files_and_its_status_tells_of_failures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "find_device", a_cpu)
    monkeypatch.setattr(command, "tasks", lambda *_: [Task("peak", "square", fails)])
    assert main(["check", "--devices", "--out", str(tmp_path / "out")]) == 1
    found = json.loads((tmp_path / "out" / "device-check.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["square"]
    assert found["device"]["device"] == "cpu"
    shown = (tmp_path / "out" / "device-check.md").read_text()
    assert shown.startswith(f"# windve on {found['machine']['cpu']} (cpu)")
    assert "square failed" in shown
    assert "device-check.json" in capsys.readouterr().out


def test_a_device_that_cannot_be_used_is_refused_by_its_option(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "find_device", fails)
    assert main(["check", "--devices", "--device", "cuda:7", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("windve: --device: RuntimeError: CUDA error")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--quick"], "--device, --quick and --only need --devices"),
        (["my.yaml", "--devices"], "--devices checks no CONFIG"),
        (["--devices", "--only", "peak,speed"], "windve: --only: there is no part 'speed'; choose from peak,"),
    ],
)
def test_misuse_is_refused(capsys, words, sentence):
    try:
        status = main(["check", *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "before", "seen"),
    [
        ("cpu", {}, {}),
        ("cuda:1", {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "4,GPU-5a"}, {"CUDA_VISIBLE_DEVICES": "GPU-5a"}),
        ("npu:0", {"CUDA_VISIBLE_DEVICES": "4"}, {"ASCEND_RT_VISIBLE_DEVICES": "0"}),
    ],
)
def test_the_service_runs_on_the_device_that_is_checked(monkeypatch, device, before, seen):
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    assert seen_alone(device) == seen
