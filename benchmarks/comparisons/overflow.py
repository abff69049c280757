"""A load peak that overflows to the CPU and then ends: the whole application over the paper's V100 and Xeon, emulated
at true speed. Queries arrive one by one, as from many clients. Shows what a real Prometheus answers to the dashboard's
expressions, and what the clients saw.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.kit import prometheus, texts
from benchmarks.kit.arrivals import Ended, Load, figures
from benchmarks.kit.bench import Bench, Found, NotAvailable
from benchmarks.kit.figures import COLOURS, figure_of, panels
from benchmarks.kit.goal import Goal
from benchmarks.kit.serving import serving, settled, shipped, wait_until_answered
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation.arrivals import QUERY_TOKENS, Arrival, poisson
from deployments.hardware.device_detector import ACCELERATOR, CPU

POOLS = (ACCELERATOR, CPU)
PHASES = {"calm": 15, "surge": 44, "peak": 70, "calm again": 15}  # queries a second
SLO_S = 2.0
_SECONDS, _QUICK_SECONDS = 45.0, 20.0  # of each phase
_QUIET_S = 6.0  # counters are complete once nothing has changed for this long
_RATE_INTERVAL = "10s"
_PANELS = [panel for panel in prometheus.panels() if panel["type"] == "timeseries"][:6]  # the first screen
_ODD = "#f1f1f1"
_UNITS = {"percentunit": (100, "%"), "short": (1, "queries"), "qps": (1, "queries/s")}  # Grafana's names of them


def run(bench: Bench) -> None:
    if not prometheus.is_installed():
        raise NotAvailable("prometheus is not installed (Debian: apt-get install prometheus)")
    seconds = _QUICK_SECONDS if bench.quick else _SECONDS
    with bench.turn(), serving(_config(), RAY_metrics_report_interval_ms="1000") as service:
        url = f"{service.url}/v1/embeddings"
        wait_until_answered(url, {"input": texts.of_tokens(QUERY_TOKENS)})
        with prometheus.reading(service.metrics) as reader:
            before, started = settled(lambda: _counted(reader), _QUIET_S), time.time()
            ended = asyncio.run(_send(service.url, _arrivals(seconds)))
            told = settled(lambda: _counted(reader), _QUIET_S)
            bench.found["seconds"] = seconds
            bench.found["told"] = {what: count - before.get(what, 0.0) for what, count in told.items()}
            bench.found["panels"] = _history(reader, started, started + seconds * len(PHASES) + _QUIET_S)
    for number, (phase, rate) in enumerate(PHASES.items()):
        seen = _figures([one for one in ended if one.arrival.at // seconds == number], seconds)
        shown = f"{seen[ACCELERATOR]} + {seen[CPU]} answered, {seen['busy']} refused, {seen['late']} late"
        bench.sample({"phase": phase, "queries_s": rate}, seen, shown)


def _config() -> dict[str, Any]:
    config = shipped("rehearsal.yaml")
    config["applications"][0]["deployments"][0]["user_config"] |= {"slo_s": SLO_S, "admission": "deadline"}
    return config


async def _send(url: str, arrivals: Sequence[Arrival]) -> list[Ended]:
    load = Load(url)
    try:
        return await load.send(arrivals)
    finally:
        load.hang_up()


def _arrivals(seconds: float) -> list[Arrival]:
    """Queries at random times, in phases of equal length."""
    return [
        one._replace(at=one.at + number * seconds)
        for number, rate in enumerate(PHASES.values())
        for one in poisson(rate, seconds, allowed_s=SLO_S, seed=number)
    ]


def _figures(ended: Sequence[Ended], seconds: float) -> dict[str, Any]:
    pools = {pool: sum(one.ok and one.reply is not None and one.reply.pool == pool for one in ended) for pool in POOLS}
    return {**figures(ended, seconds), **pools}


def _counted(reader: prometheus.Prometheus) -> dict[str, float]:
    """The query counters of windve in Prometheus. Waits until there are any."""
    query = "sum by (pool, outcome) (ray_windve_queries_total)"
    while not (series := reader.ask("/api/v1/query", query=query)["result"]):
        time.sleep(0.5)
    found = {(one["metric"]["pool"], one["metric"]["outcome"]): float(one["value"][1]) for one in series}
    return {pool if outcome == "ok" else outcome: count for (pool, outcome), count in found.items()}


def _history(reader: prometheus.Prometheus, start: float, end: float) -> dict[str, list[dict[str, Any]]]:
    """The lines of each panel: name, and values over seconds since `start`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for panel in _PANELS:
        lines = found[panel["title"]] = []
        for query in panel["targets"]:
            expr = query["expr"].replace("$__rate_interval", _RATE_INTERVAL).replace("$application", "windve")
            for tags, points in reader.history(expr, start, end):
                name = re.sub(r"{{(\w+)}}", lambda tag, tags=tags: tags.get(tag[1], ""), query["legendFormat"])  # type: ignore[misc]
                seen = [(round(at - start, 1), value) for at, value in points if np.isfinite(value)]
                if seen:
                    lines.append({"name": name, "seconds": [at for at, _ in seen], "values": [v for _, v in seen]})
    return found


