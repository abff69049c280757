"""The report's pictures: Figure 4 of the paper for each pool, and what clients saw beside what is promised.

They are PNGs as bytes, drawn with matplotlib's object API: no pyplot, no window, no global state. The colors are Okabe
and Ito's, which color-blind people can distinguish. Line styles and markers differ too, for print in gray.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from calibration.report.report_model import CalibrationReport, PoolReport, SampleReport
from calibration.report.tables import POOLS

ALPHA, BETA = "\N{GREEK SMALL LETTER ALPHA}", "\N{GREEK SMALL LETTER BETA}"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#56B4E9", "#E69F00", "#CC79A7", "#666666", "#000000")
OUTLIER, SLO, DEPTH, INK, GREY = "#AA4499", "#111111", "#00795A", "#222222", "#666666"
DOTS_PER_INCH = 150
_LATEST = 2.0  # times what is promised: slower ones are beyond the picture
_DASHED: dict[str, Any] = {"color": SLO, "linewidth": 1.4, "linestyle": (0, (6, 3)), "zorder": 3}


def fit(report: CalibrationReport, name: str) -> bytes:
    """Figure 4 for one pool: latency in s over concurrency, the fitted line, the SLO, and the chosen depth."""
    pool, settings, colour = report.pools[name], report.settings, COLOURS[[*POOLS].index(name)]
    figure, (axes,) = canvas(height_in=5.0)
    edge = 1.1 * max([sample.concurrency for sample in pool.samples] + [pool.depth or 0, 3])
    top = max([1.18 * settings.slo_s] + [1.08 * sample.latency_s for sample in pool.samples])
    axes.set(xlim=(0, edge), ylim=(0, top), ylabel="latency on the device (s)")
    axes.set_xlabel("concurrency C (queries at once" + (", per replica)" if pool.replicas > 1 else ")"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _samples(axes, pool.samples, colour)
    _lines(axes, pool, edge, colour, steady=settings.shape == "steady")
    axes.axhline(settings.slo_s, **_DASHED)
    across: Any = ("axes fraction", "data")
    _label(axes, f"SLO {settings.slo_s:g} s", (0.01, settings.slo_s), (0, 4), xycoords=across, va="bottom")
    _depth(axes, pool, edge)
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom", "color": INK}
    device = _devices(pool) + (" (emulated)" if report.application.emulated else "")
    device = f"{POOLS[name]}: {device}"  # foreign text, in which `$` does not begin a formula
    axes.annotate(device, (0, 1), xytext=(0, 26), fontsize=12.5, fontweight="bold", parse_math=False, **style)
    axes.annotate(_equation(pool), (0, 1), xytext=(0, 9), fontsize=10.5, **style)
    return png(figure, legend=bool(pool.samples) or pool.curve is not None)


def seen(title: str, panels: Sequence[tuple[str, float, Mapping[str, Sequence[float]]]]) -> bytes:
    """For each panel (what was timed, the seconds promised, times in s by their name): cumulative shares over seconds.
    The names are those of the first panel.
    """
    figure, every = canvas(height_in=4.2, columns=len(panels))
    for axes, (timed, promised_s, times) in zip(every, panels, strict=True):
        for place, (name, values) in enumerate(times.items()):
            ordered = np.sort(np.asarray(values, float))
            share = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
            style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "linestyle": ("-", "--", ":")[place % 3]}
            label = name if axes is every[0] else None
            axes.step(ordered, share, where="post", linewidth=1.8, label=label, **style)
        axes.axvline(promised_s, **_DASHED)
        _label(axes, f"promised {promised_s:g} s", (promised_s, 0.05), (-5, 0), ha="right")
        axes.set(xlabel=timed, ylim=(0, 1.02))
        latest_s = max(max(values, default=0.0) for values in times.values())
        axes.set_xlim(0, 1.08 * min(_LATEST * promised_s, max(promised_s, latest_s)))
    every[0].set_ylabel("share of the admitted")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return png(figure, legend=True)


def canvas(height_in: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes, with two spines, quiet ticks, and a faint grid behind the data."""
    figure = Figure(figsize=(8.0, height_in), dpi=DOTS_PER_INCH, layout="constrained")
    every = figure.subplots(1, columns, sharey=True, squeeze=False).ravel().tolist()
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.tick_params(colors=GREY, labelcolor=INK)
        axes.grid(visible=True, color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, every


def _label(axes: Axes, words: str, at: tuple[float, float], beside: tuple[float, float], **style: Any) -> None:
    """Words at a place (x in data, y as a fraction of the axes, unless `style` says otherwise), `beside` in points."""
    style = {"xycoords": ("data", "axes fraction"), "color": SLO, "fontweight": "bold", "zorder": 5, **style}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    axes.annotate(words, at, xytext=beside, textcoords="offset points", bbox=box, **style)


def _lines(axes: Axes, pool: PoolReport, edge: float, colour: str, *, steady: bool) -> None:
    """Eq. 12 from C = 0, where it shows beta; the confidence region; and for steady load, the line that must meet the
    SLO.
    """
    if (curve := pool.curve) is None:
        return
    concurrency = np.array([0.0, edge])
    latency_s = curve.alpha_s * concurrency + curve.beta_s
    axes.plot(concurrency, latency_s, color=colour, linewidth=1.8, label=f"fit: {ALPHA} C + {BETA}")
    if pool.band:
        at, low_s, high_s = np.asarray(pool.band, dtype=float).T
        axes.fill_between(at, low_s, high_s, color=colour, alpha=0.22, linewidth=0, label="confidence region")
    if steady:
        words = f"steady load: {ALPHA} C + 2 {BETA}, held to the SLO"
        axes.plot(concurrency, latency_s + curve.beta_s, color=INK, linewidth=1.8, linestyle="-.", label=words)


def _samples(axes: Axes, samples: Sequence[SampleReport], colour: str) -> None:
    kept: dict[str, Any] = {"s": 34, "color": colour, "edgecolors": "white", "linewidths": 0.7}
    out: dict[str, Any] = {"s": 46, "marker": "D", "facecolors": "white", "edgecolors": OUTLIER, "linewidths": 1.6}
    for outlier, words, style in ((False, "measured", kept), (True, "outlier, left out of the fit", out)):
        if points := [(one.concurrency, one.latency_s) for one in samples if one.outlier is outlier]:
            axes.scatter(*zip(*points, strict=True), zorder=4, label=words, **style)
    if not samples:
        axes.text(0.5, 0.5, "no measurement", transform=axes.transAxes, ha="center", color=GREY, fontsize=13)


def _depth(axes: Axes, pool: PoolReport, edge: float) -> None:
    """A vertical line at the depth, or at the estimate if it was not verified."""
    word, depth = ("depth", pool.depth) if pool.depth is not None else ("estimate", pool.estimate)
    if depth is None:
        return
    axes.axvline(depth, color=DEPTH, linewidth=1.8, linestyle=(0, (1, 1.2)), zorder=3)
    right = depth < edge / 2
    style = {"ha": "left" if right else "right", "fontsize": 12, "color": DEPTH}
    _label(axes, f"{word} {depth}", (depth, 0.04), (7 if right else -7, 0), **style)


def _equation(pool: PoolReport) -> str:
    if pool.curve is None:
        return "no line was fitted"
    r2 = "" if pool.r2 is None else f"     R\N{SUPERSCRIPT TWO} = {pool.r2:.4f}"
    return f"{ALPHA} = {1000 * pool.curve.alpha_s:.4g} ms per query     {BETA} = {pool.curve.beta_s:.3g} s{r2}"


def _devices(pool: PoolReport) -> str:
    """The first device's name and the number of others. Characters that the font may lack become question marks."""
    return pool.devices_in_words.encode("latin-1", "replace").decode("latin-1")[:72]


def png(figure: Figure, *, legend: bool) -> bytes:
    """The figure as PNG, with the legend below the data."""
    if legend:
        entries = len(figure.axes[0].get_legend_handles_labels()[1])
        figure.legend(loc="outside lower center", ncols=3 if entries > 4 else 4, frameon=False, fontsize=9.5)
    held = io.BytesIO()
    figure.savefig(held, format="png", facecolor="white")
    return held.getvalue()
