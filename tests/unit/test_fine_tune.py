import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.prove.fine_tune import Tuned, fine_tune, step_down

MOST = 2048
OFF = st.floats(-0.2, 0.2)  # an estimate, from the truth


def drive(estimates, device, most=MOST):
    """The outcome, and (depths, held) of each trial."""
    tuning = fine_tune(estimates, most)
    trials = []
    try:
        depths = next(tuning)
        while True:
            trials.append((depths, device(depths)))
            depths = tuning.send(trials[-1][1])
    except StopIteration as done:
        return done.value, trials


def depths(accelerator, cpu):
    return {"accelerator": accelerator, "cpu": cpu}


def independent(**true):
    """Pools that hold up to their true depth, whatever the other does."""
    return lambda tried: {pool: depth <= true[pool] for pool, depth in tried.items()}


def disturbed(accelerator, cpu, by):
    """Each query on the CPU costs the accelerator `by` queries of its depth. A closed pool holds."""
    return lambda tried: {
        "accelerator": tried["accelerator"] <= max(0, accelerator - by * tried["cpu"]),
        "cpu": tried["cpu"] <= cpu,
    }


def about(true, off):
    return min(MOST, max(1, round(true * (1 + off))))


def near(depth, true):
    """To the query; large depths to one in a hundred; never above."""
    return true - true // 100 <= depth <= true


@settings(max_examples=300, deadline=None)
@given(st.integers(1, MOST), st.integers(0, 300), OFF, OFF)
def test_pools_that_do_not_disturb_each_other_are_found_both(accelerator, cpu, accelerator_off, cpu_off):
    estimates = depths(about(accelerator, accelerator_off), about(cpu, cpu_off))
    tuned, trials = drive(estimates, independent(accelerator=accelerator, cpu=cpu))
    assert trials[0][0] == estimates
    assert near(tuned.depths["accelerator"], accelerator)
    assert near(tuned.depths["cpu"], cpu)
    assert len(trials) <= 30
    assert not any("CPU" in note for note in tuned.notes)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["accelerator", "cpu"]), st.integers(1, MOST), OFF)
def test_one_pool_alone(pool, true, off):
    tuned, trials = drive({pool: about(true, off)}, independent(**{pool: true}))
    assert set(tuned.depths) == {pool}
    assert near(tuned.depths[pool], true)
    assert len(trials) <= 30


@pytest.mark.parametrize(("most", "found"), [(30, 30), (50, 40)])
def test_nothing_is_tried_above_the_most(most, found):
    tuned, trials = drive({"accelerator": 25}, independent(accelerator=40), most)
    assert tuned == Tuned({"accelerator": found})
    assert max(tried["accelerator"] for tried, _ in trials) <= most


def test_a_cpu_that_was_ruled_out_stays_out():
    tuned, trials = drive(depths(40, 0), independent(accelerator=42, cpu=100))
    assert tuned.depths == depths(42, 0)
    assert {tried["cpu"] for tried, _ in trials} == {0}


@pytest.mark.parametrize(
    ("true", "found"), [(depths(40, 0), depths(40, 0)), (depths(0, 7), depths(0, 7)), (depths(0, 0), depths(0, 0))]
)
def test_a_pool_that_holds_nothing_ends_with_nothing(true, found):
    tuned, trials = drive(depths(40, 7), independent(**true))
    assert tuned.depths == found
    assert len(trials) <= 30


@pytest.mark.parametrize(
    ("by", "found"),
    [
        (0.0, depths(96, 22)),
        (0.04, depths(95, 20)),  # one query is lost to twenty: not worth a word
        (1.0, depths(96, 0)),
        (5.0, depths(96, 0)),
    ],
)
def test_the_accelerator_keeps_what_it_holds_alone(by, found):
    tuned, _ = drive(depths(96, 20), disturbed(96, min(22, found["cpu"] or 22), by))
    assert tuned.depths == found
    if found["cpu"]:
        assert not tuned.notes
    else:
        (note,) = tuned.notes
        assert "the CPU is left out" in note
        assert "not 96" in note


def test_the_cpu_gets_what_costs_the_accelerator_nothing():
    def eight_are_free(tried):
        return {"accelerator": tried["accelerator"] <= (96 if tried["cpu"] <= 8 else 70), "cpu": tried["cpu"] <= 22}

    tuned, _ = drive(depths(96, 20), eight_are_free)
    assert tuned.depths == depths(96, 8)
    (note,) = tuned.notes
    assert "the CPU gives way and gets 8" in note
    assert "args.cpu.cores" in note


def test_an_estimate_that_was_too_high_is_not_the_fault_of_the_cpu():
    tuned, _ = drive(depths(48, 7), independent(accelerator=40, cpu=7))
    assert tuned == Tuned(depths(40, 7), ("the accelerator's estimate of 48 was too high even when it ran alone",))


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 1600), st.integers(0, 300), st.floats(0, 3), OFF, OFF)
def test_whatever_the_cpu_costs_the_accelerator_it_keeps_its_depth(accelerator, cpu, by, accelerator_off, cpu_off):
    device = disturbed(accelerator, cpu, by)
    estimate = about(accelerator, accelerator_off)
    tuned, trials = drive(depths(estimate, about(cpu, cpu_off)), device)
    keeps = min(accelerator, estimate)
    assert keeps - max(1, keeps // 50) <= tuned.depths["accelerator"] <= accelerator
    assert tuned.depths["cpu"] <= cpu
    gives_way = any("the CPU" in note for note in tuned.notes)
    assert gives_way or near(tuned.depths["cpu"], cpu)
    if gives_way:
        assert all(device(tuned.depths).values())
    assert len(trials) <= 40


def test_an_accelerator_of_one_query_is_not_closed_for_the_cpu():
    tuned, _ = drive(depths(1, 13), disturbed(1, 13, by=2))
    assert tuned.depths == depths(1, 0)


@pytest.mark.parametrize(("depth", "smaller"), [(0, 0), (1, 0), (2, 1), (99, 98), (200, 198), (1000, 990)])
def test_a_late_depth_is_lowered_by_one_query_or_one_in_a_hundred(depth, smaller):
    assert step_down(depth, attempt=0) == smaller


def test_a_depth_that_stays_late_is_lowered_by_more_and_more():
    depth, lowered = 100, []
    for attempt in range(8):
        depth = step_down(depth, attempt)
        lowered.append(depth)
    assert lowered == [99, 98, 96, 92, 84, 68, 36, 0]
