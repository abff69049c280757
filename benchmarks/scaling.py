"""From one box to a thousand nodes: what each component is asked for, computed and simulated, and where it breaks.

No cluster is started. The product's own decisions (`benchmarks/cluster.py`) run in virtual time, with service times
that were measured: the way of a query by `path`, a word between Router and office on a Ray of its own and the decisions
themselves in this run. The devices are the paper's V100 and Xeon, by the curves of `serve_app/rehearsal.yaml`, with the
depths that keep the SLO for queries that come at any moment. The network is an assumption.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml
from matplotlib.figure import Figure

from benchmarks import decision_cost
from benchmarks.bench import Bench, Found, NotAvailable, median
from benchmarks.cluster import Cluster, Costs, Device, Seen, Shape
from benchmarks.goal import Goal
from benchmarks.loads import RAY_BENCHMARK_REPLICAS, Loads, Periods, largest, loads
from benchmarks.serving import ROOT
from benchmarks.sheet import Sheet
from benchmarks.virtual_time import run as run_virtual
from calibration.curve import Curve

LOADS = (0.7, 0.95, 1.3)  # of what the devices can do
GLOBAL, FEW, EACH = "one queue", "few Routers", "a Router a node"
NODES = {GLOBAL: (1, 2, 4, 8, 16, 32), FEW: (2, 4, 8, 16, 32), EACH: (2, 4, 8)}
THIN_NODES, THIN_ROUTERS = 4, (1, 2, 4, 8)  # ever more Routers share the same places
DELAY_S = (0.0001, 0.0005)  # assumed: a message within a data centre
CELL = 16
CELL_ROUTERS = 4
COMPUTED = (1, 4, 16, 64, 256, 1000)
_WAYS = {GLOBAL: ("#009E73", "--"), FEW: ("#0072B2", "-"), EACH: ("#D55E00", "-")}  # colour, line
_HALF_A_CORE, _TENTH, _SATURATED = 0.5, 0.1, 0.8
_FILES = 1024  # a process's usual limit; Ray's guide for large clusters says 65,535
CORE = 0.6  # share of a Router's core that is planned for at full load; the rest is for bursts
_LEFT = 0.02  # of the SLO, for the way and for pauses: a calibration measures through both
_WARM_S, _SEEN_S = 5.0, 6.0
_WATCH_S = 0.05
_TURNS = 10**9
_KILLED = (8, 4)  # nodes, Routers: one of them dies
_QUERY_TOKENS = "windve, 75 tokens"


def run(bench: Bench) -> None:
    devices, slo_s = paper_devices()
    bench.found |= {"devices": {pool: asdict(device) for pool, device in devices.items()}, "slo_s": slo_s}
    nodes = {way: [n for n in of if n <= 4 or not bench.quick] for way, of in NODES.items()}
    thin = THIN_ROUTERS[:3] if bench.quick else THIN_ROUTERS
    total = 2 + len(LOADS) * sum(map(len, nodes.values())) + len(LOADS) * len(thin) + 1
    with bench.steps(total) as step:
        step("a word between Router and office")
        with bench.turn():
            costs = _measure_costs(bench)
        step("series and periods")
        bench.found["periods"] = asdict(Periods.of_ray())
        for way, counts in nodes.items():
            for count in counts:
                for load in LOADS:
                    step(f"{count} nodes, {way}, {load:.0%}")
                    shape = shape_of(way, count, devices, costs)
                    _sample(bench, {"what": "nodes", "way": way, "nodes": count, "load": load}, shape, load)
        for routers in thin:
            for load in LOADS:
                step(f"{THIN_NODES} nodes, {routers} Routers, {load:.0%}")
                shape = Shape(THIN_NODES, routers, devices, costs if routers > 1 else Costs(), DELAY_S)
                about = {"what": "routers", "nodes": THIN_NODES, "routers": routers, "load": load}
                _sample(bench, about, shape, load)
        step("a Router dies")
        told = run_virtual(_death(Shape(*_KILLED, devices, costs, DELAY_S)), _TURNS)
        shown = f"all of its {told['held']} places others' after {told['all_back_s']:.2f} s"
        bench.sample({"what": "death", "nodes": _KILLED[0], "routers": _KILLED[1]}, told, shown)


def paper_devices() -> tuple[dict[str, Device], float]:
    """The emulated V100 and Xeon, and the SLO in seconds; depths for queries that come at any moment."""
    application = yaml.safe_load((ROOT / "serve_app" / "rehearsal.yaml").read_text(encoding="utf-8"))["applications"][0]
    slo_s = float(application["deployments"][0]["user_config"]["slo_s"])
    devices = {}
    for pool in ("accelerator", "cpu"):
        curve = application["args"][pool]["emulated"]
        model = Curve(curve["alpha_s"], curve["beta_s"])
        devices[pool] = Device(model.alpha_s, model.beta_s, model.depth(slo_s * (1 - _LEFT), "steady"))
    return devices, slo_s


def shape_of(way: str, nodes: int, devices: Mapping[str, Device], costs: Costs) -> Shape:
    """The ideal is one Router that costs nothing: a single queue for all devices."""
    if way == GLOBAL:
        return Shape(nodes, 1, devices, Costs(), DELAY_S)
    routers = nodes if way == EACH else routers_needed(nodes, devices, costs)
    return Shape(nodes, routers, devices, costs, DELAY_S)


def routers_needed(nodes: int, devices: Mapping[str, Device], costs: Costs) -> int:
    """At least two, since one may die; else by the core that the queries of all nodes take."""
    queries_s = nodes * capacity_s(devices)
    return max(2, math.ceil(queries_s * (costs.query_s + costs.query_each_s * 2 * nodes) / CORE))


def capacity_s(devices: Mapping[str, Device]) -> float:
    """Queries/s of one node."""
    return sum(device.most_queries_s for device in devices.values())


def _measure_costs(bench: Bench) -> Costs:
    """Service times: from `path` as kept, from a Ray of its own, and of the decisions."""
    path = json.loads((ROOT / "benchmarks" / "results" / "path.json").read_text(encoding="utf-8"))
    rates = {
        name: median(path, "requests_s", contestant=name, connections=128)
        for name in (_QUERY_TOKENS, "floor, tiny answer")
    }
    if None in rates.values():
        raise NotAvailable("benchmarks/results/path.json lacks what a query costs: make bench ARGS=path")
    query_s, refusal_s = (1 / rate for rate in rates.values() if rate)
    call = _measure_call()
    bench.sample(
        {"what": "call"},
        call,
        f"{call['call_s'] * 1e3:.2f} ms of a Router, {call['answer_s'] * 1e3:.2f} ms of an embedder",
    )
    counts = (2, 8, 32) if bench.quick else (2, 8, 32, 128, 512)
    found = {
        "office_word_s": {count: decision_cost.office_word_s(count) for count in counts},
        "query_s": {count: decision_cost.query_s(count) for count in counts[1:4]},
        "word_s": {count: decision_cost.word_s(count) for count in counts[:4]},
    }
    channel_kb = decision_cost.channel_kb()
    costs = Costs(
        query_s=query_s,
        refusal_s=refusal_s,
        query_each_s=max(0.0, decision_cost.slope(found["query_s"])) / 2,  # of two pools one is looked through
        call_s=call["call_s"],
        call_each_s=max(0.0, decision_cost.slope(found["word_s"])) / 2,
        answer_s=call["answer_s"],
        answer_each_s=max(0.0, decision_cost.slope({n: s for n, s in found["office_word_s"].items() if n <= 128})),
    )
    shown = f"an office's word {costs.answer_each_s * 1e6:.1f} us for each Router; a channel {channel_kb:.1f} kB"
    kept = {name: {str(count): s for count, s in cost.items()} for name, cost in found.items()}
    bench.sample({"what": "decisions"}, {**kept, "channel_kb": channel_kb, "costs": asdict(costs)}, shown)
    return costs


def _measure_call() -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.lease_call"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)  # noqa: S603
    if done.returncode:
        raise NotAvailable(
            f"a word through Serve's handle could not be measured: {done.stderr.strip().splitlines()[-1]}"
        )
    told: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def _sample(bench: Bench, about: Mapping[str, Any], shape: Shape, load: float) -> None:
    started = time.perf_counter()
    told = run_virtual(simulate(shape, load), _TURNS)
    told["took_s"] = time.perf_counter() - started
    shown = (
        f"{told['queries_s_node']:.1f} queries/s a node, {told['busy']:.1%} busy, p99 {told['p99_s']:.2f} s, "
        f"{told['words_query']:.2f} words a query, Router's core {told['router_core']:.0%}"
    )
    bench.sample(about, told, shown)


async def simulate(shape: Shape, load: float, *, warm_s: float = _WARM_S, seen_s: float = _SEEN_S) -> dict[str, Any]:
    """What clients and processes see at `load`, a share of what the devices can do. Raises AssertionError where more is
    in flight than the depths allow.
    """
    cluster = Cluster(shape)
    await cluster.start()
    loop = asyncio.get_running_loop()
    watching = loop.create_task(cluster.watch(_WATCH_S))
    began = loop.time() + warm_s
    warm, seen = Seen(), Seen()
    before: list[tuple[float, float]] = []

    def counted() -> Seen:
        if loop.time() < began:
            return warm
        if not before:
            before.extend(_used(cluster))
        return seen

    queries_s = load * shape.nodes * capacity_s(shape.devices)
    after = await cluster.serve(queries_s, warm_s + seen_s, counted, lambda: _used(cluster))
    watching.cancel()
    cluster.check()
    await cluster.stop()
    words = sum(b[0] - a[0] for a, b in zip(before, after, strict=True)) / 2  # told and heard
    cores = [(b[1] - a[1]) / seen_s for a, b in zip(before, after, strict=True)]
    heard = [(b[0] - a[0]) / seen_s for a, b in zip(before, after, strict=True)][shape.routers :]
    latencies = sorted(seen.latencies_s)
    answered = len(latencies)
    return {
        "routers": shape.routers,
        "queries": answered + seen.busy,
        "queries_s_node": answered / seen_s / shape.nodes,
        "busy": seen.busy / max(1, answered + seen.busy),
        "p50_s": latencies[answered // 2],
        "p99_s": latencies[int(0.99 * answered)],
        "largest_s": latencies[-1],
        "by_the_cpu": seen.by_pool.get("cpu", 0) / answered,
        "words_query": words / max(1, answered + seen.busy),
        "words_router_s": words / seen_s / shape.routers,
        "words_office_s": sum(heard) / len(heard),
        "router_core": sum(cores[: shape.routers]) / shape.routers,
        "office_core": sum(cores[shape.routers :]) / len(heard),
        "most_in_flight": cluster.most_in_flight,
    }


def _used(cluster: Cluster) -> list[tuple[float, float]]:
    """(words, seconds of its core) of each Router, then of each replica."""
    routers = [(router.words, router.core.busy_s) for router in cluster.routers]
    return [*routers, *((replica.words, replica.core.busy_s) for replica in cluster.replicas.values())]


async def _death(shape: Shape, load: float = LOADS[-1]) -> dict[str, float]:
    """How long the places of a Router that dies under load are nobody's."""
    cluster = Cluster(shape)
    await cluster.start()
    loop = asyncio.get_running_loop()
    seen = Seen()
    queries_s = load * shape.nodes * capacity_s(shape.devices)
    serving = loop.create_task(cluster.serve(queries_s, 12.0, lambda: seen, lambda: None))
    await asyncio.sleep(6.0)
    places = {pool: device.depth * shape.nodes for pool, device in shape.devices.items()}
    held = cluster.held_by("0")
    cluster.kill_router(0)
    died = loop.time()
    half = 0.0
    while cluster.held_by("0") and loop.time() < died + 5.0:
        await asyncio.sleep(0.005)
        if not half and cluster.held_by("0") <= held / 2:
            half = loop.time() - died
    told = {"held": held, "of": sum(places.values()), "half_back_s": half, "all_back_s": loop.time() - died}
    serving.cancel()
    await cluster.stop()
    return told


