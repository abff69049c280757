"""Hybrid decoding in virtual time: windve's `StepScheduler` over an accelerator and a host simulated layer by layer
(`hybrid_device`), compared with APEX's model of the overlap (`overlap`).

A device is always offered more than it admits, with similar prompts and answers. The warm-up and unfinished answers do
not count. *Gain* is tokens per second over those of the same device without a host's cache. N_G / N_C is the
accelerator's attention speed over the host's. T_gl / T_ga is the time of its linear layers over that of its attention
while its cache is full.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple, Self

import numpy as np
from matplotlib.figure import Figure

from benchmarks.costs.plan_cost import SEQUENCES, plan_us, step_us
from benchmarks.kit.bench import Bench, Found, all_of
from benchmarks.kit.figures import BLUE, OURS, RED, figure_of, panels
from benchmarks.kit.goal import Goal
from benchmarks.kit.sheet import Sheet, table
from benchmarks.simulation.host_planners import ApexPlanner, NeoPlanner, PlannedCache, ThresholdPlanner
from benchmarks.simulation.hybrid_device import HybridDevice
from benchmarks.simulation.step_world import Arrival, StepDevice, StepWorld
from benchmarks.simulation.true_device import TrueDevice
from calibration.generation.overlap import Overlap, alone_s
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS, EmulatedAccelerator
from deployments.generation.engine.emulated_steps import EmulatedSteps
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.hybrid.planner import HybridPlanner
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import ACCELERATOR, ASYNCHRONOUS, MODES, PIPELINED, StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepTime

RATIOS, SPLITS = (2, 4, 8, 16), (0.5, 1.0, 2.0)  # N_G / N_C; T_gl / T_ga
ORDINARY, BULK = "ordinary", "bulk"
KINDS = {ORDINARY: (PIPELINED,), BULK: (PIPELINED, ASYNCHRONOUS)}  # of generations, and what their host rows may be
CHOSEN, MODEL, TWO_BATCHES = "as chosen", "model", "two batches"
NOISE = 0.03
_SAME = 0.98
_T_GL, _LAYERS, _KNEE = 0.04, 32, 1024
_COPY_TOKEN_S = 1.1e-5  # 131 KB at 12 GB a second
_BLOCKS, _HOST_BLOCKS = 256, 4096
WIDE = StepPolicy(ttft_s=20.0, tpot_s=1.0, bulk_share=1.0)
_PLANS, _QUICK_PLANS = 2000, 200


class Machine(NamedTuple):
    """An accelerator and its host: times of their stages, and blocks of their caches."""

    times: StepTime
    host: HostTime
    blocks: int
    num_cpu_blocks: int


class Lengths(NamedTuple):
    """Tokens of prompts and of answers, each between two numbers."""

    prompts: tuple[int, int]
    answers: tuple[int, int]

    @classmethod
    def about(cls, prompt: int, answer: int) -> Self:
        """Lengths within 10 % of these, as NEO's synthetic ones (Section 5.1)."""
        return cls(*((round(0.9 * mean), round(1.1 * mean)) for mean in (prompt, answer)))


class Span(NamedTuple):
    """Seconds of warm-up, then seconds to measure."""

    warm_s: float
    seconds: float


LENGTHS = Lengths((448, 576), (64, 192))
_SPAN, _QUICK_SPAN = Span(60.0, 60.0), Span(20.0, 20.0)
_CONTEST_SPAN = Span(300.0, 60.0)


class Point(NamedTuple):
    """One of the table: N_G / N_C and T_gl / T_ga."""

    ratio: float
    split: float

    def machine(self, kv_tokens: float) -> Machine:
        """The machine whose accelerator has room for `kv_tokens` in its cache. As in APEX's model, prompts cost
        nothing, and a step's linear layers take constant time up to the knee.
        """
        kv_token_s = _T_GL / self.split / kv_tokens
        times = StepTime(_T_GL, _T_GL / _KNEE, kv_token_s, 0.0, 0.0, _KNEE)
        return Machine(times, HostTime(1e-6, self.ratio * kv_token_s, _COPY_TOKEN_S, _LAYERS), _BLOCKS, _HOST_BLOCKS)


