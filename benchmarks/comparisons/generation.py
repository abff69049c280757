"""Generation in virtual time: windve's admission and steps (`StepScheduler`) over simulated devices.

A generation is late if it was admitted and its first token missed the deadline, or an answer was slower than promised.
Goodput counts what was in time, in generations and in tokens. The bound is the same rule with certainty: it knows how
long each answer will be, steps take exactly the predicted time, and it keeps no margin. There is no network or Router.

In one test, two tenants send a device twice its capacity, one of them ten times as much as the other. In another one,
conversations go on for eight turns, with and without the blocks of their earlier turns. In a third one, an L4
(`emulated_devices`) gets more than it can do, with answers of about 100 tokens, for which clients allow more or less.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure

from benchmarks.kit.bench import Bench, Found, all_of, one_of
from benchmarks.kit.figures import BLUE, RED, figure_of, panels
from benchmarks.kit.goal import Goal
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation.step_world import (
    Arrival,
    Certain,
    Sent,
    StepDevice,
    StepTable,
    StepWorld,
    Times,
    conversations,
    mixed,
)
from deployments.admission.fair_share import Tenant
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepTime

POLICY = StepPolicy(ttft_s=2.0, tpot_s=0.1)
NOISE, _SLOW, _NOISY = 0.03, 1.3, 0.1
_SECONDS, _QUICK_SECONDS = 90.0, 20.0
_SERVED = 0.95  # of a Poisson stream at capacity, by the bound
LOADS = (0.5, 1.0, 1.5, 3.0)
_LONG = 1000  # tokens: above, a prompt is a long one
_QUIET, _LOUD = 2 / 11, 20 / 11  # of the capacity, that the two tenants ask for
_WARM_S = 200.0  # until as many conversations go on as later
_TALKS = [(blocks, turns_s) for blocks in (320, 1000, 3000) for turns_s in (2.0, 4.0, 8.0)]
_SAME, _LONGER, _ALL = "as learned", "a tenth of the time four times as long", "a tenth of the time all to the maximum"
CHANGES = {_SAME: 1.0, _LONGER: 4.0, _ALL: 1e9}
MAXIMA = (256, 1024, 4096, 8192)
PRODUCT, SLOWER, NOISIER = "product", "1.3 x slower from a third on", "scatter 10 %"


class Table(Times, Protocol):
    """A device's true times, and what a scheduler would learn of them from noisy steps."""

    def fitted(self, noise: float) -> StepTime: ...


@dataclass(frozen=True, slots=True)
class Pool:
    """A device: its times and the blocks of its cache."""

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
    with bench.steps(len(CASES) * (2 + 2 * len(LOADS)) + len(_TALKS)) as step:
        _allowed(bench, seconds)
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
        for blocks, turns_s in _TALKS:
            step(f"conversations, {blocks} blocks, {turns_s:g} turns/s")
            _conversations(bench, Pool(_ACCELERATOR.table, blocks), turns_s, seconds)


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
    """The arrivals of a small tenant (Poisson) and of a large one (Poisson or in `bursts`)."""
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


def _conversations(bench: Bench, pool: Pool, turns_s: float, seconds: float) -> None:
    come = conversations(turns_s, _WARM_S + seconds)
    told = {}
    for how, arrivals in (("cached", come), ("anew", [one._replace(talk=None) for one in come])):
        every = served({"accelerator": pool}, arrivals, noise=NOISE)
        sent = [one for one in every if one.arrival.at >= _WARM_S]
        admitted = [one for one in sent if one.came_at is not None]
        share = sum(one.cached for one in admitted) / sum(one.prompt_tokens for one in admitted)
        first_s = statistics.median((one.came_at or 0.0) - one.arrival.at for one in admitted)
        told[how] = told_of(sent, seconds) | {"share": share, "first_s": first_s}
    shown = ", ".join(f"{how} {one['tokens']:.0f} tokens/s in time" for how, one in told.items())
    bench.sample({"what": "conversations", "blocks": pool.blocks, "turns_s": turns_s}, told, shown)


