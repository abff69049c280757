"""The calibration's report: `report.json` for programs, `report.html` with its pictures for people, tables for the
terminal. It renders what it is handed and measures nothing; a null in the report is shown as a dash.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calibration import plots
from calibration.tables import DASH, POOLS, add_row, new_table, percent, plain

EMULATED = "The devices are EMULATED: the depths are true of the emulated curves, not of this machine's devices."
UNITS = {"_s": "s", "_ms": "ms", "_gib": "GiB", "_bytes": "bytes"}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --line: #d5dae0; --page: #ffffff; --tint: #f4f6f8;
  --mark: #00694e; --warn: #9a3412; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e7ec; --soft: #9aa5b1; --line: #38414b; --page: #14181d;
  --tint: #1d232a; --mark: #56c9a4; --warn: #f2a172; } }
body { max-width: 46rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.3; margin: 0 0 .5rem; color: var(--mark); }
h1.refused, .warn { color: var(--warn); }
.warn { font-weight: 600; border-left: 4px solid; padding-left: .75rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
header p, caption, figcaption { color: var(--soft); }
caption { text-align: left; padding-bottom: .4rem; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .6rem; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; font-weight: normal; }
thead th, thead th:first-child { color: var(--soft); font-weight: 600; font-size: .9rem; }
table.facts :is(td, th) { text-align: left; overflow-wrap: anywhere; }
table.facts th:first-child { width: 34%; }
tr.final > * { font-weight: 700; background: var(--tint); }
figure { margin: 1rem 0; padding: .75rem; background: #fff; border: 1px solid var(--line); border-radius: 8px; }
figure img { display: block; width: 100%; height: auto; }
@media print { body { max-width: none; padding: 0; } figure, table { break-inside: avoid; } }
"""


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table for both the page and the terminal. `final` is the row to look at, `facts` aligns text to the left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    final: int | None = None
    facts: bool = False


