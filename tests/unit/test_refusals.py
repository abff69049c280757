"""At twice what the devices do, all clients come back when they are told: refusals are made in the Router, few requests
are needed for an answer, and the devices have as much to do as before.

While Routers refused by the mean cost and told half of a line, replicas refused 0.42 to 0.74 of what was offered, an
answer took 2.9 to 22 requests, and 0.06 to 0.43 of the clients were admitted when they came back as told. In the open
loop as much comes as at first for ever: the line grows, and newcomers take every second place.
"""

import asyncio
import random
from dataclasses import dataclass

import pytest

from tests.kit.simulation.application import Application, Ended, Shape
from tests.kit.simulation.arrivals import Arrival, poisson
from tests.kit.simulation.device import Device
from tests.kit.virtual_time import run

SECONDS = 20.0
LOAD = 2.0
TURNS = 10**7
V100, XEON = (0.018, 0.27), (0.0858, 0.32)
CASES = {
    "V100 + Xeon": (2.0, {"accelerator": V100, "cpu": XEON}),
    "V100": (1.0, {"accelerator": V100}),
}


@dataclass
class Found:
    """`work`: device seconds of answers in time, beside what the devices can do; `refused`: the share of offers that
    replicas refused; `as_told`: the share of those who came back and were admitted when they were told to come.
    """

    refused: float
    requests: float
    as_told: float
    work: float
    late: int


class Clients:
    """Each asks until it is answered, and comes back when it is told to."""

    def __init__(self, application: Application, seconds: float) -> None:
        self.application, self.loop = application, asyncio.get_running_loop()
        self.end = self.loop.time() + seconds
        self.requests, self.answers, self.late, self.tokens = 0, 0, 0, 0
        self.came: list[bool] = []  # of each that was refused at first: it was admitted when it came back first

    async def asks(self, arrival: Arrival) -> None:
        times = 0
        while (ended := await self._request(arrival)).pool is None:
            times += 1
            if self.loop.time() + ended.retry_after_s > self.end:
                await asyncio.sleep(max(0.0, self.end - self.loop.time()) + 1e-3)
                break
            await asyncio.sleep(ended.retry_after_s)
        if times > 1 or (times and ended.pool is not None):
            self.came.append(times == 1)

    async def _request(self, arrival: Arrival) -> Ended:
        ended = await self.application._query(0, arrival)
        assert ended is not None
        self.requests += 1
        if ended.pool is not None:
            self.answers += 1
            self.late += not ended.in_time
            self.tokens += arrival.tokens if self.loop.time() <= self.end else 0
        return ended

    async def closed(self, lengths: list[int], start_s: float) -> None:
        """One query after the other."""
        await asyncio.sleep(start_s)
        for tokens in lengths:
            if self.loop.time() >= self.end:
                return
            await self.asks(Arrival(self.loop.time(), tokens))


def served(case: str, *, closed: bool, mixed: bool, pass_by_pass: bool = True, noise: float = 0.0) -> Found:
    slo_s, curves = CASES[case]
    devices = {pool: Device(*curve, 8 if pass_by_pass else None, noise) for pool, curve in curves.items()}
    queries_s = sum(device.queries_s(slo_s) for device in devices.values())

    async def serve() -> Found:
        application, draw = Application(Shape(1, 1, devices, slo_s)), random.Random(1)
        await application.start()
        clients = Clients(application, SECONDS)
        arrivals = list(poisson(LOAD * queries_s, SECONDS, mixed=mixed))
        if closed:
            some = round(LOAD * queries_s * slo_s)
            lengths = [one.tokens for one in arrivals]
            await asyncio.gather(
                *(clients.closed(draw.sample(lengths, 100), draw.random() * slo_s) for _ in range(some))
            )
        else:
            began, tasks = clients.loop.time(), []
            for one in arrivals:
                await asyncio.sleep(began + one.at - clients.loop.time())
                tasks.append(asyncio.create_task(clients.asks(one)))
            await asyncio.gather(*tasks)
        refused = sum(one.runner.schedule.refusals.full for one in application.replicas.values())
        return Found(
            refused / (refused + clients.answers),
            clients.requests / clients.answers,
            sum(clients.came) / len(clients.came),
            clients.tokens / 75 / SECONDS / queries_s,
            clients.late,
        )

    return run(serve(), TURNS)


@pytest.mark.parametrize(
    ("case", "closed", "mixed", "refused", "requests", "as_told", "work"),
    [
        ("V100 + Xeon", True, False, 0.03, 2.25, 0.70, 0.90),
        ("V100 + Xeon", True, True, 0.10, 2.05, 0.65, 0.89),
        ("V100 + Xeon", False, False, 0.03, 3.2, 0.33, 0.90),
        ("V100 + Xeon", False, True, 0.08, 2.9, 0.35, 0.89),
        ("V100", True, False, 0.03, 2.35, 0.45, 0.86),
        ("V100", True, True, 0.07, 2.15, 0.48, 0.83),
        ("V100", False, False, 0.03, 3.5, 0.30, 0.87),
        ("V100", False, True, 0.07, 3.3, 0.31, 0.84),
    ],
)
def test_clients_that_obey_need_few_requests(case, closed, mixed, refused, requests, as_told, work, figure):
    found = served(case, closed=closed, mixed=mixed)
    figure(f"{found.refused:.1%} refused by replicas, {found.requests:.2f} requests for an answer")
    assert found.late == 0
    assert found.refused <= refused
    assert found.requests <= requests
    assert found.as_told >= as_told
    assert found.work >= work


@pytest.mark.parametrize(
    ("closed", "mixed", "refused", "work"),
    [(True, False, 0.06, 1.03), (True, True, 0.10, 1.02), (False, False, 0.08, 1.04), (False, True, 0.12, 1.02)],
)
def test_devices_that_answer_at_the_runs_end_have_as_much_to_do(closed, mixed, refused, work, figure):
    """They open for many at once: these come back together."""
    found = served("V100 + Xeon", closed=closed, mixed=mixed, pass_by_pass=False)
    figure(f"{found.refused:.1%} refused by replicas, {found.work:.2f} of the capacity")
    assert found.late == 0
    assert found.refused <= refused
    assert found.work >= work
