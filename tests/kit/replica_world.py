"""Replicas in virtual time: windve's run loop and scheduler, and Routers that record what they receive."""

import asyncio
import itertools
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.simulation.application import Replica
from benchmarks.simulation.arrivals import Arrival
from benchmarks.simulation.device import Device
from benchmarks.simulation.virtual_time import run
from deployments.admission.predictor import Predictor
from deployments.embedding.frames import Offer, Offers

V100, XEON, ATLAS, KUNPENG = (0.018, 0.27), (0.0858, 0.32), (0.00904, 0.24), (0.0752, 0.85)  # alpha, beta
MOST_TURNS = 10**7
POLICY = {
    "slo_s": 1.0,
    "admission": "deadline",
    "bulk_share": 0.5,
    "max_batch_fraction": 1.0,
    "depth": None,
    "model": None,
}


class FakeRouter:
    """One connection, as the run loop sees it."""

    def __init__(self, runner, name="r", **policy):
        self.runner, self.numbers, self.ends, self.reports = runner, itertools.count(1), {}, []
        self.admitted, self.broken, self.suspect = {}, [], []
        runner.receive(self, Offers(settings={"router": name, **POLICY, **policy}, asks=True))

    def hang_up(self):
        pass

    def send(self, report):
        now = asyncio.get_running_loop().time()
        self.reports.append((now, report))
        for number, never in report.refused:
            self._end(number, ("refused", never))
        for number, count in report.admitted:
            self.admitted[number] = count
            if not count:
                self._end(number, ("refused", False))
        self.broken += report.broken
        self.suspect += report.suspect
        for number, sentence in report.failed:
            self._end(number, ("failed", sentence))
        for one in itertools.chain(*report.answered):
            self._end((one.number, one.query), (now, one))

    def _end(self, key, how):
        assert key not in self.ends, "it ended twice"
        self.ends[key] = how

    def offer(self, queries=1, tokens=75, left_s=1.0, **how):
        number = next(self.numbers)
        ids = [np.full(tokens, number, np.int32) for _ in range(queries)]
        self.runner.receive(self, Offers([Offer(number, left_s, ids, **how)]))
        return number

    def call_off(self, *numbers):
        self.runner.receive(self, Offers(called_off=list(numbers)))

    def confirm(self, *numbers):
        self.runner.receive(self, Offers(confirmed=list(numbers)))

    def answers(self):
        return [key for key, how in self.ends.items() if isinstance(key, tuple)]


def proven(device, slo_s=1.0):
    """A predictor after many batches that took as long as predicted, so with the smallest margin."""
    predictor = Predictor(planned_s=device.beta_s, slo_s=slo_s)
    for number in range(40):
        work_s = slo_s * (0.5 + 0.5 * number % 2)
        took_s = device.beta_s + work_s
        predictor.ended(0.0, work_s, took_s, [(took_s, took_s)])
    return predictor


def replica(micro_batch_queries=8, curve=V100):
    device = Device(*curve, micro_batch_queries)
    one = Replica("a", device, predictor=proven(device))
    return one.runner, one.engine


class Sent(NamedTuple):
    """One query: the connection that admitted it, if any, and its number there."""

    arrival: Arrival
    at: float
    router: FakeRouter | None
    number: int

    @property
    def admitted(self):
        return self.router is not None

    @property
    def ended(self):
        return self.router.ends[self.number, 0][0]

    @property
    def in_time(self):
        return self.admitted and self.ended <= self.at + self.arrival.allowed_s + 1e-6


class World:
    """Devices in the order of preference. Equal ones form a pool, in which the first to be free is asked first.

    `look`: called with each scheduler after each arrival. `schedules`: the devices' schedulers. `busy_s`: how long they
    ran in all.
    """

    def __init__(self, *devices, slo_s=1.0, look=lambda schedule, now: None):
        self.devices, self.slo_s, self.look = devices, slo_s, look

    def serve(self, arrivals):
        return run(self._serve(sorted(arrivals, key=lambda one: one.at)), MOST_TURNS)

    async def _serve(self, arrivals):
        loop = asyncio.get_running_loop()
        replicas = [
            Replica(f"r{number}", device, seed=number, predictor=proven(device, self.slo_s))
            for number, device in enumerate(self.devices)
        ]
        self.schedules = [replica.runner.schedule for replica in replicas]
        self.routers = [FakeRouter(replica.runner, slo_s=self.slo_s) for replica in replicas]
        sent = []
        for arrival in arrivals:
            await asyncio.sleep(arrival.at - loop.time())
            sent.append(Sent(arrival, loop.time(), *self._offer(arrival)))
            for schedule in self.schedules:
                self.look(schedule, loop.time())
        for replica in replicas:
            await replica.runner.drained()
        await asyncio.sleep(0.001)
        self.busy_s = sum(replica.engine.busy_s for replica in replicas)
        return sent

    def _offer(self, arrival):
        """The connection that admits the query, if any, and its number there."""
        now, pools = asyncio.get_running_loop().time(), set()
        places = [
            (self.devices.index(device), router.runner.schedule.state(now).free_s, router)
            for device, router in zip(self.devices, self.routers, strict=True)
        ]
        for pool, _, router in sorted(places, key=lambda place: place[:2]):
            about = {"bulk": arrival.bulk, "tenant": arrival.tenant, "outputs": arrival.outputs, "again": pool in pools}
            number = router.offer(1, arrival.tokens, arrival.allowed_s, **about)
            if number in router.runner._sessions[router].admitted:
                return router, number
            pools.add(pool)
        return None, 0


def late_share(sent):
    """The late share of the admitted queries."""
    admitted = [one for one in sent if one.admitted]
    return sum(not one.in_time for one in admitted) / max(1, len(admitted))


def adds_up(schedule, now):
    """Check that the scheduler's work equals that of its waiting queries."""
    queue = schedule.queue
    assert queue.urgent_work == pytest.approx(sum(query.cost for query in queue.urgent), abs=1e-9)
    assert queue.deferrable_work == pytest.approx(
        sum(query.cost for query in queue.deferrable_line.queries + queue.bulk_line.queries), abs=1e-9
    )
    assert queue.urgent == sorted(queue.urgent, key=lambda query: query.due)
    assert schedule.run.bulk >= 0
    state = schedule.state(now)
    assert min(state.opens_s, state.free_s, state.bulk_room) >= 0
