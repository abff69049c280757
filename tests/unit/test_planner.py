"""Which host rows a step has: NEO's two inequalities, the better plan, and what it costs to find it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.generation.scheduler.hybrid.planner import HostRow, HybridPlanner
from deployments.generation.scheduler.state import ACCELERATOR, ASYNCHRONOUS, MODES, PIPELINED
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime

LAYERS = 8
TINY = 1e-9


def planner(linear_s=0.04, accelerator_kv_s=1e-5, ratio=4.0, knee=10_000, slow=1.0):
    """Rows read `ratio` times as slowly on the host."""
    step = StepTime(linear_s, 1e-4, accelerator_kv_s, 1e-4, 1e-9, knee)
    return HybridPlanner(step, HostTime(0.0, ratio * accelerator_kv_s, 0.0, LAYERS), slow)


def full(rows=10, tokens=400):
    """The accelerator's cache is full of answers."""
    return StepLoad(rows, rows * tokens)


TIMES = st.floats(0, 0.1)
PLANNERS = st.builds(
    lambda beta, row, kv, prompt, pair, knee, host_row, host_kv, slow: HybridPlanner(
        StepTime(beta, row / 100, kv / 1e4, prompt / 100, pair / 1e6, knee),
        HostTime(host_row / 100, host_kv / 1e4, 0.0, LAYERS),
        slow,
    ),
    TIMES, TIMES, TIMES, TIMES, TIMES, st.integers(0, 40), TIMES, TIMES, st.floats(0.1, 10),
)  # fmt: skip
LOADS = st.builds(
    lambda rows, tokens, prompt: StepLoad(rows, rows * tokens).with_chunk(tokens, prompt),
    st.integers(0, 40), st.integers(1, 3000), st.integers(0, 600),
)  # fmt: skip
ROWS = st.lists(st.builds(HostRow, st.integers(1, 3000), st.just(False), st.booleans()), max_size=40)
URGENT = st.integers(0, 4)


def true_batches(planner, load, rows, first, second):
    """T_l0, T_l1, T_ga0, T_ca0, T_ca1 of these batches."""
    seconds, step = planner.host.seconds, planner.step
    host0_s, host1_s = (sum(planner.slow * seconds(1, rows[at].tokens) for at in batch) for batch in (first, second))
    first_load = load._replace(rows=load.rows + len(first))
    linear0_s = step.linear_s(first_load) if first_load != StepLoad() else 0.0
    linear1_s = step.linear_s(StepLoad(len(second))) if second else 0.0
    return linear0_s, linear1_s, step.attention_s(load), host0_s, host1_s


@given(PLANNERS, LOADS, ROWS)
def test_both_inequalities_hold(planner, load, rows):
    """Where the accelerator has something to do; else two rows must begin."""
    found = planner.two_batches(load, rows)
    assert sorted([*found.first, *found.second]) == sorted({*found.first, *found.second})
    times = true_batches(planner, load, rows, found.first, found.second)
    assert found[:5] == pytest.approx(times, rel=1e-9, abs=1e-12)
    linear0_s, linear1_s, attention0_s, host0_s, host1_s = times
    assert found.accelerator_s == pytest.approx(linear0_s + linear1_s + attention0_s, abs=2e-9)
    if load != StepLoad():
        assert host1_s <= linear0_s + TINY
        assert host0_s <= linear1_s + attention0_s + TINY
        assert found.seconds == pytest.approx(
            linear0_s + linear1_s + attention0_s, abs=2e-9
        )  # nobody waits for the host
        costs = [planner.slow * planner.host.seconds(1, row.tokens) for row in rows]
        first_room_s = max(planner.step.linear_s(load), attention0_s)
        assert bool(found.first or found.second) == any(cost_s <= first_room_s for cost_s in costs)


def test_of_many_urgent_rows_those_that_are_due_first_take_part_and_nobody_waits_for_the_host():
    rows = [HostRow(400, urgent=True) for _ in range(16)]
    plan = planner().choose(full(), rows, within_s=1.0)
    assert sorted([*plan.first, *plan.second]) == list(range(7))
    assert plan.seconds == pytest.approx(0.12)  # 2 T_l + T_ga, however many are urgent
    short = planner().choose(full(), rows, within_s=0.1)  # an answer of the accelerator would be late
    assert sorted([*short.first, *short.second]) == [0, 1]
    assert short.seconds == short.alone_s


