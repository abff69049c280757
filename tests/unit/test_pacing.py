"""How long an idle device waits for a burst."""

import pytest

from deployments.embedding.scheduler.limits import Pacing

BETA_S = 0.27


@pytest.mark.parametrize(
    ("beta_s", "pause_s"),
    [
        (0.27, 0.03 * 0.27),
        (0.03, 0.001),
        (0.005, 0.0005),
        (0.0, 0.0),
    ],  # not below 1 ms, but never above a tenth of beta
)
def test_the_pause_is_a_share_of_beta(beta_s, pause_s):
    assert Pacing.of_beta(beta_s).pause_s == pytest.approx(pause_s)


@pytest.mark.parametrize(
    ("waiting", "last", "start"),
    [
        (1, 10.0, 10 + 0.03 * BETA_S),
        (2, 10.01, 10.01 + 2 * 0.03 * BETA_S),
        (3, 10.01, 10.01 + 3 * 0.03 * BETA_S),
        (90, 10.01, 10.01 + 3 * 0.03 * BETA_S),
        (90, 10.13, 10 + 0.5 * BETA_S),  # those who come without a pause do not hold it back for ever
    ],
)
def test_more_at_once_are_a_burst_that_is_waited_for(waiting, last, start):
    assert Pacing.of_beta(BETA_S).start_at(waiting, first=10.0, last=last) == pytest.approx(start)
