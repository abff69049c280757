"""The whole service on the CPU against its peers: the same weights, the same texts, one server at a time.

Each round starts every contestant once. There are several rounds, so that other work on the machine affects all alike.
Before a contestant is measured, its vectors are compared with those of sentence-transformers in float32.
"""

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.comparisons.contestants import NAMES, ROUTE, WINDVE, contestant, model_variables, taking_part
from benchmarks.kit.arrivals import closed_loop
from benchmarks.kit.bench import Bench, Found, median, samples_of, values_of
from benchmarks.kit.cpu_time import time_sheet
from benchmarks.kit.environments import binaries
from benchmarks.kit.figures import bars, figure_of, panels
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.serving import ROOT
from benchmarks.kit.sheet import Sheet, table
from benchmarks.kit.texts import lengths_like_rag, of_tokens
from calibration.load import Address, burst, request_bytes

SLO_S = 1.0
_AGREEMENT = 0.99
_TRIES = 3  # of a burst; most of them must meet the SLO
_PRECISION = 0.04
PEERS = tuple(name for name in NAMES if name != WINDVE)


@dataclass(frozen=True, slots=True)
class Load:
    """A load of requests with `texts` texts each, at several numbers of connections."""

    name: str
    connections: Sequence[int]
    texts: int
    lengths: Sequence[int]

    def payloads(self) -> list[dict[str, Any]]:
        texts = [of_tokens(length, seed) for seed, length in enumerate(self.lengths)]
        if self.texts == 1:
            return [{"input": text} for text in texts]
        return [{"input": texts[first : first + self.texts]} for first in range(0, len(texts), self.texts)]


SAME = Load("75 tokens", (1, 32, 128), 1, (75,) * 512)
MIXED = Load("8 to 500 tokens", (1, 32, 128), 1, tuple(lengths_like_rag(512)))
MANY = Load("32 texts a call", (1, 8), 32, (75,) * 512)
LOADS = (SAME, MIXED, MANY)


class _Reference:
    """Texts and their vectors, from sentence-transformers in float32."""

    def __init__(self) -> None:
        self._texts = [of_tokens(length, seed=length) for length in (8, 75, 200, 256, 500)]
        self._texts += ["Wohin fliesst der Ueberlauf?", "溢出的请求去了哪里?"]
        done = subprocess.run(  # noqa: S603 - our own command
            [binaries("mosec") / "python", "-m", "benchmarks.peers.reference"],
            input=json.dumps(self._texts), capture_output=True, text=True, check=True, cwd=ROOT, env=model_variables(),
        )  # fmt: skip
        self._vectors = np.array(json.loads(done.stdout))

    def agreement(self, url: str) -> float:
        """The smallest cosine to the contestant's vectors. Texts are sent one by one, and then all in one call."""
        asked = [*([text] for text in self._texts), self._texts]
        wanted = np.concatenate([self._vectors, self._vectors])
        replies = burst(Address.parse(url), [request_bytes({"input": texts}, ROUTE) for texts in asked])
        if any(reply.status != 200 for reply in replies):
            raise RuntimeError(f"it answers {sorted({reply.status for reply in replies})}")
        found = np.array([item["embedding"] for reply in replies for item in reply.json()["data"]])
        norms = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
        return float(((found * wanted).sum(axis=1) / norms).min())


def run(bench: Bench) -> None:
    rounds, seconds = (1, 3.0) if bench.quick else (2, 4.0)
    wanted = [name for name in taking_part() if bench.wants(name)]
    with bench.turn():
        reference = _Reference()
    steps = len(wanted) * (sum(len(load.connections) for load in LOADS) + 2)
    with bench.steps(rounds * steps) as step:
        for number in range(rounds):
            for name in wanted[number % len(wanted) :] + wanted[: number % len(wanted)]:
                with bench.turn():
                    step(f"{name}: starting")
                    try:
                        with contestant(name) as url:
                            _measure(
                                bench, reference, {"contestant": name, "round": number}, url, seconds=seconds, step=step
                            )
                    except RuntimeError as error:
                        bench.missing(name, str(error))


def _measure(
    bench: Bench, reference: _Reference, about: dict[str, Any], url: str, *, seconds: float, step: Callable[[str], None]
) -> None:
    """Measure one contestant in one round. Raises RuntimeError if it gives wrong answers or none."""
    name = about["contestant"]
    agreement = reference.agreement(url)
    bench.sample({**about, "load": "agreement"}, {"cosine": agreement}, f"smallest cosine {agreement:.5f}")
    if agreement < _AGREEMENT:
        raise RuntimeError(f"its vectors are not the reference's: cosine {agreement:.3f}")
    guess = 32.0
    for load in LOADS:
        requests = [request_bytes(payload, ROUTE) for payload in load.payloads()]
        closed_loop(url, requests, connections=min(32, load.connections[-1]), seconds=seconds / 3)
        for connections in load.connections:
            step(f"{name}: {load.name}, {connections} at once")
            told = bench.measure(partial(closed_loop, url, requests, connections=connections, seconds=seconds))
            told["queries_s"] = told["requests_s"] * load.texts
            show = f"{told['queries_s']:.1f} queries/s, {told['p50_ms']:.1f} ms (p99 {told['p99_ms']:.1f})"
            bench.sample({**about, "load": load.name, "connections": connections}, told, show)
            if load is SAME:
                guess = told["queries_s"]
    step(f"{name}: largest burst")
    told = bench.measure(lambda: _largest_burst(url, max(8, int(guess * SLO_S))))
    bench.sample({**about, "load": "burst"}, told, f"{told['largest']} at once in {SLO_S:g} s")


