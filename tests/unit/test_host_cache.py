"""A replica whose host holds a part of the cache: who is admitted where, who moves, and what is learned."""

import math
from itertools import chain

import pytest

from deployments.generation.scheduler import host_part
from deployments.generation.scheduler.block_manager import BlockManager
from deployments.generation.scheduler.forecast import HostShare
from deployments.generation.scheduler.hybrid.host_cache import HostCache, ParkedRows
from deployments.generation.scheduler.hybrid.planner import HybridPlan, HybridPlanner
from deployments.generation.scheduler.kept_room import KeptRoom
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import Generation, Row
from deployments.generation.scheduler.state import ACCELERATOR, ASYNCHRONOUS, PIPELINED, StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepTime
from deployments.generation.scheduler.work import ComputeSeconds, Copy

MODEL = StepTime(0.02, 0.0, 4e-6, 1e-5, 0.0, 128)
POLICY = StepPolicy(ttft_s=2.0, tpot_s=0.1, bulk_share=1.0)
QUICK = HostTime(row_s=1e-4, kv_token_s=8e-6, copy_token_s=1e-6, layers=4)
SLOW = HostTime(row_s=1e-4, kv_token_s=4e-4, copy_token_s=1e-6, layers=4)


def schedule_of(blocks=16, num_cpu_blocks=64, time=QUICK, policy=POLICY):
    return StepScheduler(MODEL, policy, blocks, host=HostCache(time, num_cpu_blocks))


def ask(now, *, prompt=500, most=12, bulk=False):
    return Generation(prompt, most, now + 2.0, None if bulk else POLICY.tpot_s, bulk=bulk)


def offered(schedule, now, count, **how):
    """Those of so many that are admitted."""
    return [one for one in (ask(now, **how) for _ in range(count)) if schedule.offer(now, one).admitted]


# --- what is counted on, in exact seconds -----------------------------------------------------------------------------

EXACT = StepTime(1.0, 0.0, 1 / 64, 0.0, 0.0, 100)
QUARTER = HostTime(row_s=0.25, kv_token_s=0.0, copy_token_s=1 / 128, layers=4)  # a block is copied in a second


def planned(mode=PIPELINED, worth=10.0, alone_s=0.05, accelerator_s=0.05, first=(0,), second=(), host_s=0.0):
    return HybridPlan(mode, 0.1, 0.0, worth, alone_s, accelerator_s, first, second, (), host_s)


@pytest.mark.parametrize(
    ("time", "blocks", "row_blocks", "rows", "slowdown", "shares"),
    [
        # An answer of the accelerator, in a step of 1 s and 1 s of attention. In one batch nine tenths of a second fit
        # 3.6 of the host, 4.6 in 2 s together; in two batches of 3 s all of it, 11.8 in 3 s.
        (QUARTER, 99, 1, [(False, 64)], 1.0, [(0.25 / 0.45, False), (0.25 / 0.9, True)]),
        (QUARTER, 2, 1, [(False, 64)], 1.0, [(0.25 / 0.45, False)]),  # 3 in 2 s, or in 3 s
        (QUARTER, 8, 4, [(False, 64)], 1.0, [(0.25 / 0.45, False)]),
        (QUARTER, 8, 1, [(False, 64)], 1.0, [(0.25 / 0.45, False), (0.25 / 0.9, True)]),
        (QUARTER, 5, 1, [(False, 64)], 1.0, [(0.25 / 0.45, False)]),  # 4.6 in 2 s; 6 in 3 s
        (QUARTER, 6, 1, [(False, 64)], 1.0, [(0.25 / 0.45, False), (0.25 / 0.9, True)]),  # 7 in 3 s
        (QUARTER, 99, 1, [(False, 64)], 2.0, [(0.5 / 0.45, False), (0.5 / 0.9, True)]),
        (QUARTER, 0, 1, [(False, 64), (True, 9), (True, 9)], 1.0, [(0.25 / 0.45, False)]),  # both in either
        (HostTime(0.25, 1 / 64), 99, 1, [(False, 64), (True, 60), (True, 36)], 4.0, [(1 / 0.45, False)]),
        (QUARTER, 99, 1, [], 1.0, [(0.25 / 1e-3, False), (0.25 / 0.9, True)]),  # nothing hides it in one batch
        (HostTime(0.0, 0.0), 99, 1, [(False, 64)], 1.0, [(0.0, False)]),
    ],
)
def test_what_a_forecast_may_count_on(time, blocks, row_blocks, rows, slowdown, shares):
    host = HostCache(time, blocks)
    host.learning.slowdown = slowdown
    found = host.shares(EXACT, rows, row_blocks)
    assert [(share.row_s, share.twice) for share in found] == [(pytest.approx(row_s), twice) for row_s, twice in shares]


