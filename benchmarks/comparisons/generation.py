"""Generation in virtual time: the product's own admission and steps (`StepSchedule`) over devices by formula.

Late is who was admitted and had a first token behind its deadline, or an answer slower than its pace. Goodput is what
was in time, in generations and in tokens. The bound is the same rule without doubt: it knows how long each answer will
be, steps take exactly as long as it thinks, and it keeps no margin. No network and no Router are in it.

Two tenants share a device that is asked for twice its capacity, one of them for ten times as much as the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure

from benchmarks.kit.bench import Bench, Found, median
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.sheet import Sheet
from deployments.generation.scheduling.long_prompts import SHARE
from deployments.generation.scheduling.rows import Generation
from deployments.generation.scheduling.step_policy import StepPolicy
from deployments.generation.scheduling.step_schedule import StepSchedule
from deployments.generation.scheduling.step_time import StepTime
from deployments.queueing.shares import Tenant
from tests.kit.simulation.step_world import Arrival, Certain, Sent, StepDevice, StepTable, StepWorld, Times, mixed

POLICY = StepPolicy(ttft_s=2.0, tpot_s=0.1)
NOISE, _SLOW, _NOISY = 0.03, 1.3, 0.1
_SECONDS, _QUICK_SECONDS = 90.0, 20.0
_SERVED = 0.95  # of a Poisson stream at capacity, by the bound
LOADS = (0.5, 1.0, 1.5, 3.0)
_LONG = 1000  # tokens: above, a prompt is a long one
_QUIET, _LOUD = 2 / 11, 20 / 11  # of the capacity, that the two tenants ask for
PRODUCT, SLOWER, NOISIER = "product", "1.3 x slower from a third on", "scatter 10 %"


class Table(Times, Protocol):
    """A device's true times, and what a schedule would know of them that learned from steps that scatter."""

    def fitted(self, noise: float) -> StepTime: ...


@dataclass(frozen=True, slots=True)
class Pool:
    """A device by its times, with so many blocks of cache."""

    table: Table
    blocks: int


_ACCELERATOR = Pool(StepTable.of_rates(600, 60), 320)  # an A10G by its data sheet, at half of its arithmetic
_CPU = Pool(StepTable.of_rates(400, 20), 2000)  # a server of two sockets with matrix units
CASES: Mapping[str, Mapping[str, Pool]] = {
    "accelerator": {"accelerator": _ACCELERATOR},
    "accelerator + CPU": {"accelerator": _ACCELERATOR, "cpu": _CPU},
}


def run(bench: Bench) -> None:
    seconds = _QUICK_SECONDS if bench.quick else _SECONDS
    with bench.steps(1 + len(CASES) * (2 + 2 * len(LOADS))) as step:
        step("one admission decision")
        with bench.turn():
            told = bench.measure(lambda: decision_us(200 if bench.quick else 2000))
        bench.sample({"what": "decision"}, told, f"p50 {told['p50_us']:.0f} us, p99 {told['p99_us']:.0f} us")
        for case, pools in CASES.items():
            step(f"{case}, capacity")
            capacity = capacity_of(pools, seconds)
            bench.sample({"what": "capacity", "case": case}, {"rate": capacity}, f"{capacity:.1f} generations/s")
            for bursts in (False, True):
                for load in LOADS:
                    step(f"{case}, {kind_of(bursts=bursts)}, {load:g} times capacity")
                    _stream(bench, case, mixed(load * capacity, seconds, bursts=bursts), seconds, (load, bursts))
            step(f"{case}, two tenants")
            for bursts in (False, True):
                _tenants(bench, case, two_tenants(capacity, seconds, bursts=bursts), seconds, bursts=bursts)


def kind_of(*, bursts: bool) -> str:
    return "bursts" if bursts else "Poisson"


