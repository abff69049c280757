"""A pool's links over connections in memory: whom it asks, and what is lost when."""

import asyncio

import numpy as np
import pytest

from deployments.errors import ReplicaLost
from deployments.placement.request import Embedded
from deployments.transport.frames import Offer
from tests.kit.router_world import Replica, World, ask


async def pool_of(monkeypatch, *replicas):
    world = World(monkeypatch, {"accelerator": list(replicas)})
    router = await world.router()
    return world, router, router.pools["accelerator"]


def offer(link, queries=1, left_s=5.0):
    return link.offer(Offer(0, left_s, [np.ones(75, np.int32)] * queries))


async def test_those_that_finish_first_are_asked_first(monkeypatch):
    _, _, pool = await pool_of(monkeypatch, Replica("a"), Replica("b"), Replica("far", node="m"))
    now = asyncio.get_running_loop().time()
    first, *_, last = (link.view.replica for link in pool.by_finish(now, [75], 4))
    assert last == "far"  # level: the own node's first
    offer(pool.links[first], 5)
    assert next(pool.by_finish(now, [75], 4)).view.replica not in {first, "far"}
    assert len(list(pool.by_finish(now, [75], 2))) == 2


async def test_a_replica_that_says_nothing_past_a_deadline_is_left_out_and_taken_back(monkeypatch):
    one, other = Replica("a"), Replica("b")
    _, _, pool = await pool_of(monkeypatch, one, other)
    link = pool.links["a"]
    offer(link, left_s=600.0)  # something with time does not hide it
    offer(link, left_s=0.9)
    link._channel.transport.peer.swallows = True
    await asyncio.sleep(2.5)
    now = asyncio.get_running_loop().time()
    assert [one.view.replica for one in pool.by_finish(now, [75], 4)] == ["b"]
    link._channel.transport.peer.swallows = False
    link._channel.ask()
    await asyncio.sleep(0.1)
    assert {one.view.replica for one in pool.by_finish(asyncio.get_running_loop().time(), [75], 4)} == {"a", "b"}


@pytest.mark.parametrize("how", ["refused", "told dead", "counted out", "drops it"])
async def test_what_is_in_doubt_is_lost_when_it_is_known_not_to_run(how, monkeypatch):
    replica = Replica("a")
    world, router, pool = await pool_of(monkeypatch, replica, Replica("b"))
    link = pool.links["a"]
    pending = offer(link)
    await asyncio.sleep(0.05)
    replica.stopped = True  # the network swallows what would connect
    replica.reset()
    await asyncio.sleep(1)
    assert not pending.ended
    assert pool.live == [pool.links["b"]]
    match how:
        case "refused":
            replica.alive = False
        case "told dead":
            replica.alive = False
            world.follow(router, "accelerator", died="a")
        case "counted out":
            replica.alive = False
            world.follow(router, "accelerator")
        case _:
            replica.stopped = False
    await asyncio.sleep(5)
    with pytest.raises(ReplicaLost, match="the accelerator pool lost replica a"):
        pending.outcome.result()
    assert (link in pool.live) == (how == "drops it")


async def test_a_replica_that_serve_counts_out_answers_what_it_has(monkeypatch):
    replica = Replica("a")
    world, router, pool = await pool_of(monkeypatch, replica, Replica("b"))
    pending = offer(pool.links["a"])
    idle = pool.links["b"]
    await asyncio.sleep(0.01)
    for gone in list(pool.links):
        world.pools["accelerator"] = [one for one in world.pools["accelerator"] if one.name != gone]
    world.follow(router, "accelerator")
    assert (pool.links, pool.live, idle._channel) == ({}, [], None)
    assert len(await pending.outcome) == 1
    assert not router.can_answer


async def test_a_hung_replica_that_serve_counts_out_is_given_up(monkeypatch):
    """Serve ends its process half a minute later; its queries do not wait for that."""
    replica = Replica("a")
    world, router, pool = await pool_of(monkeypatch, replica, Replica("b"))
    link = pool.links["a"]
    pending = offer(link, left_s=600.0)
    await asyncio.sleep(0.01)
    for wire in replica.wires:
        wire.swallows = wire.peer.swallows = True
    world.pools["accelerator"] = [one for one in world.pools["accelerator"] if one.name != "a"]
    world.follow(router, "accelerator")
    await asyncio.sleep(1)
    assert not pending.ended
    await asyncio.sleep(1)
    with pytest.raises(ReplicaLost):
        pending.outcome.result()
    assert (pool._draining, link._channel) == ({}, None)


async def test_a_connection_that_breaks_as_it_is_made_is_made_again(monkeypatch):
    replica = Replica("a")
    connect, times = replica.connect, []

    def breaks_once(channel):
        connect(channel)
        times.append(1)
        if len(times) == 1:
            replica.reset()

    replica.connect = breaks_once
    _, router, pool = await pool_of(monkeypatch, replica)
    await asyncio.sleep(1)
    assert len(pool.live) == 1
    assert isinstance(await ask(router), Embedded)


async def test_a_new_config_reaches_every_replica(monkeypatch):
    replica = Replica("a")
    world, router, pool = await pool_of(monkeypatch, replica)
    await router.reconfigure({**world.config, "admission": "depth", "accelerator": {"queue_depth": 7}})
    await asyncio.sleep(0.01)
    policy = replica.runner.schedule.policy
    assert (policy.admission, policy.depth, pool.by_count, pool.capacity(75, 1.0)) == ("depth", 7, True, 7)
    await router.reconfigure({**world.config, "slo_s": 0})  # bad: what runs goes on
    assert (router.config.admission, policy.depth) == ("depth", 7)
    assert "slo_s" in router.config_problem
