"""What admission costs, and what more Router replicas bring: the same engine that takes no time as in *path*."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.comparisons.path import TEXT, config
from benchmarks.costs import decision_cost
from benchmarks.kit import wrk
from benchmarks.kit.bench import Bench, Found, median, values_of
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.server import wait_until_answered
from benchmarks.kit.serving import serving
from benchmarks.kit.sheet import Sheet

ROUTERS = (1, 2, 4)
CONNECTIONS = 128


def run(bench: Bench) -> None:
    wrk.ensure()
    rounds, seconds = (1, 2.0) if bench.quick else (2, 5.0)
    with bench.steps(rounds * (1 + len(ROUTERS))) as step:
        for number in range(rounds):
            with bench.turn():
                step("one admission decision")
                told = bench.measure(decision_cost.admission)
                shown = f"p50 {told['p50_us']:.2f} us, p99 {told['p99_us']:.2f} us"
                bench.sample({"what": "admission", "round": number}, told, shown)
            for routers in ROUTERS[number % len(ROUTERS) :] + ROUTERS[: number % len(ROUTERS)]:
                step(f"{routers} Router replicas")
                if str(routers) not in bench.found.get("missing", {}):
                    with bench.turn():
                        _throughput(bench, routers, number, seconds)


def _throughput(bench: Bench, routers: int, number: int, seconds: float) -> None:
    payloads = [{"input": TEXT}]
    try:
        with serving(config(routers)) as service:
            url = f"{service.url}/v1/embeddings"
            wait_until_answered(url, payloads[0])
            wrk.post(url, payloads, connections=CONNECTIONS, seconds=2)
            told = bench.measure(lambda: wrk.post(url, payloads, connections=CONNECTIONS, seconds=seconds))
    except RuntimeError as error:
        bench.missing(str(routers), str(error))
        return
    shown = f"{told['requests_s']:.0f} requests/s (p99 {told['p99_ms']:.1f} ms)"
    bench.sample({"what": "throughput", "routers": routers, "round": number}, told, shown)


def sheets(found: Found) -> list[Sheet]:
    rows = []
    for routers in ROUTERS:
        rate = _rate(found, routers)
        if rate is None:
            rows.append([str(routers), "not available", "-", found.get("missing", {}).get(str(routers), "-")])
            continue
        tail = median(found, "p99_ms", what="throughput", routers=routers)
        times = ratio(rate, _rate(found, 1))
        rows.append([str(routers), f"{rate:,.0f}", f"{tail:.1f}", "-" if times is None else f"{times:.2f}"])
    p50, p99 = (median(found, key, what="admission") for key in ("p50_us", "p99_us"))
    decision = [f"{p50:.2f}", f"{p99:.2f}"] if p50 is not None and p99 is not None else ["-", "-"]
    return [
        Sheet(f"One admission, {decision_cost.WAITING:,} queries waiting", ["p50, us", "p99, us"], [decision]),
        Sheet(
            f"Throughput through HTTP, {CONNECTIONS} connections",
            ["Router replicas", "requests/s", "p99, ms", "times one"],
            rows,
        ),
    ]


def goals(found: Found) -> list[Goal]:
    return [
        Goal("one admission, p99", 5.0, median(found, "p99_us", what="admission"), "us", at_most=True),
        Goal("two Router replicas, against one", 1.8, ratio(_rate(found, 2), _rate(found, 1))),
    ]


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    decision, throughput = figure.subplots(1, 2)
    for sample in found["samples"]:
        if sample["what"] == "admission":
            decision.plot(range(1, 100), sample["percentiles_us"], color="#0072B2", alpha=0.6)
    decision.set(xlabel="percentile", ylabel="one admission, us", ylim=(0, None))
    for place, routers in enumerate(ROUTERS):
        values = values_of(found, "requests_s", what="throughput", routers=routers)
        throughput.bar(place, _rate(found, routers) or 0, color="#0072B2")
        throughput.plot([place] * len(values), values, "k.", markersize=4)
    throughput.set_xticks(range(len(ROUTERS)), [str(routers) for routers in ROUTERS])
    throughput.set(xlabel="Router replicas", ylabel="requests/s")
    for axes in (decision, throughput):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _rate(found: Found, routers: int) -> float | None:
    return median(found, "requests_s", what="throughput", routers=routers)