@pytest.mark.parametrize(
    ("new_prompts", "within_s", "shares"),
    [
        # Steps as above, of 2 s, or 3 s with two batches. A new prompt of 8 tokens for each answer's token takes a
        # second beside the accelerator's row, and another for each of the host.
        (0.0, math.inf, [(0.25 / 0.45, False), (0.25 / 0.9, True)]),
        (0.0, 2.5, [(0.25 / 0.45, False)]),  # no step of 3 s is in time
        (8.0, math.inf, [(0.25 / (0.9 / 6.6), False), (0.25 / 0.9, True)]),  # the host has 0.9 of 6.6 s
        (8.0, 5.0, [(0.25 / (0.9 / 5.0), False)]),  # 2 of the host in a step of 5 s, but 1 with two batches
    ],
)
def test_a_forecast_counts_on_what_new_prompts_leave_of_the_time(new_prompts, within_s, shares):
    host, model = HostCache(QUARTER, 99), StepTime(1.0, 0.0, 1 / 64, 1 / 8, 0.0, 0)
    found = host.shares(model, [(False, 64)], 1, new_prompts, within_s)
    assert [(share.row_s, share.twice) for share in found] == [(pytest.approx(row_s), twice) for row_s, twice in shares]


def test_blocks_that_are_reserved_are_not_counted_on():
    host = HostCache(HostTime(0.25, 0.125), 6)
    assert host.shares(EXACT, [(False, 64)])[0].kv_token_s == pytest.approx(0.125 / 0.45)
    assert len(host.shares(EXACT, [(False, 64)])) == 2
    host.room.reserved = 1
    assert len(host.shares(EXACT, [(False, 64)])) == 1


@pytest.mark.parametrize(
    ("passed", "urgent", "parked", "joins"),
    [(3, False, True, False), (4, False, True, True), (4, True, True, False), (4, False, False, False)],
)
def test_after_four_pipelined_steps_parked_rows_may_join_one(passed, urgent, parked, joins):
    host = HostCache(QUARTER, 9)
    if parked:
        host.parked.park(Row(ask(0.0), 0))
    for _ in range(passed):
        host.ended(planned(), 0.1, ComputeSeconds(), 0)
    assert host.joins(urgent=urgent) is joins
    host.ended(planned(ASYNCHRONOUS), 0.1, ComputeSeconds(), 0)
    assert not host.joins(urgent=False)


def test_parked_rows_arrive_or_are_called_off():
    parked, rows = ParkedRows(), [Row(ask(0.0), number) for number in range(3)]
    for row in rows:
        parked.park(row)
    assert [(row.parked, row.coming) for row in rows] == [(1, 1), (2, 1), (3, 1)]
    parked.call_off(rows[1])
    parked.call_off(rows[1])
    assert parked.arrive([2, 3]) == [rows[2]]
    assert [(row.parked, row.coming) for row in rows] == [(1, 1), (None, 1), (None, 0)]
    assert (parked, parked.called_off(), parked.called_off()) == ({1: rows[0]}, [2], [])


