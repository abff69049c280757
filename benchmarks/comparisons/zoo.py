"""Admission on devices that no cost model describes, in virtual time: the product's scheduler beside an oracle.

The scenes are those of `benchmarks/simulation/zoo.py`. The oracle knows a device's mean, noise and changes, and has a
fixed margin. The late share is of the admitted queries; goodput is the work answered in time.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.kit.bench import Bench, Found, all_of
from benchmarks.kit.figures import BLUE, GREY, figure_of, panels
from benchmarks.kit.goal import Goal
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation.zoo import BURSTS, CHANGED_S, LATE, scenes

_QUICK = ("v100", "0.8")  # scenes of a quick run: base and load
_FEWER, _LEAST, _STAIRS = 5, 0.75, "tiles"  # no estimate foresees a stair of a third of the SLO

DOES = {
    "exact": "runs as modelled",
    "beta06": "beta is 0.6 of the modelled",
    "beta09": "beta is 0.89 of the modelled",
    "beta15": "beta is 1.5 of the modelled",
    "alpha07": "alpha is 0.7 of the modelled",
    "alpha14": "alpha is 1.4 of the modelled",
    "quadratic": "0.7 w + a part that grows with the square of a run's work w",
    "convex": "grows with w to the 1.5",
    "tiles": "works by sixteen queries at a time",
    "regimes": "alpha is 0.6 of the modelled up to half of the largest run, 1.6 above",
    "overhead": "each run takes 60 ms more (quick devices: 6 ms)",
    "gauss": "noise of 3 %",
    "noise": "gauss, and one run in twenty takes 2 to 4 times as long",
    "pauses": "stands still for 0.2 s every 5 s",
    "hiccups": "one run in twenty takes more, 40 ms on average",
    "slower": "1.6 times as slow from a third of the time on, and back",
    "drift": "slows down bit by bit, to 1.4 times",
    "stolen": "another process takes half for 2 s at a time, a quarter of the time",
    "shared": "its cores also receive the queries: a burst takes half of them for a moment",
    "ratio1": "warm-up said that all lengths cost the same",
    "ratio46": "warm-up said that cost grows with the square of length",
}


def run(bench: Bench) -> None:
    played = [one for one in scenes() if not bench.quick or (one.base, one.load) == _QUICK]
    with bench.steps(len(played) + 1) as step:
        for scene in played:
            step(" ".join(scene))
            found, best = scene.play(), scene.play(oracle=True)
            figures = {
                **found._asdict(),
                **{f"oracle_{key}": figure for key, figure in best._asdict().items()},
                "share": found.goodput / best.goodput,
            }
            shown = f"{found.late:.2%} late, the oracle {best.late:.2%}; {figures['share']:.1%} of its goodput"
            bench.sample({"what": "scene", **scene._asdict()}, figures, shown)
        step("bursts")
        for name, burst in BURSTS.items():
            (admitted, late), (most, most_late) = burst.play(), burst.play(oracle=True)
            told = {"of": burst.queries, "admitted": admitted, "late": late, "most": most, "most_late": most_late}
            bench.sample({"what": "burst", "name": name}, told, f"{admitted} of {most} possible, {late} late")


# --- tables and goals ---------------------------------------------------------------------------------------------


def _row(played: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row for the scenes of one law, or of all."""
    late, share = ([one[key] for one in played] for key in ("late", "share"))
    oracle = [one["oracle_late"] for one in played]
    return {
        "scenes": len(played),
        "late": mean(late),
        "worst": max(late),
        "share": mean(share),
        "least": min(share),
        "kept": sum(one <= LATE for one in late),
        "oracle": mean(oracle),
        "oracle_kept": sum(one <= LATE for one in oracle),
    }


def _laws(found: Found) -> list[dict[str, Any]]:
    by_law = groupby(all_of(found, what="scene"), itemgetter("law"))
    return [{"law": law, "does": DOES[law]} | _row(list(played)) for law, played in by_law]


def sheets(found: Found) -> list[Sheet]:
    columns = {
        "device": "{law}",
        "what it does": "{does}",
        "late: mean": "{late:.2%}",
        "worst": "{worst:.2%}",
        "goodput / oracle's: mean": "{share:.2f}",
        "least": "{least:.2f}",
        f"scenes with at most {LATE:.1%} late": "{kept} of {scenes}",
        "oracle: late, mean": "{oracle:.2%}",
        "its scenes": "{oracle_kept} of {scenes}",
    }
    scenes = all_of(found, what="scene")
    every = [{"law": "**all**", "does": ""} | _row(scenes)] if scenes else []
    title = f"Each device (what is late in the {CHANGED_S:g} s after a sudden change is told apart)"
    return [table(title, columns, [*_laws(found), *every]), _changed_sheet(found), _burst_sheet(found)]


def _changed_sheet(found: Found) -> Sheet:
    columns = {
        "scene": "{base}, answers by {style}, load {load}",
        "late": "{late_changed:.1%}",
        "oracle": "{oracle_late_changed:.1%}",
    }
    changed = (one for one in all_of(found, what="scene", law="slower"))
    return table(f"The first {CHANGED_S:g} s in which a device is 1.6 times as slow", columns, changed)


def _burst_sheet(found: Found) -> Sheet:
    columns = {
        "what the model does not say": "{name}",
        "come at once": "{of}",
        "admitted": "{admitted}",
        "late": "{late}",
        "the oracle admits": "{most}, {most_late} late",
    }
    return table("One burst after light load", columns, all_of(found, what="burst"))


def goals(found: Found) -> list[Goal]:
    scenes = all_of(found, what="scene")
    every = _row(scenes) if scenes else {}
    least = min((one["share"] for one in scenes if one["law"] != _STAIRS), default=None)
    wanted = every.get("oracle_kept", _FEWER) - _FEWER
    return [
        Goal("goodput beside the oracle's, mean", 0.96, every.get("share")),
        Goal(f"scenes with at most {LATE:.1%} late, the oracle's less {_FEWER}", wanted, every.get("kept"), "scenes"),
        Goal(f"goodput beside the oracle's, the least outside {_STAIRS}", _LEAST, least),
    ]


def plot(found: Found) -> Figure:
    """A bar for each law, with the oracle's below it."""
    rows = _laws(found)[::-1]
    every = panels((10, 5), 2)
    names, at = [row["law"] for row in rows], range(len(rows))
    every[0].barh(at, [100 * row["oracle"] for row in rows], 0.8, color=GREY, label="oracle")
    every[0].barh(at, [100 * row["late"] for row in rows], 0.4, color=BLUE, label="windve")
    every[0].axvline(100 * LATE, color="black", linewidth=0.8, linestyle=":")
    every[0].set(xlabel="late, mean of a device's scenes, %", yticks=at, yticklabels=names)
    every[0].legend(frameon=False, fontsize=8)
    every[1].barh(at, [row["share"] for row in rows], 0.4, color=BLUE)
    every[1].plot([row["least"] for row in rows], at, "|", color="black", markersize=9, label="the least")
    every[1].set(xlabel="goodput / the oracle's, mean", xlim=(0, 1.1), yticks=at, yticklabels=names)
    every[1].legend(frameon=False, fontsize=8)
    return figure_of(every)
