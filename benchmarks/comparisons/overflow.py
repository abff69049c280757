"""A peak that overflows to the CPU and goes again: the paper's V100 and Xeon, emulated at true speed, under the whole
application; queries come one by one, as they do from many clients. What is shown is what a real Prometheus answers to
the dashboard's own expressions, beside what the clients saw.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.kit import prometheus, texts
from benchmarks.kit.bench import Bench, Found, NotAvailable
from benchmarks.kit.goal import Goal
from benchmarks.kit.server import wait_until_answered
from benchmarks.kit.serving import ROOT, serving
from benchmarks.kit.sheet import Sheet
from calibration.load import Address, Connection, Reply, request_bytes
from deployments.hardware.device_detector import ACCELERATOR, CPU
from k8s.dashboard import TOP, Panel

POOLS = (ACCELERATOR, CPU)
PHASES = {"calm": 15, "surge": 44, "peak": 70, "calm again": 15}  # queries a second
SLO_S = 2.0
_SECONDS, _QUICK_SECONDS = 45.0, 20.0  # of each phase
_TOKENS = 75
_QUIET_S = 6.0  # all that was counted has been told and read when nothing has changed for so long
_RATE_INTERVAL = "10s"
_PANELS = [panel for panel in TOP if panel.kind == "graph"]
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_ODD = "#f1f1f1"
_UNITS = {"percentunit": (100, "%"), "short": (1, "queries"), "qps": (1, "queries/s")}  # Grafana's names of them


@dataclass(frozen=True, slots=True)
class _Answered:
    """One query: the phase in which it was sent, and its answer."""

    phase: str
    reply: Reply


def run(bench: Bench) -> None:
    if not prometheus.is_installed():
        raise NotAvailable("prometheus is not installed (Debian: apt-get install prometheus)")
    seconds = _QUICK_SECONDS if bench.quick else _SECONDS
    with bench.turn(), serving(_config(), RAY_metrics_report_interval_ms="1000") as service:
        url = f"{service.url}/v1/embeddings"
        wait_until_answered(url, {"input": texts.of_tokens(_TOKENS)})
        with prometheus.reading(service.metrics) as reader:
            before, started = _settled(reader), time.time()
            with bench.steps(len(PHASES)) as step:
                answered = asyncio.run(_send(Address.parse(service.url), seconds, step))
            told = _settled(reader)
            bench.found["seconds"] = seconds
            bench.found["told"] = {what: count - before.get(what, 0.0) for what, count in told.items()}
            bench.found["panels"] = _history(reader, started, started + seconds * len(PHASES) + _QUIET_S)
    for phase, rate in PHASES.items():
        figures = _figures([one.reply for one in answered if one.phase == phase])
        shown = f"{figures[ACCELERATOR]} + {figures[CPU]} answered, {figures['busy']} busy, {figures['late']} late"
        bench.sample({"phase": phase, "queries_s": rate}, figures, shown)


def _config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_app" / "rehearsal.yaml").read_text(encoding="utf-8"))
    config["applications"][0]["deployments"][0]["user_config"] |= {"slo_s": SLO_S, "admission": "finish"}
    return config


async def _send(address: Address, seconds: float, step: Any) -> list[_Answered]:
    """Queries at random moments (a Poisson process, the same in every run), each phase as long as the others."""
    chance = random.Random(0)  # noqa: S311 - not a secret
    requests = [request_bytes({"input": texts.of_tokens(_TOKENS, seed)}) for seed in range(20)]
    idle: list[Connection] = []
    asking: list[asyncio.Task[_Answered]] = []

    async def ask(phase: str) -> _Answered:
        connection = idle.pop() if idle else await Connection.open(address)
        reply = await connection.ask(chance.choice(requests))
        idle.append(connection)
        return _Answered(phase, reply)

    at = time.perf_counter()
    for phase, rate in PHASES.items():
        step(f"{phase}: {rate} queries/s")
        ends = at + seconds
        while (at := at + chance.expovariate(rate)) < ends:
            await asyncio.sleep(at - time.perf_counter())
            asking.append(asyncio.create_task(ask(phase)))
        at = ends
    answered = await asyncio.gather(*asking)
    for connection in idle:
        connection.hang_up()
    return answered


def _figures(replies: Sequence[Reply]) -> dict[str, Any]:
    ok = [reply for reply in replies if reply.status == 200]
    busy = [reply for reply in replies if reply.status == 429]
    latencies = [reply.seconds for reply in ok]
    return {
        "sent": len(replies),
        **{pool: sum(reply.pool == pool for reply in ok) for pool in POOLS},
        "busy": len(busy),
        "other": len(replies) - len(ok) - len(busy),
        "late": sum(latency > SLO_S for latency in latencies),
        "p50_s": float(np.percentile(latencies, 50)),
        "p99_s": float(np.percentile(latencies, 99)),
        "busy_p99_s": float(np.percentile([reply.seconds for reply in busy], 99)) if busy else None,
        "latencies_s": [round(latency, 4) for latency in latencies],
    }


def _settled(reader: prometheus.Prometheus) -> dict[str, float]:
    """`_counted`, once there is something and it stays as it is."""
    told, since = _counted(reader), time.monotonic()
    while not told or time.monotonic() < since + _QUIET_S:
        time.sleep(0.5)
        before, told = told, _counted(reader)
        if told != before:
            since = time.monotonic()
    return told


def _counted(reader: prometheus.Prometheus) -> dict[str, float]:
    """Windve's own counters of queries, as Prometheus has them."""
    series = reader.ask("/api/v1/query", query="sum by (pool, outcome) (ray_windve_queries_total)")["result"]
    found = {(one["metric"]["pool"], one["metric"]["outcome"]): float(one["value"][1]) for one in series}
    return {pool if outcome == "ok" else outcome: count for (pool, outcome), count in found.items()}