def served(
    pools: Mapping[str, Pool],
    arrivals: Sequence[Arrival],
    *,
    certain: bool = False,
    noise: float = 0.0,
    slow_from: float | None = None,
) -> list[Sent]:
    """Simulate the arrivals; returns each outcome. `certain`: steps take exactly the predicted time."""
    devices = []
    for number, (name, pool) in enumerate(pools.items()):
        model = pool.table.fitted(NOISE)
        if certain:
            schedule = StepScheduler(model, POLICY, pool.blocks, Certain(), Certain())
            devices.append(StepDevice(name, model, schedule))
            continue
        device = StepDevice(name, pool.table, StepScheduler(model, POLICY, pool.blocks), noise, seed=number)
        if slow_from is not None:
            device.slow = lambda now: _SLOW if now >= slow_from else 1.0
        devices.append(device)
    return StepWorld(devices, POLICY).run(arrivals)


def _allowed(bench: Bench, seconds: float) -> None:
    for most in MAXIMA:
        for change, times in CHANGES.items():
            found, preempted = with_maximum(most, seconds, times)
            told = {**told_of(found, seconds), "preempted": preempted}
            shown = f"{told['tokens']:.0f} tokens/s in time, {told['late']:.2%} late, {preempted} preempted"
            bench.sample({"what": "maximum", "most": most, "change": change}, told, shown)


def with_maximum(most: int, seconds: float, times: float = 1.0, *, rate: float = 9.0) -> tuple[list[Sent], int]:
    """Serve answers of about 100 tokens on an L4, each with `most` as its maximum; from a half on for a tenth of the
    time `times` as long. Returns each outcome, and how often an answer lost its blocks.
    """
    device, draw, come, at = EMULATED_ACCELERATORS["l4-llama-3.1-8b"], np.random.default_rng(1), list[Arrival](), 0.0
    while (at := at + draw.exponential(1 / rate)) < seconds:
        longer = times if 0.5 < at / seconds < 0.6 else 1.0
        come.append(
            Arrival(at, int(draw.integers(448, 577)), most, (min(most, round(longer * draw.integers(90, 111))),))
        )
    schedule = StepScheduler(device.step_time, POLICY, device.blocks)
    world = StepWorld([StepDevice("L4", device.step_time, schedule, NOISE)], POLICY)
    return world.run(come), schedule.preemptions


