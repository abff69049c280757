"""A replica whose host holds a part of the cache: who is admitted where, who moves, and what is learned."""

import pytest

from deployments.generation.scheduling.cache_room import CacheRoom
from deployments.generation.scheduling.chunk import ComputeSeconds
from deployments.generation.scheduling.host_side import Host
from deployments.generation.scheduling.hybrid_plan import ACCELERATOR, ASYNCHRONOUS, PIPELINED, HybridPlan
from deployments.generation.scheduling.rows import PARKING, Generation, Row
from deployments.generation.scheduling.step_policy import StepPolicy
from deployments.generation.scheduling.step_schedule import StepSchedule
from deployments.generation.scheduling.step_time import HostTime, StepTime

MODEL = StepTime(0.02, 0.0, 4e-6, 1e-5, 0.0, 128)
POLICY = StepPolicy(ttft_s=2.0, tpot_s=0.1, bulk_share=1.0)
QUICK = HostTime(row_s=1e-4, kv_token_s=8e-6, copy_token_s=1e-6, layers=4)
SLOW = HostTime(row_s=1e-4, kv_token_s=4e-4, copy_token_s=1e-6, layers=4)


def schedule_of(blocks=16, host_blocks=64, time=QUICK, policy=POLICY):
    return StepSchedule(MODEL, policy, blocks, host=Host(time, host_blocks))


def ask(now, *, prompt=500, most=12, bulk=False):
    return Generation(prompt, most, now + 2.0, None if bulk else POLICY.tpot_s, bulk=bulk)


def offered(schedule, now, count, **how):
    """Those of so many that are admitted."""
    return [one for one in (ask(now, **how) for _ in range(count)) if schedule.offer(now, one)]


def run(schedule, now, steps=1, arrive=True):
    """Steps that take as long as planned; every second one lets all arrive that are parked."""
    copied = []
    for _ in range(steps):
        before = dict(schedule.host.parked)
        parts = schedule.next_step(now)
        copied += schedule.copies()
        schedule.called_off()
        now += max(schedule.planned_s, 0.01)
        host_s = schedule.host.plan.host_s
        schedule.ended(
            now, schedule.planned_s, arrived=list(before) if arrive else (), compute_s=ComputeSeconds(host_s=host_s)
        )
        if not parts and not schedule.joins:
            break
    return now, copied


def test_who_finds_no_room_on_the_accelerator_is_admitted_to_the_host():
    schedule = schedule_of()
    found = offered(schedule, 0.0, 6)
    assert [one.on_host for one in found] == [False] * 4 + [True] * 2  # of four blocks each
    assert (schedule.room.reserved, schedule.host.room.reserved) == (16, 8)


def test_a_host_that_cannot_keep_the_pace_admits_only_bulk():
    schedule = schedule_of(time=SLOW)
    assert len(offered(schedule, 0.0, 6)) == 4
    refused = ask(0.0)
    assert not schedule.offer(0.0, refused)
    assert not refused.on_host
    assert [one.on_host for one in offered(schedule, 0.0, 3, bulk=True)] == [True] * 3


def test_answers_on_the_host_are_in_time_and_all_end():
    schedule = schedule_of()
    found = offered(schedule, 0.0, 6)
    now, firsts = 0.0, {}
    for _ in range(40):
        now, _ = run(schedule, now)
        for one in found:
            if one.first_at is not None:
                firsts.setdefault(id(one), one.first_at)
                assert all(now <= one.first_at + row.picked * POLICY.tpot_s for row in one.rows)
    assert not any(one.rows for one in found)
    assert schedule.host.steps[PIPELINED] > 5
    assert schedule.host.tokens >= 2 * 11 or schedule.host.moved[0]
    assert schedule.host.room._blocks.free == 64


def test_it_comes_back_when_nobody_else_wants_the_accelerator():
    schedule = schedule_of()
    found = offered(schedule, 0.0, 6, prompt=450, most=60)
    now, _ = run(schedule, 0.0, 4)
    assert found[4].on_host
    for one in found[:2]:
        schedule.remove(now, one)
    assert not schedule.offer(now, Generation(8000, 50, now + 9, 0.1))
    schedule._crowded = True  # somebody looked for room a moment ago
    now, copied = run(schedule, now)
    assert copied == []
    blocks = found[4].held_blocks
    now, copied = run(schedule, now)
    assert [one.on_host for one in found[4:]].count(True) == 1  # the last 5 % of the accelerator's blocks stay free
    assert len(copied) == blocks
    assert all(copy.from_host and not copy.to_host for copy in copied)
    assert schedule.host.moved == [1, 0]
    now, _ = run(schedule, now, 80)
    assert not any(one.rows for one in found)


