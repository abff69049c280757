"""Computes and prints how many devices a demand needs, with and without the CPU's help, from a finished report. It
measures nothing and contacts no service.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from calibration.report.report_model import CalibrationReport, read_document
from calibration.report.tables import POOLS, Sheet, percent, plain, print_sheet
from deployments.errors import SettingsError
from deployments.hardware.device_detector import ACCELERATOR, CPU

EMULATED = "The report is of EMULATED devices: the plan shows the method, not what real devices need."


@dataclass(frozen=True, slots=True)
class Instance:
    """All replicas of all pools of the report in `path`, which serve together: plans multiply it. `cpu_idle`: why the
    CPU takes no queries beside the accelerator, or None. A pool is None if the report does not have it. The CPU's is
    also None if it has no curve and takes no queries.
    """

    path: Path
    report: CalibrationReport
    accelerator: PoolCapacity | None
    cpu: PoolCapacity | None
    cpu_idle: str | None

    @classmethod
    def read(cls, path: Path) -> Instance:
        """The instance of the report in `path`, a report.json or its folder. Raises SettingsError that says what is
        wrong with the report.
        """
        path, document = read_document(path)
        report = CalibrationReport.parse(document)
        if report.outcome == "estimated":
            raise SettingsError(
                "REPORT", f"{path} has estimates that were not proven: calibrate without --estimate-only"
            )
        if report.outcome == "refused":
            reason = f"the calibration failed: {plain(report.reason or 'it gives no reason').rstrip('.')}"
            raise SettingsError("REPORT", f"{path} has no depths to plan with, because {reason}")
        accelerator, cpu = _pool(report, ACCELERATOR), _pool(report, CPU)
        if accelerator is None and cpu is None:
            raise SettingsError("REPORT.pools", "has neither an accelerator nor a CPU with a curve")
        instance = cls(path, report, accelerator, cpu, _cpu_idle(report, cpu) if accelerator else None)
        if not instance.base.capacity:
            depth = f"depth 0 at an SLO of {report.settings.slo_s:g} s"
            raise SettingsError("REPORT", f"{path} gives the {instance.base_name} {depth}: nothing to plan with")
        return instance

    @property
    def base(self) -> PoolCapacity:
        """The pool to buy: the accelerator, or the CPU if there is no accelerator."""
        pool = self.accelerator or self.cpu
        assert pool is not None
        return pool

    @property
    def base_name(self) -> str:
        return POOLS[ACCELERATOR if self.accelerator else CPU]

    @property
    def helper(self) -> PoolCapacity | None:
        """The CPU, if it takes the accelerator's overflow."""
        return self.cpu if self.accelerator is not None and self.cpu_idle is None else None


def _pool(report: CalibrationReport, name: str) -> PoolCapacity | None:
    """The pool with its curve and depth; None if there is no curve."""
    found = report.pools.get(name)
    if found is None:
        return None
    if found.curve is None and found.depth:
        raise SettingsError(f"REPORT.pools.{name}", "has a depth but no alpha_s and beta_s")
    if found.curve is not None and not found.curve.latency_s(1):
        raise SettingsError(f"REPORT.pools.{name}", "has a curve that takes no time")
    return PoolCapacity(found.curve, found.depth or 0, found.replicas) if found.curve else None


def _cpu_idle(report: CalibrationReport, cpu: PoolCapacity | None) -> str | None:
    """Why the CPU takes no queries, in the report's words if it has any; None if it takes some."""
    if report.capacity(CPU):
        return None
    if report.cpu_overflow.reason:
        return plain(report.cpu_overflow.reason).rstrip(".")
    if CPU not in report.pools:
        return "the report has no CPU pool"
    if cpu is not None and cpu.capacity:
        return "it was not in use when the report was made"
    slo_s, shape = report.settings.slo_s, report.settings.shape
    if cpu is not None and (alone_s := cpu.curve.latency_s(1, shape)) > slo_s:
        return f"a single query takes it up to {alone_s:.2f} s, longer than the SLO of {slo_s:g} s (Eq. 11)"
    return "its queue depth is 0"


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
    base, helper = instance.base, instance.helper
    slo_s, shape = instance.report.settings.slo_s, instance.report.settings.shape
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
    settings = instance.report.settings
    console.print(Text(f"From {instance.path}: SLO {settings.slo_s:g} s, {settings.shape} traffic.", style="dim"))
    for note in _notes(plan):
        console.print(Text(note, style="yellow"))
    console.print()
    bound, slos = _bound(plan, plan.bound) if plan.bound else None, _slos(plan) if plan.slos else None
    for sheet in (_purchase(plan), bound, slos):
        if sheet is not None:
            print_sheet(console, sheet)


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
        if math.isclose(row.slo_s, plan.instance.report.settings.slo_s):
            styles[number] = "bold"
    return Sheet("What another SLO would allow (Eq. 23)", columns, rows, _lines(_slos_notes(plan)), styles)


def _slos_notes(plan: CapacityPlan) -> Iterator[str]:
    instance, cpu = plan.instance, plan.instance.cpu
    alone_s = cpu.curve.latency_s(1, instance.report.settings.shape) if cpu else 0.0
    verified = " + ".join(f"{pool.capacity:,}" for pool in (instance.accelerator, cpu) if pool is not None)
    yield f"One instance, by the fitted curves; verified at {instance.report.settings.slo_s:g} s: {verified}."
    if instance.helper is None and alone_s > instance.report.settings.slo_s:
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