def _history(reader: prometheus.Prometheus, start: float, end: float) -> dict[str, list[dict[str, Any]]]:
    """Of each panel its lines: name, and seconds since `start` with values."""
    found: dict[str, list[dict[str, Any]]] = {}
    for panel in _PANELS:
        lines = found[panel.title] = []
        for query in panel.queries:
            expr = query.expr.replace("$__rate_interval", _RATE_INTERVAL).replace("$application", "windve")
            for tags, points in reader.history(expr, start, end):
                name = re.sub(r"{{(\w+)}}", lambda tag, tags=tags: tags.get(tag[1], ""), query.legend)  # type: ignore[misc]
                seen = [(round(at - start, 1), value) for at, value in points if np.isfinite(value)]
                if seen:
                    lines.append({"name": name, "seconds": [at for at, _ in seen], "values": [v for _, v in seen]})
    return found


def sheets(found: Found) -> list[Sheet]:
    rows = [
        [
            sample["phase"], str(sample["queries_s"]), str(sample["sent"]), str(sample[ACCELERATOR]), str(sample[CPU]),
            str(sample["busy"]), str(sample["late"]), f"{sample['p50_s']:.2f}", f"{sample['p99_s']:.2f}",
            "-" if sample["busy_p99_s"] is None else f"{sample['busy_p99_s']:.3f}",
        ]
        for sample in found["samples"]
    ]  # fmt: skip
    head = [
        "phase", "queries/s", "sent", "by the accelerator", "by the CPU", "told busy", "later than the SLO", "p50, s",
        "p99, s", "busy told within, p99, s",
    ]  # fmt: skip
    counted = [
        [what, str(_total(found, what)), f"{found['told'].get(what, 0.0):.0f}"] for what in (ACCELERATOR, CPU, "busy")
    ]
    return [
        Sheet(f"What the clients saw; SLO {SLO_S:g} s, admission by predicted finish", head, rows),
        Sheet("Counted", ["queries", "by the clients", "by Prometheus"], counted),
    ]


def _total(found: Found, what: str) -> int:
    return sum(sample[what] for sample in found["samples"])


def goals(found: Found) -> list[Goal]:
    answered = sum(_total(found, pool) for pool in POOLS)
    wrong = sum(abs(found["told"].get(what, 0.0) - _total(found, what)) for what in (*POOLS, "busy"))
    return [
        Goal("answered later than the SLO", 1.0, 100 * _total(found, "late") / answered, "%", at_most=True),
        Goal("neither answered nor told busy", 0, _total(found, "other"), "queries", at_most=True),
        Goal("Prometheus counts other than the clients", 0, wrong, "queries", at_most=True),
    ]


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        if (lines := found["panels"].get(panel.title)) is None:
            axes.set_axis_off()  # the dashboard has got it since these figures were kept
        else:
            _panel(axes, panel, lines, found["seconds"])
    figure.suptitle(
        "The dashboard's first screen over a peak: " + ", ".join(f"{name} {rate}/s" for name, rate in PHASES.items())
    )
    return figure


def _panel(axes: Axes, panel: Panel, lines: Sequence[dict[str, Any]], seconds: float) -> None:
    scale, unit = _UNITS.get(panel.unit, (1, panel.unit))
    for number in range(len(PHASES)):
        if number % 2:
            axes.axvspan(number * seconds, (number + 1) * seconds, color=_ODD, zorder=0)
    for colour, line in zip(_COLOURS, lines, strict=False):
        flat = line["name"] == "SLO"
        axes.plot(
            line["seconds"], [scale * value for value in line["values"]], color=colour, label=line["name"],
            linestyle="--" if flat else "-", linewidth=1.2 if flat else 1.8,
        )  # fmt: skip
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlim(0, len(PHASES) * seconds)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("s")
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        axes.legend(fontsize=8, loc="best", frameon=True, framealpha=0.8, edgecolor="none")
    else:
        axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center", color="grey")
