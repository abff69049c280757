"""The latency models of both pools -> whether the CPU pool pays."""

import pytest

from deployments.embedding.pool import Speed, added_share, is_left_out

V100, XEON = Speed(0.0180, 0.27, 1), Speed(0.0858, 0.32, 1)
ATLAS, KUNPENG = Speed(0.00904, 0.24, 1), Speed(0.0752, 0.85, 1)
H200, HOST = Speed(0.00011, 0.007, 1), Speed(0.0147, 0.05, 1)


@pytest.mark.parametrize(
    ("accelerator", "cpu", "share", "left_out"),
    [
        (V100, XEON, 0.195, False),
        (ATLAS, KUNPENG, 0.0237, True),
        (H200, HOST, 0.0072, True),
        (H200._replace(replicas=0), HOST, None, False),  # no accelerator answers: reliability comes first
        (H200, HOST._replace(replicas=0), None, False),
        (H200._replace(alpha_s=0.0), HOST, None, False),  # no replica has reported
        (H200, HOST._replace(alpha_s=0.0), None, False),
        (H200._replace(beta_s=1.5), HOST, None, False),  # it answers nothing in time
        (H200, HOST._replace(beta_s=1.5), 0.0, True),  # the CPU answers nothing in time
        (H200, HOST._replace(replicas=8), 0.057, False),
        (H200._replace(replicas=8), HOST._replace(replicas=8), 0.0072, True),
    ],
)
def test_a_pool_that_adds_little_is_left_out(accelerator, cpu, share, left_out):
    found = added_share(accelerator, cpu, 1.0)
    assert found == (None if share is None else pytest.approx(share, rel=0.02))
    assert is_left_out(found, before=False) is left_out


@pytest.mark.parametrize(
    ("share", "before", "after"),
    [(0.041, False, False), (0.039, False, True), (0.05, True, True), (0.062, True, True), (0.063, True, False)],
)
def test_a_choice_stands_until_the_share_changes_by_much(share, before, after):
    assert is_left_out(share, before=before) is after
