"""The page of a check, in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from calibration.devices.tasks import PARTS

_BUSY = 0.25  # of the cores, from which on other programs disturb

Row = Mapping[str, Any]
Column = Callable[[Row], str]


def page(found: Mapping[str, Any]) -> str:
    """The whole page. `found`: what `command.check` saves."""
    rows = found["rows"]
    lines = [f"# {_device(found)}", "", _about(found), ""]
    for part, about in PARTS.items():
        mine = [row for row in rows if row["part"] == part]
        done = [row for row in mine if "error" not in row]
        if mine:
            lines += [f"## {part.capitalize()}: {about}", ""]
            lines += list(_SHOWN[part](done, rows)) if done else []
            lines += [f"- **{row['name']} failed**: {_cell(row['error'])}" for row in mine if "error" in row]
            lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def share_of_peak(row: Row, rows: Iterable[Row]) -> float | None:
    """Of the fastest product in the same number format; None if that was not measured."""
    same = [one["tflops"] for one in rows if one["part"] == "peak" and one.get("dtype") == row["dtype"]]
    return row["tflops"] / max(same) if same else None


def _device(found: Row) -> str:
    device = found["device"]
    memory = f", {device['memory_gib']} GiB" if "memory_gib" in device else ""
    return f"windve on {device.get('name') or found['machine']['cpu']} ({device.get('device', 'unknown')}{memory})"


def _about(found: Row) -> str:
    machine, device = found["machine"], found["device"]
    cuda = f", CUDA {device['cuda']} on sm{device['capability'].replace('.', '')}" if "cuda" in device else ""
    count = f"; 1 of {device['count']} devices" if device.get("count", 1) > 1 else ""
    libraries = ", ".join(f"{name} {version}" for name, version in device.get("libraries", {}).items())
    problem = f" **{machine['npu_problem']}.**" if machine["npu_problem"] else ""
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{cuda}{count}"
    quick = ", quick" if found["quick"] else ""
    busy = ""
    if found["load"] > _BUSY * machine["cores"]:
        busy = f" **Other programs kept {found['load']:.1f} cores busy before it: the figures are too low.**"
    return (
        f"{hardware}. windve {found['windve']} at {found['commit']}, {found['at']}; {libraries}. "
        f"Random weights{quick}; took {found['took_s']:.0f} s.{busy}{problem}"
    )


def _table(columns: Mapping[str, Column], rows: Iterable[Row]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(show(row)) for show in columns.values()) + " |" for row in rows]
    return [*lines, ""]


def _cell(text: str) -> str:
    """Foreign text on one line, without what ends a cell."""
    return "".join(sign if sign.isprintable() else " " for sign in text).replace("|", "\\|")


def _number(key: str, form: str) -> Column:
    """A column with this figure; a dash if there is none."""
    return lambda row: "-" if row.get(key) is None else format(row[key], form)


def _peak(rows: list[Row], _: Iterable[Row]) -> Iterator[str]:
    columns: dict[str, Column] = {
        "product": lambda row: row["name"],
        "size": lambda row: " x ".join(map(str, row["size"])),
        "TFLOP/s": _number("tflops", ",.3g"),
    }
    yield from _table(columns, rows)


def _agrees(row: Row) -> bool:
    return all(row[key] >= row["least"] for key in ("agrees_exact", "agrees_narrow"))  # NaN does not


def _families(rows: list[Row], _: Iterable[Row]) -> Iterator[str]:
    columns: dict[str, Column] = {
        "family": lambda row: row["name"],
        "form": lambda row: f"{row['form']} in {row['dtype']}",
        "packed in float32": _number("agrees_exact", ".5f"),
        "packed, narrow": lambda row: f"{row['agrees_narrow']:.5f} in {row['narrow']}",
        "agrees": lambda row: "yes" if _agrees(row) else "**NO**",
        "a lone query, ms": _number("alone_ms", ".2f"),
    }
    yield from _table(columns, rows)
    common = set.intersection(*(set(row["why"].split("; ")) for row in rows)) if len(rows) > 1 else set()
    yield from (f"- All: {_cell(said)}." for said in sorted(common))
    for row in rows:
        own = [said for said in row["why"].split("; ") if said not in common]
        yield from _why({**row, "why": "; ".join(own)}, row["name"])
    yield ""


def _encoder(rows: list[Row], everything: Iterable[Row]) -> Iterator[str]:
    everything = list(everything)

    def share(row: Row) -> str:
        found = share_of_peak(row, everything)
        return "-" if found is None else f"{found:.0%}"

    columns: dict[str, Column] = {
        "tokens": _number("tokens", "d"),
        "queries at once": _number("batch", "d"),
        "queries/s": _number("queries_s", ",.1f"),
        "tokens/s": _number("tokens_s", ",.0f"),
        "TFLOP/s": _number("tflops", ",.3g"),
        "of the peak": share,
        "p50, ms": _number("p50_ms", ",.2f"),
    }
    yield from _table(columns, [row for row in rows if "tokens" in row])
    for row in rows:
        if "form" in row:
            yield from _why(row, f"{row['shape']} shape, {row['form']} in {row['dtype']}")
    yield ""


def _why(row: Row, name: str) -> Iterator[str]:
    """Why the form was chosen, and what the engine warned of."""
    warned = "".join(f" **{_cell(said)}.**" for said in row["warnings"])
    yield f"- {name}: {_cell(row['why'])}.{warned}"


def _generation(rows: list[Row], _: Iterable[Row]) -> Iterator[str]:
    yield f"{rows[0]['shape']} shape in {rows[0]['dtype']}: {_cell(rows[0]['why'])}."
    yield ""
    columns: dict[str, Column] = {
        "rows": _number("rows", "d"),
        "a step, ms": _number("p50_ms", ",.2f"),
        "tokens/s": _number("tokens_s", ",.1f"),
        "of the weights, GB/s": _number("weights_gb_s", ",.3g"),
    }
    yield from _table(columns, rows)


def _service(rows: list[Row], _: Iterable[Row]) -> Iterator[str]:
    (row,) = rows
    yield (
        f"SLO {row['slo_s']:g} s. Texts have 75 tokens, requests {row['texts']} of them. Capacity in a closed loop: "
        f"{row['capacity_s']:,.1f} texts/s. A lone text takes {row['alone_p50_ms']:.1f} ms at the client."
    )
    yield ""
    columns: dict[str, Column] = {
        "load": lambda load: f"{load['share']:g} x",
        "offered, texts/s": _number("offered_s", ",.1f"),
        "in time": _number("in_time_s", ",.1f"),
        "late": _number("late_s", ",.1f"),
        "refused": _number("refused_s", ",.1f"),
        "failed": _number("failed_s", ",.1f"),
        "p50, ms": _number("p50_ms", ",.0f"),
        "p99, ms": _number("p99_ms", ",.0f"),
        "cores of the client": _number("client_cores", ".2f"),
    }
    yield from _table(columns, row["loads"])


_SHOWN: Mapping[str, Callable[[list[Row], Iterable[Row]], Iterator[str]]] = {
    "peak": _peak,
    "families": _families,
    "encoder": _encoder,
    "generation": _generation,
    "service": _service,
}