def test_nothing_is_left_of_the_host_when_all_is_cleared():
    schedule = StepScheduler(EXACT, POLICY, 20, host=HostCache(QUARTER, 9))
    (row,) = lying(schedule.host.room, 1, on_host=True)
    schedule.host.parked.park(row)
    schedule.next_step(0.0)
    assert schedule.mode == ASYNCHRONOUS
    schedule.clear()
    assert (schedule.parked, schedule.called_off(), schedule.mode) == ({}, [1], ACCELERATOR)
    assert schedule.host.room.reserved == 0


@pytest.mark.parametrize(
    ("plan", "arrived", "counts"),
    [
        (planned(ACCELERATOR, first=()), 0, ([1, 0, 0], 0, 0.0, 10.0)),
        # In twice the time that it needs alone the accelerator would have made twice as many.
        (planned(first=(0, 1), second=(2,)), 4, ([0, 1, 0], 7, 7 + 10 - 20.0, 20.0)),
        (planned(ASYNCHRONOUS, alone_s=0.2, first=()), 1, ([0, 0, 1], 1, 1 + 10 - 5.0, 5.0)),
        (None, 1, ([0, 0, 0], 0, 0.0, 0.0)),
    ],
)
def test_what_the_host_gained(plan, arrived, counts):
    host = HostCache(QUARTER, 9)
    host.ended(plan, 0.1, ComputeSeconds(), arrived)
    assert (list(host.steps.values()), host.tokens, host.gained, host.alone) == counts
    host.ended(plan, 0.1, ComputeSeconds(1.0, 1.0), arrived, whole=False)
    assert (host.tokens, host.accelerator_slowdown) == (counts[1], 1.0)


def test_a_slow_accelerator_would_have_made_less_alone():
    host = HostCache(QUARTER, 9)
    host.accelerator_slowdown = 2.0
    host.ended(planned(), 0.1, ComputeSeconds(), 0)
    assert (host.gained, host.alone) == (1.0, 10.0)


@pytest.mark.parametrize(
    ("plan", "took_s", "slowdown"),
    [
        (planned(), 0.1, 1.0 + 0.05 * 1.0),
        (planned(first=(), second=(0,), worth=0.0), 0.1, 1.05),
        (planned(worth=0.0), 0.1, 1.05),
        (planned(), 0.025, 1.0 - 0.05 * 0.5),
        (planned(), 1.0, 1.0 + 0.05 * 3.0),  # four times as slow as it was is the most that is believed
        (planned(), 0.0, 1.0),  # nobody measured it
        (planned(worth=0.0, first=()), 0.1, 1.0),  # parked rows alone pass few layers
    ],
)
def test_how_slow_the_accelerator_is(plan, took_s, slowdown):
    host = HostCache(QUARTER, 9)
    host.learning.slowdown = 3.0
    host.ended(plan, 0.1, ComputeSeconds(took_s), 0)
    assert host.accelerator_slowdown == pytest.approx(slowdown)
    assert host.planner(EXACT) == HybridPlanner(EXACT, QUARTER, host.learning.slowdown / host.accelerator_slowdown)


@pytest.mark.parametrize(
    ("planned_s", "took_s", "parked", "factors"),
    [
        (0.02, 0.03, False, [1.5]),  # after 20 ms that were planned
        (0.019, 0.0285, False, [1.0, 1.5]),
        (0.05, 0.08, True, [1.0, 1.5]),  # in the first step parked rows are still computed for
        (0.05, 0.0, False, [1.0]),
    ],
)
def test_how_slow_the_host_is(planned_s, took_s, parked, factors):
    host, found = HostCache(QUARTER, 9), []
    if parked:
        host.parked.park(Row(ask(0.0), 0))
    for _ in factors:
        host.ended(planned(host_s=planned_s), 0.1, ComputeSeconds(0.05, took_s), 0)
        found.append(host.learning.slowdown)
    assert found == factors


