"""Generation at true speed: a whole service on real Ray, accelerator and CPU pool emulated, and streams from a client
in a process of its own. Beside it what virtual time says of the same arrivals, devices and promise (`generation`).

A request's `max_tokens` is what virtual time takes for the most that an answer may have, and a `stop` ends it where
virtual time ends it: the service knows the end no sooner. Who is refused does not come back. A client's times count
from the moment for which a request was planned, so a client that lags makes answers late.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, Self

import numpy as np
import yaml
from matplotlib.figure import Figure

from benchmarks.comparisons.generation import NOISE, POLICY, Pool, capacity_of, kind_of, served, told_of
from benchmarks.kit.bench import Bench, Found
from benchmarks.kit.cpu_time import ENGINE, PROXY, RAY, SERVER, CpuTime
from benchmarks.kit.emulated_text import EmulatedText, longer_model
from benchmarks.kit.goal import Goal
from benchmarks.kit.serving import ROOT, Service, serving
from benchmarks.kit.sheet import Sheet
from benchmarks.kit.streaming import stream_all
from calibration.generation.token_stream import Streamed
from deployments.generation.scheduling.step_time import StepLoad, StepTime
from deployments.hardware.device_detector import ACCELERATOR, CPU
from tests.kit.simulation.step_world import Arrival, mixed

POINTS = ((1.0, False), (1.5, True))  # times capacity; in bursts
TIMES = {
    ACCELERATOR: StepTime(0.04, 0.0004, 1e-6, 0.0002, 5e-8, 16),
    CPU: StepTime(0.06, 0.001, 2e-6, 0.0008, 1e-7, 4),
}
BLOCKS = {ACCELERATOR: 512, CPU: 256}
_SECONDS, _QUICK_SECONDS = 90.0, 15.0
_CONTEXT = 8192
_COUNTED = ("first_tokens", "late_first_tokens", "paces", "late_paces", "answer_tokens")
_QUIET_S = 6.0  # a Router's counts have all been told when they stayed as they are for so long
_OURS = {"Router": SERVER, "replicas": ENGINE, "proxy": PROXY, "rest of Ray": RAY}


@dataclass(frozen=True, slots=True)
class _Exact:
    """Times that the schedule knows, as it knows those of an emulated device."""

    model: StepTime

    def seconds(self, load: StepLoad) -> float:
        return self.model.seconds(load)

    def fitted(self, _: float) -> StepTime:
        return self.model


class _Asked(NamedTuple):
    """One request, and what is right."""

    arrival: Arrival
    payload: dict[str, Any]
    text: str
    finish: str


def run(bench: Bench) -> None:
    seconds = _QUICK_SECONDS if bench.quick else _SECONDS
    pools = {name: Pool(_Exact(model), BLOCKS[name]) for name, model in TIMES.items()}
    capacity = capacity_of(pools, seconds)
    bench.sample({"what": "capacity"}, {"rate": capacity}, f"{capacity:.1f} generations/s in virtual time")
    with tempfile.TemporaryDirectory(prefix="windve-streams-") as scratch, bench.turn():
        model = longer_model(Path(scratch) / "model", _CONTEXT)
        rule = EmulatedText(str(model))
        with (
            serving(_config(model), RAY_metrics_report_interval_ms="1000") as service,
            bench.steps(len(POINTS)) as step,
        ):
            for load, bursts in POINTS:
                step(f"{kind_of(bursts=bursts)}, {load:g} times capacity")
                arrivals = _in_order(mixed(load * capacity, seconds, bursts=bursts))
                asked = [_asked(rule, number, one) for number, one in enumerate(arrivals)]
                about = {"what": "stream", "arrivals": kind_of(bursts=bursts), "load": load}
                told = _point(service, asked, seconds)
                virtual = told_of(served(pools, [one.arrival for one in asked], noise=NOISE), seconds)
                shown = f"{told['tokens']:.0f} of {virtual['tokens']:.0f} tokens/s in time, {told['late']} late"
                bench.sample(about, {**told, "virtual": virtual}, shown)


def _in_order(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """A burst's one after the other: virtual time would take those of one moment the shortest prompt first."""
    return [one._replace(at=one.at + 1e-6 * number) for number, one in enumerate(arrivals)]


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_app" / "generation_rehearsal.yaml").read_text("utf-8"))
    (application,) = config["applications"]
    application["args"]["model"] = {"id": str(model), "name": "emulated"}
    for seed, (name, times) in enumerate(TIMES.items()):
        emulated = {**asdict(times), "noise": NOISE, "seed": seed}
        application["args"][name] |= {"blocks": BLOCKS[name], "emulated": emulated}
    application["deployments"][0] |= {
        "num_replicas": 1,
        "user_config": {"ttft_s": POLICY.ttft_s, "tpot_s": POLICY.tpot_s},
    }
    return config


