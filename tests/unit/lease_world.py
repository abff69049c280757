"""Owners and Routers over a network with delays, without ray: the real offices, tenancies and queue managers."""

from __future__ import annotations

import asyncio
import random

from deployments.holdings import Holdings
from deployments.lease_office import LeaseOffice
from deployments.queue_manager import Full, QueueManager, Short
from deployments.shortage import Shortage
from deployments.tenancy import Tenancy


class Owner:
    """An embedder replica: an office, and the queries that its engine runs for each Router."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.running = {}  # router -> queries
        self.orphans = 0
        self.most = 0
        self.office = LeaseOffice(world.lives, self.orphan)

    def orphan(self, router):
        left = self.running.pop(router, 0)
        self.orphans += left
        if left:
            asyncio.get_running_loop().call_later(0.1, self.orphans_end, left)
        return left

    def orphans_end(self, count):
        self.orphans -= count
        self.office.end_lingering(count)

    def add(self, router, count):
        self.running[router] = self.running.get(router, 0) + count
        self.most = max(self.most, self.total)

    @property
    def total(self):
        return self.orphans + sum(self.running.values())


class Router:
    """What `Router` and `Pool` do about places: admit or ask, carry to a replica with room, release."""

    def __init__(self, world, name):
        self.world, self.name, self.alive = world, name, True
        self.queue = QueueManager(list(world.pools), self.on_release, lambda pool: self.tenancies[pool].ask_ahead())
        self.tenancies = {}
        self.waiting = {pool: [] for pool in world.pools}
        self.out = {}
        self.tasks = set()
        self.served = self.refused = 0
        self.shortage = Shortage(self.queue, self.tenancies)
        for pool, owners in world.pools.items():
            holdings = Holdings(
                lambda replica: self.out.get(replica, 0),
                lambda pool=pool: self.queue.in_flight(pool),
                lambda pool=pool: len(self.waiting[pool]),
            )
            self.tenancies[pool] = Tenancy(
                pool, name, name, self.call, self.queue, holdings, self.on_change, self.doubt
            )
            self.queue.set_depth(pool, world.depths[pool])
            self.queue.set_replicas(pool, len(owners))
            self.tenancies[pool].set_depth(world.depths[pool])

    async def start(self):
        for pool, owners in self.world.pools.items():
            for replica in owners:
                await self.tenancies[pool].join(replica)
            self.tenancies[pool].update()

    async def call(self, replica, what, *words):
        world = self.world
        await world.delay()
        if not self.alive and world.random.random() < 0.5:
            await asyncio.get_running_loop().create_future()  # lost with its sender
        answer = await world.owners[replica].office.calls[what](*words)
        await world.delay()
        if not self.alive:
            await asyncio.get_running_loop().create_future()
        return answer

    def doubt(self, replica):
        raise AssertionError(f"{self.name} was told to join {replica} again")

    def set_depth(self, pool, depth):
        self.queue.set_depth(pool, depth)
        self.tenancies[pool].set_depth(depth)

    def set_trial(self, depths):
        self.queue.set_trial(depths)
        for pool, tenancy in self.tenancies.items():
            tenancy.set_trial(None if depths is None else depths.get(pool, 0))

    def kill(self):
        """In mid-sentence: nothing more is heard of it, and what its batches run ends at the owners."""
        self.alive = False
        for tenancy in self.tenancies.values():
            for replica in list(tenancy.holdings.replicas):
                tenancy.drop(replica)
        for task in self.tasks:
            task.cancel()
        for owner in self.world.owners.values():
            asyncio.get_running_loop().call_later(1, owner.running.pop, self.name, None)

    def send(self, hold_s, *, trial=False, queries=1):
        task = asyncio.ensure_future(self.query(hold_s, trial=trial, queries=queries))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def query(self, hold_s, *, trial=False, queries=1):
        """The pools of its places, or None: busy."""
        permits = self.queue.admit_trial(queries) if trial else self.queue.admit(queries)
        if isinstance(permits, Short):
            permits = await self.shortage.decide(queries, trial=trial)
        if isinstance(permits, Full):
            self.refused += 1
            return None
        self.world.check()
        self.served += 1
        await asyncio.gather(*(self.run(permit, hold_s) for permit in permits))
        return [permit.pool for permit in permits]

    async def run(self, permit, hold_s):
        go = asyncio.get_running_loop().create_future()
        self.waiting[permit.pool].append(go)
        self.dispatch(permit.pool)
        replica = await go
        await asyncio.sleep(hold_s)
        self.out[replica] -= 1
        self.world.owners[replica].add(self.name, -1)
        permit.release()
        self.dispatch(permit.pool)

    def dispatch(self, pool):
        for replica in self.world.pools[pool]:
            room = self.tenancies[pool].holdings.at(replica) - self.out.get(replica, 0)
            room = min(room, self.world.most(pool) - self.out.get(replica, 0))
            while room > 0 and self.waiting[pool]:
                go = self.waiting[pool].pop(0)
                if not go.done():
                    room -= 1
                    self.out[replica] = self.out.get(replica, 0) + 1
                    self.world.owners[replica].add(self.name, 1)
                    go.set_result(replica)

    def on_release(self):
        self.shortage.serve()
        for tenancy in self.tenancies.values():
            tenancy.released()

    def on_change(self):
        self.on_release()
        for pool in self.tenancies:
            self.dispatch(pool)

    def held(self, pool):
        return {replica: holding.held for replica, holding in self.tenancies[pool].holdings.replicas.items()}


class World:
    """`pools[pool]`: its replicas; `depths[pool]`: places of each replica."""

    def __init__(self, pools, depths, seed=0, slowest_s=0.01):
        self.pools, self.depths = pools, dict(depths)
        self.random = random.Random(seed)
        self.slowest_s = slowest_s
        self.owners = {replica: Owner(self, replica) for replicas in pools.values() for replica in replicas}
        self.routers = {}
        self.trial = {}
        self.settling = False  # a depth was lowered: what is in flight may be more for a while

    async def delay(self):
        await asyncio.sleep(self.random.random() ** 3 * self.slowest_s)

    async def lives(self, actor):
        await self.delay()
        return self.routers[actor].alive

    async def add(self, name):
        router = self.routers[name] = Router(self, name)
        await router.start()
        return router

    @property
    def live(self):
        return [router for router in self.routers.values() if router.alive]

    def in_flight(self, pool):
        """Of live Routers, and what owners still run for dead ones."""
        dead = sum(
            count
            for replica in self.pools[pool]
            for name, count in self.owners[replica].running.items()
            if not self.routers[name].alive
        )
        orphans = sum(self.owners[replica].orphans for replica in self.pools[pool])
        return dead + orphans + sum(router.queue.in_flight(pool) for router in self.live)

    def most(self, pool):
        """What a replica may run."""
        return max(self.depths[pool], self.trial.get(pool, 0))

    def capacity(self, pool):
        return self.most(pool) * len(self.pools[pool])

    def check(self):
        """The bound, at the Routers and at the engines."""
        if self.settling:
            return
        for pool, replicas in self.pools.items():
            assert self.in_flight(pool) <= self.capacity(pool), (pool, self.in_flight(pool), self.capacity(pool))
            for replica in replicas:
                owner = self.owners[replica]
                assert owner.total <= self.most(pool), (replica, owner.running)

    def check_accounts(self):
        """Once all messages have arrived both sides agree, and no place is lost."""
        for pool, replicas in self.pools.items():
            for replica in replicas:
                leases = self.owners[replica].office.leases
                for router in self.live:
                    assert leases.is_sole(router.name) or leases.held(router.name) == router.held(pool)[replica]
                found = {router.name for router in self.live} == set(leases.routers)  # who is dead, by those who asked
                assert not found or leases.total <= self.depths[pool] or leases.is_sole(self.live[0].name)
