"""NEO's Figures 6 to 10a (arXiv:2411.01142) and APEX's 5 to 7 (arXiv:2506.03296), replayed in virtual time.

The papers' machines are emulated (`EMULATED_ACCELERATORS`), and simulated layer by layer (`hybrid_device`). Each way to
plan a step has windve's scheduler around it. The papers print few numbers; each stands beside what was found here.

Loads: a Poisson stream. Refused generations wait and are offered again, first come, first served. The latency of a
generation is its time from arrival to last token, divided by its tokens, as in both papers. Throughput: the device is
always offered more than it admits. The first generations have a part of their answers already, so that not all end at
the same time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from matplotlib.figure import Figure

from benchmarks.comparisons.hybrid import (
    APEX_A10,
    APEX_T4,
    FAST_DECODE,
    NEO_A10G,
    NEO_T4,
    NOISE,
    WIDE,
    Machine,
    PaperMachine,
    Span,
    measured,
)
from benchmarks.kit.figures import COLOURS, OURS, figure_of, panels
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation.host_planners import ApexPlanner, NeoPlanner, PlannedCache
from benchmarks.simulation.hybrid_device import HybridDevice
from benchmarks.simulation.step_world import Arrival, StepDevice, StepWorld
from deployments.generation.emulated_devices import EmulatedAccelerator
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.hybrid.planner import HybridPlanner
from deployments.generation.scheduler.scheduler import StepScheduler

ALONE = "alone"
PLANNERS: Mapping[str, type[HybridPlanner] | None] = {
    ALONE: None, "NEO": NeoPlanner, "APEX": ApexPlanner, OURS: HybridPlanner, FAST_DECODE: NeoPlanner
}  # fmt: skip
THREE = ("NEO", "APEX", OURS)
NEO, APEX = "neo", "apex"
TITLES = {NEO: "NEO", APEX: "APEX"}
ABOUT = (
    "Figures of NEO and APEX: their machines are emulated and simulated, nothing was measured on a device. Each way to",
    "plan has windve's scheduler around it; `alone` has no host. The papers print few numbers of their figures.",
)
_STREAM_S, _QUICK_STREAM_S = 100.0, 15.0  # of arrivals at each rate
_SPAN_S, _QUICK_SPAN_S = 100.0, 8.0  # to measure throughput, after the caches have been filled
_PARTS = 20


class Workload(NamedTuple):
    """Tokens of prompts and of answers, each drawn from equally likely numbers."""

    prompts: Sequence[float]
    answers: Sequence[float]

    @classmethod
    def about(cls, prompt: float, answer: float) -> Self:
        """Within 10 % of these, as NEO's synthetic ones (Section 5.1)."""
        return cls(*(tuple(mean * np.linspace(0.9, 1.1, _PARTS)) for mean in (prompt, answer)))

    def draw(self, random: np.random.Generator) -> tuple[int, int]:
        prompt, answer = (round(random.choice(lengths)) for lengths in self)
        return prompt, max(1, answer)


# Means of each twentieth of the published traces' sorted lengths (Azure/AzurePublicDataset, LLM inference traces of
# 2023, CC BY 4.0). Prompts and answers hardly correlate there (0.00 and -0.11).
CODE = Workload(
    (41, 107, 186, 303, 482, 675, 860, 1009, 1156, 1362, 1576, 1797, 2045, 2305, 2580, 2944, 3518, 4454, 6138, 7430),
    (6, 6, 7, 8, 9, 9, 10, 11, 12, 13, 14, 15, 17, 19, 22, 26, 33, 47, 70, 207),
)
CONVERSATION = Workload(
    (111, 197, 259, 379, 392, 400, 408, 454, 909, 1004, 1033, 1058, 1084, 1113, 1155, 1268, 1497, 2305, 3792, 4281),
    (27, 48, 61, 72, 81, 88, 93, 99, 108, 120, 139, 163, 197, 332, 391, 397, 406, 417, 434, 551),
)
_OSC_PROMPT, _OSC_ANSWER = 350, 40  # assumed: neither paper gives the lengths of its summaries
OSC = Workload.about(_OSC_PROMPT, _OSC_ANSWER)


