"""`python -m calibration plan`: how many devices a demand takes with and without the CPU's help, from a report.

Reads a finished report and calculates (`calibration.cost`); it measures nothing and asks no service.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calibration.cost import (
    PARALLEL_SHARE,
    SLO_FACTORS,
    Bound,
    CoresRow,
    Deployment,
    Pool,
    Sizing,
    SloRow,
    cores_effect,
    gain_bound,
    least_cores,
    least_factor,
    queries_per_window,
    size,
    slo_effect,
)
from calibration.curve import Curve, Shape
from calibration.tables import POOLS, add_row, new_table, percent, plain
from deployments.errors import SettingsError
from deployments.settings import parse_settings

FORMAT = 1
EMULATED = "The report is of EMULATED devices: the plan shows the method, not what real devices need."
_TIMES = "\N{MULTIPLICATION SIGN}"
_MOST = 10**12  # of anything that is counted here; more is a slip of the keyboard
_Count = Annotated[int, Field(ge=1, le=_MOST)]
_Seconds = Annotated[float, Field(ge=0, le=_MOST)]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked for. `price` is in `currency` for one device; None devices: one for each replica of the report."""

    peak: int
    average: float
    price: float
    devices_per_instance: int | None = None
    currency: str = "EUR"


@dataclass(frozen=True, slots=True)
class Report:
    """What a plan needs of a report. `cpu_idle` says why the CPU takes nothing beside the accelerator, else None.

    A pool is None where the report has none, and the CPU's also where it has no curve and takes nothing.
    """

    path: Path
    slo_s: float
    shape: Shape
    emulated: bool
    accelerator: Pool | None
    cpu: Pool | None
    cpu_cores: int | None
    cpu_idle: str | None

    @property
    def base(self) -> Pool:
        """The pool that is bought: the accelerator, or the CPU where there is no other."""
        pool = self.accelerator or self.cpu
        assert pool is not None
        return pool

    @property
    def helper(self) -> Pool | None:
        """The CPU where it takes what the accelerator cannot."""
        return self.cpu if self.accelerator is not None and self.cpu_idle is None else None


@dataclass(frozen=True, slots=True)
class Cores:
    """The extrapolation to other counts of CPU cores, and the fewest with which the CPU takes a query at all."""

    rows: Sequence[CoresRow]
    least_factor: float | None
    least_cores: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `windows` is Eq. 4's n without and with the CPU; what a report cannot say is None or empty."""

    report: Report
    demand: Demand
    devices_per_instance: int
    peak: Sizing
    average: Sizing
    windows: tuple[int, int]
    bound: Bound | None
    slos: Sequence[SloRow]
    cores: Cores | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `plan`, each with what it changes."""
    parser.description = (
        "How many devices your traffic needs, with and without the CPU's help, and what that costs. Calculated from a "
        "finished calibration report: nothing is measured, no service is asked."
    )
    parser.epilog = (
        "example: at most 1000 queries at once, 400 queries/s on average, 2000 EUR for a device: "
        "python -m calibration plan calibration/report.json --peak 1000 --average 400 --price 2000"
    )
    add = parser.add_argument
    add("report", type=Path, metavar="REPORT", help="report.json of a calibration, or the folder that holds it")
    add(
        "--peak",
        type=int,
        required=True,
        metavar="N",
        help="most queries at once, in flight together: sized for it, no query waits too long and none is told busy",
    )
    add(
        "--average",
        type=float,
        required=True,
        metavar="N",
        help="queries per second on average: sized for it, fewer devices are busier, and bursts may be told busy",
    )
    add(
        "--price",
        type=float,
        required=True,
        metavar="P",
        help="price of one device, for any period (bought, or per month): all money in the plan is for that period",
    )
    add(
        "--devices-per-instance",
        type=int,
        default=None,
        metavar="D",
        help="devices to pay for in one instance, which is all replicas of the report; more make every instance dearer "
        "(default: one for each replica on an accelerator, or on a CPU where there is none)",
    )
    add("--currency", default="EUR", metavar="NAME", help="written behind money, nothing is converted (%(default)s)")
    add("--json", action="store_true", help="the same plan as JSON on standard output, and no tables")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the plan. Raises SettingsError, which names the option and says what is wrong with it."""
    demand = Demand(
        peak=int(_positive("--peak", arguments.peak, "queries at once")),
        average=_positive("--average", arguments.average, "queries per second"),
        price=_positive("--price", arguments.price, "the price of one device"),
        devices_per_instance=None
        if arguments.devices_per_instance is None
        else int(_positive("--devices-per-instance", arguments.devices_per_instance, "devices")),
        currency=plain(arguments.currency).strip(),
    )
    plan = make_plan(read_report(arguments.report), demand)
    if arguments.json:
        print(json.dumps(as_json(plan), indent=2, allow_nan=False))
    else:
        show(plan, console)
    return 0


