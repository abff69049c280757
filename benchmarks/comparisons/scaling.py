"""From one box to a thousand nodes: the product's own Router, Runner and Schedule in virtual time, and where it breaks.

No cluster is started. Devices are the paper's V100 and Xeon, by the curves of `serve_app/rehearsal.yaml`; what a query
takes of a Router's core is from `path`, what a frame and a decision take is measured in this run; the network is an
assumption (`tests/kit/simulation`). One ideal queue is one Router that takes no time, beside its replicas.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml
from matplotlib.figure import Figure

from benchmarks.costs import decision_cost
from benchmarks.kit.bench import Bench, Found, NotAvailable, quiet_ray
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.serving import ROOT
from benchmarks.kit.sheet import Sheet
from tests.kit.simulation.application import Application, Costs, Ended, Shape
from tests.kit.simulation.arrivals import poisson
from tests.kit.simulation.device import Device
from tests.kit.virtual_time import run as run_virtual

LOADS = (0.7, 0.95, 1.3)  # of what the devices can do within the SLO
ENDS, PASSES = "at the run's end", "pass by pass"
PASS_QUERIES = {ENDS: None, PASSES: 8}
NODES = (1, 4, 16, 64, 256, 1000)
IDEAL_UP_TO = 16  # nodes: more give the same for each
_SECONDS = {1: (4.0, 12.0), 4: (4.0, 8.0), 16: (4.0, 6.0), 64: (3.0, 3.0), 256: (2.5, 2.0), 1000: (2.0, 1.0)}
_LEFT_OUT = {
    (ENDS, 1000),
    (PASSES, 1000, 0.7),
    (PASSES, 1000, 0.95),
    (ENDS, 256, 0.7),
}  # too long to simulate for what they tell
DELAY_S = (0.0001, 0.0005)  # assumed: a message within a data centre, in one direction
CORE = 0.6  # share of a Router's core that is planned for at full load; the rest is for bursts
CELL = 64
_TURNS = 10**9
_KILLED = (8, 4)  # nodes, Routers: one of them dies
_CONNECTIONS = 128
_COLOURS = {ENDS: "#0072B2", PASSES: "#D55E00"}


def run(bench: Bench) -> None:
    quiet_ray()
    curves, slo_s = paper_curves()
    bench.found |= {"curves": curves, "slo_s": slo_s}
    points = [
        (answers, nodes, load)
        for nodes in NODES
        for answers in PASS_QUERIES
        for load in LOADS
        if not ({(answers, nodes), (answers, nodes, load)} & _LEFT_OUT) and (nodes <= IDEAL_UP_TO or not bench.quick)
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
    application = yaml.safe_load((ROOT / "serve_app" / "rehearsal.yaml").read_text(encoding="utf-8"))["applications"][0]
    slo_s = float(application["deployments"][0]["user_config"]["slo_s"])
    emulated = {pool: application["args"][pool]["emulated"] for pool in ("accelerator", "cpu")}
    return {pool: (curve["alpha_s"], curve["beta_s"]) for pool, curve in emulated.items()}, slo_s


def devices_of(curves: Mapping[str, Sequence[float]], pass_queries: int | None) -> dict[str, Device]:
    return {pool: Device(alpha_s, beta_s, pass_queries) for pool, (alpha_s, beta_s) in curves.items()}


def capacity_s(devices: Mapping[str, Device], slo_s: float) -> float:
    """Queries/s of one node."""
    return sum(device.queries_s(slo_s) for device in devices.values())


def routers_needed(nodes: int, devices: Mapping[str, Device], slo_s: float, costs: Costs) -> int:
    """At least two, since one may die; else by the core that the queries of all nodes take."""
    a_query_s = costs.query_s + costs.place_s + 2 * (costs.frame_s + costs.item_s)
    return max(2, math.ceil(nodes * capacity_s(devices, slo_s) * a_query_s / CORE))


def _measure_costs(bench: Bench) -> Costs:
    """Of a Router's core: a query's from `path` as kept, the rest in this run."""
    path = json.loads((ROOT / "benchmarks" / "results" / "path.json").read_text(encoding="utf-8"))
    query_s, refusal_s = (_router_s(path, name) for name in ("windve, 75 tokens", "floor, tiny answer"))
    frame_s, item_s = decision_cost.frame_s()
    counts = (1, 4, 16) if bench.quick else (1, 4, 16, 64, 256)
    place_s = {nodes: decision_cost.place_s(nodes) for nodes in counts}
    channel_kb = decision_cost.channel_kb()
    admission = bench.measure(lambda: decision_cost.admission(10_000))
    costs = Costs(query_s, refusal_s, max(place_s.values()), frame_s, item_s)
    found = {"costs": asdict(costs), "place_s": {str(n): s for n, s in place_s.items()}, "channel_kb": channel_kb}
    found |= {"admission_us": {key: admission[key] for key in ("p50_us", "p99_us")}, "path": path["machine"]}
    shown = (
        f"a query {query_s * 1e3:.2f} ms, a frame {frame_s * 1e6:.0f} us, placing {costs.place_s * 1e6:.0f} us, "
        f"an admission {admission['p50_us']:.1f} us; a channel {channel_kb:.1f} kB"
    )
    bench.sample({"what": "costs"}, found, shown)
    return costs


def _router_s(path: Found, contestant: str) -> float:
    """Seconds of the answering process's core for each request of `path`."""
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
    """What clients and processes see at `load`, a share of what the devices can do, from `warm_s` on."""
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
    """Of those that are late."""
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
    """What is lost with a Router that dies under load, and when the replicas have dropped what it had waiting."""
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
    return {
        "lost": lost,
        "open": lost * shape.routers,
        "dropped_s": dropped_s,
        "late": _share(answered),
        "queries_s_node": len(answered) / (10.0 - 5.0) / shape.nodes,
    }


