"""Measures a replica's cost model at its start. Pure: it is given what times a run, and the clock.

Other work on the machine, such as the end of the replica that this one replaces, makes runs slower, never faster, and
short runs most of all: then beta looks large, and alpha small. So each size is timed, in turn with the others, until
its fastest runs agree. The fastest counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from deployments.embedding.scheduler.cost_model import CostModel

_SIZES = ((1, 75), (16, 75), (4, 250), (32, 10), (64, 75), (2, 500))  # queries, tokens of each
_FEWEST_SIZES = 2
_FIRST_S, _LONGEST_S = 1.0, 10.0  # no further size after so long; no further run
_RUNS, _RUNS_S = 3, 1.0  # the runs of a size that must agree; fewer if they take longer than this
_AGREE = 1.2  # the slowest of them, over the fastest


def measure(
    seconds: Callable[[list[int]], float], clock: Callable[[], float], longest: int, *, exact: bool = False
) -> CostModel:
    """The cost model to use until a calibration. `seconds(lengths)`: runs queries of these lengths, at most `longest`
    tokens each. `exact`: one run of a size is enough, as of emulated devices.
    """
    began, times = clock(), dict[tuple[int, ...], list[float]]()
    for queries, tokens in _SIZES:
        if clock() > began + _FIRST_S and len(times) >= _FEWEST_SIZES:
            break
        lengths = [min(tokens, longest)] * queries
        times.setdefault(tuple(lengths), []).append(seconds(lengths))
    while not exact and (unsure := [size for size, took in times.items() if not _agree(took)]):
        for size in unsure:
            if clock() > began + _LONGEST_S and len(times[size]) > 1:
                return _fit(times)
            times[size].append(seconds(list(size)))
    return _fit(times)


def _agree(took: list[float]) -> bool:
    fastest = heapq.nsmallest(_RUNS, took)
    is_enough = len(fastest) == _RUNS or (len(fastest) > 1 and sum(fastest) > _RUNS_S)
    return is_enough and fastest[-1] <= _AGREE * fastest[0]


def _fit(times: dict[tuple[int, ...], list[float]]) -> CostModel:
    return CostModel.fit([(size, min(took)) for size, took in times.items()])