def costs_of(found: Found) -> Costs:
    return Costs(**_decisions(found)["costs"])


def _decisions(found: Found) -> dict[str, Any]:
    return next(sample for sample in found["samples"] if sample["what"] == "decisions")


def _periods(found: Found) -> Periods:
    kept = dict(found["periods"])
    kept["long_poll"] = tuple(kept["long_poll"])
    return Periods(**kept)


def _loads(found: Found, nodes: int, routers: int) -> Loads:
    return loads(nodes, routers, _periods(found), channel_kb=_decisions(found)["channel_kb"])


def sheets(found: Found) -> list[Sheet]:
    return [
        _times_sheet(found),
        _nodes_sheet(found),
        _routers_sheet(found),
        *_computed_sheets(found),
        _breaks_sheet(found),
    ]


def _times_sheet(found: Found) -> Sheet:
    costs = costs_of(found)
    devices = {pool: Device(**device) for pool, device in found["devices"].items()}
    rows = [
        [
            "a query, of a Router's core",
            f"{costs.query_s * 1e3:.2f} ms",
            "path.json: 75 tokens, the whole machine's time",
        ],
        ["one told busy", f"{costs.refusal_s * 1e3:.2f} ms", "path.json: the floor's tiny answer"],
        [
            "a word to an office, of the Router's core",
            f"{costs.call_s * 1e3:.2f} ms",
            "this run, Serve's handle on a Ray of its own",
        ],
        ["the same, of the embedder's", f"{costs.answer_s * 1e3:.2f} ms", "this run"],
        [
            "more for each Router that the office knows",
            f"{costs.answer_each_s * 1e6:.1f} us",
            "this run, the office's decisions",
        ],
        ["more for each replica, a Router's query", f"{costs.query_each_s * 1e6:.2f} us", "this run"],
        ["more for each replica, a Router's word", f"{costs.call_each_s * 1e6:.2f} us", "this run"],
        ["a message on the network", f"{DELAY_S[0] * 1e3:g} to {DELAY_S[1] * 1e3:g} ms", "assumed"],
    ]
    for pool, device in devices.items():
        what = (
            f"{device.alpha_s:g} C + {device.beta_s:g} s, depth {device.depth}, {device.most_queries_s:.1f} queries/s"
        )
        rows.append([f"a run of C queries, {pool}", what, "the paper's device, emulated"])
    return Sheet("Service times", ["what", "takes", "from"], rows)


