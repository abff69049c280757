"""Whatever comes and goes at a device that generates: no block is lost, and all that was admitted ends."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import FIRST, Generation
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step import ComputeSeconds
from deployments.generation.scheduler.step_time import HostTime, StepTime

MODEL = StepTime(0.02, 1.4e-4, 2e-7, 1.4e-4, 6e-9, 128)
HOST = HostTime(row_s=1e-4, kv_token_s=2e-6, copy_token_s=1e-5, layers=4)
POLICY = StepPolicy(ttft_s=2.0, tpot_s=0.1)


def schedule_of(blocks, num_cpu_blocks=None):
    return StepScheduler(MODEL, POLICY, blocks, host=num_cpu_blocks and HostCache(HOST, num_cpu_blocks))


def generation(prompt, most, due, answers=1, *, bulk=False):
    return Generation(prompt, most, due, None if bulk else POLICY.tpot_s, answers, bulk)


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


def all_rows(schedule):
    return [*schedule.running, *(row for one in schedule.waiting for row in one.rows)]


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


@settings(max_examples=60, deadline=None)
@given(events(), st.sampled_from([4, 12, 60]), st.sampled_from([None, None, 6, 40]), st.booleans())
def test_nothing_is_lost_and_no_written_block_is_shared(happens, count, host_count, trusts):
    schedule, now, live = schedule_of(count, num_cpu_blocks=host_count), 0.0, []
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
    assert not schedule.running
    assert not schedule.waiting


def has_learned_that_answers_are_short(schedule):
    for _ in range(500):
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
        if not schedule.running:
            break
    assert not any(one.rows for one in live)
    assert schedule.room._trust < 0.5
