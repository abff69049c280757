"""Rules of admission in virtual time: the product's Router, Runner and Schedule over one node's emulated devices.

By predicted finish, with answers at the run's end and pass by pass; by depth (the paper's), for bursts and for streams;
and the plain rules by themselves (`simulation/rules.py`: no margin, no learning, no network). Late is who was admitted
and answered after the deadline; goodput is what was answered in time, of a stream's whole length.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from matplotlib.figure import Figure

from benchmarks.costs import decision_cost
from benchmarks.kit.bench import Bench, Found, median
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.sheet import Sheet
from tests.kit.simulation.application import Application, Ended, Shape
from tests.kit.simulation.arrivals import QUERY_TOKENS, Arrival, poisson
from tests.kit.simulation.device import Device
from tests.kit.simulation.rules import goodput
from tests.kit.virtual_time import run as run_virtual

_TURNS = 10**9
RATIO = 3.0  # long queries are refused at most so many times as often as short ones
_LONG, _SHORT = 200, 50  # tokens: more is long, fewer is short
_NOISE, _SLOW = 0.03, 1.5
_RETURNS, _RETRY_LOAD = 0.05, 1.5
_PATIENT_S, _PATIENT_RATE, _PROMPT_RATE = 20.0, 60.0, 20.0

DEPTHS = ("depth, burst", "depth, steady")
ENDS, PASSES, NOISY, SLOWER = "finish", "finish, pass by pass", "the same, noise 3 %", "the same, 1.5 x slower"
RULES = (*DEPTHS, ENDS, PASSES, NOISY, SLOWER)
PLAIN = {ENDS: "rule alone", PASSES: "rule alone, pass by pass"}


@dataclass(frozen=True, slots=True)
class Case:
    """`seconds` of a stream are simulated; noise and slow-down at the third of the rates."""

    name: str
    slo_s: float
    curves: Mapping[str, tuple[float, float]]
    pass_queries: int
    rates: tuple[float, ...]
    seconds: float


_V100, _XEON, _MINILM = (0.018, 0.27), (0.0858, 0.32), (0.0039, 0.03)
CASES = (
    Case("V100, SLO 1 s", 1.0, {"accelerator": _V100}, 8, (22, 42, 61, 125), 40.0),
    Case("V100 + Xeon, SLO 2 s", 2.0, {"accelerator": _V100, "cpu": _XEON}, 8, (35, 60, 80, 150), 40.0),
    Case("MiniLM on two cores, SLO 1 s", 1.0, {"cpu": _MINILM}, 16, (128, 231, 282, 577), 10.0),
)


def run(bench: Bench) -> None:
    import ray.serve  # noqa: F401 - it sets its logger's level as it is imported

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    cases = CASES[:1] if bench.quick else CASES
    streams = [(case, rate, mixed) for case in cases for mixed in (False, True) for rate in case.rates]
    with bench.steps(len(streams) + 4) as step:
        step("one admission decision")
        with bench.turn():
            told = bench.measure(decision_cost.admission)
        bench.sample({"what": "decision"}, told, f"p50 {told['p50_us']:.2f} us, p99 {told['p99_us']:.2f} us")
        for case, rate, mixed in streams:
            step(f"{case.name}, {rate:g}/s, {_lengths(mixed=mixed)}")
            _stream(bench, case, rate, mixed=mixed)
        step("Retry-After")
        for rule in (ENDS, PASSES):
            _retry(bench, rule)
        step("who can wait beside who cannot")
        for rule in (ENDS, PASSES):
            _beside(bench, rule)


def _lengths(*, mixed: bool) -> str:
    return "mixed" if mixed else "equal"


def _devices(case: Case, rule: str) -> dict[str, Device]:
    size = None if rule in {*DEPTHS, ENDS} else case.pass_queries
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
    """How each query ended."""
    return _application(shape, arrivals).ended


def _application(shape: Shape, arrivals: Iterable[Arrival], returns: float = 0.0) -> Application:
    async def serve() -> Application:
        application = Application(shape)
        await application.start()
        await application.serve(arrivals, returns=returns)
        return application

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


def _retry(bench: Bench, rule: str) -> None:
    """At 1.5 times what the devices do, one client in twenty comes back when Retry-After says."""
    case = CASES[1]
    devices = _devices(case, rule)
    rate = _RETRY_LOAD * sum(device.queries_s(case.slo_s) for device in devices.values())
    found = _application(Shape(1, 1, devices, case.slo_s), poisson(rate, case.seconds), _RETURNS)
    admitted = sum(one.pool is not None for one in found.returned) / len(found.returned)
    hints = sorted(one.retry_after_s for one in found.ended if one.pool is None)
    told = {"returned": len(found.returned), "admitted": admitted, "hint_s": hints[len(hints) // 2]}
    bench.sample({"what": "retry", "rule": rule}, told, f"{admitted:.0%} of {len(found.returned)} admitted")


def _beside(bench: Bench, rule: str) -> None:
    """60/s that allow 20 s beside 20/s at the SLO."""
    case = replace(CASES[1], seconds=60.0)
    devices = _devices(case, rule)
    streams = (
        poisson(_PROMPT_RATE, case.seconds, seed=4),
        poisson(_PATIENT_RATE, case.seconds, allowed_s=_PATIENT_S, seed=5),
    )
    ended = served(Shape(1, 1, devices, case.slo_s), heapq.merge(*streams, key=attrgetter("at")))
    told = {}
    for name, allowed_s in (("urgent", case.slo_s), ("patient", _PATIENT_S)):
        kind = [one for one in ended if one.allowed_s == allowed_s]
        answered = [one for one in kind if one.pool is not None]
        told[f"{name}_admitted"] = len(answered) / len(kind)
        told[f"{name}_late"] = 1 - sum(one.in_time for one in answered) / len(answered)
        told[f"{name}_s"] = len(answered) / case.seconds
    shown = f"{told['urgent_admitted']:.1%} of those at the SLO admitted, {told['patient_admitted']:.1%} of the others"
    bench.sample({"what": "beside", "rule": rule}, told, shown)


# --- shown ------------------------------------------------------------------------------------------------------------


def _of(found: Found, **about: Any) -> dict[str, Any] | None:
    return next((s for s in found["samples"] if all(s.get(key) == value for key, value in about.items())), None)


def _cases(found: Found) -> list[Case]:
    return [case for case in CASES if _of(found, case=case.name)]


def sheets(found: Found) -> list[Sheet]:
    return [
        *(_case_sheet(found, case) for case in _cases(found)),
        _length_sheet(found),
        _noise_sheet(found),
        _others_sheet(found),
    ]


def _case_sheet(found: Found, case: Case) -> Sheet:
    head = ["offered", "lengths", *DEPTHS, ENDS, PLAIN[ENDS], PASSES, PLAIN[PASSES]]
    rows = []
    for lengths in ("equal", "mixed"):
        for rate in case.rates:
            row = [f"{rate:g}/s", lengths]
            for rule in RULES[:4]:
                told = _of(found, case=case.name, lengths=lengths, rate=rate, rule=rule)
                row.append(
                    "-" if told is None else f"{told['goodput']:.1f} ({told['work']:.2f}), {told['late']:.1%} late"
                )
                if rule in PLAIN:
                    row.append("-" if told is None else f"{told['plain']:.1f} ({told['plain_work']:.2f})")
            rows.append(row)
    return Sheet(f"{case.name}: answered in time each second (device seconds)", head, rows)


def _length_sheet(found: Found) -> Sheet:
    rows = []
    for case in _cases(found):
        for rate in case.rates:
            row = [case.name, f"{rate:g}/s"]
            for rule in (ENDS, PASSES):
                told = _of(found, case=case.name, lengths="mixed", rate=rate, rule=rule)
                if told is None:
                    continue
                times = _times(told)
                row += [
                    f"{told['refused_long']:.0%} and {told['refused_short']:.0%}",
                    "-" if times is None else f"{times:.1f}",
                ]
            rows.append(row)
    head = ["devices", "offered", ENDS, "ratio", PASSES, "ratio"]
    return Sheet(f"Mixed lengths: refused of queries above {_LONG} tokens and of those below {_SHORT}", head, rows)


def _times(told: Mapping[str, Any]) -> float | None:
    """How many times as often long queries are refused as short ones."""
    few = 0.01
    if told["refused_long"] is None or told["refused_long"] < few:
        return None
    return float(told["refused_long"] / max(few, told["refused_short"]))


def _noise_sheet(found: Found) -> Sheet:
    rows = []
    for case in _cases(found):
        for lengths in ("equal", "mixed"):
            row = [case.name, f"{case.rates[2]:g}/s, {lengths}"]
            for rule in (PASSES, NOISY, SLOWER):
                told = _of(found, case=case.name, lengths=lengths, rate=case.rates[2], rule=rule)
                row.append("-" if told is None else f"{told['goodput']:.1f}, {told['late']:.1%} late")
            rows.append(row)
    return Sheet("A device that is noisy, or slower than its model says", ["devices", "offered", *RULES[3:]], rows)


def _others_sheet(found: Found) -> Sheet:
    rows = []
    for rule in (ENDS, PASSES):
        retry, beside = _of(found, what="retry", rule=rule), _of(found, what="beside", rule=rule)
        if retry is None or beside is None:
            continue
        rows.append(
            [
                rule,
                f"{retry['admitted']:.0%} of {retry['returned']}, told to wait {retry['hint_s']:.2f} s",
                f"{beside['urgent_admitted']:.1%}, {beside['urgent_late']:.1%} late",
                f"{beside['patient_admitted']:.1%} ({beside['patient_s']:.1f}/s), {beside['patient_late']:.1%} late",
            ]
        )
    head = ["rule", f"first returns admitted at {_RETRY_LOAD:g} times capacity", "20/s at 2 s, admitted"]
    return Sheet("V100 + Xeon, SLO 2 s: Retry-After, and long deadlines", [*head, "60/s at 20 s, admitted"], rows)


def goals(found: Found) -> list[Goal]:
    streams = [s for s in found["samples"] if s["what"] == "stream"]
    steady = [s for s in streams if s["rule"] in (ENDS, PASSES)]
    shown = [Goal("late, any stream", 0.5, max((100 * s["late"] for s in steady), default=None), "%", at_most=True)]
    for rule in (ENDS, PASSES):
        for key, plain, unit in (("goodput", "plain", "queries"), ("work", "plain_work", "device seconds")):
            shares = [s[key] / s[plain] for s in steady if s["rule"] == rule and s[plain]]
            shown.append(
                Goal(f"{rule}: {unit} in time beside the rule alone, the least", 0.92, min(shares, default=None))
            )
    for rule, wanted in ((ENDS, (1.12, 1.25)), (PASSES, (1.3, 1.35))):
        for rate, least in zip((61, 125), wanted, strict=True):
            about = {"case": CASES[0].name, "lengths": "equal", "rate": rate}
            one, depth = (_of(found, **about, rule=which) for which in (rule, DEPTHS[1]))
            times = ratio(one["goodput"], depth["goodput"]) if one and depth else None
            shown.append(Goal(f"V100, {rate}/s, {rule}: in time beside the steady depth", least, times))
    mixed = [
        ratio(one["goodput"], depth["goodput"])
        for rate in (61, 125)
        for rule in (ENDS, PASSES)
        if (one := _of(found, case=CASES[0].name, lengths="mixed", rate=rate, rule=rule))
        and (depth := _of(found, case=CASES[0].name, lengths="mixed", rate=rate, rule=DEPTHS[1]))
    ]
    shown.append(Goal("the same, mixed lengths, the least", 1.6, min((one for one in mixed if one), default=None)))
    often = [times for s in steady if s["lengths"] == "mixed" and (times := _times(s)) is not None]
    shown.append(
        Goal("long queries refused as often as short ones, the most", RATIO, max(often, default=None), at_most=True)
    )
    for what, key, least, name in (
        ("retry", "admitted", 70.0, "first returns admitted"),
        ("beside", "urgent_admitted", 95.0, "20/s at the SLO beside 60/s at 20 s, admitted"),
    ):
        found_here = [100 * s[key] for s in found["samples"] if s["what"] == what]
        shown.append(Goal(f"{name}, the least", least, min(found_here, default=None), "%"))
    p99_us = median(found, "p99_us", what="decision")
    shown.append(Goal("one admission, 1,000 waiting, p99", 5.0, p99_us, "us", at_most=True))
    return shown


def plot(found: Found) -> Figure:
    cases = _cases(found)
    figure = Figure(figsize=(4 * len(cases) + 1, 6), layout="constrained")
    grid = figure.subplots(2, len(cases), squeeze=False)
    styles = {
        DEPTHS[0]: ("#999999", ":"), DEPTHS[1]: ("#555555", "--"), ENDS: ("#0072B2", "-"), PASSES: ("#D55E00", "-"),
    }  # fmt: skip
    for column, case in enumerate(cases):
        for row, lengths in enumerate(("equal", "mixed")):
            axes = grid[row][column]
            for rule, (colour, line) in styles.items():
                told = [_of(found, case=case.name, lengths=lengths, rate=rate, rule=rule) for rate in case.rates]
                work = [one["work"] if one else float("nan") for one in told]
                axes.plot(case.rates, work, line, marker="o", markersize=4, color=colour, label=rule)
                if rule in PLAIN:
                    plain = [one["plain_work"] if one else float("nan") for one in told]
                    axes.plot(case.rates, plain, "x", color=colour, label=PLAIN[rule])
            axes.set(title=f"{case.name}, {lengths}", xlabel="offered/s", ylim=(0, None))
            axes.title.set_fontsize(9)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("device seconds in time, each second")
    grid[0][0].legend(frameon=False, fontsize=7)
    return figure
