"""What the queue of a device promises, for any arrivals: the product's schedule on devices in virtual time."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.scheduler.pacing import Pacing
from deployments.embedding.scheduler.scheduler import Schedule
from deployments.embedding.scheduler.state import Policy, Query
from tests.kit.replica_world import (
    ATLAS,
    KUNPENG,
    V100,
    XEON,
    World,
    adds_up,
    goodput,
    late_share,
    proven,
    refused_share,
)
from tests.kit.simulation.arrivals import Arrival, poisson
from tests.kit.simulation.device import Device

CURVES = [V100, XEON, ATLAS, KUNPENG]
ENDS = [pytest.param(None, id="at the end"), pytest.param(8, id="pass by pass")]


@st.composite
def arrivals(draw, slo_s, most=40):
    """Bursts and streams of any lengths and deadlines."""
    out, at = [], 0.0
    gaps = st.sampled_from([0.0, 0.0, 0.001, 0.005, 0.02, 0.1, 0.3, 1.0])
    for _ in range(draw(st.integers(1, most))):
        at += draw(gaps) * slo_s
        bulk = draw(st.booleans()) and draw(st.booleans())
        allowed = draw(st.sampled_from([0.1, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0, 1.0, 1.5, 2.0, 2.1, 5.0, 20.0]))
        same = draw(st.sampled_from([1, 1, 1, 3, 12]))
        tokens = draw(st.sampled_from([4, 20, 75, 75, 200, 512]))
        out += [Arrival(at, tokens, allowed * slo_s, bulk)] * same
    return out


@pytest.mark.parametrize("pass_queries", ENDS)
@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_whatever_is_admitted_ends_in_time_on_a_device_that_runs_as_predicted(pass_queries, data):
    slo_s = data.draw(st.sampled_from([1.0, 2.0]))
    curve = data.draw(st.sampled_from(CURVES))
    world = World(Device(*curve, pass_queries), slo_s=slo_s, look=adds_up)
    sent = world.serve(data.draw(arrivals(slo_s)))
    late = [one for one in sent if one.admitted and not one.in_time]
    assert not late
    assert world.schedules[0].in_flight == 0


def test_who_joins_a_pause_for_a_burst_does_not_make_the_first_late():
    """Found by the property above: each arrival lengthened the pause, though the first had no time for it."""
    model = CostModel.of_curve(*V100)
    idle_s = Pacing.of_beta(model.beta_s).pause_s + model.beta_s + (1 + 8) * model.alpha_s
    sent = World(Device(*V100, 8)).serve(
        [Arrival(0.0, 75, idle_s * 1.025), *(Arrival(0.004 * i, 75, 1.0) for i in range(1, 30))]
    )
    assert sent[0].admitted
    assert all(one.in_time for one in sent if one.admitted)


@pytest.mark.parametrize("pass_queries", ENDS)
def test_patient_queries_leave_room_for_those_at_the_slo(pass_queries):
    devices = [Device(*curve, pass_queries) for curve in (V100, XEON)]
    patient, urgent = poisson(60, 30, allowed_s=20.0, seed=5), poisson(20, 30, allowed_s=2.0, seed=6)
    sent = World(*devices, slo_s=2.0).serve([*patient, *urgent])
    assert refused_share(one for one in sent if one.arrival.allowed_s == 2.0) <= 0.05
    assert refused_share(one for one in sent if one.arrival.allowed_s == 20.0) <= 0.7
    assert late_share(sent) == 0


@pytest.mark.parametrize("pass_queries", ENDS)
def test_bulk_runs_behind_an_overload_and_delays_nobody(pass_queries):
    urgent = list(poisson(80, 30, allowed_s=1.0, seed=2))
    bulk = [Arrival(1.0 + 0.05 * i, 75, 600.0, bulk=True) for i in range(500)]
    world = World(Device(*V100, pass_queries))
    alone, sent = world.serve(urgent), world.serve([*urgent, *bulk])
    assert late_share(sent) == 0
    waited = [one.ended - one.at for one in sent if one.arrival.bulk and one.admitted]
    assert len(waited) >= 40  # in 30 s of overload
    assert max(waited) <= 12
    taken = sum(one.in_time for one in sent if not one.arrival.bulk) / sum(one.in_time for one in alone)
    assert taken >= 0.8


@pytest.mark.parametrize(("times", "pass_queries", "mixed"), [(1.5, 8, True), (2.0, None, False)])
def test_a_device_that_slows_down_is_late_for_three_seconds(times, pass_queries, mixed):
    world = World(Device(*V100, pass_queries, noise=0.01), slow=[(15, times)])
    sent = world.serve(poisson(61, 40, allowed_s=1.0, mixed=mixed))
    assert late_share(one for one in sent if one.at > 18) <= 0.02
    assert late_share(one for one in sent if one.at < 13) <= 0.005


@pytest.mark.parametrize("pass_queries", ENDS)
def test_two_slow_runs_close_a_device_for_two_slos_only(pass_queries):
    """Where beta is half of the SLO nothing is predicted in time on a device that seems twice as slow."""
    world = World(Device(*V100, pass_queries), slo_s=0.6, slow=[(10, 2.2), (11.5, 1.0)])
    sent = world.serve(poisson(40, 30, allowed_s=0.6, mixed=True))
    assert late_share(one for one in sent if one.at > 11.5) <= 0.01
    before, after = (goodput([one for one in sent if at < one.at < at + 7], 7) for at in (2, 13))
    assert after >= 0.7 * before
    assert world.schedules[0].refusals.never == 0


@pytest.mark.parametrize(("pass_queries", "mixed"), [(None, False), (8, True)])
def test_noise_of_three_percent_is_within_the_margin(pass_queries, mixed):
    world = World(Device(*V100, pass_queries, noise=0.03), learned=False)
    sent = world.serve(poisson(61, 60, allowed_s=1.0, mixed=mixed))
    assert late_share(one for one in sent if one.at > 20) <= 0.005


def test_one_admission_looks_at_none_of_those_that_wait():
    """A thousand wait; a comparison more or less for their order, and no walk over them."""

    class Counted(list):
        walks = 0

        def __iter__(self):
            Counted.walks += 1
            return super().__iter__()

    queue = Schedule(CostModel.of_curve(1e-4, 0.05), Policy(1.0), 8 * 75, proven())
    queue.offer(0.0, [Query(75, 0.5)])
    queue.start(0.0)
    for i in range(1000):
        assert queue.offer(0.0, [Query(75, 0.9 + 1e-5 * i)])
    queue._urgent, queue._patient = Counted(queue._urgent), Counted()
    queue.offer(0.01, [Query(75, 1.0)])
    queue.offer(0.01, [Query(75, 5.0, patient=True)])
    queue.start_in_s(0.01)
    queue.state(0.01)
    assert Counted.walks == 0
