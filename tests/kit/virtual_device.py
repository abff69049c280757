"""Replicas in virtual time that are offered queries without a Router between: what is admitted, and when it ends."""

import asyncio
import math
from dataclasses import dataclass

from deployments.queueing.learning import Learning
from tests.kit.replica_world import FakeRouter, proven
from tests.kit.simulation.application import Replica
from tests.kit.simulation.arrivals import Arrival
from tests.kit.virtual_time import run

MOST_TURNS = 10**7


@dataclass(eq=False)
class Sent:
    """One query: what became of it."""

    arrival: Arrival
    at: float
    admitted: bool = False
    ended: float = math.nan

    @property
    def in_time(self) -> bool:
        return self.admitted and self.ended <= self.at + self.arrival.allowed_s + 1e-6


class World:
    """Devices in the order of preference; equal ones are one pool, in which the first to be free is asked first.

    `slow`: ((at, times), ...): so many times as long as planned all takes from then on. `look` is called with each
    schedule after each arrival. `schedules`: those of the devices, once queries were served.
    """

    def __init__(self, *devices, slo_s=1.0, greedy_share=None, learned=True, slow=(), look=lambda schedule: None):
        self.devices, self.learned, self.slow, self.look = devices, learned, slow, look
        self.policy = {"slo_s": slo_s, "greedy_share": greedy_share}

    def serve(self, arrivals):
        return run(self._serve(sorted(arrivals, key=lambda one: one.at)), MOST_TURNS)

    async def _serve(self, arrivals):
        loop = asyncio.get_running_loop()
        replicas = [
            Replica(f"r{number}", device, seed=number, learning=proven() if self.learned else Learning(calibrated=True))
            for number, device in enumerate(self.devices)
        ]
        for at, times in self.slow:
            for replica in replicas:
                loop.call_at(at, setattr, replica.engine, "slow", times)
        self.schedules = [replica.runner.schedule for replica in replicas]
        self.routers = [FakeRouter(replica.runner, **self.policy) for replica in replicas]
        offered = []
        for arrival in arrivals:
            await asyncio.sleep(arrival.at - loop.time())
            offered.append((sent := Sent(arrival, loop.time()), self._offer(arrival)))
            sent.admitted = offered[-1][1] is not None
            for schedule in self.schedules:
                self.look(schedule)
        for replica in replicas:
            await replica.runner.drained()
        await asyncio.sleep(0.001)
        for sent, at in offered:
            if sent.admitted:
                router, number = at
                sent.ended, _ = router.ends[number, 0]
        return [sent for sent, _ in offered]

    def _offer(self, arrival):
        """Where it is admitted."""
        now, pools = asyncio.get_running_loop().time(), set()
        places = [
            (self.devices.index(device), router.runner.schedule.state(now).free_s, router)
            for device, router in zip(self.devices, self.routers, strict=True)
        ]
        for pool, _, router in sorted(places, key=lambda place: place[:2]):
            about = {"bulk": arrival.bulk, "tenant": arrival.tenant, "again": pool in pools}
            number = router.offer(1, arrival.tokens, arrival.allowed_s, **about)
            if number in router.runner._sessions[router].offers:
                return router, number
            pools.add(pool)
        return None


def goodput(sent, seconds):
    return sum(one.in_time for one in sent) / seconds


def late_share(sent):
    """Of those admitted."""
    admitted = [one for one in sent if one.admitted]
    return sum(not one.in_time for one in admitted) / max(1, len(admitted))


def refused_share(sent):
    sent = list(sent)
    return sum(not one.admitted for one in sent) / max(1, len(sent))