# Rows beyond those that the host attends in a few steps only wait, so NEO's caches are smaller than its hosts' memory.
_T4, _A10G = NEO_T4._replace(host_gb=10), NEO_A10G._replace(host_gb=10)
_APEX_T4, _APEX_A10 = APEX_T4._replace(host_gb=60), APEX_A10._replace(host_gb=60)
# Two H100 SXM as one device, by NVIDIA's data sheet without sparsity; exchange between them takes no time. The host:
# one of four NUMA nodes of two Xeon 8462Y+ (NEO, Table 1), which have 8 channels of DDR5-4800 each.
_H100 = PaperMachine(
    EmulatedAccelerator(
        _A10G.device.model._replace(weights=70.6e9, layers=80, width=8192), 160, 6700, 1979, 2 * 63.0, 307.2 / 2
    ),
    40,
)


class Load(NamedTuple):
    """Latency by rate. `limit_s`: the latency at which the paper compares rates. `names`: how steps are planned."""

    paper: str
    figure: str
    what: str
    on: PaperMachine
    work: Workload
    rates: Sequence[float]
    limit_s: float
    says: str
    names: Sequence[str] = (ALONE, *THREE)


class Sweep(NamedTuple):
    """Throughput beside the accelerator's alone. `works`: by label, mostly the answers' mean length. `bulk`: whether
    the generations are bulk; windve parks no others.
    """

    paper: str
    figure: str
    what: str
    on: PaperMachine
    works: Mapping[str, Workload]
    says: str
    bulk: bool = False
    names: Sequence[str] = THREE


def _by_answers(prompt: float, *answers: int) -> Mapping[str, Workload]:
    return {str(answer): Workload.about(prompt, answer) for answer in answers}


def _instance(name: str, host_gb: float, quick: float, says: str) -> Sweep:
    on = _A10G._replace(host_gb=host_gb, quick=quick)
    return Sweep(NEO, "10a", f"A10G, g5.{name}", on, _by_answers(1000, 50, 150, 400), says)


LOADS = (
    Load(NEO, "6a, 8a", "2 x H100, Llama-3.1-70B, Azure code", _H100, CODE, (2, 3, 4.5), 2.0, "NEO 1.143",
         (ALONE, *THREE, FAST_DECODE)),
    Load(NEO, "6b, 7", "A10G, Llama-3.1-8B, Azure code", _A10G, CODE, (0.8, 1.6, 2.5), 2.0, "NEO 1.064"),
    Load(NEO, "6c", "T4, Llama-2-7B, OSC", _T4, OSC, (2, 4, 7), 1.0, "NEO 6.63"),
    Load(NEO, "6c", "T4, a quarter of its cache", _T4._replace(cache=0.25), OSC, (0.5, 2, 5), 1.0,
         "NEO 6.63"),
    Load(APEX, "6", "T4, Llama-2-7B, OSC", _APEX_T4, OSC, (2, 4, 7), 1.0, "APEX nearly half of NEO's latency"),
    Load(APEX, "6", "A10, Llama-3.1-8B, Azure conversation", _APEX_A10, CONVERSATION, (0.5, 1.5, 3, 5), 1.0,
         "APEX slightly below NEO's latency"),
)  # fmt: skip
SWEEPS = (
    Sweep(NEO, "8b, 9a", "2 x H100, prompts of 2,000", _H100._replace(host_gb=20), _by_answers(2000, 50, 200, 500),
          "NEO up to 1.14; FastDecode+ below 0.60 for long answers", names=(*THREE, FAST_DECODE)),
    Sweep(NEO, "9c", "T4, prompts of 350", _T4, _by_answers(_OSC_PROMPT, 50, 150, 400), "NEO up to 7.5"),
    Sweep(NEO, "9c", "T4, a quarter of its cache", _T4._replace(cache=0.25), _by_answers(_OSC_PROMPT, 50, 150, 400),
          "NEO up to 7.5"),
    _instance("2xlarge", 2.5, 1, "NEO up to 1.122"),
    _instance("4xlarge", 5, 1, "NEO up to 1.133; Figure 9b: 1.26"),
    _instance("8xlarge", 10, 2, "NEO up to 1.297"),
    _instance("16xlarge", 20, 4, "NEO up to 1.793"),
    Sweep(APEX, "5a", "T4, prompts of 350", _APEX_T4, _by_answers(_OSC_PROMPT, 50, 150, 400),
          "APEX up to 1.96, 1.71 of NEO's (abstract: 1.49)", bulk=True),
    Sweep(APEX, "5b", "A10, Azure conversation", _APEX_A10, {"trace": CONVERSATION}, "APEX 1.11, 1.13 of NEO's",
          bulk=True),
    Sweep(APEX, "7", "A10, prompts of 1,000", _APEX_A10, _by_answers(1000, 100, 350, 700),
          "APEX of NEO's: 1.05 (50-200), 1.17, 1.22, 1.31 (200-500), 1.37 (above)", bulk=True),
)  # fmt: skip


