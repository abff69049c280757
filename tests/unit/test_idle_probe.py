"""When an idle device admits a request to see whether it is still slow."""

from deployments.admission.probe import IdleProbe


def test_the_time_between_probes_doubles_until_there_was_other_work():
    probe, waits = IdleProbe(), []
    for _ in range(5):
        waits.append(probe.after_s(2.0))
        assert probe.has_backed_off == (len(waits) > 1)
        probe.back_off()
    assert waits == [2.0, 4.0, 8.0, 16.0, 16.0]
    probe.reset()
    assert (probe.after_s(2.0), probe.has_backed_off) == (2.0, False)


def test_a_request_that_would_be_late_on_any_device_waits_longest():
    assert IdleProbe().after_s(2.0, hopeful=False) == 16.0
