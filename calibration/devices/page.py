"""The page of a check, in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from calibration.devices.tasks import PARTS

_BUSY = 0.25  # of the cores, from which on other programs disturb
_NOT_IN_TABLES = {"part", "took_s", "seconds", "why", "warnings", "loads", "slo_s"}

Row = Mapping[str, Any]


def page(found: Row) -> str:
    """The whole page. `found`: what `command.check` saves."""
    device, rows = found["device"], found["rows"]
    memory = f", {device['memory_gib']} GiB" if "memory_gib" in device else ""
    lines = [f"# windve on {device.get('name') or found['machine']['cpu']} ({device['device']}{memory})", ""]
    lines += [_about(found), ""]
    for part, about in PARTS.items():
        mine = [row | share_of_peak(row, rows) for row in rows if row["part"] == part]
        if mine:
            lines += [f"## {part.capitalize()}: {about}", ""]
            lines += _tables([row for row in mine if "error" not in row])
            lines += [f"- **{row['name']} failed**: {_cell(row['error'])}" for row in mine if "error" in row]
            lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def share_of_peak(row: Row, rows: Iterable[Row]) -> Row:
    """`of_peak`: of the fastest product in the same number format, if both were measured."""
    peaks = [one for one in rows if one["part"] == "peak" and "tflops" in one]
    same = [one["tflops"] for one in peaks if one["dtype"] == row.get("dtype")]
    return {"of_peak": row["tflops"] / max(same)} if same and "tflops" in row and row["part"] != "peak" else {}


def _about(found: Row) -> str:
    machine, device = found["machine"], found["device"]
    cuda = f", CUDA {device['cuda']} on sm{device['capability'].replace('.', '')}" if "cuda" in device else ""
    count = f"; 1 of {device['count']} devices" if device.get("count", 1) > 1 else ""
    libraries = ", ".join(f"{name} {version}" for name, version in device.get("libraries", {}).items())
    problem = f" **{machine['npu_problem']}.**" if machine["npu_problem"] else ""
    if found["busy_cores"] > _BUSY * machine["cores"]:
        problem += f" **Other programs kept {found['busy_cores']:.1f} cores busy before it: the figures are too low.**"
    quick = ", quick" if found["quick"] else ""
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{cuda}{count}"
    software = f"windve {found['windve']} at {found['commit']}, {found['at']}; {libraries}"
    return f"{hardware}. {software}. Random weights{quick}; took {found['took_s']:.0f} s.{problem}"


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each run of rows with the same figures; then why, and what was warned of."""
    for keys, same in groupby(rows, lambda row: [key for key in row if key not in _NOT_IN_TABLES]):
        yield "| " + " | ".join(_heading(key) for key in keys) + " |"
        yield "|" + "---|" * len(keys)
        yield from ("| " + " | ".join(_cell(_shown(row[key])) for key in keys) + " |" for row in same)
        yield ""
    for row in rows:
        yield from _tables(row.get("loads", ()))
    reasons = [set(row["why"].split("; ")) for row in rows if "why" in row]
    common = set.intersection(*reasons) if len(reasons) > 1 else set()
    yield from (f"- All: {_cell(said)}." for said in sorted(common))
    for row in rows:
        own = "; ".join(said for said in row.get("why", "").split("; ") if said not in common)
        warned = "".join(f" **{_cell(said)}.**" for said in row.get("warnings", ()))
        if own or warned:
            yield f"- {row['name']}: {_cell(own)}.{warned}"


def _heading(key: str) -> str:
    return (key.removesuffix("_s") + "/s" if key.endswith("_s") else key).replace("_", " ")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, float):
        return f"{value:,.5g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else " x ".join(map(str, value)) if isinstance(value, list) else str(value)


def _cell(text: str) -> str:
    """Foreign text on one line, without what ends a cell."""
    return "".join(sign if sign.isprintable() else " " for sign in text).replace("|", "\\|")
