"""`windve plan`: its options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from calibration.planning.plan import Instance, TrafficDemand, make_plan, show
from calibration.report.report_model import MOST
from calibration.report.tables import plain
from deployments.errors import SettingsError

_Number = TypeVar("_Number", int, float)


def main(words: Sequence[str]) -> int:
    return run(parser().parse_args(words), Console(highlight=False))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="windve plan",
        description=(
            "Compute how many devices your traffic needs, with and without the CPU's help, and what they cost. The "
            "input is a finished calibration report; nothing is measured and no service is contacted."
        ),
        epilog=(
            "example: at most 1000 queries at once, 400 queries/s on average, 2000 EUR for a device: "
            "windve plan reports/calibration --peak 1000 --average 400 --price 2000"
        ),
    )
    made.add_argument("report", type=Path, metavar="REPORT", help="report.json of a calibration, or its folder")
    for option, kind, about in (
        (
            "--peak",
            int,
            "most queries in flight at once; devices sized for this refuse none and answer all within the SLO",
        ),
        ("--average", float, "queries per second; devices sized for this are fewer, and may refuse bursts"),
        ("--price", float, "price of one device, once or per period (such as a month); so is all money in the plan"),
    ):
        made.add_argument(option, type=kind, required=True, metavar="N", help=about)
    made.add_argument(
        "--devices-per-instance",
        type=int,
        metavar="D",
        help="devices to pay for in one instance, which is all replicas of the report "
        "(default: one per accelerator replica, or per CPU replica if there is no accelerator)",
    )
    made.add_argument("--currency", default="EUR", metavar="NAME", help="printed after amounts (default: %(default)s)")
    return made


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the plan. Raises SettingsError that names the option."""
    devices = arguments.devices_per_instance
    demand = TrafficDemand(
        peak=_positive("--peak", arguments.peak, "queries at once"),
        average=_positive("--average", arguments.average, "queries per second"),
        price=_positive("--price", arguments.price, "the price of one device"),
        devices_per_instance=None if devices is None else _positive("--devices-per-instance", devices, "devices"),
        currency=plain(arguments.currency).strip(),
    )
    show(make_plan(Instance.read(arguments.report), demand), console)
    return 0


def _positive(option: str, value: _Number, what: str) -> _Number:
    if not 0 < value <= MOST:
        raise SettingsError(option, f"{what} should be above 0 and at most {MOST:.0e}, not {str(value)[:20]}")
    return value
