"""The results of one or several servers as tables and as one picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.kit.figures import BLUE, COLOURS, GREY, OURS, figure_of, panels
from benchmarks.kit.sheet import Sheet, table
from benchmarks.overload.schedule import ARRIVALS, LENGTHS

Sample = Mapping[str, Any]  # `contestant`, `lengths`, `arrivals`, `load`, and what `sweep.point` finds
TWICE = 2.0
_OTHERS = (*(colour for colour in COLOURS if colour != BLUE), GREY, "#000000")
_MARKS = "osD^vPX*"


def summary(samples: Sequence[Sample], slo_s: float) -> list[Sheet]:
    """Tables that fit a terminal: at twice the capacity, the worst of each server, and Retry-After."""
    twice = [one for one in samples if one["load"] == TWICE]
    worst = [max(_of(samples, name), key=badness) for name in servers(samples)]
    return [
        _sheet(f"At twice the load that each server can take; SLO {slo_s:g} s", twice, _BRIEF),
        _sheet("The worst of each server", worst, _BRIEF),
        _truth_sheet(samples),
    ]


def sheets(samples: Sequence[Sample], slo_s: float) -> list[Sheet]:
    """The summary, then every load in two tables."""
    made = summary(samples, slo_s)
    for title, some in _combinations(samples).items():
        made += [_sheet(title, some, _BRIEF), _sheet(f"{title}: more", some, _MORE)]
    return made


def badness(sample: Sample) -> tuple[float, float]:
    """A sort key: more late queries are worse, then less goodput relative to the possible goodput."""
    return sample["late_share"], -sample["goodput_s"] / min(sample["capacity_s"], sample["offered_s"])


def servers(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(one["contestant"] for one in samples))


def _of(samples: Sequence[Sample], name: str) -> list[Sample]:
    return [one for one in samples if one["contestant"] == name]


def _combinations(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Title -> samples, for the measured combinations of arrivals and lengths."""
    found: dict[str, list[Sample]] = {}
    for lengths in LENGTHS:
        for arrivals in ARRIVALS:
            some = [one for one in samples if (one["lengths"], one["arrivals"]) == (lengths, arrivals)]
            if some:
                found[f"{arrivals}, {lengths} lengths"] = some
    return found


_BRIEF = {
    "": "{contestant}", "load": "{load:g} x {arrivals}, {lengths}", "offered/s": "{offered_s:.1f}",
    "in time/s": "{goodput_s:.1f}", "late": "{late_share:.2%}", "refused": "{refused_share:.1%}",
    "p99, s": "{answer_p99_s:.2f}",
}  # fmt: skip
_MORE = {
    "": "{contestant}", "load": "{load:g}", "failed": "{failed}", "p50, s": "{answer_p50_s:.2f}",
    "refused within, p99, s": "{refusal_p99_s:.2f}",
    "requests for an answer": "{requests_per_answer:.2f}", "recovers in, s": "{recover_s:.1f}",
    "p99 kept": "{kept}", "MLPerf valid": "{valid}", "client's cores": "{client_cores:.2f}",
}  # fmt: skip


def _sheet(title: str, samples: Sequence[Sample], columns: Mapping[str, str]) -> Sheet:
    rows = [{**one, "kept": _proof(one), "valid": "yes" if one["mlperf_valid"] else "no"} for one in samples]
    return table(title, columns, rows)


def _proof(sample: Sample) -> str:
    if sample["p99_kept"]:
        return "yes"
    return "no" if sample["more_queries"] is None else f"{sample['more_queries']} queries too few"


def _truth_sheet(samples: Sequence[Sample]) -> Sheet:
    """The accuracy of Retry-After over all loads of a server."""
    columns = {
        "": "{name}", "refusals with a hint": "{hinted:.0%}", "clients that came back": "{followed}",
        "admitted at the hint": "{kept:.0%}", "admitted at half the hint": "{early:.0%}",
        "admitted after, of the hint": "{ratio:.2f}",
    }  # fmt: skip
    rows = []
    for name in servers(samples):
        some = [one for one in _of(samples, name) if one["refused"]]
        row = {"name": name, "followed": sum(one["followed"] for one in some)}
        for key, figure in (("hinted", "hinted_share"), ("kept", "hint_kept"), ("early", "hint_early"),
                            ("ratio", "hint_ratio")):  # fmt: skip
            row[key] = _mean(some, figure, "refused" if key == "hinted" else "followed")
        if some:
            rows.append(row)
    return table("Retry-After against when a client was admitted", columns, rows)


def _mean(samples: Sequence[Sample], figure: str, weight: str) -> float | None:
    """The weighted mean over the samples that have the figure."""
    some = [one for one in samples if one[figure] is not None and one[weight]]
    total = sum(one[weight] for one in some)
    return sum(one[figure] * one[weight] for one in some) / total if total else None


def plot(samples: Sequence[Sample], slo_s: float) -> Figure:
    """Goodput within the SLO (above) and late share (below) over offered load. One column per kind of load, one line
    per server. In parentheses: its capacity with equal and with mixed lengths.
    """
    combinations = _combinations(samples)
    every = panels((max(7.0, 3.6 * len(combinations)), 6.2), len(combinations), 2)
    above, below = every[: len(combinations)], every[len(combinations) :]
    names = servers(samples)
    labels = [f"{name} ({_capacities(_of(samples, name))}/s)" for name in names]
    for number, (title, some) in enumerate(combinations.items()):
        for figure, axes in (("goodput_s", above[number]), ("late_share", below[number])):
            for place, name in enumerate(names):
                _line(axes, labels[place], place, _of(some, name), figure)
            axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle=":")
        above[number].set_ylim(0, 1.08 * max(one["goodput_s"] for one in some) or 1)
        below[number].set_ylim(-3, 103)
        above[number].set_title(title, fontsize=11)
        below[number].set_xlabel("offered load, of what the server can take")
    above[0].set_ylabel(f"answers within {slo_s:g} s, queries/s")
    below[0].set_ylabel("late, % of those not refused")
    whole = figure_of(every)
    whole.legend(
        *above[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(4, len(names)),
        frameon=False,
        fontsize=9,
    )
    return whole


def _capacities(samples: Sequence[Sample]) -> str:
    """The capacities with equal and with mixed lengths."""
    return ", ".join(f"{most_s:.0f}" for most_s in dict.fromkeys(one["capacity_s"] for one in samples))


def _line(axes: Axes, label: str, place: int, samples: Sequence[Sample], figure: str) -> None:
    if not samples:
        return
    name = samples[0]["contestant"]
    ours = name.startswith(OURS)
    colour = BLUE if ours else _OTHERS[place % len(_OTHERS)]
    points = sorted((one["load"], one[figure] * (100 if figure == "late_share" else 1)) for one in samples)
    axes.plot(
        *zip(*points, strict=True), color=colour, marker=_MARKS[place % len(_MARKS)], markersize=4,
        linewidth=2.4 if ours else 1.4, linestyle="-" if name == OURS or not ours else "--",
        label=label, zorder=3 if ours else 2,
    )  # fmt: skip