def test_a_host_without_work_may_be_quick_again():
    host = HostCache(QUARTER, 9)
    host.learning.slowdown = 3.0
    host.ended(planned(host_s=0.0), 0.1, ComputeSeconds(), 0)
    assert host.learning.slowdown == pytest.approx(3.0 - 0.002 * 2.0)


def test_what_others_are_told_of_a_host():
    host = HostCache(QUARTER, 9)
    host.ended(planned(first=(0, 1)), 0.1, ComputeSeconds(), 1)
    host.ended(planned(ACCELERATOR, first=()), 0.1, ComputeSeconds(), 0)
    host.parked.park(Row(ask(0.0), 0))
    host.learning.slowdown, host.room.reserved, host.moved = 1.23456, 4, [2, 3]
    state = host.state(5)
    assert state == (5, 9, 5, 1, (1, 1, 0), 3, (2, 3), -7.0, 30.0, 1.2346)
    assert state.gained_share == pytest.approx(-7 / 30)
    assert state._replace(alone=0.0).gained_share is None
    host.room.reserved = 12
    assert host.state(5).free_blocks == 0


# --- who moves --------------------------------------------------------------------------------------------------------


def lying(room, *holds, on_host=False):
    """Rows of generations that hold so many blocks each in this room."""
    rows = []
    for blocks in holds:
        one = Generation(1, blocks * 128, 9.0, 0.1, on_host=on_host)
        room.admit(one)
        one.first_at, one.rows = 0.0, [Row(one, 0, length=2)]
        room.grow(one.rows[0], blocks * 128, ())
        rows += one.rows
    return rows


@pytest.mark.parametrize(
    ("free", "within_s", "moved"),
    [
        (20, 99.0, [2, 3, 4]),
        (20, 5.0, [2, 3]),  # a second for each block, all together
        (20, 4.99, [2]),
        (20, 4.0, [2]),  # 4 and 2 would not be in time
        (20, 3.0, [2]),
        (20, 1.9, []),
        (7, 99.0, [2, 3]),  # more than a twentieth of the accelerator's blocks stays free
        (6, 99.0, [2]),
        (4, 99.0, [2]),
        (3, 99.0, []),
    ],
)
def test_who_comes_to_the_accelerator(free, within_s, moved):
    host, room = HostCache(QUARTER, 64), BlockManager(20)
    if free < 20:
        lying(room, 20 - free)
    rows = lying(host.room, 2, 3, 4, on_host=True)
    copies = host.to_accelerator(rows, room, 1.0, within_s)
    assert [row.generation.on_host for row in rows] == [len(row.table) not in moved for row in rows]
    assert len(copies) == sum(moved)
    assert host.moved == [len(moved), 0]
    assert all(copy.from_host and not copy.to_host for copy in copies)
    assert host.room.reserved == 9 - sum(moved)


def test_a_smaller_one_comes_where_the_copies_of_a_larger_one_would_take_too_long():
    host, room = HostCache(QUARTER, 64), BlockManager(20)
    rows = lying(host.room, 4, 2, on_host=True)
    assert len(host.to_accelerator(rows, room, 1.0, 3.0)) == 2


@pytest.mark.parametrize(("free", "moved"), [(6, [4, 2]), (5, [4]), (3, [2]), (1, [])])
def test_who_goes_to_the_host(free, moved):
    host, room = HostCache(QUARTER, 64), BlockManager(20)
    lying(host.room, 64 - free, on_host=True)
    rows = lying(room, 4, 2)
    before = [list(row.table) for row in rows]
    copies = host.to_host(rows, room, 1.0)
    assert [row.generation.on_host for row in rows] == [len(row.table) in moved for row in rows]
    pairs = [
        zip(there, row.table, strict=True) for there, row in zip(before, rows, strict=True) if row.generation.on_host
    ]
    assert copies == [Copy(*pair, to_host=True) for pair in chain.from_iterable(pairs)]
    assert host.moved == [0, len(moved)]


