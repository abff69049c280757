"""What one API key may use in all, however much room there is: a token bucket that may go into debt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.errors import OverQuota, TimedOut

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


@dataclass(slots=True, eq=False)
class Charge:
    """What one request has cost its client so far, in the quota's unit. `quota`: that pays; None: it is only counted.

    An estimate is paid as the request comes, so that the next one finds less. It is settled when more is known. What is
    refused, or broken off by an error of ours, costs nothing. Who hangs up or runs out of time pays: a device may have
    computed it.
    """

    quota: Quota | None
    spent: float = 0.0

    def check(self, now: float, routers: int) -> None:
        """Raises OverQuota."""
        wait_s = 0.0 if self.quota is None else self.quota.wait_s(now, routers)
        if self.quota is not None and wait_s > 0:
            unit = self.quota.unit.replace("_", " ")
            raise OverQuota(
                f"the quota of this API key ({unit}) is used up; retry in {wait_s:.2f} s", retry_after_s=wait_s
            )

    def pay(self, amount: float) -> None:
        """So much more."""
        self.spent += amount
        if self.quota is not None:
            self.quota.spend(amount)

    def settle(self, total: float) -> None:
        """So much in all, in place of what was paid so far."""
        self.pay(total - self.spent)

    def failed(self, error: BaseException | None) -> None:
        """It was refused, or broken off by this error."""
        if isinstance(error, Exception) and not isinstance(error, TimedOut):
            self.settle(0.0)


class Client(NamedTuple):
    """Who asks, as the API key says."""

    tenant: Tenant
    quota: Quota | None = None
