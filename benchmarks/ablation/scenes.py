"""The scenes in which each rule is switched off, in virtual time. Pure: everything is drawn from seeds.

`zoo` is one scheduler on devices that no cost model describes. In all others, windve's Router places, and its replicas
admit and run (`benchmarks/simulation/application.py`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.simulation import zoo
from benchmarks.simulation.application import Application, Ended, Shape
from benchmarks.simulation.arrivals import QUERY_TOKENS, Arrival, poisson
from benchmarks.simulation.device import Device
from benchmarks.simulation.laws import LAWS
from benchmarks.simulation.virtual_time import run as run_virtual
from benchmarks.simulation.wire import Costs
from deployments.admission.fair_share import Tenant
from deployments.admission.quota import Client
from deployments.embedding.request import Request
from deployments.errors import Busy, WindveError

_TURNS = 10**9
_WARM_S = 5.0  # of streams: left out
_LONG = 200  # tokens: more is long
_ZOO_S = 190.0  # scenes with bursts: six count
_LEFT_OUT = {"beta06", "beta09", "alpha14", "quadratic"}  # laws much like others
_QUICK_LAWS = ("exact", "regimes", "noise", "hiccups")
_TINY_LAWS = ("regimes", "convex", "shared")
_BULK_S = 10.0  # in which eight bulk queries should be answered
_ASKED_AGAIN_S = 15.0  # for so long a refused client comes back

V100, V100_END = Device(0.018, 0.27, 8), Device(0.018, 0.27, None)
XEON, MINILM, ATLAS, QUICK = (
    Device(0.0858, 0.32, 8), Device(0.0039, 0.03, 16, noise=0.03), Device(0.00904, 0.24, 8), Device(0.003, 0.004, None)
)  # fmt: skip
_COSTS = Costs(query_s=0.0011, refusal_s=0.0005, place_s=0.00003, frame_s=0.00003, item_s=0.000002)
_TOKENIZE_S = 0.00015

Figures = dict[str, float | None]
"""- `goodput`: work answered in time, per second.
- `late`: the late share of the answers; `lost`: the share of all queries that were neither answered nor refused.
- `worst`: what the worst tenant or class got of what it asked for, or of its fair share.
- `long`: the answered share of long queries' work, over that of all work.
- `requests`: for an answer, of clients that come back."""


class Asked(NamedTuple):
    """A request of `queries` queries. `group`: the tenant or class that `worst` tells apart."""

    at: float
    tokens: int
    allowed_s: float | None = None
    bulk: bool = False
    tenant: Tenant | None = None
    queries: int = 1
    group: str = ""


class Outcome(NamedTuple):
    """`how`: "answered", "busy" or "lost"."""

    asked: Asked
    how: str
    took_s: float
    tries: int


class _World(Application):
    """An application whose requests may have several queries, a tenant, and clients that come back."""

    def __init__(self, shape: Shape, *, returns: bool = False, tokenize_s: float = 0.0) -> None:
        super().__init__(shape)
        self.outcomes: list[Outcome] = []
        self._returns, self._tokenize_s = returns, tokenize_s

    async def _embed(self, router: Any, arrival: Any) -> Ended:
        loop, asked, tries = asyncio.get_running_loop(), arrival, 0
        came = first = loop.time()
        while True:
            tries, how, retry_s = tries + 1, "answered", 0.0
            await self._work(router.core, self.shape.costs.refusal_s / 2 + self.shape.costs.place_s)
            client = None if asked.tenant is None else Client(asked.tenant)
            text = f"{asked.at:<{4 * asked.tokens}.9f}"[: 4 * asked.tokens]
            try:
                how_long = {"timeout_s": asked.allowed_s, "waited_s": loop.time() - came}
                await router.embed(Request([text] * asked.queries, bulk=asked.bulk, client=client, **how_long))
            except WindveError as error:
                how = "busy" if isinstance(error, Busy) else "lost"
                retry_s = getattr(error, "retry_after_s", 0.0)
                await self._work(router.core, self.shape.costs.refusal_s / 2)
            if how != "busy" or not self._returns or loop.time() + retry_s > first + _ASKED_AGAIN_S:
                break
            await asyncio.sleep(retry_s)
            came = loop.time()
        self.outcomes.append(Outcome(asked, how, loop.time() - came, tries))
        return Ended(came, asked.tokens, asked.allowed_s or self.shape.slo_s, loop.time() - came, None)

    async def tokenized(self) -> None:
        """Let tokenizing take time on the Router's core."""
        for router in self.routers:
            encode, core = router.encoder.encode, router.core

            async def slow(queries: Any, prompt: str, _encode: Any = encode, _core: Any = core, **how: Any) -> Any:
                await self._work(_core, self._tokenize_s * len(queries))
                return await _encode(queries, prompt, **how)

            router.encoder.encode = slow  # type: ignore[method-assign]


