"""The calibration's report: `report.json` for programs, `report.html` with its pictures for people, tables for the
terminal. It renders a `Report` and measures nothing; None is shown as a dash.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from calibration.report import plots
from calibration.report.gain import saved_share
from calibration.report.report_model import LatenciesReport, PoolReport, Report
from calibration.report.tables import DASH, POOLS, Sheet, percent, plain, print_sheet
from deployments.hardware.device_detector import ACCELERATOR, CPU

EMULATED = "The devices are EMULATED: the depths are true of the emulated curves, not of this machine's devices."
UNITS = {"_s": "s", "_ms": "ms", "_gib": "GiB", "_bytes": "bytes"}
_QUANTILES = ("p50, s", "p99, s", "slowest, s")

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


def write(folder: Path, report: Report) -> Path:
    """Write `report.json`, the pictures and `report.html` into `folder`; the path of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(report.model_dump_json(indent=2), encoding="utf-8")
    pictures = {f"fit-{name}.png": plots.fit(report, name) for name in _pools(report)}
    verification = plots.verification(report)
    if verification is not None:
        pictures["verification.png"] = verification
    for name, png in pictures.items():
        (folder / name).write_bytes(png)
    page = folder / "report.html"
    page.write_text(_page(report, pictures), encoding="utf-8")
    return page


def show(console: Console, report: Report) -> None:
    """The depths, the gain, the verification and the verdict, for a terminal of 100 columns."""
    for sheet in (_depths(report), _cost(report), _gain(report), _verification(report), _streams(report)):
        if sheet is not None:
            print_sheet(console, sheet)
    if report.application.emulated:
        console.print(Text(EMULATED, style="yellow"))
    console.print(Text(verdict(report), style="bold red" if _refused(report) else "bold green"), soft_wrap=True)


def verdict(report: Report) -> str:
    """The result in one sentence."""
    if _refused(report):
        return f"refused: {_text(report.reason)}"
    slo, pools = f"at an SLO of {report.settings.slo_s:g} s", _pools(report)
    if report.outcome == "estimated":
        estimates = " + ".join(f"{POOLS[name]} {_number(pool.estimate)}" for name, pool in pools.items())
        return f"estimated, not proven: {estimates} {slo}"
    open_pools = [name for name in pools if report.capacity(name)] or list(pools)[:1]
    depths = " + ".join(f"{POOLS[name]} {_depth(pools[name])}" for name in open_pools) + f" {slo}"
    if len(open_pools) == 2:
        gain = report.capacity(CPU) / report.capacity(ACCELERATOR)
        return f"{depths}: {percent(gain, '+.1f')} concurrency on the same hardware"
    reason = report.heterogeneous.reason
    if ACCELERATOR in open_pools:
        return f"{depths}, without the CPU" + (f": {_text(reason)}" if reason else "")
    return depths


def _refused(report: Report) -> bool:
    return report.outcome == "refused"


def _pools(report: Report) -> dict[str, PoolReport]:
    """The pools there are, the preferred one first."""
    return {name: report.pools[name] for name in POOLS if name in report.pools}


def _depth(pool: PoolReport) -> str:
    """The depth, times the replicas where there are several."""
    depth = _number(pool.fine_tuned)
    return depth if pool.replicas == 1 else f"{pool.replicas} x {depth}"


def _depths(report: Report) -> Sheet | None:
    """Table III, with the estimate beside the paper's two ways."""
    pools = _pools(report)
    if all(pool.estimate is None for pool in pools.values()):
        return None
    columns = ["queue depth", *(f"{POOLS[name]}: {_devices(pool)}" for name, pool in pools.items())]
    rows = [
        ["linear regression", *(_number(pool.regression_depth) for pool in pools.values())],
        ["stress test", *(_number(pool.stress_depth) for pool in pools.values())],
        ["estimate", *(_number(pool.estimate) for pool in pools.values())],
        ["fine-tuned", *(_number(pool.fine_tuned) for pool in pools.values())],
    ]
    several = any(pool.replicas > 1 for pool in pools.values())
    title = f"Queue depths at {report.settings.slo_s:g} s" + (", per replica" if several else "")
    notes = [f"{POOLS[name]}: {_text(pool.note)}" for name, pool in pools.items() if pool.note]
    return Sheet(title, columns, rows, "; ".join(notes), styles={3: "bold"})