def make_plan(report: Report, demand: Demand) -> Plan:
    """All the figures of the plan. Pure."""
    base, helper, shape = report.base, report.helper, report.shape
    per_instance = demand.devices_per_instance or base.replicas
    rate, added_rate = base.throughput(shape), helper.throughput(shape) if helper else 0.0
    accelerator, cpu = _rising(report.accelerator), _rising(report.cpu)
    both = accelerator is not None and cpu is not None
    return Plan(
        report,
        demand,
        per_instance,
        peak=size(demand.peak, base.capacity, helper.capacity if helper else 0, per_instance, demand.price),
        average=size(demand.average, rate, added_rate, per_instance, demand.price),
        windows=(
            queries_per_window(report.slo_s, 1.0 / rate),
            queries_per_window(report.slo_s, 1.0 / (rate + added_rate)),
        ),
        bound=gain_bound(accelerator, cpu) if accelerator and cpu else None,
        slos=slo_effect(accelerator, cpu, [factor * report.slo_s for factor in SLO_FACTORS], shape)
        if both or _rising(base)
        else [],
        cores=_cores(report, cpu, accelerator) if cpu else None,
    )


def _rising(pool: Pool | None) -> Pool | None:
    return pool if pool is not None and pool.curve.rises else None


def _cores(report: Report, cpu: Pool, accelerator: Pool | None) -> Cores:
    slo_s, shape, cores = report.slo_s, report.shape, report.cpu_cores
    capacity = accelerator.capacity_at(slo_s, shape) if accelerator else None
    factor = least_factor(cpu.curve, slo_s, shape)
    return Cores(
        cores_effect(cpu, capacity, slo_s=slo_s, shape=shape, cores=cores),
        factor,
        None if cores is None or factor is None else least_cores(cores, factor),
    )


# the report


