"""What the schedule of a device that generates promises, and that no block is lost, whatever comes and goes."""

import pytest

from deployments.generation.scheduling.blocks import BLOCK
from deployments.generation.scheduling.chunk import Copy
from deployments.generation.scheduling.host_side import Host
from deployments.generation.scheduling.rows import Generation
from deployments.generation.scheduling.step_policy import StepPolicy
from deployments.generation.scheduling.step_schedule import StepSchedule
from deployments.generation.scheduling.step_time import HostTime, StepTime

MODEL = StepTime(0.02, 1.4e-4, 2e-7, 1.4e-4, 6e-9, 128)
POLICY = StepPolicy(ttft_s=2.0, tpot_s=0.1)


HOST = HostTime(row_s=1e-4, kv_token_s=2e-6, copy_token_s=1e-5, layers=4)


def schedule_of(blocks=200, policy=POLICY, host_blocks=None):
    return StepSchedule(MODEL, policy, blocks, host=host_blocks and Host(HOST, host_blocks))


def generation(prompt=300, most=20, due=2.0, answers=1, *, bulk=False):
    return Generation(prompt, most, due, None if bulk else POLICY.tpot_s, answers, bulk)


def run_step(schedule, now, finished=()):
    """The end of the step."""
    parts = schedule.next_step(now)
    schedule.copies()
    took_s = 0.03
    schedule.ended(now + took_s, took_s, finished)
    return now + took_s, parts


def test_a_prompt_is_computed_in_chunks_and_then_a_token_a_step():
    schedule = schedule_of(policy=StepPolicy(2.0, 0.1, step_tokens=128))
    one = generation(prompt=300, most=3)
    assert schedule.offer(0.0, one)
    now, steps = 0.0, []
    while one.rows:
        now, parts = run_step(schedule, now)
        steps.append([(part.start, part.tokens, part.wanted) for part in parts])
    assert steps == [[(0, 128, False)], [(128, 128, False)], [(256, 44, True)], [(300, 1, True)], [(301, 1, True)]]
    assert not schedule.next_step(now)


def test_answers_share_the_full_blocks_of_their_prompt_and_copy_the_last():
    schedule = schedule_of()
    one = generation(prompt=2 * BLOCK + 5, most=10, answers=3)
    assert schedule.offer(0.0, one)
    run_step(schedule, 0.0)
    first, second, third = (row.table for row in one.rows)
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    schedule.next_step(0.1)
    assert schedule.copies() == [Copy(first[2], second[2]), Copy(first[2], third[2])]
    assert [row.length for row in one.rows] == [2 * BLOCK + 6] * 3
    assert schedule.room.reserved == 2 + 3


def test_a_prompt_that_ends_with_a_block_has_nothing_to_copy():
    schedule = schedule_of()
    one = generation(prompt=2 * BLOCK, answers=2)
    assert schedule.offer(0.0, one)
    run_step(schedule, 0.0)
    schedule.next_step(0.1)
    assert schedule.copies() == []
    first, second = (row.table for row in one.rows)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_blocks_are_reserved_for_the_longest_answer():
    schedule = schedule_of(blocks=6)
    assert schedule.offer(0.0, generation(prompt=BLOCK, most=2 * BLOCK + 1))
    assert schedule.offer(0.0, generation(prompt=BLOCK, most=2 * BLOCK + 1))
    assert schedule.state(0.0).free_blocks == 0
    assert not schedule.offer(0.0, generation(prompt=1, most=2 * BLOCK + 1))
    assert schedule.state(0.0).refusals == (1, 0)
    assert schedule.state(0.0).opens_s > 0


def test_what_an_idle_device_cannot_do_in_time_never_fits():
    schedule = schedule_of()
    longest = schedule.longest_prompt(1.0)
    assert 0 < longest < 200 * BLOCK
    assert not schedule.never(generation(longest, 1), 1.0)
    assert schedule.never(generation(longest + 1, 1), 1.0)
    assert schedule.longest_prompt(0.5) < longest < schedule.longest_prompt(2.0)
    assert schedule.never(generation(100, 20), 0.0)
    assert schedule.never(generation(100, 201 * BLOCK), 10.0)
    quick = Generation(100, 20, 2.0, tpot_s=0.01)
    assert schedule.never(quick, 2.0)
    assert not schedule.offer(0.0, quick)
    assert schedule.state(0.0).refusals == (0, 1)


