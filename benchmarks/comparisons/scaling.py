"""From 1 to 256 nodes: windve's Router, run loop and scheduler in virtual time, and the death of a Router.

No cluster is started. Devices are the paper's V100 and Xeon, with the curves of `serve_app/rehearsal.yaml`. A query's
cost on a Router's core comes from `path`; the costs of a frame and a decision are measured in this run. The network is
assumed (`benchmarks/simulation`). The ideal queue is one Router that takes no time, next to its replicas.
"""

import asyncio
import gc
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from matplotlib.figure import Figure

from benchmarks.costs import decision_cost
from benchmarks.kit.bench import Bench, Found, NotAvailable, all_of, one_of, quiet_ray
from benchmarks.kit.figures import BLUE, RED, figure_of, panels
from benchmarks.kit.goal import Goal
from benchmarks.kit.serving import ROOT, shipped
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation.application import Application, Ended, Shape
from benchmarks.simulation.arrivals import poisson
from benchmarks.simulation.device import Device
from benchmarks.simulation.virtual_time import run as run_virtual
from benchmarks.simulation.wire import Costs

LOADS = (0.7, 0.95, 1.3)  # of what the devices can do within the SLO
ENDS, PASSES = "at the end of the batch", "per micro-batch"
PASS_QUERIES = {ENDS: None, PASSES: 8}
NODES = (1, 4, 16, 64, 256)
IDEAL_UP_TO = 16  # nodes; the results per node do not change beyond this
_SECONDS = {1: (4.0, 12.0), 4: (4.0, 8.0), 16: (4.0, 6.0), 64: (3.0, 3.0), 256: (2.5, 2.0)}
_LEFT_OUT = (ENDS, 256, 0.7)  # takes too long to simulate
DELAY_S = (0.0001, 0.0005)  # assumed: a message within a data centre, in one direction
CORE = 0.6  # share of a Router's core that is planned for at full load; the rest is for bursts
CELL = 64
_TURNS = 10**9
_KILLED = (8, 4)  # nodes, Routers: one of them dies
_CONNECTIONS = 128
_COLOURS = {ENDS: BLUE, PASSES: RED}


def run(bench: Bench) -> None:
    quiet_ray()
    curves, slo_s = paper_curves()
    bench.found |= {"curves": curves, "slo_s": slo_s}
    points = [
        (answers, nodes, load)
        for nodes, answers, load in product(NODES, PASS_QUERIES, LOADS)
        if (answers, nodes, load) != _LEFT_OUT and (nodes <= IDEAL_UP_TO or not bench.quick)
    ]
    with bench.steps(2 + len(points)) as step:
        step("service times")
        with bench.turn():
            costs = _measure_costs(bench)
        step("a Router dies")
        told = run_virtual(death(Shape(*_KILLED, devices_of(curves, 8), slo_s, costs, DELAY_S)), _TURNS)
        shown = f"{told['lost']} queries lost, its work dropped after {told['dropped_s'] * 1e3:.1f} ms"
        bench.sample({"what": "death", "nodes": _KILLED[0], "routers": _KILLED[1]}, told, shown)
        for answers, nodes, load in points:
            step(f"{nodes} nodes, {answers}, {load:.0%}")
            devices = devices_of(curves, PASS_QUERIES[answers])
            routers = routers_needed(nodes, devices, slo_s, costs)
            about = {"what": "nodes", "answers": answers, "nodes": nodes, "load": load}
            _sample(bench, {**about, "queue": "Routers"}, Shape(nodes, routers, devices, slo_s, costs, DELAY_S), load)
            if nodes <= IDEAL_UP_TO:
                _sample(bench, {**about, "queue": "one"}, Shape(nodes, 1, devices, slo_s), load)


def paper_curves() -> tuple[dict[str, tuple[float, float]], float]:
    """(alpha, beta) of the emulated V100 and Xeon, and the SLO, in seconds."""
    (application,) = shipped("rehearsal.yaml")["applications"]
    slo_s = float(application["deployments"][0]["user_config"]["slo_s"])
    emulated = {pool: application["args"][pool]["emulated"] for pool in ("accelerator", "cpu")}
    return {pool: (curve["alpha_s"], curve["beta_s"]) for pool, curve in emulated.items()}, slo_s


