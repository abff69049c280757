"""The quota of an API key, which applies even if there is room: a token bucket that may go into debt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.errors import OverQuota, TimedOut

Unit = Literal["device_seconds", "tokens"]

_BURST_S = 5.0  # seconds of the quota that an idle client may use at once


@dataclass(slots=True, eq=False)
class Quota:
    """A token bucket. `per_s`: device seconds or tokens per second. A request may start while the bucket is not empty,
    and takes its whole cost. If the bucket goes below zero, the next request waits until it has refilled. So in any t
    seconds, a client uses at most `per_s * (t + 5 s)` plus one request.

    Each of n Routers grants 1/n of the quota. A client whose requests all reach one Router gets only that. All Routers
    together never grant more than the quota. Exception: the first two seconds or so after a Router has joined.
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
        """Take a request's cost from the bucket. A negative amount is a refund."""
        self._left -= amount


@dataclass(slots=True, eq=False)
class Charge:
    """What a request has cost its client so far, in the quota's unit. `quota`: the quota that pays; None: only count.

    An estimate is charged when the request arrives, so that the next one finds less quota. It is settled when the cost
    is known. A request that is refused, or fails by an error of ours, costs nothing. A client that disconnects or runs
    out of time pays, because a device may have computed the request.
    """

    quota: Quota | None
    spent: float = 0.0

    def check(self, now: float, routers: int) -> None:
        """Raises OverQuota if the client must wait."""
        wait_s = 0.0 if self.quota is None else self.quota.wait_s(now, routers)
        if self.quota is not None and wait_s > 0:
            unit = self.quota.unit.replace("_", " ")
            raise OverQuota(
                f"the quota of this API key ({unit}) is used up; retry in {wait_s:.2f} s", retry_after_s=wait_s
            )

    def pay(self, amount: float) -> None:
        """Charge `amount` more."""
        self.spent += amount
        if self.quota is not None:
            self.quota.spend(amount)

    def settle(self, total: float) -> None:
        """Make `total` the whole charge, in place of what was charged so far."""
        self.pay(total - self.spent)

    def failed(self, error: BaseException | None) -> None:
        """The request was refused or failed with this error: refund it, unless time ran out or the client left."""
        if isinstance(error, Exception) and not isinstance(error, TimedOut):
            self.settle(0.0)


class Client(NamedTuple):
    """The client of a request, by its API key."""

    tenant: Tenant
    quota: Quota | None = None
