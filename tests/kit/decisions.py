"""Prints a digest of all scheduler decisions for each simulated world and seed. It must be the same before and after a
change that only moves code.

    python -m tests.kit.decisions > before.txt
    python -m tests.kit.decisions | diff before.txt -
"""

import argparse
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.comparisons.generation import CASES, served, two_tenants
from deployments.admission.fair_share import Tenant
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import Policy, ScheduledQuery
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import StepPolicy
from tests.kit.replica_world import ATLAS, KUNPENG, V100, XEON, World
from tests.kit.simulation.application import Application, Costs, Shape
from tests.kit.simulation.arrivals import Arrival, poisson
from tests.kit.simulation.device import Device
from tests.kit.simulation.hybrid_device import HybridDevice
from tests.kit.simulation.step_world import StepDevice, StepWorld, mixed
from tests.kit.virtual_time import run

SEEDS = 20
TURNS = 10**7
DECISIONS = {
    Scheduler: ("offer", "start_in_s", "start", "state", "utilization"),
    StepScheduler: ("offer", "next_step", "copies", "called_off", "state"),
}


@contextmanager
def watched(told: Callable[[object], None]) -> Iterator[None]:
    """Within this context, `told` gets each decision: its name, the time, and the result as plain numbers."""
    before = [(kind, name, getattr(kind, name)) for kind, names in DECISIONS.items() for name in names]

    def watch(kind: type, name: str, decide: Callable[..., Any]) -> None:
        def decided(self: object, *given: Any, **how: Any) -> Any:
            result = decide(self, *given, **how)
            told((name, [float(one) for one in given if isinstance(one, float)], plain(result)))
            return result

        setattr(kind, name, decided)

    for kind, name, decide in before:
        watch(kind, name, decide)
    try:
        yield
    finally:
        for kind, name, decide in before:
            setattr(kind, name, decide)


def plain(result: object) -> object:
    """A result without names of types and fields. A query or a row is reduced to what identifies it."""
    if isinstance(result, float):
        return float(result)
    if isinstance(result, str | int | None):
        return result
    if hasattr(result, "tokens") and hasattr(result, "due"):
        return result.tokens, result.due
    if hasattr(result, "generation"):
        return result.generation.prompt_tokens, result.generation.due, result.number, list(result.table)
    assert hasattr(result, "__iter__"), result
    return [plain(one) for one in result]


def bursts(draw: random.Random, slo_s: float) -> list[Arrival]:
    """Bursts of random lengths and deadlines, some bulk, some with tenants."""
    out, at = [], 0.0
    tenants = [None, Tenant("a"), Tenant("b", 3.0), Tenant("c", 0.5)]
    for _ in range(400):
        at += draw.choice([0.0, 0.0, 0.001, 0.005, 0.02, 0.1, 0.3, 1.0]) * slo_s
        allowed_s = draw.choice([0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.0, 1.5, 2.0, 2.1, 5.0, 20.0]) * slo_s
        tokens = draw.choice([4, 20, 75, 75, 200, 512])
        arrival = Arrival(at, tokens, allowed_s, draw.random() < 0.2, draw.choice(tenants))
        out += [arrival] * draw.choice([1, 1, 1, 3, 12])
    return out


def replicas(seed: int) -> None:
    """Devices that run as predicted, that are noisy, and that become slow."""
    draw = random.Random(seed)
    curves = draw.sample([V100, XEON, ATLAS, KUNPENG], 2)
    devices = [Device(*curve, draw.choice([None, 8]), noise=draw.choice([0.0, 0.02, 0.1])) for curve in curves]
    slow = draw.choice([(), ((10.0, 2.2), (11.5, 1.0)), ((15.0, 1.3),)])
    learned, share = draw.random() < 0.5, draw.choice([None, 0.04, 0.3])
    World(*devices, slo_s=2.0, slow=slow, learned=learned, max_batch_fraction=share).serve(bursts(draw, 2.0))


def streams(seed: int) -> None:
    """A fast device, overloaded by tenants, with bulk queries."""
    draw, device = random.Random(seed), Device(0.003, 0.004, draw_pass(seed))
    come = [
        arrival
        for number, rate in enumerate((30.0, 300.0, 150.0))
        for arrival in poisson(
            rate, 6.0, mixed=True, allowed_s=0.5, tenant=Tenant(f"t{number}", 1.0 + number), seed=10 * seed + number
        )
    ]
    come += [Arrival(draw.random() * 6, 200, 60.0, bulk=True) for _ in range(200)]
    World(device, slo_s=0.5).serve(come)


def draw_pass(seed: int) -> int | None:
    return 8 if seed % 2 else None