def test_who_would_wait_for_a_block_goes_to_the_host_instead():
    schedule = schedule_of(blocks=40, host_blocks=400)
    for _ in range(500):
        schedule.room.lengths.ended(2, 500)
    now, found = 0.0, []
    while not found or not found[-1].on_host:  # more on the accelerator than it can hold if all become long
        found += offered(schedule, now, 1, prompt=10, most=500)
    on_accelerator = [one for one in found if not one.on_host]
    assert sum(one.most_blocks for one in on_accelerator) > 40
    copies = []
    for _ in range(1500):
        now, copied = run(schedule, now)
        copies += copied
        if not any(one.rows for one in found):
            break
    assert not any(one.rows for one in found)
    assert any(copy.to_host for copy in copies)
    assert schedule.host.moved[1] > 0


@pytest.mark.parametrize("blocks", [24, 40])
def test_nobody_goes_to_the_host_and_comes_back_in_one_step(blocks):
    schedule = schedule_of(blocks=blocks, host_blocks=400)
    for _ in range(500):
        schedule.room.lengths.ended(2, 500)
    now, found, to_host = 0.0, [], 0
    while not found or not found[-1].on_host:
        found += offered(schedule, now, 1, prompt=10, most=500)
    while any(one.rows for one in found):
        now, copies = run(schedule, now)
        to_host += any(copy.to_host for copy in copies)
        assert len({(copy.from_host, copy.to_host) for copy in copies}) <= 1
    assert to_host


def test_who_may_need_more_than_the_accelerators_cache_is_for_the_host_whatever_was_learned():
    schedule = schedule_of(blocks=24, host_blocks=60)
    for number in range(500):
        schedule.room.lengths.ended(32 * number % 700, 4000)
    found = offered(schedule, 0.0, 1, prompt=100, most=3600)
    assert [one.most_blocks > 24 for one in found] == [True]
    found += offered(schedule, 0.0, 20, prompt=300, most=300)
    run(schedule, 0.0, 10)
    assert found[0].first_at is not None
    assert schedule.room.stalls == 0


def test_nobody_comes_where_all_would_wait_for_ever():
    """All who are here hold two of three blocks each. It would take the last ones, and may need more itself."""
    here, there = CacheRoom(100), CacheRoom(100)
    for number in range(500):
        here.lengths.ended(128 + 32 * (number % 2), 4000)
    many, other = [Generation(100, 283, 9.0, 0.1) for _ in range(47)], Generation(600, 500, 9.0, 0.1)
    for room, generation in [*((here, one) for one in many), (there, other)]:
        room.admit(generation)
        generation.rows = [Row(generation, 0, length=generation.prompt_tokens + 124)]
        assert room.take(generation.rows[0], generation.rows[0].length)
        generation.first_at = 0.0
    assert here.fits(other, (), 1.0)
    assert not here.may_move_in(other, 1.0)
    here.end(many[0].rows.pop(), cut_off=True)
    assert here.may_move_in(other, 1.0)


def test_bulk_sets_out_beside_a_busy_accelerator_and_arrives_later():
    schedule = schedule_of(host_blocks=4 * 60)
    there = offered(schedule, 0.0, 4, prompt=300, most=200)
    bulk = offered(schedule, 0.0, 60, bulk=True)
    assert all(one.on_host for one in bulk)
    now, modes = 0.0, set()
    for number in range(60):
        parts = schedule.next_step(now)
        schedule.copies()
        modes.add(schedule.mode)
        parked = [part.row.parked for part in parts if part.batch == PARKING]
        assert all(number in schedule.host.parked for number in parked)
        arrived = [at for at in schedule.host.parked if at not in parked][: number % 3]
        now += schedule.planned_s
        schedule.ended(now, schedule.planned_s, arrived=arrived)
    assert ASYNCHRONOUS in modes
    assert schedule.joins
    assert schedule.host.tokens > 20
    assert all(one.rows for one in there)
    gone = next(iter(schedule.host.parked.values())).generation
    numbers = [row.parked for row in gone.rows]
    schedule.remove(now, gone)
    schedule.next_step(now)
    assert schedule.called_off() == numbers