def _largest_burst(url: str, guess: int) -> dict[str, Any]:
    """The largest burst whose slowest query meets the SLO in most tries, to within a few per cent."""
    tried: list[dict[str, Any]] = []
    requests = [request_bytes(payload, ROUTE) for payload in SAME.payloads()]
    address = Address.parse(url)

    def holds(level: int) -> bool:
        met = 0
        for number in range(_TRIES):
            replies = burst(address, (requests * math.ceil(level / len(requests)))[:level])
            slowest = max(reply.seconds for reply in replies)
            fine = slowest <= SLO_S and all(reply.status == 200 for reply in replies)
            tried.append({"level": level, "slowest_s": slowest, "fine": fine})
            met += fine
            if met * 2 > _TRIES or (number + 1 - met) * 2 > _TRIES:
                break
        return met * 2 > _TRIES

    low, high = 0, guess
    while holds(high):
        low, high = high, math.ceil(high * 1.3)
    while high - low > max(1, _PRECISION * high):
        middle = (low + high) // 2 if low else max(1, int(high * 0.75))
        low, high = (middle, high) if holds(middle) else (low, middle)
        if high == 1:
            break
    return {"largest": low, "tried": tried}


# --- tables and goals ---------------------------------------------------------------------------------------------


def sheets(found: Found) -> list[Sheet]:
    shown = [name for name in NAMES if values_of(found, "cosine", contestant=name)]
    return [*(_load_sheet(found, shown, load) for load in LOADS), _burst_sheet(found, shown), _time_sheet(found, shown)]


def _load_sheet(found: Found, shown: Sequence[str], load: Load) -> Sheet:
    most = load.connections[-1]
    columns = {"": "{name}"}
    columns |= {f"queries/s at {connections}": f"{{at {connections}:,.1f}}" for connections in load.connections}
    columns |= {f"{key} alone, ms": f"{{{key}_ms:,.1f}}" for key in ("p50", "p99")}
    columns |= {f"p99 at {most}, ms": "{tail:,.1f}", "windve is faster by": "{times:,.2f}"}
    rows = []
    for name in shown:
        row: dict[str, Any] = {f"at {count}": _rate(found, name, load, count) for count in load.connections}
        row |= {key: _figure(found, key, name, load, 1) for key in ("p50_ms", "p99_ms")}
        times = ratio(_rate(found, WINDVE, load), _rate(found, name, load))
        rows.append({**row, "name": name, "tail": _figure(found, "p99_ms", name, load, most), "times": times})
    return table(load.name, columns, rows)


def _burst_sheet(found: Found, shown: Sequence[str]) -> Sheet:
    columns = {"": "{name}", f"largest burst within {SLO_S:g} s": "{largest:,.0f}"}
    columns |= {"windve's is larger by": "{times:,.2f}", "smallest cosine to float32": "{cosine:.4f}"}
    rows = []
    for name in shown:
        largest = median(found, "largest", contestant=name)
        times = ratio(median(found, "largest", contestant=WINDVE), largest)
        cosine = min(values_of(found, "cosine", contestant=name))
        rows.append({"name": name, "largest": largest, "times": times, "cosine": cosine})
    return table("75 tokens, all at once, connections opened before", columns, rows)


def _time_sheet(found: Found, shown: Sequence[str]) -> Sheet:
    most = SAME.connections[-1]
    samples = {name: samples_of(found, "cpu_s", contestant=name, load=SAME.name, connections=most) for name in shown}
    title = f"Where the cores' time goes, {SAME.name}, {most} at once: ms for each query"
    return time_sheet(title, samples, lambda sample: len(sample["latencies_ms"]), ".2f")


def goals(found: Found) -> list[Goal]:
    """The goals, against the best peer."""
    rates = {load: _rate(found, WINDVE, load) for load in (SAME, MIXED)}
    best = {load: _best(_rate(found, name, load) for name in PEERS) for load in rates}
    bursts = _best(median(found, "largest", contestant=name) for name in PEERS)
    largest = ratio(median(found, "largest", contestant=WINDVE), bursts)
    return [
        Goal("75 tokens, 128 at once, against the best peer", 1.4, ratio(rates[SAME], best[SAME])),
        Goal("8 to 500 tokens, 128 at once, against the best peer", 2.0, ratio(rates[MIXED], best[MIXED])),
        Goal(f"largest burst within {SLO_S:g} s, against the best peer", 1.4, largest),
    ]


def _best(figures: Iterable[float | None]) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)


def plot(found: Found) -> Figure:
    every = panels((10, 3.4), 3)
    shown = [name for name in NAMES if values_of(found, "cosine", contestant=name)]
    at_once: dict[str, tuple[str, dict[str, Any]]] = {
        f"{load.name}: queries/s, 128 at once": ("queries_s", {"load": load.name, "connections": 128})
        for load in (SAME, MIXED)
    }
    at_once[f"largest burst within {SLO_S:g} s"] = ("largest", {"load": "burst"})
    bars(every, {
        label: {name: values_of(found, key, contestant=name, **about) for name in shown}
        for label, (key, about) in at_once.items()
    })  # fmt: skip
    return figure_of(every)


def _rate(found: Found, name: str, load: Load, connections: int | None = None) -> float | None:
    return _figure(found, "queries_s", name, load, connections or load.connections[-1])


def _figure(found: Found, key: str, name: str, load: Load, connections: int) -> float | None:
    return median(found, key, contestant=name, load=load.name, connections=connections)