# --- shown ------------------------------------------------------------------------------------------------------------


def costs_of(found: Found) -> Costs:
    return Costs(**_costs(found)["costs"])


def _costs(found: Found) -> dict[str, Any]:
    return next(sample for sample in found["samples"] if sample["what"] == "costs")


def _of(found: Found, queue: str = "Routers", **about: Any) -> dict[str, Any] | None:
    wanted = {"what": "nodes", "queue": queue, **about}
    return next((s for s in found["samples"] if all(s.get(key) == value for key, value in wanted.items())), None)


def _ideal(found: Found, answers: str, nodes: int, load: float) -> dict[str, Any] | None:
    return _of(found, "one", answers=answers, nodes=min(nodes, IDEAL_UP_TO), load=load)


def _beside_ideal(found: Found, answers: str, nodes: int, load: float) -> float | None:
    """What is answered in time, as a share of what one ideal queue does."""
    one, ideal = _of(found, answers=answers, nodes=nodes, load=load), _ideal(found, answers, nodes, load)
    if one is None or ideal is None:
        return None
    offered = load < 1  # what comes is by chance, and all of it can be answered
    shares = [told["goodput_node"] / (told["offered_node"] if offered else 1) for told in (one, ideal)]
    return ratio(*shares)


def sheets(found: Found) -> list[Sheet]:
    shown = [_times_sheet(found)]
    shown += [_nodes_sheet(found, answers) for answers in PASS_QUERIES]
    return [*shown, _death_sheet(found)]


def _times_sheet(found: Found) -> Sheet:
    costs, told = costs_of(found), _costs(found)
    us = {name: f"{1e6 * value:.1f} us" for name, value in asdict(costs).items()}
    admission = told["admission_us"]
    rows = [
        ["a query, of a Router's core", f"{costs.query_s * 1e3:.2f} ms", f"path.json, {told['path']['cpu']}"],
        ["one told busy", f"{costs.refusal_s * 1e3:.2f} ms", "path.json: the floor's tiny answer"],
        ["a frame, at either end", us["frame_s"], "this run"],
        ["more for each query or answer in it", us["item_s"], "this run"],
        ["placing a query, any number of replicas", us["place_s"], "this run"],
        ["one admission, 1,000 waiting", f"{admission['p50_us']:.1f} us (p99 {admission['p99_us']:.1f})", "this run"],
        ["a message on the network", f"{DELAY_S[0] * 1e3:g} to {DELAY_S[1] * 1e3:g} ms", "assumed"],
    ]
    for pool, (alpha_s, beta_s) in found["curves"].items():
        rates = [Device(alpha_s, beta_s, size).queries_s(found["slo_s"]) for size in PASS_QUERIES.values()]
        what = f"{alpha_s:g} C + {beta_s:g} s; {rates[0]:.1f} queries/s ({PASSES} {rates[1]:.1f})"
        rows.append([f"a run of C queries, {pool}", what, "the paper's device, emulated"])
    return Sheet("Service times", ["what", "takes", "from"], rows)


