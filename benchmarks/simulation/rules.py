"""The bare admission rules in forty lines, as a reference for windve. Pure.

Devices in virtual time, without Router, network, margins or learning. A batch takes beta plus its queries' costs, and
all waiting queries go into the next batch. `finish`: answers come at the end of the batch. Admit if the next batch ends
before the earliest deadline in it, and do not let a query start it too early. `answer`: answers come per micro-batch,
in the order of deadlines. Admit if all waiting work and one micro-batch end by the query's own deadline, and the next
batch fits into the SLO.
"""

import bisect
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.simulation.arrivals import QUERY_TOKENS, Arrival
from benchmarks.simulation.device import Device

_RHO_S, _PAUSE_S = 3.0, 0.01


@dataclass(slots=True)
class _Queue:
    device: Device
    run: list[tuple[float, float]] = field(default_factory=list)  # (deadline, cost)
    waiting: list[tuple[float, float]] = field(default_factory=list)
    work_s: float = 0.0
    free_at: float = 0.0
    rho: float = 0.0
    rho_at: float = 0.0

    def finish(self, now: float, due: float, cost_s: float, slo_s: float) -> float | None:
        """When the query would be answered; None if it is not admitted."""
        device, left_s = self.device, max(0.0, self.free_at - now)
        self.rho = self.rho * math.exp((self.rho_at - now) / _RHO_S) + cost_s / _RHO_S
        self.rho_at = now
        end = now + left_s + device.beta_s + self.work_s + cost_s
        if device.micro_batch_queries:
            in_time = end + device.alpha_s * device.micro_batch_queries <= due
            return end if in_time and self.work_s + cost_s <= slo_s - device.beta_s else None
        if end > min(due, min((one for one, _ in self.waiting), default=due)):
            return None
        opens = not self.run or self.waiting or left_s <= (due - now - device.beta_s) / (1 + self.rho)
        return end if opens else None


def goodput(arrivals: Iterable[Arrival], devices: Mapping[str, Device], slo_s: float) -> tuple[float, float]:
    """(queries, device seconds of work) answered in time."""
    queues = [_Queue(device) for device in devices.values()]  # in the order of preference
    events: list[tuple[float, int, int, _Queue | Arrival]] = []  # 0: a batch ends, 1: a pause ends, 2: a query arrives
    events += [(one.at, 2, number, one) for number, one in enumerate(arrivals)]
    heapq.heapify(events)
    number, queries, work_s = len(events), 0, 0.0
    while events:
        now, kind, _, what = heapq.heappop(events)
        number += 1
        if isinstance(what, Arrival):
            due = now + (what.allowed_s or slo_s)
            for queue in queues:
                cost_s = queue.device.alpha_s * what.tokens / QUERY_TOKENS
                if queue.finish(now, due, cost_s, slo_s) is None:
                    continue
                if not queue.run and not queue.waiting:
                    queue.free_at = now + _PAUSE_S
                    heapq.heappush(events, (queue.free_at, 1, number, queue))
                bisect.insort(queue.waiting, (due, cost_s))
                queue.work_s += cost_s
                break
            continue
        if kind == 0:
            what.run = []
        if what.run or not what.waiting:
            continue
        what.run, what.waiting, what.free_at = what.waiting, [], now + what.device.beta_s + what.work_s
        what.work_s = 0.0
        end, size = now + what.device.beta_s, what.device.micro_batch_queries or len(what.run)
        for first in range(0, len(what.run), size):
            some = what.run[first : first + size]
            end += sum(cost_s for _, cost_s in some)
            queries += sum(end <= due + 1e-9 for due, _ in some)
            work_s += sum(cost_s for due, cost_s in some if end <= due + 1e-9)
        heapq.heappush(events, (what.free_at, 0, number, what))
    return queries, work_s
