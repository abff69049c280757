import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from calibration.fit.curve import Curve
from calibration.planning.cost import (
    Deployment,
    PoolCapacity,
    deployment,
    gain,
    gain_bound,
    queries_per_window,
    size,
    slo_effect,
)

V100, XEON = Curve(0.0180, 0.27), Curve(0.0858, 0.32)  # Section V-B and Table III
ATLAS, KUNPENG = Curve(0.00904, 0.24), Curve(0.0752, 0.85)

curves = st.builds(Curve, st.floats(1e-4, 10), st.floats(0, 10))
slos_s = st.floats(0.01, 60)
shapes = st.sampled_from(["burst", "steady"])
counts = st.integers(1, 500)


@pytest.mark.parametrize(
    ("accelerator", "cpu", "percent"),
    [
        *[(44, 8, 18.2), (96, 22, 22.9), (84, 1, 1.2), (172, 8, 4.7)],  # Table I; 22.9 is printed as 22.3, a slip
        *[(48, 11, 22.9), (112, 30, 26.8), (128, 6, 4.7), (256, 20, 7.8)],  # Table II; it cuts off: 26.7 and 4.6
    ],
)
def test_gains_of_tables_1_and_2(accelerator, cpu, percent):
    assert round(100 * gain(accelerator, cpu), 1) == percent


@pytest.mark.parametrize(("accelerator", "cpu", "percent"), [(96, 22, 18.6), (112, 30, 21.1)])
def test_saved_on_the_peak_as_in_section_v_b(accelerator, cpu, percent):
    sized = size(1e9, accelerator, cpu, devices_per_instance=1, price=1.0)
    assert round(100 * sized.saved_share_limit, 1) == percent
    assert sized.saved_share == pytest.approx(cpu / (cpu + accelerator), abs=1e-6)


def test_equation_6_in_whole_instances():
    bought = deployment(1000, 96, devices_per_instance=2, price=1500.0)
    assert (bought.instances, bought.devices, bought.cost) == (11, 22, 33_000.0)
    assert deployment(960, 96, 1, 1.0).instances == 10  # just enough is enough
    assert deployment(0.1, 96, 1, 1.0).instances == 1


def test_equation_5_by_throughput():
    pool = PoolCapacity(V100, 96, replicas=2)
    assert pool.throughput() == pytest.approx(2 * 96 / (0.018 * 96 + 0.27))
    assert pool.throughput("steady") == pytest.approx(2 * 96 / (0.018 * 96 + 0.54))
    assert PoolCapacity(V100, 0).throughput() == 0.0
    sized = size(400, PoolCapacity(V100, 96).throughput(), PoolCapacity(XEON, 19).throughput(), 1, 1000.0)
    assert (sized.alone.instances, sized.together.instances) == (9, 7)
    assert (sized.saved, sized.saved_share) == (Deployment(2, 2, 2000.0), 2 / 9)


@given(st.integers(1, 10**6), counts, st.integers(0, 500), st.integers(1, 8))
def test_help_never_costs_and_instances_suffice(demand, alone, added, devices):
    sized = size(demand, alone, added, devices, price=3.0)
    assert sized.together.instances <= sized.alone.instances
    assert (sized.alone.instances - 1) * alone < demand <= sized.alone.instances * alone
    assert sized.together.instances * (alone + added) >= demand
    assert sized.together.devices == sized.together.instances * devices
    assert sized.saved.cost == pytest.approx(3.0 * sized.saved.devices)


@pytest.mark.parametrize(
    ("slo_s", "processing_s", "others"),
    [(2.0, 0.5, 3), (2.0, 0.1, 19), (1.0, 0.3, 3), (1.0, 1.0, 0), (1.0, 1.5, 0), (1.0, 100.0, 0)],
)
def test_equation_4(slo_s, processing_s, others):
    assert queries_per_window(slo_s, processing_s) == others


# Section IV-B.3


@pytest.mark.parametrize(
    ("first", "second", "limit", "premise", "below"),
    [
        # The paper's ratios; depths at an SLO of 1 s and of 2 s.
        (PoolCapacity(V100, 40), PoolCapacity(XEON, 7), 0.21, True, True),
        (PoolCapacity(V100, 96), PoolCapacity(XEON, 19), 0.21, True, True),
        (PoolCapacity(ATLAS, 84), PoolCapacity(KUNPENG, 1), 0.12, True, True),
        (PoolCapacity(ATLAS, 194), PoolCapacity(KUNPENG, 15), 0.12, True, True),
        (PoolCapacity(V100, 96), PoolCapacity(XEON, 22), 0.21, True, False),  # its own tuned depths pass its bound
        (PoolCapacity(V100, 96), PoolCapacity(Curve(0.0858, 0.10), 22), 0.21, False, False),
        (PoolCapacity(V100, 96, replicas=4), PoolCapacity(XEON, 19, replicas=2), 0.1049, True, True),
    ],
)
def test_the_bound_of_equation_19(first, second, limit, premise, below):
    bound = gain_bound(first, second)
    assert bound.limit == pytest.approx(limit, abs=0.005)
    assert bound.measured == pytest.approx(second.depth * second.replicas / (first.depth * first.replicas))
    assert (bound.premise, bound.below) == (premise, below)


@given(curves, curves, slos_s, counts, counts, shapes)
def test_equation_19_holds_on_curves_whenever_its_premise_does(first, second, slo_s, many, few, shape):
    accelerator, cpu = PoolCapacity(first, 1, many), PoolCapacity(second, 1, few)
    assume(first.unrounded_depth(slo_s, shape))
    found = second.unrounded_depth(slo_s, shape) * few / (first.unrounded_depth(slo_s, shape) * many)
    bound = gain_bound(accelerator, cpu)
    if bound.premise:
        assert found <= bound.limit * (1 + 1e-9)
    elif second.beta_s < first.beta_s:
        assert found >= bound.limit * (1 - 1e-9)


def test_slo_rows_of_one_pool_only():
    (row,) = slo_effect(None, PoolCapacity(XEON, 19, replicas=2), [2.0], "burst")
    assert (row.accelerator, row.cpu, row.gain) == (None, 38, None)
    (row,) = slo_effect(PoolCapacity(V100, 96), None, [0.1], "burst")
    assert (row.accelerator, row.cpu, row.gain) == (0, None, None)


@given(curves, curves, st.floats(0.01, 30), st.floats(0.01, 30), shapes)
def test_equation_23_needs_its_premise(first, second, slo_s, more_s, shape):
    assume(first.unrounded_depth(slo_s, shape))
    before, after = (
        second.unrounded_depth(at_s, shape) / first.unrounded_depth(at_s, shape) for at_s in (slo_s, slo_s + more_s)
    )
    if second.beta_s >= first.beta_s:
        assert after >= before * (1 - 1e-9)
    else:
        assert after <= before * (1 + 1e-9)