def sheets(found: Found) -> list[Sheet]:
    columns = {
        "phase": "{phase}", "queries/s": "{queries_s}", "sent": "{sent}", "by the accelerator": f"{{{ACCELERATOR}}}",
        "by the CPU": f"{{{CPU}}}", "refused": "{busy}", "later than the SLO": "{late}", "p50, s": "{p50_s:.2f}",
        "p99, s": "{p99_s:.2f}", "refused within, p99, s": "{busy_p99_s:.3f}",
    }  # fmt: skip
    seen = table(f"What the clients saw; SLO {SLO_S:g} s", columns, found["samples"])
    columns = {"queries": "{what}", "by the clients": "{clients}", "by Prometheus": "{told:.0f}"}
    told = found["told"]
    counted = [{"what": what, "clients": _total(found, what), "told": told.get(what, 0.0)} for what in (*POOLS, "busy")]
    return [seen, table("Counted", columns, counted)]


def _total(found: Found, what: str) -> int:
    return sum(sample[what] for sample in found["samples"])


def goals(found: Found) -> list[Goal]:
    answered = sum(_total(found, pool) for pool in POOLS)
    wrong = sum(abs(found["told"].get(what, 0.0) - _total(found, what)) for what in (*POOLS, "busy"))
    neither = _total(found, "sent") - answered - _total(found, "busy")
    return [
        Goal("answered later than the SLO", 1.0, 100 * _total(found, "late") / max(1, answered), "%", at_most=True),
        Goal("neither answered nor refused", 0, neither, "queries", at_most=True),
        Goal("Prometheus counts other than the clients", 0, wrong, "queries", at_most=True),
    ]


def plot(found: Found) -> Figure:
    every = panels((13, 6.4), 3, 2)
    for axes, panel in zip(every, _PANELS, strict=True):
        if (lines := found["panels"].get(panel["title"])) is None:
            axes.set_axis_off()  # the dashboard has got it since these figures were kept
        else:
            _panel(axes, panel, lines, found["seconds"])
    phases = ", ".join(f"{name} {rate}/s" for name, rate in PHASES.items())
    figure = figure_of(every)
    figure.suptitle(f"The dashboard's first screen over a peak: {phases}")
    return figure


def _panel(axes: Axes, panel: dict[str, Any], lines: Sequence[dict[str, Any]], seconds: float) -> None:
    named = panel["fieldConfig"]["defaults"]["unit"]
    scale, unit = _UNITS.get(named, (1, named))
    for number in range(len(PHASES)):
        if number % 2:
            axes.axvspan(number * seconds, (number + 1) * seconds, color=_ODD, zorder=0)
    for colour, line in zip(COLOURS, lines, strict=False):
        flat = line["name"] == "SLO"
        axes.plot(
            line["seconds"], [scale * value for value in line["values"]], color=colour, label=line["name"],
            linestyle="--" if flat else "-", linewidth=1.2 if flat else 1.8,
        )  # fmt: skip
    axes.set_title(panel["title"], loc="left", fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlim(0, len(PHASES) * seconds)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])  # a level line is seen below the frame
    axes.set_xlabel("s")
    if lines:
        axes.legend(fontsize=8, loc="best", frameon=True, framealpha=0.8, edgecolor="none")
    else:
        axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center", color="grey")