def _asked(rule: EmulatedText, number: int, arrival: Arrival) -> _Asked:
    (tokens,) = arrival.tokens
    prompt = np.random.default_rng(number).integers(1000, rule.vocabulary, arrival.prompt_tokens).tolist()
    payload = {
        "model": "emulated", "prompt": prompt, "max_tokens": arrival.most_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if tokens < arrival.most_tokens and (ended := rule.ended(prompt, tokens)) is not None:
        stop, text = ended
        return _Asked(arrival, {**payload, "stop": stop}, text, "stop")
    known = arrival._replace(most_tokens=tokens)  # no words would end it there
    return _Asked(known, {**payload, "max_tokens": tokens}, rule.text(prompt, tokens), "length")


def _point(service: Service, asked: Sequence[_Asked], seconds: float) -> dict[str, Any]:
    before = _settled(service)
    with CpuTime() as cpu, _Watch(service) as watch:
        came = stream_all(service.url, [{"at": one.arrival.at, "payload": one.payload} for one in asked])
    after = _settled(service)
    counted = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    return {
        **_seen(asked, came, seconds),
        "router": counted,
        "learned": watch.means(),
        "others": cpu.others,
        "cpu_s": cpu.seconds,
        "cpu_ms_token": {name: 1000 * cpu.seconds[role] / counted["answer_tokens"] for name, role in _OURS.items()},
    }


def _seen(asked: Sequence[_Asked], came: Sequence[Streamed], seconds: float) -> dict[str, Any]:
    """By the client."""
    pairs = [(one, found) for one, found in zip(asked, came, strict=True) if found.status == 200]
    firsts = [found.first_s is None or found.first_s > POLICY.ttft_s for _, found in pairs]
    paces = [_is_slow(found) for _, found in pairs]
    good = [one for (one, _), *late in zip(pairs, firsts, paces, strict=True) if not any(late)]
    return {
        "offered": len(asked),
        "admitted": len(pairs),
        "busy": sum(found.status == 429 for found in came),
        "odd": sum(found.status not in {200, 429} for found in came),
        "wrong": sum((found.text, found.finish, found.error) != (one.text, one.finish, None) for one, found in pairs),
        "stopped": sum(one.finish == "stop" for one in asked),
        "late_first": sum(firsts),
        "late_pace": sum(paces),
        "late": sum(first or pace for first, pace in zip(firsts, paces, strict=True)),
        "goodput": len(good) / seconds,
        "tokens": sum(one.arrival.tokens[0] for one in good) / seconds,
        "first_p99_s": float(np.quantile([found.first_s or np.inf for _, found in pairs], 0.99)),
        "lag_p99_s": float(np.quantile([found.lag_s for found in came], 0.99)),
    }


def _is_slow(found: Streamed) -> bool:
    if found.tokens < 2 or found.first_s is None or found.last_s is None:
        return found.error is not None
    return found.last_s - found.first_s > (found.tokens - 1) * POLICY.tpot_s


class _Watch(Thread):
    """Reads each second what each pool's replica has learned."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self._url, self._done = f"{service.url}/info", Event()
        self._read: list[tuple[str, float, float]] = []  # pool, factor, margin

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(1.0):
            with urllib.request.urlopen(self._url, timeout=30) as answer:  # noqa: S310 - our own address
                pools = json.load(answer)["windve"]["pools"]
            for name, pool in pools.items():
                self._read += [(name, one["factor"], one["margin"]) for one in pool["replicas"].values()]

    def means(self) -> dict[str, dict[str, float]]:
        """By the pool: the mean and the largest factor, and the mean margin."""
        found = {}
        for name in TIMES:
            factors, margins = zip(*[told for pool, *told in self._read if pool == name], strict=True)
            found[name] = {"factor": float(np.mean(factors)), "most": max(factors), "margin": float(np.mean(margins))}
        return found


def _settled(service: Service) -> dict[str, float]:
    """Of the Router's counters once they stay as they are, all pools together; and generations by the pool."""
    told, since = _counts(service), time.monotonic()
    while time.monotonic() < since + _QUIET_S:
        time.sleep(0.5)
        before, told = told, _counts(service)
        if told != before:
            since = time.monotonic()
    return told


def _counts(service: Service) -> dict[str, float]:
    with urllib.request.urlopen(service.metrics, timeout=30) as answer:  # noqa: S310 - our own address
        text = answer.read().decode()
    found = dict.fromkeys(_COUNTED, 0.0)
    for name, tags, value in re.findall(r"^ray_windve_(\w+)_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        if name in found:
            found[name] += float(value)
        elif name == "queries" and 'outcome="ok"' in tags:
            pool = re.search(r'pool="(\w+)"', tags)
            assert pool is not None
            found[pool[1]] = found.get(pool[1], 0.0) + float(value)
    return found


# --- what is shown ----------------------------------------------------------------------------------------------------


def _streams(found: Found) -> list[dict[str, Any]]:
    return [one for one in found["samples"] if one["what"] == "stream"]


def sheets(found: Found) -> list[Sheet]:
    rates = [one["rate"] for one in found["samples"] if one["what"] == "capacity"]
    title = (
        f"Capacity {rates[0]:.1f} generations/s in virtual time; first token within {POLICY.ttft_s:g} s, "
        f"{POLICY.tpot_s:g} s a token"
    )
    return [
        Sheet(title, ["arrivals", "load", "offered", "admitted", "in virtual time", "by the CPU pool",
                      "tokens/s in time", "in virtual time", "share"],
              [[*_name(one), str(one["offered"]), str(one["admitted"]), str(one["virtual"]["admitted"]),
                f"{one['router'].get(CPU, 0):.0f}", f"{one['tokens']:.0f}", f"{one['virtual']['tokens']:.0f}",
                f"{one['tokens'] / one['virtual']['tokens']:.3f}"] for one in _streams(found)]),
        Sheet("Late", ["arrivals", "load", "first tokens by the Router", "paces by the Router",
                       "first tokens by the client", "paces by the client", "first token p99, s",
                       "the client's own lag p99, s", "wrong answers", "neither answered nor told busy"],
              [[*_name(one), _of(one["router"], "first_tokens"), _of(one["router"], "paces"),
                f"{one['late_first']} of {one['admitted']}", f"{one['late_pace']} of {one['admitted']}",
                f"{one['first_p99_s']:.2f}", f"{one['lag_p99_s']:.3f}", str(one["wrong"]), str(one["odd"])]
               for one in _streams(found)]),
        Sheet("Learned meanwhile, means", ["arrivals", "load", "pool", "factor", "most", "margin"],
              [[*_name(one), pool, f"{told['factor']:.3f}", f"{told['most']:.3f}", f"{told['margin']:.3f}"]
               for one in _streams(found) for pool, told in one["learned"].items()]),
        Sheet("The service's own CPU time, ms a token", ["arrivals", "load", *_OURS, "all", "tokens"],
              [[*_name(one), *(f"{one['cpu_ms_token'][name]:.2f}" for name in _OURS),
                f"{sum(one['cpu_ms_token'].values()):.2f}", f"{one['router']['answer_tokens']:.0f}"]
               for one in _streams(found)]),
    ]  # fmt: skip


def _name(one: Mapping[str, Any]) -> list[str]:
    return [one["arrivals"], f"{one['load']:g} x"]


def _of(counted: Mapping[str, float], what: str) -> str:
    return f"{counted[f'late_{what}']:.0f} of {counted[what]:.0f}"


def goals(found: Found) -> list[Goal]:
    streams = _streams(found)
    by_router = [one["router"][f"late_{what}"] / max(1, one["router"][what]) for one in streams
                 for what in ("first_tokens", "paces")]  # fmt: skip
    by_client = [one["late"] / max(1, one["admitted"]) for one in streams]
    shares = [one["tokens"] / one["virtual"]["tokens"] for one in streams]
    wrong = sum(one["wrong"] + one["odd"] for one in streams) if streams else None
    return [
        Goal("late by the Router, first tokens or paces, the worst", 0.5, _percent(by_router), "%", at_most=True),
        Goal("late by the client, either, the worst", 0.5, _percent(by_client), "%", at_most=True),
        Goal("tokens in time beside virtual time, the least", 0.95, min(shares, default=None)),
        Goal("wrong, or neither answered nor told busy", 0, wrong, "answers", at_most=True),
    ]


def _percent(shares: Sequence[float]) -> float | None:
    return 100 * max(shares) if shares else None


def plot(found: Found) -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    streams = _streams(found)
    places = np.arange(len(streams))
    for shift, colour, name, values in (
        (-0.2, "#0072B2", "real Ray, true speed", [one["tokens"] for one in streams]),
        (0.2, "#999999", "virtual time", [one["virtual"]["tokens"] for one in streams]),
    ):
        axes.bar(places + shift, values, 0.38, color=colour, label=name)
    axes.set_xticks(places, [" ".join(_name(one)) for one in streams])
    axes.set_ylabel("tokens in time, each second")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
