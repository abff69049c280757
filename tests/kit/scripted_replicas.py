"""Scripted replicas for a Router's Placer and BulkQueue: each reacts to its offers as a script says, after 10 ms."""

import asyncio

import numpy as np

from deployments.embedding.config import PoolConfig, RouterConfig
from deployments.embedding.frames import Answered
from deployments.embedding.link import PendingOffer
from deployments.embedding.placer import Placer
from deployments.embedding.pool import Pool
from deployments.embedding.request import Request
from deployments.embedding.retries import Placement
from deployments.embedding.scheduler.state import ReplicaState
from deployments.embedding.view import View
from deployments.errors import EngineBroken, EngineFailed, ReplicaLost

AFTER_S = 0.01
STAY_S = 0.004  # time that an answer reports for its stay at the replica
# A token costs 1 ms and a batch 200 ms. There is no margin, and room for 301 ms of bulk queries.
STATE = ReplicaState(0.0, 0.0, 0.301, 0, 0, 0, 0, (0.0, 0.001, 0.0, 0.2), 1.0, 0.0, (0, 0, 0))


def _now():
    """The loop's time, rounded: its clock advances by nanoseconds when nothing else happens."""
    return round(asyncio.get_running_loop().time(), 6)


def answers(pending):
    admitted = pending.admitted
    for index in range(admitted.result() if admitted is not None and admitted.done() else pending.size):
        pending.answer(Answered(pending.number, index, np.ones(2, np.float32), 1.0, 0.0, STAY_S))


def refuses(pending):
    pending.refuse()


def dies(pending):
    pending.fail(ReplicaLost("it died"))


def lapses(pending):
    """The replica seemed to have the queries, but does not."""
    pending.admitted.set_result(pending.size)
    pending.refuse()


def says_nothing(pending):
    pass


def breaks(pending):
    """The replica's engine is broken."""
    pending.fail(EngineBroken("no kernel"))


def fails(pending):
    """The query is bad."""
    pending.fail(EngineFailed("a bad query"))


def hangs(pending):
    pending.hang()


def admits(count, then=answers, *, after_s=AFTER_S):
    def script(pending):
        pending.admit(count)
        if count:
            asyncio.get_running_loop().call_later(after_s, then, pending)

    return script


class ScriptedReplica:
    """Replaces a Link. `heard` (at `times`), `called_off`, `confirmed` and `refused` record what it received."""

    def __init__(self, name, *scripts, is_live=True, rank=0, **state):
        self.view, self.scripts, self.is_live = View(name, (False, rank)), list(scripts), is_live
        self.view.hear(_now(), STATE._replace(**state), 0)
        self.heard, self.times, self.called_off, self.confirmed, self.refused = [], [], [], [], []
        self.bulk_parts, self.bulk_again_at = 0, 0.0

    def offer(self, offer, indices):
        loop = asyncio.get_running_loop()
        offer.number = len(self.heard) + 1
        self.heard.append(offer)
        self.times.append(_now())
        pending = PendingOffer(offer, loop)
        pending.link, pending.indices = self, indices
        script = self.scripts.pop(0) if self.scripts else answers
        loop.call_later(AFTER_S, lambda: pending.ended or script(pending))
        return pending

    def call_off(self, pending):
        if not pending.ended or pending.outcome.cancelled():
            self.called_off.append(pending.number)

    def confirm(self, pending):
        self.confirmed.append(pending.number)

    def refuse_here(self, lengths, _allowed_s, tenant):
        self.refused.append((self.view.model.work(lengths), tenant))

    def configure(self):
        pass

    @property
    def by_count(self):
        return self.pool.by_count


def pool_of(name, *replicas, admission="deadline", on_change=lambda: None, **config):
    pool = Pool(name, deployment=name, handle=None, router="r", node="n", on_change=on_change)
    pool.links, pool.live = {link.view.replica: link for link in replicas}, list(replicas)
    pool._first = next(iter(replicas), None)
    for link in replicas:
        link.pool = pool
    pool.configure(PoolConfig(**config), {"admission": admission, "slo_s": 60.0})
    return pool


def placer_of(*replicas, cpu=(), slo_s=1.0, admission="deadline", bulk=None, draw=lambda: 0.0, **config):
    pools = {"accelerator": pool_of("accelerator", *replicas, admission=admission, **config)}
    if cpu:
        pools["cpu"] = pool_of("cpu", *cpu, admission=admission)
    placer = Placer(pools, draw)
    placer.config = RouterConfig.parse({"slo_s": slo_s, "bulk": bulk or {}})
    return placer


async def answer(placer, request):
    """As the Router places a request that is not bulk."""
    return await Placement(placer, request).answered()


def request_of(*lengths, allowed_s=1.0, deferrable=False, bulk=False, **wanted):
    """A request with queries of these lengths in tokens."""
    now = _now()
    request = Request(["x"] * len(lengths), bulk=bulk, outputs=("text",), **wanted)
    request.started, request.due, request.deferrable = now, now + allowed_s, deferrable
    request.ids = [np.ones(tokens, np.int32) for tokens in lengths]
    return request