def applications(seed: int) -> None:
    """Two nodes and two Routers, of which one dies; by finish and by depth."""
    devices = {
        "accelerator": Device(0.01, 0.1, draw_pass(seed), noise=0.02),
        "cpu": Device(0.05, 0.2, draw_pass(seed), noise=0.02),
    }
    depths = {"accelerator": 60, "cpu": 12} if seed % 3 == 0 else None
    costs = Costs(query_s=0.0005, refusal_s=0.0003, place_s=2e-5, frame_s=1e-5, item_s=1e-6)

    async def serve() -> None:
        application = Application(Shape(2, 2, devices, 0.8, costs, (0.0001, 0.0005), depths, seed))
        await application.start()
        await application.serve(poisson(200.0, 2.0, mixed=True, seed=seed), returns=0.2)
        application.kill_router(1)
        await application.serve(poisson(200.0, 1.0, mixed=True, seed=seed + 100))

    run(serve(), TURNS)


def any_calls(seed: int) -> None:
    """The scheduler's methods in random order: partial offers, trials, held parts, changed policies and models."""
    draw = random.Random(seed)
    schedule = Scheduler(CostModel.of_curve(*draw.choice([V100, XEON, ATLAS])), Policy(1.0), draw.choice([0, 600]))
    now, runs = 0.0, []
    held: list[list[ScheduledQuery]] = []
    for _ in range(2000):
        now += draw.choice([0.0, 0.001, 0.01, 0.1, 0.4])
        what = draw.random()
        if what < 0.5:
            deferrable, bulk = draw.random() < 0.2, draw.random() < 0.1
            left_s = draw.choice([0.3, 0.8, 1.0, 1.0, 5.0]) * (4 if deferrable else 1)
            tenant = draw.choice([None, Tenant("a"), Tenant("b")])
            queries = [
                ScheduledQuery(draw.choice([4, 75, 300]), now + left_s, deferrable or bulk, bulk, tenant)
                for _ in range(draw.choice([1, 1, 1, 2, 8]))
            ]
            how: dict[str, Any] = draw.choice([{}, {}, {}, {"depth": 12}, {"slo_s": 0.7}, {"again": True}])
            taken = schedule.offer(now, queries, partial=draw.random() < 0.4, **how)
            if 0 < taken < len(queries):
                schedule.hold(now, id(queries))
                held.append(queries)
        elif what < 0.7:
            wait_s = schedule.start_in_s(now)
            if wait_s is not None:
                now += wait_s
                runs = schedule.start(now)
        elif what < 0.85:
            if runs and schedule.limits.micro_batch_tokens and draw.random() < 0.7:
                schedule.passed(now, runs[:4])
                runs = runs[4:]
            elif schedule.run.unanswered or runs:
                schedule.passed(now, runs)
                schedule.ended(now, whole=draw.random() < 0.95)
                runs = []
        elif what < 0.9 and held:
            queries = held.pop()
            schedule.release(id(queries))
            if draw.random() < 0.3:
                schedule.remove(queries)
        elif what < 0.92:
            admission = draw.choice(["deadline", "deadline", "depth"])
            depth = draw.choice([None, 0, 20]) if admission == "deadline" else draw.choice([4, 20])
            model = CostModel.of_curve(*draw.choice([V100, XEON, ATLAS]))
            share = draw.choice([None, 0.1])
            schedule.configure(Policy(1.0, admission, depth, 0.5, share), model)
        schedule.state(now)
        schedule.utilization(now)


def generations(seed: int) -> None:
    """An accelerator and a CPU, with bulk, tenants, noisy steps, and a device that becomes slow."""
    draw = random.Random(seed)
    come = mixed(draw.choice([4.0, 8.0, 14.4]), 20.0, bursts=bool(seed % 2), seed=seed)
    if seed % 3 == 0:
        come = two_tenants(4.8, 20.0, bursts=bool(seed % 2))
    come = [one._replace(bulk=draw.random() < 0.2) for one in come]
    slow_from = draw.choice([None, None, 8.0])
    served(CASES[draw.choice(list(CASES))], come, noise=draw.choice([0.0, 0.03, 0.1]), slow_from=slow_from)


def hosts(seed: int) -> None:
    """An accelerator with little memory, and a host."""
    draw = random.Random(seed)
    device = EMULATED_ACCELERATORS[draw.choice(list(EMULATED_ACCELERATORS))]
    policy = StepPolicy(ttft_s=2.0, tpot_s=draw.choice([0.1, 0.2, 0.3]))
    schedule = StepScheduler(device.step_time, policy, device.blocks, host=HostCache(device.host_time, 600))
    hybrid = HybridDevice(device.step_time, device.host_time)
    come = mixed(draw.choice([1.0, 2.0, 6.0]), 15.0, bursts=bool(seed % 2), seed=seed)
    come = [one._replace(bulk=draw.random() < 0.4) for one in come]
    StepWorld([StepDevice("one", device.step_time, schedule, noise=0.02, hybrid=hybrid)], policy).run(come)


WORLDS = (replicas, streams, applications, any_calls, generations, hosts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.decisions", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    for world in WORLDS:
        for seed in range(arguments.seeds):
            digest, count = hashlib.blake2b(digest_size=8), [0]

            def told(decision: object, digest: Any = digest, count: list[int] = count) -> None:
                digest.update(repr(decision).encode())
                count[0] += 1

            with watched(told):
                world(seed)
            print(world.__name__, seed, count[0], digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
