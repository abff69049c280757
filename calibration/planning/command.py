"""`windve plan`: its options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from calibration.planning.plan import Instance, TrafficDemand, make_plan, show
from calibration.report.report_model import MOST, read_document
from calibration.report.tables import plain
from deployments.errors import SettingsError
from deployments.hardware.device_detector import ACCELERATOR, CPU

_Number = TypeVar("_Number", int, float)


def main(words: Sequence[str]) -> int:
    return run(parser().parse_args(words), Console(highlight=False))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="windve plan",
        description=(
            "Compute how many devices your traffic needs, with and without the CPU's help, and what they cost. For a "
            "report of an application that generates: what accelerator and CPU do with long texts. The input is a "
            "finished calibration report; nothing is measured and no service is contacted."
        ),
        epilog=(
            "example: at most 1000 queries at once, 400 queries/s on average, 2000 EUR for a device: "
            "windve plan reports/calibration --peak 1000 --average 400 --price 2000; "
            "generation: windve plan reports/calibration --price 8000 --cpu-price 3000"
        ),
    )
    made.add_argument("report", type=Path, metavar="REPORT", help="report.json of a calibration, or its folder")
    for option, kind, about in (
        ("--price", float, "price of one device, once or per period (such as a month); so is all money in the plan"),
        (
            "--peak",
            int,
            "embeddings: most queries in flight at once; devices sized for this refuse none and answer all in time",
        ),
        ("--average", float, "embeddings: queries per second; devices sized for this are fewer, and may refuse bursts"),
        ("--cpu-price", float, "generation: price of the CPUs of one replica"),
    ):
        made.add_argument(option, type=kind, metavar="N", help=about)
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
    path, document = read_document(arguments.report)
    generates = isinstance(document, dict) and document.get("kind") == "generation"
    others = ("peak", "average", "devices_per_instance") if generates else ("cpu_price",)
    for option in others:
        if getattr(arguments, option) is not None:
            kind = "embeddings" if generates else "generation"
            raise SettingsError(f"--{option.replace('_', '-')}", f"is for reports of {kind}: leave it out")
    if generates:
        given = {ACCELERATOR: ("--price", arguments.price), CPU: ("--cpu-price", arguments.cpu_price)}
        prices = {pool: _positive(*one, "the price") for pool, one in given.items() if one[1] is not None}
        from calibration.planning import texts  # here, because it imports numpy

        texts.show(document, path, prices, console)
        return 0
    devices = arguments.devices_per_instance
    demand = TrafficDemand(
        peak=_positive("--peak", arguments.peak, "queries at once"),
        average=_positive("--average", arguments.average, "queries per second"),
        price=_positive("--price", arguments.price, "the price of one device"),
        devices_per_instance=None if devices is None else _positive("--devices-per-instance", devices, "devices"),
        currency=plain(arguments.currency).strip(),
    )
    show(make_plan(Instance.read(path), demand), console)
    return 0


def _positive(option: str, value: _Number | None, what: str) -> _Number:
    if value is None:
        raise SettingsError(option, f"missing; give {what}")
    if not 0 < value <= MOST:
        raise SettingsError(option, f"{what} should be above 0 and at most {MOST:.0e}, not {str(value)[:20]}")
    return value
