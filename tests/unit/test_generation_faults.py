"""Whatever clients, connections, replicas and Serve do: no block is lost, each token is right, each generation ends.

The product's GenerationRouter, GenerationPool, GenerationChannel, StepLoop and StepScheduler in virtual time, over
connections in memory that cut frames anywhere and break at any time; emulated engines.
"""

import asyncio
import contextlib
import random
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.virtual_time import virtual
from deployments.admission.fair_share import Tenant
from deployments.admission.quota import Client, Quota
from deployments.errors import Busy, EngineFailed, ReplicaLost, WindveError
from deployments.generation import pool as pool_module
from deployments.generation.request import WantedGeneration
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepTime
from deployments.generation.text.sampling import Sampling
from deployments.serving import replica_set
from tests.kit.generation_replicas import VOCABULARY, Replica, answer_to, reach_of, router_of

END_TOKENS = (7,)
MODEL = StepTime(0.02, 0.0005, 1e-6, 0.0002, 1e-8, 4)
CONFIG = {"ttft_s": 1.0, "tpot_s": 0.1}
PATIENCE_S = 40.0


def expected(asked):
    """The tokens of an answer, as the emulated devices' rule has them."""
    ends = () if asked.ignore_end else END_TOKENS
    return answer_to(asked.ids.tolist(), asked.most_tokens, (*ends, *(int(stop[1:]) for stop in asked.stops)))


class World:
    """One Router, two pools. `clients`: what each one was answered."""

    def __init__(self, blocks, seed):
        self.chance, self.blocks = random.Random(seed), blocks
        self.pools, self.clients, self.count = {"accelerator": [], "cpu": []}, [], 0
        self.quota, self.drains = Quota(1e9, "tokens"), []

    async def start(self):
        self.router = router_of(self.pools, end_tokens=END_TOKENS)
        await self.router.reconfigure(CONFIG)
        for name in self.pools:
            self.add(name)
            self.follow(name)
        await asyncio.sleep(0.2)

    def add(self, pool):
        self.count += 1
        replica = Replica(f"{pool} {self.count}", MODEL, StepPolicy(1.0, 0.1), self.blocks, chance=self.chance)
        self.pools[pool].append(replica)

    def follow(self, pool, left_out=(), died=None):
        members = {one.name: one.about for one in self.pools[pool] if one.alive and one not in left_out}
        self.router.pools[pool].follow(members, died)

    def ask(self, length, tokens, leaves_s, reads_s, **more):
        ids = np.random.default_rng(len(self.clients)).integers(8, VOCABULARY, length).astype(np.int32)
        client = Client(Tenant("t"), self.quota) if more.pop("named", False) else None
        asked = WantedGeneration(ids, tokens, Sampling(0.0), client=client, **more)
        seen = SimpleNamespace(asked=asked, tokens={}, ends={}, problem=None, left=False)
        self.clients.append(seen)
        seen.task = asyncio.get_running_loop().create_task(self._client(seen, leaves_s, reads_s))

    async def _client(self, seen, leaves_s, reads_s):
        try:
            async with asyncio.timeout(leaves_s):
                pieces = await self.router.begin(seen.asked)
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        assert piece.answer not in seen.ends
                        seen.tokens.setdefault(piece.answer, []).extend(one.id for one in piece.tokens)
                        if piece.finish:
                            seen.ends[piece.answer] = piece.finish
                        await asyncio.sleep(reads_s)
        except TimeoutError:
            seen.left = True
        except WindveError as error:
            seen.problem = error

    def replica(self, number):
        every = [one for some in self.pools.values() for one in some if one.alive]
        return every[number % len(every)] if every else None

    async def happen(self, what, how):
        if what == "ask":
            self.ask(**how)
        elif what == "reconfigure":
            await self.router.reconfigure({**CONFIG, **how})
        elif what == "replace":
            pool = ("accelerator", "cpu")[how % 2]
            old = self.pools[pool][:]
            self.add(pool)
            self.follow(pool, left_out=old)
            self.drains += [asyncio.get_running_loop().create_task(self._drained(one)) for one in old if one.alive]
        elif (replica := self.replica(how)) is None:
            return
        elif what == "fail":
            replica.device.problem = RuntimeError("out of memory")
        elif what == "break":
            replica.device.broken = None if replica.device.broken else RuntimeError("no kernel")
        elif what == "slow":
            replica.device.slow = 1.0 if replica.device.slow > 1 else 6.0
        elif what == "cut" and replica.wires:
            replica.wires[-1].abort()
        elif what == "half cut" and replica.wires:  # the replica hears nothing of it
            wire = replica.wires[-1]
            wire.peer.deaf = True
            wire._end()
        elif what == "die":
            replica.die()
            for pool, some in self.pools.items():
                if replica in some:
                    await asyncio.sleep(0.05)
                    self.add(pool)
                    self.follow(pool, died=replica.name)

    async def _drained(self, replica):
        await replica.stepper.drained()
        replica.die()

    def check(self):
        for number, seen in enumerate(self.clients):
            assert seen.task.done(), number
            seen.task.result()
            for answer, tokens in seen.tokens.items():
                right = expected(seen.asked)
                assert tokens == right[: len(tokens)], (number, answer)
                assert (answer in seen.ends) == (len(tokens) == len(right)), (number, answer)
            if not seen.left and seen.problem is None:
                assert set(seen.ends) == set(range(seen.asked.answers)), number
        for some in self.pools.values():
            for replica in some:
                assert not replica.alive or replica.is_free, replica.name
        for pool in self.router.pools.values():
            assert all(link.streams == 0 for link in [*pool.links.values(), *pool._draining.values()])


