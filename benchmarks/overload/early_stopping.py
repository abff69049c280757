"""MLPerf's early stopping for the server scenario: how many queries prove a percentile.

From the appendix "Early Stopping Criterion" of MLPerf's inference rules (mlcommons/inference_policies,
inference_rules.adoc), as computed by loadgen/early_stopping.cc. Of h + t queries, t were late. The claim "a share p of
all queries is in time" is proven with confidence c if a server that just fails it (p - d in time) would do as well by
chance in at most 1 - c of all runs:

    F(t; h + t, 1 - (p - d)) <= 1 - c        F: the binomial distribution's cumulative probability of t late or fewer

The smallest such h gives the n = h + t queries that a run with t late ones must have. MLPerf uses p = 0.99, c = 0.99
and d = 0. Published values with one late query: 64 queries for p = 0.9, and 662 for p = 0.99 (min_query_count in
loadgen/mlperf.conf).
"""

import math
from functools import cache

PERCENTILE, CONFIDENCE = 0.99, 0.99


def odds(on_time: int, late: int, percentile: float = PERCENTILE) -> float:
    """The probability of at most `late` late queries among `on_time + late`, each on time with probability
    `percentile`.
    """
    queries = on_time + late
    log_on_time, log_late = math.log(percentile), math.log1p(-percentile)
    logs = [
        math.lgamma(queries + 1) - math.lgamma(k + 1) - math.lgamma(queries - k + 1)
        + (queries - k) * log_on_time + k * log_late
        for k in range(late + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))


@cache
def queries_needed(late: int, percentile: float = PERCENTILE, confidence: float = CONFIDENCE) -> int:
    """The fewest queries, including the `late` ones, that prove the percentile."""
    low, high = -1, max(1, late)  # `low` never proves it
    while odds(high, late, percentile) > 1 - confidence:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if odds(middle, late, percentile) <= 1 - confidence else (middle, high)
    return high + late


def proves(queries: int, late: int) -> bool:
    """p99 is within the SLO with a confidence of 99 %."""
    if late > (1 - PERCENTILE) * queries:
        return False  # more than 1 % were late, so a sum over thousands of terms is unnecessary
    return queries >= queries_needed(late)
