"""Computes and prints how many devices a demand needs, with and without the CPU's help.

It reads a finished report (`instance`) and calculates (`cost`). It measures nothing and contacts no service.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from calibration.planning.cost import (
    SLO_FACTORS,
    Bound,
    Deployment,
    PoolCapacity,
    Sizing,
    SloRow,
    gain_bound,
    queries_per_window,
    size,
    slo_effect,
)
from calibration.planning.instance import Instance
from calibration.report.tables import POOLS, Sheet, percent, print_sheet
from calibration.report.worth import core_worth_sheet

EMULATED = "The report is of EMULATED devices: the plan shows the method, not what real devices need."


@dataclass(frozen=True, slots=True)
class TrafficDemand:
    """The demand. `price`: of one device, in `currency`. `devices` None: one per replica of the report."""

    peak: int
    average: float
    price: float
    devices_per_instance: int | None = None
    currency: str = "EUR"


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The plan. `windows`: Eq. 4's n without and with the CPU. What the report does not tell is None or empty."""

    instance: Instance
    demand: TrafficDemand
    devices_per_instance: int
    peak: Sizing
    average: Sizing
    windows: tuple[int, int]
    bound: Bound | None
    slos: Sequence[SloRow]


def make_plan(instance: Instance, demand: TrafficDemand) -> CapacityPlan:
    """Compute all figures of the plan. Pure."""
    base, helper, slo_s, shape = instance.base, instance.helper, instance.slo_s, instance.shape
    devices = demand.devices_per_instance or base.replicas
    added_capacity, added_rate = (helper.capacity, helper.throughput(shape)) if helper else (0, 0.0)
    rate = base.throughput(shape)
    # A latency that does not rise allows no conclusion about other SLOs.
    accelerator, cpu = (pool if pool and pool.curve.rises else None for pool in (instance.accelerator, instance.cpu))
    slos_s = [factor * slo_s for factor in SLO_FACTORS]
    return CapacityPlan(
        instance,
        demand,
        devices,
        peak=size(demand.peak, base.capacity, added_capacity, devices, demand.price),
        average=size(demand.average, rate, added_rate, devices, demand.price),
        windows=(queries_per_window(slo_s, 1.0 / rate), queries_per_window(slo_s, 1.0 / (rate + added_rate))),
        bound=gain_bound(accelerator, cpu) if accelerator and cpu else None,
        slos=slo_effect(accelerator, cpu, slos_s, shape) if base.curve.rises else [],
    )


def show(plan: CapacityPlan, console: Console) -> None:
    """Print the conclusion, what to buy, and what it depends on, for a terminal of 100 columns."""
    instance = plan.instance
    console.print(Text(conclusion(plan), style="bold green"))
    console.print(Text(f"From {instance.path}: SLO {instance.slo_s:g} s, {instance.shape} traffic.", style="dim"))
    for note in _notes(plan):
        console.print(Text(note, style="yellow"))
    console.print()
    print_sheet(console, _purchase(plan))
    if plan.bound:
        print_sheet(console, _bound(plan, plan.bound))
    if plan.slos:
        print_sheet(console, _slos(plan))
    if worth := core_worth_sheet(instance.report):
        print_sheet(console, worth)


def conclusion(plan: CapacityPlan) -> str:
    instance, demand = plan.instance, plan.demand
    peak = f"a peak of {demand.peak:,} {'query' if demand.peak == 1 else 'queries'} at once"
    average = f"an average of {demand.average:,.10g} queries/s"
    if instance.helper:
        return (
            f"For {peak}, the CPU's help saves {_saved(plan, plan.peak)}; for {average}, {_saved(plan, plan.average)}."
        )
    needs = (
        f"{_devices(plan.peak.alone)} ({_money(plan, plan.peak.alone.cost)}) for {peak} and "
        f"{_devices(plan.average.alone)} ({_money(plan, plan.average.alone.cost)}) for {average}"
    )
    if instance.accelerator is None:
        return f"Without an accelerator in the report, the CPU alone serves: {needs}."
    return f"The accelerators alone need {needs}; the CPU does not help: {instance.cpu_idle}."


def _notes(plan: CapacityPlan) -> Iterator[str]:
    """Caveats about the figures."""
    if plan.instance.report.application.emulated:
        yield EMULATED
    if plan.average.together.devices > plan.peak.together.devices:
        yield "The average takes more devices than the peak: deploy for the average, it serves both."
    if not plan.slos:
        yield "The measured latency does not rise with concurrency, so nothing is said of other SLOs."


def _saved(plan: CapacityPlan, sized: Sizing) -> str:
    if not sized.saved.devices:
        return f"nothing ({_devices(sized.alone)} either way)"
    return (
        f"{sized.saved.devices:,} of {_devices(sized.alone)} "
        f"({_money(plan, sized.saved.cost)}, {percent(sized.saved_share)})"
    )