ASK = st.fixed_dictionaries({
    "length": st.sampled_from([1, 5, 127, 128, 129, 256, 300, 1000]),
    "tokens": st.sampled_from([1, 2, 5, 30]),
    "answers": st.sampled_from([1, 1, 1, 2, 3, 5]),
    "bulk": st.sampled_from([False, False, True]),
    "ignore_end": st.booleans(),
    "named": st.booleans(),
    "stops": st.sampled_from([(), (), tuple(f"w{number}" for number in range(30, 60))]),
    "timeout_s": st.sampled_from([None, None, 0.3, 5.0]),
    "logprobs": st.sampled_from([None, None, 2]),
    "leaves_s": st.sampled_from([PATIENCE_S, PATIENCE_S, PATIENCE_S, 0.0, 0.001, 0.03, 0.5]),
    "reads_s": st.sampled_from([0.0, 0.0, 0.5]),
})  # fmt: skip
EVENT = st.one_of(
    *[st.tuples(st.just("ask"), ASK)] * 6,
    st.tuples(
        st.just("reconfigure"),
        st.sampled_from(
            [{}, {"ttft_s": 2.0}, {"bulk_share": 0.1}, {"max_buffered_tokens": 5}, {"request_timeout_s": 3.0}]
        ),
    ),
    st.tuples(st.sampled_from(["fail", "break", "slow", "cut", "half cut", "die", "replace"]), st.integers(0, 3)),
)
WAIT = st.sampled_from([0.0, 0.0, 0.0, 0.001, 0.02, 0.1, 0.7])


async def lived(happens, blocks, seed):
    """The world after all of it."""
    world = World(blocks, seed)
    reach = reach_of(lambda: chain(*world.pools.values()), lambda: world.chance.choice([0.0, 0.01]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_set, "reach", reach)
        patch.setattr(pool_module.GenerationPool, "connect", lambda _: None)
        await world.start()
        for (what, how), wait_s in happens:
            await world.happen(what, how)
            await asyncio.sleep(wait_s)
        await asyncio.sleep(PATIENCE_S + 20)
        world.check()
    return world


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(EVENT, WAIT), min_size=3, max_size=30), st.sampled_from([6, 24, 100]), st.integers(0, 9))
@virtual
async def test_each_generation_ends_with_its_own_tokens_and_nothing_is_left(happens, blocks, seed):
    await lived(happens, blocks, seed)


async def test_under_faults_without_end_generations_come_to_every_end():
    chance, happens = random.Random(5), []
    asks = {"bulk": False, "ignore_end": True, "reads_s": 0.0}
    for _ in range(150):
        length, answers = chance.choice([5, 128, 300]), chance.choice([1, 1, 3])
        leaves_s = chance.choice([PATIENCE_S, PATIENCE_S, 0.3])
        ask = {"length": length, "tokens": 30, "answers": answers, "leaves_s": leaves_s, **asks}
        happens.append((("ask", ask), chance.choice([0.0, 0.05, 0.2])))
        if chance.random() < 0.1:
            happens.append(((chance.choice(["fail", "cut", "half cut", "die", "replace"]), chance.randrange(4)), 0.0))
    world = await lived(happens, 8, 1)
    ends = [seen.problem and type(seen.problem) for seen in world.clients if not seen.left]
    assert ends.count(None) > 50
    assert {Busy, EngineFailed, ReplicaLost} <= set(ends)
    assert any(seen.left and seen.tokens for seen in world.clients)
    assert all(one.stepper.schedule.steps for one in world.pools["accelerator"][:2])
