"""Generation at true speed: a whole service on real Ray with emulated accelerator and CPU pools, and streams from a
client in a separate process. Compared with virtual time for the same arrivals, devices and promise (`generation`).

A request's `max_tokens` is the maximum that virtual time uses, and a `stop` ends the answer where virtual time ends it,
so the service does not know the end in advance. Refused requests are not retried. Times count from the planned moment
of a request, so a client that lags makes answers late.
"""

import re
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.comparisons.generation import NOISE, POLICY, Pool, capacity_of, kind_of, served, told_of
from benchmarks.kit.bench import Bench, Found, all_of, one_of
from benchmarks.kit.cpu_time import ENGINE, PROXY, RAY, SERVER, CpuTime
from benchmarks.kit.emulated_text import EmulatedText, longer_model
from benchmarks.kit.goal import Goal
from benchmarks.kit.serving import Service, serving, settled, shipped
from benchmarks.kit.sheet import Sheet, table
from benchmarks.kit.streaming import stream_all
from benchmarks.simulation.step_world import Arrival, mixed
from calibration.generation.token_stream import ClientStream
from deployments.generation.scheduler.step_time import StepLoad, StepTime
from deployments.hardware.device_detector import ACCELERATOR, CPU

POINTS = ((1.0, False), (1.5, True))  # times capacity; in bursts
TIMES = {
    ACCELERATOR: StepTime(0.04, 0.0004, 1e-6, 0.0002, 5e-8, 16),
    CPU: StepTime(0.06, 0.001, 2e-6, 0.0008, 1e-7, 4),
}
BLOCKS = {ACCELERATOR: 512, CPU: 256}
_SECONDS, _QUICK_SECONDS = 90.0, 15.0
_CONTEXT = 8192
_COUNTED = ("ttft_promised", "ttft_missed", "tpot_promised", "tpot_missed", "answer_tokens")
_QUIET_S = 6.0  # a Router's counters are complete once they have not changed for this long
_OURS = {"Router": SERVER, "replicas": ENGINE, "proxy": PROXY, "rest of Ray": RAY}


@dataclass(frozen=True, slots=True)
class _Exact:
    """Times that the scheduler knows exactly, as for an emulated device."""

    model: StepTime

    def seconds(self, load: StepLoad) -> float:
        return self.model.seconds(load)

    def fitted(self, _: float) -> StepTime:
        return self.model


class _Asked(NamedTuple):
    """One request, and its correct answer."""

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
    """Spread a burst's arrivals slightly: virtual time would order simultaneous ones by prompt length."""
    return [one._replace(at=one.at + 1e-6 * number) for number, one in enumerate(arrivals)]


def _config(model: Path) -> dict[str, Any]:
    config = shipped("generation_rehearsal.yaml")
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
    before = settled(lambda: _counts(service), _QUIET_S)
    with CpuTime() as cpu:
        came = stream_all(service.url, [{"at": one.arrival.at, "payload": one.payload} for one in asked])
    after = settled(lambda: _counts(service), _QUIET_S)
    counted = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    return {
        **_seen(asked, came, seconds),
        "router": counted,
        "others": cpu.others,
        "cpu_s": cpu.seconds,
        "cpu_ms_token": {name: 1000 * cpu.seconds[role] / counted["answer_tokens"] for name, role in _OURS.items()},
    }


def _seen(asked: Sequence[_Asked], came: Sequence[ClientStream], seconds: float) -> dict[str, Any]:
    """What the client saw."""
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


def _is_slow(found: ClientStream) -> bool:
    if found.tokens < 2 or found.first_s is None or found.last_s is None:
        return found.error is not None
    return found.last_s - found.first_s > (found.tokens - 1) * POLICY.tpot_s


def _counts(service: Service) -> dict[str, float]:
    """The Router's counters over all pools, and the generations by pool."""
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


# --- tables and goals ---------------------------------------------------------------------------------------------

_STREAM = {"arrivals": "{arrivals}", "load": "{load:g} x"}


def _streams(found: Found) -> list[dict[str, Any]]:
    """Rows with each stream's tokens in time over virtual time's, and its CPU time over the tokens of all answers."""
    return [
        {
            **one,
            "share": one["tokens"] / one["virtual"]["tokens"],
            "by_cpu": one["router"].get(CPU, 0.0),
            "all_ms": sum(one["cpu_ms_token"].values()),
        }
        for one in all_of(found, what="stream")
    ]


def sheets(found: Found) -> list[Sheet]:
    rate = (one_of(found, what="capacity") or {"rate": float("nan")})["rate"]
    promise = f"first token within {POLICY.ttft_s:g} s, {POLICY.tpot_s:g} s a token"
    served_columns = {
        **_STREAM, "offered": "{offered}", "admitted": "{admitted}", "in virtual time": "{virtual[admitted]}",
        "by the CPU pool": "{by_cpu:.0f}", "tokens/s in time": "{tokens:.0f}",
        "the same in virtual time": "{virtual[tokens]:.0f}", "share": "{share:.3f}",
    }  # fmt: skip
    late_columns = {
        **_STREAM, "first tokens by the Router": "{router[ttft_missed]:.0f} of {router[ttft_promised]:.0f}",
        "paces by the Router": "{router[tpot_missed]:.0f} of {router[tpot_promised]:.0f}",
        "first tokens by the client": "{late_first} of {admitted}", "paces by the client": "{late_pace} of {admitted}",
        "first token p99, s": "{first_p99_s:.2f}", "the client's own lag p99, s": "{lag_p99_s:.3f}",
        "wrong answers": "{wrong}", "neither answered nor refused": "{odd}",
    }  # fmt: skip
    cpu_columns = {**_STREAM, **{name: f"{{cpu_ms_token[{name}]:.2f}}" for name in _OURS}}
    cpu_columns |= {"all": "{all_ms:.2f}", "tokens": "{router[answer_tokens]:.0f}"}
    streams = _streams(found)
    return [
        table(f"Capacity {rate:.1f} generations/s in virtual time; {promise}", served_columns, streams),
        table("Late", late_columns, streams),
        table("The service's own CPU time, ms a token", cpu_columns, streams),
    ]


def goals(found: Found) -> list[Goal]:
    streams = _streams(found)
    late = max((100 * one["late"] / max(1, one["admitted"]) for one in streams), default=None)
    least = min((one["share"] for one in streams), default=None)
    wrong = sum(one["wrong"] + one["odd"] for one in streams) if streams else None
    return [
        Goal("late by the client, first tokens or paces, the worst", 0.5, late, "%", at_most=True),
        Goal("tokens in time beside virtual time, the least", 0.95, least),
        Goal("wrong, or neither answered nor refused", 0, wrong, "answers", at_most=True),
    ]