class PaperMachine(NamedTuple):
    """A machine of a paper. `host_gb`: host memory for its cache. `cache`: share of the accelerator's cache. `quick`:
    factor on the host's memory speed.
    """

    device: EmulatedAccelerator
    host_gb: float
    cache: float = 1.0
    quick: float = 1.0

    @property
    def machine(self) -> Machine:
        device = self.device
        host = replace(device.host_time, kv_token_s=device.host_time.kv_token_s / self.quick)
        blocks = round(self.host_gb * 1e9 / (BLOCK * device.model.kv_bytes))
        return Machine(device.step_time, host, round(self.cache * device.blocks), blocks)


NEO_T4 = PaperMachine(EMULATED_ACCELERATORS["neo-t4-llama-2-7b"], 40)
NEO_A10G = PaperMachine(EMULATED_ACCELERATORS["neo-a10g-llama-3.1-8b"], 40)
APEX_T4 = PaperMachine(EMULATED_ACCELERATORS["apex-t4-llama-2-7b"], 120)
APEX_A10 = PaperMachine(EMULATED_ACCELERATORS["apex-a10-llama-3.1-8b"], 160)
CONTESTS: Mapping[str, tuple[PaperMachine, int]] = {  # by name; with tokens of a prompt
    "NEO's T4": (NEO_T4, 350),
    "NEO's T4, a quarter of its cache": (NEO_T4._replace(cache=0.25), 350),
    "NEO's A10G": (NEO_A10G, 1000),
    "NEO's A10G, a host 2 x as fast": (NEO_A10G._replace(quick=2), 1000),
    "NEO's A10G, a host 4 x as fast": (NEO_A10G._replace(quick=4), 1000),
    "APEX's T4": (APEX_T4, 350),
    "APEX's A10": (APEX_A10, 1000),
}
CONTESTANTS: Mapping[str, type[HybridPlanner]] = {
    "NEO": NeoPlanner, "APEX": ApexPlanner, "APEX, 8 host rows for one": ThresholdPlanner, OURS: HybridPlanner
}  # fmt: skip
FAST_DECODE = "FastDecode+"
_PROMISED = StepPolicy(ttft_s=2.0, tpot_s=0.15, bulk_share=1.0)
TRUE = ((Point(2, 1.0), ORDINARY), (Point(8, 0.5), BULK))  # at true speed
_TRUE_SPAN, _FEW_BLOCKS, _VOCABULARY = Span(30.0, 60.0), 1024, 1000  # blocks at the host, so that it is full soon
_KV_TOKENS = 28_000
_OUTPUT = 200  # tokens of an answer


# --- what is measured -------------------------------------------------------------------------------------------------


def run(bench: Bench) -> None:
    """Runs all parts. `--only` and `--add` select one: plan, points, true, contestants."""
    for piece, measure in {"plan": _costs, "points": _all_points, "true": _true_speed}.items():
        if bench.wants(piece):
            measure(bench)
    if bench.wants("contestants"):
        _contestants(bench)


def _all_points(bench: Bench) -> None:
    span = _QUICK_SPAN if bench.quick else _SPAN
    kv_tokens = served(Point(1, 1).machine(1e5), LENGTHS, span, hybrid=False)["kv_tokens"]
    with bench.steps(len(SPLITS) * len(RATIOS)) as step:
        for split in SPLITS:
            for ratio in RATIOS:
                step(f"T_gl / T_ga {split:g}, N_G / N_C {ratio}")
                _point(bench, Point(ratio, split), kv_tokens, span)


def _true_speed(bench: Bench) -> None:
    """Run at true speed, with the same arrivals as in virtual time."""
    span = _QUICK_SPAN if bench.quick else _TRUE_SPAN
    with bench.steps(len(TRUE)) as step:
        for point, kind in TRUE:
            step(f"{kind}, T_gl / T_ga {point.split:g}, N_G / N_C {point.ratio}, at true speed")
            machine = point.machine(_KV_TOKENS)._replace(num_cpu_blocks=_FEW_BLOCKS)
            virtual = served(machine, LENGTHS, span, kind)
            with bench.turn():
                true = bench.measure(partial(served, machine, LENGTHS, span, kind, true=True))
            about = {"what": "true", "kind": kind, **point._asdict()}
            shown = f"{true['tokens_s']:.0f} tokens/s, {virtual['tokens_s']:.0f} in virtual time"
            bench.sample(about, {**true, "virtual": virtual}, shown)


