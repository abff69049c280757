"""What `make bench ARGS='scaling admission'` simulates: clusters in virtual time, and rules of admission."""

import pytest

from benchmarks.comparisons.admission import served, told_of
from benchmarks.comparisons.scaling import capacity_s, death, devices_of, paper_curves, routers_needed, simulate
from benchmarks.costs import decision_cost
from benchmarks.simulation.application import Application, Shape
from benchmarks.simulation.arrivals import Arrival, poisson
from benchmarks.simulation.device import Device
from benchmarks.simulation.rules import goodput
from benchmarks.simulation.virtual_time import run
from benchmarks.simulation.wire import Costs

COSTS = Costs(query_s=0.0005, refusal_s=0.0003, place_s=2e-5, frame_s=1e-5, item_s=1e-6)
DELAY_S = (0.0001, 0.0005)
SLO_S = 0.8
TURNS = 5_000_000


def devices(micro_batch_queries: int | None = None, **how: float) -> dict[str, Device]:
    return {
        "accelerator": Device(0.01, 0.1, micro_batch_queries, **how),
        "cpu": Device(0.05, 0.2, micro_batch_queries, **how),
    }


def served_by(shape, arrivals, **how):
    async def serve():
        application = Application(shape)
        await application.start()
        await application.serve(arrivals, **how)
        return application

    return run(serve(), TURNS)


def test_the_papers_devices():
    curves, slo_s = paper_curves()
    assert slo_s == 2.0
    found = devices_of(curves, None)
    assert [device.depth(slo_s, steady=False) for device in found.values()] == [96, 19]
    assert [device.depth(slo_s, steady=True) for device in found.values()] == [81, 15]
    assert capacity_s(found, slo_s) == pytest.approx(48.5, abs=0.1)  # two runs in an SLO
    assert capacity_s(devices_of(curves, 8), slo_s) == pytest.approx(57.9, abs=0.1)  # one


@pytest.mark.parametrize(("nodes", "routers"), [(1, 2), (4, 2), (100, 9)])
def test_routers_by_the_queries_that_they_carry(nodes, routers):
    fast = {"accelerator": Device(0.01, 0.0)}  # 100 queries/s
    assert capacity_s(fast, 1.0) == pytest.approx(100)
    assert routers_needed(nodes, fast, 1.0, Costs(query_s=0.0005)) == routers


@pytest.mark.parametrize(("routers", "load", "micro_batch_queries"), [(1, 1.3, None), (3, 1.3, 4), (3, 0.7, None)])
def test_small_clusters_keep_the_promise(routers, load, micro_batch_queries):
    shape = Shape(4, routers, devices(micro_batch_queries), SLO_S, COSTS, DELAY_S, seed=routers)
    found = run(simulate(shape, load, warm_s=1.5, seen_s=1.0), TURNS)
    assert found["late"] <= 0.005
    if load < 1:
        assert found["busy"] <= 0.01
    else:
        assert found["busy"] > 0.05
        assert found["goodput_node"] > 0.85 * capacity_s(shape.devices, SLO_S)


def test_more_replicas_than_a_router_looks_at_are_all_used():
    shape = Shape(40, 2, {"accelerator": Device(0.01, 0.1, 4)}, SLO_S, COSTS, DELAY_S)

    found = served_by(shape, poisson(1500.0, 1.0))
    busy = [replica.engine.busy_s for replica in found.replicas.values()]
    assert min(busy) > 0.5 * max(busy)


def test_the_same_seed_gives_the_same():
    shape = Shape(1, 2, devices(4), SLO_S, COSTS, DELAY_S, seed=7)
    one, other = (run(simulate(shape, 1.1, warm_s=1.0, seen_s=1.0), TURNS) for _ in range(2))
    assert one == other


def test_a_dead_routers_work_is_dropped_at_once():
    found = run(death(Shape(1, 2, devices(4), SLO_S, COSTS, DELAY_S)), TURNS)
    assert found["lost"] > 10
    assert found["dropped_s"] < 0.01
    assert found["late"] <= 0.005


@pytest.mark.parametrize("micro_batch_queries", [None, 8])
def test_a_stream_keeps_up_with_the_rule_alone(micro_batch_queries):
    found = {"accelerator": Device(0.018, 0.27, micro_batch_queries)}
    arrivals = list(poisson(61.0, 20.0))
    told = told_of(served(Shape(1, 1, found, 1.0), arrivals), found, 20.0)
    assert told["late"] == 0
    assert told["goodput"] >= 0.9 * goodput(arrivals, found, 1.0)[0] / 20.0


def test_the_rule_alone_by_hand():
    """A run of two takes 0.5 s; the third comes when it has 0.4 s left, and its own run ends after 0.3 s more."""
    device = {"accelerator": Device(0.1, 0.2)}
    arrivals = [Arrival(0.0, 75), Arrival(0.005, 75), Arrival(0.02, 75)]
    assert goodput(arrivals, device, 1.0) == (3, pytest.approx(0.3))
    assert goodput(arrivals, device, 0.45) == (2, pytest.approx(0.2))


def test_decisions_are_timed():
    admission = decision_cost.admission(200)
    assert 0 < admission["p50_us"] <= admission["p99_us"]
    assert decision_cost.place_s(2, 10) > 0