def test_who_stays_where_it_is():
    """Who is there already, who has no row left, and who has one that is parked."""
    host, room = HostCache(QUARTER, 64), BlockManager(20)
    (here,), (ended, parked) = lying(room, 1), lying(host.room, 1, 1, on_host=True)
    ended.generation.rows = []
    host.parked.park(parked)
    assert host.to_accelerator([here, ended, parked], room, 1.0, 99.0) == []
    assert host.to_host([parked], room, 1.0) == []


@pytest.mark.parametrize(
    ("waits", "due_s", "copy_s", "moved"),
    [
        ("a prompt", 99.0, 0.79, True),
        ("a prompt", 99.0, 0.81, False),
        ("bulk", 99.0, 7.99, True),
        ("nobody", 99.0, 7.99, True),
        ("nobody", 99.0, 8.01, False),
        ("nobody", 10.0, 1.99, True),  # what is left of its time behind one step
        ("nobody", 10.0, 2.01, False),
        ("nobody", 8.5, 0.79, True),
        ("nobody", 8.5, 0.81, False),
    ],
)
def test_how_long_copies_may_take_before_a_step(waits, due_s, copy_s, moved):
    """A tenth of the longest step; up to all of it where no prompt waits and no answer is due before."""
    policy, now = StepPolicy(ttft_s=16.0, tpot_s=8.0), 100.0
    schedule = StepScheduler(EXACT, policy, 20, host=HostCache(HostTime(0.01, 0.0, copy_s / 128, layers=4), 64))
    schedule.learning.slowdown = 2.0
    (row,) = lying(schedule.host.room, 1, on_host=True)
    row.generation.tpot_s, row.generation.first_at = 99.0, now + due_s - 99.0
    schedule.running.append(row)
    if waits != "nobody":
        assert schedule.offer(now, Generation(1, 1, now + 16.0, 8.0, bulk=waits == "bulk")).admitted
    schedule.next_step(now)
    assert row.generation.on_host is not moved
    assert bool(schedule.copies()) is moved
    if moved:  # the seconds are those of a device as quick as the model
        assert schedule.planned_s == pytest.approx(1.0 + 2 / 64 + copy_s / 2.0)


@pytest.mark.parametrize(("row_s", "tokens"), [(999.0, 7 * 64), (0.0, 2 * 64 - 1)])
def test_a_step_is_not_short_for_a_row_of_the_host_that_has_no_part_in_it(row_s, tokens):
    """Steps of eight seconds; the row is due after four, of which the weights take one more in a second batch.
    The row itself takes the place of a token of the prompt.
    """
    model = StepTime(1.0, 0.0, 0.0, 1 / 64, 0.0)
    schedule = StepScheduler(model, StepPolicy(ttft_s=16.0, tpot_s=8.0), 20, host=HostCache(HostTime(row_s, 0.0), 64))
    assert schedule.offer(0.0, Generation(2000, 1, 99.0)).admitted
    (row,) = lying(schedule.host.room, 1, on_host=True)
    schedule.scatter.margin = 0.0
    row.generation.tpot_s, row.generation.first_at, schedule.crowded = 99.0, 4.0 - 99.0, True
    schedule.running.append(row)
    assert schedule.next_step(0.0)[0].tokens == tokens


def test_a_forecast_goes_by_the_first_share_of_the_host_that_keeps_all(monkeypatch):
    asked, shares = [], [HostShare(0.0, 0.0, twice=False), HostShare(1e9, 0.0, twice=True)]
    monkeypatch.setattr(HostCache, "shares", lambda _, *what: asked.append(what) or shares)
    schedule = StepScheduler(EXACT, StepPolicy(ttft_s=16.0, tpot_s=8.0), 2, host=HostCache(QUARTER, 64))
    one = Generation(300, 200, 16.0, 99.0, answers=2)
    assert schedule.offer(0.0, one).admitted
    assert one.on_host
    assert asked == [(EXACT, [(True, 300)] * 2, 2, 300 / 2 / 200, pytest.approx(99.0 / 1.1))]


