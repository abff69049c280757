"""What one API key may use in all, however much room there is: a token bucket that may go into debt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from deployments.admission.fair_share import Tenant

Unit = Literal["device_seconds", "tokens"]

_BURST_S = 5.0  # of the quota: who was idle may use so much at once


@dataclass(slots=True, eq=False)
class Quota:
    """`per_s`: device seconds, or tokens, a second. A request starts while the bucket holds anything, and takes what it
    costs: the bucket may go below zero, and the next request waits until it is back. So nobody uses more than
    `per_s * (t + 5 s)` and one request in any t seconds.

    Each of several Routers grants an equal part. A client whose requests all come to one of n Routers gets 1/n of its
    quota; all Routers together never grant more than the quota, but while one joins: for two seconds or so.
    """

    per_s: float
    unit: Unit
    _left: float = 0.0
    _at: float = 0.0
    _is_used: bool = False

    def wait_s(self, now: float, routers: int) -> float:
        """Seconds until the next request may start; 0: now."""
        rate = self.per_s / routers
        most = rate * _BURST_S
        if not self._is_used:
            self._is_used, self._left = True, most
        self._left = min(most, self._left + rate * max(0.0, now - self._at))
        self._at = now
        return 0.0 if self._left > 0 else -self._left / rate + _BURST_S / 100

    def spend(self, amount: float) -> None:
        """A request costs so much; below 0: it gives that back."""
        self._left -= amount


class Client(NamedTuple):
    """Who asks, as the API key says."""

    tenant: Tenant
    quota: Quota | None = None