def test_parked_rows_go_on_beside_answers_that_the_host_always_has():
    schedule = schedule_of(blocks=17, host_blocks=4 * 200)
    offered(schedule, 0.0, 4, prompt=300, most=200)
    offered(schedule, 0.0, 60, bulk=True, most=100)
    now, passed = 0.0, {}  # layers, by the numbers of parked rows

    def step(now):
        schedule._crowded = True  # the accelerator has no room
        schedule.next_step(now)
        schedule.copies()
        for number in schedule.host.parked if schedule.joins else ():
            passed[number] = passed.get(number, 0) + 1
        arrived = [number for number in schedule.host.parked if passed.get(number, 0) > QUICK.layers]
        now += max(0.003, schedule.planned_s)
        compute_s = ComputeSeconds(host_s=schedule.host.plan.host_s)
        schedule.ended(now, max(0.003, schedule.planned_s), arrived=arrived, compute_s=compute_s)
        return now

    for _ in range(20):
        now = step(now)
    first = dict(schedule.host.parked)
    paced = []
    for _ in range(160):
        paced = [one for one in paced if one.rows]
        paced += offered(schedule, now, 6 - len(paced), prompt=300, most=60)
        now = step(now)
    assert len(first) > 20
    assert not any(schedule.host.parked.get(number) is row for number, row in first.items())
    assert schedule.host.steps[PIPELINED] > 100
    schedule.host._passed = 10**6
    schedule.clear()
    assert PIPELINED in schedule.host.modes(POLICY.modes, urgent=False)  # nobody is parked any more


def test_what_the_host_still_computes_for_parked_rows_does_not_make_it_slow():
    host = Host(QUICK, 64)
    host.park(Row(ask(0.0), 0))
    factors = []
    for _ in range(2):
        host.plan = HybridPlan(PIPELINED, 0.1, 10.0, 1.0, 0.05, 0.05, first=(0,), host_s=0.05)
        host.ended(host.plan, 0.1, ComputeSeconds(0.05, 0.08), 0)
        factors.append(host.learning.factor)
    assert factors == [1.0, 1.5]


def test_steps_of_parked_rows_alone_do_not_say_how_quick_the_accelerator_is():
    """They go through the few layers where the host has got to: nobody predicts how many."""
    schedule = schedule_of(policy=StepPolicy(ttft_s=2.0, tpot_s=0.1, bulk_share=1.0, modes=frozenset({ASYNCHRONOUS})))
    host = schedule.host
    host.park(Row(ask(0.0), 0))
    for _ in range(QUICK.layers):
        assert not schedule.next_step(0.0)
        assert schedule.joins
        schedule.ended(0.0, 0.001, compute_s=ComputeSeconds(schedule.model.beta_s / QUICK.layers))
    assert host.accelerator_factor == 1.0


def test_the_host_is_known_to_be_slow_after_a_few_steps_and_tried_again_later():
    schedule = schedule_of()
    offered(schedule, 0.0, 6, most=100)
    now = 0.0
    for _ in range(60):
        schedule.next_step(now)
        schedule.copies()
        now += schedule.planned_s
        host_s = 8 * QUICK.seconds(len(schedule.host.plan.first) + len(schedule.host.plan.second), 520)
        schedule.ended(
            now, schedule.planned_s, compute_s=ComputeSeconds(host_s=host_s if schedule.mode == PIPELINED else 0.0)
        )
    slow = schedule.host.learning.factor
    assert slow > 2
    schedule.host.clear()
    for _ in range(1000):
        schedule.host.planner(MODEL)
        schedule.host.plan = schedule.host.planner(MODEL).choose(schedule.load, [])
        schedule.host.ended(schedule.host.plan, 0.02, ComputeSeconds(0.02), 0)
    assert schedule.host.learning.factor < 1.5
    assert schedule.host.steps[ACCELERATOR] >= 1000


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0])
def test_nobody_waits_for_the_host_however_quick_the_accelerator_is(factor):
    policy = StepPolicy(ttft_s=2.0, tpot_s=0.1, bulk_share=1.0, modes=frozenset({PIPELINED}))
    schedule = schedule_of(blocks=24, host_blocks=4 * 60, policy=policy)
    offered(schedule, 0.0, 6, most=100)
    assert any(one.on_host for one in offered(schedule, 0.0, 40, most=100, bulk=True))
    now, shares = 0.0, []
    for _ in range(40):
        schedule.learning.factor = schedule.host.accelerator_factor = factor
        schedule.next_step(now)
        schedule.copies()
        now += factor * schedule.planned_s
        plan = schedule.host.plan
        if schedule.load.rows and schedule.mode == PIPELINED:
            shares.append(plan.host_s / (factor * plan.seconds))
        schedule.ended(
            now, factor * schedule.planned_s, compute_s=ComputeSeconds(factor * plan.accelerator_s, plan.host_s)
        )
    assert shares
    assert max(shares) <= 1.001


