"""What `make bench ARGS=scaling` computes and simulates: loads by tables, small clusters in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.cluster import Cluster, Costs, Device, Seen, Shape
from benchmarks.loads import Periods, embedder_series, largest, loads, router_series
from benchmarks.scaling import capacity_s, paper_devices, power_law, routers_needed, simulate
from benchmarks.virtual_time import run

PERIODS = Periods(
    router_check=10.0, proxy_check=10.0, haproxy_check=5.0, long_poll=(30.0, 60.0), node_check=3.0,
    node_checks_failed=5, node_check_timeout=10.0, agent_report=5.0,
)  # fmt: skip
COSTS = Costs(query_s=0.0005, refusal_s=0.0003, call_s=0.001, answer_s=0.001, answer_each_s=2e-6)
DEVICES = {"accelerator": Device(0.01, 0.1, 40), "cpu": Device(0.05, 0.2, 8)}
SLO_S = 0.8  # 0.05 * 8 + 2 * 0.2, the CPU's; the accelerator's 0.01 * 40 + 2 * 0.1 is less
TURNS = 5_000_000


@pytest.mark.parametrize(
    ("nodes", "routers", "what", "load"),
    [
        (1, 1, "replicas", 2),
        (1, 1, "channels", 2),
        (16, 4, "channels", 128),
        (1000, 1000, "channels", 2_000_000),
        (1000, 1000, "channel_mb", 8000.0),
        (1000, 1000, "polls_router", 200.0),
        (1000, 1000, "polls_office", 100.0),
        (1000, 10, "polls_office", 1.0),
        (1000, 1000, "controller_checks", 1000 + 100 + 100),
        (1000, 1000, "controller_core", 0.6),
        (1000, 1000, "haproxy_checks_router", 200.0),
        (1000, 1000, "long_polls", 2000),
        (16, 4, "told_at_change", 64),
        (16, 4, "lookups", 128),
        (15, 1, "node_checks", 5.0),
        (15, 1, "reports", 3.0),
    ],
)
def test_loads(nodes, routers, what, load):
    assert getattr(loads(nodes, routers, PERIODS, channel_kb=4.0), what) == pytest.approx(load)


def test_series_are_those_of_the_metrics():
    found = loads(10, 3, PERIODS, channel_kb=4.0)
    assert found.series == 3 * router_series() + 20 * embedder_series()
    assert router_series() > 50
    assert found.samples == pytest.approx(found.series / 15)


def test_periods_of_the_installed_ray_are_seconds():
    periods = Periods.of_ray()
    assert 0.1 <= periods.node_check <= 60
    assert 0.1 <= periods.haproxy_check <= 60
    assert periods.long_poll[0] <= periods.long_poll[1]


@pytest.mark.parametrize(("most", "found"), [(0, 0), (1, 1), (2, 2), (15, 15), (833, 833), (4096, 4096)])
def test_largest(most, found):
    assert largest(lambda nodes: nodes <= most) == found


def test_power_law():
    power, factor = power_law({2: 0.5 * 2**1.5, 4: 0.5 * 4**1.5, 8: 0.5 * 8**1.5})
    assert (power, factor) == (pytest.approx(1.5), pytest.approx(0.5))


def test_the_papers_devices_keep_the_slo_by_their_depths():
    devices, slo_s = paper_devices()
    for device in devices.values():
        assert device.alpha_s * device.depth + 2 * device.beta_s <= slo_s
        assert device.alpha_s * (device.depth + 4) + 2 * device.beta_s > slo_s * 0.98


@pytest.mark.parametrize(("nodes", "routers"), [(1, 2), (4, 2), (100, 9)])
def test_routers_by_the_queries_that_they_carry(nodes, routers):
    fast = {"accelerator": Device(0.0, 1.0, 200)}  # 100 queries/s
    assert capacity_s(fast) == 100
    assert routers_needed(nodes, fast, Costs(query_s=0.0005)) == routers


@pytest.mark.parametrize("routers", [1, 2, 4])
@pytest.mark.parametrize("load", [0.7, 1.3])
def test_small_clusters_keep_bound_and_promise(routers, load):
    """The bound is looked at all the while by `simulate` itself, at the Routers, the engines and the offices."""
    shape = Shape(4, routers, DEVICES, COSTS, (0.0001, 0.0005), seed=routers)
    found = run(simulate(shape, load, warm_s=2.0, seen_s=3.0), TURNS)
    assert found["most_in_flight"]["accelerator"] <= 4 * 40
    assert found["p99_s"] <= SLO_S * 1.05
    if load < 1:
        assert found["busy"] == 0
    else:
        assert found["busy"] > 0.1
        assert found["queries_s_node"] > 0.9 * capacity_s(DEVICES)


def test_the_same_seed_gives_the_same():
    shape = Shape(2, 2, DEVICES, COSTS, (0.0001, 0.0005), seed=7)
    one, other = (run(simulate(shape, 1.1, warm_s=1.0, seen_s=2.0), TURNS) for _ in range(2))
    assert one == other


def test_more_routers_speak_more():
    words = [
        run(simulate(Shape(2, routers, DEVICES, COSTS), 1.3, warm_s=1.0, seen_s=2.0), TURNS)["words_query"]
        for routers in (1, 2, 4)
    ]
    assert words[0] < words[1] < words[2]


def test_a_dead_routers_places_are_the_others():
    async def test():
        cluster = Cluster(Shape(2, 2, DEVICES, COSTS, (0.0001, 0.0005)))
        await cluster.start()
        assert cluster.held_by("0") > 20
        seen = Seen()
        serving = asyncio.ensure_future(cluster.serve(200.0, 4.0, lambda: seen, lambda: None))
        await asyncio.sleep(1)
        cluster.kill_router(0)
        await asyncio.sleep(2.5)
        assert cluster.held_by("0") == 0
        serving.cancel()
        await cluster.stop()

    run(test(), TURNS)