@pytest.mark.parametrize(("blocks", "on_host"), [(8, False), (7, True)])
def test_room_is_kept_on_the_accelerator_alone(monkeypatch, blocks, on_host):
    kept = [Generation(4 * 128, 1, 16.0, 8.0)]
    monkeypatch.setattr(KeptRoom, "beside", lambda *_, **__: kept)
    schedule = StepScheduler(EXACT, StepPolicy(ttft_s=16.0, tpot_s=8.0), blocks, host=HostCache(QUARTER, 4))
    one = Generation(4 * 128, 1, 16.0, 8.0)
    assert schedule.offer(0.0, one).admitted
    assert one.on_host is on_host


@pytest.mark.parametrize("in_vain", [False, True])
def test_a_step_that_was_short_in_vain_is_composed_anew_without_rows_of_the_host(in_vain):
    schedule, begun = StepScheduler(EXACT, POLICY, 20, host=HostCache(QUARTER, 64)), []
    here, there, parked = lying(schedule.room, 1) + lying(schedule.host.room, 1, 1, on_host=True)
    schedule.running += [here, there, parked]
    schedule.host.parked.park(parked)

    class Composer:
        def __init__(self, rows):
            begun.append(rows)
            self.number = len(begun)

        def with_host(self, cache, planner, waiting):
            assert (cache, planner, waiting) == (schedule.host, cache.planner(EXACT, 1 / 128), schedule.waiting)
            self.was_short_in_vain = in_vain
            return self.number

    assert host_part.compose(Composer, schedule) == 1 + in_vain
    assert begun == [[there], ()][: 1 + in_vain]


@pytest.mark.parametrize(("most_tokens", "left"), [(3, 1), (2, 0)])
def test_a_parked_row_that_arrives_has_a_token_more(most_tokens, left):
    schedule = StepScheduler(EXACT, StepPolicy(ttft_s=16.0, tpot_s=8.0), 20, host=HostCache(QUARTER, 64))
    (row,) = lying(schedule.host.room, 1, on_host=True)
    row.generation.most_tokens = most_tokens
    schedule.running.append(row)
    schedule.host.parked.park(row)
    assert not schedule.next_step(0.0)
    assert (schedule.joins, schedule.mode, dict(schedule.parked)) == (True, ASYNCHRONOUS, {1: row})
    schedule.ended(1.0, 1.0, arrived=[1])
    assert (row.picked, row.computed, schedule.joins) == (2, 1, False)
    assert len(row.generation.rows) == len(schedule.running) == left


def test_without_a_host_nothing_is_parked():
    schedule = StepScheduler(EXACT, POLICY, 20)
    assert (schedule.joins, schedule.mode, schedule.parked, schedule.called_off()) == (False, ACCELERATOR, {}, [])


@pytest.mark.parametrize("asks", [False, True])
def test_nobody_comes_to_the_accelerator_while_somebody_finds_no_room_there(asks):
    schedule = StepScheduler(EXACT, StepPolicy(ttft_s=16.0, tpot_s=8.0), 20, host=HostCache(HostTime(0.01, 0.0), 64))
    (row,) = lying(schedule.host.room, 1, on_host=True)
    row.generation.tpot_s = 99.0
    schedule.running.append(row)
    if asks:
        assert schedule.offer(0.0, Generation(21 * 128, 1, 16.0, 8.0)).admitted
    assert row.generation.on_host
    schedule.next_step(0.0)
    assert row.generation.on_host is asks
    schedule.ended(2.0, 2.0)
    schedule.next_step(2.0)
    assert not row.generation.on_host  # nobody looked for room since
    assert schedule.host.room.lengths is schedule.room.lengths


