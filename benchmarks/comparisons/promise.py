"""The SLO in real time: whole services under bursts, and under streams of up to three times the capacity.

The paper's V100 and Xeon are emulated at true speed. all-MiniLM-L6-v2 runs on this machine's CPU, which the load
generator shares. A stream on emulated devices is compared with the same arrivals, device curves and rule in virtual
time, without margin, noise or network. A stream on the CPU is compared with a closed loop.

Bursts and streams during which other processes used much of the machine are measured twice (`Bench.measure`).
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from benchmarks.kit.arrivals import LONGEST, Ended, Load, closed_loop, figures
from benchmarks.kit.bench import Bench, Found, samples_of
from benchmarks.kit.goal import Goal
from benchmarks.kit.serving import Service, serving, shipped
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation.arrivals import QUERY_TOKENS, Arrival, poisson
from benchmarks.simulation.device import Device
from benchmarks.simulation.rules import goodput

END, PASSES = "at the end of the batch", "per micro-batch"
PAIR, V100, CPU = "V100 + Xeon", "V100", "MiniLM on the CPU"
MIXED = "mixed"  # log-normal lengths, mean about 75 once they are cut to the model's longest
_PASS_QUERIES = 8
_STEADY_DEPTH = 25  # floor((1 s - 2 beta) / alpha) of the V100
_BURSTS, _QUICK_BURSTS = 20, 5
_SECONDS, _QUICK_SECONDS = 60.0, 12.0
_CPU_SLO_S, _CPU_BURST = 1.0, 206
_LENGTHS: tuple[int | str, ...] = (QUERY_TOKENS, MIXED)
_CPU_LENGTHS: tuple[int | str, ...] = (10, 75, 250, MIXED)
_CPU_TIMES = (0.5, 1.0, 2.0, 3.0)  # of what the engine does in a closed loop
_CLOSED = 48  # clients of that loop
_MOST_RATE = 900.0  # queries/s that the load generator is asked for
_REST_S = 1.0


@dataclass(frozen=True, slots=True)
class Emulated:
    """A service over emulated devices. `depth`: admit by this depth. `burst`: queries per burst; 0: no bursts."""

    service: str
    slo_s: float
    rates: tuple[int, ...]
    answers: str
    routers: int = 1
    depth: int | None = None
    burst: int = 0

    @property
    def config(self) -> dict[str, Any]:
        config = shipped("rehearsal.yaml")
        args, router = config["applications"][0]["args"], config["applications"][0]["deployments"][0]
        router["num_replicas"] = self.routers
        router["user_config"]["slo_s"] = self.slo_s
        if self.answers == PASSES:
            for pool in ("accelerator", "cpu"):
                args[pool]["emulated"]["micro_batch_queries"] = _PASS_QUERIES
        if self.service == V100:
            args["cpu_overflow"] = False
            del router["user_config"]["cpu"]
        if self.depth is not None:
            router["user_config"]["admission"] = "depth"
            router["user_config"]["accelerator"]["queue_depth"] = self.depth
        return config

    @property
    def about(self) -> dict[str, Any]:
        rule = "deadline" if self.depth is None else f"depth {self.depth}"
        more = {"routers": self.routers} if self.service == PAIR else {"rule": rule}
        return {"service": self.service, "answers": self.answers, **more}

    @property
    def devices(self) -> dict[str, Device]:
        args = self.config["applications"][0]["args"]
        size = _PASS_QUERIES if self.answers == PASSES else None
        curves = {pool: args[pool]["emulated"] for pool in ("accelerator", "cpu")[: 1 if self.service == V100 else 2]}
        return {pool: Device(curve["alpha_s"], curve["beta_s"], size) for pool, curve in curves.items()}

    def reference(self, arrivals: Sequence[Arrival], seconds: float) -> dict[str, float]:
        """What the bare rule answers in time per second: queries, and device seconds."""
        cut = [one._replace(tokens=min(one.tokens, LONGEST)) for one in arrivals]
        queries, work_s = goodput(cut, self.devices, self.slo_s)
        return {"queries_s": queries / seconds, "work_s": work_s / seconds}

    def work_s(self, ended: Sequence[Ended]) -> float:
        """Device seconds of the queries that were in time."""
        devices = self.devices
        return sum(
            devices[one.reply.pool].alpha_s * min(one.arrival.tokens, LONGEST) / QUERY_TOKENS
            for one in ended
            if one.in_time and one.reply is not None and one.reply.pool is not None
        )


EMULATED = (
    *(Emulated(PAIR, 2.0, (35, 60, 80, 150), answers, routers, burst=150)
      for routers, answers in product((1, 2), (END, PASSES))),
    *(Emulated(V100, 1.0, (61, 125), answers, depth=depth)
      for answers, depth in ((END, _STEADY_DEPTH), (END, None), (PASSES, None))),
)  # fmt: skip


def run(bench: Bench) -> None:
    """`--only` takes the name of a service."""
    seconds, bursts = (_QUICK_SECONDS, _QUICK_BURSTS) if bench.quick else (_SECONDS, _BURSTS)
    wanted = [emulated for emulated in EMULATED if bench.wants(emulated.service)]
    with bench.steps(len(wanted) + 1) as step, bench.turn():
        for emulated in wanted:
            step(", ".join(map(str, emulated.about.values())))
            with serving(emulated.config) as service:
                _emulated(bench, emulated, service, seconds, bursts)
        step(CPU)
        if bench.wants(CPU):
            _cpu(bench, seconds / 3, bursts)


def _emulated(bench: Bench, emulated: Emulated, service: Service, seconds: float, bursts: int) -> None:
    if emulated.burst:
        _bursts(bench, emulated.about, service, (bursts, emulated.burst, emulated.slo_s))
    for length, rate in product(_LENGTHS, emulated.rates):
        arrivals = _arrivals(rate, seconds, length, emulated.slo_s)
        ended = bench.measure(partial(_stream, service, arrivals, seconds, emulated))
        told = {**ended, "reference": emulated.reference(arrivals, seconds)}
        bench.sample({**emulated.about, "length": length, "rate": rate}, told, _shown(told))


def _cpu(bench: Bench, seconds: float, bursts: int) -> None:
    config = shipped("config.yaml")
    config["applications"][0]["args"]["cpu"]["engine"] = "torch"
    with serving(config) as service:
        for calibrated in (False, True):
            about = {"service": CPU, "calibrated": calibrated}
            if calibrated:
                service.calibrate(bench.out / "calibration", "--slo", f"{_CPU_SLO_S:g}", "--apply")
            _bursts(bench, about, service, (bursts, _CPU_BURST, _CPU_SLO_S))
            for length in _CPU_LENGTHS:
                rate = _closed_loop(service, length, seconds / 2)
                for times in _CPU_TIMES:
                    offered = min(times * rate, _MOST_RATE)
                    arrivals = _arrivals(offered, seconds, length, _CPU_SLO_S)
                    told = bench.measure(partial(_stream, service, arrivals, seconds))
                    told["reference"] = {"queries_s": rate}
                    of = {**about, "length": length, "times": times, "rate": round(offered, 1)}
                    bench.sample(of, told, _shown(told))


def _arrivals(rate: float, seconds: float, length: int | str, allowed_s: float) -> list[Arrival]:
    mixed = isinstance(length, str)
    stream = poisson(rate, seconds, mixed=mixed, allowed_s=allowed_s)
    return [one if isinstance(length, str) else one._replace(tokens=length) for one in stream]


def _closed_loop(service: Service, length: int | str, seconds: float) -> float:
    """Queries/s of a closed loop, with as many clients as are all answered in time."""
    load, url = Load(service.url), f"{service.url}/v1/embeddings"
    requests = [load.request(one, number) for number, one in enumerate(_arrivals(100, 2.0, length, _CPU_SLO_S))]
    for clients in (_CLOSED, _CLOSED // 2, _CLOSED // 4, 4, 2, 1):
        try:
            return float(closed_loop(url, requests, connections=clients, seconds=seconds)["requests_s"])
        except RuntimeError:  # refused: too many clients for the SLO
            time.sleep(_REST_S)
    raise RuntimeError("not even one client at a time is answered in time")


def _stream(
    service: Service, arrivals: Sequence[Arrival], seconds: float, emulated: Emulated | None = None
) -> dict[str, Any]:
    async def send() -> list[Ended]:
        load = Load(service.url)
        try:
            return await load.send(arrivals)
        finally:
            load.hang_up()
            await asyncio.sleep(_REST_S)

    ended = asyncio.run(send())
    return {**figures(ended, seconds), "work_s": emulated.work_s(ended) / seconds if emulated else None}


def _bursts(bench: Bench, about: Mapping[str, Any], service: Service, how: tuple[int, int, float]) -> None:
    """Send bursts. `how`: (number of bursts, queries per burst, SLO)."""
    bursts, queries, slo_s = how

    async def send() -> list[dict[str, Any]]:
        load, found = Load(service.url), []
        for _ in range(bursts):
            found.append(figures(await load.send_at_once(queries, QUERY_TOKENS, slo_s), slo_s))
            await asyncio.sleep(_REST_S)
        load.hang_up()
        return found

    told = bench.measure(lambda: _of_bursts(asyncio.run(send())))
    shown = (
        f"{bursts} bursts of {queries}: {told['answered']:.0f} answered on average, late in {told['late_bursts']}, "
        f"p50 {told['p50_s']:.2f} s, p99 {told['p99_s']:.2f} s, busy within {told['busy_p99_s']:.2f} s"
    )
    bench.sample({**about, "burst": queries}, told, shown)


def _of_bursts(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    answered, late = (sum(one[key] for one in each) for key in ("answered", "late"))
    return {
        "bursts": len(each),
        "answered": statistics.mean(one["answered"] for one in each),
        "fewest": min(one["answered"] for one in each),
        "late_bursts": sum(one["late"] > 0 for one in each),
        "late_share": late / max(1, answered),
        "p50_s": statistics.median(one["p50_s"] for one in each),
        "p99_s": statistics.median(one["p99_s"] for one in each),
        "busy_p99_s": max(one["busy_p99_s"] for one in each),
    }


def _shown(told: Mapping[str, Any]) -> str:
    return (
        f"{told['goodput_s']:.1f}/s in time of {told['sent']} sent, {told['late']} late ({told['late_share']:.2%}), "
        f"{told['busy']} busy, {told['failed']} failed, p99 {told['p99_s']:.2f} s"
    )


# --- tables and goals ---------------------------------------------------------------------------------------------

_TIMES = {"p50": "{p50_s:.2f} s", "p99": "{p99_s:.2f} s", "busy within": "{busy_p99_s:.3f} s"}


def _streams(found: Found, **about: Any) -> list[dict[str, Any]]:
    """Rows with each stream's name, and its queries in time and device seconds over its reference's."""
    return [
        {
            **one,
            "name": _name(one),
            "queries_share": one["goodput_s"] / one["reference"]["queries_s"],
            "work_share": one["work_s"] / one["reference"]["work_s"] if one["work_s"] is not None else None,
        }
        for one in samples_of(found, "reference", **about)
    ]


def _name(one: Mapping[str, Any]) -> str:
    words = [one["answers"]] if "answers" in one else ["calibrated" if one["calibrated"] else "not calibrated"]
    words += [f"{one['routers']} Router{'s' if one['routers'] > 1 else ''}"] if "routers" in one else []
    words += [one["rule"]] if "rule" in one else []
    words += [f"{one['length']} tokens, {one['rate']:g}/s"] if "rate" in one else []
    return ", ".join(words)


def sheets(found: Found) -> list[Sheet]:
    columns = {
        "": "{name}", "sent": "{sent}", "in time, queries/s": "{goodput_s:.1f}",
        "of the reference": "{queries_share:.2f}", "device seconds, of it": "{work_share:.2f}",
        "busy": "{busy}", "failed": "{failed}", "late": "{late_share:.2%}", **_TIMES,
    }  # fmt: skip
    slos = {PAIR: "emulated, SLO 2 s", V100: "emulated, SLO 1 s", CPU: "SLO 1 s"}
    made = [
        table(f"{service}, {slo}: streams", columns, _streams(found, service=service)) for service, slo in slos.items()
    ]
    columns = {
        "": "{service}, {name}", "bursts": "{bursts} x {burst}", "answered": "{answered:.1f}", "fewest": "{fewest}",
        "with late ones": "{late_bursts}", "late": "{late_share:.2%}", **_TIMES,
    }  # fmt: skip
    bursts = [{**one, "name": _name(one)} for one in samples_of(found, "late_bursts")]
    return [*made, table("Bursts", columns, bursts)]


def goals(found: Found) -> list[Goal]:
    """The goals, for the accelerator with the CPU."""
    streams, bursts = _streams(found, service=PAIR), samples_of(found, "late_bursts", service=PAIR)
    late = max((100 * one["late_share"] for one in [*streams, *bursts]), default=None)
    work = min((one["work_share"] for one in streams), default=None)
    answered = min((one["answered"] for one in bursts), default=None)
    return [
        Goal(f"{PAIR}: late, most of any stream or burst", 0.5, late, "%", at_most=True),
        Goal(f"{PAIR}: device seconds in time beside the rule, least of any stream", 0.92, work),
        Goal(f"{PAIR}: answered of 150 at once, the least", 100, answered, "queries"),
    ]