def _known(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [one._replace(most_tokens=max(one.tokens)) for one in arrivals]


def capacity_of(pools: Mapping[str, Pool], seconds: float) -> float:
    """The rate of a Poisson stream, in generations/s, that the bound serves almost completely."""
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
    """The share of prompts with `least` to `most` tokens that was refused."""
    some = [one for one in sent if least < one.arrival.prompt_tokens <= most]
    return sum(one.device is None for one in some) / max(1, len(some))


# --- tables and goals ---------------------------------------------------------------------------------------------

_STREAM = {"arrivals": "{arrivals}", "load": "{load:g} x"}


def _streams(found: Found, **about: Any) -> list[dict[str, Any]]:
    """Rows with windve's results beside the bound's."""
    streams = all_of(found, what="stream", rule=PRODUCT, **about)
    shares = ({f"{key}_share": one[key] / one["bound"][key] for key in ("goodput", "tokens")} for one in streams)
    return [one | share for one, share in zip(streams, shares, strict=True)]


def sheets(found: Found) -> list[Sheet]:
    columns = {
        **_STREAM, "offered": "{offered}", "in time": "{goodput:.2f}/s", "of the bound's": "{goodput_share:.2f}",
        "tokens/s": "{tokens:.0f}", "of its bound's": "{tokens_share:.2f}", "late, first": "{late_first}",
        "pace": "{late_pace}", "refused above 1,000 tokens": "{long:.0%}", "up to 200": "{short:.0%}",
    }  # fmt: skip
    shown = []
    for case in CASES:
        rate = (one_of(found, what="capacity", case=case) or {"rate": float("nan")})["rate"]
        promise = f"first token within {POLICY.ttft_s:g} s, {POLICY.tpot_s:g} s a token"
        title = f"{case}: capacity {rate:.1f} generations/s; {promise}"
        shown.append(table(title, columns, _streams(found, case=case)))
    return [*shown, _maxima(found), _doubts(found), _shares(found), _talks(found)]


def _maxima(found: Found) -> Sheet:
    columns = {
        "max_tokens": "{most}", "answers": "{change}", "admitted": "{admitted} of {offered}",
        "tokens/s in time": "{tokens:.0f}", "late": "{late:.2%}", "lost their blocks": "{preempted}",
    }  # fmt: skip
    title = "Answers of about 100 tokens on an L4 by its data sheet (Llama-3.1-8B), by the maximum that clients allow"
    return table(title, columns, all_of(found, what="maximum"))


def _doubts(found: Found) -> Sheet:
    rules = (PRODUCT, SLOWER, NOISIER)
    columns = {"devices": "{case}", **_STREAM}
    columns |= {rule: f"{{{n}[goodput]:.2f}}/s, {{{n}[late]:.2%}} late" for n, rule in zip("abc", rules, strict=True)}
    rows = []
    for one in _streams(found):
        about = {key: one[key] for key in ("case", "arrivals", "load")}
        told = (one_of(found, what="stream", rule=rule, **about) for rule in rules)
        rows.append({**about, **dict(zip("abc", told, strict=True))})
    return table("Devices that become slower, or scatter more", columns, rows)


def _shares(found: Found) -> Sheet:
    columns = {
        "devices": "{case}", "the loud one's arrivals": "{arrivals}", "quiet, admitted": "{of_quiet:.1%}",
        "loud": "{of_loud:.1%}", "both, without names": "{of_unnamed:.1%}", "late": "{all[late]:.2%}",
        "tokens/s, with names / without": "{times:.2f}",
    }  # fmt: skip
    rows = []
    for one in all_of(found, what="tenants"):
        of = {f"of_{name}": _admitted(one[name]) for name in ("quiet", "loud", "unnamed")}
        rows.append({**one, **of, "times": one["all"]["tokens"] / one["unnamed"]["tokens"]})
    return table("Two tenants at twice the capacity, one of them asking for ten times as much", columns, rows)


def _talks(found: Found) -> Sheet:
    columns = {
        "blocks": "{blocks}", "turns/s": "{turns_s:g}", "of the prompts' tokens cached": "{cached[share]:.0%}",
        "admitted, with / without": "{of_cached:.0%} / {of_anew:.0%}",
        "tokens/s in time": "{cached[tokens]:.0f} / {anew[tokens]:.0f}",
        "median first token": "{cached[first_s]:.2f} s / {anew[first_s]:.2f} s",
        "late": "{cached[late]:.2%} / {anew[late]:.2%}",
    }  # fmt: skip
    rows = [
        {**one, **{f"of_{how}": _admitted(one[how]) for how in ("cached", "anew")}}
        for one in all_of(found, what="conversations")
    ]
    return table("Conversations on the accelerator, with and without the blocks of their earlier turns", columns, rows)


def _admitted(told: Mapping[str, Any]) -> float:
    return float(told["admitted"] / max(1, told["offered"]))


def goals(found: Found) -> list[Goal]:
    streams = _streams(found)
    late = max((100 * one["late"] for one in streams), default=None)
    least = min((one["tokens_share"] for one in streams), default=None)
    tokens = {one["most"]: one["tokens"] for one in all_of(found, what="maximum", change=_SAME)}
    quiet = min((_admitted(one["quiet"]) for one in all_of(found, what="tenants")), default=None)
    return [
        Goal("late of admitted, any stream", 0.5, late, "%", at_most=True),
        Goal("tokens in time beside the bound, the least", 0.95, least),
        Goal("tokens with max_tokens 4096 beside 256", 0.9, tokens[4096] / tokens[256] if tokens else None),
        Goal("the quiet tenant's generations admitted", 0.99, quiet),
    ]


def plot(found: Found) -> Figure:
    every, most = panels((9, 4.4), len(CASES)), 0.0
    for axes, case in zip(every, CASES, strict=True):
        for arrivals, colour in (("Poisson", BLUE), ("bursts", RED)):
            some = _streams(found, case=case, arrivals=arrivals)
            loads = [one["load"] for one in some]
            axes.plot(loads, [one["tokens"] for one in some], marker="o", color=colour, label=arrivals)
            bounds = [one["bound"]["tokens"] for one in some]
            axes.plot(loads, bounds, ":x", color=colour, label=f"{arrivals}, the bound")
            most = max(most, *bounds, *(one["tokens"] for one in some))
        axes.set(title=case, xlabel="times capacity")
    for axes in every:  # all data is in it, and both panels compare
        axes.set_ylim(0, 1.08 * most)
    every[0].set_ylabel("tokens in time, each second")
    every[0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure_of(every)
