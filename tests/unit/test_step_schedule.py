"""What the schedule of a device that generates promises, and that no block is lost, whatever comes and goes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.generation.scheduling.blocks import BLOCK, Blocks
from deployments.generation.scheduling.chunk import ComputeSeconds, Copy
from deployments.generation.scheduling.host_side import Host
from deployments.generation.scheduling.rows import FIRST, Generation
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


def all_rows(schedule):
    return [*schedule._running, *(row for one in schedule._waiting for row in one.rows)]


def blocks_add_up(schedule):
    """Each block is free, or in tables; one that several have is full in all of them. In both caches."""
    blocks_of_one_add_up(schedule.room, [row for row in all_rows(schedule) if not row.generation.on_host])
    if schedule.host is not None:
        blocks_of_one_add_up(schedule.host.room, [row for row in all_rows(schedule) if row.generation.on_host])
        parked = {row.parked: row for row in all_rows(schedule) if row.parked is not None}
        assert parked == schedule.host.parked
        assert all(row.generation.on_host and row.generation.bulk for row in parked.values())


def blocks_of_one_add_up(room, rows):
    blocks = room._blocks
    tables = [row.table for row in rows]
    held = Counter(block for table in tables for block in table)
    assert set(held) | set(blocks._free) == set(range(blocks.count))
    assert not set(held) & set(blocks._free)
    assert len(blocks._free) == len(set(blocks._free))
    assert all(blocks._holders[block] == held[block] for block in range(blocks.count))
    every = {id(row.generation): row.generation for row in rows}.values()
    assert room.reserved == sum(one.needed_blocks for one in every)
    assert blocks.count - blocks.free == sum(one.held_blocks for one in every)
    for row in rows:
        for number, block in enumerate(row.table):
            assert held[block] == 1 or (number + 1) * BLOCK <= row.generation.prompt_tokens


@st.composite
def events(draw):
    return draw(
        st.lists(
            st.one_of(
                st.tuples(
                    st.just("offer"),
                    st.sampled_from([1, 10, 127, 128, 129, 256, 700, 4000]),
                    st.sampled_from([1, 2, 5, 40, 130]),
                    st.sampled_from([1, 1, 1, 2, 5]),
                    st.booleans(),
                ),
                st.tuples(st.just("remove"), st.integers(0, 20)),
                st.tuples(
                    st.just("step"),
                    st.lists(st.integers(0, 20), max_size=3),
                    st.booleans(),
                    st.integers(0, 9),
                    st.booleans(),
                ),
            ),
            min_size=5,
            max_size=60,
        )
    )


@settings(max_examples=150, deadline=None)
@given(events(), st.sampled_from([4, 12, 60]), st.sampled_from([None, None, 6, 40]), st.booleans())
def test_nothing_is_lost_and_no_written_block_is_shared(happens, count, host_count, trusts):
    schedule, now, live = schedule_of(count, host_blocks=host_count), 0.0, []
    steps = Steps(schedule)
    if trusts:
        has_learned_that_answers_are_short(schedule)
    for what, *how in happens:
        if what == "offer":
            prompt, most, answers, bulk = how
            one = generation(prompt, most, now + 2.0, answers, bulk=bulk)
            if schedule.offer(now, one):
                live.append(one)
        elif what == "remove" and live:
            schedule.remove(now, live.pop(how[0] % len(live)))
        elif what == "step":
            now = steps.run(now, live, *how)
        live = [one for one in live if one.rows]
        blocks_add_up(schedule)
        schedule.state(now)
    for _ in range(3000):
        if not live:
            break
        now = steps.run(now, live)
        live = [one for one in live if one.rows]
    assert not live
    for room in [schedule.room] if host_count is None else [schedule.room, schedule.host.room]:
        assert room._blocks.free == room.block_count
        assert room.reserved == room._reserved_bulk == 0
    assert not schedule._running
    assert not schedule._waiting


def has_learned_that_answers_are_short(schedule):
    for _ in range(5000):
        schedule.room.lengths.ended(2, 500)


def test_where_answers_are_short_more_are_admitted_than_the_longest_would_fit():
    schedule, now = schedule_of(blocks=40), 0.0
    has_learned_that_answers_are_short(schedule)
    live = []
    while schedule.offer(now, one := generation(prompt=10, most=500, due=now + 2)):
        live.append(one)
    assert len(live) > 12  # of four blocks each
    steps = Steps(schedule)
    for _ in range(5000):  # and each becomes as long as it may: none waits for ever
        now = steps.run(now, [one for one in live if one.rows])
        if not schedule._running:
            break
    assert schedule.room.stalls
    assert not any(one.rows for one in live)
    assert schedule.room._trust < 0.5


class Steps:
    """Runs a schedule's steps; two of them run where the next one is composed ahead."""

    def __init__(self, schedule):
        self.schedule, self.running = schedule, []

    def compose(self, now, live):
        schedule, host = self.schedule, self.schedule.host
        run = {part.row.generation for parts, _ in self.running for part in parts}
        before = {row: row.computed for one in live if one not in run for row in one.rows}
        parked = {} if host is None else dict(host.parked)
        parts = schedule.next_step(now)
        assert not {id(row) for row in parked.values()} & {id(part.row) for part in parts}
        assert len({id(part.row) for part in parts}) == len(parts)
        for row, start, tokens, wanted, batch in parts:
            assert batch == FIRST or (row.generation.on_host and tokens == 1)
            assert (before.get(row, start), tokens > 0) == (start, True)
            assert len(row.table) * BLOCK >= start + tokens
            assert wanted == (start + tokens >= row.generation.prompt_tokens)
            assert start < row.generation.prompt_tokens + row.generation.most_tokens - 1
        copies = schedule.copies()
        assert len({(copy.target, copy.to_host) for copy in copies}) == len(copies)
        assert set(schedule.called_off()).isdisjoint(host.parked if host else ())
        blocks_add_up(schedule)
        self.running.append((parts, parked))

    def run(self, now, live, ends=(), removes=False, parked_still=0, ahead=False):
        """A step, with rows that end in it, and a generation that is removed while it runs. Of the parked rows all
        arrive but the last so many.
        """
        schedule = self.schedule
        if not self.running:
            self.compose(now, live)
        if ahead and self.running[0][0]:
            self.compose(now + 0.02, live)
            if not self.running[1][0]:
                self.running.pop()
        parts, parked = self.running.pop(0)
        if removes and live:
            schedule.remove(now, live[0])
        wanted = [part.row for part in parts if part.wanted and part.row in part.row.generation.rows]
        arrived = list(parked)[: max(0, len(parked) - parked_still)]
        ended = [wanted[at % len(wanted)] for at in ends if wanted]
        schedule.ended(now + 0.03, 0.03, ended, arrived=arrived, compute_s=ComputeSeconds(0.02, 0.01))
        if self.running:
            following, parked = self.running[0]
            self.running[0] = following, {at: row for at, row in parked.items() if at not in arrived}
        return now + 0.03


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


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 600)), min_size=1, max_size=8))
def test_a_block_is_free_when_nobody_holds_it(tables):
    blocks = Blocks(60)
    held = []
    for tokens, shared in tables:
        if (tokens + BLOCK - 1) // BLOCK <= blocks.free:
            table = []
            blocks.grow(table, tokens)
            held += [table, blocks.share(table, min(tokens, shared))]
    for table in held:
        blocks.give_back(table)
    assert sorted(blocks._free) == list(range(60))


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
