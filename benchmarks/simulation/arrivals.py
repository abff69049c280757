"""Arrivals of queries: their time, length and deadline. Pure, and the same for the same seed."""

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.models.outputs import TEXT, Outputs

QUERY_TOKENS = 75
_LONGEST, _SHORTEST = 512, 4
_MEDIAN, _SPREAD = 60, 0.9  # log-normal: 75 and more on average, a few of several hundred


class Arrival(NamedTuple):
    at: float  # seconds
    tokens: int
    allowed_s: float | None = None  # its own deadline; None: the SLO
    bulk: bool = False
    tenant: Tenant | None = None
    outputs: Outputs = TEXT


def poisson(
    queries_s: float,
    seconds: float,
    *,
    mixed: bool = False,
    allowed_s: float | None = None,
    tenant: Tenant | None = None,
    seed: int = 3,
) -> Iterator[Arrival]:
    """A Poisson stream of `queries_s` queries per second, of 75 tokens each or of `mixed` lengths."""
    draw, at = random.Random(seed), 0.0
    while (at := at + draw.expovariate(queries_s)) < seconds:
        yield Arrival(at, _length(draw) if mixed else QUERY_TOKENS, allowed_s, tenant=tenant)


def _length(draw: random.Random) -> int:
    return round(min(_LONGEST, max(_SHORTEST, draw.lognormvariate(math.log(_MEDIAN), _SPREAD))))
