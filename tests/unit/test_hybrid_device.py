"""The simulated accelerator and host, beside steps that were computed by hand: two layers of a second each."""

import pytest

from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from tests.kit.simulation.hybrid_device import HybridDevice, HybridWork, SubBatch

TIMES = StepTime(
    2.0, 0.0, 0.002, 0.0, 0.0, 1000
)  # a layer takes 1 s, 0.25 of it before attention: 0.1 s for 100 tokens
HOST = HostTime(0.0, 0.02, 0.01, layers=2)  # 1 s for 100 tokens in a layer
NOTHING = SubBatch()


def rows(own: int = 0, host: int = 0) -> SubBatch:
    """One at each that reads so many tokens."""
    batch = NOTHING
    for tokens, on_host in ((own, False), (host, True)):
        batch = batch.with_piece(tokens - 1, 1, on_host=on_host) if tokens else batch
    return batch


def test_the_host_attends_its_rows_and_nothing_else() -> None:
    batch = rows(own=100, host=50).with_piece(10, 20, on_host=True)
    assert batch == SubBatch(StepLoad(2, 150).with_chunk(10, 20), StepLoad(1, 100).with_chunk(10, 20), 1, 50)


@pytest.mark.parametrize(
    ("work", "seconds", "host_s"),
    [
        pytest.param(HybridWork(rows(own=100)), 2.2, 0.0, id="the accelerator alone: 2 x (1 + 0.1)"),
        pytest.param(HybridWork(rows(own=100), copied=100), 3.2, 0.0, id="a copy comes before"),
        pytest.param(HybridWork(rows(host=100)), 4.0, 2.0, id="nothing is hidden: 2 x (1 + 1)"),
        pytest.param(HybridWork(rows(1000, 100)), 4.0, 2.0, id="behind the accelerator's attention: 2 x (1 + 1)"),
        # The accelerator: first until 0.35, second until 0.6, first until 1.7, second until 2.7, first until 3.45.
        # The host: second from 0.6 to 1.6, which nobody waits for, and from 2.7 to 3.7; then 0.75 of the second.
        pytest.param(HybridWork(rows(100), rows(host=100)), 4.45, 2.0, id="two batches take turns"),
        # The host from 0.6 to 2.6; the second until 3.6; the host until 5.6.
        pytest.param(HybridWork(rows(100), rows(host=200)), 6.35, 4.0, id="the accelerator waits for the host"),
        # The host: first's from 0.25 to 1.25, second's until 2.25; first until 2.35 (1.25 + 1 + 0.1), its attention on
        # the host until 3.25; second until 3.35, on the host until 4.35; first until 4.1, second from 4.35 to 5.1.
        pytest.param(HybridWork(rows(100, 100), rows(host=100)), 5.1, 4.0, id="the host has one thing at a time"),
    ],
)
def test_a_step_lasts(work: HybridWork, seconds: float, host_s: float) -> None:
    found = HybridDevice(TIMES, HOST).step(5.0, work)
    assert (found.seconds, found.compute_s.host_s) == (pytest.approx(seconds), pytest.approx(host_s))
    assert found.compute_s.accelerator_s == pytest.approx(
        sum(
            TIMES.linear_s(batch.all) + TIMES.attention_s(batch.own)
            for batch in (work.first, work.second)
            if batch.all.rows
        )
    )
    assert not found.arrived


def test_a_parked_row_passes_one_layer_in_each_step_that_it_joins() -> None:
    device, alone = HybridDevice(TIMES, HOST), HybridWork(rows(own=100))
    found, now = [], 0.0
    for work in (alone._replace(parking=[(7, 100)]), alone, *3 * [alone._replace(joins=True)]):
        found.append(device.step(now, work))
        now += found[-1].seconds
    assert [step.seconds for step in found] == pytest.approx([2.2] * 5)  # nobody waits for it
    # the host: from 0.25 to 1.25; in the third step from 1.35 on, which begins at 4.4: 0.15 are left to the fourth
    assert [step.compute_s.host_s for step in found] == pytest.approx([1.0, 0.0, 0.85, 0.15, 0.0])
    assert [step.arrived for step in found] == [[], [], [], [7], []]


def test_a_row_whose_attention_has_not_ended_is_left_where_it_is() -> None:
    device, alone = HybridDevice(TIMES, HOST), HybridWork(rows(own=100), joins=True)
    found, now = [], 0.0
    for work in (alone._replace(parking=[(7, 400)]), *5 * [alone]):
        found.append(device.step(now, work))
        now += found[-1].seconds
    # the host ends at 4.25; the third step, from 4.4 on, takes the row along at 4.75; then the host until 9.75; the
    # fifth step comes to the second layer at 10.25
    assert [step.arrived for step in found] == [[], [], [], [], [7], []]


def test_rows_on_their_way_join_where_each_of_them_is() -> None:
    device, alone = HybridDevice(TIMES, HOST), HybridWork(rows(own=100), joins=True)
    found, now = [], 0.0
    for parking in ([(1, 10)], [(2, 10)], [(3, 10), (4, 10)], [], []):
        found.append(device.step(now, alone._replace(parking=parking)))
        now += found[-1].seconds
    assert [step.arrived for step in found] == [[], [], [1], [2], [3, 4]]


def test_with_nothing_else_to_do_the_accelerator_waits_for_the_host() -> None:
    device, steps, now = HybridDevice(TIMES, HOST), [], 0.0
    for work in (HybridWork(parking=[(7, 100)]), HybridWork(joins=True), HybridWork(joins=True)):
        steps.append(device.step(now, work))
        now += steps[-1].seconds
    assert [step.seconds for step in steps] == pytest.approx([0.25, 1.0 + 1.0, 1.0 + 0.75])
    assert [step.arrived for step in steps] == [[], [], [7]]


def test_a_row_that_nobody_wants_never_arrives() -> None:
    device = HybridDevice(TIMES, HOST)
    now = device.step(0.0, HybridWork(rows(own=100), parking=[(7, 10), (8, 10)])).seconds
    arrived = []
    for work in (HybridWork(rows(own=100), joins=True, called_off=[7]), *2 * [HybridWork(rows(own=100), joins=True)]):
        step = device.step(now, work)
        now += step.seconds
        arrived += step.arrived
    assert arrived == [8]


@pytest.mark.parametrize(("own", "first", "second"), [(1000, 0, 400), (1000, 700, 400), (4000, 1400, 10)])
def test_where_the_host_is_in_time_a_step_takes_what_neo_says(own: int, first: int, second: int) -> None:
    """NEO (arXiv:2411.01142), Section 3.2: with both inequalities T_l0 + T_l1 + T_ga0; the ends are a layer at most."""
    layers = 64
    times, host = StepTime(0.4, 0.0, 2e-4, 0.0, 0.0, 1000), HostTime(0.01, 8e-4, layers=layers)
    found = HybridDevice(times, host).step(0.0, HybridWork(rows(own, first), rows(host=second)))
    neo_s = 0.4 + 0.4 + 2e-4 * own
    assert neo_s <= found.seconds <= neo_s * (1 + 1 / layers)