def _gain(report: Report) -> Sheet | None:
    """Table I, and Section III-B's two readings of it; nothing where only one pool works."""
    alone, added = report.capacity(ACCELERATOR), report.capacity(CPU)
    if _refused(report) or not alone or not added:
        return None
    rows = [
        ["accelerator only, queries at once", f"{alone}"],
        ["with the CPU, queries at once", f"{alone} + {added}"],
        ["concurrency improvement", percent(added / alone, "+.1f")],
        ["hardware saved at peak load, up to (Eq. 6)", percent(saved_share(added / alone))],
        ["throughput gained at average load, up to (Eq. 5)", percent(added / alone, "+.1f")],
    ]
    return Sheet("What the CPU adds on the same hardware", ["", ""], rows, styles={2: "bold"})


def _verification(report: Report) -> Sheet | None:
    seen = report.verification
    if seen is None:
        return None
    rows = [
        [POOLS[name], f"{pool.admitted}", f"{pool.late}", *_quantiles(pool)]
        for name, pool in ((name, seen.pools[name]) for name in POOLS if name in seen.pools)
    ]
    share = DASH if seen.share is None else f"{math.floor(1000 * seen.share + 1e-6) / 10:.1f} %"
    caption = (
        f"{seen.bursts} bursts, {seen.queries} queries: {seen.within_slo} of {seen.admitted} admitted "
        f"within the SLO ({share}), {seen.busy} told busy, {seen.failed} failed"
    )
    return Sheet("Verification", ["pool", "admitted", "late", *_QUANTILES], rows, caption)


def _streams(report: Report) -> Sheet | None:
    """The loads beside bursts that were proved."""
    if not report.streams:
        return None
    rows = [
        [one.name, f"{one.rate:.3g}", f"{one.admitted}", f"{one.late}", f"{one.busy}", *_quantiles(one)]
        for one in report.streams
    ]
    columns = ["", "offered/s", "admitted", "late", "busy", *_QUANTILES]
    return Sheet("Streams, admitted by predicted finish", columns, rows)


def _quantiles(taken: LatenciesReport) -> list[str]:
    """The cells below `_QUANTILES`."""
    return [_seconds(taken.p50_s), _seconds(taken.p99_s), _seconds(taken.slowest_s)]


def _cost(report: Report) -> Sheet | None:
    """What a query costs by its tokens, at the lengths that were measured."""
    costs = {name: pool.cost for name, pool in _pools(report).items() if pool.cost is not None}
    if not costs:
        return None
    rows = [
        [f"{found[0][0]}", *(f"{1000 * seconds:.4g}" for _, seconds in found)]
        for found in zip(*(cost.by_tokens for cost in costs.values()), strict=True)
    ]
    formulas = (
        f"{POOLS[name]}: {cost.query_s:.4g} + {cost.token_s:.4g} n + {cost.token2_s:.4g} n^2 s"
        for name, cost in costs.items()
    )
    columns = ["tokens n", *(f"{POOLS[name]}, ms" for name in costs)]
    return Sheet("Cost of a query by its length", columns, rows, "; ".join(formulas))


def _fine_tuning(report: Report) -> Sheet | None:
    steps, names = report.fine_tuning, list(_pools(report))
    if not steps:
        return None
    columns = ["step", *(f"{POOLS[name]} {what}" for name in names for what in ("depth", "slowest, s", "SLO"))]
    rows = []
    for number, step in enumerate(steps, 1):
        row = [f"{number}"]
        for name in names:
            depth = step.accelerator if name == ACCELERATOR else step.cpu
            held = DASH if name not in step.held else "held" if step.held[name] else "missed"
            row += [_number(depth), _seconds(step.slowest_s.get(name)), held]
        rows.append(row)
    return Sheet("Fine-tuning" + (", both pools loaded" if len(names) > 1 else ""), columns, rows)


def _curves(report: Report) -> Sheet | None:
    """What was measured and fitted (Eq. 12), a column per pool."""
    pools = _pools(report)
    if not pools:
        return None
    columns = [_curve(pool) for pool in pools.values()]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    return Sheet("Devices and curves", ["pool", *(POOLS[name] for name in pools)], rows, facts=True)