def _stream(bench: Bench, case: str, arrivals: Sequence[Arrival], seconds: float, how: tuple[float, bool]) -> None:
    about = {"case": case, "arrivals": kind_of(bursts=how[1]), "load": how[0]}
    bound = told_of(served(CASES[case], _known(arrivals), certain=True), seconds)
    for rule in (PRODUCT, SLOWER, NOISIER):
        slow_from = seconds / 3 if rule == SLOWER else None
        noise = _NOISY if rule == NOISIER else NOISE
        told = told_of(served(CASES[case], arrivals, noise=noise, slow_from=slow_from), seconds)
        shown = f"{told['goodput']:.2f} of {bound['goodput']:.2f}/s in time, {told['late']:.2%} late"
        bench.sample({"what": "stream", **about, "rule": rule}, {**told, "bound": bound}, shown)


def two_tenants(capacity: float, seconds: float, *, bursts: bool) -> list[Arrival]:
    """Of a quiet tenant, a Poisson stream; and of a loud one, in `bursts` or not."""
    streams = {
        "loud": mixed(_LOUD * capacity, seconds, bursts=bursts, seed=10),
        "quiet": mixed(_QUIET * capacity, seconds, seed=11),
    }
    come = [one._replace(tenant=Tenant(name)) for name, stream in streams.items() for one in stream]
    return sorted(come, key=lambda one: one.at)


def _tenants(bench: Bench, case: str, come: Sequence[Arrival], seconds: float, *, bursts: bool) -> None:
    unnamed = served(CASES[case], [one._replace(tenant=None) for one in come], noise=NOISE)
    sent = served(CASES[case], come, noise=NOISE)
    parts = {
        name: [one for one in sent if str(getattr(one.arrival.tenant, "name", "")) == name]
        for name in ("quiet", "loud")
    }
    told = {name: told_of(part, seconds) for name, part in parts.items()}
    told |= {"all": told_of(sent, seconds), "unnamed": told_of(unnamed, seconds)}
    shown = ", ".join(f"{name} {told[name]['admitted']} of {told[name]['offered']}" for name in parts)
    bench.sample({"what": "tenants", "case": case, "arrivals": kind_of(bursts=bursts)}, told, shown)


def served(
    pools: Mapping[str, Pool],
    arrivals: Sequence[Arrival],
    *,
    certain: bool = False,
    noise: float = 0.0,
    slow_from: float | None = None,
) -> list[Sent]:
    """What became of each. `certain`: steps take as long as the schedule thinks."""
    devices = []
    for number, (name, pool) in enumerate(pools.items()):
        model = pool.table.fitted(NOISE)
        if certain:
            schedule = StepSchedule(model, POLICY, pool.blocks, Certain(), Certain())
            devices.append(StepDevice(name, model, schedule))
            continue
        device = StepDevice(name, pool.table, StepSchedule(model, POLICY, pool.blocks), noise, seed=number)
        if slow_from is not None:
            device.slow = lambda now: _SLOW if now >= slow_from else 1.0
        devices.append(device)
    return StepWorld(devices, POLICY).run(arrivals)