Fault = Callable[[Application], None]


def play(
    shape: Shape,
    asked: Iterable[Asked],
    seconds: float,
    *,
    returns: bool = False,
    tokenize_s: float = 0.0,
    faults: Mapping[float, Fault] | None = None,
    fair: Mapping[str, float] | None = None,
) -> Figures:
    """`fair`: the least share of its work that each group should get; others should get all."""

    async def serve() -> _World:
        world = _World(shape, returns=returns, tokenize_s=tokenize_s)
        await world.start()
        if tokenize_s:
            await world.tokenized()
        for at, fault in (faults or {}).items():
            asyncio.get_running_loop().call_later(at, fault, world)
        await world.serve(sorted(asked, key=lambda one: one.at))  # type: ignore[arg-type]
        return world

    return _figures(run_virtual(serve(), _TURNS).outcomes, shape.slo_s, seconds, fair or {})


def _figures(outcomes: Sequence[Outcome], slo_s: float, seconds: float, fair: Mapping[str, float]) -> Figures:
    counted = [one for one in outcomes if one.asked.at >= _WARM_S]
    answered = [one for one in counted if one.how == "answered"]
    in_time = [one for one in answered if one.took_s <= _allowed_s(one.asked, slo_s) + 1e-9]
    shares = []
    for group in sorted({one.asked.group for one in counted} - {""}):
        mine = _work(one for one in counted if one.asked.group == group)
        shares.append(_work(one for one in in_time if one.asked.group == group) / mine / fair.get(group, 1.0))
    long = [one for one in counted if one.asked.tokens > _LONG]
    share, of_all = 0.0, _work(answered) / max(1.0, _work(counted))
    if long:
        share = _work(one for one in answered if one.asked.tokens > _LONG) / _work(long)
    return {
        "goodput": _work(in_time) / QUERY_TOKENS / (seconds - _WARM_S),
        "late": 1 - len(in_time) / max(1, len(answered)),
        "lost": sum(one.how == "lost" for one in counted) / max(1, len(counted)),
        "worst": min(1.0, *shares) if shares else None,
        "long": share / max(1e-9, of_all) if long else None,
        "requests": sum(one.tries for one in counted) / max(1, len(answered)),
    }


def _work(some: Iterable[Outcome]) -> float:
    return float(sum(one.asked.tokens * one.asked.queries for one in some))


def _allowed_s(asked: Asked, slo_s: float) -> float:
    return _BULK_S if asked.bulk else asked.allowed_s or slo_s


# --- scenes -----------------------------------------------------------------------------------------------------------


def _zoo(quick: bool) -> Iterator[tuple[str, Figures]]:
    laws = ("exact", "noise", "drift") if quick else tuple(law for law in LAWS if law not in _LEFT_OUT)
    with patch.object(zoo, "BURSTS_S", _ZOO_S):
        for scene in zoo.scenes(laws):
            point = scene[1:]
            wanted = {
                "v100": point in {("v100", "end", "0.8"), ("v100", "pass", "mixed")} or point[2] == "burst",
                "quick": scene.law in _QUICK_LAWS and not quick,
                "tiny": scene.law in _TINY_LAWS and not quick,
            }[scene.base]
            if wanted:
                found = scene.play()
                yield " ".join(scene), {"goodput": found.goodput, "late": found.late}


def _streams(quick: bool) -> Iterator[tuple[str, Figures]]:
    devices = {
        "V100": ({"cpu": V100}, 1.0, 35.0), "V100, at the end": ({"cpu": V100_END}, 1.0, 35.0),
        "V100 + Xeon": ({"accelerator": V100, "cpu": XEON}, 2.0, 25.0), "MiniLM": ({"cpu": MINILM}, 1.0, 9.0),
    }  # fmt: skip
    for name, (pools, slo_s, seconds) in list(devices.items())[: 1 if quick else None]:
        capacity = sum(device.queries_s(slo_s) for device in pools.values())
        for load in (0.9, 2.0, 4.0):
            asked = (_of(one) for one in poisson(load * capacity, seconds, mixed=True))
            yield f"{name}, {load:g} x", play(Shape(1, 1, pools, slo_s, delay_s=(0.0, 0.001)), asked, seconds)
    for name, device, seconds in (("V100", V100, 35.0), ("MiniLM", MINILM, 9.0))[: 1 if quick else None]:
        come = poisson(2 * device.queries_s(1.0), seconds, mixed=True)
        asked = (_of(one, allowed_s=0.7 if one.tokens > _LONG and n % 2 else None) for n, one in enumerate(come))
        yield f"{name}, half of the long ones allow 0.7 s", play(Shape(1, 1, {"cpu": device}, 1.0), asked, seconds)