@pytest.mark.parametrize("step_s", [0.05, 0.07, 0.09, 0.0999])
@pytest.mark.parametrize("ttft_s", [0.2, 0.5, 2.0])
def test_an_idle_device_whose_steps_nearly_take_as_long_as_the_pace_allows_can_do_it(step_s, ttft_s):
    schedule = StepSchedule(StepTime(step_s, 0.0, 0.0, 0.0, 0.0), StepPolicy(ttft_s, 0.1), 200)
    assert not schedule.never(generation(most=400), ttft_s)
    assert not schedule.never(generation(most=400), 1.01 * step_s)
    assert schedule.never(generation(most=400), 0.99 * step_s)


def test_who_is_refused_knows_when_to_come_back_by_its_own_size():
    schedule, now = schedule_of(blocks=110), 0.0
    for _ in range(30):
        while schedule.offer(now, small := generation(prompt=10 * BLOCK, due=now + 20)):
            pass
        now, _ = run_step(schedule, now)
    assert not schedule.offer(now, large := generation(prompt=60 * BLOCK, due=now + 20))
    assert MODEL.beta_s <= small.opens_s < large.opens_s / 3 < 10


def test_the_earliest_due_is_computed_first():
    schedule = schedule_of(policy=StepPolicy(2.0, 0.1, step_tokens=256))
    later, sooner = generation(due=2.0), generation(due=1.0)
    assert schedule.offer(0.0, later)
    assert schedule.offer(0.0, sooner)
    assert [part.row.generation for part in schedule.next_step(0.0)] == [sooner]


def test_rows_without_slack_keep_chunks_short_and_those_with_slack_let_them_grow():
    schedule = schedule_of()
    quick = generation(prompt=10, most=400)
    schedule.offer(0.0, quick)
    now, _ = run_step(schedule, 0.0)
    schedule.offer(now, generation(prompt=4000, due=now + 5))
    short = schedule.next_step(now)[-1].tokens
    schedule.ended(now + 0.03, 0.03)
    while quick.rows[0].picked < 10:
        now, _ = run_step(schedule, now + 0.07)
    assert short > 100
    tight = schedule.next_step(now + 0.06)
    assert len(tight) == 1 or tight[-1].tokens < short


def test_bulk_is_behind_all_others_and_takes_its_share_of_the_blocks():
    schedule = schedule_of(blocks=20)
    bulk = [generation(prompt=2 * BLOCK, most=1, bulk=True) for _ in range(6)]
    assert [schedule.offer(0.0, one) for one in bulk] == [True] * 5 + [False]
    other = generation()
    assert schedule.offer(0.0, other)
    assert schedule.next_step(0.0)[0].row.generation is other


@pytest.mark.parametrize(("late_s", "parts"), [(0.0, 2), (0.2, 1)])
def test_bulk_makes_no_late_answer_later(late_s, parts):
    schedule = schedule_of()
    assert schedule.offer(0.0, generation(prompt=10, most=400))
    now, _ = run_step(schedule, 0.0)
    assert schedule.offer(now, generation(prompt=1000, bulk=True))
    assert len(schedule.next_step(now + late_s)) == parts


def test_a_device_that_became_slow_admits_less_and_tries_again_when_it_rests():
    schedule = schedule_of()
    now = 0.0
    one = generation(prompt=2000, most=100)
    assert schedule.offer(now, one)
    while one.rows:
        schedule.next_step(now)
        seconds = 20 * schedule.planned_s
        now += seconds
        schedule.ended(now, seconds)
    assert schedule.learning.factor > 10
    assert not schedule.offer(now, generation(due=now + 2))
    assert schedule.offer(now + 2.1, generation(due=now + 4.1))