def devices_of(curves: Mapping[str, Sequence[float]], micro_batch_queries: int | None) -> dict[str, Device]:
    return {pool: Device(alpha_s, beta_s, micro_batch_queries) for pool, (alpha_s, beta_s) in curves.items()}


def capacity_s(devices: Mapping[str, Device], slo_s: float) -> float:
    """Queries/s of one node."""
    return sum(device.queries_s(slo_s) for device in devices.values())


def routers_needed(nodes: int, devices: Mapping[str, Device], slo_s: float, costs: Costs) -> int:
    """The number of Routers: enough for the core time of all nodes' queries, and at least two, since one may die."""
    a_query_s = costs.query_s + costs.place_s + 2 * (costs.frame_s + costs.item_s)
    return max(2, math.ceil(nodes * capacity_s(devices, slo_s) * a_query_s / CORE))


def _measure_costs(bench: Bench) -> Costs:
    """Costs on a Router's core: a query's from the saved results of `path`, the rest measured in this run."""
    path = json.loads((ROOT / "benchmarks" / "results" / "path.json").read_text(encoding="utf-8"))
    query_s, refusal_s = (_router_s(path, name) for name in ("windve, 75 tokens", "floor, tiny answer"))
    frame_s, item_s = decision_cost.frame_s()
    counts = (1, 4, 16) if bench.quick else (1, 4, 16, 64, 256)
    place_s = {nodes: decision_cost.place_s(nodes) for nodes in counts}
    admission = bench.measure(lambda: decision_cost.admission(10_000))
    costs = Costs(query_s, refusal_s, max(place_s.values()), frame_s, item_s)
    found = {"costs": asdict(costs), "place_s": {str(n): s for n, s in place_s.items()}}
    found |= {"admission_us": {key: admission[key] for key in ("p50_us", "p99_us")}, "path": path["machine"]}
    shown = (
        f"a query {query_s * 1e3:.2f} ms, a frame {frame_s * 1e6:.0f} us, placing {costs.place_s * 1e6:.0f} us, "
        f"an admission {admission['p50_us']:.1f} us"
    )
    bench.sample({"what": "costs"}, found, shown)
    return costs


def _router_s(path: Found, contestant: str) -> float:
    """Core seconds of the answering process per request in `path`."""
    found = [
        sample["cpu_s"]["server"] / sample["requests"]
        for sample in path["samples"]
        if sample["contestant"] == contestant and sample["connections"] == _CONNECTIONS and "cpu_s" in sample
    ]
    if not found:
        raise NotAvailable("benchmarks/results/path.json lacks what a query costs: make bench ARGS=path")
    return float(statistics.median(found))


def _sample(bench: Bench, about: Mapping[str, Any], shape: Shape, load: float) -> None:
    started = time.perf_counter()
    warm_s, seen_s = _SECONDS[shape.nodes]
    told = run_virtual(simulate(shape, load, warm_s=warm_s, seen_s=seen_s), _TURNS)
    told["took_s"] = time.perf_counter() - started
    shown = (
        f"{told['goodput_node']:.1f}/s a node in time, {told['busy']:.1%} busy, {told['late']:.2%} late, "
        f"p99 {told['p99_s']:.2f} s, {told['frames_query']:.2f} frames a query, Router's core {told['router_core']:.0%}"
    )
    bench.sample(about, told, shown)


