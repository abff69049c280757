"""A replica in virtual time: the product's Runner and Schedule, and Routers that keep what they are told."""

import asyncio
import itertools

import numpy as np

from deployments.queueing.learning import Learning
from deployments.transport.frames import Offer, Offers
from tests.kit.simulation.application import Replica
from tests.kit.simulation.device import Device

V100, XEON, ATLAS, KUNPENG = (0.018, 0.27), (0.0858, 0.32), (0.00904, 0.24), (0.0752, 0.85)  # alpha, beta
POLICY = {"slo_s": 1.0, "admission": "finish", "bulk_share": 0.5, "greedy_share": None, "depth": None, "model": None}


class FakeRouter:
    """One connection, as the Runner sees it."""

    def __init__(self, runner, name="r", **policy):
        self.runner, self.numbers, self.ends, self.reports = runner, itertools.count(1), {}, []
        self.admitted = {}
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
        for number, sentence in report.failed:
            self._end(number, ("failed", sentence))
        for one in report.answered:
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


def proven():
    """As after 200 answers that came when they were predicted: the least margin."""
    learning = Learning(calibrated=True)
    for _ in range(400):
        learning.answered(1.0, 1.0, 1.0)
    return learning


def replica(pass_queries=8, curve=V100):
    one = Replica("a", Device(*curve, pass_queries), learning=proven())
    return one.runner, one.engine
