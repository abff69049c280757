"""How long an idle device waits for a burst to arrive: a burst cut in two pays beta twice. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_PAUSE_SHARE = 0.03  # of beta, for each query that waits, up to _PAUSE_QUERIES of them
_PAUSE_QUERIES = 3  # a lone query is hardly held back; several at once are a burst, and more patience saves a beta
_LONGEST_SHARE = 0.5  # of beta: the most that arrivals without a pause hold back an idle device
_SHORTEST_PAUSE_S = 0.001  # about three arrivals of one burst through the HTTP path
_LARGEST_PAUSE_SHARE = 0.1  # of beta, where beta is so small that the shortest pause would matter


@dataclass(slots=True)
class Pacing:
    """`pause_s` for each waiting query (up to three) after the last arrival, `longest_s` after the first."""

    pause_s: float
    longest_s: float

    @classmethod
    def of_beta(cls, beta_s: float) -> Pacing:
        """For a device whose runs each take `beta_s` beside the cost of their queries."""
        pause_s = min(max(_PAUSE_SHARE * beta_s, _SHORTEST_PAUSE_S), _LARGEST_PAUSE_SHARE * beta_s)
        return cls(pause_s, _LONGEST_SHARE * beta_s)

    def start_at(self, waiting: int, *, first: float, last: float) -> float:
        """When the device should start, by the clock of `first` and `last`, the arrivals of what waits."""
        return min(last + self.pause_s * min(waiting, _PAUSE_QUERIES), first + self.longest_s)