@pytest.mark.parametrize(("computed", "comes"), [(0, True), (1, False)])
def test_a_prompt_that_waits_for_the_host_comes_to_an_accelerator_that_has_become_empty(computed, comes):
    schedule = schedule_of(blocks=8)
    (first,) = offered(schedule, 0.0, 1, prompt=900, most=100)
    (second,) = offered(schedule, 0.0, 1, prompt=900, most=100)
    assert (first.on_host, second.on_host) == (False, True)
    schedule.remove(0.0, first)
    schedule.crowded = False
    second.rows[0].computed = computed
    schedule.next_step(0.1)
    assert second.on_host is not comes
    assert schedule.copies() == []


# --- a schedule with a host -------------------------------------------------------------------------------------------


def test_who_finds_no_room_on_the_accelerator_is_admitted_to_the_host():
    schedule = schedule_of()
    found = offered(schedule, 0.0, 6)
    assert [one.on_host for one in found] == [False] * 4 + [True] * 2  # of four blocks each
    assert (schedule.room.reserved, schedule.host.room.reserved) == (16, 8)


def test_a_host_that_cannot_keep_the_pace_admits_only_bulk():
    schedule = schedule_of(time=SLOW)
    assert len(offered(schedule, 0.0, 6)) == 4
    refused = ask(0.0)
    assert not schedule.offer(0.0, refused).admitted
    assert not refused.on_host
    assert [one.on_host for one in offered(schedule, 0.0, 3, bulk=True)] == [True] * 3


@pytest.mark.parametrize("blocks", [24, 40])
def test_nobody_goes_to_the_host_and_comes_back_in_one_step(blocks):
    schedule = schedule_of(blocks=blocks, num_cpu_blocks=400)
    for _ in range(500):
        schedule.room.lengths.ended(2, 500)
    now, found, to_host = 0.0, [], 0
    while not found or not found[-1].on_host:
        found += offered(schedule, now, 1, prompt=10, most=500)
    while any(one.rows for one in found):
        schedule.next_step(now)
        copies = schedule.copies()
        to_host += any(copy.to_host for copy in copies)
        assert len({(copy.from_host, copy.to_host) for copy in copies}) <= 1
        now += schedule.planned_s
        schedule.ended(now, schedule.planned_s, arrived=list(schedule.host.parked))
    assert to_host


def test_routers_are_told_of_room_on_the_host():
    schedule = schedule_of(num_cpu_blocks=8)
    assert len(offered(schedule, 0.0, 5)) == 5
    assert schedule.state(0.0).opens_s == 0
    assert len(offered(schedule, 0.0, 2)) == 1
    assert schedule.state(0.0).opens_s > 0


def test_a_generation_larger_than_the_accelerators_cache_is_for_the_host():
    schedule = schedule_of(blocks=2)
    assert not schedule.admission.never(ask(0.0), 2.0)
    assert schedule.admission.never(ask(0.0, prompt=65 * 128), 2.0)
    assert [one.on_host for one in offered(schedule, 0.0, 1)] == [True]
    assert schedule.admission.longest_prompt(2.0) > 2 * 128


def test_steps_that_take_no_time_are_no_problem():
    schedule = StepScheduler(StepTime(0.0, 0.0, 0.0, 0.0, 0.0), POLICY, 8, host=HostCache(QUICK, 64))
    found, now = offered(schedule, 0.0, 5) + offered(schedule, 0.0, 3, bulk=True), 0.0
    assert any(one.on_host for one in found)
    schedule.state(0.0)
    for _ in range(60):
        schedule.next_step(now)
        now += 0.01
        schedule.ended(now, 0.0, arrived=list(schedule.host.parked))
    assert not any(one.rows for one in found)


def test_a_step_of_the_host_that_another_model_is_told_beside_teaches_nothing():
    schedule = schedule_of()
    offered(schedule, 0.0, 6)
    schedule.next_step(0.0)
    schedule._plan = planned()
    schedule.configure(EXACT, QUICK, calibrated=True)
    assert schedule.planned_s == 0
