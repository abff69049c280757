"""Sums up a load: shares, goodput, times, and the proof of MLPerf's percentile."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.overload.client import Comeback, Outcome
from benchmarks.overload.early_stopping import proves, queries_needed


def figures(outcomes: Sequence[Outcome], comebacks: Sequence[Comeback], slo_s: float, span_s: float) -> dict[str, Any]:
    """Each query is in time, late, refused or failed. *Late*: neither refused nor answered within the SLO, so answered
    later, or the client gave up. *Failed*: another status, or a broken connection.

    `late_share`: of the queries that were not refused. `goodput_s`: answers within the SLO per second of `span_s`.
    """
    in_time = sum(one.ok and one.seconds <= slo_s for one in outcomes)
    gave_up = sum(one.gave_up for one in outcomes)
    answered, refused = sum(one.ok for one in outcomes), sum(one.refused for one in outcomes)
    sent, late = len(outcomes), answered - in_time + gave_up
    return {
        "sent": sent,
        "in_time": in_time,
        "late": late,
        "refused": refused,
        "failed": sent - answered - refused - gave_up,
        "gave_up": gave_up,
        "goodput_s": in_time / span_s,
        "late_share": late / max(1, in_time + late),
        "refused_share": refused / max(1, sent),
        **_quantiles("answer", [one.seconds for one in outcomes if one.ok]),
        **_quantiles("refusal", [one.seconds for one in outcomes if one.refused]),
        **_quantiles("lag", [one.lag_s for one in outcomes]),
        **_cost_of_answers(sent, answered, comebacks),
        **_truth(outcomes, comebacks),
        **_mlperf(sent, in_time, late),
    }


def _quantiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """The quantiles by name; None if there are no values."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99)).tolist() if seconds else (None, None)
    return {f"{name}_p50_s": p50, f"{name}_p99_s": p99}


def _cost_of_answers(sent: int, answered: int, comebacks: Sequence[Comeback]) -> dict[str, float | None]:
    """Requests per answer, including those of clients that retried."""
    asked = sent + sum(one.tries for one in comebacks)
    got = answered + sum(one.admitted_s is not None for one in comebacks)
    return {"requests_per_answer": asked / got if got else None}


def _truth(outcomes: Sequence[Outcome], comebacks: Sequence[Comeback]) -> dict[str, Any]:
    """The accuracy of Retry-After. `hint_kept`: the share of clients admitted when they retried at the hint.
    `hint_early`: the same for those that retried at half the hint; if it is as high, hints are too long. `hint_ratio`:
    median of the time until admission over the first hint.
    """
    refused = [one for one in outcomes if one.refused]
    at_hint, early = ([one for one in comebacks if one.early == early] for early in (False, True))
    ratios = [one.admitted_s / one.hint_s for one in at_hint if one.admitted_s is not None and one.hint_s > 0]
    return {
        "hinted_share": _share(sum(one.hint_s is not None for one in refused), len(refused)),
        "followed": len(comebacks),
        "hint_kept": _share(sum(one.admitted_s is not None and one.tries == 1 for one in at_hint), len(at_hint)),
        "hint_early": _share(sum(one.admitted_s is not None for one in early), len(early)),
        "hint_ratio": float(np.median(ratios)) if ratios else None,
        "hint_tries": float(np.mean([one.tries for one in at_hint])) if at_hint else None,
    }


def _share(some: int, every: int) -> float | None:
    return some / every if every else None


def _mlperf(sent: int, in_time: int, late: int) -> dict[str, Any]:
    """MLPerf has no refusals: for `mlperf_valid`, every query that was not answered in time counts as over latency.
    `p99_kept`: the same proof over the queries that were neither refused nor failed. `more_queries`: how many more
    would prove it if all were in time; None if too many were late.
    """
    taken, missed = in_time + late, sent - in_time
    lacking = queries_needed(late) - taken if late <= 0.01 * taken else None
    return {
        "mlperf_valid": proves(sent, missed),
        "p99_kept": proves(taken, late),
        "more_queries": max(0, lacking) if lacking is not None else None,
    }
