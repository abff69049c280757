"""Keeps short queries from starving long ones. Pure.

Under overload a short query fits into the little room that becomes free, and a long one does not. Without a rule nearly
every long query would be refused. So admission reserves room for one long query while long ones have lately been
refused more than `_AIM` times as often as short ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_AIM = 2.5  # from here on room is kept, so that long queries are refused at most three times as often
_LONG, _SHORT = 2.0, 1.0  # of the mean cost: more is long, less is short
_MEMORY_S = 10.0  # how long a refusal is remembered
_FADE_EVERY = 0.01  # of the memory: oftener would only cost
_FEW = 3.0  # offers of a kind that must be remembered before it has a say


@dataclass(slots=True)
class _Kind:
    offered: float = 0.0
    refused: float = 0.0

    @property
    def share(self) -> float:
        return self.refused / self.offered if self.offered >= _FEW else 0.0

    def fade(self, share: float) -> None:
        self.offered *= share
        self.refused *= share


@dataclass(slots=True)
class LongQueries:
    """Remembers what was offered and refused, by cost. `mean_s`: the mean cost of an offered query."""

    mean_s: float
    long_s: float = 0.0  # mean cost of the long ones
    _long: _Kind = field(default_factory=_Kind)
    _short: _Kind = field(default_factory=_Kind)
    _at: float = 0.0

    @property
    def reserve_s(self) -> float:
        """Planned device seconds that admission keeps for a long query; 0 while long ones are not refused too often. A
        shorter query is admitted only if at least so much room is free.
        """
        if self._long.refused < 1:
            return 0.0
        return self.long_s if self._long.share > _AIM * self._short.share else 0.0

    def offered(self, now: float, cost_s: float, *, refused: bool) -> None:
        """One query was admitted or refused for want of room."""
        self.mean_s += 0.02 * (cost_s - self.mean_s)
        if now - self._at > _FADE_EVERY * _MEMORY_S:
            fade = math.exp((self._at - now) / _MEMORY_S)
            self._at = now
            self._long.fade(fade)
            self._short.fade(fade)
        kind = self._long if cost_s > _LONG * self.mean_s else self._short if cost_s < _SHORT * self.mean_s else None
        if kind is None:
            return
        kind.offered += 1
        kind.refused += refused
        if kind is self._long:
            self.long_s = self.long_s + 0.1 * (cost_s - self.long_s) if self.long_s else cost_s