def write(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write `report.json`, the pictures and `report.html` into `folder`; the path of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(orjson.dumps(dict(report), option=orjson.OPT_INDENT_2))
    pictures = {f"fit-{name}.png": plots.fit(report, name) for name in _pools(report)}
    verification = plots.verification(report)
    if verification is not None:
        pictures["verification.png"] = verification
    for name, png in pictures.items():
        (folder / name).write_bytes(png)
    page = folder / "report.html"
    page.write_text(_page(report, pictures), encoding="utf-8")
    return page


def show(console: Console, report: Mapping[str, Any]) -> None:
    """The depths, the gain, the verification and the verdict, for a terminal of 100 columns."""
    for sheet in _sheets(_depths(report), _cost(report), _gain(report), _verification(report), _streams(report)):
        console.print(Text(sheet.title, style="bold"))
        console.print(_rich_table(sheet))
        console.print(Text(f"{sheet.caption}\n" if sheet.caption else "", style="dim"))
    if report["application"]["emulated"]:
        console.print(Text(EMULATED, style="yellow"))
    console.print(Text(verdict(report), style="bold red" if _refused(report) else "bold green"), soft_wrap=True)


def verdict(report: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    if _refused(report):
        return f"refused: {_text(report['reason'])}"
    if report["outcome"] == "estimated":
        estimates = " + ".join(f"{POOLS[name]} {_number(pool['estimate'])}" for name, pool in _pools(report).items())
        return f"estimated, not proven: {estimates} at an SLO of {report['settings']['slo_s']:g} s"
    slo, pools = f"at an SLO of {report['settings']['slo_s']:g} s", _pools(report)
    counted = {name: _concurrency(report, name) for name in pools}
    open_pools = [name for name in pools if counted[name]] or list(pools)[:1]
    depths = " + ".join(f"{POOLS[name]} {_places(pools[name])}" for name in open_pools) + f" {slo}"
    if len(open_pools) == 2:
        return f"{depths}: {percent(counted['cpu'] / counted['accelerator'], '+.1f')} concurrency on the same hardware"
    reason = report["heterogeneous"]["reason"]
    if "accelerator" in open_pools:
        return f"{depths}, without the CPU" + (f": {_text(reason)}" if reason else "")
    return depths


def _refused(report: Mapping[str, Any]) -> bool:
    return bool(report["outcome"] == "refused")


def _pools(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The pools there are, the preferred one first."""
    return {name: report["pools"][name] for name in POOLS if name in report["pools"]}


def _places(pool: Mapping[str, Any]) -> str:
    """The depth, times the replicas where there are several."""
    depth = _number(pool["fine_tuned"])
    return depth if (pool["replicas"] or 1) == 1 else f"{pool['replicas']} x {depth}"


def _concurrency(report: Mapping[str, Any], name: str) -> int:
    """Queries at once that `name` adds: depth times replicas; a CPU that is not used adds none."""
    pool = _pools(report).get(name)
    if pool is None or (name == "cpu" and "accelerator" in report["pools"] and not report["heterogeneous"]["used"]):
        return 0
    return int(pool["fine_tuned"] or 0) * int(pool["replicas"] or 1)


def _depths(report: Mapping[str, Any]) -> Sheet | None:
    """Table III, with the estimate beside the paper's two ways."""
    pools = _pools(report)
    if all(pool["estimate"] is None for pool in pools.values()):
        return None
    ways = {
        "regression_depth": "linear regression",
        "stress_depth": "stress test",
        "estimate": "estimate",
        "fine_tuned": "fine-tuned",
    }
    columns = ["queue depth", *(f"{POOLS[name]}: {_devices(pool)}" for name, pool in pools.items())]
    rows = [[label, *(_number(pool[key]) for pool in pools.values())] for key, label in ways.items()]
    several = any((pool["replicas"] or 1) > 1 for pool in pools.values())
    title = f"Queue depths at {report['settings']['slo_s']:g} s" + (", per replica" if several else "")
    notes = [f"{POOLS[name]}: {_text(pool['note'])}" for name, pool in pools.items() if pool["note"]]
    return Sheet(title, columns, rows, "; ".join(notes), final=len(rows) - 1)


def _gain(report: Mapping[str, Any]) -> Sheet | None:
    """Table I, and Section III-B's two readings of it; nothing where only one pool works."""
    alone, added = _concurrency(report, "accelerator"), _concurrency(report, "cpu")
    if _refused(report) or not alone or not added:
        return None
    rows = [
        ["accelerator only, queries at once", f"{alone}"],
        ["with the CPU, queries at once", f"{alone} + {added}"],
        ["concurrency improvement", percent(added / alone, "+.1f")],
        ["hardware saved at peak load, up to (Eq. 6)", percent(added / (alone + added))],
        ["throughput gained at average load, up to (Eq. 5)", percent(added / alone, "+.1f")],
    ]
    return Sheet("What the CPU adds on the same hardware", ["", ""], rows, final=2)


def _verification(report: Mapping[str, Any]) -> Sheet | None:
    seen = report["verification"]
    if seen is None:
        return None
    rows = [
        [POOLS[name], *(_number(pool[key]) for key in ("admitted", "late")),
         *(_seconds(pool[key]) for key in ("p50_s", "p99_s", "slowest_s"))]
        for name, pool in ((name, seen["pools"][name]) for name in POOLS if name in seen["pools"])
    ]  # fmt: skip
    share = DASH if seen["share"] is None else f"{math.floor(1000 * seen['share'] + 1e-6) / 10:.1f} %"
    caption = (
        f"{seen['bursts']} bursts, {seen['queries']} queries: {seen['within_slo']} of {seen['admitted']} admitted "
        f"within the SLO ({share}), {seen['busy']} told busy, {seen['failed']} failed"
    )
    return Sheet("Verification", ["pool", "admitted", "late", "p50, s", "p99, s", "slowest, s"], rows, caption)


def _streams(report: Mapping[str, Any]) -> Sheet | None:
    """The loads beside bursts that were proved."""
    if not report["streams"]:
        return None
    rows = [
        [one["name"], f"{one['rate']:.3g}", *(_number(one[key]) for key in ("admitted", "late", "busy")),
         *(_seconds(one[key]) for key in ("p50_s", "p99_s", "slowest_s"))]
        for one in report["streams"]
    ]  # fmt: skip
    columns = ["", "offered/s", "admitted", "late", "busy", "p50, s", "p99, s", "slowest, s"]
    return Sheet("Streams, admitted by predicted finish", columns, rows)


def _cost(report: Mapping[str, Any]) -> Sheet | None:
    """What a query costs by its tokens, at the lengths that were measured."""
    costs = {name: pool["cost"] for name, pool in _pools(report).items() if pool["cost"] is not None}
    if not costs:
        return None
    rows = [
        [f"{found[0][0]}", *(f"{1000 * seconds:.4g}" for _, seconds in found)]
        for found in zip(*(cost["by_tokens"] for cost in costs.values()), strict=True)
    ]
    formulas = (
        f"{POOLS[name]}: {one['query_s']:.4g} + {one['token_s']:.4g} n + {one['token2_s']:.4g} n^2 s"
        for name, one in costs.items()
    )
    columns = ["tokens n", *(f"{POOLS[name]}, ms" for name in costs)]
    return Sheet("Cost of a query by its length", columns, rows, "; ".join(formulas))


def _fine_tuning(report: Mapping[str, Any]) -> Sheet | None:
    steps, names = report["fine_tuning"], list(_pools(report))
    if not steps:
        return None
    columns = ["step", *(f"{POOLS[name]} {what}" for name in names for what in ("depth", "slowest, s", "SLO"))]
    rows = []
    for number, step in enumerate(steps, 1):
        row = [f"{number}"]
        for name in names:
            held = {True: "held", False: "missed"}.get(step["held"].get(name), DASH)
            row += [_number(step.get(name)), _seconds(step["slowest_s"].get(name)), held]
        rows.append(row)
    return Sheet("Fine-tuning" + (", both pools loaded" if len(names) > 1 else ""), columns, rows)


def _curves(report: Mapping[str, Any]) -> Sheet | None:
    """What was measured and fitted (Eq. 12), a column per pool."""
    pools = _pools(report)
    if not pools:
        return None
    columns = [_curve(pool) for pool in pools.values()]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    return Sheet("Devices and curves", ["pool", *(POOLS[name] for name in pools)], rows, facts=True)


def _curve(pool: Mapping[str, Any]) -> dict[str, str]:
    outliers = sum(sample["outlier"] for sample in pool["samples"])
    return {
        "devices": ", ".join(map(_text, pool["devices"])) or DASH,
        "engine": _text(pool["engine"]),
        "dtype": _text(pool["dtype"]),
        "replicas": _number(pool["replicas"]),
        "cores": _text(pool["cores"]),
        "alpha, s per query": _number(pool["alpha_s"], ".5g"),
        "beta, s": _number(pool["beta_s"], ".4g"),
        "R2": _number(pool["r2"], ".5f"),
        "noise": percent(pool["noise"]),
        "samples, of them outliers": f"{len(pool['samples'])}, {outliers}",
        "queries sent": _number(pool["queries"]),
    }


def _facts(title: str, facts: Mapping[str, Any]) -> Sheet:
    """Any mapping as two columns, a key's unit in words."""
    return Sheet(title, ["", ""], [[_label(key), _text(value)] for key, value in facts.items()], facts=True)


def _label(key: str) -> str:
    """`slo_s` as `slo, s`."""
    for suffix, unit in UNITS.items():
        if key.endswith(suffix):
            return f"{key.removesuffix(suffix).replace('_', ' ')}, {unit}"
    return key.replace("_", " ")


def _text(value: Any) -> str:
    """Foreign text on one line: no control characters, so no escape sequence reaches a terminal; null is a dash."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (dict, list, tuple)):
        value = orjson.dumps(value, default=str).decode()
    return plain(value)


def _number(value: float | None, spec: str = "") -> str:
    return DASH if value is None or not math.isfinite(value) else format(value, spec)


def _seconds(value: float | None) -> str:
    return _number(value, ".3f")


def _devices(pool: Mapping[str, Any]) -> str:
    first, *others = pool["devices"] or [None]
    return _text(first) + (f" and {len(others)} more" if others else "")


def _sheets(*sheets: Sheet | None) -> Iterable[Sheet]:
    return (sheet for sheet in sheets if sheet is not None)


def _rich_table(sheet: Sheet) -> Table:
    table = new_table(sheet.columns)
    for number, row in enumerate(sheet.rows):
        add_row(table, row, "bold" if number == sheet.final else None)
    return table


def _html_table(sheet: Sheet) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in sheet.columns)
    head = f"<thead><tr>{head}</tr></thead>\n" if any(sheet.columns) else ""
    body = ""
    for number, (first, *others) in enumerate(sheet.rows):
        cells = f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in others)
        body += f'<tr class="final">{cells}</tr>\n' if number == sheet.final else f"<tr>{cells}</tr>\n"
    caption = f"<caption>{escape(sheet.caption)}</caption>\n" if sheet.caption else ""
    kind = ' class="facts"' if sheet.facts else ""
    return (
        f'<section>\n<h2>{escape(sheet.title)}</h2>\n<div class="scroll"><table{kind}>\n{caption}'
        f"{head}<tbody>\n{body}</tbody>\n</table></div>\n</section>\n"
    )


def _html_picture(report: Mapping[str, Any], name: str, png: bytes) -> str:
    pool = name.removeprefix("fit-").removesuffix(".png")
    what = f"Latency over concurrency, {POOLS[pool]}" if pool in POOLS else "Latencies in the verification"
    alt = f"{what}, against the SLO of {report['settings']['slo_s']:g} s"
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<figure><img src="{source}" alt="{escape(alt)}"></figure>\n'


def _page(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The report as one file that loads nothing: pictures inlined, no script, every foreign text escaped."""
    sentence, application = escape(verdict(report)), report["application"]
    about = (
        f"Application {_text(application['name'])}, model {_text(application['model'])}. Measured by windve "
        f"{_text(report['windve'])} in {_number(report['seconds'], '.0f')} s, finished {_text(report['finished'])}."
    )
    notes = "".join(f"<li>{escape(_text(note))}</li>\n" for note in report["notes"])
    reason = escape(_text(report["heterogeneous"]["reason"])) if report["heterogeneous"]["reason"] else ""
    kind = "refused" if _refused(report) else "calibrated"
    body = [
        f'<header>\n<h1 class="{kind}">{sentence}</h1>\n<p>{escape(about)}</p>\n',
        f'<p class="warn">{escape(EMULATED)}</p>\n' if application["emulated"] else "",
        "</header>\n<main>\n",
        *map(_html_table, _sheets(_depths(report), _gain(report))),
        f"<p>No heterogeneous computing: {reason}</p>\n" if reason not in sentence else "",
        "<section>\n<h2>Pictures</h2>\n" if pictures else "",
        *(_html_picture(report, name, png) for name, png in pictures.items()),
        "</section>\n" if pictures else "",
        *map(_html_table, _sheets(_verification(report), _streams(report), _fine_tuning(report))),
        *map(_html_table, _sheets(_curves(report), _cost(report))),
        *(_html_table(_facts(key.title(), report[key])) for key in ("application", "machine", "settings")),
        f"<section>\n<h2>Notes</h2>\n<ul>\n{notes}</ul>\n</section>\n" if notes else "",
        _html_table(_facts("Written", report["written"])),
        "</main>\n",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<title>windve calibration: {sentence}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{''.join(body)}</body>\n</html>\n"
    )
