"""Arrivals, drawn before anything is sent, so that a slow server or client cannot shift them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

EQUAL, MIXED = LENGTHS = ("equal", "mixed")
POISSON, BURSTS = ARRIVALS = ("Poisson", "bursts")
EQUAL_TOKENS = 75
_SHORTEST, _LOG_MEDIAN, _LOG_SPREAD = 8, 4.1, 0.9  # mixed: log-normal, median 60 tokens, a tail of passages
_PERIOD_SLOS = 2.0  # SLOs from one burst to the next
SEED = 18209322760996052031  # schedule_rng_seed of MLPerf's loadgen/mlperf.conf


class Query(NamedTuple):
    at_s: float  # from the start of the load
    tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The kind of a load. The same shape and rate give the same queries."""

    arrivals: str  # of ARRIVALS
    lengths: str  # of LENGTHS
    slo_s: float
    longest: int = 256  # tokens; longer texts are cut, as some servers refuse them
    seed: int = SEED

    @property
    def period_s(self) -> float:
        """Seconds from one burst to the next."""
        return _PERIOD_SLOS * self.slo_s

    def schedule(self, queries_s: float, seconds: float, queries: int = 0) -> list[Query]:
        """Queries at `queries_s` on average, for at least `seconds` and at least `queries` of them (MLPerf's minimum
        duration and count).

        *Poisson*: gaps are exponential. *bursts*: all queries of a period arrive at once, at its start.
        """
        draw = random.Random(f"{self.seed} {self.lengths}")  # noqa: S311 - to be repeated, not a secret
        moments = self._poisson(queries_s) if self.arrivals == POISSON else self._bursts(queries_s)
        found: list[Query] = []
        for at_s in moments:
            if at_s >= seconds and len(found) >= queries and found and at_s > found[-1].at_s:  # no burst is cut
                return found
            found.append(Query(at_s, self.tokens(draw)))
        raise AssertionError("moments never end")

    def tokens(self, draw: random.Random) -> int:
        """The tokens of one text."""
        if self.lengths == EQUAL:
            return min(EQUAL_TOKENS, self.longest)
        return min(self.longest, max(_SHORTEST, round(draw.lognormvariate(_LOG_MEDIAN, _LOG_SPREAD))))

    def _poisson(self, queries_s: float) -> Iterator[float]:
        draw, at_s = random.Random(f"{self.seed} arrivals"), 0.0  # noqa: S311
        while True:
            at_s += draw.expovariate(queries_s)
            yield at_s

    def _bursts(self, queries_s: float) -> Iterator[float]:
        """Bursts of whole queries. The average holds over many periods, even with less than one query per period."""
        ends = (int(queries_s * self.period_s * number + 0.5) for number in count())
        for number, (before, after) in enumerate(pairwise(ends)):
            yield from [number * self.period_s] * (after - before)


def span_s(schedule: Sequence[Query], seconds: float, shape: Shape) -> float:
    """The length of the load in seconds, for rates: `seconds`, or more if the minimum number of queries needs more."""
    last_s = schedule[-1].at_s
    if shape.arrivals == BURSTS:
        return max(seconds, last_s + shape.period_s)
    return max(seconds, last_s)
