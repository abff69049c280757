"""What metrics take of the cores, beside all that a request takes: the way of *path*, at 128 connections.

CPU seconds are counted, not time: what else runs on the machine matters little. The counting is timed in a replica of
its own, with Ray's instruments; what Ray's agent then does with what it was told is the agent's own CPU time, less that
of as long a time without.
"""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks.comparisons.path import TEXT, config
from benchmarks.kit import wrk
from benchmarks.kit.bench import Bench, Found, median, values_of
from benchmarks.kit.cpu_time import ENGINE, PROXY, RAY, SERVER
from benchmarks.kit.goal import Goal
from benchmarks.kit.server import wait_until_answered
from benchmarks.kit.serving import Service, serving
from benchmarks.kit.sheet import Sheet
from deployments.hardware.device_detector import ACCELERATOR

CONNECTIONS = 128
_MOST_SHARE = 2.0  # percent
_REPORTED_S = 12.0  # Ray's processes tell the agent every ten seconds what they counted
PARTS = {  # us for each request
    "counting_us": "Router: counts each request",
    "publishing_us": "Router and embedder: tell Ray every two seconds",
    "embedder_us": "embedder: counts each run",
    "agent_us": "Ray's agent: replays what histograms were told",
}


def run(bench: Bench) -> None:
    wrk.ensure()
    rounds, seconds, periods = (1, 3.0, 100) if bench.quick else (3, 6.0, 300)
    with bench.turn(), serving(_config()) as service, bench.steps(2 * rounds) as step:
        url = f"{service.url}/v1/embeddings"
        wait_until_answered(url, {"input": TEXT})
        wrk.post(url, [{"input": TEXT}], connections=CONNECTIONS, seconds=3)
        for number in range(rounds):
            step("the way of a request")
            path = _path(bench, service, seconds)
            shown = f"{path['path_us']:.0f} us of the cores each, {path['requests_s']:.0f} requests/s"
            bench.sample({"what": "path", "round": number}, path, shown)
            step("its metrics")
            told = _metering(service, path, periods)
            shown = f"{sum(told[part] for part in PARTS):.1f} us each"
            bench.sample({"what": "metrics", "round": number}, told, shown)


def _config() -> dict[str, Any]:
    """The engine that takes no time, and beside it the deployment that only counts."""
    whole = config()
    windve = next(application for application in whole["applications"] if application["name"] == "windve")
    metering = {
        "name": "metering",
        "route_prefix": "/metering",
        "import_path": "benchmarks.kit.metering:build",
        "args": {},
    }
    return {**whole, "applications": [windve, metering]}


def _path(bench: Bench, service: Service, seconds: float) -> dict[str, Any]:
    """Microseconds of the cores for each request, load generator aside; requests and runs a second."""
    before = _runs(service)
    told = bench.measure(
        lambda: wrk.post(f"{service.url}/v1/embeddings", [{"input": TEXT}], connections=CONNECTIONS, seconds=seconds)
    )
    runs = _runs(service) - before
    spent_s = sum(told["cpu_s"][role] for role in (SERVER, ENGINE, PROXY, RAY))
    runs_s = runs / told["requests"] * told["requests_s"]
    return {**told, "path_us": 1e6 * spent_s / told["requests"], "runs_s": runs_s}


def _metering(service: Service, path: Mapping[str, Any], periods: int) -> dict[str, Any]:
    """Microseconds of the cores for each request at the rate of `path`, part by part."""
    agent = _agent()
    idle_s = _agent_seconds(agent)
    asked = urllib.parse.urlencode({"requests_s": path["requests_s"], "runs_s": path["runs_s"], "periods": periods})
    started, before_s = time.monotonic(), _cpu_seconds(agent)
    told = _get(f"{service.url}/metering/?{asked}")
    time.sleep(_REPORTED_S)
    elapsed_s, busy_s = time.monotonic() - started, _cpu_seconds(agent) - before_s
    agent_s = busy_s - idle_s / _REPORTED_S * elapsed_s
    spent = {
        "counting_us": told["counting_s"],
        "publishing_us": told["publishing_s"],
        "embedder_us": told["embedder_s"],
        "agent_us": max(0.0, agent_s),
    }
    each = {part: 1e6 * seconds / told["requests"] for part, seconds in spent.items()}
    return {
        **told,
        **each,
        "agent_s": agent_s,
        "agent_idle_s": idle_s,
        "per_observation_us": 1e6 * agent_s / told["observed"],
        "share": 100 * sum(each.values()) / path["path_us"],
    }


def _agent() -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        if "DashboardAgent" in " ".join(process.cmdline()):
            return process
    raise RuntimeError("Ray's agent is not among the processes")


def _agent_seconds(agent: psutil.Process) -> float:
    """Of a core, in as long a time as a report takes, with nothing to count."""
    before = _cpu_seconds(agent)
    time.sleep(_REPORTED_S)
    return _cpu_seconds(agent) - before


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _runs(service: Service) -> int:
    """Of the accelerator's engines, since their start."""
    replicas = _get(f"{service.url}/info")["windve"]["pools"][ACCELERATOR]["replicas"]
    return sum(int(replica["runs"]) for replica in replicas.values())


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=120) as answer:  # noqa: S310 - our own address
        return json.loads(answer.read())


def sheets(found: Found) -> list[Sheet]:
    path = median(found, "path_us", what="path")
    rows = [["a request, all of windve's and Ray's processes", _us(path), "100 %"]]
    for part, about in PARTS.items():
        each = median(found, part, what="metrics")
        rows.append([about, _us(each), _percent(each, path)])
    rate, observed = (median(found, key, what=what) for key, what in (("requests_s", "path"), ("observed", "metrics")))
    seconds, one = (median(found, key, what="metrics") for key in ("seconds", "per_observation_us"))
    rows.append(["metrics together", "", "-" if (share := _share(found)) is None else f"{share:.2f} %"])
    sheet = Sheet(f"CPU time at {CONNECTIONS} connections, medians", ["", "us for each request", "of a request"], rows)
    if rate is None or observed is None or seconds is None or one is None:
        return [sheet]
    agent = Sheet(
        "What Ray's agent does",
        ["requests/s", "values it is told a second", "us for each value", "of one core"],
        [[f"{rate:,.0f}", f"{observed / seconds:.0f}", f"{one:.0f}", f"{observed / seconds * one / 1e4:.2f} %"]],
    )
    return [sheet, agent]


def goals(found: Found) -> list[Goal]:
    return [Goal("metrics, of the CPU time of a request", _MOST_SHARE, _share(found), "%", at_most=True)]


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    for place, (part, about) in enumerate(reversed(PARTS.items())):
        values = values_of(found, part, what="metrics")
        axes.barh(place, median(found, part, what="metrics") or 0, color="#0072B2")
        axes.plot(values, [place] * len(values), "k.", markersize=4)
        axes.text(0, place + 0.42, f" {about}", fontsize=8, va="bottom")
    axes.set_yticks([])
    axes.set(xlabel="us of the cores for each request", xlim=(0, None), ylim=(-0.6, len(PARTS)))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _share(found: Found) -> float | None:
    """Percent."""
    return median(found, "share", what="metrics")


def _us(each: float | None) -> str:
    return "-" if each is None else f"{each:,.2f}"


def _percent(each: float | None, path: float | None) -> str:
    return "-" if each is None or not path else f"{100 * each / path:.2f} %"