def _nodes_sheet(found: Found) -> Sheet:
    head = ["", "nodes", "Routers", "p99, 70 %", "busy, 95 %", "p99", "busy, 130 %", "p99", "queries/s a node"]
    head += ["of one queue's", "words a query", "Router's core", "embedder's core"]
    rows = []
    for way, counts in NODES.items():
        for nodes in counts:
            calm, full, over = (_of(found, way=way, nodes=nodes, load=load) for load in LOADS)
            if not (calm and full and over):
                continue
            ideal = _of(found, way=GLOBAL, nodes=nodes, load=LOADS[-1])
            rows.append(
                [
                    way,
                    f"{nodes}",
                    f"{over['routers']}",
                    f"{calm['p99_s']:.2f} s",
                    f"{full['busy']:.1%}",
                    f"{full['p99_s']:.2f} s",
                    f"{over['busy']:.1%}",
                    f"{over['p99_s']:.2f} s",
                    f"{over['queries_s_node']:.1f}",
                    f"{over['queries_s_node'] / ideal['queries_s_node']:.2f}" if ideal else "-",
                    f"{over['words_query']:.2f}",
                    f"{over['router_core']:.0%}",
                    f"{over['office_core']:.1%}",
                ]
            )
    return Sheet(
        f"Simulated, SLO {found['slo_s']:g} s; load as a share of what the devices can do; the last four at 130 %",
        head,
        rows,
    )