def read_report(path: Path) -> Report:
    """Read and check `path`, a report.json or its folder. Raises SettingsError with what is wrong, in one sentence."""
    try:
        file = path / "report.json" if path.is_dir() else path
        content = file.read_bytes()
    except OSError as error:
        raise SettingsError("REPORT", f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    return _report(file, _checked(file, content))


def _checked(path: Path, content: bytes) -> Mapping[str, Any]:
    """The report as JSON, if it is one of this format and has depths."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise SettingsError("REPORT", f"{path} is not a report of the calibration, no JSON: {why}") from None
    if not isinstance(document, dict) or "format" not in document or "outcome" not in document:
        raise SettingsError("REPORT", f"{path} is not a report of the calibration: it has no format and no outcome")
    if document["format"] != FORMAT:
        raise SettingsError(
            "REPORT", f"{path} has format {plain(document['format'])}, but this version reads format {FORMAT}"
        )
    if document["outcome"] == "estimated":
        raise SettingsError("REPORT", f"{path} holds estimates that were not proven: calibrate without --estimate-only")
    if document["outcome"] != "calibrated":
        reason = plain(document.get("reason") or "it gives no reason").rstrip(".")
        raise SettingsError("REPORT", f"{path} has no depths to plan with, the calibration refused: {reason}")
    return document


class _Read(BaseModel):
    """What a plan needs of a report. The other keys may be anything."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Settings(_Read):
    slo_s: Annotated[float, Field(gt=0, le=_MOST)]
    shape: Shape


class _Pool(_Read):
    """Null depth: the pool was not tuned, it takes nothing. Such a pool may lack the curve too."""

    fine_tuned: Annotated[int, Field(ge=0, le=_MOST)] | None
    alpha_s: _Seconds | None
    beta_s: _Seconds | None
    replicas: _Count
    cores: _Count | None = None

    @model_validator(mode="after")
    def _has_a_curve(self) -> Self:
        if self.fine_tuned and None in (self.alpha_s, self.beta_s):
            raise ValueError("has a depth but no alpha_s and beta_s")
        if self.alpha_s == self.beta_s == 0:
            raise ValueError("has a curve that takes no time")
        return self

    @property
    def calibrated(self) -> Pool | None:
        if self.alpha_s is None or self.beta_s is None:
            return None
        return Pool(Curve(self.alpha_s, self.beta_s), self.fine_tuned or 0, self.replicas)


class _Pools(_Read):
    accelerator: _Pool | None = None
    cpu: _Pool | None = None


class _Document(_Read):
    application: dict[str, Any]
    settings: _Settings
    pools: _Pools
    heterogeneous: dict[str, Any]


def _report(path: Path, raw: Mapping[str, Any]) -> Report:
    document = parse_settings(_Document, raw, "REPORT")
    slo_s, pools = document.settings.slo_s, document.pools
    accelerator, cpu = (found.calibrated if found else None for found in (pools.accelerator, pools.cpu))
    base = accelerator or cpu
    if base is None:
        raise SettingsError("REPORT.pools", "has neither an accelerator nor a CPU with a curve")
    if not base.capacity:
        name = "accelerator" if accelerator else "CPU"
        raise SettingsError("REPORT", f"{path} gives the {name} depth 0 at an SLO of {slo_s:g} s: nothing to plan with")
    return Report(
        path,
        slo_s,
        document.settings.shape,
        emulated=bool(document.application.get("emulated")),
        accelerator=accelerator,
        cpu=cpu,
        cpu_cores=pools.cpu.cores if cpu and pools.cpu else None,
        cpu_idle=_cpu_idle(document, cpu) if accelerator else None,
    )


def _cpu_idle(document: _Document, cpu: Pool | None) -> str | None:
    """Why the CPU takes nothing, in the report's words where it has some; None where it takes queries."""
    mix, slo_s = document.heterogeneous, document.settings.slo_s
    if cpu is not None and cpu.capacity and mix.get("used"):
        return None
    if mix.get("reason"):
        return plain(mix["reason"]).rstrip(".")
    if document.pools.cpu is None:
        return "the report has no CPU pool"
    if cpu is not None and cpu.capacity:
        return "it was not in use when the report was made"
    if cpu is not None and (alone_s := cpu.curve.latency_s(1, document.settings.shape)) > slo_s:
        return f"a single query takes it up to {alone_s:.2f} s, longer than the SLO of {slo_s:g} s (Eq. 11)"
    return "its queue depth is 0"


def _positive(option: str, value: float, what: str) -> float:
    if not 0 < value <= _MOST:
        raise SettingsError(option, f"{what} must be above 0 and at most {_MOST:.0e}, not {str(value)[:20]}")
    return value


# as JSON


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs: the same data, units in names, shares between 0 and 1, null for what is not known."""
    report, demand, helped = plan.report, plan.demand, plan.report.helper is not None

    def sizing(sized: Sizing, **more: Any) -> dict[str, Any]:
        return {
            "alone": {"each": sized.each_alone, **asdict(sized.alone)},
            "together": {"each": sized.each_together, **asdict(sized.together)} if helped else None,
            "saved": {
                "devices": sized.saved_devices,
                "cost": sized.saved_cost,
                "share": sized.saved_share,
                "share_limit": sized.saved_share_limit,
            }
            if helped
            else None,
            **more,
        }

    return {
        "conclusion": conclusion(plan),
        "notes": list(_notes(plan)),
        "report": str(report.path),
        "emulated": report.emulated,
        "slo_s": report.slo_s,
        "shape": report.shape,
        "planned_by": _base_name(report).lower(),
        "cpu_helps": helped,
        "cpu_idle_reason": report.cpu_idle,
        "price": demand.price,
        "currency": demand.currency,
        "devices_per_instance": plan.devices_per_instance,
        "peak": sizing(plan.peak, queries_at_once=demand.peak),
        "average": sizing(
            plan.average,
            queries_per_s=demand.average,
            queries_per_window_alone=plan.windows[0],
            queries_per_window_together=plan.windows[1] if helped else None,
        ),
        "bound": {**asdict(plan.bound), "below": plan.bound.below} if plan.bound else None,
        "slos": [asdict(row) for row in plan.slos],
        "cores": {
            "measured": False,
            "parallel_share": PARALLEL_SHARE,
            "least_factor": plan.cores.least_factor,
            "least_cores": plan.cores.least_cores,
            "rows": [asdict(row) for row in plan.cores.rows],
        }
        if plan.cores
        else None,
    }


# for people


def show(plan: Plan, console: Console) -> None:
    """The conclusion, what to buy, and what it depends on, for a terminal of 100 columns."""
    report = plan.report
    console.print(Text(conclusion(plan), style="bold green"))
    console.print(Text(f"From {report.path}: SLO {report.slo_s:g} s, {report.shape} traffic.", style="dim"))
    for note in _notes(plan):
        console.print(Text(note, style="yellow"))
    console.print()
    _section(console, "What to buy", _purchase(plan), _purchase_captions(plan))
    if plan.bound:
        _section(console, "How much the CPU can add", _bound(plan, plan.bound), _bound_captions(plan, plan.bound))
    if plan.slos:
        _section(console, "What another SLO would allow (Eq. 23)", _slos(plan), _slos_captions(plan))
    if plan.cores:
        title = "What other CPU cores would do (Figure 6): EXTRAPOLATED, not measured"
        _section(console, title, _cores_table(plan, plan.cores), _cores_captions(plan, plan.cores))


def conclusion(plan: Plan) -> str:
    """The plan in one sentence."""
    report, demand = plan.report, plan.demand
    peak = f"a peak of {demand.peak:,} {'query' if demand.peak == 1 else 'queries'} at once"
    average = f"an average of {demand.average:,.10g} queries/s"
    if report.helper:
        return (
            f"For {peak}, the CPU's help saves {_saved(plan, plan.peak)}; for {average}, {_saved(plan, plan.average)}."
        )
    needs = (
        f"{_devices(plan.peak.alone)} ({_money(plan, plan.peak.alone.cost)}) for {peak} and "
        f"{_devices(plan.average.alone)} ({_money(plan, plan.average.alone.cost)}) for {average}"
    )
    if report.accelerator is None:
        return f"Without an accelerator in the report, the CPU alone serves: {needs}."
    return f"The accelerators alone need {needs}; the CPU does not help: {report.cpu_idle}."


def _notes(plan: Plan) -> Iterator[str]:
    """What one should know before one believes the figures."""
    if plan.report.emulated:
        yield EMULATED
    if plan.average.together.devices > plan.peak.together.devices:
        yield "The average takes more devices than the peak: deploy for the average, it serves both."
    if not plan.slos:
        yield "The measured latency does not rise with concurrency, so nothing is said of other SLOs."


def _saved(plan: Plan, sized: Sizing) -> str:
    if not sized.saved_devices:
        return f"nothing ({_devices(sized.alone)} either way)"
    return (
        f"{sized.saved_devices:,} of {_devices(sized.alone)} "
        f"({_money(plan, sized.saved_cost)}, {percent(sized.saved_share)})"
    )


def _purchase(plan: Plan) -> Table:
    """Eq. 6 and 5, each without and with the CPU."""
    report, demand = plan.report, plan.demand
    columns = ("", "one instance does", "instances", "devices", f"cost, {demand.currency}".rstrip(", "))
    table = new_table(columns)
    alone = f"{_base_name(report)} alone"
    for title, sized, unit in (
        (f"peak: {demand.peak:,} queries at once (Eq. 6)", plan.peak, "at once"),
        (f"average: {demand.average:,.10g} queries/s (Eq. 5)", plan.average, "per s"),
    ):
        table.add_row(Text(title, style="bold cyan"))
        add_row(table, (f"  {alone}", f"{_figure(sized.each_alone)} {unit}", *_bought(sized.alone)))
        if report.helper:
            helped = ("  with the CPU's help", f"{_figure(sized.each_together)} {unit}", *_bought(sized.together))
            add_row(table, helped)
            spared = (sized.alone.instances - sized.together.instances, sized.saved_devices)
            saved = (f"  saved: {percent(sized.saved_share)}", "", *map("{:,}".format, spared), _sum(sized.saved_cost))
            add_row(table, saved, "bold green" if sized.saved_devices else "bold")
        table.add_section()
    return table


def _purchase_captions(plan: Plan) -> Iterator[str]:
    sized = plan.average
    if plan.report.helper:
        yield (
            f"Only whole instances are bought; with many, the saving nears {percent(plan.peak.saved_share_limit)} "
            f"(peak) and {percent(sized.saved_share_limit)} (average)."
        )
        yield "The CPUs are in the servers anyway and cost nothing more."
    fit = sized.together.instances * plan.peak.each_together
    yield f"Bought for the average, {_devices(sized.together)} take {fit:,} queries at once; more are told busy."
    yield f"While a query waits as long as it may, its instance answers {plan.windows[1]:,} others (Eq. 4)."


def _bound(plan: Plan, bound: Bound) -> Table:
    """Eq. 19, and Eq. 15 that it rests on."""
    accelerator, cpu = plan.report.accelerator, plan.report.cpu
    assert accelerator is not None
    assert cpu is not None
    table = new_table(("", "this report"))
    betas = f"{cpu.curve.beta_s:.3g} s against {accelerator.curve.beta_s:.3g} s"
    add_row(table, ("alpha accelerator / alpha CPU, the limit (Eq. 19)", percent(bound.limit)))
    add_row(table, ("depth CPU / depth accelerator, measured", percent(bound.measured)), "bold")
    add_row(
        table, ("beta CPU above beta accelerator, the premise (Eq. 15)", f"{'yes' if bound.premise else 'no'}, {betas}")
    )
    return table


def _bound_captions(plan: Plan, bound: Bound) -> Iterator[str]:
    first, second = (pool.replicas if pool else 0 for pool in (plan.report.accelerator, plan.report.cpu))
    if (first, second) != (1, 1):
        yield f"All replicas counted: {second:,} on CPUs beside {first:,} on accelerators."
    if not bound.premise:
        yield "The premise does not hold for these devices, so the limit need not hold either:"
        yield "a looser SLO only brings what the CPU adds closer to it, from above."
    elif bound.below:
        yield f"The limit holds: no SLO, however loose, lets this CPU add more than {percent(bound.limit)}."
    else:
        yield "The tuned depths pass the limit: they were measured and lie off the fitted lines,"
        yield "as the paper's own do (22 / 96 is 22.9 %, against 21 %)."


def _slos(plan: Plan) -> Table:
    """Eq. 23."""
    report = plan.report
    pools = [name for name in POOLS if getattr(plan.slos[0], name) is not None]
    both = len(pools) == 2
    columns = ("SLO, s", *(f"{POOLS[name]}, at once" for name in pools), *(["the CPU adds"] if both else []))
    table = new_table(columns)
    for row in plan.slos:
        here = math.isclose(row.slo_s, report.slo_s)
        cells = [f"{row.slo_s:g}", *(f"{getattr(row, name):,}" for name in pools)]
        add_row(table, (*cells, *([percent(row.gain)] if both else [])), "bold" if here else None)
    return table


def _slos_captions(plan: Plan) -> Iterator[str]:
    report, cpu = plan.report, plan.report.cpu
    tuned = " + ".join(f"{pool.capacity:,}" for pool in (report.accelerator, cpu) if pool is not None)
    yield f"One instance, by the fitted curves; tuned at {report.slo_s:g} s: {tuned}."
    if cpu is not None and report.helper is None and cpu.curve.latency_s(1, report.shape) > report.slo_s:
        yield f"The CPU answers a first query from an SLO of {cpu.curve.latency_s(1, report.shape):.3g} s on (Eq. 11)."
    gains = [row.gain for row in plan.slos if row.gain is not None]
    if plan.bound and plan.bound.premise and gains != sorted(gains):
        yield "Where the share dips, it is the rounding to whole queries."


def _cores_table(plan: Plan, cores: Cores) -> Table:
    """Figure 6, extrapolated."""
    known, compared = plan.report.cpu_cores is not None, cores.rows[0].gain is not None
    columns = ("CPU cores", "alpha, s per query", "beta, s", "CPU, at once", *(["the CPU adds"] if compared else []))
    table = new_table(columns)
    for row in cores.rows:
        times = f"{_TIMES} {row.factor:g}" if not known else f"{row.cores:,}  ({_TIMES} {row.factor:.3g})"
        cells = (times, f"{row.curve.alpha_s:.3g}", f"{row.curve.beta_s:.3g}", f"{row.depth:,}")
        add_row(table, (*cells, *([percent(row.gain)] if compared else [])), "bold" if row.factor == 1 else None)
    return table


def _cores_captions(plan: Plan, cores: Cores) -> Iterator[str]:
    yield f"A model, not a measurement: {100 * PARALLEL_SHARE:g} % of alpha and of beta go by the cores (Amdahl)."
    if cores.least_factor is None:
        yield "By it, no number of cores lets the CPU answer one query within the SLO."
    elif cores.least_cores is None:
        yield f"By it, the CPU meets the SLO from {_TIMES} {cores.least_factor:.2g} of its cores on."
    else:
        unit = "core" if cores.least_cores == 1 else "cores"
        yield f"By it, the CPU meets the SLO from {cores.least_cores:,} {unit} on."
    yield "It is the best case: memory bandwidth and other work on the machine are left out, and with fewer"
    yield "cores the paper's CPU stopped helping much earlier. Calibrate again before you buy."
    if plan.report.cpu and plan.report.cpu.replicas > 1:
        yield "Cores are those of one replica; queries at once are those of all."


def _section(console: Console, title: str, table: Table, captions: Iterable[str]) -> None:
    console.print(Text(title, style="bold"))
    console.print(table)
    for caption in captions:
        console.print(Text(f"  {caption}", style="dim"))
    console.print()


def _base_name(report: Report) -> str:
    return POOLS["cpu" if report.accelerator is None else "accelerator"]


def _bought(bought: Deployment) -> tuple[str, str, str]:
    return f"{bought.instances:,}", f"{bought.devices:,}", _sum(bought.cost)


def _devices(bought: Deployment) -> str:
    return f"{bought.devices:,} device{'' if bought.devices == 1 else 's'}"


def _money(plan: Plan, amount: float) -> str:
    return f"{_sum(amount)} {plan.demand.currency}".rstrip()


def _sum(amount: float) -> str:
    return f"{amount:,.2f}".removesuffix(".00")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"
