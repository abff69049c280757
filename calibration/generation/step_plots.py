"""Pictures of a calibration of generation: predicted over measured steps, and the streams' times beside the promise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from calibration.generation.promise_proof import PromiseProof
from calibration.generation.step_report_model import GenerationCalibrationReport
from calibration.report.plots import DOTS_PER_INCH, GREY, INK, LABEL_BOX, SLO, canvas, plain_axes, png
from calibration.report.tables import POOLS

_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#666666", "#000000")
_MARKS = "osD^v<>P"
_TIGHT = 0.10  # relative error between the two lines


def steps(report: GenerationCalibrationReport, name: str) -> bytes:
    """Predicted over measured seconds of each planned step; both axes logarithmic."""
    pool = report.pools[name]
    figure, axes = canvas(height_in=6.0)
    names = list(dict.fromkeys(step.series for step in pool.steps))
    for place, series in enumerate(names):
        ours = [step for step in pool.steps if step.series == series]
        axes.scatter(
            [1000 * median(step.seconds) for step in ours],
            [1000 * step.predicted_s for step in ours],
            s=42, marker=_MARKS[place % len(_MARKS)], color=_COLOURS[place % len(_COLOURS)], edgecolors="white",
            linewidths=0.6, zorder=4, label=series,
        )  # fmt: skip
    every = [1000 * value for step in pool.steps for value in (median(step.seconds), step.predicted_s)]
    ends = np.array([0.8 * min(every), 1.25 * max(every)])
    axes.plot(ends, ends, color=INK, linewidth=1.2, label="as measured")
    axes.fill_between(ends, (1 - _TIGHT) * ends, (1 + _TIGHT) * ends, color=GREY, alpha=0.15, linewidth=0, label="10 %")
    _logarithmic(axes)
    axes.set(xlim=ends, ylim=ends)
    axes.set_xlabel("a step took (ms, median)")
    axes.set_ylabel("a step is predicted to take (ms)")
    axes.set_title(
        f"{POOLS[name]}: {len(pool.steps)} steps, error {100 * (pool.median_error or 0):.1f} % (median), "
        f"{100 * (pool.worst_error or 0):.0f} % (worst)",
        loc="left", fontsize=12, fontweight="bold", color=INK,
    )  # fmt: skip
    return png(figure, legend=True)


def promises(report: GenerationCalibrationReport) -> bytes | None:
    """Cumulative shares of first tokens, and of answers, over seconds; None if no stream was sent."""
    if not report.streams:
        return None
    figure = Figure(figsize=(8.0, 4.2), dpi=DOTS_PER_INCH, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    promise = report.settings
    _shares(left, report.streams, [one.firsts_s for one in report.streams], promise.ttft_s, named=True)
    _shares(right, report.streams, [one.paces_s for one in report.streams], promise.tpot_s)
    left.set(xlabel="first token after (s)", ylabel="share of the admitted", ylim=(0, 1.02))
    right.set_xlabel("a token each (s), mean of an answer")
    figure.suptitle("What the streams' client saw", x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return png(figure, legend=True)


def _logarithmic(axes: Axes) -> None:
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())


def _shares(
    axes: Axes,
    streams: Sequence[PromiseProof],
    seen: Sequence[Sequence[float]],
    promised_s: float,
    *,
    named: bool = False,
) -> None:
    plain_axes(axes)
    for place, (stream, values) in enumerate(zip(streams, seen, strict=True)):
        ordered = np.sort(np.asarray(values, float))
        share = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
        axes.step(
            ordered, share, where="post", color=_COLOURS[(0, 2, 3)[place % 3]], linestyle=("-", "--", ":")[place % 3],
            linewidth=1.8, label=stream.stream.name if named else None,
        )  # fmt: skip
    axes.axvline(promised_s, color=SLO, linewidth=1.4, linestyle=(0, (6, 3)))
    axes.annotate(
        f"promised {promised_s:g} s", (promised_s, 0.05), xycoords=("data", "axes fraction"), xytext=(-5, 0),
        textcoords="offset points", ha="right", fontweight="bold", color=SLO, bbox=LABEL_BOX,
    )  # fmt: skip
    axes.set_xlim(0, 1.08 * max(promised_s, *(max(values, default=0.0) for values in seen)))