def test_who_gives_up_while_waiting_leaves_no_trace():
    schedule = schedule_of()
    one = generation(answers=3)
    schedule.offer(0.0, one)
    schedule.remove(0.0, one)
    assert not schedule.next_step(0.0)
    assert schedule.room.reserved == 0


@pytest.mark.parametrize("answers", [1, 3])
def test_answers_of_one_token_end_with_their_prompt(answers):
    schedule = schedule_of()
    one = generation(most=1, answers=answers)
    assert schedule.offer(0.0, one)
    run_step(schedule, 0.0)
    assert not one.rows
    assert schedule.room._blocks.free == 200


def ended(schedule, now, most=30):
    """Run steps until nothing is left; the time."""
    for _ in range(most):
        now, parts = run_step(schedule, now)
        if not parts:
            return now
    raise AssertionError("it does not end")


def test_a_device_that_has_rested_for_days_says_when_there_is_room_by_its_work():
    schedule, days = schedule_of(blocks=20), 10 * 86_400.0
    for now in (days, 2 * days):
        assert schedule.offer(now, generation(due=now + 2.0))
        ended(schedule, now)
    now = 2 * days + 10
    while schedule.offer(now, generation(due=now + 2.0)):
        pass
    assert 0 < schedule.state(now).opens_s < 2


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_device_that_rests_tries_what_only_its_margin_refuses(factor):
    schedule = StepSchedule(StepTime(0.08, 0.0, 0.0, 0.0, 0.0), POLICY, 200)
    schedule.learning.margin, schedule.learning.factor = 0.3, factor
    now = schedule._since = 100.0
    assert not schedule.never(generation(due=2.0), 2.0)
    assert not schedule.offer(now + 0.1, generation(due=now + 2.1))  # it has only just come to rest
    assert schedule.offer(now + 3.0, generation(due=now + 5.0))


def test_bulk_goes_on_where_one_row_takes_longer_than_a_step_should():
    schedule = StepSchedule(StepTime(0.1, 0.03, 0.0, 0.03, 0.0), StepPolicy(ttft_s=1.0, tpot_s=0.1), 200)
    schedule.learning.factor = 5.0
    assert schedule.offer(0.0, generation(prompt=3, most=4, bulk=True))
    ended(schedule, 0.0)
    assert schedule.state(10.0).free_blocks == 200


def test_a_step_that_failed_teaches_nothing():
    schedule = schedule_of()
    assert schedule.offer(0.0, generation())
    schedule.next_step(0.0)
    schedule.ended(1e-6, 1e-6, whole=False)
    assert schedule.learning.factor == 1.0


def test_an_accelerator_that_is_full_is_open_where_its_host_has_room():
    schedule = schedule_of(6, host_blocks=20)
    while schedule.offer(0.0, one := generation()) and not one.on_host:
        pass
    assert one.on_host
    assert schedule.state(0.0).opens_s == 0
    while schedule.offer(0.0, generation()):
        pass
    state = schedule.state(0.0)
    assert state.opens_s > 0
    assert (state.free_blocks, state.host.free_blocks) == (0, 2)


def test_what_the_host_gained_is_what_both_made_less_what_the_accelerator_would_have():
    schedule = schedule_of(6, host_blocks=20)
    while schedule.offer(0.0, generation(most=80)):
        pass
    now, made = 0.0, 0.0
    while schedule._running or schedule._waiting:
        schedule.next_step(now)
        schedule.copies()
        plan = schedule.host.plan
        made += plan.worth + len(plan.first) + len(plan.second)
        now += schedule.planned_s
        schedule.ended(now, schedule.planned_s)
    host = schedule.state(now).host
    assert sum(host.steps) == schedule.steps
    assert host.steps[1] > 0
    assert host.tokens > 0
    assert host.gained + host.alone == pytest.approx(made, abs=0.2)
    assert 0 < host.gained_share < 1
    assert (host.rows, host.free_blocks) == (0, 20)
    assert schedule_of().state(0.0).host is None
