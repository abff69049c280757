"""Devices in virtual time, driven by the product's own Schedule: what is admitted, and when it ends."""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deployments.queueing.cost_model import CostModel
from deployments.queueing.learning import Learning
from deployments.queueing.schedule import PATIENT, Policy, Query, Schedule
from deployments.queueing.shares import Tenant

V100, XEON, ATLAS, KUNPENG = (0.018, 0.27), (0.0858, 0.32), (0.00904, 0.24), (0.0752, 0.85)  # alpha, beta
EIGHT = 8 * 75  # tokens of a pass


@dataclass(frozen=True)
class Arrival:
    at: float
    tokens: int = 75
    allowed_s: float = 1.0
    bulk: bool = False
    tenant: Tenant | None = None
    who: str = ""  # the tenant's name, also where the schedule is not told


@dataclass(eq=False)
class Sent:
    """One query: what became of it."""

    arrival: Arrival
    at: float
    admitted: bool = False
    ended: float = math.nan

    @property
    def in_time(self) -> bool:
        return self.admitted and self.ended <= self.at + self.arrival.allowed_s + 1e-9


def proven() -> Learning:
    """As after 200 answers that came when they were predicted: the least margin."""
    learning = Learning(calibrated=True)
    for _ in range(400):
        learning.answered(1.0, 1.0, 1.0)
    return learning


def schedule_of(curve, slo_s, *, pass_tokens=0, admission="finish", depth=None, learned=True):
    return Schedule(
        CostModel.of_curve(*curve),
        Policy(slo_s, admission, depth),
        pass_tokens,
        proven() if learned else Learning(calibrated=True),
    )


@dataclass(eq=False)
class Device:
    schedule: Schedule
    pool: int = 0
    slow: Callable[[float], float] = lambda now: 1.0
    noise: float = 0.0
    beta_s: float | None = None


@dataclass
class World:
    """`look` is called after every event, with each device."""

    devices: Sequence[Device]
    seed: int = 0
    look: Callable[[Device], None] = lambda device: None
    sent: list[Sent] = field(default_factory=list)

    def run(self, arrivals: Iterable[Arrival]) -> list[Sent]:
        self._random, self._count, self._events = random.Random(self.seed), itertools.count(), []
        self.slo_s = self.devices[0].schedule.policy.slo_s
        for one in arrivals:
            self._at(one.at, 2, self._offer, Sent(one, one.at))
        while self._events:
            self.now, _, _, what, args = heapq.heappop(self._events)
            what(*args)
            for device in self.devices:
                self.look(device)
        return self.sent

    def _at(self, when, order, what, *args):
        heapq.heappush(self._events, (when, order, next(self._count), what, args))

    def _offer(self, sent: Sent):
        now, one = self.now, sent.arrival
        self.sent.append(sent)
        patient = one.bulk or one.allowed_s > PATIENT * self.slo_s
        pools = set()
        order = sorted(
            self.devices, key=lambda d: (d.pool, d.schedule.state(now).free_s if len(self.devices) > 2 else 0)
        )
        for device in order:
            query = Query(one.tokens, now + one.allowed_s, patient=patient, bulk=one.bulk, item=sent, tenant=one.tenant)
            if device.schedule.offer(now, [query], again=device.pool in pools):
                sent.admitted = True
                self._kick(device)
                return
            pools.add(device.pool)

    def _kick(self, device: Device):
        schedule, now = device.schedule, self.now
        wait_s = schedule.start_in_s(now)
        if wait_s is None:
            return
        if wait_s > 1e-12:
            self._at(now + wait_s, 1, self._kick, device)
            return
        run = schedule.start(now)
        slow = device.slow(now) * (1 + self._random.gauss(0, device.noise) if device.noise else 1)
        at = now + slow * (schedule.model.beta_s if device.beta_s is None else device.beta_s)
        for chunk in self._passes(run, schedule.pass_tokens):
            at += slow * sum(query.cost_s for query in chunk)
            self._at(at, 0, self._passed, device, chunk)
        self._at(at, 0, self._ended, device)

    @staticmethod
    def _passes(run, pass_tokens):
        if not pass_tokens:
            yield run
            return
        chunk, tokens = [], 0
        for query in run:
            if chunk and tokens + query.tokens > pass_tokens:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(query)
            tokens += query.tokens
        yield chunk

    def _passed(self, device, chunk):
        device.schedule.passed(self.now, chunk)
        for query in chunk:
            query.item.ended = self.now

    def _ended(self, device):
        device.schedule.ended(self.now)
        self._kick(device)


def poisson(rate, seconds, allowed_s, *, mixed=False, seed=3, **more):
    chance, at, out = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        tokens = round(min(512, max(4, chance.lognormvariate(math.log(60), 0.9)))) if mixed else 75
        out.append(Arrival(at, tokens, allowed_s, **more))
    return out


def goodput(sent, seconds):
    return sum(one.in_time for one in sent) / seconds


def late_share(sent):
    """Of those admitted."""
    admitted = [one for one in sent if one.admitted]
    return sum(not one.in_time for one in admitted) / max(1, len(admitted))


def refused_share(sent):
    sent = list(sent)
    return sum(not one.admitted for one in sent) / max(1, len(sent))
