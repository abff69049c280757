"""The alerts over series that the metrics of generation make: what fires when first tokens or paces are late or answers
break off, and that nothing fires while the promise is kept.
"""

import pytest
from test_alerts_of_runs import EVERY_S, Instruments, fired

from deployments.errors import Busy, ReplicaLost
from deployments.generation.generation_metrics import GenerationMetrics, GenerationPool, Promise
from deployments.metrics import OfModel

MINUTES = 70
EACH = 30  # generations between two readings
PROMISE = Promise(1.0, 0.1)
POOLS = {"cpu": GenerationPool(is_open=True, live_replicas=1, calibrated=False)}


def series_of(generation):
    """{series: its value at each reading}. `generation(metrics, number)` lets one come and go."""
    now, found = {}, {}
    metrics = GenerationMetrics(OfModel(Instruments(now, "r0"), "m"))
    for reading in range(MINUTES * 60 // EVERY_S):
        for number in range(EACH):
            generation(metrics, number)
        metrics.publish(PROMISE, POOLS)
        for key in {**found, **now}:
            found.setdefault(key, ["_"] * reading).append(f"{now[key]:g}")
    return found


def generation(metrics, *, first_s=0.5, pace_s=0.05, tokens=20, error=None):
    streamed = metrics.begin(0.0, prompt_tokens=100, answers=1, promise=PROMISE)
    streamed.admitted("cpu")
    for token in range(tokens):
        streamed.arrived(first_s + token * pace_s, 0, 1)
    if error is None:
        streamed.ended(0, "length")
    streamed.over(first_s + tokens * pace_s, error)


def all_is_well(metrics, number):
    generation(metrics)


def one_in_thirty_is_late(metrics, number):
    generation(metrics, first_s=1.2 if number == 0 else 0.5, pace_s=0.2 if number == 1 else 0.05)


def first_tokens_are_late(metrics, number):
    generation(metrics, first_s=1.2 if number % 10 == 0 else 0.5)


def paces_are_late(metrics, number):
    generation(metrics, pace_s=0.12 if number % 10 == 0 else 0.05)


def answers_break_off(metrics, number):
    generation(metrics, error=ReplicaLost("it died") if number % 10 == 0 else None)


def some_are_refused(metrics, number):
    generation(metrics)
    if number % 10 == 0:
        metrics.begin(0.0, prompt_tokens=9, answers=1, promise=PROMISE).over(5.0, Busy("full", retry_after_s=1))


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (all_is_well, set()),
        (one_in_thirty_is_late, set()),
        (first_tokens_are_late, {"WindveFirstTokensLate"}),
        (paces_are_late, {"WindvePacesLate"}),
        (answers_break_off, {"WindvePacesLate"}),
        (some_are_refused, {"WindveBusy"}),
    ],
)
def test_what_fires(tmp_path, harm, expected):
    assert fired(series_of(harm), MINUTES, tmp_path) == expected
