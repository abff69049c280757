"""Admission rules in virtual time: windve's Router, run loop and scheduler over one node's emulated devices.

Compares admission by predicted finish (answers at the end of the batch, or per micro-batch), by the paper's depth (for
bursts and for streams), and the bare rules (`simulation/rules.py`: no margin, no learning, no network). A query is late
if it was admitted and answered after its deadline. Goodput counts the queries answered in time, over the whole stream.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from operator import attrgetter
from typing import Any

from matplotlib.figure import Figure

from benchmarks.kit.bench import Bench, Found, all_of, quiet_ray
from benchmarks.kit.figures import BLUE, GREY, RED, figure_of, panels
from benchmarks.kit.goal import Goal
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation.application import Application, Ended, Shape
from benchmarks.simulation.arrivals import QUERY_TOKENS, Arrival, poisson
from benchmarks.simulation.device import Device
from benchmarks.simulation.rules import goodput
from benchmarks.simulation.virtual_time import run as run_virtual

_TURNS = 10**9
_LONG, _SHORT = 200, 50  # tokens: more is long, fewer is short
_NOISE, _SLOW = 0.03, 1.5
_BURST, _BURSTS, _BURST_EVERY_S, _SPREAD_S = 150, 20, 5.0, 0.075
_DEFERRABLE_S, _DEFERRABLE_RATE, _PROMPT_RATE = 20.0, 60.0, 20.0

DEPTHS = ("depth, burst", "depth, steady")
ENDS, PASSES = "deadline, at the end", "deadline, per micro-batch"  # of the batch all answers leave; or of each
NOISY, SLOWER = "the same, noise 3 %", "the same, 1.5 x slower"
BURST_RULES = (DEPTHS[0], ENDS, PASSES)
RULES = (*DEPTHS, ENDS, PASSES, NOISY, SLOWER)
PLAIN = {ENDS: "rule alone", PASSES: "rule alone, per micro-batch"}
TIMES = {ENDS: "ratio", PASSES: "ratio, per micro-batch"}


@dataclass(frozen=True, slots=True)
class Case:
    """One set of devices. `seconds`: length of a simulated stream. Noise and slow-down use the third rate."""

    name: str
    slo_s: float
    curves: Mapping[str, tuple[float, float]]
    micro_batch_queries: int
    rates: tuple[float, ...]
    seconds: float


_V100, _XEON, _MINILM = (0.018, 0.27), (0.0858, 0.32), (0.0039, 0.03)
CASES = (
    Case("V100, SLO 1 s", 1.0, {"accelerator": _V100}, 8, (22, 42, 61, 125), 40.0),
    Case("V100 + Xeon, SLO 2 s", 2.0, {"accelerator": _V100, "cpu": _XEON}, 8, (35, 60, 80, 150), 40.0),
    Case("MiniLM on two cores, SLO 1 s", 1.0, {"cpu": _MINILM}, 16, (128, 231, 282, 577), 10.0),
)


def run(bench: Bench) -> None:
    quiet_ray()
    cases = CASES[:1] if bench.quick else CASES
    streams = [(case, rate, mixed) for case in cases for mixed in (False, True) for rate in case.rates]
    with bench.steps(len(streams) + 2) as step:
        for case, rate, mixed in streams:
            step(f"{case.name}, {rate:g}/s, {_lengths(mixed=mixed)}")
            _stream(bench, case, rate, mixed=mixed)
        step("bursts")
        for pools, rule, spread_s in product(("accelerator", "accelerator, cpu"), BURST_RULES, (0.0, _SPREAD_S)):
            _burst(bench, pools, rule, spread_s)
        step("who can wait beside who cannot")
        for rule in (ENDS, PASSES):
            _beside(bench, rule)


def _lengths(*, mixed: bool) -> str:
    return "mixed" if mixed else "equal"


def _devices(case: Case, rule: str) -> dict[str, Device]:
    size = None if rule in {*DEPTHS, ENDS} else case.micro_batch_queries
    noise = _NOISE if rule in {NOISY, SLOWER} else 0.0
    slow = _SLOW if rule == SLOWER else 1.0
    return {pool: Device(*curve, size, noise, slow) for pool, curve in case.curves.items()}


def _stream(bench: Bench, case: Case, rate: float, *, mixed: bool) -> None:
    arrivals = list(poisson(rate, case.seconds, mixed=mixed))
    about = {"what": "stream", "case": case.name, "lengths": _lengths(mixed=mixed), "rate": rate}
    for rule in RULES:
        if rule in {NOISY, SLOWER} and rate != case.rates[2]:
            continue
        devices = _devices(case, rule)
        depths = {p: d.depth(case.slo_s, steady=rule == DEPTHS[1]) for p, d in devices.items()}
        shape = Shape(1, 1, devices, case.slo_s, depths=depths if rule in DEPTHS else None)
        told = told_of(served(shape, arrivals), devices, case.seconds)
        if rule in PLAIN:
            queries, work_s = goodput(arrivals, devices, case.slo_s)
            told |= {"plain": queries / case.seconds, "plain_work": work_s / case.seconds}
        shown = f"{told['goodput']:.1f}/s in time, {told['late']:.1%} late, {told['work']:.2f} device seconds/s"
        bench.sample({**about, "rule": rule}, told, shown)


def served(shape: Shape, arrivals: Iterable[Arrival]) -> list[Ended]:
    """Simulate the arrivals; returns how each query ended."""

    async def serve() -> list[Ended]:
        application = Application(shape)
        await application.start()
        await application.serve(arrivals)
        return application.ended

    return run_virtual(serve(), _TURNS)


def told_of(ended: Sequence[Ended], devices: Mapping[str, Device], seconds: float) -> dict[str, Any]:
    answered = [one for one in ended if one.pool is not None]
    good = [one for one in answered if one.in_time]
    work_s = sum(devices[one.pool].alpha_s * one.tokens / QUERY_TOKENS for one in good if one.pool is not None)
    long, short = ([one for one in ended if kind(one.tokens)] for kind in (_LONG.__lt__, _SHORT.__gt__))
    took = sorted(one.took_s for one in answered)
    return {
        "goodput": len(good) / seconds,
        "work": work_s / seconds,
        "late": 1 - len(good) / max(1, len(answered)),
        "busy": 1 - len(answered) / len(ended),
        "p50_s": took[len(took) // 2],
        "p99_s": took[int(0.99 * len(took))],
        "refused_long": _refused(long),
        "refused_short": _refused(short),
    }


def _refused(kind: Sequence[Ended]) -> float | None:
    return sum(one.pool is None for one in kind) / len(kind) if kind else None


def _burst(bench: Bench, pools: str, rule: str, spread_s: float) -> None:
    """The paper's bursts, which come within `spread_s`."""
    case = CASES[1]
    devices = {pool: device for pool, device in _devices(case, rule).items() if pool in pools}
    depths = {pool: device.depth(case.slo_s, steady=False) for pool, device in devices.items()}
    shape = Shape(1, 1, devices, case.slo_s, depths=depths if rule in DEPTHS else None)
    apart_s = max(1e-5, spread_s / _BURST)
    arrivals = [
        Arrival(number * _BURST_EVERY_S + index * apart_s, QUERY_TOKENS)
        for number, index in product(range(_BURSTS), range(_BURST))
    ]
    fewest, late, answered = _BURST, 0, 0
    for _, some in groupby(served(shape, arrivals), lambda one: one.at // _BURST_EVERY_S):
        found = [one for one in some if one.pool is not None]
        fewest, answered = min(fewest, len(found)), answered + len(found)
        late += sum(not one.in_time for one in found)
    told = {"answered": answered / _BURSTS, "fewest": fewest, "late": late / answered}
    shown = f"{told['answered']:.1f} of {_BURST} answered, fewest {fewest}, {told['late']:.1%} late"
    bench.sample({"what": "burst", "pools": pools, "rule": rule, "spread_s": spread_s}, told, shown)


def _beside(bench: Bench, rule: str) -> None:
    """60 queries/s with a deadline of 20 s, together with 20/s at the SLO."""
    case = replace(CASES[1], seconds=60.0)
    devices = _devices(case, rule)
    streams = (
        poisson(_PROMPT_RATE, case.seconds, seed=4),
        poisson(_DEFERRABLE_RATE, case.seconds, allowed_s=_DEFERRABLE_S, seed=5),
    )
    ended = served(Shape(1, 1, devices, case.slo_s), heapq.merge(*streams, key=attrgetter("at")))
    told = {}
    for name, allowed_s in (("urgent", case.slo_s), ("deferrable", _DEFERRABLE_S)):
        kind = [one for one in ended if one.allowed_s == allowed_s]
        answered = [one for one in kind if one.pool is not None]
        told[f"{name}_admitted"] = len(answered) / len(kind)
        told[f"{name}_late"] = 1 - sum(one.in_time for one in answered) / len(answered)
        told[f"{name}_s"] = len(answered) / case.seconds
    shown = (
        f"{told['urgent_admitted']:.1%} of those at the SLO admitted, {told['deferrable_admitted']:.1%} of the others"
    )
    bench.sample({"what": "beside", "rule": rule}, told, shown)


# --- tables and goals ---------------------------------------------------------------------------------------------


def _streams(found: Found) -> list[dict[str, Any]]:
    """One row per stream, with each rule's result by the rule's name."""
    rows = []
    for one in all_of(found, what="stream", rule=ENDS):
        about = {key: one[key] for key in ("case", "lengths", "rate")}
        rows.append(about | {told["rule"]: told for told in all_of(found, what="stream", **about)})
    return rows


def sheets(found: Found) -> list[Sheet]:
    cases = (_case_sheet(found, case) for case in CASES)
    return [*cases, _burst_sheet(found), _length_sheet(found), _noise_sheet(found), _other_sheet(found)]


def _case_sheet(found: Found, case: Case) -> Sheet:
    columns = {"offered": "{rate:g}/s", "lengths": "{lengths}"}
    for rule in (*DEPTHS, ENDS, PASSES):
        columns[rule] = f"{{{rule}[goodput]:.1f}} ({{{rule}[work]:.2f}}), {{{rule}[late]:.1%}} late"
        if rule in PLAIN:
            columns[PLAIN[rule]] = f"{{{rule}[plain]:.1f}} ({{{rule}[plain_work]:.2f}})"
    rows = [row for row in _streams(found) if row["case"] == case.name]
    title = f"{case.name}: answered in time each second (device seconds)"
    return table(title, columns, sorted(rows, key=lambda row: str(row["lengths"])))


def _burst_sheet(found: Found) -> Sheet:
    columns = {"pools": "{pools}", "they come within": "{spread_s:g} s"}
    columns |= {rule: f"{{{rule}[answered]:.1f}} (fewest {{{rule}[fewest]}}), {{{rule}[late]:.1%}} late"
                for rule in BURST_RULES}  # fmt: skip
    rows = []
    for one in all_of(found, what="burst", rule=ENDS):
        about = {key: one[key] for key in ("pools", "spread_s")}
        rows.append(about | {told["rule"]: told for told in all_of(found, what="burst", **about)})
    return table(f"{CASES[1].name}: answered of bursts of {_BURST}", columns, rows)


def _length_sheet(found: Found) -> Sheet:
    columns = {"devices": "{case}", "offered": "{rate:g}/s"}
    for rule, times in TIMES.items():
        columns[rule] = f"{{{rule}[refused_long]:.0%}} and {{{rule}[refused_short]:.0%}}"
        columns[times] = f"{{{times}:.1f}}"
    mixed = (row for row in _streams(found) if row["lengths"] == "mixed")
    rows = [row | {times: _times(row[rule]) for rule, times in TIMES.items()} for row in mixed]
    return table(f"Mixed lengths: refused of queries above {_LONG} tokens and of those below {_SHORT}", columns, rows)


def _times(told: Mapping[str, Any]) -> float | None:
    """The refusal rate of long queries over that of short ones."""
    few = 0.01
    if told["refused_long"] is None or told["refused_long"] < few:
        return None
    return float(told["refused_long"] / max(few, told["refused_short"]))


def _noise_sheet(found: Found) -> Sheet:
    columns = {"devices": "{case}", "offered": "{rate:g}/s, {lengths}"}
    rules = dict(zip("abc", (PASSES, NOISY, SLOWER), strict=True))
    columns |= {rule: f"{{{key}[goodput]:.1f}}, {{{key}[late]:.1%}} late" for key, rule in rules.items()}
    rows = [row | {key: row[rule] for key, rule in rules.items()} for row in _streams(found) if NOISY in row]
    return table("A device that is noisy, or slower than its model says", columns, rows)


def _other_sheet(found: Found) -> Sheet:
    columns = {
        "rule": "{rule}",
        "20/s at 2 s, admitted": "{urgent_admitted:.1%}, {urgent_late:.1%} late",
        "60/s at 20 s, admitted": "{deferrable_admitted:.1%} ({deferrable_s:.1f}/s), {deferrable_late:.1%} late",
    }  # fmt: skip
    return table("V100 + Xeon, SLO 2 s: long deadlines", columns, all_of(found, what="beside"))


def goals(found: Found) -> list[Goal]:
    streams = [one for rule in PLAIN for one in all_of(found, what="stream", rule=rule)]
    late = max((100 * one["late"] for one in streams), default=None)
    work = min((one["work"] / one["plain_work"] for one in streams if one["plain_work"]), default=None)
    v100 = [row for row in _streams(found) if row["case"] == CASES[0].name and row["rate"] in CASES[0].rates[2:]]
    times = [row[rule]["goodput"] / row[DEPTHS[1]]["goodput"] for row in v100 for rule in PLAIN]
    return [
        Goal("late, any stream", 0.5, late, "%", at_most=True),
        Goal("device seconds in time beside the rule alone, the least", 0.92, work),
        Goal("V100, overload: in time beside the steady depth, the least", 1.12, min(times, default=None)),
    ]


def plot(found: Found) -> Figure:
    every = panels((4 * len(CASES) + 1, 6), len(CASES), 2)
    styles = {DEPTHS[0]: (GREY, ":"), DEPTHS[1]: ("#555555", "--"), ENDS: (BLUE, "-"), PASSES: (RED, "-")}
    for axes, (lengths, case) in zip(every, product(("equal", "mixed"), CASES), strict=True):
        for rule, (colour, line) in styles.items():
            told = all_of(found, case=case.name, lengths=lengths, rule=rule)
            rates = [one["rate"] for one in told]
            axes.plot(rates, [one["work"] for one in told], line, marker="o", markersize=4, color=colour, label=rule)
            if rule in PLAIN:
                axes.plot(rates, [one["plain_work"] for one in told], "x", color=colour, label=PLAIN[rule])
        axes.set(title=f"{case.name}, {lengths}", xlabel="offered/s", ylim=(0, None))
        axes.title.set_fontsize(9)
    whole = figure_of(every)
    whole.supylabel("device seconds in time, each second")
    whole.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return whole