# --- what is measured -------------------------------------------------------------------------------------------------


def replayed(paper: str, echo: Callable[[str], None], *, quick: bool) -> list[dict[str, Any]]:
    """All figures of a paper: a sample for each point of a figure."""
    found: list[dict[str, Any]] = []
    for load in (one for one in LOADS if one.paper == paper):
        for rate in load.rates[: 2 if quick else None]:
            point = {name: latency(load, name, rate, quick=quick) for name in load.names}
            found.append({"figure": load.figure, "what": load.what, "rate": rate, **point})
            shown = (f"{name} {seconds['mean']:.2f}" for name, seconds in point.items())
            echo(f"{load.figure}, {load.what}, {rate:g}/s, s a token: {', '.join(shown)}")
    for sweep in (one for one in SWEEPS if one.paper == paper):
        for answers, work in list(sweep.works.items())[: 1 if quick else None]:
            rates = {name: throughput(sweep, work, name, quick=quick) for name in (ALONE, *sweep.names)}
            found.append({"figure": sweep.figure, "what": sweep.what, "answers": answers, **rates})
            shown = (f"{name} {_gain(rates, name):.2f}" for name in sweep.names)
            echo(f"{sweep.figure}, {sweep.what}, {answers}: {', '.join(shown)}")
    return found


def latency(load: Load, name: str, rate: float, *, quick: bool) -> dict[str, float]:
    """Seconds per token of all generations: their mean and quantiles."""
    random, at, arrivals = np.random.default_rng(1), 0.0, []
    while (at := at + random.exponential(1 / rate)) < (_QUICK_STREAM_S if quick else _STREAM_S):
        prompt, answer = load.work.draw(random)
        arrivals.append(Arrival(at, prompt, answer, (answer,)))
    sent = _world(load.on.machine, name).queued(arrivals)
    each = [(one.last_at[0] - one.arrival.at) / one.arrival.most_tokens for one in sent]
    quantiles = zip(("p50", "p90", "p99"), np.quantile(each, (0.5, 0.9, 0.99)), strict=True)
    return {"mean": float(np.mean(each)), **{name: float(value) for name, value in quantiles}}


def throughput(sweep: Sweep, work: Workload, name: str, *, quick: bool) -> dict[str, Any]:
    """Tokens per second above capacity, the shares of steps by mode and of the host's time, and seconds of a step."""
    machine = sweep.on.machine
    tokens = BLOCK * (machine.blocks + (machine.num_cpu_blocks if name != ALONE else 0))
    seconds = _QUICK_SPAN_S if quick else _SPAN_S
    warm_s = seconds / 4 + 2 * tokens * machine.times.prompt_token_s  # prompts that fill the caches take half of a step
    found = measured(_world(machine, name), _begun(work, tokens, bulk=sweep.bulk), Span(warm_s, seconds))
    return {key: found[key] for key in ("tokens_s", "steps", "host", "step_s")}


def _begun(work: Workload, tokens: int, *, bulk: bool) -> Iterator[Arrival]:
    """An endless stream, of which the first, with so many `tokens`, have a part of their answer behind them."""
    random = np.random.default_rng(1)
    for _ in count():
        prompt, answer = work.draw(random)
        done = int(random.uniform(0, answer)) if tokens > 0 else 0
        tokens -= prompt + answer
        yield Arrival(0.0, prompt + done, answer - done, (answer - done,), bulk)


def _world(machine: Machine, name: str) -> StepWorld:
    times, own, blocks, num_cpu_blocks = machine
    planner = PLANNERS[name]
    host = None if planner is None else PlannedCache(own, num_cpu_blocks, of=planner)
    schedule = StepScheduler(times, WIDE, 1 if name == FAST_DECODE else blocks, host=host)
    return StepWorld([StepDevice("hybrid", times, schedule, NOISE, hybrid=HybridDevice(times, own))], WIDE)


# --- what is shown ----------------------------------------------------------------------------------------------------