def _nodes_sheet(found: Found, answers: str) -> Sheet:
    head = ["nodes", "Routers", "load", "in time/s a node", "beside one ideal queue", "busy (ideal)", "late", "p50"]
    head += ["p99", "accelerators run", "frames a query", "Router's core", "replica's core"]
    rows = []
    for nodes in NODES:
        for load in LOADS:
            told, ideal = _of(found, answers=answers, nodes=nodes, load=load), _ideal(found, answers, nodes, load)
            if told is None or ideal is None:
                continue
            rows.append(
                [
                    f"{nodes:,}",
                    f"{told['routers']}",
                    f"{load:.0%}",
                    f"{told['goodput_node']:.1f}",
                    f"{_beside_ideal(found, answers, nodes, load):.2f}",
                    f"{told['busy']:.1%} ({ideal['busy']:.1%})",
                    f"{told['late']:.2%}",
                    f"{told['p50_s']:.2f} s",
                    f"{told['p99_s']:.2f} s",
                    f"{told['accelerator']:.0%}",
                    f"{told['frames_query']:.2f}",
                    f"{told['router_core']:.0%}",
                    f"{told['replica_core']:.1%}",
                ]
            )
    return Sheet(f"Simulated, answers {answers}, SLO {found['slo_s']:g} s", head, rows)


def _death_sheet(found: Found) -> Sheet:
    told = next((sample for sample in found["samples"] if sample["what"] == "death"), None)
    rows = []
    if told is not None:
        rows = [
            ["queries that their clients lose", f"{told['lost']}, those open at it"],
            ["until the replicas have dropped what waited", f"{told['dropped_s'] * 1e3:.1f} ms"],
            ["late, of those that come later", f"{told['late']:.2%}"],
        ]
    nodes, routers = _KILLED
    return Sheet(f"A Router dies at 130 %, {nodes} nodes, {routers} Routers, {PASSES}", ["what", "found"], rows)


def goals(found: Found) -> list[Goal]:
    shown = []
    slo_s = found["slo_s"]
    for answers in PASS_QUERIES:
        full, over = (_of(found, answers=answers, nodes=CELL, load=load) for load in LOADS[1:])
        late = max((told["late"] for told in (full, over) if told), default=None)
        about = f"{CELL} nodes, answers {answers}"
        beside = [_beside_ideal(found, answers, CELL, load) for load in LOADS[1:]]
        shown += [
            Goal(f"{about}, 95 and 130 %: late", 0.5, None if late is None else 100 * late, "%", at_most=True),
            Goal(f"{about}, 130 %: p99 against the SLO", 1.0, over["p99_s"] / slo_s if over else None, at_most=True),
            Goal(f"{about}, 95 %: in time beside one ideal queue", 0.97, beside[0]),
            Goal(f"{about}, 130 %: in time beside one ideal queue", 0.97, beside[1]),
            Goal(f"{about}, 130 %: a Router's core", 0.8, over["router_core"] if over else None, "", at_most=True),
        ]
    death = next((sample for sample in found["samples"] if sample["what"] == "death"), None)
    shown.append(
        Goal("a dead Router's work is dropped", 10.0, 1e3 * death["dropped_s"] if death else None, "ms", at_most=True)
    )
    return shown


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    (good, late), (busy, cores) = figure.subplots(2, 2)
    for answers, colour in _COLOURS.items():
        for load, marker in zip(LOADS, "^os", strict=True):
            told = {n: s for n in NODES if (s := _of(found, answers=answers, nodes=n, load=load))}
            style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1}
            style |= {"label": f"{answers}, {load:.0%}"}
            good.plot(list(told), [s["goodput_node"] for s in told.values()], **style)
            late.plot(list(told), [s["p99_s"] for s in told.values()], **style)
            busy.plot(list(told), [100 * s["busy"] for s in told.values()], **style)
            cores.plot(list(told), [100 * s["router_core"] for s in told.values()], **style)
            one = {
                n: s
                for n in NODES
                if n <= IDEAL_UP_TO and (s := _of(found, "one", answers=answers, nodes=n, load=load))
            }
            for axes, key, times in ((good, "goodput_node", 1), (busy, "busy", 100)):
                axes.plot(list(one), [times * s[key] for s in one.values()], "x", color="black", markersize=5)
    late.axhline(found["slo_s"], color="black", linewidth=1, linestyle=":")
    good.set(title="answered in time each second by a node (x: one ideal queue)", ylim=(0, None))
    late.set(title="p99, s (dotted: the SLO)", ylim=(0, None))
    busy.set(title="told busy, % (x: one ideal queue)", ylim=(0, None))
    cores.set(title="a Router's core, %", ylim=(0, 100))
    for axes in (good, late, busy, cores):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("nodes")
        axes.set_xticks(NODES, [f"{nodes:,}" for nodes in NODES])
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    good.legend(frameon=False, fontsize=7, ncols=2)
    return figure
