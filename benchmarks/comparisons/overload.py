"""Beyond capacity: windve and its peers at 0.3 to 3 times each server's capacity, timed at the client.

Each server's capacity is measured with default settings. Then its settings are tried at twice that load, and the best
of them are measured. Loads are multiples of the capacity with default settings. The load generator runs on the same
cores; the tables show its share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.comparisons.overload_servers import DEFAULT, WINDVE, Server, Setting, servers, shown
from benchmarks.kit.bench import Bench, Found, NotAvailable
from benchmarks.kit.goal import Goal, ratio
from benchmarks.kit.sheet import Sheet, table
from benchmarks.overload import report, sweep
from benchmarks.overload.client import Endpoint
from benchmarks.overload.schedule import POISSON
from benchmarks.overload.sweep import Plan

SLO_S = 1.0
_LOADS, _QUICK_LOADS = (0.3, 0.9, 1.2, 2.0, 3.0), (0.5, 1.0, 2.0)
_SECONDS, _QUICK_SECONDS = 15.0, 10.0
_TUNING_LOAD, _TUNING_S = 2.0, 10.0
_QUERIES, _QUICK_QUERIES = 459, 100  # of each load at least; 459 prove a p99 where none is late


def run(bench: Bench) -> None:
    """`--only` takes names of servers. Raises NotAvailable if none could be measured."""
    loads, seconds = (_QUICK_LOADS, _QUICK_SECONDS) if bench.quick else (_LOADS, _SECONDS)
    queries = _QUICK_QUERIES if bench.quick else _QUERIES
    plan = Plan.usual(SLO_S, quick=bench.quick, loads=loads, seconds=seconds, queries=queries)
    sweep.let_open_many_files()
    for server in servers(SLO_S):
        if bench.wants(server.name):
            with bench.turn():
                try:
                    _Contest(bench, plan, server).run()
                except (NotAvailable, RuntimeError) as error:
                    bench.missing(server.name, str(error))
    if not bench.found["samples"]:
        raise NotAvailable("no server could be measured")


@dataclass(slots=True)
class _Contest:
    """One server: its `capacities` (lengths -> queries/s) with default settings, its best setting, then its sweep."""

    bench: Bench
    plan: Plan
    server: Server
    capacities: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Raises NotAvailable if it is not installed, RuntimeError if it does not answer."""
        best = self._tune()
        with self.server.running(best) as url:
            endpoint = Endpoint.parse(url)
            for lengths, arrivals, load in self.plan.points:
                most_s = self.capacities[lengths]
                shape = self.plan.shape(arrivals, lengths)
                found = self.bench.measure(partial(sweep.point, endpoint, self.plan, shape, load * most_s))
                del found["raw"]
                about = {"contestant": self.server.name, "lengths": lengths, "arrivals": arrivals, "load": load}
                self.bench.sample(about, {**found, "capacity_s": most_s}, sweep.shown(found))

    def _tune(self) -> Setting:
        with self.server.running(DEFAULT) as url:
            endpoint = Endpoint.parse(url)
            sweep.check(endpoint)
            for lengths in self.plan.lengths:
                self._measure_capacity(endpoint, lengths)
            scores = [(self._score(endpoint, DEFAULT), DEFAULT)]
        for setting in self.server.settings(max(1, round(self.capacities[self.plan.lengths[0]] * SLO_S))):
            with self.server.running(setting) as url:
                scores.append((self._score(Endpoint.parse(url), setting), setting))
        _, best = max(scores, key=itemgetter(0))
        self._say(f"measured with: {shown(best)}")
        tried = {shown(setting): score for score, setting in scores}
        self.bench.found.setdefault("tuned", {})[self.server.name] = {"setting": shown(best), "tried": tried}
        return best

    def _measure_capacity(self, endpoint: Endpoint, lengths: str) -> None:
        found = sweep.capacity(endpoint, self.plan, lengths)
        self.capacities[lengths] = float(found["queries_s"])
        steps = ", ".join(f"{clients}: {rate:.1f}" for clients, rate in found["steps"].items())
        self._say(f"{lengths} lengths: {self.capacities[lengths]:.1f} queries/s at most (clients: {steps})")

    def _score(self, endpoint: Endpoint, setting: Setting) -> float:
        """Goodput over capacity at twice the load, averaged over the kinds of lengths."""
        tuning = replace(self.plan, seconds=_TUNING_S, queries=0)
        shares: list[float] = []
        for lengths, most_s in self.capacities.items():
            found = sweep.point(endpoint, tuning, tuning.shape(POISSON, lengths), _TUNING_LOAD * most_s)
            shares.append(found["goodput_s"] / most_s)
        self._say(f"{shown(setting)}: {mean(shares):.0%} of capacity in time at twice the load")
        return mean(shares)

    def _say(self, what: str) -> None:
        self.bench.console.print(f"{self.server.name}, {what}")


# --- tables and goals ---------------------------------------------------------------------------------------------


def sheets(found: Found) -> list[Sheet]:
    columns = {"": "{name}", "measured with": "{setting}", "in time at twice the load, of capacity": "{scores}"}
    rows = [
        {"name": name, **tuned, "scores": "; ".join(f"{key}: {score:.0%}" for key, score in tuned["tried"].items())}
        for name, tuned in found["tuned"].items()
    ]
    return [*report.sheets(found["samples"], SLO_S), table("Settings that were tried", columns, rows)]


def goals(found: Found) -> list[Goal]:
    samples: Sequence[Mapping[str, Any]] = found["samples"]
    ours = [one for one in samples if one["contestant"] == WINDVE]
    twice = [one for one in ours if one["load"] == _TUNING_LOAD]
    late = max((100 * one["late_share"] for one in ours), default=None)
    beside = [share for one in twice if (share := ratio(one["goodput_s"], _best_peer(samples, one))) is not None]
    return [
        Goal("windve: late, most of any load", 1.0, late, "%", at_most=True),
        Goal("windve: goodput at twice its load beside the best peer's, the least", 1.0, min(beside, default=None)),
    ]


def _best_peer(samples: Sequence[Mapping[str, Any]], ours: Mapping[str, Any]) -> float | None:
    """The best peer's goodput at twice its own capacity."""
    alike = ("lengths", "arrivals", "load")
    peers = [
        one["goodput_s"] for one in samples
        if not one["contestant"].startswith(WINDVE) and all(one[key] == ours[key] for key in alike)
    ]  # fmt: skip
    return max(peers, default=None)


def plot(found: Found) -> Figure:
    return report.plot(found["samples"], SLO_S)
