"""Which fault comes next. Pure."""

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def agenda(faults: Sequence[T], seed: int) -> Iterator[T]:
    """Without end: all faults in their order, then all again and again, each round in a random order of its own. So no
    fault comes a time more before all others have come as often.
    """
    chance = random.Random(seed)
    yield from faults
    while True:
        yield from chance.sample(faults, len(faults))


def capacity(devices: Sequence[tuple[float, float]], slo_s: float) -> float:
    """Queries of 75 tokens a second that these devices (alpha_s, beta_s) answer at most, each run as long as the SLO
    lets it be.
    """
    return sum((slo_s - beta_s) / (alpha_s * slo_s) for alpha_s, beta_s in devices)
