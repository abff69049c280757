"""Divides an overloaded device among tenants: weighted fair queueing over admitted work. Pure.

A tenant is the users of one API key. For each tenant, an account remembers the device seconds that it asked for and got
over the last `_MEMORY_S` or so. While the device is not contended, nobody is held back. Otherwise, max-min fairness
gives a level of device seconds per weight (progressive filling: Bertsekas, Gallager, Data Networks, 6.5.2). A tenant
that asks for less than the level is under its share, and gets all that it asks for. All others are over their share. Of
them, those that have got the least per weight are served first (the order of weighted fair queueing: Demers, Keshav,
Shenker, SIGCOMM 1989; by service received: Sheng et al., OSDI 2024):

    A tenant over its share leaves room in the next run for the work that others are expected to request before that run
    starts: tenants under their share, and those over it that have got less per weight. No other room is kept.

For urgent queries on one device, over twice `_MEMORY_S` or longer (`tests/unit/test_fair_share_worlds.py`):

- While there are tenants under their share, each run still has a part for all others, with room for at least one of
  their queries. Otherwise no room is kept that nobody asks for. A tenant that has not asked for `_MEMORY_S` is
  forgotten.
- A tenant under its share gets at least 0.99 of what it asks for, once others have asked for much for some seconds.
- Tenants that each ask for at least twice their share get shares by their weights, within a tenth. A tenant that asks
  for 1.2 times its share gets at least 0.83 of the share, because it does not always have a query ready for free room.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

_MEMORY_S = 10.0
_DIVIDE_S = 0.05  # between two divisions: more often would be a waste
# A device is contended if more than `_CONTENDED` of the work is refused, and tenants ask for more than `_NEAR_CAPACITY`
# of its capacity. Below that, the kept room itself causes the refusals.
_CONTENDED, _NEAR_CAPACITY = 0.01, 0.95
_FLOOD, _FLOOD_S = 1.3, 1.0  # or if for so long they ask for this multiple of the capacity
_DEVIATIONS = 3.0  # standard deviations of the expected work (compound Poisson) for which room is kept besides
_MOST_NAMED = 32  # the most tenants that a replica names to Routers


class Tenant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The owner of a query: the name of its API key, and its weight relative to others."""

    name: str
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class Account:
    """A tenant's account. `offered_s`, `used_s`: device seconds asked for and got, fading. `waiting_s`: those waiting.
    `squares_s2`: the sum of the squared costs of its requests, fading.

    `is_over_share`: it asks for more than the level. `ahead_rho`: device seconds per second that tenants served before
    it ask for.
    """

    weight: float
    asked_at: float = 0.0
    offered_s: float = 0.0
    used_s: float = 0.0
    squares_s2: float = 0.0
    waiting_s: float = 0.0
    is_over_share: bool = False
    ahead_rho: float = 0.0

    def refused(self, work_s: float) -> None:
        """Count work of usual requests, which a Router refused itself."""
        if self.offered_s:
            self.squares_s2 += work_s * self.squares_s2 / self.offered_s
        self.offered_s += work_s

    def count(self, offered_s: float, used_s: float) -> None:
        """Count a request."""
        self.offered_s += offered_s
        self.used_s += used_s
        self.squares_s2 += offered_s * offered_s

    @property
    def rho(self) -> float:
        """Device seconds per second that it asks for."""
        return self.offered_s / _MEMORY_S