def _costs(bench: Bench) -> None:
    plans = _QUICK_PLANS if bench.quick else _PLANS
    calls = {
        "plan": lambda: plan_us(plans),
        "step with a host": lambda: step_us(plans // 5, hybrid=True),
        "step without": lambda: step_us(plans // 5, hybrid=False),
    }
    for what, call in calls.items():
        with bench.turn():
            took = bench.measure(call)
        bench.sample({"what": "cost", "of": what}, took, f"p50 {took['p50_us']:.0f} us, p99 {took['p99_us']:.0f} us")


def _point(bench: Bench, point: Point, kv_tokens: float, span: Span) -> None:
    machine = point.machine(kv_tokens)
    for kind in KINDS:
        found = {ACCELERATOR: served(machine, LENGTHS, span, kind, hybrid=False)}
        found[CHOSEN] = served(machine, LENGTHS, span, kind)
        found |= {mode: served(machine, LENGTHS, span, kind, (mode,)) for mode in _forced(kind)}
        found[MODEL] = modelled(machine, LENGTHS, found[ACCELERATOR])
        about = {"what": "point", "kind": kind, **point._asdict()}
        shown = ", ".join(
            f"{name} {gain(found, name):.2f} of {model(about | found, name):.2f}" for name in found if name != MODEL
        )
        bench.sample(about, found, shown)


def _contestants(bench: Bench) -> None:
    """Each way to plan on each of the papers' machines: ordinary generations with promises, and bulk ones."""
    span = _QUICK_SPAN if bench.quick else _CONTEST_SPAN
    with bench.steps(len(CONTESTS) * len(KINDS)) as step:
        for (name, (paper, prompt)), kind in product(CONTESTS.items(), KINDS):
            step(f"{name}, {kind}")
            machine, lengths = paper.machine, Lengths.about(prompt, _OUTPUT)
            policy = _PROMISED if kind == ORDINARY else WIDE
            run = partial(served, lengths=lengths, span=span, kind=kind, policy=policy)
            found = {ACCELERATOR: run(machine, hybrid=False)}
            found |= {way: run(machine, planner=planner) for way, planner in CONTESTANTS.items()}
            found[FAST_DECODE] = run(machine._replace(blocks=1), planner=NeoPlanner)  # no room but the host's
            shown = ", ".join(f"{way} {gain(found, way):.2f}" for way in found)
            bench.sample({"what": "contest", "machine": name, "kind": kind}, found, shown)


def served(
    machine: Machine,
    lengths: Lengths,
    span: Span,
    kind: str = ORDINARY,
    modes: tuple[str, ...] = MODES,
    *,
    hybrid: bool = True,
    true: bool = False,
    policy: StepPolicy = WIDE,
    planner: type[HybridPlanner] = HybridPlanner,
) -> dict[str, Any]:
    """Run the device with these modes allowed for the host's rows, which the `planner` chooses. `true`: at true speed,
    with an engine whose accelerator and host sleep.
    """
    times, own, blocks, num_cpu_blocks = machine
    policy = replace(policy, modes=modes)
    host = PlannedCache(own, num_cpu_blocks, of=planner) if hybrid else None
    schedule = StepScheduler(times, policy, blocks, host=host)
    device = StepDevice("hybrid", times, schedule, NOISE, hybrid=HybridDevice(times, own))
    if true:
        steps = EmulatedSteps(times, blocks, _VOCABULARY, host=own, num_cpu_blocks=num_cpu_blocks, noise=NOISE)
        device = TrueDevice("hybrid", times, schedule, steps=steps)
    return measured(StepWorld([device], policy), backlog(lengths, kind), span)


def backlog(lengths: Lengths, kind: str, seed: int = 1) -> Iterator[Arrival]:
    """An endless stream of generations. Answer lengths are known, as in the papers, which ignore end tokens."""
    draw = np.random.default_rng(seed)
    while True:
        prompt, tokens = (int(draw.integers(least, most, endpoint=True)) for least, most in lengths)
        yield Arrival(0.0, prompt, tokens, (tokens,), kind == BULK)


def measured(world: StepWorld, arrivals: Iterator[Arrival], span: Span) -> dict[str, Any]:
    """Figures of the first device after its warm-up: tokens per second; the share of steps in each mode; the share of
    time that the host works; the mean step time, and the mean rows and tokens that the accelerator attends in a step.
    """
    device, since, modes, sums = world.devices[0], (0.0, 0), Counter[str](), np.zeros(3)
    for _ in world.saturated(arrivals):
        if world.now <= span.warm_s:
            since = world.now, world.tokens
            continue
        own = device.work.first.own
        modes[device.mode] += 1
        sums += own.rows, own.kv_tokens, device.came.compute_s.host_s
        if world.now >= span.warm_s + span.seconds:
            break
    seconds, steps = world.now - since[0], modes.total()
    begun = [one for one in world.sent if one.came_at is not None and one.came_at > since[0]]
    rows, kv_tokens, host_s = sums.tolist()
    return {
        "tokens_s": (world.tokens - since[1]) / seconds,
        "steps": {mode: count / steps for mode, count in modes.items()},
        "host": host_s / seconds,
        "late": sum(not one.in_time for one in begun) / max(1, len(begun)),
        "step_s": seconds / steps,
        "rows": rows / steps,
        "kv_tokens": kv_tokens / steps,
    }


def modelled(machine: Machine, lengths: Lengths, alone: Mapping[str, Any]) -> dict[str, float]:
    """The model's tokens per second in each mode, with as many rows on the accelerator as without a host. One batch
    whose host rows run beside the accelerator's attention also counts as pipelined. Rows that join later steps pass one
    layer per step, and are limited by the host's cache.
    """
    rows, kv_tokens = alone["rows"], alone["kv_tokens"]
    t_gl, t_ga = machine.times.beta_s, machine.times.kv_token_s * kv_tokens
    context, layers = kv_tokens / rows, machine.host.layers
    overlap = Overlap(round(context), t_gl, t_ga, rows / t_ga, 1 / machine.host.seconds(1, context), layers)
    one_batch = (overlap.n_g + overlap.n_c) * t_ga / alone_s(t_gl, t_ga)
    most = [blocks_of(one.prompt_tokens + one.most_tokens - 1, BLOCK) for one in islice(backlog(lengths, BULK), 1000)]
    parked_rate = machine.num_cpu_blocks / float(np.mean(most)) / (layers * alone_s(t_gl, t_ga))
    return {
        ACCELERATOR: overlap.alone_rate,
        PIPELINED: max(overlap.pipelined_rate, one_batch),
        ASYNCHRONOUS: min(overlap.asynchronous_rate, overlap.alone_rate + parked_rate),
        TWO_BATCHES: overlap.pipelined_rate,
    }


# --- tables and goals ---------------------------------------------------------------------------------------------


def gain(one: Mapping[str, Any], name: str) -> float:
    """The measured gain of a sample in this mode, or with the scheduler's choice."""
    return float(one[name]["tokens_s"] / one[ACCELERATOR]["tokens_s"])


def model(one: Mapping[str, Any], name: str) -> float:
    """The model's gain in this mode; for the scheduler's choice, that of the best mode."""
    rates = one[MODEL]
    best = max(rates[mode] for mode in (ACCELERATOR, *KINDS[one["kind"]])) if name == CHOSEN else rates[name]
    return float(best / rates[ACCELERATOR])


def right(one: Mapping[str, Any]) -> bool:
    """Whether the scheduler's choice gives as much as the best measured mode."""
    return gain(one, CHOSEN) >= _SAME * max(gain(one, mode) for mode in MODES if mode in one)


def sheets(found: Found) -> list[Sheet]:
    costs = {"what": "{of}", "p50": "{p50_us:.0f}", "p99": "{p99_us:.0f}"}
    title = f"Planning with {SEQUENCES} sequences, us of a core"
    points = (_point_sheet(found, kind) for kind in KINDS)
    contests = (_contest_sheet(found, kind) for kind in KINDS)
    return [
        *points,
        _true_sheet(found),
        *contests,
        table(title, costs, all_of(found, what="cost")),
    ]


def _point_sheet(found: Found, kind: str) -> Sheet:
    columns = {
        "T_gl / T_ga": "{split:g}", "N_G / N_C": "{ratio:g}",
        "accelerator only, tokens/s": f"{{{ACCELERATOR}[tokens_s]:.0f}}", CHOSEN: f"{{gain {CHOSEN}}}",
        **{f"{mode} only": f"{{gain {mode}}}" for mode in _forced(kind)},
        "as chosen, of the model's best": "{of_best:.2f}", "steps": "{shares}",
        "the host works": f"{{{CHOSEN}[host]:.0%}}", "two batches pay by (6)": "{pays}",
    }  # fmt: skip
    rows = []
    for one in all_of(found, what="point", kind=kind):
        gains = {f"gain {name}": f"{gain(one, name):.2f} ({model(one, name):.2f})" for name in (CHOSEN, *_forced(kind))}
        of_best = gain(one, CHOSEN) / model(one, CHOSEN)
        pays = "yes" if one[MODEL][TWO_BATCHES] > one[MODEL][ACCELERATOR] else "no"
        rows.append({**one, **gains, "of_best": of_best, "shares": _shares(one[CHOSEN]), "pays": pays})
    return table(f"Gain of {kind} generations (by the model)", columns, rows)


def _forced(kind: str) -> tuple[str, ...]:
    """The modes measured one by one; none if there is only one, because the choice is then that mode or no host."""
    modes = KINDS[kind]
    return modes if len(modes) > 1 else ()


def _shares(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{share:.0%} {mode}" for mode, share in sorted(found["steps"].items(), key=lambda one: -one[1]))


def _contest_sheet(found: Found, kind: str) -> Sheet:
    names = [*CONTESTANTS, FAST_DECODE]
    columns = {"emulated machine": "{machine}", "alone, tokens/s": f"{{{ACCELERATOR}[tokens_s]:.0f}}"}
    columns |= {name: f"{{gain {name}}}" for name in names}
    rows = [
        {**one, **{f"gain {name}": _gain_and_late(one, name) for name in names}}
        for one in all_of(found, what="contest", kind=kind)
    ]
    promise = f"{_PROMISED.ttft_s:g} s to the first token, {_PROMISED.tpot_s:g} s a token; in parentheses: late"
    about = promise if kind == ORDINARY else "no promise"
    return table(f"Gain of {kind} generations by the way to plan ({about})", columns, rows)


def _gain_and_late(one: Mapping[str, Any], name: str) -> str:
    late = one[name]["late"]
    return f"{gain(one, name):.2f}" + (f" ({late:.1%})" if one["kind"] == ORDINARY else "")


def _true_sheet(found: Found) -> Sheet:
    columns = {
        "generations": "{kind}", "T_gl / T_ga": "{split:g}", "N_G / N_C": "{ratio:g}", "steps": "{shares}",
        "a step, ms": "{step_ms:.0f}", "the host works": "{host:.0%}", "tokens/s": "{tokens_s:.0f}",
        "in virtual time": "{virtual[tokens_s]:.0f}", "of it": "{of:.3f}",
    }  # fmt: skip
    rows = [
        {**one, "shares": _shares(one), "step_ms": 1000 * one["step_s"], "of": _of_virtual(one)}
        for one in all_of(found, what="true")
    ]
    return table("At true speed: accelerator and host sleep", columns, rows)


def _of_virtual(one: Mapping[str, Any]) -> float:
    return float(one["tokens_s"] / one["virtual"]["tokens_s"])


def goals(found: Found) -> list[Goal]:
    points = all_of(found, what="point")
    least = min((gain(one, CHOSEN) / model(one, CHOSEN) for one in points), default=None)
    count = len(RATIOS) * len(SPLITS) * len(KINDS)
    apart = max((100 * abs(_of_virtual(one) - 1) for one in all_of(found, what="true")), default=None)
    return [
        Goal("gain beside the model's best, the least", 0.95, least),
        Goal("points where no mode gives more than what was chosen", count, sum(map(right, points)), "points"),
        Goal("true speed apart from virtual time", 5, apart, "%", at_most=True),
    ]


def plot(found: Found) -> Figure:
    every = panels((11, 6.4), len(SPLITS), 2, alike=True)
    colours = {PIPELINED: BLUE, ASYNCHRONOUS: RED}
    for axes, (kind, split) in zip(every, product(KINDS, SPLITS), strict=True):
        some = all_of(found, what="point", kind=kind, split=split)
        ratios = [one["ratio"] for one in some]
        axes.axhline(1, color="0.7", linewidth=0.8)
        for mode in KINDS[kind]:
            label = f"{mode} (dotted: by the model)"
            axes.plot(ratios, [model(one, mode) for one in some], ":", color=colours[mode])
            name = mode if _forced(kind) else CHOSEN
            axes.plot(ratios, [gain(one, name) for one in some], "o-", color=colours[mode], ms=4, label=label)
        chosen = [gain(one, CHOSEN) for one in some]
        axes.plot(ratios, chosen, "o", color="0.2", ms=10, fillstyle="none", label=CHOSEN)
        axes.set_xscale("log", base=2)
        axes.set_title(f"{kind} generations, T_gl / T_ga = {split:g}", fontsize=9)
        axes.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
        axes.set(xlabel="N_G / N_C", ylabel="tokens/s beside the accelerator alone")
        axes.label_outer()
    every[-1].legend(frameon=False, fontsize=8)
    return figure_of(every)
