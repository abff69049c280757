"""Shows a report of either kind on a terminal, and as one HTML page: tables, facts and inlined pictures. The page has
no script, loads nothing, and escapes all foreign text.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from calibration.report.report_model import ReportHead
from calibration.report.tables import DASH, Sheet, plain, print_sheet
from deployments.errors import SettingsError

Pictures = Mapping[str, tuple[str, bytes]]  # file name -> its caption, and the PNG

UNITS = {"_s": "s", "_ms": "ms", "_gib": "GiB", "_bytes": "bytes"}

STYLE = """
:root { color-scheme: light dark; }
body { max-width: 46rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; font: 16px/1.55 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
h1.refused, .warn { color: #c2410c; }
caption { text-align: left; padding-bottom: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid #8884; }
th:first-child, table.facts :is(td, th) { text-align: left; font-weight: normal; overflow-wrap: anywhere; }
tr.final > * { font-weight: 700; }
figure { margin: 1rem 0; background: #fff; }
figure img { display: block; width: 100%; }
"""


@contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """Of `--out`, which is made if need be. Raises SettingsError where it, or what is written there, cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise SettingsError("--out", f"{folder} cannot be written: {error.strerror}") from None


def facts(title: str, part: BaseModel) -> Sheet:
    """A part of the report as a table of two columns, with a key's unit in words."""
    rows = [[_label(key), text(value)] for key, value in part.model_dump().items()]
    return Sheet(title, ["", ""], rows, facts=True)


def _label(key: str) -> str:
    """`slo_s` as `slo, s`."""
    for suffix, unit in UNITS.items():
        if key.endswith(suffix):
            return f"{key.removesuffix(suffix).replace('_', ' ')}, {unit}"
    return key.replace("_", " ")


def text(value: Any) -> str:
    """Foreign text on one line, without control characters (so without terminal escape sequences). None is a dash."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return plain(value)


def number(value: float | None, spec: str = "") -> str:
    return DASH if value is None or not math.isfinite(value) else format(value, spec)


def seconds(value: float | None) -> str:
    return number(value, ".3f")


def html_table(sheet: Sheet | None) -> str:
    if sheet is None:
        return ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in sheet.columns)
    head = f"<thead><tr>{head}</tr></thead>\n" if any(sheet.columns) else ""
    body = ""
    for place, (first, *others) in enumerate(sheet.rows):
        cells = f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in others)
        body += f'<tr class="final">{cells}</tr>\n' if place in sheet.styles else f"<tr>{cells}</tr>\n"
    caption = f"<caption>{escape(sheet.caption)}</caption>\n" if sheet.caption else ""
    kind = ' class="facts"' if sheet.facts else ""
    return (
        f'<section>\n<h2>{escape(sheet.title)}</h2>\n<div class="scroll"><table{kind}>\n{caption}'
        f"{head}<tbody>\n{body}</tbody>\n</table></div>\n</section>\n"
    )


def html_pictures(pictures: Pictures) -> str:
    figures = ""
    for alt, png in pictures.values():
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        figures += f'<figure><img src="{source}" alt="{escape(alt)}"></figure>\n'
    return f"<section>\n<h2>Pictures</h2>\n{figures}</section>\n" if figures else ""


class Shown(NamedTuple):
    """What a report says: the verdict, its tables (None: there is nothing to show), and its pictures, which take a
    second to draw.
    """

    report: ReportHead
    verdict: str
    sheets: Sequence[Sheet | None]
    pictures: Callable[[], Pictures]

    def show(self, console: Console) -> None:
        """Print it on a terminal of 100 columns."""
        for sheet in self.sheets:
            if sheet is not None:
                print_sheet(console, sheet)
        if self.report.application.emulated:
            console.print(Text(self.report.emulated_means, style="yellow"))
        style = "bold red" if self.report.is_refused else "bold green"
        console.print(Text(self.verdict, style=style), soft_wrap=True)

    def write(self, folder: Path) -> Path:
        """Write `report.json`, the pictures and `report.html` into `folder`. Returns the path of the HTML."""
        path, pictures = folder / "report.html", self.pictures()
        with written_into(folder):
            (folder / "report.json").write_text(self.report.model_dump_json(indent=2), encoding="utf-8")
            for name, (_, png) in pictures.items():
                (folder / name).write_bytes(png)
            path.write_text(_document(self, pictures), encoding="utf-8")
        return path


def _document(shown: Shown, pictures: Pictures) -> str:
    report = shown.report
    sentence, application = escape(shown.verdict), report.application
    about = (
        f"Application {text(application.name)}, model {text(application.model)}. Measured by windve "
        f"{text(report.windve)} in {number(report.seconds, '.0f')} s, finished {text(report.finished)}."
    )
    notes = "".join(f"<li>{escape(text(note))}</li>\n" for note in report.notes)
    body = [
        f'<header>\n<h1 class="{"refused" if report.is_refused else "calibrated"}">{sentence}</h1>\n',
        f"<p>{escape(about)}</p>\n",
        f'<p class="warn">{escape(report.emulated_means)}</p>\n' if application.emulated else "",
        "</header>\n<main>\n",
        *map(html_table, shown.sheets),
        html_pictures(pictures),
        html_table(facts("Application", application)),
        html_table(facts("Machine", report.machine)),
        html_table(facts("Settings", report.settings)),
        f"<section>\n<h2>Notes</h2>\n<ul>\n{notes}</ul>\n</section>\n" if notes else "",
        html_table(facts("Written", report.written)),
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
