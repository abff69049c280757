"""`windve bench overload --url URL` sweeps one server. Results of several servers in one folder make one picture."""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.kit.bench import describe_machine
from benchmarks.overload import report, sweep
from benchmarks.overload.client import Endpoint
from benchmarks.overload.schedule import ARRIVALS, LENGTHS, POISSON
from benchmarks.overload.sweep import Plan
from deployments.errors import SettingsError

_INTERRUPTED = 130
_DOTS_PER_INCH = 130
_PICTURE = "overload.png"
_TABLES = "overload.md"


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 something could not be measured (a sentence says what), 130 interrupted."""
    given = _parser().parse_args(words)
    console = Console(highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if given.url:
            _measure(given, console)
        write(given.out, console)
    except (RuntimeError, SettingsError) as error:
        print(f"overload: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"overload: interrupted; what landed is in {given.out}", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _measure(given: argparse.Namespace, console: Console) -> None:
    if given.pin:
        os.sched_setaffinity(0, given.pin)
    sweep.let_open_many_files()
    endpoint = Endpoint.parse(given.url, given.model, given.key or os.environ.get("OPENAI_API_KEY"))
    name = given.name or endpoint.address.netloc
    plan = Plan.usual(
        given.slo, quick=given.quick, loads=given.loads, seconds=given.seconds, queries=given.queries,
        lengths=given.lengths, arrivals=ARRIVALS if given.bursts else (POISSON,), give_up_s=given.give_up,
        longest=given.longest, seed=given.seed,
    )  # fmt: skip
    kept = {"name": name, "url": str(endpoint.address), "plan": asdict(plan), "pinned": given.pin}
    kept |= {"client": describe_machine(), "samples": []}
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{_slug(name)}.json"
    sweep.check(endpoint)
    for sample in _samples(endpoint, plan, name, console):
        kept["samples"].append(sample)
        file.write_text(json.dumps(kept) + "\n", encoding="utf-8")


def _samples(endpoint: Endpoint, plan: Plan, name: str, console: Console) -> Any:
    """Measure, and yield each sample at once."""
    capacities: dict[str, dict[str, Any]] = {}
    for lengths, arrivals, load in plan.points:
        if lengths not in capacities:
            capacities[lengths] = found = sweep.capacity(endpoint, plan, lengths)
            steps = ", ".join(f"{clients}: {rate:.1f}" for clients, rate in found["steps"].items())
            console.print(f"{name}, {lengths} lengths: {found['queries_s']:.1f} queries/s at most ({steps})")
        most_s = capacities[lengths]["queries_s"]
        about = {"contestant": name, "lengths": lengths, "arrivals": arrivals, "load": load, "capacity_s": most_s}
        found = sweep.point(endpoint, plan, plan.shape(arrivals, lengths), load * most_s)
        console.print(f"{name}, {lengths} lengths, {arrivals}, {load:g} of capacity: {sweep.shown(found)}")
        yield {**about, **found}


def write(out: Path, console: Console) -> None:
    """Write tables and the picture of all servers with results in the folder. Raises RuntimeError if there are none, or
    if their SLOs differ.
    """
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("*.json"))]
    samples = [sample for one in kept for sample in one["samples"]]
    slos = {one["plan"]["slo_s"] for one in kept}
    if not samples or len(slos) != 1:
        raise RuntimeError(f"{out} has results of {len(slos)} SLOs: one picture shows one")
    slo_s = slos.pop()
    report.plot(samples, slo_s).savefig(out / _PICTURE, dpi=_DOTS_PER_INCH)
    lines = ["# Overload", "", f"![goodput and late share over offered load]({_PICTURE})", ""]
    for sheet in filter(lambda sheet: sheet.rows, report.summary(samples, slo_s)):
        console.print(sheet.rich())
    for sheet in filter(lambda sheet: sheet.rows, report.sheets(samples, slo_s)):
        lines += sheet.markdown()
    (out / _TABLES).write_text("\n".join(lines), encoding="utf-8")
    console.print(f"kept: {out}")


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "server"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="windve bench overload",
        description="Measure an OpenAI endpoint for embeddings from below to far above its capacity: goodput within "
        "the SLO, late and refused shares, time to refuse, accuracy of Retry-After.",
        epilog="Without --url, rewrite tables and picture from the results in the folder.",
    )
    add = parser.add_argument
    add("--url", help="the server, as http://127.0.0.1:8000, .../v1 or .../v1/embeddings")
    add("--name", help="name of the server in tables and picture (default: host and port)")
    add("--model", help="model name, for servers that require one")
    add("--key", help="API key (default: OPENAI_API_KEY of the environment)")
    add("--slo", type=_positive, default=1.0, metavar="SECONDS", help="an answer later than this is late (default: 1)")
    add("--loads", type=_loads, metavar="X,X", help="multiples of capacity (default: 0.3 to 4)")
    add("--lengths", type=_lengths, metavar="L,L", help="equal (75 tokens), mixed (8 to 256); default: both")
    add("--bursts", action="store_true", help="also send bursts: all queries of two SLOs at once")
    add("--seconds", type=_positive, help="minimum seconds of each load (default: 60; MLPerf: 600)")
    add("--queries", type=int, help="minimum queries of each load (default: 662)")
    add("--give-up", type=_positive, metavar="SECONDS", help="seconds after which clients disconnect (default: 5 SLOs)")
    add("--longest", type=int, help="tokens of the longest text (default: 256)")
    add("--seed", type=int, help="seed of arrivals and lengths (default: MLPerf's)")
    add("--pin", type=_cores, metavar="CORES", help="cores of this client, such as 0,1; give the server other cores")
    add("--quick", action="store_true", help="fewer and shorter loads: about 6 minutes with --bursts")
    add("--out", type=Path, default=Path("reports/overload"), help="folder (default: reports/overload)")
    return parser


def _positive(word: str) -> float:
    value = float(word)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{word} is not above 0")
    return value


def _loads(word: str) -> tuple[float, ...]:
    return tuple(_positive(part) for part in word.split(","))


def _lengths(word: str) -> tuple[str, ...]:
    if unknown := set(parts := word.split(",")) - set(LENGTHS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {' and '.join(LENGTHS)}")
    return tuple(parts)


def _cores(word: str) -> list[int]:
    return [int(part) for part in word.split(",")]