def _routers_sheet(found: Found) -> Sheet:
    head = ["Routers", "places each holds of a replica", "busy, 95 %", "p99", "busy, 130 %", "p99", "words a query"]
    head += ["words/s an office", "Router's core", "embedder's core"]
    depths = [device["depth"] for device in found["devices"].values()]
    rows = []
    for routers in THIN_ROUTERS:
        full, over = (_of(found, what="routers", routers=routers, load=load) for load in LOADS[1:])
        if full and over:
            rows.append(
                [
                    f"{routers}",
                    " + ".join(f"{depth / routers:.1f}" for depth in depths),
                    f"{full['busy']:.1%}",
                    f"{full['p99_s']:.2f} s",
                    f"{over['busy']:.1%}",
                    f"{over['p99_s']:.2f} s",
                    f"{over['words_query']:.2f}",
                    f"{over['words_office_s']:.0f}",
                    f"{over['router_core']:.0%}",
                    f"{over['office_core']:.1%}",
                ]
            )
    return Sheet(f"Simulated, {THIN_NODES} nodes: the same places over ever more Routers", head, rows)


def _computed_sheets(found: Found) -> list[Sheet]:
    each = [_loads(found, nodes, nodes) for nodes in COMPUTED]
    cell = _loads(found, CELL, CELL_ROUTERS)
    columns = {f"{load.nodes:,}": load for load in each} | {f"cell of {CELL}, {CELL_ROUTERS} Routers": cell}
    lines: dict[str, str] = {
        "Routers": "routers",
        "embedder replicas": "replicas",
        "channels; polls open": "channels",
        "memory of the channels, MB": "channel_mb",
        "polls/s, a Router, idle": "polls_router",
        "polls/s, an office, idle": "polls_office",
        "HAProxy's checks/s, a Router": "haproxy_checks_router",
        "controller: health checks/s": "controller_checks",
        "controller: share of its core for these": "controller_core",
        "controller: long polls open": "long_polls",
        "controller: records told when a replica comes or goes": "told_at_change",
        "GCS: actors looked up when all start": "lookups",
        "GCS: node checks/s": "node_checks",
        "agents' reports/s": "reports",
        "Prometheus: series of windve": "series",
        "Prometheus: samples/s": "samples",
    }
    rows = [[name, *(_number(getattr(load, key)) for load in columns.values())] for name, key in lines.items()]
    return [Sheet("Computed: one application, a Router a node; and one cell", ["nodes", *columns], rows)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def breaks(found: Found) -> dict[str, tuple[int, str]]:
    """Nodes of one application with a Router on each, up to which something holds; and what it is computed from."""
    costs = costs_of(found)
    depths = {pool: device["depth"] for pool, device in found["devices"].items()}
    word_s = costs.call_s + costs.answer_s
    told = {nodes: _of(found, way=EACH, nodes=nodes, load=LOADS[-1]) for nodes in NODES[EACH]}
    over = {nodes: sample for nodes, sample in told.items() if sample and sample["router_core"] < _SATURATED}
    power, factor = power_law({nodes: told["words_router_s"] * costs.call_s for nodes, told in over.items()})
    return {
        "half of a Router's core for words, at 130 %": (
            largest(lambda n: factor * n**power <= _HALF_A_CORE),
            f"simulated to {max(over)}: {factor:.3f} * nodes^{power:.2f} of a core",
        ),
        "a place of each CPU queue for each Router": (largest(lambda n: depths["cpu"] >= n), f"depth {depths['cpu']}"),
        "a place of each accelerator queue for each Router": (
            largest(lambda n: depths["accelerator"] >= n),
            f"depth {depths['accelerator']}",
        ),
        "a tenth of a Router's core for idle polls": (
            largest(lambda n: _loads(found, n, n).polls_router * costs.call_s <= _TENTH),
            f"{word_s * 1e3:.2f} ms a word, both ends",
        ),
        "an office's decision within a call's own cost": (
            largest(lambda n: n * costs.answer_each_s <= costs.answer_s),
            f"{costs.answer_each_s * 1e6:.1f} us for each Router",
        ),
        f"a Router's channels within {_FILES} open files": (largest(lambda n: 2 * n <= _FILES), "two replicas a node"),
        "half of the controller's core for health checks": (
            largest(lambda n: _loads(found, n, n).controller_core <= _HALF_A_CORE),
            "0.5 ms each (ray-project/ray#64871)",
        ),
        "as many replicas as Ray's own benchmark of the controller": (
            largest(lambda n: 3 * n <= RAY_BENCHMARK_REPLICAS),
            f"{RAY_BENCHMARK_REPLICAS:,} (ray-project/ray#65371)",
        ),
    }


def power_law(values: Mapping[int, float]) -> tuple[float, float]:
    """(power, factor) of factor * n^power by least squares of the logarithms."""
    points = [(math.log(n), math.log(value)) for n, value in values.items()]
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    power = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return power, math.exp(mean_y - power * mean_x)


def _breaks_sheet(found: Found) -> Sheet:
    rows = [[what, f"{nodes:,}", why] for what, (nodes, why) in sorted(breaks(found).items(), key=lambda item: item[1])]
    return Sheet("Computed: a Router a node holds up to", ["what", "nodes", "from"], rows)


def goals(found: Found) -> list[Goal]:
    full, over = (_of(found, way=FEW, nodes=CELL, load=load) for load in LOADS[1:])
    ideal = _of(found, way=GLOBAL, nodes=CELL, load=LOADS[-1])
    death = next((sample for sample in found["samples"] if sample["what"] == "death"), None)
    cell, slo_s = f"cell of {CELL} nodes", found["slo_s"]
    late = [sample["p99_s"] / slo_s if sample else None for sample in (full, over)]
    of_ideal = over["queries_s_node"] / ideal["queries_s_node"] if over and ideal else None
    return [
        Goal(f"{cell}, 95 %: p99 against the SLO", 1.0, late[0], at_most=True),
        Goal(f"{cell}, 130 %: p99 against the SLO", 1.0, late[1], at_most=True),
        Goal(f"{cell}, 130 %: queries/s against one queue", 0.97, of_ideal),
        Goal(f"{cell}, 130 %: a Router's core", 0.8, over["router_core"] if over else None, "", at_most=True),
        Goal("a dead Router's places are others'", 1.0, death["all_back_s"] if death else None, "s", at_most=True),
    ]


def _of(found: Found, what: str = "nodes", **about: Any) -> dict[str, Any] | None:
    wanted = {"what": "routers" if what == "routers" else "nodes", **about}
    return next((s for s in found["samples"] if all(s.get(key) == value for key, value in wanted.items())), None)


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    (busy, late), (words, cores) = figure.subplots(2, 2)
    for way, (colour, line) in _WAYS.items():
        for load, marker in zip(LOADS[1:], "os", strict=True):
            told = {nodes: sample for nodes in NODES[way] if (sample := _of(found, way=way, nodes=nodes, load=load))}
            style: dict[str, Any] = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5}
            style |= {"label": f"{way}, {load:.0%}", "markerfacecolor": "white" if load < 1 else colour}
            busy.plot(list(told), [100 * sample["busy"] for sample in told.values()], **style)
            late.plot(list(told), [sample["p99_s"] for sample in told.values()], **style)
            if way != GLOBAL:
                words.plot(list(told), [sample["words_query"] for sample in told.values()], **style)
    for way, (colour, line) in _WAYS.items():
        calm = {nodes: sample for nodes in NODES[way] if (sample := _of(found, way=way, nodes=nodes, load=LOADS[0]))}
        late.plot(list(calm), [sample["p99_s"] for sample in calm.values()], "^", linestyle=line, color=colour)
        if calm and way == GLOBAL:
            where = (max(calm), calm[max(calm)]["p99_s"])
            late.annotate(f"{LOADS[0]:.0%}", where, textcoords="offset points", xytext=(-4, 8), ha="right", fontsize=8)
    late.axhline(found["slo_s"], color="black", linewidth=1, linestyle=":")
    late.annotate("SLO", (1, found["slo_s"]), textcoords="offset points", xytext=(0, 3), fontsize=8)
    _plot_cores(found, cores)
    busy.set(title="told busy, %", ylim=(0, None))
    late.set(title="p99, s", ylim=(1.0, None))
    words.set(title="words between Routers and offices for each query", ylim=(0, None))
    for axes in (busy, late, words):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("nodes")
        axes.set_xticks(NODES[GLOBAL], [str(nodes) for nodes in NODES[GLOBAL]])
    busy.legend(frameon=False, fontsize=7, ncols=3, loc="center", bbox_to_anchor=(0.5, 0.45))
    for axes in (busy, late, words, cores):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    return figure


def _plot_cores(found: Found, cores: Any) -> None:
    """Of a process's core, how much is taken, over the Routers that share the same places."""
    told = {
        routers: s for routers in THIN_ROUTERS if (s := _of(found, what="routers", routers=routers, load=LOADS[-1]))
    }
    told = {routers: sample for routers, sample in told.items() if routers > 1}
    for key, name, colour in (("router_core", "Router", "#0072B2"), ("office_core", "embedder", "#CC79A7")):
        cores.plot(list(told), [100 * sample[key] for sample in told.values()], "s-", color=colour, label=name)
    cores.set(title=f"share of a core, %, at 130 %, {THIN_NODES} nodes", xlabel="Routers", ylim=(0, None))
    cores.set_xscale("log", base=2)
    cores.set_xticks(list(told), [str(routers) for routers in told])
    cores.legend(frameon=False, fontsize=8)