@given(PLANNERS, LOADS, ROWS)
def test_in_one_batch_the_host_hides_behind_the_accelerators_attention(planner, load, rows):
    found = planner.one_batch(load, rows)
    assert found.host0_s <= found.attention0_s + TINY
    assert found.seconds == pytest.approx(found.linear0_s + found.attention0_s, abs=2e-9)
    assert not found.second


BINARY = HybridPlanner(StepTime(4.0, 0.5, 1 / 64, 0.25, 0.0, 4), HostTime(0.0, 1 / 16, 0.0, LAYERS))
"""Its times are exact: an accelerator's token 1/64 s, a host's 1/16 s, linear layers 4 s and more behind four rows."""


@pytest.mark.parametrize(
    ("kv_tokens", "rows", "first", "second"),
    [
        (256, [64], [], [0]),  # 4 s of attention, 4 s of linear layers: the second batch, where both have room
        (320, [80], [0], []),  # a row of 5 s hides behind 5 s of attention
        (256, [65], [], []),
        (64, [64], [], [0]),  # and one of 4 s behind the linear layers
        (64, [80, 64], [], [1]),  # though one of 5 s does so nowhere
        (320, [96, 80], [1], []),
    ],
)
def test_a_row_may_take_as_long_as_what_it_hides_behind(kv_tokens, rows, first, second):
    found = BINARY.two_batches(StepLoad(1, kv_tokens), [HostRow(tokens) for tokens in rows])
    assert (found.first, found.second) == (first, second)


@pytest.mark.parametrize(("tokens", "first"), [(64, [0]), (65, [])])
def test_in_one_batch_a_row_may_take_as_long_as_the_attention(tokens, first):
    assert BINARY.one_batch(StepLoad(1, 256), [HostRow(tokens)]).first == first


@pytest.mark.parametrize(
    ("rows", "prompt", "others", "linear_s"),
    [
        (4, 0, 1, 4.5),
        (2, 0, 3, 4.5),  # two take part for nothing
        (3, 0, 1, 4.0),
        (2, 2, 1, 4.25),  # in place of a token
        (2, 1, 1, 4.0),
        (2, 2, 2, 4.5),
        (2, 2, 3, 5.0),
    ],
)
def test_rows_behind_the_knee_and_tokens_pushed_there_take_longer(rows, prompt, others, linear_s):
    load = StepLoad(rows, 10_000, prompt)
    for find in (BINARY.one_batch, BINARY.two_batches):
        found = find(load, [HostRow(80)] * others)
        assert (len(found.first), found.linear0_s) == (others, linear_s)
    assert BINARY.step.linear_s(load._replace(rows=rows + others)) == linear_s


def test_without_work_of_the_accelerator_two_rows_begin():
    found = planner(ratio=64).choose(StepLoad(), [HostRow(400)] * 3)
    assert len(found.first) + len(found.second) == 2


@pytest.mark.parametrize(
    ("rows", "parked", "tokens", "arrive"),
    [
        (4, 0, 16, 0.5),  # an eighth of them in each step, one for each layer
        (80, 0, 48, 1.25),  # the host keeps up with 5 s of 1 + 3 s
        (0, 80, 0, 2.5),  # 5 s of 1 + 1 s: of those that are parked, as if each read one token
    ],
)
def test_as_many_park_as_the_host_keeps_up_with(rows, parked, tokens, arrive):
    step = StepTime(4.0, 0.5, 0.0, 0.5, 0.0)
    host = HostTime(1.0, 1 / 16 if rows else 1.0, 0.0, LAYERS)
    plan = HybridPlanner(step, host).choose(
        StepLoad(2), [HostRow(tokens, bulk=True)] * rows, parked=parked, modes=[ASYNCHRONOUS]
    )
    assert plan.worth == 2
    assert (plan.seconds, plan.rate) == (5 + arrive / 2, (2 + arrive) / (5 + arrive / 2))