def _of(arrival: Arrival, **more: Any) -> Asked:
    return Asked(*arrival[:5])._replace(**more)


def _bursts(quick: bool) -> Iterator[tuple[str, Figures]]:
    """206 at once after light load; refused clients leave, or come back when they are told."""
    for name, device, every_s, returns in (
        ("206 on MiniLM", MINILM, 3.0, False), ("206 on a V100, clients return", V100, 12.0, True),
        ("206 on a V100 at the end, clients return", V100_END, 15.0, True),
    ):  # fmt: skip
        seconds = _WARM_S + every_s * (2 if quick else 6)
        asked = [_of(one) for one in poisson(2, seconds, seed=5)]
        for number in range(2 if quick else 6):
            asked += [Asked(_WARM_S + number * every_s + index * 1e-4, 75) for index in range(206)]
        yield name, play(Shape(1, 1, {"cpu": device}, 1.0), asked, seconds, returns=returns)


def _returning(quick: bool) -> Iterator[tuple[str, Figures]]:
    """All refused clients come back when they are told, for 15 s; twice the capacity comes."""
    for name, device in (("V100", V100), ("V100, at the end", V100_END))[: 1 if quick else None]:
        asked = [_of(one) for one in poisson(2 * device.queries_s(1.0), 18.0, mixed=True)]
        yield name, play(Shape(1, 1, {"cpu": device}, 1.0), asked, 18.0, returns=True)


def _tenants(quick: bool) -> Iterator[tuple[str, Figures]]:
    """A tenant that asks for two elevenths of the capacity beside one that asks for twenty."""
    some = {
        "V100": (V100, 1.0), "V100, at the end": (V100_END, 1.0), "Atlas": (ATLAS, 1.0),
        "5 ms, 40 ms": (Device(0.005, 0.04, 8), 0.5), "quick, at the end": (QUICK, 0.5),
    }  # fmt: skip
    for name, (device, slo_s) in list(some.items())[: 1 if quick else None]:
        seconds = 25.0 if device.alpha_s > 0.006 else 10.0
        capacity = (slo_s - device.beta_s) / device.alpha_s / slo_s
        asked = list[Asked]()
        for number, (who, share) in enumerate((("small", 2 / 11), ("large", 20 / 11))):
            stream = poisson(share * capacity, seconds, allowed_s=slo_s, tenant=Tenant(who), seed=100 + number)
            asked += [_of(one, group="small" if who == "small" else "") for one in stream]
        yield name, play(Shape(1, 1, {"cpu": device}, slo_s), asked, seconds)


def _classes(quick: bool) -> Iterator[tuple[str, Figures]]:
    """Urgent queries at 1.5 times the capacity beside ones that allow 20 s, and requests of 8 as bulk, which should
    take no more than `_BULK_S`. On a quick device, deferrable queries are the flood.
    """
    for name, device in (("V100", V100), ("V100, at the end", V100_END), ("MiniLM", MINILM))[: 1 if quick else None]:
        capacity, seconds = device.queries_s(1.0), 20.0 if device is MINILM else 40.0
        asked = [_of(one) for one in poisson(1.5 * capacity, seconds, mixed=True)]
        stream = poisson(0.08 * capacity, seconds, allowed_s=20.0, seed=4)
        asked += [_of(one, group="deferrable") for one in stream]
        asked += [
            Asked(at, 75, None, bulk=True, queries=8, group="bulk")
            for at in range(round(_WARM_S), round(seconds - _BULK_S), max(1, round(8 / (0.03 * capacity))))
        ]
        yield f"{name}, overload", play(Shape(1, 1, {"cpu": device}, 1.0), asked, seconds)
        light = [_of(one, group="deferrable") for one in poisson(0.9 * capacity, seconds, allowed_s=3.0, seed=6)]
        few = [Asked(at / 2, 75, 2.5, queries=12, group="few") for at in range(round(2 * seconds))]
        yield f"{name}, requests of twelve that may wait", play(Shape(1, 1, {"cpu": device}, 1.0), few, seconds)
        yield f"{name}, deferrable alone", play(Shape(1, 1, {"cpu": device}, 1.0), light, seconds)
    capacity = QUICK.queries_s(0.5)
    asked = [_of(one, group="urgent") for one in poisson(0.5 * capacity, 12.0)]
    asked += [_of(one) for one in poisson(1.5 * capacity, 12.0, allowed_s=6.0, seed=4)]
    yield "quick, a flood of deferrable ones", play(Shape(1, 1, {"cpu": QUICK}, 0.5), asked, 12.0)


