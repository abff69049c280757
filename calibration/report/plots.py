"""The report's pictures: Figure 4 of the paper for each pool, and the latencies of the verification.

They are PNGs as bytes, drawn with matplotlib's object API: no pyplot, no window, no global state. The colors are Okabe
and Ito's, which color-blind people can distinguish. Line styles, markers and hatches differ too, for print in gray.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from calibration.fit.curve import Shape
from calibration.report.report_model import CalibrationReport, PoolReport, SampleReport
from calibration.report.tables import POOLS

Floats = npt.NDArray[np.floating[Any]]
ALPHA, BETA = "\N{GREEK SMALL LETTER ALPHA}", "\N{GREEK SMALL LETTER BETA}"
COLOURS = {"accelerator": "#0072B2", "cpu": "#D55E00"}
OUTLIER, SLO, DEPTH, INK, GREY = "#AA4499", "#111111", "#00795A", "#222222", "#666666"
DOTS_PER_INCH = 150
BINS_TO_SLO = 40
LATEST = 1.5  # SLOs: slower queries are counted in the histogram's last bin
DASHED: dict[str, Any] = {"color": SLO, "linewidth": 1.4, "linestyle": (0, (6, 3)), "zorder": 3}


def fit(report: CalibrationReport, name: str) -> bytes:
    """Figure 4 for one pool: latency in s over concurrency, the fitted line, the SLO, and the chosen depth."""
    pool, settings = report.pools[name], report.settings
    figure, (axes,) = canvas(height_in=5.0)
    edge = 1.1 * max([sample.concurrency for sample in pool.samples] + [pool.depth or 0, 3])
    top = max([1.18 * settings.slo_s] + [1.08 * sample.latency_s for sample in pool.samples])
    axes.set(xlim=(0, edge), ylim=(0, top))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("concurrency C (queries at once" + (", per replica)" if pool.replicas > 1 else ")"))
    axes.set_ylabel("latency on the device (s)")
    _samples(axes, pool.samples, COLOURS[name])
    _lines(axes, pool, settings.shape, edge, COLOURS[name])
    axes.axhline(settings.slo_s, **DASHED)
    across: Any = ("axes fraction", "data")
    label(axes, f"SLO {settings.slo_s:g} s", (0.01, settings.slo_s), (0, 4), xycoords=across, va="bottom")
    _depth(axes, pool, edge)
    _titles(axes, f"{POOLS[name]}: {_devices(report, pool)}", _equation(pool))
    return png(figure, legend=bool(pool.samples) or pool.curve is not None)


def verification(report: CalibrationReport) -> bytes | None:
    """How long each pool's queries took in the verification, in s; None if no burst of it has a latency."""
    verified = [burst for burst in report.bursts if burst.stage == "verify"]
    # Earlier bursts belong to attempts at larger depths, which did not hold.
    bursts = [burst.latencies_s for burst in verified if burst.depths == verified[-1].depths]
    taken = {name: [latency for burst in bursts for latency in burst.get(name, ())] for name in POOLS}
    taken = {name: latencies for name, latencies in taken.items() if latencies}
    if not taken:
        return None
    slo_s = report.settings.slo_s
    figure, rows = canvas(1.6 + 1.5 * len(taken), rows=len(taken))
    for axes, (name, latencies) in zip(rows, taken.items(), strict=True):
        _histogram(axes, name, np.asarray(latencies), slo_s)
    rows[-1].set_xlabel("latency of a query, as its client saw it (s)")
    rows[0].set_title(
        f"Verification: {len(bursts)} bursts at the final depths{_emulated(report)}",
        loc="left", fontsize=12, fontweight="bold", color=INK, pad=22,
    )  # fmt: skip
    return png(figure, legend=False)


