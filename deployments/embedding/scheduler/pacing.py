"""How long an idle device waits for a burst to arrive, because a burst that is cut in two pays beta twice. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_PAUSE_SHARE = 0.03  # of beta, for each waiting query, up to _PAUSE_QUERIES of them
_PAUSE_QUERIES = 3  # a lone query hardly waits; several at once are a burst, and a longer wait saves a beta
_LONGEST_SHARE = 0.5  # of beta: the longest time that a stream of arrivals holds back an idle device
_SHORTEST_PAUSE_S = 0.001  # about three arrivals of one burst over HTTP
_LARGEST_PAUSE_SHARE = 0.1  # of beta: limits the pause where beta is so small that _SHORTEST_PAUSE_S would matter


@dataclass(slots=True)
class Pacing:
    """An idle device waits `pause_s` per waiting query (at most three) after the last arrival, and at most `longest_s`
    after the first.
    """

    pause_s: float
    longest_s: float

    @classmethod
    def of_beta(cls, beta_s: float) -> Pacing:
        """The pacing of a device whose runs each take `beta_s` besides the cost of their queries."""
        pause_s = min(max(_PAUSE_SHARE * beta_s, _SHORTEST_PAUSE_S), _LARGEST_PAUSE_SHARE * beta_s)
        return cls(pause_s, _LONGEST_SHARE * beta_s)

    def start_at(self, waiting: int, *, first: float, last: float) -> float:
        """When the device should start. `first` and `last`: when the first and last waiting query arrived, on any
        clock.
        """
        return min(last + self.pause_s * min(waiting, _PAUSE_QUERIES), first + self.longest_s)
