"""The report of a calibration of generation: tables, and pictures of predicted over measured steps and of the streams'
times beside the promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from calibration.generation.generation_result import GenerationCalibrationReport, StepPoolReport
from calibration.report import plots
from calibration.report.page import Pictures, Shown, number, seconds, text
from calibration.report.tables import DASH, POOLS, Sheet, percent

_MARKS = "osD^v<>P"
_TIGHT = 0.10  # relative error between the two lines


def shown(report: GenerationCalibrationReport) -> Shown:
    """The step times, whether a host pays off, the streams and the verdict."""
    hosts = [_host(name, pool) for name, pool in _measured(report).items() if pool.overlaps]
    return Shown(report, verdict(report), (_times(report), *hosts, _streams(report)), lambda: _pictures(report))


def _pictures(report: GenerationCalibrationReport) -> Pictures:
    pictures = {
        f"steps-{name}.png": (f"Predicted over measured steps, {POOLS[name]}", _steps_picture(report, name))
        for name in _measured(report)
    }
    if streams := report.streams:
        first = ("first token after (s)", report.settings.ttft_s, {one.stream.name: one.firsts_s for one in streams})
        pace = ("a token each (s), mean of an answer", report.settings.tpot_s)
        panels = [first, (*pace, {one.stream.name: one.paces_s for one in streams})]
        picture = plots.seen("What the streams' client saw", panels)
        pictures["promises.png"] = ("First tokens and paces beside the promise", picture)
    return pictures


def verdict(report: GenerationCalibrationReport) -> str:
    promise = report.settings
    if report.is_refused:
        return f"refused: {text(report.reason)}"
    found = (
        f"{number(report.capacity, '.3g')} requests a second (prompts of {promise.prompt_tokens} tokens, answers of "
        f"{promise.answer_tokens}) within {promise.ttft_s:g} s to the first token and {promise.tpot_s:g} s a token"
    )
    return f"estimated, not proven: {found}" if report.outcome == "estimated" else found


def _measured(report: GenerationCalibrationReport) -> dict[str, StepPoolReport]:
    """The measured pools, the preferred one first."""
    return {name: report.pools[name] for name in POOLS if name in report.pools and report.pools[name].step_time}


def _times(report: GenerationCalibrationReport) -> Sheet | None:
    pools = _measured(report)
    if not pools:
        return None
    units = {
        "beta_s": ("a step, ms", 1e3), "row_s": ("an answer in it, ms", 1e3),
        "kv_token_s": ("a token that it reads, us", 1e6), "prompt_token_s": ("a token of a prompt, ms", 1e3),
        "pair_s": ("a pair of tokens in a prompt, ns", 1e9), "knee": ("rows and tokens that cost nothing", 1),
    }  # fmt: skip
    host_units = {
        "row_s": ("the host: an answer, ms", 1e3), "kv_token_s": ("the host: a token that it reads, us", 1e6),
        "copy_token_s": ("a token to the other memory, us", 1e6),
    }  # fmt: skip
    rows = [
        [label, *(f"{times * (pool.step_time or {})[key]:.4g}" for pool in pools.values())]
        for key, (label, times) in units.items()
    ]
    if any(pool.host_time for pool in pools.values()):
        rows += [
            [
                label,
                *(DASH if pool.host_time is None else f"{times * pool.host_time[key]:.4g}" for pool in pools.values()),
            ]
            for key, (label, times) in host_units.items()
        ]
    rows += [
        ["error, median", *(percent(pool.median_error) for pool in pools.values())],
        ["error, worst", *(percent(pool.worst_error) for pool in pools.values())],
        ["equal steps differ by, median", *(percent(pool.noise) for pool in pools.values())],
        ["steps measured", *(str(len(pool.steps)) for pool in pools.values())],
    ]
    return Sheet(
        "What steps take", ["", *(f"{POOLS[name]}: {pool.devices_in_words}" for name, pool in pools.items())], rows
    )


def _host(name: str, pool: StepPoolReport) -> Sheet:
    """For a pool whose hosts hold part of the cache: whether that pays off."""
    mean, *_ = overlaps = pool.overlaps
    lines = {
        "accelerator's attention, times the host's": [f"{one.ratio:.3g}" for one in overlaps],
        "two batches pay below": [f"{one.largest_ratio:.3g}" for one in overlaps],
        "do they?": ["yes" if one.pays else "no" for one in overlaps],
        "tokens/s, accelerator alone": [f"{one.alone_rate:.4g}" for one in overlaps],
        "tokens/s, two batches that take turns": [f"{one.pipelined_rate:.4g}" for one in overlaps],
        "tokens/s, host's answers join later": [f"{one.asynchronous_rate:.4g}" for one in overlaps],
        "blocks that keep the host busy, two batches": [f"{one.pipelined_blocks}" for one in overlaps],
        "and where answers join later": [f"{one.asynchronous_blocks}" for one in overlaps],
    }
    sign, end = ("<", "pay") if mean.pays else (">=", "do not pay")
    caption = (
        f"At {mean.context} tokens two batches {end}: {mean.ratio:.3g} {sign} {mean.largest_ratio:.3g}. The host has "
        f"{pool.num_cpu_blocks} blocks. Predicted by APEX's equations (5) and (6), arXiv:2506.03296, for steps without "
        "prompts while the accelerator's cache is full; for answers that join later by no equation of the paper."
    )
    columns = ["tokens of each answer", *(str(one.context) for one in overlaps)]
    rows = [[label, *cells] for label, cells in lines.items()]
    return Sheet(f"Hybrid decoding: {POOLS[name]}", columns, rows, caption)


def _streams(report: GenerationCalibrationReport) -> Sheet | None:
    if not report.streams:
        return None
    rows = [
        [one.stream.name, f"{one.stream.rate:.3g}", f"{len(one.firsts_s)} of {one.sent}", str(one.busy),
         f"{one.late_firsts}, {one.late_paces}", _p99(one.firsts_s), _p99(one.paces_s)]
        for one in report.streams
    ]  # fmt: skip
    columns = ["", "offered/s", "admitted", "refused", "late first tokens, paces", "first token p99, s", "pace p99, s"]
    return Sheet("Streams, by their client", columns, rows)


def _p99(values: Sequence[float]) -> str:
    return seconds(float(np.quantile(values, 0.99)) if values else None)


# Pictures


def _steps_picture(report: GenerationCalibrationReport, name: str) -> bytes:
    """Predicted over measured seconds of each planned step; both axes logarithmic."""
    pool = report.pools[name]
    figure, (axes,) = plots.canvas(height_in=6.0)
    names = list(dict.fromkeys(step.series for step in pool.steps))
    for place, series in enumerate(names):
        ours = [step for step in pool.steps if step.series == series]
        axes.scatter(
            [1000 * median(step.seconds) for step in ours],
            [1000 * step.predicted_s for step in ours],
            s=42, marker=_MARKS[place % len(_MARKS)], color=plots.COLOURS[place % len(plots.COLOURS)],
            edgecolors="white", linewidths=0.6, zorder=4, label=series,
        )  # fmt: skip
    every = [1000 * value for step in pool.steps for value in (median(step.seconds), step.predicted_s)]
    ends = np.array([0.8 * min(every), 1.25 * max(every)])
    axes.plot(ends, ends, color=plots.INK, linewidth=1.2, label="as measured")
    axes.fill_between(
        ends, (1 - _TIGHT) * ends, (1 + _TIGHT) * ends, color=plots.GREY, alpha=0.15, linewidth=0, label="10 %"
    )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("a step took (ms, median)")
    axes.set_ylabel("a step is predicted to take (ms)")
    axes.set_title(
        f"{POOLS[name]}: {len(pool.steps)} steps, error {100 * (pool.median_error or 0):.1f} % (median), "
        f"{100 * (pool.worst_error or 0):.0f} % (worst)",
        loc="left", fontsize=12, fontweight="bold", color=plots.INK,
    )  # fmt: skip
    return plots.png(figure, legend=True)
