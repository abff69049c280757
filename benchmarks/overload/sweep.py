"""One server's sweep: its capacity first, then loads from below to far above it."""

import asyncio
import itertools
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.overload.account import figures
from benchmarks.overload.client import ClosedLoop, Endpoint, OpenLoop, answer_to
from benchmarks.overload.schedule import ARRIVALS, LENGTHS, SEED, Shape, span_s
from calibration.load import Clients

T = TypeVar("T")
LOADS, QUICK_LOADS = (0.3, 0.6, 0.9, 1.2, 2.0, 3.0, 4.0), (0.5, 1.0, 2.0, 4.0)
_SECONDS, _QUICK_SECONDS = 60.0, 12.0  # of each load; MLPerf's minimum duration is 600
_QUERIES, _QUICK_QUERIES = 662, 100  # minimum per load; 662 prove a p99 if one query is late
_GIVE_UP_SLOS = 5.0
_CLOSED, _MOST_CLOSED = 4, 1024  # clients in the closed loop, first and at most
_GROWTH, _FLAT_STEPS = 1.05, 2  # capacity is reached once two doublings give less
_LEAST_STEPS, _LONGEST_WAIT_SLOS = 3, 2.0
_TEXTS = 512
_MOST_OPENED = 1000  # connections that are opened beforehand
_MOST_RECOVERY_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure on a server. Loads are multiples of its capacity."""

    slo_s: float
    loads: Sequence[float]
    seconds: float
    queries: int
    lengths: Sequence[str] = LENGTHS
    arrivals: Sequence[str] = ARRIVALS
    give_up_s: float = 0.0
    closed_s: float = 4.0  # of each step of the closed loop
    longest: int = 256
    seed: int = SEED

    @classmethod
    def usual(cls, slo_s: float, *, quick: bool = False, **others: Any) -> "Plan":
        """The usual plan: about 6 minutes per server if `quick`, else about 45. `others` that are None get defaults."""
        loads, seconds, queries = (
            (QUICK_LOADS, _QUICK_SECONDS, _QUICK_QUERIES) if quick else (LOADS, _SECONDS, _QUERIES)
        )
        usual = {"loads": loads, "seconds": seconds, "queries": queries, "give_up_s": _GIVE_UP_SLOS * slo_s}
        usual["closed_s"] = 2.0 if quick else 4.0
        return cls(slo_s, **usual | {key: value for key, value in others.items() if value is not None})

    def shape(self, arrivals: str, lengths: str) -> Shape:
        return Shape(arrivals, lengths, self.slo_s, self.longest, self.seed)

    @property
    def points(self) -> Iterator[tuple[str, str, float]]:
        """(lengths, arrivals, load)."""
        return itertools.product(self.lengths, self.arrivals, self.loads)


def check(endpoint: Endpoint) -> None:
    """Raises RuntimeError if the endpoint does not answer a lone query with a vector."""

    async def ask(clients: Clients) -> None:
        reply = await answer_to(clients, endpoint.request(16, 0))
        try:
            vector = reply.json()["data"][0]["embedding"]
        except (ValueError, KeyError, TypeError, IndexError):
            vector = None
        if reply.status != 200 or not vector:
            raise RuntimeError(f"{endpoint.address}{endpoint.path} gives no embedding: {reply.problem}")

    _with_clients(endpoint, 60.0, ask)


def capacity(endpoint: Endpoint, plan: Plan, lengths: str) -> dict[str, Any]:
    """`queries_s`: the maximum rate of a closed loop. Its clients are doubled until the rate no longer grows, the
    server refuses, or a client waits longer than twice the SLO (clients / rate seconds, by Little's law). `steps`:
    clients -> answers per second. Raises RuntimeError.
    """
    shape = plan.shape(ARRIVALS[0], lengths)
    schedule = shape.schedule(1.0, 0.0, _TEXTS)
    requests = [endpoint.request(query.tokens, number) for number, query in enumerate(schedule)]

    async def double(clients: Clients) -> dict[str, Any]:
        loop, steps, best, flat = ClosedLoop(clients, requests), {}, 0.0, 0
        await loop.run(_CLOSED, plan.closed_s / 2)  # warm-up
        connections = _CLOSED
        while connections <= _MOST_CLOSED and flat < _FLAT_STEPS:
            steps[connections] = rate = await loop.run(connections, plan.closed_s)
            flat = 0 if rate > _GROWTH * best else flat + 1
            best = max(best, rate)
            waits_long = len(steps) >= _LEAST_STEPS and connections > _LONGEST_WAIT_SLOS * rate * plan.slo_s
            if waits_long or loop.refused > 0.01 * loop.answered:
                break
            connections *= 2
        if not best:
            raise RuntimeError(f"{endpoint.address} refuses even {_CLOSED} clients at once")
        return {"queries_s": best, "steps": steps}

    return _with_clients(endpoint, 60.0, double)


def point(endpoint: Endpoint, plan: Plan, shape: Shape, queries_s: float) -> dict[str, Any]:
    """The results of a load of `queries_s`: `account.figures`; `client_cores`, the cores that the load generator used;
    `recover_s`, from the load's end until a lone query meets the SLO (None if that takes too long). Raises RuntimeError
    if clients cannot connect.
    """
    schedule = shape.schedule(queries_s, plan.seconds, plan.queries)
    lasts_s = span_s(schedule, plan.seconds, shape)

    async def load(clients: Clients) -> dict[str, Any]:
        try:
            await clients.open(min(_MOST_OPENED, int(1.5 * queries_s * plan.slo_s) + 50))
        except (OSError, EOFError) as error:
            raise RuntimeError(f"{endpoint.address} takes no connections: {error!r}") from error
        loop, used, began = OpenLoop(clients, endpoint), time.process_time(), time.perf_counter()
        await loop.run(schedule)
        used, lasted = time.process_time() - used, time.perf_counter() - began
        found = figures(loop.outcomes, loop.comebacks, plan.slo_s, lasts_s)
        found["raw"] = [(round(one.query.at_s, 3), round(one.seconds, 3), one.status or 0) for one in loop.outcomes]
        return found | {
            "offered_s": len(schedule) / lasts_s,
            "span_s": lasts_s,
            "client_cores": used / lasted,
            "recover_s": await _recover(clients, endpoint, plan.slo_s),
        }

    return _with_clients(endpoint, plan.give_up_s, load)


async def _recover(clients: Clients, endpoint: Endpoint, slo_s: float) -> float | None:
    """Seconds until a lone query is answered within the SLO. Repeats it while it is refused or late."""
    began, number = time.perf_counter(), 0
    while (so_far := time.perf_counter() - began) < _MOST_RECOVERY_S:
        asked, number = time.perf_counter(), number + 1
        try:
            reply = await clients.ask(endpoint.request(16, number))
        except (OSError, EOFError):
            reply = None
        if reply is not None and reply.status == 200 and reply.ended_s - asked <= slo_s:
            return so_far
        await asyncio.sleep(slo_s / 10)
    return None


def _with_clients(endpoint: Endpoint, timeout_s: float, use: Callable[[Clients], Awaitable[T]]) -> T:
    async def run() -> T:
        clients = Clients(endpoint.address, timeout_s)
        try:
            return await use(clients)
        finally:
            clients.hang_up()

    return asyncio.run(run())


def let_open_many_files() -> None:
    """Raise the limit of open files, also for child processes: an overloaded server keeps a connection per query."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY or sys.platform == "darwin" else min(hard, 65_536)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def shown(found: dict[str, Any]) -> str:
    """A line for the terminal."""
    text = (
        f"{found['goodput_s']:.1f}/s in time of {found['offered_s']:.1f}/s, late {found['late_share']:.1%}, "
        f"refused {found['refused_share']:.1%}, failed {found['failed']}"
    )
    return text + (f", client behind by {found['lag_p99_s']:.2f} s" if found["lag_p99_s"] > 0.1 else "")
