"""Several Routers and the owners of the places, over a network with delays, in virtual time: only ray is mocked."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lease_world import World

from benchmarks.virtual_time import run

ONE_POOL = {"accelerator": ["a1"]}
TWO_POOLS = {"accelerator": ["a1", "a2"], "cpu": ["c1"]}


async def world_of(routers, pools=ONE_POOL, depths=None, **options):
    world = World(pools, depths or {"accelerator": 30}, **options)
    for number in range(routers):
        await world.add(f"r{number}")
    await asyncio.sleep(1)
    return world


async def burst(router, queries, hold_s=1.0):
    """Who is answered by which pool, of so many at once."""
    answers = await asyncio.gather(*(router.send(hold_s) for _ in range(queries)))
    pools = [pool for answer in answers if answer for pool in answer]
    return {pool: pools.count(pool) for pool in sorted(set(pools))}


def test_a_lone_router_holds_all_and_never_asks():
    async def test():
        world = await world_of(1, TWO_POOLS, {"accelerator": 5, "cpu": 3})
        assert await burst(world.routers["r0"], 20) == {"accelerator": 10, "cpu": 3}
        assert [tenancy.asks for tenancy in world.routers["r0"].tenancies.values()] == [0, 0]

    run(test())


@pytest.mark.parametrize("routers", [2, 3, 5])
@pytest.mark.parametrize("depth", [1, 2, 7, 90])
def test_a_burst_at_one_router_uses_all_that_the_others_hold_idle(routers, depth):
    async def test():
        world = await world_of(routers, TWO_POOLS, {"accelerator": depth, "cpu": 3})
        for router in world.live:
            assert await burst(router, 4 * depth + 5) == {"accelerator": 2 * depth, "cpu": 3}
            await asyncio.sleep(0.5)
        world.check_accounts()

    run(test())


def test_first_places_are_the_fair_share():
    async def test():
        world = await world_of(3)
        held = [router.held("accelerator")["a1"] for router in world.live]
        assert sum(held) == 30
        assert min(held) >= 9

    run(test())


def test_what_fits_into_the_held_places_asks_nobody():
    async def test():
        world = await world_of(3)
        router = world.routers["r0"]
        for _ in range(50):
            assert await burst(router, 5, 0.1) == {"accelerator": 5}
        assert router.tenancies["accelerator"].asks == 0

    run(test())


def test_accelerator_first_though_another_router_holds_its_places():
    async def test():
        world = await world_of(3, TWO_POOLS, {"accelerator": 15, "cpu": 30})
        assert await burst(world.routers["r1"], 30) == {"accelerator": 30}

    run(test())


@pytest.mark.parametrize("depth", [1, 2, 3, 30])
def test_under_overload_everyone_is_served_and_questions_stay_few(depth):
    """30 clients at each of three Routers, for a minute; one Router has taken everything before the others come."""

    async def client(router, ends):
        loop = asyncio.get_running_loop()
        while loop.time() < ends:
            if await router.query(0.2) is None:
                await asyncio.sleep(0.05)

    async def test():
        world = await world_of(3, depths={"accelerator": depth})
        loop = asyncio.get_running_loop()
        ends = loop.time() + 60
        clients = [asyncio.ensure_future(client(world.routers["r0"], ends)) for _ in range(30)]
        await asyncio.sleep(1)
        clients += [asyncio.ensure_future(client(world.routers[name], ends)) for name in ("r1", "r2") * 30]
        await asyncio.gather(*clients)
        served = [router.served for router in world.live]
        assert min(served) > (0.5 if depth > 3 else 0.2) * max(served)
        assert sum(served) > 0.75 * depth * 60 / 0.25
        assert sum(router.tenancies["accelerator"].asks for router in world.live) < 60 * 3 * 15

    run(test())


def test_a_router_with_few_clients_is_served_beside_one_that_is_overloaded():
    async def test():
        world = await world_of(2, depths={"accelerator": 10})
        loop = asyncio.get_running_loop()
        ends = loop.time() + 60

        async def hammer():
            while loop.time() < ends:
                if await world.routers["r0"].query(0.2) is None:
                    await asyncio.sleep(0.02)

        hammering = [asyncio.ensure_future(hammer()) for _ in range(40)]
        tries = served = 0
        while loop.time() < ends:
            tries += 1
            served += await world.routers["r1"].query(0.2) is not None
            await asyncio.sleep(0.3)
        await asyncio.gather(*hammering)
        assert served > 0.5 * tries

    run(test())


def test_a_dead_router_gives_its_places_within_a_second():
    async def test():
        world = await world_of(3)
        world.routers["r0"].send(10)
        await asyncio.sleep(0.1)
        world.routers["r0"].kill()
        await burst(world.routers["r1"], 60, 0.2)
        await asyncio.sleep(0.6)
        assert await burst(world.routers["r1"], 60) == {"accelerator": 30}
        world.routers["r1"].kill()
        await burst(world.routers["r2"], 60, 0.2)
        await asyncio.sleep(0.6)
        asked = world.routers["r2"].tenancies["accelerator"].asks
        assert await burst(world.routers["r2"], 60) == {"accelerator": 30}
        assert world.routers["r2"].tenancies["accelerator"].asks == asked, "it is alone, and asks nobody"

    run(test())


def test_a_replaced_router_gives_way_to_its_successor():
    async def test():
        world = await world_of(1)
        world.routers["r0"].kill()
        router = await world.add("r1")
        await asyncio.sleep(0.3)
        assert await burst(router, 60) == {"accelerator": 30}

    run(test())


def test_a_router_that_leaves_gives_everything_back():
    async def test():
        world = await world_of(2)
        for tenancy in world.routers["r0"].tenancies.values():
            tenancy.leave()
        world.routers["r0"].alive = True
        await asyncio.sleep(0.2)
        world.routers["r0"].alive = False
        assert world.owners["a1"].office.leases.is_sole("r1")

    run(test())


def test_queries_whose_replica_has_gone_get_places_elsewhere():
    async def test():
        world = await world_of(2, {"accelerator": ["a1", "a2"]}, {"accelerator": 4})
        one, other = world.live
        world.depths["accelerator"] = 0  # what is admitted waits
        world.settling = True
        waiting = [one.send(0.1) for _ in range(8)]
        await asyncio.sleep(0.3)
        assert (one.queue.in_flight("accelerator"), one.held("accelerator")) == (8, {"a1": 4, "a2": 4})
        del world.pools["accelerator"][0]
        one.tenancies["accelerator"].drop("a1")
        other.tenancies["accelerator"].drop("a1")
        world.depths["accelerator"] = 4
        for router in world.live:
            router.queue.set_replicas("accelerator", 1)
            router.tenancies["accelerator"].update()
        assert None not in await asyncio.gather(*waiting)
        # The same where the other holds what is left.
        world.depths["accelerator"] = 0
        waiting = [one.send(0.1) for _ in range(2)]
        beside = [other.send(0.1) for _ in range(2)]
        await asyncio.sleep(0.3)
        held = one.tenancies["accelerator"].holdings.replicas["a2"]
        world.owners["a2"].office.leases.give(one.name, held.term, held.held)
        held.held = 0
        await other.tenancies["accelerator"].ask(4)
        assert one.tenancies["accelerator"].holdings.lacking == 2
        world.depths["accelerator"] = 4
        for router in world.live:
            router.tenancies["accelerator"].update()
        assert None not in await asyncio.gather(*waiting, *beside)

    run(test())


def test_depths_change_for_all():
    async def test():
        world = await world_of(3)
        for depth in (12, 50, 3):
            world.settling = True
            world.depths["accelerator"] = depth
            for router in world.live:
                await asyncio.sleep(0.05)
                router.set_depth("accelerator", depth)
            await asyncio.sleep(0.5)
            world.settling = False
            for router in world.live:
                assert await burst(router, 70) == {"accelerator": depth}
                await asyncio.sleep(0.6)
            world.check_accounts()

    run(test())


def test_a_trial_is_exact_over_all_routers():
    """Trial depths 20 where 10 are in force: trial queries fill 20, others find room only below 10."""

    async def test():
        world = await world_of(3, depths={"accelerator": 10})
        world.trial = {"accelerator": 20}
        for router in world.live:
            router.set_trial({"accelerator": 20})
        tried = [router.send(1, trial=True) for router in world.live for _ in range(3)]
        await asyncio.sleep(0.3)
        others = [router.send(1) for router in world.live for _ in range(3)]
        await asyncio.sleep(0.3)
        tried += [router.send(1, trial=True) for router in world.live for _ in range(20)]
        answers = [await asyncio.gather(*tried), await asyncio.gather(*others)]
        assert [sum(answer is not None for answer in kind) for kind in answers] == [19, 1]
        await asyncio.sleep(0.3)
        assert sum(sum(router.held("accelerator").values()) for router in world.live) == 0
        for router in world.live:
            router.set_trial(None)
        world.trial = {}
        await asyncio.sleep(11)
        assert await burst(world.routers["r2"], 30) == {"accelerator": 10}

    run(test())


@given(
    seed=st.integers(0, 2**32),
    depths=st.tuples(st.integers(1, 12), st.integers(0, 4)),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("burst"), st.integers(0, 4), st.integers(1, 20)),
            st.tuples(st.just("many"), st.integers(0, 4), st.integers(2, 6)),
            st.tuples(st.just("kill"), st.integers(0, 4), st.just(0)),
            st.tuples(st.just("start"), st.just(0), st.just(0)),
            st.tuples(st.just("sleep"), st.integers(0, 4), st.just(0)),
            st.tuples(st.just("depth"), st.integers(1, 12), st.just(0)),
            st.tuples(st.just("trial"), st.integers(0, 4), st.integers(1, 15)),
        ),
        max_size=25,
    ),
    slowest_s=st.sampled_from([0.001, 0.02, 0.15]),
)
@example(  # a Router that claims places for a trial turns out to be alone
    seed=0,
    depths=(2, 0),
    steps=[("burst", 0, 1), ("start", 0, 0), ("burst", 0, 1), ("burst", 0, 1), ("kill", 1, 0), ("trial", 0, 2)],
    slowest_s=0.001,
)
@settings(max_examples=1000, deadline=None)
def test_in_any_order_the_bound_holds_and_no_place_is_lost(seed, depths, steps, slowest_s):
    async def test():
        depth = dict(zip(("accelerator", "cpu"), depths, strict=True))
        world = World(TWO_POOLS, depth, seed=seed, slowest_s=slowest_s)
        await world.add("r0")
        for what, which, how_many in steps:
            router = world.live[which % len(world.live)]
            if what == "burst":
                for _ in range(how_many):
                    router.send(world.random.random())
            elif what == "many":
                router.send(world.random.random(), queries=how_many)
            elif what == "kill" and len(world.live) > 1:
                router.kill()
            elif what == "start" and len(world.live) < 4:
                await world.add(f"r{len(world.routers)}")
            elif what == "sleep":
                await asyncio.sleep((0.001, 0.01, 0.1, 0.5, 2)[which])
            elif what == "depth":
                world.settling = world.settling or which < world.depths["accelerator"]
                world.depths["accelerator"] = which
                for one in world.live:
                    one.set_depth("accelerator", which)
                if world.settling:
                    await asyncio.sleep(4)
                    world.settling = False
            elif what == "trial":
                world.trial = {pool: max(how_many, world.trial.get(pool, 0)) for pool in world.pools}
                for _ in range(how_many):
                    router.set_trial(dict.fromkeys(world.pools, how_many))
                    router.send(world.random.random(), trial=True)
        await asyncio.gather(*(task for router in world.live for task in router.tasks))
        for router in world.live:
            router.set_trial(None)
        world.trial = {}
        await asyncio.sleep(12)
        world.check_accounts()
        world.slowest_s = min(world.slowest_s, 0.01)
        for router in world.live:
            for _ in range(2):  # the first may find the dead
                answers = await burst(router, 60, 3)
                await asyncio.sleep(1)
            whole = {"accelerator": 2 * world.depths["accelerator"], "cpu": world.depths["cpu"]}
            assert answers == {pool: places for pool, places in whole.items() if places}
        world.check_accounts()

    run(test())