@dataclass(slots=True, eq=False)
class Shares:
    """The accounts of one device. `level`: device seconds per weight, inf while it is not contended. `capacity_rho`:
    about what the device can do, in device seconds per second; 0: unknown (generation).

    `has_under_share`: the level is finite, and some tenant asks for less. `under_share_rho`: device seconds per second
    that such tenants ask for; `under_share_cost_s`: the cost of their usual request, the mean weighted by cost.
    `over_share`: tenants over their share, by name, in the order in which they are served.
    `others_waiting_s`: their waiting device seconds.
    """

    capacity_rho: float = 0.0
    level: float = math.inf
    has_under_share: bool = False
    under_share_rho: float = 0.0
    under_share_cost_s: float = 0.0
    over_share: dict[str, Account] = field(default_factory=dict)
    others_waiting_s: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict)
    _at: float = -math.inf
    _asked_s: float = 0.0  # by all tenants, after the last division
    _lately_rho: float = 0.0  # what they ask for, averaged over `_FLOOD_S`

    @property
    def has_level(self) -> bool:
        """Whether the device is contended: tenants ask for about all that it can do or more, and it refused some work
        lately.
        """
        return self.level < math.inf

    def account(self, now: float, tenant: Tenant) -> Account:
        """The tenant's account, as of now."""
        self.divide(now)
        account = self.accounts.get(tenant.name)
        if account is None:
            account = self.accounts[tenant.name] = Account(tenant.weight)
        account.weight, account.asked_at = tenant.weight, now
        return account

    def wait(self, waiting: Iterable[tuple[Account, float]]) -> None:
        """Replace all waiting device seconds by these."""
        for account in self.accounts.values():
            account.waiting_s = 0.0
        self.others_waiting_s = 0.0
        for account, cost_s in waiting:
            self.waits(account, cost_s)

    def waits(self, account: Account, cost_s: float) -> None:
        """Add waiting device seconds."""
        account.waiting_s += cost_s
        if account.is_over_share:
            self.others_waiting_s += cost_s

    def expected_s(self, account: Account, within_s: float) -> float:
        """Device seconds that tenants served before this one are expected to ask for within `within_s`."""
        return account.ahead_rho * within_s if account.is_over_share else 0.0

    def kept_s(self, account: Account, within_s: float) -> float:
        """Device seconds that this tenant leaves to others in the next run, which starts within `within_s`."""
        expected_s = self.expected_s(account, within_s)
        return expected_s + _DEVIATIONS * math.sqrt(expected_s * self.under_share_cost_s)

    @property
    def named(self) -> list[str]:
        """Names of at most `_MOST_NAMED` tenants over their share."""
        return list(itertools.islice(self.over_share, _MOST_NAMED))

    def divide(self, now: float) -> None:
        """Divide the device among its tenants anew, if the last division is `_DIVIDE_S` old."""
        if now - self._at <= _DIVIDE_S:
            return
        if (passed_s := now - self._at) < math.inf:
            asked_s = sum(account.offered_s for account in self.accounts.values()) - self._asked_s
            self._lately_rho += (asked_s / passed_s - self._lately_rho) * -math.expm1(-passed_s / _FLOOD_S)
        fade = math.exp((self._at - now) / _MEMORY_S)
        self._at = now
        for name, account in list(self.accounts.items()):
            account.offered_s *= fade
            account.used_s *= fade
            account.squares_s2 *= fade
            if now - account.asked_at > _MEMORY_S and not account.waiting_s:
                del self.accounts[name]
        self._asked_s = sum(account.offered_s for account in self.accounts.values())
        self._fill()
        over = [(name, account) for name, account in self.accounts.items() if account.is_over_share]
        self.over_share = dict(sorted(over, key=lambda one: one[1].used_s / one[1].weight))
        self.has_under_share = self.has_level and len(over) < len(self.accounts)
        self.others_waiting_s = sum(account.waiting_s for account in self.over_share.values())
        ahead_rho = self.under_share_rho
        for account in self.over_share.values():
            account.ahead_rho = ahead_rho
            ahead_rho += account.rho

    def _fill(self) -> None:
        """Find the level by progressive filling: raise all tenants equally until the work done is used up. A tenant
        drops out once it has all that it asks for.
        """
        accounts = sorted(self.accounts.values(), key=lambda account: account.offered_s / account.weight)
        left_s = sum(account.used_s for account in accounts)
        weights = sum(account.weight for account in accounts)
        offered_s = sum(account.offered_s for account in accounts)
        asked_rho = max(offered_s / _MEMORY_S / _NEAR_CAPACITY, self._lately_rho / _FLOOD)
        is_near = asked_rho > self.capacity_rho
        contended = is_near and offered_s - left_s > _CONTENDED * offered_s
        self.level, squares_s2, under_share_s = math.inf, 0.0, 0.0
        for account in accounts:
            account.is_over_share = contended and account.offered_s * weights >= left_s * account.weight
            if not account.is_over_share:
                left_s -= account.offered_s
                weights -= account.weight
                under_share_s += account.offered_s
                squares_s2 += account.squares_s2
            elif not self.has_level:
                self.level = left_s / weights
        self.under_share_rho = under_share_s / _MEMORY_S
        self.under_share_cost_s = squares_s2 / under_share_s if under_share_s else 0.0