def sheets(paper: str, found: Sequence[Mapping[str, Any]]) -> list[Sheet]:
    """The rate that each sustains, latencies by rate, and throughputs; each beside what the paper prints."""
    if not found:
        return []
    title = TITLES[paper]
    named = {"figure": "{figure}", "emulated": "{what}"}
    every = (*THREE, FAST_DECODE) if paper == NEO else THREE
    rates: list[dict[str, Any]] = []
    latencies: list[dict[str, Any]] = []
    gains: list[dict[str, Any]] = []
    for load in (one for one in LOADS if one.paper == paper):
        rows = _points(found, load)
        held = {name: sustained(rows, name, load.limit_s) for name in load.names}
        rates.append({**load._asdict(), **{name: _beside(rate, held[ALONE]) for name, rate in held.items()}})
        latencies += [{**row, **{name: f"{row[name]['mean']:.2f}" for name in load.names}} for row in rows]
    for sweep in (one for one in SWEEPS if one.paper == paper):
        rows = _points(found, sweep)
        gains += [
            {**row, ALONE: row[ALONE]["tokens_s"], "says": sweep.says}
            | {name: f"{_gain(row, name):.2f}" for name in sweep.names}
            for row in rows
        ]
    of_alone = {name: f"{{{name}}}" for name in every}
    made = [
        table(f"{title}'s Figure 6, emulated: generations a second at the same latency (beside alone's)", {
            **named, "latency, s a token": "{limit_s:g}", "in the paper": "{says}", ALONE: f"{{{ALONE}}}", **of_alone
        }, rates),
        table(f"{title}'s load curves, emulated: mean latency, s a token", {
            **named, "generations/s": "{rate:g}", ALONE: f"{{{ALONE}}}", **of_alone
        }, latencies),
        table(f"{title}'s throughputs, emulated: beside the accelerator's alone", {
            **named, "answers": "{answers}", "alone, tokens/s": f"{{{ALONE}:.0f}}", **of_alone, "in the paper": "{says}"
        }, gains),
    ]  # fmt: skip
    if paper == NEO:
        made.append(_distribution(found))
    return made


def _distribution(found: Sequence[Mapping[str, Any]]) -> Sheet:
    rows = []
    for row in (one for one in found if one["figure"] == "6b, 7" and one["rate"] == 1.6):
        rows = [{"name": name, **row[name]} for name in (ALONE, *THREE)]
    columns = {"planned by": "{name}", "mean": "{mean:.3f}", "p50": "{p50:.3f}", "p90": "{p90:.3f}", "p99": "{p99:.3f}"}
    return table("NEO's Figure 7, emulated: latency at 1.6/s on the A10G, s a token", columns, rows)


def _points(found: Sequence[Mapping[str, Any]], of: Load | Sweep) -> list[Mapping[str, Any]]:
    return [one for one in found if (one["figure"], one["what"]) == (of.figure, of.what)]


def _gain(row: Mapping[str, Any], name: str) -> float:
    return float(row[name]["tokens_s"] / row[ALONE]["tokens_s"])


def sustained(rows: Sequence[Mapping[str, Any]], name: str, limit_s: float) -> float | None:
    """The rate at which the mean latency is `limit_s`, between the measured rates; None if it lies beyond them."""
    for low, high in pairwise(rows):
        means = [low[name]["mean"], high[name]["mean"]]
        if means[0] <= limit_s < means[1]:
            return float(np.interp(np.log(limit_s), np.log(means), [low["rate"], high["rate"]]))
    return None


def _beside(rate: float | None, alone: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.2f} ({rate / alone:.2f})" if alone else f"{rate:.2f}"


def plot(paper: str, found: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each figure: mean latency by rate, or throughput by answers."""
    figures = [one for one in (*LOADS, *SWEEPS) if one.paper == paper and len(_points(found, one)) > 1]
    columns = 4 if paper == NEO else 2
    rows = max(1, -(-len(figures) // columns))
    every = panels((3.6 * columns, 3.2 * rows), columns, rows)
    for axes, one in zip(every, figures, strict=False):
        points = _points(found, one)
        for name, colour in zip(PLANNERS, ("0.4", *COLOURS), strict=False):
            if name not in points[0] or (isinstance(one, Sweep) and name == ALONE):
                continue
            if isinstance(one, Load):
                x, y = [point["rate"] for point in points], [point[name]["mean"] for point in points]
            else:
                x, y = [int(point["answers"]) for point in points], [_gain(point, name) for point in points]
            axes.plot(x, y, "o-", color=colour, ms=3, label=name)
        if isinstance(one, Load):
            axes.set(xlabel="generations/s", ylabel="s a token", yscale="log")
        else:
            axes.set(xlabel="tokens of an answer", ylabel="tokens/s beside alone")
        axes.axhline(one.limit_s if isinstance(one, Load) else 1.0, color="0.7", linewidth=0.8)
        axes.set_title(f"{one.figure}: {one.what}\n{one.says}", loc="left", fontsize=7)
    every[0].legend(frameon=False, fontsize=7)
    for axes in every[len(figures) :]:
        axes.set_axis_off()
    return figure_of(every)
