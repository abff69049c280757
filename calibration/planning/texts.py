"""CPU or accelerator for long texts: what each pool of a finished calibration of generation does at each length.

As in eLLM (Section 2.2): while a text grows to p tokens, a token takes `e + (p + 1) a / 2` seconds on average, where e
is a step's time without attention and a that of attending to one token. Both are the measured ones (`StepTime`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from calibration.generation.generation_result import GenerationCalibrationReport, StepPoolReport
from calibration.report.tables import DASH, POOLS, Sheet, print_sheet
from deployments.errors import SettingsError
from deployments.generation.scheduler.block_pool import blocks_of
from deployments.generation.scheduler.step_time import StepLoad
from deployments.generation.settings import StepTimeSettings

_LENGTHS = tuple(1024 * 4**power for power in range(6))  # tokens: 1k to 1M


class Pace(NamedTuple):
    """What all replicas of a pool do with texts of one length. `at_once`: texts that they hold, each with its pace
    kept. `token_s`: seconds of a token of a text that is alone. `tokens_s`: tokens a second of all.
    """

    at_once: int
    token_s: float
    tokens_s: float


def pace(pool: StepPoolReport, tokens: int, tpot_s: float) -> Pace | None:
    """None if not one such text fits into a replica's cache. `at_once` is 0 if a lone text is slower than `tpot_s`."""
    times: dict[str, Any] = pool.step_time or {}
    time = StepTimeSettings(**{**times, "knee": int(times["knee"])}).step_time

    def step_s(rows: int) -> float:
        return time.seconds(StepLoad(rows, rows * (tokens + 1) / 2))

    fit = pool.blocks // blocks_of(tokens, pool.block_size)
    if not fit:
        return None
    low, high = 0, fit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(middle) <= tpot_s else (low, middle)
    return Pace(low * pool.replicas, step_s(1), pool.replicas * low / step_s(low) if low else 0.0)


def show(document: Any, path: Path, prices: Mapping[str, float], console: Console) -> None:
    """Print the table. `document`: the JSON of a report, from `path`. `prices`: of one replica's device, by pool.
    Raises SettingsError if the report has no pool that was measured.
    """
    report = GenerationCalibrationReport.parse(document)
    pools = {name: report.pools[name] for name in POOLS if name in report.pools and report.pools[name].step_time}
    if not pools:
        raise SettingsError("REPORT", f"{path} has no step times to plan with: calibrate again")
    tpot_s = report.settings.tpot_s
    rows: list[Sequence[str]] = []
    for tokens in _LENGTHS:
        found = {name: pace(pool, tokens, tpot_s) for name, pool in pools.items()}
        if any(found.values()):
            rows += [
                (f"{tokens:,}", POOLS[name], *_cells(found[name], pool.replicas, prices.get(name)))
                for name, pool in pools.items()
            ]
    console.print(Text(f"From {path}: {tpot_s:g} s a token.", style="dim"))
    columns = ("tokens of a text", "", "at once", "ms a token, alone", "tokens/s", "tokens/s per price")
    caption = (
        "  Texts that grow to this length, all replicas full, no prompts. Steps behind more than 4,096\n"
        "  tokens were not measured: their times follow the fitted formula."
    )
    print_sheet(console, Sheet("Long texts: CPU or accelerator", columns, rows, caption))


def _cells(found: Pace | None, replicas: int, price: float | None) -> Sequence[str]:
    if found is None:
        return "no room", DASH, DASH, DASH
    bought = DASH if price is None else f"{found.tokens_s / (replicas * price):,.3g}"
    at_once = f"{found.at_once:,}" if found.at_once else "too slow"
    return at_once, f"{1000 * found.token_s:.3g}", f"{found.tokens_s:,.0f}", bought