def _curve(pool: PoolReport) -> dict[str, str]:
    outliers = sum(sample.outlier for sample in pool.samples)
    return {
        "devices": ", ".join(map(_text, pool.devices)) or DASH,
        "engine": _text(pool.engine),
        "dtype": _text(pool.dtype),
        "replicas": _number(pool.replicas),
        "cores": _text(pool.cores),
        "alpha, s per query": _number(pool.alpha_s, ".5g"),
        "beta, s": _number(pool.beta_s, ".4g"),
        "R2": _number(pool.r2, ".5f"),
        "noise": percent(pool.noise),
        "samples, of them outliers": f"{len(pool.samples)}, {outliers}",
        "queries sent": _number(pool.queries),
    }


def _facts(title: str, part: BaseModel) -> Sheet:
    """A part of the report as two columns, a key's unit in words."""
    rows = [[_label(key), _text(value)] for key, value in part.model_dump().items()]
    return Sheet(title, ["", ""], rows, facts=True)


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
    return plain(value)


def _number(value: float | None, spec: str = "") -> str:
    return DASH if value is None or not math.isfinite(value) else format(value, spec)


def _seconds(value: float | None) -> str:
    return _number(value, ".3f")


def _devices(pool: PoolReport) -> str:
    first, *others = pool.devices or [""]
    return _text(first) + (f" and {len(others)} more" if others else "")


def _html_table(sheet: Sheet | None) -> str:
    if sheet is None:
        return ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in sheet.columns)
    head = f"<thead><tr>{head}</tr></thead>\n" if any(sheet.columns) else ""
    body = ""
    for number, (first, *others) in enumerate(sheet.rows):
        cells = f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in others)
        body += f'<tr class="final">{cells}</tr>\n' if number in sheet.styles else f"<tr>{cells}</tr>\n"
    caption = f"<caption>{escape(sheet.caption)}</caption>\n" if sheet.caption else ""
    kind = ' class="facts"' if sheet.facts else ""
    return (
        f'<section>\n<h2>{escape(sheet.title)}</h2>\n<div class="scroll"><table{kind}>\n{caption}'
        f"{head}<tbody>\n{body}</tbody>\n</table></div>\n</section>\n"
    )


def _html_picture(report: Report, name: str, png: bytes) -> str:
    pool = name.removeprefix("fit-").removesuffix(".png")
    what = f"Latency over concurrency, {POOLS[pool]}" if pool in POOLS else "Latencies in the verification"
    alt = f"{what}, against the SLO of {report.settings.slo_s:g} s"
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<figure><img src="{source}" alt="{escape(alt)}"></figure>\n'


def _page(report: Report, pictures: Mapping[str, bytes]) -> str:
    """The report as one file that loads nothing: pictures inlined, no script, every foreign text escaped."""
    sentence, application = escape(verdict(report)), report.application
    about = (
        f"Application {_text(application.name)}, model {_text(application.model)}. Measured by windve "
        f"{_text(report.windve)} in {_number(report.seconds, '.0f')} s, finished {_text(report.finished)}."
    )
    notes = "".join(f"<li>{escape(_text(note))}</li>\n" for note in report.notes)
    reason = escape(_text(report.heterogeneous.reason)) if report.heterogeneous.reason else ""
    kind = "refused" if _refused(report) else "calibrated"
    body = [
        f'<header>\n<h1 class="{kind}">{sentence}</h1>\n<p>{escape(about)}</p>\n',
        f'<p class="warn">{escape(EMULATED)}</p>\n' if application.emulated else "",
        "</header>\n<main>\n",
        *map(_html_table, (_depths(report), _gain(report))),
        f"<p>No heterogeneous computing: {reason}</p>\n" if reason not in sentence else "",
        "<section>\n<h2>Pictures</h2>\n" if pictures else "",
        *(_html_picture(report, name, png) for name, png in pictures.items()),
        "</section>\n" if pictures else "",
        *map(_html_table, (_verification(report), _streams(report), _fine_tuning(report))),
        *map(_html_table, (_curves(report), _cost(report))),
        _html_table(_facts("Application", application)),
        _html_table(_facts("Machine", report.machine)),
        _html_table(_facts("Settings", report.settings)),
        f"<section>\n<h2>Notes</h2>\n<ul>\n{notes}</ul>\n</section>\n" if notes else "",
        _html_table(_facts("Written", report.written)),
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