def canvas(height_in: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes, with two spines, quiet ticks, and a faint grid behind the data."""
    figure = Figure(figsize=(8.0, height_in), dpi=DOTS_PER_INCH, layout="constrained")
    every = figure.subplots(rows, columns, sharex=rows > 1, sharey=columns > 1, squeeze=False).ravel().tolist()
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.tick_params(colors=GREY, labelcolor=INK)
        axes.grid(visible=True, color="#E4E4E4", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, every


def label(axes: Axes, words: str, at: tuple[float, float], beside: tuple[float, float], **style: Any) -> None:
    """Words at a place (x in data, y as a fraction of the axes, unless `style` says otherwise), `beside` in points."""
    style = {"xycoords": ("data", "axes fraction"), "color": SLO, "fontweight": "bold", "zorder": 5, **style}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    axes.annotate(words, at, xytext=beside, textcoords="offset points", bbox=box, **style)


def _lines(axes: Axes, pool: PoolReport, shape: Shape, edge: float, colour: str) -> None:
    """Eq. 12 from C = 0, where it shows beta; the confidence region; and for steady load, the line that must meet the
    SLO.
    """
    curve = pool.curve
    if curve is None:
        return
    concurrency = np.array([0.0, edge])
    latency_s = curve.alpha_s * concurrency + curve.beta_s
    axes.plot(concurrency, latency_s, color=colour, linewidth=1.8, label=f"fit: {ALPHA} C + {BETA}")
    if pool.band:
        at, low_s, high_s = np.asarray(pool.band, dtype=float).T
        axes.fill_between(at, low_s, high_s, color=colour, alpha=0.22, linewidth=0, label="confidence region")
    if shape == "steady":
        words = f"steady load: {ALPHA} C + 2 {BETA}, held to the SLO"
        axes.plot(concurrency, latency_s + curve.beta_s, color=INK, linewidth=1.8, linestyle="-.", label=words)


def _samples(axes: Axes, samples: list[SampleReport], colour: str) -> None:
    kept = [sample for sample in samples if not sample.outlier]
    outliers = [sample for sample in samples if sample.outlier]
    if kept:
        axes.scatter(*_points(kept), s=34, color=colour, edgecolors="white", linewidths=0.7, zorder=4, label="measured")
    if outliers:
        style: dict[str, Any] = {"marker": "D", "facecolors": "white", "edgecolors": OUTLIER, "linewidths": 1.6}
        axes.scatter(*_points(outliers), s=46, zorder=4, label="outlier, left out of the fit", **style)
    if not samples:
        axes.text(0.5, 0.5, "no measurement", transform=axes.transAxes, ha="center", color=GREY, fontsize=13)


def _points(samples: list[SampleReport]) -> tuple[list[float], list[float]]:
    return [sample.concurrency for sample in samples], [sample.latency_s for sample in samples]


def _depth(axes: Axes, pool: PoolReport, edge: float) -> None:
    """A vertical line at the depth, or at the estimate if it was not verified."""
    word, depth = ("depth", pool.depth) if pool.depth is not None else ("estimate", pool.estimate)
    if depth is None:
        return
    axes.axvline(depth, color=DEPTH, linewidth=1.8, linestyle=(0, (1, 1.2)), zorder=3)
    right = depth < edge / 2
    style = {"ha": "left" if right else "right", "fontsize": 12, "color": DEPTH}
    label(axes, f"{word} {depth}", (depth, 0.04), (7 if right else -7, 0), **style)


def _histogram(axes: Axes, name: str, latencies_s: Floats, slo_s: float) -> None:
    """Queries per bin, with late ones hatched, and a title with the numbers. The SLO is an edge of two bins."""
    edges = (slo_s / BINS_TO_SLO * np.arange(LATEST * BINS_TO_SLO + 1)).tolist()
    shown = np.clip(latencies_s, edges[0], edges[-1])
    late = latencies_s > slo_s
    axes.hist(shown[~late], edges, color=COLOURS[name], edgecolor="white", linewidth=0.6)
    axes.hist(shown[late], edges, color="white", edgecolor=OUTLIER, hatch="////", linewidth=1.0)
    axes.axvline(slo_s, **DASHED)
    label(axes, f"SLO {slo_s:g} s", (slo_s, 0.95), (5, 0), va="top")
    if (beyond := int((latencies_s > edges[-1]).sum())) > 0:
        words = f"{beyond} beyond"
        axes.text(0.995, 0.5, words, transform=axes.transAxes, ha="right", color=OUTLIER, fontweight="bold")
    words = f"{POOLS[name]}: {len(latencies_s)} queries, {int(late.sum())} late"
    axes.text(0, 1.03, words, transform=axes.transAxes, va="bottom", color=INK, fontsize=10.5)
    axes.set(xlim=(edges[0], edges[-1]), ylabel="queries")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


def _titles(axes: Axes, device: str, equation: str) -> None:
    """Titles: the device's name (foreign text, in which `$` does not begin a formula) above the fitted numbers."""
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom", "color": INK}
    axes.annotate(device, (0, 1), xytext=(0, 26), fontsize=12.5, fontweight="bold", parse_math=False, **style)
    axes.annotate(equation, (0, 1), xytext=(0, 9), fontsize=10.5, **style)


def _equation(pool: PoolReport) -> str:
    if pool.curve is None:
        return "no line was fitted"
    r2 = "" if pool.r2 is None else f"     R\N{SUPERSCRIPT TWO} = {pool.r2:.4f}"
    return f"{ALPHA} = {1000 * pool.curve.alpha_s:.4g} ms per query     {BETA} = {pool.curve.beta_s:.3g} s{r2}"


def _devices(report: CalibrationReport, pool: PoolReport) -> str:
    """The first device's name and the number of others. Characters that the font may lack become question marks."""
    name = pool.devices_in_words.encode("latin-1", "replace").decode("latin-1")
    return name[:72] + _emulated(report)


def _emulated(report: CalibrationReport) -> str:
    return " (emulated)" if report.application.emulated else ""


def png(figure: Figure, *, legend: bool) -> bytes:
    """The figure as PNG, with the legend below the data."""
    if legend:
        entries = len(figure.axes[0].get_legend_handles_labels()[1])
        figure.legend(loc="outside lower center", ncols=3 if entries > 4 else 4, frameon=False, fontsize=9.5)
    held = io.BytesIO()
    figure.savefig(held, format="png", facecolor="white")
    return held.getvalue()