def _known(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [one._replace(most_tokens=max(one.tokens)) for one in arrivals]


def capacity_of(pools: Mapping[str, Pool], seconds: float) -> float:
    """Generations a second of a Poisson stream of which the bound serves nearly all."""
    low, high = 0.0, 40.0
    while high - low > 0.25:
        rate = (low + high) / 2
        sent = served(pools, _known(mixed(rate, seconds)), certain=True)
        enough = sum(one.in_time for one in sent) >= _SERVED * len(sent)
        low, high = (rate, high) if enough else (low, rate)
    return low


def told_of(sent: Sequence[Sent], seconds: float) -> dict[str, Any]:
    admitted = [one for one in sent if one.device is not None]
    good = [one for one in admitted if one.in_time]
    return {
        "offered": len(sent),
        "admitted": len(admitted),
        "by": {name: sum(one.device == name for one in admitted) for name in {one.device for one in admitted}},
        "late": (len(admitted) - len(good)) / max(1, len(admitted)),
        "late_first": sum(one.late_first for one in admitted),
        "late_pace": sum(one.late_pace for one in admitted),
        "goodput": len(good) / seconds,
        "tokens": sum(sum(one.counts.values()) for one in good) / seconds,
        "long": _refused(sent, _LONG, 1 << 20),
        "short": _refused(sent, 0, 200),
    }


def _refused(sent: Sequence[Sent], least: int, most: int) -> float:
    """The share that is refused of prompts of so many tokens."""
    some = [one for one in sent if least < one.arrival.prompt_tokens <= most]
    return sum(one.device is None for one in some) / max(1, len(some))


def decision_us(times: int) -> dict[str, float]:
    """Of one `offer` at a device with 64 answers that run and 16 prompts that wait."""
    schedule, now = StepSchedule(_CPU.table.fitted(NOISE), StepPolicy(60.0, 1.0), 10_000), 0.0
    for _ in range(64):
        schedule.offer(now, Generation(300, 500, now + 60.0, 1.0))
    while schedule.state(now).waiting:
        schedule.next_step(now)
        now += 0.1
        schedule.ended(now, 0.1)
    for _ in range(16):
        schedule.offer(now, Generation(300, 500, now + 60.0, 1.0))
    found = []
    for _ in range(times):
        one = Generation(300, 500, now + 60.0, 1.0)
        began = time.perf_counter()
        admitted = schedule.offer(now, one)
        found.append(1e6 * (time.perf_counter() - began))
        assert admitted, "the device has room"
        schedule.remove(now, one)
    return {"p50_us": float(np.quantile(found, 0.5)), "p99_us": float(np.quantile(found, 0.99))}


# --- what is shown ----------------------------------------------------------------------------------------------------


def _of(found: Found, **about: Any) -> Any:
    """The sample of these, or None."""
    wanted = about.items()
    return next((one for one in found["samples"] if all(one.get(key) == value for key, value in wanted)), None)


def sheets(found: Found) -> list[Sheet]:
    head = [
        "arrivals",
        "load",
        "offered",
        "in time",
        "of the bound's",
        "tokens/s",
        "of the bound's",
        "late, first",
        "pace",
    ]
    shown = []
    for case in CASES:
        rows = []
        capacity = _of(found, what="capacity", case=case)
        for one in found["samples"]:
            if one["what"] == "stream" and one["case"] == case and one["rule"] == PRODUCT:
                bound = one["bound"]
                rows.append([
                    one["arrivals"], f"{one['load']:g} x", str(one["offered"]), f"{one['goodput']:.2f}/s",
                    f"{one['goodput'] / bound['goodput']:.2f}", f"{one['tokens']:.0f}",
                    f"{one['tokens'] / bound['tokens']:.2f}", str(one["late_first"]), str(one["late_pace"]),
                ])  # fmt: skip
        rate = f"{capacity['rate']:.1f}" if capacity else "?"
        promise = f"first token within {POLICY.ttft_s:g} s, {POLICY.tpot_s:g} s a token"
        title = f"{case}: capacity {rate} generations/s; {promise}"
        shown.append(Sheet(title, head, rows))
    return [*shown, _doubts(found), _refusals(found), _shares(found)]


def _doubts(found: Found) -> Sheet:
    head = ["devices", "arrivals", "load", PRODUCT, SLOWER, NOISIER]
    rows = []
    for one in found["samples"]:
        if one["what"] == "stream" and one["rule"] == PRODUCT:
            about = {key: one[key] for key in ("case", "arrivals", "load")}
            cells = [_of(found, what="stream", rule=rule, **about) for rule in (PRODUCT, SLOWER, NOISIER)]
            told = [f"{cell['goodput']:.2f}/s, {cell['late']:.2%} late" if cell else "-" for cell in cells]
            rows.append([one["case"], one["arrivals"], f"{one['load']:g} x", *told])
    return Sheet("Devices that become slower, or scatter more", head, rows)


def _refusals(found: Found) -> Sheet:
    rows = [
        [one["case"], one["arrivals"], f"{one['load']:g} x", f"{one['long']:.0%}", f"{one['short']:.0%}"]
        for one in found["samples"]
        if one["what"] == "stream" and one["rule"] == PRODUCT
    ]
    head = ["devices", "arrivals", "load", "prompts above 1,000 tokens", "up to 200"]
    return Sheet("Refused, of long and of short prompts", head, rows)


def _shares(found: Found) -> Sheet:
    rows = []
    for one in found["samples"]:
        if one["what"] == "tenants":
            cells = [
                f"{one[name]['admitted'] / max(1, one[name]['offered']):.1%}" for name in ("quiet", "loud", "unnamed")
            ]
            tokens = f"{one['all']['tokens'] / one['unnamed']['tokens']:.2f}"
            rows.append([one["case"], one["arrivals"], *cells, f"{one['all']['late']:.2%}", tokens])
    head = [
        "devices",
        "the loud one's arrivals",
        "quiet, admitted",
        "loud",
        "both, without names",
        "late",
        "tokens/s, with names / without",
    ]
    return Sheet("Two tenants at twice the capacity, one of them asking for ten times as much", head, rows)


def _long_share(stream: Mapping[str, Any]) -> float:
    """Of long prompts, the share that is admitted, beside that of all."""
    return float((1 - stream["long"]) * stream["offered"] / max(1, stream["admitted"]))


def goals(found: Found) -> list[Goal]:
    streams = [one for one in found["samples"] if one["what"] == "stream" and one["rule"] == PRODUCT]
    late = [100 * one["late"] for one in streams]
    shown = [Goal("late of admitted, any stream", 0.5, max(late, default=None), "%", at_most=True)]
    for key, name in (("goodput", "generations"), ("tokens", "tokens")):
        least = min((one[key] / one["bound"][key] for one in streams if one["bound"][key]), default=None)
        shown.append(Goal(f"{name} in time beside the bound, the least", 0.95, least))
    for arrivals in ("Poisson", "bursts"):
        some = [_long_share(one) for one in streams if one["load"] == LOADS[-1] and one["arrivals"] == arrivals]
        shown.append(
            Goal(
                f"long prompts admitted at {LOADS[-1]:g} times capacity, of all's share, {arrivals}",
                SHARE,
                min(some, default=None),
            )
        )
    quiets = [one["quiet"] for one in found["samples"] if one["what"] == "tenants"]
    kept = min((one["admitted"] / one["offered"] for one in quiets if one["offered"]), default=None)
    shown.append(Goal("the quiet tenant's generations admitted", 0.99, kept))
    both = [_of(found, what="stream", arrivals="Poisson", load=3.0, rule=PRODUCT, case=case) for case in CASES]
    helped = ratio(both[1]["goodput"] / both[0]["goodput"], 1.0) if all(both) else None
    shown.append(Goal("the CPU's help at 3 times capacity of either", 1.0, helped))
    shown.append(
        Goal(
            "one admission, 64 answers and 16 prompts, p99",
            2000,
            median(found, "p99_us", what="decision"),
            "us",
            at_most=True,
        )
    )
    return shown


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    grid = figure.subplots(1, len(CASES), sharey=True)
    for axes, case in zip(grid, CASES, strict=True):
        for arrivals, colour in (("Poisson", "#0072B2"), ("bursts", "#D55E00")):
            some = [_of(found, what="stream", case=case, arrivals=arrivals, load=load, rule=PRODUCT) for load in LOADS]
            some = [one for one in some if one]
            loads = [one["load"] for one in some]
            axes.plot(loads, [one["tokens"] for one in some], marker="o", color=colour, label=arrivals)
            bounds = [one["bound"]["tokens"] for one in some]
            axes.plot(loads, bounds, ":x", color=colour, label=f"{arrivals}, the bound")
        axes.set(title=case, xlabel="times capacity", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("tokens in time, each second")
    grid[0].legend(frameon=False, fontsize=8)
    return figure