def test_the_worth_of_what_the_accelerator_has():
    """As many tokens as its rows get in that time, where there is one at least."""
    assert planner().choose(full(1), []).worth == 1
    assert BINARY.choose(StepLoad(0, 0, 20), []).worth == 2  # 8 s, while a row takes 4 s
    nothing = planner().choose(StepLoad(), [])
    assert (nothing.worth, nothing.host_s) == (0, 0)


@given(PLANNERS, LOADS, ROWS, URGENT, st.integers(0, 30), st.floats(1e-3, 1.0), st.sets(st.sampled_from(MODES)))
def test_the_plan_is_the_best_of_those_allowed(planner, load, rows, urgent, parked, within_s, modes):
    rows = [row._replace(urgent=number < urgent) for number, row in enumerate(rows)]
    plan = planner.choose(load, rows, within_s=within_s, parked=parked, modes=modes)
    alone_s = max(1e-9, planner.step.seconds(load))
    assert plan.alone_s == pytest.approx(alone_s, abs=2e-9)
    assert plan.seconds <= max(within_s, alone_s) + TINY
    assert plan.mode == ACCELERATOR or plan.mode in modes or parked
    assert all(rows[at].bulk for at in plan.parking)
    taken = [*plan.first, *plan.second]
    if plan.mode == ASYNCHRONOUS:
        assert not plan.second
        assert not any(rows[at].bulk for at in taken)
    elif taken:
        assert plan.mode == PIPELINED
        assert not plan.parking
        host0_s, host1_s = true_batches(planner, load, rows, plan.first, plan.second)[3:]
        assert planner.slow * plan.host_s == pytest.approx(host0_s + host1_s)
    if not any(rows[at].urgent for at in taken):  # no plan is worse than the accelerator alone
        assert plan.rate >= plan.worth / alone_s - TINY
    elif plan.mode == PIPELINED:
        assert 0 in taken


@pytest.mark.parametrize(
    ("ratio", "linear_s", "mode", "batches"),
    [
        (2, 0.04, PIPELINED, 2),  # (1 / 3 + 1 / 2) / (1 / 2) = 1.67 times the tokens
        (4, 0.04, PIPELINED, 1),  # one batch: 1.25 times; two: 1.17 times
        (8, 0.04, PIPELINED, 1),  # one batch: 1.1 times; two would lose
        (4, 0.08, PIPELINED, 2),
    ],
)
def test_two_batches_where_they_pay(ratio, linear_s, mode, batches):
    """T_ga is 0.04 s; with T_gl = T_ga APEX's inequality (6) puts the break-even of two batches at a ratio of 6."""
    found = planner(linear_s, ratio=ratio).choose(full(), [HostRow(400)] * 200)
    assert found.mode == mode
    assert (len(found.second) > 0) == (batches == 2)
    assert found.rate > found.worth / found.alone_s


def test_rows_that_read_more_than_hides_anywhere_are_left_out():
    """A row of 0.064 s: more than the accelerator's attention takes; two batches would hide one, and cost more."""
    assert planner(ratio=16).choose(full(), [HostRow(400)] * 200).mode == ACCELERATOR


def test_deferrable_rows_are_parked_where_many_wait_and_few_are_not():
    many = planner(ratio=8).choose(full(), [HostRow(400, bulk=True)] * 100)
    assert (many.mode, list(many.parking)) == (ASYNCHRONOUS, [0, 1, 2])  # as many as arrive in a step
    assert many.rate == pytest.approx((10 + 2.5) / 0.08)  # the host's share of a step: 0.08 s of 8 x 0.004 s a token
    few = planner(ratio=8).choose(full(), [HostRow(400, bulk=True)] * 3)
    assert few.mode == PIPELINED
    assert len(few.first) == 1


def test_what_is_on_its_way_goes_on_beside_the_accelerator():
    found = planner().choose(full(), [], parked=5)
    assert (found.mode, found.parking) == (ASYNCHRONOUS, [])
    assert planner().choose(StepLoad(), [], parked=5).mode == ASYNCHRONOUS
    assert planner().choose(StepLoad(), []).mode == ACCELERATOR