def _split(quick: bool) -> Iterator[tuple[str, Figures]]:
    """Requests of up to 45 queries, on two nodes with two Routers."""
    for size in (8,) if quick else (8, None):
        pools = {"accelerator": Device(0.018, 0.27, size), "cpu": Device(0.0858, 0.32, size)}
        for delay_s in ((0.0, 0.0), (0.001, 0.004)):
            draw, at, asked = random.Random(1), 0.0, list[Asked]()
            for _ in range(30 if quick else 120):
                for queries in draw.choices([1, 4, 12, 30, 45], k=draw.randint(2, 6)):
                    asked.append(Asked(at, draw.choice([20, 75, 150]), queries=queries))
                    at += draw.choice([0.0, 0.0, 0.002, 0.02])
                at += draw.expovariate(1 / 0.7)
            name = f"{'at the end' if size is None else 'by eight'}, {delay_s[1] * 1e3:g} ms away"
            yield name, play(Shape(2, 2, pools, 1.0, delay_s=delay_s, seed=1), asked, at)


def _faults(quick: bool) -> Iterator[tuple[str, Figures]]:
    """Three replicas at 0.5 of their capacity: from 10 s to 25 s, one of them hangs, fails, is slow, or has died. One
    that fails at once is always idle, so it draws all queries.
    """
    shape, seconds = Shape(3, 1, {"cpu": V100}, 1.0), 40.0

    def slowed(times: float) -> Fault:
        return lambda world: setattr(_first(world).engine, "slow", times)

    def failing(problem: Exception | None) -> Fault:
        return lambda world: setattr(_first(world).engine, "outcome", lambda _: problem)

    def failing_at_once(world: Application) -> None:
        slowed(0.001)(world)
        failing(RuntimeError("broken"))(world)

    def well(world: Application) -> None:
        slowed(1.0)(world)
        failing(None)(world)

    kinds: dict[str, Mapping[float, Fault]] = {
        "hangs": {10.0: slowed(100.0), 25.0: slowed(1.0)},
        "fails": {10.0: failing(RuntimeError("broken")), 25.0: failing(None)},
        "fails at once": {10.0: failing_at_once, 25.0: well},
        "is five times as slow": {10.0: slowed(5.0), 25.0: slowed(1.0)},
        "dies": {10.0: _die},
    }
    for name, faults in list(kinds.items())[: 2 if quick else None]:
        asked = (_of(one) for one in poisson(0.5 * 3 * V100.queries_s(1.0), seconds))
        yield name, play(shape, asked, seconds, faults=faults)
    light, quick_shape = (_of(one) for one in poisson(30.0, seconds, allowed_s=1.9)), Shape(3, 1, {"cpu": MINILM}, 1.0)
    yield "hangs, MiniLM, clients allow 1.9 s", play(quick_shape, light, seconds, faults=kinds["hangs"])
    # One device that was so slow that it refuses everything: is it found when it is quick again?
    again = {5.0: slowed(6.0), 12.0: slowed(1.0)}
    asked = (_of(one) for one in poisson(3.0, 60.0))
    yield "one alone, slow for 7 s", play(Shape(1, 1, {"cpu": V100}, 1.0), asked, 60.0, faults=again)


def _first(world: Application) -> Any:
    return next(iter(world.replicas.values()))


def _die(world: Application) -> None:
    _first(world).die()
    for router in world.routers:
        for pool in router.pools.values():
            pool.follow(world.members(pool.name), _first(world).name)


def _router(_: bool) -> Iterator[tuple[str, Figures]]:
    """A quick device behind one Router whose core is nearly full, with `path`'s costs."""
    device, seconds = Device(0.0024, 0.0023, 16), 8.0
    for load in (0.9, 2.5):
        asked = (_of(one) for one in poisson(load * device.queries_s(1.0), seconds, mixed=True))
        shape = Shape(1, 1, {"cpu": device}, 1.0, costs=_COSTS, delay_s=(0.0001, 0.0005))
        yield f"{load:g} x", play(shape, asked, seconds, tokenize_s=_TOKENIZE_S)


@dataclass(frozen=True, slots=True)
class Group:
    """`play(quick)`: yields each scene's name and figures."""

    about: str
    play: Callable[[bool], Iterator[tuple[str, Figures]]]


GROUPS = {
    "zoo": Group("devices that no cost model describes", _zoo),
    "streams": Group("mixed lengths at 0.9, 2 and 4 times the capacity", _streams),
    "bursts": Group("206 queries at once", _bursts),
    "returning": Group("twice the capacity, and refused clients come back", _returning),
    "tenants": Group("a small tenant beside a large one", _tenants),
    "classes": Group("urgent, deferrable and bulk queries together", _classes),
    "split": Group("requests of up to 45 queries over four replicas", _split),
    "faults": Group("a replica of three hangs, fails, is slow or dies", _faults),
    "router": Group("a Router whose core is nearly full", _router),
}
