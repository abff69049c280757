"""A replica without Ray: the product's Runner and Schedule, an engine that takes the time that the model says, and
Routers' connections that keep what they are told. For an event loop whose clock jumps.
"""

import asyncio
import itertools

import numpy as np

from deployments.engines import Stopped
from deployments.models.outputs import TEXT
from deployments.runner import Runner
from deployments.transport.frames import Offer, Offers
from tests.kit.virtual_device import EIGHT, V100, schedule_of

POLICY = {"slo_s": 1.0, "admission": "finish", "bulk_share": 0.5, "greedy_share": None, "depth": None, "model": None}


class FakeEngine:
    """`outcome(waiting)` is None, an exception to raise, or the norm of its answer."""

    def __init__(self, schedule):
        self.schedule, self.runs, self.stopped = schedule, [], 0
        self.outcome = lambda waiting: None
        self.slow = 1.0
        self.running = set()
        self.silent = False
        self.task, self.ends_later_s = None, 0.0

    def compute(self, run, passed, ended, stop):
        async def until_it_ends():
            problem = None
            try:
                await self._compute(run, passed, stop)
            except Exception as error:  # noqa: BLE001 - as the real one tells it
                problem = error
            await asyncio.sleep(self.ends_later_s)
            ended(problem)

        self.task = asyncio.get_running_loop().create_task(until_it_ends())

    async def _compute(self, run, passed, stop):
        self.runs.append([(one.session.name, one.number, one.index) for one in run])
        assert not self.running, "two runs at once"
        self.running = {id(one) for one in run}
        try:
            await asyncio.sleep(self.slow * self.schedule.model.beta_s)
            for chunk in self._passes(run):
                seconds = sum(self.schedule.model.cost_s(len(run[i].ids)) for i in chunk)
                await asyncio.sleep(self.slow * seconds)
                if stop.is_set():
                    self.stopped += 1
                    raise Stopped
                for i in chunk:
                    if isinstance(problem := self.outcome(run[i]), Exception):
                        raise problem
                if not self.silent:
                    rows = [1 if run[i].outputs == TEXT else len(run[i].ids) for i in chunk]
                    found = [
                        np.tile(np.array([run[i].ids[0], len(run[i].ids)], np.float32), n)
                        for i, n in zip(chunk, rows, strict=True)
                    ]
                    norms = np.array([1.0 if (n := self.outcome(run[i])) is None else n for i in chunk], np.float32)
                    passed(np.array(chunk, np.intp), found, norms)
        finally:
            self.running = set()

    def _passes(self, run):
        if not self.schedule.pass_tokens:
            return [range(len(run))]
        return [range(at, min(at + 8, len(run))) for at in range(0, len(run), 8)]


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


def replica(pass_tokens=EIGHT, curve=V100, slo_s=1.0, **how):
    schedule = schedule_of(curve, slo_s, pass_tokens=pass_tokens, **how)
    engine = FakeEngine(schedule)
    return Runner(schedule, engine.compute, clock=asyncio.get_running_loop().time), engine
