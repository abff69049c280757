"""Divides a device that is asked for too much among tenants: max-min fair by weight, over recent device seconds. Pure.

A tenant is who shows one API key. Of each tenant an account remembers, for about `_MEMORY_S`, the device seconds that
it asked for and those that it got. While nothing is refused nobody is held back. Otherwise the level is the number of
device seconds per weight that max-min fairness gives (progressive filling: Bertsekas, Gallager, Data Networks, 6.5.2):

    under share   The tenant asks for less than the level. It gets all that it asks for.
    short         It asks for more (it is over its share), and has got less than the level.
    over          It asks for more, and has got more than the level.

Tenants over their share leave room in the next run for the work that tenants under it are expected to request before it
starts. Of them, those who have got more than the level also leave room for those who are short of it. Nothing else is
kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

_MEMORY_S = 10.0
_DIVIDE_S = 0.05  # between two divisions: oftener would only cost
_CONTENDED = 0.01  # of the work asked for: more than this share of it was refused
_FORGOTTEN_S = 1e-4  # device seconds: an account that holds less is dropped
_SPARE = 2.0  # queries of the mean cost that are kept room for beside the expected ones: arrivals are not even
_GAIN = 3.0  # room is kept for so many times what a tenant is short of: it is to have it soon
_MOST_NAMED = 32  # tenants that a replica names to Routers


class Tenant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whose query it is: the name of the API key, and its weight beside others."""

    name: str
    weight: float = 1.0


class Kind(IntEnum):
    """How a tenant stands to the level."""

    UNDER_SHARE = 0
    SHORT = 1
    OVER = 2


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's. `offered_s`, `used_s`: device seconds asked for and got, fading. `waiting_s`: those that wait."""

    weight: float
    offered_s: float = 0.0
    used_s: float = 0.0
    waiting_s: float = 0.0
    kind: Kind = Kind.UNDER_SHARE

    def count(self, offered_s: float, used_s: float) -> None:
        self.offered_s += offered_s
        self.used_s += used_s


@dataclass(slots=True, eq=False)
class Shares:
    """The accounts of one device. `level`: device seconds per weight, inf while nothing is refused.

    `has_under_share`: the level is finite, and somebody asks for less. `under_share_rho`: device seconds that those ask
    for in a second.
    """

    level: float = math.inf
    has_under_share: bool = False
    under_share_rho: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict)
    _waiting_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # of each kind
    _short_rho: float = 0.0
    _short_s: float = 0.0  # device seconds that those under the level are short of
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
        account.weight = tenant.weight
        return account

    def wait(self, waiting: Iterable[tuple[Account, float]]) -> None:
        """These device seconds wait, and no others."""
        for account in self.accounts.values():
            account.waiting_s = 0.0
        self._waiting_s = [0.0, 0.0, 0.0]
        for account, cost_s in waiting:
            self.waits(account, cost_s)

    def waits(self, account: Account, cost_s: float) -> None:
        """So many device seconds more wait."""
        account.waiting_s += cost_s
        self._waiting_s[account.kind] += cost_s

    @property
    def others_waiting_s(self) -> float:
        """Device seconds that wait of those over their share."""
        return self._waiting_s[Kind.SHORT] + self._waiting_s[Kind.OVER]

    def kept_s(self, account: Account, mean_s: float, within_s: float) -> float:
        """Device seconds of room in the next run, which starts within `within_s`, that this tenant leaves to others;
        `mean_s`: the mean cost of a query.
        """
        if account.kind == Kind.UNDER_SHARE:
            return 0.0
        kept_s = 0.0
        if self.has_under_share:
            kept_s = self.under_share_rho * within_s + _SPARE * mean_s
        if account.kind == Kind.OVER:
            kept_s += min(self._short_rho * within_s, _GAIN * self._short_s)
        return kept_s

    @property
    def over_share(self) -> list[str]:
        """Names of tenants over their share, `_MOST_NAMED` at most."""
        if not self.has_level:
            return []
        return [name for name, account in self.accounts.items() if account.kind != Kind.UNDER_SHARE][:_MOST_NAMED]

    def _divide(self, now: float) -> None:
        fade = math.exp((self._at - now) / _MEMORY_S)
        self._at = now
        for name, account in list(self.accounts.items()):
            account.offered_s *= fade
            account.used_s *= fade
            if account.offered_s < _FORGOTTEN_S and not account.waiting_s:
                del self.accounts[name]
        self._fill()
        under_share, short = self._of(Kind.UNDER_SHARE), self._of(Kind.SHORT)
        self.has_under_share = self.has_level and bool(under_share)
        self.under_share_rho = sum(account.offered_s for account in under_share) / _MEMORY_S
        self._short_rho = sum(account.offered_s for account in short) / _MEMORY_S
        self._short_s = sum(self.level * account.weight - account.used_s for account in short)
        self._waiting_s = [sum(account.waiting_s for account in self._of(kind)) for kind in Kind]

    def _of(self, kind: Kind) -> list[Account]:
        return [account for account in self.accounts.values() if account.kind == kind]

    def _fill(self) -> None:
        """Find the level: raise all alike until what was got is given away; who asks for less drops out."""
        accounts = sorted(self.accounts.values(), key=lambda account: account.offered_s / account.weight)
        left_s = sum(account.used_s for account in accounts)
        weights = sum(account.weight for account in accounts)
        offered_s = sum(account.offered_s for account in accounts)
        contended = offered_s - left_s > _CONTENDED * offered_s
        self.level = math.inf
        for account in accounts:
            if not contended or account.offered_s * weights < left_s * account.weight:
                account.kind = Kind.UNDER_SHARE
                left_s -= account.offered_s
                weights -= account.weight
                continue
            if not self.has_level:
                self.level = left_s / weights
            account.kind = Kind.OVER if account.used_s > self.level * account.weight else Kind.SHORT
