"""Divides a device that is asked for too much among tenants: weighted fair queueing over admitted work. Pure.

A tenant is who shows one API key. Of each tenant an account remembers, for about `_MEMORY_S`, the device seconds that
it asked for and those that it got. While nothing is refused nobody is held back. Otherwise the level is the number of
device seconds per weight that max-min fairness gives (progressive filling: Bertsekas, Gallager, Data Networks, 6.5.2).
A tenant that asks for less than the level is under its share. It gets all that it asks for. All others are over it, and
who has got the least per weight is served first (the order of weighted fair queueing: Demers, Keshav, Shenker, SIGCOMM
1989; by what was served: Sheng et al., OSDI 2024):

    A tenant over its share leaves room in the next run for the work that tenants under their share, and those over it
    that have got less per weight, are expected to request before that run starts. Nothing else is kept.

What follows for urgent queries on one device, over twice `_MEMORY_S` and more (`tests/unit/test_fair_share_worlds.py`):

- Beside tenants under their share, a run has a part for all others, and at least one query of theirs. Else nobody is
  refused for room that nobody else asks for. Who has not asked for `_MEMORY_S` is forgotten.
- A tenant under its share gets 0.99 of what it asks for at least, whatever others ask for (unless the setting
  `max_batch_fraction` lets their runs be long).
- Tenants that each ask for twice their share and more get it by their weights, within a tenth. One that asks for 1.2
  times its share gets 0.83 of it at least: it is not always there when there is room.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

_MEMORY_S = 10.0
_DIVIDE_S = 0.05  # between two divisions: oftener would only cost
_CONTENDED = 0.01  # of the work asked for: more than this share of it was refused
_SPARE = 2.0  # queries of the mean cost that are kept room for beside the expected ones: arrivals are not even
_MOST_NAMED = 32  # tenants that a replica names to Routers


class Tenant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whose query it is: the name of the API key, and its weight beside others."""

    name: str
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's. `offered_s`, `used_s`: device seconds asked for and got, fading. `waiting_s`: those that wait.

    `is_over_share`: it asks for more than the level. `ahead_rho`: device seconds a second that those who are served
    before it ask for.
    """

    weight: float
    asked_at: float = 0.0
    offered_s: float = 0.0
    used_s: float = 0.0
    waiting_s: float = 0.0
    is_over_share: bool = False
    ahead_rho: float = 0.0

    def count(self, offered_s: float, used_s: float) -> None:
        self.offered_s += offered_s
        self.used_s += used_s

    @property
    def rho(self) -> float:
        """Device seconds a second that it asks for."""
        return self.offered_s / _MEMORY_S


@dataclass(slots=True, eq=False)
class Shares:
    """The accounts of one device. `level`: device seconds per weight, inf while nothing is refused.

    `has_under_share`: the level is finite, and somebody asks for less. `under_share_rho`: device seconds that those ask
    for in a second. `over_share`: tenants over their share, by name, in the order in which they are served.
    `others_waiting_s`: device seconds of theirs that wait.
    """

    level: float = math.inf
    has_under_share: bool = False
    under_share_rho: float = 0.0
    over_share: dict[str, Account] = field(default_factory=dict)
    others_waiting_s: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict)
    _at: float = -math.inf

    @property
    def has_level(self) -> bool:
        """Somebody was refused lately."""
        return self.level < math.inf

    def account(self, now: float, tenant: Tenant) -> Account:
        """The tenant's account, as of now."""
        if now - self._at > _DIVIDE_S:
            self._divide(now)
        account = self.accounts.get(tenant.name)
        if account is None:
            account = self.accounts[tenant.name] = Account(tenant.weight)
        account.weight, account.asked_at = tenant.weight, now
        return account

    def wait(self, waiting: Iterable[tuple[Account, float]]) -> None:
        """These device seconds wait, and no others."""
        for account in self.accounts.values():
            account.waiting_s = 0.0
        self.others_waiting_s = 0.0
        for account, cost_s in waiting:
            self.waits(account, cost_s)

    def waits(self, account: Account, cost_s: float) -> None:
        """So many device seconds more wait."""
        account.waiting_s += cost_s
        if account.is_over_share:
            self.others_waiting_s += cost_s

    def kept_s(self, account: Account, mean_s: float, within_s: float) -> float:
        """Device seconds of room in the next run, which starts within `within_s`, that this tenant leaves to others;
        `mean_s`: the mean cost of a query.
        """
        if not account.is_over_share:
            return 0.0
        return account.ahead_rho * within_s + (_SPARE * mean_s if self.has_under_share else 0.0)

    @property
    def named(self) -> list[str]:
        """Names of tenants over their share, `_MOST_NAMED` at most."""
        return list(itertools.islice(self.over_share, _MOST_NAMED))

    def _divide(self, now: float) -> None:
        fade = math.exp((self._at - now) / _MEMORY_S)
        self._at = now
        for name, account in list(self.accounts.items()):
            account.offered_s *= fade
            account.used_s *= fade
            if now - account.asked_at > _MEMORY_S and not account.waiting_s:
                del self.accounts[name]
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
        """Find the level: raise all alike until what was got is given away; who asks for less drops out."""
        accounts = sorted(self.accounts.values(), key=lambda account: account.offered_s / account.weight)
        left_s = sum(account.used_s for account in accounts)
        weights = sum(account.weight for account in accounts)
        offered_s = sum(account.offered_s for account in accounts)
        contended = offered_s - left_s > _CONTENDED * offered_s
        self.level, self.under_share_rho = math.inf, 0.0
        for account in accounts:
            account.is_over_share = contended and account.offered_s * weights >= left_s * account.weight
            if not account.is_over_share:
                left_s -= account.offered_s
                weights -= account.weight
                self.under_share_rho += account.rho
            elif not self.has_level:
                self.level = left_s / weights