async def simulate(shape: Shape, load: float, *, warm_s: float, seen_s: float) -> dict[str, Any]:
    """What clients and processes see after `warm_s`. `load`: relative to the devices' capacity."""
    application = Application(shape)
    await application.start()
    gc.collect()
    gc.freeze()
    loop = asyncio.get_running_loop()
    queries_s = load * shape.nodes * capacity_s(shape.devices, shape.slo_s)
    serving = loop.create_task(application.serve(poisson(queries_s, warm_s + seen_s, seed=shape.seed)))
    began = loop.time()
    await asyncio.sleep(warm_s)
    before = _used(application)
    await asyncio.sleep(seen_s)
    after = _used(application)
    await serving
    gc.unfreeze()
    used = {key: after[key] - before[key] for key in after}
    since = began + warm_s
    seen = [one for one in application.ended if one.at >= since]
    answered = [one for one in seen if one.pool is not None]
    in_time = sum(one.in_time for one in seen)
    took = sorted(one.took_s for one in answered)
    return {
        "routers": shape.routers,
        "queries": len(seen),
        "offered_node": len(seen) / seen_s / shape.nodes,
        "goodput_node": in_time / seen_s / shape.nodes,
        "busy": 1 - len(answered) / len(seen),
        "late": _share(answered),
        "p50_s": took[len(took) // 2],
        "p99_s": took[int(0.99 * len(took))],
        "by_the_cpu": sum(one.pool == "cpu" for one in answered) / len(answered),
        "frames_query": used["frames"] / len(seen),
        "router_core": used["router_s"] / shape.routers / seen_s,
        "replica_core": used["replica_s"] / len(application.replicas) / seen_s,
        "accelerator": used["accelerator_s"] / shape.nodes / seen_s,
    }


def _share(answered: Sequence[Ended]) -> float:
    """The share that is late."""
    return sum(not one.in_time for one in answered) / max(1, len(answered))


def _used(application: Application) -> dict[str, float]:
    replicas = application.replicas.values()
    return {
        "frames": sum(router.core.frames for router in application.routers),
        "router_s": sum(router.core.busy_s for router in application.routers),
        "replica_s": sum(replica.core.busy_s for replica in replicas),
        "accelerator_s": sum(replica.engine.busy_s for replica in replicas if replica.pool == "accelerator"),
    }


async def death(shape: Shape, load: float = LOADS[-1]) -> dict[str, float]:
    """What is lost when a Router dies under load, and how long replicas take to drop its waiting queries."""
    application = Application(shape)
    await application.start()
    loop = asyncio.get_running_loop()
    queries_s = load * shape.nodes * capacity_s(shape.devices, shape.slo_s)
    serving = loop.create_task(application.serve(poisson(queries_s, 10.0)))
    await asyncio.sleep(5.0)
    lost = application.kill_router(0)
    died = loop.time()
    while application.holds(0):  # noqa: ASYNC110 - in virtual time
        await asyncio.sleep(0.0001)
    dropped_s = loop.time() - died
    await serving
    later = [one for one in application.ended if one.at >= died]
    answered = [one for one in later if one.pool is not None]
    return {"lost": lost, "dropped_s": dropped_s, "late": _share(answered)}


# --- tables and goals ---------------------------------------------------------------------------------------------


def costs_of(found: Found) -> Costs:
    return Costs(**_measured(found)["costs"])


def _measured(found: Found) -> dict[str, Any]:
    (sample,) = all_of(found, what="costs")
    return sample


def _points(found: Found, answers: str) -> list[dict[str, Any]]:
    """Rows in the order of nodes and loads, with those of the ideal queue."""
    rows = []
    for nodes, load in product(NODES, LOADS):
        about = {"what": "nodes", "answers": answers, "load": load}
        told = one_of(found, queue="Routers", nodes=nodes, **about)
        ideal = one_of(found, queue="one", nodes=min(nodes, IDEAL_UP_TO), **about)
        if told is not None and ideal is not None:
            rows.append({**told, "ideal": ideal, "beside": _in_time(told) / _in_time(ideal)})
    return rows


def _in_time(told: Mapping[str, Any]) -> float:
    """Queries in time. Below capacity: relative to the arrivals, whose number is random and which all fit."""
    return float(told["goodput_node"] / (told["offered_node"] if told["load"] < 1 else 1))


def sheets(found: Found) -> list[Sheet]:
    columns = {
        "nodes": "{nodes:,}", "Routers": "{routers}", "load": "{load:.0%}", "in time/s a node": "{goodput_node:.1f}",
        "beside one ideal queue": "{beside:.2f}", "refused (ideal)": "{busy:.1%} ({ideal[busy]:.1%})",
        "late": "{late:.2%}", "p50": "{p50_s:.2f} s", "p99": "{p99_s:.2f} s", "accelerators": "{accelerator:.0%}",
        "frames a query": "{frames_query:.2f}", "Router's core": "{router_core:.0%}",
        "replica's core": "{replica_core:.1%}",
    }  # fmt: skip
    nodes = [
        table(f"Simulated, answers {answers}, SLO {found['slo_s']:g} s", columns, _points(found, answers))
        for answers in PASS_QUERIES
    ]
    columns = {
        "queries that their clients lose": "{lost}, those open at it",
        "until the replicas have dropped what waited": "{dropped_ms:.1f} ms",
        "late, of those that come later": "{late:.2%}",
    }
    deaths = [one | {"dropped_ms": 1e3 * one["dropped_s"]} for one in all_of(found, what="death")]
    title = f"A Router dies at 130 %, {_KILLED[0]} nodes, {_KILLED[1]} Routers, {PASSES}"
    return [_times_sheet(found), *nodes, table(title, columns, deaths)]


def _times_sheet(found: Found) -> Sheet:
    costs, told = costs_of(found), _measured(found)
    us = {name: f"{1e6 * value:.1f} us" for name, value in asdict(costs).items()}
    admission = told["admission_us"]
    rows = [
        ["a query, of a Router's core", f"{costs.query_s * 1e3:.2f} ms", f"path.json, {told['path']['cpu']}"],
        ["one refused", f"{costs.refusal_s * 1e3:.2f} ms", "path.json: the floor's tiny answer"],
        ["a frame, at either end", us["frame_s"], "this run"],
        ["more for each query or answer in it", us["item_s"], "this run"],
        ["placing a query, any number of replicas", us["place_s"], "this run"],
        ["one admission, 1,000 waiting", f"{admission['p50_us']:.1f} us (p99 {admission['p99_us']:.1f})", "this run"],
        ["a message on the network", f"{DELAY_S[0] * 1e3:g} to {DELAY_S[1] * 1e3:g} ms", "assumed"],
    ]
    for pool, (alpha_s, beta_s) in found["curves"].items():
        rates = [Device(alpha_s, beta_s, size).queries_s(found["slo_s"]) for size in PASS_QUERIES.values()]
        what = f"{alpha_s:g} C + {beta_s:g} s; {rates[0]:.1f} queries/s ({PASSES} {rates[1]:.1f})"
        rows.append([f"a batch of C queries, {pool}", what, "the paper's device, emulated"])
    return Sheet("Service times", ["what", "takes", "from"], rows)


def goals(found: Found) -> list[Goal]:
    """The goals, for `CELL` nodes near and above their capacity."""
    points = [one for answers in PASS_QUERIES for one in _points(found, answers)]
    full = [one for one in points if one["nodes"] == CELL and one["load"] > LOADS[0]]
    late = max((100 * one["late"] for one in full), default=None)
    core = max((one["router_core"] for one in full), default=None)
    beside = min((one["beside"] for one in full), default=None)
    return [
        Goal(f"{CELL} nodes, 95 and 130 %: late", 0.5, late, "%", at_most=True),
        Goal(f"{CELL} nodes, 95 and 130 %: in time beside one ideal queue", 0.97, beside),
        Goal(f"{CELL} nodes, 95 and 130 %: a Router's core", 0.8, core, "", at_most=True),
    ]


def plot(found: Found) -> Figure:
    every = panels((10, 6.6), 2, 2)
    shown = {
        "answered in time each second by a node (x: one ideal queue)": ("goodput_node", 1),
        "p99, s (dotted: the SLO)": ("p99_s", 1),
        "refused, % (x: one ideal queue)": ("busy", 100),
        "a Router's core, %": ("router_core", 100),
    }
    for axes, (title, (key, times)) in zip(every, shown.items(), strict=True):
        for (answers, colour), (load, marker) in product(_COLOURS.items(), zip(LOADS, "^os", strict=True)):
            told = [one for one in _points(found, answers) if one["load"] == load]
            nodes, label = [one["nodes"] for one in told], f"{answers}, {load:.0%}"
            axes.plot(nodes, [times * one[key] for one in told], color=colour, marker=marker, ms=5, lw=1, label=label)
            if key in {"goodput_node", "busy"}:
                few = [one for one in told if one["nodes"] <= IDEAL_UP_TO]
                ideal = [times * one["ideal"][key] for one in few]
                axes.plot([one["nodes"] for one in few], ideal, "x", color="black", ms=5)
        axes.set(title=title, xlabel="nodes", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(NODES, [f"{nodes:,}" for nodes in NODES])
        axes.title.set_fontsize(10)
    every[1].axhline(found["slo_s"], color="black", linewidth=1, linestyle=":")
    every[1].set_ylim(0, 1.1 * found["slo_s"])
    whole = figure_of(every)
    whole.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return whole
