"""Writes a comparison's tables and picture beside its JSON, and the summary of all comparisons."""

import json
from pathlib import Path

from rich.console import Console

from benchmarks.kit.bench import Found, machine_line, noise_line
from benchmarks.kit.goal import goal_sheet
from benchmarks.kit.registry import ABOUT, comparison
from benchmarks.kit.sheet import table

_DOTS_PER_INCH = 130


def write(out: Path, found: Found, console: Console) -> None:
    """Write NAME.md beside NAME.json, and NAME.png if there is a picture. Also prints the tables."""
    name = found["name"]
    compared = comparison(name)
    missing = [{"name": name, "why": why} for name, why in found.get("missing", {}).items()]
    not_measured = table("Not measured", {"": "{name}", "why": "{why}"}, missing)
    sheets = [*compared.sheets(found), not_measured, goal_sheet(compared.goals(found))]
    lines = [f"# {name}: {ABOUT[name]}", "", f"By `make bench ARGS={name}` on {machine_line(found)}"]
    lines += ["", noise_line(found)] if any("others" in sample for sample in found["samples"]) else []
    lines += ["", "Quick: fewer and shorter rounds."] if found["quick"] else []
    if plot := getattr(compared, "plot", None):
        plot(found).savefig(out / f"{name}.png", dpi=_DOTS_PER_INCH)
        lines += ["", f"![{name}]({name}.png)"]
    lines += [""]
    for sheet in filter(lambda sheet: sheet.rows, sheets):
        console.print(sheet.rich())
        lines += sheet.markdown()
    (out / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")


def write_summary(out: Path) -> None:
    """Write README.md: each comparison's goals, and what was reached."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ["# What was measured", "", "By `make bench` and `make paper`. Raw samples are in the JSON files.", ""]
    for name in ABOUT:
        file = out / f"{name}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        lines += goal_sheet(comparison(name).goals(found), f"[{name}]({name}.md): {ABOUT[name]}").markdown()
        lines += [machine_line(found), ""]
    if (out / "paper.md").exists():
        about = "the figures and tables of WindVE, NEO and APEX, over emulated devices and on this CPU"
        lines += [f"## [paper](paper.md): {about}", ""]
    (out / "README.md").write_text("\n".join(lines), encoding="utf-8")
