"""The promise by the clock: whole services under bursts, and streams up to three times what devices can do.

The paper's V100 and Xeon are emulated at true speed; all-MiniLM-L6-v2 is computed by this machine's CPU, which the load
generator shares. `reference`: the same arrivals, device curves and rule in virtual time, without margin, noise or way.

Bursts and streams during which others took much of the machine are measured twice (`Bench.measure`).
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from matplotlib.figure import Figure

from benchmarks.kit.arrivals import LONGEST, MIXED, Arrival, Ended, Length, Load, figures, poisson
from benchmarks.kit.bench import Bench, Found, samples_of
from benchmarks.kit.closed_loop import ask_again_and_again
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.serving import ROOT, Service, serving
from benchmarks.kit.sheet import Sheet
from tests.kit.simulation import rules
from tests.kit.simulation.arrivals import Arrival as Simulated
from tests.kit.simulation.device import Device

END, PASSES = "at the run's end", "pass by pass"
PAIR, V100, CPU = "V100 + Xeon", "V100", "MiniLM on the CPU"
PAIR_RATES, V100_RATES = (35, 60, 80, 150), (61, 125)
_PASS_QUERIES = 8
_STEADY_DEPTH = 25  # floor((1 s - 2 beta) / alpha) of the V100
_BURST, _BURSTS, _TOKENS = 150, 20, 75
_CPU_SLO_S, _CPU_BURST, _CPU_MANY = 1.0, 206, 1200
_CPU_LENGTHS: tuple[Length, ...] = (10, 75, 250, MIXED)
_CPU_TIMES = (0.5, 1.0, 2.0, 3.0)  # of what the engine does in a closed loop
_CLOSED = 48  # clients of that loop
_MOST_RATE = 900.0  # queries/s that the load generator is asked for
_RETURNS = 1.5  # times what is answered in time at overload
_HONOURS = 20  # one client in so many comes back when it was told
_REST_S = 1.0


def run(bench: Bench) -> None:
    stream_s, bursts = (12.0, 5) if bench.quick else (60.0, _BURSTS)
    with bench.steps(7) as step, bench.turn():
        for routers in (1, 2):
            for answers in (END, PASSES):
                step(f"{PAIR}, {answers}, {routers} Routers")
                if bench.wants(f"{PAIR}, {routers}"):
                    _pair(bench, answers, routers, stream_s, bursts)
        step(V100)
        if bench.wants(V100):
            _v100(bench, stream_s)
        step("two kinds of deadlines")
        if bench.wants("deadlines"):
            _deadlines(bench, stream_s)
        step(CPU)
        if bench.wants(CPU):
            _cpu(bench, 8.0 if bench.quick else 20.0, bursts)


def _rehearsal(slo_s: float, answers: str, *, routers: int = 1, cpu: bool = True, depth: int | None = None) -> Any:
    config = yaml.safe_load((ROOT / "serve_app" / "rehearsal.yaml").read_text(encoding="utf-8"))
    (application,) = config["applications"]
    (router,) = application["deployments"]
    router["num_replicas"] = routers
    router["user_config"]["slo_s"] = slo_s
    application["args"]["heterogeneous"] = cpu
    if not cpu:
        del router["user_config"]["cpu"]
    for pool in ("accelerator", "cpu"):
        if answers == PASSES:
            application["args"][pool]["emulated"]["pass_queries"] = _PASS_QUERIES
    if depth is not None:
        router["user_config"]["admission"] = "depth"
        router["user_config"]["accelerator"]["queue_depth"] = depth
    return config


def _reference(arrivals: Sequence[Arrival], slo_s: float, seconds: float, pass_queries: int) -> dict[str, float]:
    """What the plain rule answers in time in a second: queries, and work in queries of 75 tokens of the V100."""
    args = _rehearsal(slo_s, END)["applications"][0]["args"]
    curves = {pool: args[pool]["emulated"] for pool in ("accelerator", "cpu")}
    devices = {pool: Device(one["alpha_s"], one["beta_s"], pass_queries=pass_queries) for pool, one in curves.items()}
    simulated = [Simulated(one.at_s, min(one.tokens, LONGEST), None) for one in arrivals]
    queries, work_s = rules.goodput(simulated, devices, slo_s)
    return {"queries_s": queries / seconds, "work_s": work_s / seconds}


def _pair(bench: Bench, answers: str, routers: int, seconds: float, bursts: int) -> None:
    slo_s = 2.0
    about = {"service": PAIR, "answers": answers, "routers": routers}
    with serving(_rehearsal(slo_s, answers, routers=routers)) as service:
        _bursts(bench, about, service, _BURST, slo_s=slo_s, bursts=bursts)
        for length in (75, MIXED):
            for rate in PAIR_RATES:
                arrivals = poisson(rate, seconds, length, slo_s)
                reference = _reference(arrivals, slo_s, seconds, _PASS_QUERIES if answers == PASSES else 0)
                _stream(
                    bench,
                    {**about, "length": length, "rate": rate},
                    service,
                    arrivals,
                    seconds=seconds,
                    reference=reference,
                )


def _v100(bench: Bench, seconds: float) -> None:
    slo_s = 1.0
    for answers, depth in ((END, _STEADY_DEPTH), (END, None), (PASSES, None)):
        rule = "finish" if depth is None else f"depth {depth}"
        about = {"service": V100, "answers": answers, "rule": rule}
        with serving(_rehearsal(slo_s, answers, cpu=False, depth=depth)) as service:
            for length in (75, MIXED):
                for rate in V100_RATES:
                    arrivals = poisson(rate, seconds, length, slo_s)
                    of = {**about, "length": length, "rate": rate}
                    goodput_s = _stream(bench, of, service, arrivals, seconds=seconds)
                    if depth is None and (length, rate) == (75, max(V100_RATES)):
                        of = {**about, "length": 75, "what": "returns"}
                        _returns(bench, of, service, rate=_RETURNS * goodput_s, slo_s=slo_s, seconds=2 * seconds)


def _deadlines(bench: Bench, seconds: float) -> None:
    """60/s that allow 20 s beside 20/s at the SLO."""
    slo_s = 2.0
    arrivals = poisson(60, seconds, 75, 20.0, seed=5)
    patient = [Arrival(one.at_s, one.tokens, one.allowed_s, own_deadline=True) for one in arrivals]
    urgent = poisson(20, seconds, 75, slo_s, seed=6)
    with serving(_rehearsal(slo_s, END)) as service:
        ended = asyncio.run(_send(service, sorted([*patient, *urgent], key=lambda one: one.at_s)))
    for name, own in (("allow 20 s", True), ("the SLO", False)):
        told = figures([one for one in ended if one.arrival.own_deadline == own], seconds)
        about = {"service": PAIR, "what": "deadlines", "which": name}
        bench.sample(about, told, _shown(told))


def _cpu(bench: Bench, seconds: float, bursts: int) -> None:
    config = yaml.safe_load((ROOT / "serve_app" / "config.yaml").read_text(encoding="utf-8"))
    config["applications"][0]["args"]["cpu"]["engine"] = "torch"
    about: dict[str, Any] = {"service": CPU}
    with serving(config) as service:
        for calibrated in (False, True):
            about["calibrated"] = calibrated
            if calibrated:
                service.calibrate(bench.out / "calibration", "--slo", f"{_CPU_SLO_S:g}", "--apply")
            _bursts(bench, about, service, _CPU_BURST, slo_s=_CPU_SLO_S, bursts=bursts)
            for length in _CPU_LENGTHS:
                rate = _closed_loop(service, length, seconds / 2)
                bench.sample({**about, "length": length, "what": "closed loop"}, {"queries_s": rate}, f"{rate:.1f}/s")
                for times in _CPU_TIMES:
                    offered = min(times * rate, _MOST_RATE)
                    arrivals = poisson(offered, seconds, length, _CPU_SLO_S)
                    of = {**about, "length": length, "times": times, "rate": round(offered, 1)}
                    _stream(bench, of, service, arrivals, seconds=seconds, reference=rate)
        rate = _closed_loop(service, 75, seconds / 2)
        _stolen_core(bench, about, service, rate, seconds)
        _bursts(bench, {**about, "what": "many"}, service, _CPU_MANY, slo_s=_CPU_SLO_S, bursts=3)
        _returns(
            bench,
            {**about, "length": 75, "what": "returns"},
            service,
            rate=_RETURNS * rate,
            slo_s=_CPU_SLO_S,
            seconds=seconds,
        )


def _closed_loop(service: Service, length: Length, seconds: float) -> float:
    """Queries/s of clients that ask again as soon as they are answered, no more of them than are answered in time."""
    load = Load(service.url)
    requests = [load.request(one, number) for number, one in enumerate(poisson(100, 2.0, length, _CPU_SLO_S))]
    for clients in (_CLOSED, _CLOSED // 2, _CLOSED // 4, 4, 2, 1):
        try:
            url = f"{service.url}/v1/embeddings"
            return float(ask_again_and_again(url, requests, connections=clients, seconds=seconds)["requests_s"])
        except RuntimeError:  # told busy: too many for the SLO
            time.sleep(_REST_S)
    raise RuntimeError("not even one client at a time is answered in time")


def _stolen_core(bench: Bench, about: Mapping[str, Any], service: Service, rate: float, seconds: float) -> None:
    """Another process takes one core from the middle of a stream on."""
    arrivals = poisson(rate, 2 * seconds, 75, _CPU_SLO_S)
    thief: list[subprocess.Popen[bytes]] = []

    async def steal() -> list[Ended]:
        sending = asyncio.create_task(_send(service, arrivals))
        await asyncio.sleep(seconds)
        thief.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))  # noqa: ASYNC220 - quick
        return await sending

    try:
        ended = asyncio.run(steal())
    finally:
        for process in thief:
            process.kill()
            process.wait()
    told = figures([one for one in ended if one.arrival.at_s > seconds + 3], seconds - 3)
    bench.sample({**about, "what": "a core is taken", "rate": round(rate, 1)}, told, _shown(told))


def _returns(
    bench: Bench, about: Mapping[str, Any], service: Service, *, rate: float, slo_s: float, seconds: float
) -> None:
    """Of the first returns of the one client in twenty that comes back when it was told, how many are admitted."""
    arrivals = poisson(rate, seconds, 75, slo_s)
    returned: list[Arrival] = []
    refused = 0

    def again(one: Ended) -> Arrival | None:
        nonlocal refused
        refused += 1
        if refused % _HONOURS or one.reply is None or one.arrival in returned:
            return None
        wait_s = int(one.reply.headers["retry-after-ms"]) / 1000
        back = Arrival(one.arrival.at_s + one.after_s + wait_s, 75, slo_s)
        returned.append(back)
        return back

    async def send() -> list[Ended]:
        load = Load(service.url)
        try:
            return await load.stream(arrivals, again)
        finally:
            load.close()

    ended = asyncio.run(send())
    backs = set(map(id, returned))
    came = [one for one in ended if id(one.arrival) in backs]
    admitted = sum(one.ok for one in came) / max(1, len(came))
    bench.sample(dict(about), {"returned": len(came), "admitted": admitted}, f"{admitted:.0%} of {len(came)} admitted")


def _bursts(
    bench: Bench, about: Mapping[str, Any], service: Service, queries: int, *, slo_s: float, bursts: int
) -> None:
    async def send() -> list[list[Ended]]:
        load, found = Load(service.url), []
        await load.open(queries)
        for _ in range(bursts):
            found.append(await load.burst(queries, _TOKENS, slo_s))
            await asyncio.sleep(_REST_S)
        load.close()
        return found

    told = bench.measure(lambda: _of_bursts([figures(one, slo_s) for one in asyncio.run(send())]))
    shown = (
        f"{bursts} bursts of {queries}: {told['answered']:.0f} answered on average, late in {told['late_bursts']}, "
        f"p50 {told['p50_s']:.2f} s, p99 {told['p99_s']:.2f} s, busy within {told['busy_p99_s']:.2f} s"
    )
    bench.sample({**about, "burst": queries}, told, shown)


def _of_bursts(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def sum_of(key: str) -> int:
        return sum(one[key] for one in each)

    answered = max(1, sum_of("answered"))
    return {
        "bursts": len(each),
        "answered": statistics.mean(one["answered"] for one in each),
        "fewest": min(one["answered"] for one in each),
        "late": sum_of("late"),
        "late_bursts": sum(one["late"] > 0 for one in each),
        "late_share": sum_of("late") / answered,
        "router_late_share": sum_of("router_late") / answered,
        "failed": sum_of("failed"),
        "p50_s": statistics.median(one["p50_s"] for one in each),
        "p99_s": statistics.median(one["p99_s"] for one in each),
        "busy_p99_s": max(one["busy_p99_s"] for one in each),
    }


def _stream(
    bench: Bench,
    about: Mapping[str, Any],
    service: Service,
    arrivals: Sequence[Arrival],
    *,
    seconds: float,
    reference: float | Mapping[str, float] | None = None,
) -> float:
    """Queries in time in a second."""

    def measured() -> dict[str, Any]:
        ended = asyncio.run(_send(service, arrivals))
        return {**figures(ended, seconds), "work_s": _work_s(ended) / seconds, "reference": reference}

    told = bench.measure(measured)
    bench.sample(about, told, _shown(told))
    return float(told["goodput_s"])


def _work_s(ended: Sequence[Ended]) -> float:
    """Device seconds of what was in time, on the emulated devices."""
    args = _rehearsal(1.0, END)["applications"][0]["args"]
    return sum(
        float(args[one.reply.pool]["emulated"]["alpha_s"]) * min(one.arrival.tokens, LONGEST) / 75
        for one in ended
        if one.in_time and one.reply is not None and one.reply.pool is not None
    )


async def _send(service: Service, arrivals: Sequence[Arrival]) -> list[Ended]:
    load = Load(service.url)
    try:
        return await load.stream(arrivals)
    finally:
        load.close()
        await asyncio.sleep(_REST_S)


def _shown(told: Mapping[str, Any]) -> str:
    return (
        f"{told['goodput_s']:.1f}/s in time of {told['sent']} sent, {told['late']} late ({told['late_share']:.2%}), "
        f"{told['busy']} busy, {told['failed']} failed, p99 {told['p99_s']:.2f} s"
    )


def sheets(found: Found) -> list[Sheet]:
    head = ["", "sent", "in time, queries/s", "busy", "failed", "late", "p50", "p99", "busy within"]
    made = []
    for title, wanted in (
        (f"{PAIR}, emulated, SLO 2 s: streams", {"service": PAIR}),
        (f"{V100} alone, emulated, SLO 1 s: streams", {"service": V100}),
        (f"{CPU}, SLO 1 s: streams", {"service": CPU}),
    ):
        streams = samples_of(found, "goodput_s", **wanted)
        rows = [[_title(one), f"{one['sent']}", *_cells(one)] for one in streams]
        if rows:
            made.append(Sheet(title, head, rows))
    bursts = [
        [
            _title(one), f"{one['bursts']} x {one['burst']}", f"{one['answered']:.1f}", f"{one['fewest']}",
            f"{one['late_bursts']}", f"{one['late_share']:.2%}", f"{one['p50_s']:.2f} s", f"{one['p99_s']:.2f} s",
            f"{one['busy_p99_s']:.2f} s",
        ]
        for one in samples_of(found, "late_bursts")
    ]  # fmt: skip
    bursts_head = ["", "bursts", "answered", "fewest", "with late ones", "late", "p50", "p99", "busy within"]
    made.append(Sheet("Bursts", bursts_head, bursts))
    made.append(Sheet("Beside the same rule in virtual time", ["", "queries", "work"], _beside(found)))
    returns = [[_title(one), f"{one['returned']}", f"{one['admitted']:.0%}"] for one in samples_of(found, "admitted")]
    made.append(
        Sheet("First returns, when Retry-After said, at 1.5 times capacity", ["", "returns", "admitted"], returns)
    )
    return made


def _title(one: Mapping[str, Any]) -> str:
    keys = ("answers", "routers", "rule", "which", "calibrated", "what", "length", "times", "rate")
    words = {"calibrated": "calibrated", "length": "tokens", "rate": "/s", "times": "times", "routers": "Routers"}
    return ", ".join(
        ("calibrated" if one[key] else "not calibrated")
        if key == "calibrated"
        else f"{one[key]} {words.get(key, '')}".strip()
        for key in keys
        if one.get(key) is not None
    )


def _cells(one: Mapping[str, Any]) -> list[str]:
    return [
        f"{one['goodput_s']:.1f}", f"{one['busy']}", f"{one['failed']}", f"{one['late_share']:.2%}",
        f"{one['p50_s']:.2f} s", f"{one['p99_s']:.2f} s", f"{one['busy_p99_s']:.3f} s",
    ]  # fmt: skip


def _beside(found: Found) -> list[list[str]]:
    return [
        [_title(one), f"{_of_queries(one):.2f}", f"{_of_work(one):.2f}"]
        for one in samples_of(found, "reference", service=PAIR)
    ]


def _of_queries(one: Mapping[str, Any]) -> float:
    return float(one["goodput_s"] / one["reference"]["queries_s"])


def _of_work(one: Mapping[str, Any]) -> float:
    """Device seconds: a query costs each pool its own, so that tokens by pool count."""
    return float(one["work_s"] / one["reference"]["work_s"])


def goals(found: Found) -> list[Goal]:
    made: list[Goal] = []
    for routers in (1, 2):
        for answers in (END, PASSES):
            of = {"service": PAIR, "answers": answers, "routers": routers}
            name = f"{PAIR}, {answers}, {routers} Router{'s' if routers > 1 else ''}"
            burst = next(iter(samples_of(found, "late_bursts", **of)), None)
            if burst is not None:
                made.append(
                    Goal(
                        f"{name}: bursts of {_BURST} with late answers, of {burst['bursts']}",
                        1,
                        burst["late_bursts"],
                        "",
                        at_most=True,
                    )
                )
                made.append(Goal(f"{name}: answered of a burst", 100, burst["answered"], ""))
            streams = samples_of(found, "reference", **of)
            if streams:
                made.append(
                    Goal(
                        f"{name}: late, most of any stream",
                        0.5,
                        100 * max(one["late_share"] for one in streams),
                        "%",
                        at_most=True,
                    )
                )
                made.append(
                    Goal(
                        f"{name}: queries in time, least of any stream",
                        0.92,
                        min(map(_of_queries, streams)),
                        "of the rule",
                    )
                )
                made.append(
                    Goal(f"{name}: work in time, least of any stream", 0.92, min(map(_of_work, streams)), "of the rule")
                )
    for answers, wanted in ((END, (1.12, 1.25, 1.6)), (PASSES, (1.3, 1.35, 1.6))):
        for length, rate, least in (
            (75, 61, wanted[0]),
            (75, 125, wanted[1]),
            (MIXED, 61, wanted[2]),
            (MIXED, 125, wanted[2]),
        ):
            of = {"service": V100, "length": length, "rate": rate}
            ours, depth = (
                next((one["goodput_s"] for one in samples_of(found, "goodput_s", **of, answers=a, rule=rule)), None)
                for a, rule in ((answers, "finish"), (END, f"depth {_STEADY_DEPTH}"))
            )
            made.append(
                Goal(
                    f"{V100}, {answers}, {length} tokens, {rate}/s: beside depth {_STEADY_DEPTH}",
                    least,
                    ratio(ours, depth),
                )
            )
    made += [
        Goal(
            "60/s allow 20 s beside 20/s at the SLO: of the latter admitted",
            0.95,
            one["answered"] / one["sent"],
            "",
        )
        for one in samples_of(found, "goodput_s", service=PAIR, which="the SLO")
    ]
    made += _cpu_goals(found)
    for one in samples_of(found, "admitted"):
        made.append(Goal(f"{one['service']}: first returns admitted", 0.7, one["admitted"], ""))
    return made


def _cpu_goals(found: Found) -> list[Goal]:
    made: list[Goal] = []
    for calibrated in (False, True):
        of = {"service": CPU, "calibrated": calibrated}
        name = f"{CPU}, {'calibrated' if calibrated else 'not calibrated'}"
        streams = [one for one in samples_of(found, "goodput_s", **of) if "times" in one]
        if not streams:
            continue
        made.append(
            Goal(
                f"{name}: late, most of any stream",
                1,
                100 * max(one["late_share"] for one in streams),
                "%",
                at_most=True,
            )
        )
        for length, times, least in ((75, 2.0, 0.8), (75, 3.0, 0.7), (250, 2.0, 0.85), (250, 3.0, 0.85)):
            made += [
                Goal(
                    f"{name}: {length} tokens at {times:g} times, of the closed loop",
                    least,
                    ratio(one["goodput_s"], one["reference"]),
                    "",
                )
                for one in streams
                if (one["length"], one["times"]) == (length, times)
            ]
        for one in samples_of(found, "late_bursts", **of):
            if one["burst"] == _CPU_BURST:
                made.append(Goal(f"{name}: burst of {_CPU_BURST}, late", 1, 100 * one["late_share"], "%", at_most=True))
                made.append(
                    Goal(
                        f"{name}: burst of {_CPU_BURST}, p50", 0.6, one["p50_s"] / one["p99_s"], "of p99", at_most=True
                    )
                )
    made += [
        Goal(
            f"{CPU}: late from the third second on after a core is taken",
            2,
            100 * one["late_share"],
            "%",
            at_most=True,
        )
        for one in samples_of(found, "goodput_s", service=CPU, what="a core is taken")
    ]
    made += [
        Goal(
            f"{CPU}: {_CPU_MANY} at once, late by the Router's clock of those admitted",
            5,
            100 * one["router_late_share"],
            "%",
            at_most=True,
        )
        for one in samples_of(found, "late_bursts", service=CPU, what="many")
    ]
    return made


def plot(found: Found) -> Figure:
    """In time, refused and late of each stream."""
    streams = [one for one in samples_of(found, "goodput_s") if "rate" in one]
    figure = Figure(figsize=(10, 1.2 + 0.22 * len(streams)), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(reversed(streams)):
        sent = one["sent"]
        shares = (
            ("#0072B2", one["answered"] - one["late"]),
            ("#D55E00", one["late"]),
            ("#cccccc", sent - one["answered"]),
        )
        left = 0.0
        for colour, count in shares:
            axes.barh(place, 100 * count / sent, left=left, color=colour)
            left += 100 * count / sent
    axes.set_yticks(range(len(streams)), [f"{one['service']}: {_title(one)}" for one in reversed(streams)], fontsize=6)
    axes.set(xlabel="% of the queries sent: in time (blue), late (red), told busy (grey)", xlim=(0, 100))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