def _purchase(plan: CapacityPlan) -> Sheet:
    """Eq. 6 and 5, each without and with the CPU."""
    instance, demand = plan.instance, plan.demand
    rows: list[Sequence[str]] = []
    styles = {}
    for title, sized, unit in (
        (f"peak: {demand.peak:,} queries at once (Eq. 6)", plan.peak, "at once"),
        (f"average: {demand.average:,.10g} queries/s (Eq. 5)", plan.average, "per s"),
    ):
        if rows:
            rows.append([])
        styles[len(rows)] = "bold cyan"
        rows.append([title])
        rows.append([f"  {instance.base_name} alone", f"{_figure(sized.each_alone)} {unit}", *_bought(sized.alone)])
        if instance.helper:
            rows.append(["  with the CPU's help", f"{_figure(sized.each_together)} {unit}", *_bought(sized.together)])
            styles[len(rows)] = "bold green" if sized.saved.devices else "bold"
            rows.append([f"  saved: {percent(sized.saved_share)}", "", *_bought(sized.saved)])
    columns = ["", "one instance does", "instances", "devices", f"cost, {demand.currency}".rstrip(", ")]
    return Sheet("What to buy", columns, rows, _lines(_purchase_notes(plan)), styles)


def _purchase_notes(plan: CapacityPlan) -> Iterator[str]:
    sized = plan.average
    if plan.instance.helper:
        yield (
            f"Only whole instances are bought; with many, the saving nears {percent(plan.peak.saved_share_limit)} "
            f"(peak) and {percent(sized.saved_share_limit)} (average)."
        )
        yield "The CPUs are in the servers anyway and cost nothing more."
    fit = sized.together.instances * plan.peak.each_together
    yield f"Bought for the average, {_devices(sized.together)} take {fit:,} queries at once; more are refused."
    yield f"While a query waits as long as it may, its instance answers {plan.windows[1]:,} others (Eq. 4)."


def _bound(plan: CapacityPlan, bound: Bound) -> Sheet:
    """Eq. 19, and Eq. 15 that it rests on."""
    accelerator, cpu = plan.instance.accelerator, plan.instance.cpu
    assert accelerator is not None
    assert cpu is not None
    betas = f"{cpu.curve.beta_s:.3g} s against {accelerator.curve.beta_s:.3g} s"
    rows = [
        ["alpha accelerator / alpha CPU, the limit (Eq. 19)", percent(bound.limit)],
        ["depth CPU / depth accelerator, measured", percent(bound.measured)],
        ["beta CPU above beta accelerator, the premise (Eq. 15)", f"{'yes' if bound.premise else 'no'}, {betas}"],
    ]
    notes = _lines(_bound_notes(bound, accelerator, cpu))
    return Sheet("How much the CPU can add", ["", "this report"], rows, notes, {1: "bold"})


def _bound_notes(bound: Bound, accelerator: PoolCapacity, cpu: PoolCapacity) -> Iterator[str]:
    if (accelerator.replicas, cpu.replicas) != (1, 1):
        yield f"All replicas counted: {cpu.replicas:,} on CPUs beside {accelerator.replicas:,} on accelerators."
    if not bound.premise:
        yield "The premise does not hold for these devices, so the limit need not hold either:"
        yield "a looser SLO only brings what the CPU adds closer to it, from above."
    elif bound.below:
        yield f"The limit holds: no SLO, however loose, lets this CPU add more than {percent(bound.limit)}."
    else:
        yield "The verified depths pass the limit: they were measured and lie off the fitted lines,"
        yield "as the paper's own do (22 / 96 is 22.9 %, against 21 %)."


def _slos(plan: CapacityPlan) -> Sheet:
    """Eq. 23."""
    pools = [name for name in POOLS if getattr(plan.slos[0], name) is not None]
    both = len(pools) == 2
    columns = ["SLO, s", *(f"{POOLS[name]}, at once" for name in pools), *(["the CPU adds"] if both else [])]
    rows, styles = [], {}
    for number, row in enumerate(plan.slos):
        depths = [f"{getattr(row, name):,}" for name in pools]
        rows.append([f"{row.slo_s:g}", *depths, *([percent(row.gain)] if both else [])])
        if math.isclose(row.slo_s, plan.instance.slo_s):
            styles[number] = "bold"
    return Sheet("What another SLO would allow (Eq. 23)", columns, rows, _lines(_slos_notes(plan)), styles)


def _slos_notes(plan: CapacityPlan) -> Iterator[str]:
    instance, cpu = plan.instance, plan.instance.cpu
    alone_s = cpu.curve.latency_s(1, instance.shape) if cpu else 0.0
    verified = " + ".join(f"{pool.capacity:,}" for pool in (instance.accelerator, cpu) if pool is not None)
    yield f"One instance, by the fitted curves; verified at {instance.slo_s:g} s: {verified}."
    if instance.helper is None and alone_s > instance.slo_s:
        yield f"The CPU answers a first query from an SLO of {alone_s:.3g} s on (Eq. 11)."
    gains = [row.gain for row in plan.slos if row.gain is not None]
    if plan.bound and plan.bound.premise and gains != sorted(gains):
        yield "Where the share dips, it is the rounding to whole queries."


def _lines(notes: Iterable[str]) -> str:
    """Notes as a caption below the table."""
    return "\n".join(f"  {note}" for note in notes)


def _bought(bought: Deployment) -> tuple[str, str, str]:
    return f"{bought.instances:,}", f"{bought.devices:,}", _sum(bought.cost)


def _devices(bought: Deployment) -> str:
    return f"{bought.devices:,} device{'' if bought.devices == 1 else 's'}"


def _money(plan: CapacityPlan, amount: float) -> str:
    return f"{_sum(amount)} {plan.demand.currency}".rstrip()


def _sum(amount: float) -> str:
    return f"{amount:,.2f}".removesuffix(".00")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"
