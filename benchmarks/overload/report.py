"""The results of one or several servers as tables and as one picture."""

import math
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
_MARKS = "osD^vPXo"
_LATE = 0.01


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
    """Goodput within the SLO over offered load. One panel per kind of load, one line per server. Where more than
    `_LATE` of a server's answers are late, its mark is hollow.
    """
    combinations = _combinations(samples)
    columns = min(2, len(combinations))
    rows = math.ceil(len(combinations) / columns)
    every = panels((4.6 * columns, 3.4 * rows + 1), columns, rows)
    names = servers(samples)
    for axes, (title, some) in zip(every, combinations.items(), strict=False):
        for place, name in enumerate(names):
            _line(axes, place, _of(some, name))
        axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_ylim(0, 1.08 * max(one["goodput_s"] for one in some) or 1)
        axes.set_title(title)
        axes.set_xlabel("offered load, times what the server can take")
    for axes in every[len(combinations) :]:
        axes.set_axis_off()
    whole = figure_of(every)
    whole.supylabel(f"answers within {slo_s:g} s, queries/s", fontsize=12)
    whole.legend(
        *every[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(4, len(names)),
        title=f"a hollow mark: more than {_LATE:.0%} of the answers are late",
        frameon=False,
    )
    return whole


def _line(axes: Axes, place: int, samples: Sequence[Sample]) -> None:
    if not samples:
        return
    name = samples[0]["contestant"]
    ours = name.startswith(OURS)
    colour = BLUE if ours else _OTHERS[place % len(_OTHERS)]
    points = sorted((one["load"], one["goodput_s"], one["late_share"] > _LATE) for one in samples)
    loads, goodputs, late = zip(*points, strict=True)
    style: dict[str, Any] = {
        "color": colour, "marker": _MARKS[place % len(_MARKS)], "markersize": 7, "zorder": 3 if ours else 2,
        "linewidth": 2.8 if ours else 1.5, "linestyle": "-" if name == OURS or not ours else "--",
    }  # fmt: skip
    axes.plot(loads, goodputs, label=name, markevery=[at for at, is_late in enumerate(late) if not is_late], **style)
    hollow: dict[str, Any] = {**style, "linestyle": "", "markerfacecolor": "white"}
    axes.plot(loads, goodputs, markevery=[at for at, is_late in enumerate(late) if is_late], **hollow)