def test_only_what_the_accelerator_computes_longer_gives_the_host_more_to_do():
    policy = StepPolicy(ttft_s=2.0, tpot_s=0.1, bulk_share=1.0, modes=frozenset({PIPELINED}))
    schedule = schedule_of(blocks=24, host_blocks=4 * 60, policy=policy)
    offered(schedule, 0.0, 46, most=400, bulk=True)
    now, rows = 0.0, []
    for number in range(200):
        schedule.next_step(now)
        schedule.copies()
        plan = schedule.host.plan
        slow = 2.0 if number >= 100 else 1.0  # the accelerator; what goes on beside it always takes half a step
        seconds = slow * plan.seconds + 0.5 * plan.alone_s
        now += seconds
        rows.append(len(plan.first) + len(plan.second))
        schedule.ended(now, seconds, compute_s=ComputeSeconds(slow * plan.accelerator_s, plan.host_s))
    assert max(rows[60:100]) <= max(rows[20:60])
    assert max(rows[180:]) > 1.5 * max(rows[60:100])


@pytest.mark.parametrize("modes", [{PIPELINED}, {ASYNCHRONOUS}, set()])
def test_modes_that_are_not_allowed_are_not_used(modes):
    policy = StepPolicy(ttft_s=2.0, tpot_s=0.1, bulk_share=1.0, modes=frozenset(modes))
    schedule = schedule_of(host_blocks=4 * 60, policy=policy)
    assert not any(one.on_host for one in offered(schedule, 0.0, 3, most=100))
    offered(schedule, 0.0, 40, bulk=True)
    run(schedule, 0.0, 50)
    used = {mode for mode, steps in schedule.host.steps.items() if steps} - {ACCELERATOR}
    assert used == modes


def test_a_host_that_takes_no_time_is_no_problem():
    host = Host(HostTime(0.0, 0.0, 0.0, 32), 100)
    for kv_token_s, rows in ((0.0, []), (1e-6, [(False, 400), (True, 400)])):
        shares = host.shares(StepTime(0.04, 0.0, kv_token_s, 0.0, 0.0, 64), rows)
        assert [share.twice for share in shares] == [False]
        assert shares[0].kv_token_s == 0.0


def test_routers_are_told_of_room_on_the_host():
    schedule = schedule_of(host_blocks=8)
    assert len(offered(schedule, 0.0, 5)) == 5
    assert schedule.state(0.0).opens_s == 0
    assert len(offered(schedule, 0.0, 2)) == 1
    assert schedule.state(0.0).opens_s > 0


def test_a_generation_larger_than_the_accelerators_cache_is_for_the_host():
    schedule = schedule_of(blocks=2)
    assert not schedule.never(ask(0.0), 2.0)
    assert schedule.never(ask(0.0, prompt=65 * 128), 2.0)
    assert [one.on_host for one in offered(schedule, 0.0, 1)] == [True]
    assert schedule.longest_prompt(2.0) > 2 * 128


def test_a_step_has_no_more_tokens_than_the_engine_computes_in_one():
    schedule = schedule_of(policy=StepPolicy(2.0, 0.1, step_tokens=12))
    found, now = offered(schedule, 0.0, 6, prompt=400), 0.0
    assert any(one.on_host for one in found)
    for _ in range(300):
        parts = schedule.next_step(now)
        assert sum(part.tokens for part in parts) <= 12
        schedule.copies()
        now += 0.03
        schedule.ended(now, 0.03)


def test_a_step_that_failed_counts_for_nothing():
    schedule = schedule_of()
    offered(schedule, 0.0, 6)
    now, _ = run(schedule, 0.0, 3)
    schedule.next_step(now)
    counted = schedule.host.tokens, schedule.host.gained, dict(schedule.host.steps)
    schedule.ended(now + 1, 1.0, whole=False, compute_s=ComputeSeconds(host_s=1.0))
    assert counted == (schedule.host.tokens, schedule.host.gained, dict(schedule.host.steps))


def test_steps_that_take_no_time_are_no_problem():
    schedule = StepSchedule(StepTime(0.0, 0.0, 0.0, 0.0, 0.0), POLICY, 8, host=Host(QUICK, 64))
    found, now = offered(schedule, 0.0, 5) + offered(schedule, 0.0, 3, bulk=True), 0.0
    assert any(one.on_host for one in found)
    schedule.state(0.0)
    for _ in range(60):
        now, _ = run(schedule, now)
    assert not any(one.rows for one in found)


def test_another_model_beside_a_step_of_the_host_teaches_nothing():
    schedule = schedule_of()
    offered(schedule, 0.0, 6)
    now, _ = run(schedule, 0.0, 4)
    while not (parts := schedule.next_step(now)) or schedule.mode != PIPELINED:
        now += 0.1
        schedule.ended(now, schedule.planned_s if parts else 0.0)
    schedule.follow(StepTime(0.01, 0.0, 4e-6, 1e-5, 0.0, 128), QUICK, calibrated=True)
    schedule.ended(now + 0.1, 0.1, compute_s=ComputeSeconds(host_s=0.01))
    assert schedule.learning.factor == 1.0
