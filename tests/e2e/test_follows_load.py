"""Embedder replicas that follow the load, by the share of their depth that is in flight, on a real Serve controller."""

import asyncio
from collections import Counter

import pytest

from calibration.load import connect
from serve_app.config.router_autoscaling import router_autoscaling
from tests.kit.service import by_depth, emulating, queries

DEPTH, CLIENTS, FEW = 10, 8, 1


@pytest.fixture(scope="module")
def scaled(shared):
    config = by_depth(emulating(20.0, accelerator={"alpha_s": 0.02, "beta_s": 0.5}), accelerator=DEPTH)
    config["applications"][0]["args"]["accelerator"]["replicas"] = {
        "min": 1, "max": 2, "target_utilization": 0.4, "upscale_delay_s": 1.0, "downscale_delay_s": 1.0,
    }  # fmt: skip
    return shared.serve(config)


async def ask_until(service, clients, done):
    """So many clients, each asking again and again, until `done(pools)`. Returns their answers' statuses, counted."""
    ended, statuses = asyncio.Event(), Counter()

    async def client(connection):
        while not ended.is_set():
            statuses[(await connection.ask(queries(1)[0])).status] += 1

    connections = await connect(service.address, clients)
    asking = [asyncio.create_task(client(connection)) for connection in connections]
    try:
        await asyncio.to_thread(service.wait_for, done, 180, "the number of replicas")
    finally:
        ended.set()
    await asyncio.gather(*asking)
    for connection in connections:
        connection.hang_up()
    return statuses


def has_replicas(count):
    return lambda pools: pools["accelerator"]["live_replicas"] == count


def test_replicas_come_with_the_load_and_go_with_it_and_nothing_is_lost(scaled):
    assert has_replicas(1)(scaled.pools())
    assert set(asyncio.run(ask_until(scaled, CLIENTS, has_replicas(2)))) == {200}
    assert set(asyncio.run(ask_until(scaled, FEW, has_replicas(1)))) == {200}
    scaled.wait_until_idle()


def test_routers_come_with_the_load_and_nothing_is_lost(shared):
    config = emulating(20.0, accelerator={"alpha_s": 0.00011, "beta_s": 0.007})
    scaling = {**router_autoscaling(2), "max_replicas": 2, "upscale_delay_s": 1.0}
    scaling["policy"]["policy_kwargs"]["target"] = 0.1  # the client takes its part of the cores
    config["applications"][0]["deployments"][0] |= {"num_replicas": "auto", "autoscaling_config": scaling}
    service = shared.serve(config)
    assert service.get("/info")["windve"]["routers"] == 1
    two = lambda _: service.get("/info")["windve"]["routers"] == 2  # noqa: E731
    assert set(asyncio.run(ask_until(service, CLIENTS, two))) == {200}
