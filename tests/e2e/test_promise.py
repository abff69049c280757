"""The promise in seconds, by the default rule of admission.

The devices are so slow that the safety margin of a prediction, 5 % of the SLO, is longer than whatever a busy machine
does besides. What fits into the time to a deadline is judged in virtual time by tests/unit.
"""

import pytest

from calibration.load import burst
from tests.kit.service import emulating, outcome, queries

SLO_S = 30.0
DEVICES = {"accelerator": {"alpha_s": 0.3, "beta_s": 5.0}, "cpu": {"alpha_s": 0.6, "beta_s": 5.0}}
# Of two accelerators and the CPU, two runs each, with the margin: (30 / 1.05 - 2 * 5) / alpha; and one run that takes
# all at once.
FEWEST, MOST = 110, 190
ASKED = 250


@pytest.fixture(scope="module")
def slow(shared):
    return shared.serve(emulating(SLO_S, **DEVICES))


def test_what_is_admitted_is_answered_within_the_slo(slow, figure):
    assert slow.router.keys().isdisjoint({"admission"})
    replies = burst(slow.address, queries(ASKED))
    by_router_s = max(int(reply.headers["x-total-time"]) / 1000 for reply in replies if reply.status == 200)
    found = outcome(replies)
    figure(f"burst of {ASKED}: {dict(found)}, the slowest {by_router_s:.1f} s of {SLO_S:.0f} s")
    assert by_router_s <= SLO_S
    assert found.keys() == {"accelerator", "cpu", 429}
    assert FEWEST <= found["accelerator"] + found["cpu"] <= MOST
    for reply in replies:
        if reply.status == 429:
            assert reply.json()["error"]["code"] == "busy"
            assert 0 < int(reply.headers["retry-after-ms"]) <= 2 * SLO_S * 1000
