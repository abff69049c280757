"""A pool of the Router over replicas that are sockets on loopback, and a handle of our own in place of Serve's."""

from __future__ import annotations

import asyncio

from deployments import membership
from deployments.lease_office import LeaseOffice
from deployments.pool import Pool
from deployments.queue_manager import QueueManager
from deployments.settings import PoolConfig

HOST, DEPLOYMENT, DEPTH = "127.0.0.1", "EmbedderOfTestPool", 5


class Replica:
    """Listens, and says nothing: an idle channel."""

    def __init__(self, node):
        self.node, self.office, self.peers = node, LeaseOffice(lives=None, orphan=None), []

    async def start(self):
        self.server = await asyncio.start_server(lambda _, writer: self.peers.append(writer), HOST, 0)
        return {
            "node": self.node,
            "warm_up": {"alpha_s": 0.01, "beta_s": 0.1},
            "channel": {"host": HOST, "port": self.server.sockets[0].getsockname()[1], "secret": "x"},
        }

    def die(self):
        """The office does not answer any more, nor does it refuse: Ray has not heard yet. The connections break."""
        self.office = None
        for peer in self.peers:
            peer.transport.abort()
        self.server.close()


class Handle:
    def __init__(self, replicas, method=None):
        self.replicas, self.method = replicas, method

    def options(self, **options):
        return Handle(self.replicas, options.get("method_name"))

    def remote(self, replica, *words):
        return asyncio.ensure_future(self.call(replica, *words))

    async def call(self, replica, *words):
        office = self.replicas[replica].office if self.method == "lease" else None
        if office is None:
            await asyncio.Event().wait()
        return await office.calls[words[0]](*words[1:])


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.001)


def test_the_death_of_idle_replicas_is_known_before_a_query_is_sent_there():
    """With a node die the accelerator's replica and the CPU's: what the one lost must not go to the other."""

    async def whole():
        replicas = {name: Replica(node) for name, node in [("here", "a"), ("there", "b"), ("beside", "b")]}
        members = {name: await replica.start() for name, replica in replicas.items()}
        queue = QueueManager(["cpu"])
        pool = Pool(
            "cpu", deployment=DEPLOYMENT, handle=Handle(replicas), queue=queue, router="router", actor="actor",
            node="b", on_change=lambda: None,
        )  # fmt: skip
        pool.configure(PoolConfig(queue_depth=DEPTH))
        pool.connect()
        membership.publish(DEPLOYMENT, members)
        await until(lambda: len(pool.members) == 3)
        preferred = list(pool.batcher._out)
        replicas["there"].die()
        replicas["beside"].die()
        await until(lambda: set(pool.members) == {"here"})
        left = queue.capacity_of("cpu")
        membership.publish(DEPLOYMENT, {"here": members["here"]})  # now Serve knows it too
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        replicas["here"].die()
        return preferred, left, set(pool.members)

    preferred, left, after = asyncio.run(whole())
    assert set(preferred[:2]) == {"there", "beside"}  # on the Router's own node
    assert (left, after) == (DEPTH, {"here"})
