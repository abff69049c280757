"""When a Router sends nothing to a replica whose engine fails, and for how long. Pure: the time is an argument.

Envoy's outlier detection, for the same reason: a replica that fails at once looks idle, and so gets everything
(https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier). The first three numbers are its
defaults (`consecutive_5xx`, `base_ejection_time`, `max_ejection_time`). Its `max_ejection_percent`, 10 %, is for
hundreds of hosts; here a pool may have two.

    ejected        after `FAILURES` offers in a row that failed by the engine's fault
    for            `BASE_S`, times its ejections so far, `LONGEST_S` at most; one that has been well for so long since
                   the last one begins anew
    back           by itself; its next failure ejects it again, its next answer clears it, and so does a failure that
                   shows its engine to be well
    not ejected    while half of the Router's replicas are, and never the last one: all may fail by one cause, and
                   then a Router had better try
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAILURES = 5
BASE_S, LONGEST_S = 30.0, 300.0
MOST_EJECTED = 0.5  # of a Router's replicas, rounded up


@dataclass(slots=True)
class Outlier:
    """What a Router counts of one replica. `until`: it is ejected, by the Router's loop time."""

    failures: int = 0  # in a row
    ejections: int = 0
    until: float = -math.inf

    def count(self, *, worked: int, failed: int) -> None:
        """What has come of offers since the last report. `worked`: of so many it is known that the engine is well."""
        self.failures = failed if worked else self.failures + failed

    def should_be_ejected(self, now: float) -> bool:
        return self.failures >= FAILURES and not self.is_ejected(now)

    def is_ejected(self, now: float) -> bool:
        return now < self.until

    def eject(self, now: float) -> float:
        """For so many seconds."""
        well_s = now - self.until
        self.ejections = 1 if well_s > min(BASE_S * self.ejections, LONGEST_S) else self.ejections + 1
        ejected_s = min(BASE_S * self.ejections, LONGEST_S)
        self.until = now + ejected_s
        return ejected_s


def may_eject_one(ejected: int, replicas: int) -> bool:
    """Of so many live replicas so many are ejected already."""
    return ejected < min(math.ceil(MOST_EJECTED * replicas), replicas - 1)