def test_where_the_accelerator_has_nothing_else_the_host_sets_the_pace():
    found = planner(ratio=2).choose(StepLoad(), [HostRow(400)] * 50)
    assert found.mode == PIPELINED
    assert found.host_s == pytest.approx(found.seconds)  # it never rests: 10 rows of 0.008 s in two times 0.04 s
    assert len(found.first) + len(found.second) == 10


def test_an_urgent_row_takes_part_though_it_costs_tokens_but_makes_nobody_late():
    slow_host = planner(ratio=64)
    rows = [HostRow(400, urgent=True)]
    assert slow_host.choose(full(), rows).first == [0] or slow_host.choose(full(), rows).second == [0]
    assert slow_host.choose(full(), [HostRow(400)]).mode == ACCELERATOR


def test_a_prompt_counts_as_the_tokens_that_its_time_is_worth():
    """A step with a prompt of 0.2 s beside ten rows hides more of the host, and is no reason to do without it."""
    load = full().with_chunk(0, 2000)
    found = HybridPlanner(StepTime(0.04, 1e-4, 1e-5, 1e-4, 0.0, 0), HostTime(0.0, 8e-5, 0.0, LAYERS)).choose(
        load, [HostRow(400)] * 50
    )
    assert found.worth == pytest.approx(10 * found.alone_s / 0.081)
    assert found.mode == PIPELINED
    assert len(found.first) + len(found.second) > 6


def test_nothing_but_the_host_has_work_and_it_goes_on_though_it_is_late():
    found = planner(ratio=2).choose(StepLoad(), [HostRow(400, urgent=True)] * 3, within_s=0.0)
    assert found.mode == PIPELINED


@pytest.mark.parametrize(
    ("paced", "parked", "parking"),
    [
        (0, 0, 3),  # 2.5 of 0.032 s keep the host busy for a step of 0.08 s
        (1, 0, 2),  # the paced row takes 0.032 s of 0.85 x 0.08 s: 1.125 are left
        (1, 8, 1),  # eight layers hold nine then
        (1, 9, 0),
        (0, 99, 3),
    ],
)
def test_bulk_parks_beside_rows_that_have_a_pace_in_the_time_that_they_leave_the_host(paced, parked, parking):
    rows = [*[HostRow(400)] * paced, *[HostRow(400, bulk=True)] * 100]
    found = planner(ratio=8).choose(full(), rows, parked=parked)
    assert (found.mode, list(found.first)) == (ASYNCHRONOUS, list(range(paced)))
    assert list(found.parking) == list(range(paced, paced + parking))
    assert found.host_s == 0  # parked rows' attention is measured with it


def test_none_more_parks_where_two_batches_would_yield_more_with_those_that_are_parked():
    """Two batches hide 20 rows in 0.2 s, but only 4 are there; with 100 parked rows some 3 arrive in each 0.1 s."""
    planner = HybridPlanner(StepTime(0.1, 0.0, 1e-6, 0.0, 0.0, 1024), HostTime(0.0, 1e-5, 0.0, 32))
    load, rows = StepLoad(2, 2000), [HostRow(1000, bulk=True)] * 4
    plan = planner.choose(load, rows, parked=100)
    assert (plan.mode, list(plan.parking)) == (ASYNCHRONOUS, [])
    assert planner.choose(load, rows * 26).mode == PIPELINED
    slow = HybridPlanner(planner.step, HostTime(0.0, 1e-4, 0.0, 32))  # two batches hide 2
    assert slow.choose(load, rows, parked=100).parking


def test_new_prompts_decide_whether_rows_park():
    """Of 100 rows, 19.8 fit into two batches of 0.22 s, and 10.8 join each step of 0.12 s: 99 and 107 rows a second.
    With 0.01 s of prompts for each row, all 100 fit into two batches of 1.24 s, and 12.5 join each step of 0.265 s: 82
    and 55 rows a second.
    """
    step, host = StepTime(0.1, 0.0, 1e-5, 1e-3, 0.0, 0), HostTime(0.0, 1e-5, 0.0, LAYERS)
    rows = [HostRow(1000, bulk=True)] * 100
    for new_prompts, parks in ((0.0, True), (10.0, False)):
        assert bool(HybridPlanner(step, host, 1.0, new_prompts).choose(StepLoad(2, 2000), rows).parking) is parks
