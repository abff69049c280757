"""Blocks that are found again: by which keys, in which order they go, and what a later prompt gains from them."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.virtual_time import virtual
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.engine.steps import Computed
from deployments.generation.planned_steps import PlannedStep
from deployments.generation.scheduler.block_manager import BlockManager
from deployments.generation.scheduler.block_pool import BLOCK, Blocks
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.prefix_keys import PrefixKeys
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import Generation, Row
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepLoad
from tests.kit.generation_replicas import answer_to
from tests.unit.test_step_loop import BLOCKS, Router, prompt, works, world
from tests.unit.test_step_scheduler import admitted, exact

IDS = np.arange(1000, dtype=np.int32)


def keys(ids=IDS, scope=b"a", secret=b"s", block_size=BLOCK):
    return PrefixKeys(secret, scope, block_size, ids)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_each_full_block_has_a_key_that_depends_on_all_tokens_so_far_on_who_shares_it_and_on_the_secret():
    assert (len(keys()), len(set(keys())), {len(key) for key in keys()}) == (7, 7, {16})
    assert keys(IDS[:400]) == keys()[:3]
    other = IDS.copy()
    other[BLOCK] = 7
    assert [a == b for a, b in zip(keys(other), keys(), strict=True)] == [True] + [False] * 6
    assert not {*keys(scope=b"b"), *keys(secret=b"t"), *keys(block_size=2 * BLOCK)} & {*keys()}


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_sequence_that_grows_has_the_keys_of_the_whole(length):
    growing = keys(IDS[:length])
    for token in IDS[length:].tolist():
        growing.add(token)
    assert growing == keys()


# --- blocks -----------------------------------------------------------------------------------------------------------


def computed(pool, table, names):
    for block, key in zip(table, names, strict=False):
        pool.name(block, key)
        pool.mark_computed(block, key)


def test_free_blocks_with_keys_are_taken_last_the_least_recently_used_and_the_ends_of_prompts_first():
    pool, tables = Blocks(6, 1), [[], []]
    for table, names in zip(tables, ([b"a", b"b"], [b"c", b"d"]), strict=True):
        pool.grow(table, 2)
        computed(pool, table, names)
    for table in tables:
        pool.give_back(table)
    assert (pool.free, pool.count_found([b"a", b"b"]), pool.count_found([b"c", b"d", b"e"])) == (6, 2, 2)
    again, other, gone = pool.reuse([b"a"]), [], []
    pool.give_back(again)  # now used later than all others
    for left in ([b"b", b"d", b"c", b"a"], [b"b", b"d", b"c", b"a"], [b"d", b"c", b"a"], [b"c", b"a"], [b"a"], []):
        pool.grow(other, len(other) + 1)
        gone.append([key for key in (b"b", b"d", b"c", b"a") if pool.count_found([key])] == left)
    assert all(gone)
    assert pool.free == 0


def test_a_block_is_found_only_once_it_is_computed_and_never_after_it_was_taken_for_something_else():
    pool, table, other = Blocks(2, 1), [], []
    pool.grow(table, 2)
    pool.name(table[0], b"a")
    assert pool.count_found([b"a"]) == 0
    first = table[0]
    pool.give_back(table)  # its last step still runs
    pool.mark_computed(first, b"a")
    assert pool.count_found([b"a"]) == 1
    pool.grow(other, 2)
    pool.mark_computed(first, b"a")
    assert pool.count_found([b"a"]) == 0


def test_of_two_blocks_with_the_same_contents_one_has_the_key():
    pool, table = Blocks(3, 1), []
    pool.grow(table, 2)
    one, two = table
    for block in table:
        pool.name(block, b"a")
    pool.mark_computed(one, b"a")
    pool.give_back(table)
    pool.mark_computed(two, b"a")
    assert (pool.reuse([b"a"]), pool.free, list(pool._kept)) == ([one], 2, [])


def test_a_spare_block_is_overwritten_so_its_key_is_forgotten():
    pool, table = Blocks(1, 1), []
    assert pool.spare() == 0
    pool.grow(table, 1)
    assert pool.spare() is None
    computed(pool, table, [b"a"])
    pool.give_back(table)
    assert (pool.spare(), pool.free, pool.count_found([b"a"])) == (0, 1, 0)


def test_what_is_forgotten_is_free_as_any_other_block():
    pool, table = Blocks(2, 1), []
    pool.grow(table, 2)
    computed(pool, table, [b"a", b"b"])
    pool.give_back(table)
    pool.forget()
    assert (pool.count_found([b"a"]), pool.free, sorted(pool._free)) == (0, 2, [0, 1])


class Model:
    """The same, naively: for each block its key, and when its last holder gave it back."""

    def __init__(self, count):
        self.count, self.tables, self.keys, self.since, self.now = count, [], {}, {}, 0

    @property
    def used(self):
        return {block for table in self.tables for block in table}

    def take(self, block):
        """It must be one without a key, if there is any free, else the least recently used one."""
        free = set(range(self.count)) - self.used
        plain = free - self.keys.keys()
        assert block in (plain or {min(free, key=self.since.__getitem__)})
        self.keys.pop(block, None)

    def give_back(self, at):
        table = self.tables.pop(at)
        for block in reversed(table):
            if block not in self.used:
                self.since[block] = self.now = self.now + 1


STEPS = st.lists(st.tuples(st.sampled_from("ggggggsseeeeef"), st.integers(0, 9), st.integers(0, 5)), max_size=60)


@given(STEPS)
def test_no_block_is_both_free_and_used_and_the_least_recently_used_goes_first(steps):
    pool, model, tables = Blocks(12, 1), Model(12), []
    for what, which, length in steps:
        at = which % max(1, len(tables))
        names = [b"%d %d" % (which % 3, place) for place in range(length)]  # three conversations
        if what == "g" and length <= pool.free:  # a prompt, some blocks of which are there
            held = pool.count_found(names)
            table = pool.reuse(names[:held])
            assert [model.keys.get(block) for block in table] == names[:held]
            model.tables.append(table.copy())
            tables.append(table)
            for key in names[held:]:
                if not pool.free:
                    break
                pool.grow(table, len(table) + 1)
                model.take(table[-1])
                model.tables[-1].append(table[-1])
                computed(pool, table[-1:], [key])
                if key not in model.keys.values():
                    model.keys[table[-1]] = key
        elif what == "s" and tables:
            tables.append(pool.share(tables[at], length))
            model.tables.append(model.tables[at][:length])
        elif what == "e" and tables:
            pool.give_back(tables.pop(at))
            model.give_back(at)
        elif what == "f":
            pool.forget()
            model.keys.clear()
        assert tables == model.tables
        assert sorted([*pool._free, *pool._kept, *model.used]) == list(range(12))
        holders = [sum(block in table for table in model.tables) for block in range(12)]
        assert pool._holders == holders
        assert {key: block for block, key in model.keys.items()} == pool._found


# --- a device that generates ------------------------------------------------------------------------------------------


def conversation(tokens=400, most=4, scope=b"a", ids=IDS, due=16.0, **more):
    return Generation(tokens, most, due, 8.0, keys=keys(ids[:tokens], scope), **more)


def run(schedule, now=0.0, **how):
    chunks = [(part.row.generation, part.start, part.tokens) for part in schedule.next_step(now)]
    schedule.ended(now, schedule.planned_s, **how)
    return chunks


def test_a_later_prompt_computes_what_no_full_block_holds_and_at_least_its_last_token():
    schedule = exact()
    first = admitted(schedule, 0.0, conversation())
    while first.rows:
        run(schedule)
    for tokens, start in ((400, 384), (385, 384), (384, 256), (128, 0), (700, 384)):
        one = conversation(tokens)
        assert schedule.offer(0.0, one).admitted
        assert (one.cached, one.prompt_left) == (start, tokens - start)
        assert one.predicted_s == pytest.approx(1 + (tokens - start) / 64)
        assert run(schedule) == [(one, start, tokens - start)]
        schedule.remove(0.0, one)
    assert schedule.room._blocks.free == schedule.block_count


@pytest.mark.parametrize(("scope", "cached"), [(b"a", 256), (b"b", 0)])
def test_those_of_two_scopes_never_share(scope, cached):
    schedule = exact()
    admitted(schedule, 0.0, conversation(300))
    run(schedule)
    assert admitted(schedule, 0.0, conversation(300, scope=scope)).cached == cached


def test_what_the_running_step_computes_is_not_there_yet():
    schedule = exact(policy=StepPolicy(16.0, 8.0, max_num_batched_tokens=128))
    admitted(schedule, 0.0, conversation(300))
    schedule.next_step(0.0)
    for cached in (0, 128, 256):
        schedule.next_step(1.0)  # counts the running step as ended
        one = conversation(300)
        assert schedule.room.count_cached(one) == cached
        schedule.ended(1.0, 1.0)
        assert schedule.room.count_cached(one) == min(256, cached + 128)


def test_a_prompt_whose_only_token_ends_it_leaves_its_blocks():
    schedule = exact()
    one = admitted(schedule, 0.0, conversation(300, most=1))
    schedule.next_step(0.0)
    schedule.next_step(1.0)
    assert (one.rows, schedule.room.count_cached(one)) == ([], 0)
    schedule.ended(1.0, 1.0)
    assert schedule.room.count_cached(one) == 256


@pytest.mark.parametrize("how", ["left out", "forgotten"])
def test_what_a_step_has_not_computed_is_never_found(how):
    schedule = exact()
    one = admitted(schedule, 0.0, conversation(300))
    schedule.next_step(0.0)
    schedule.next_step(1.0)
    if how == "forgotten":  # it has failed
        schedule.room.forget_contents()
    else:
        schedule.left_out(one.rows)
    schedule.ended(1.0, 1.0)
    assert schedule.room.count_cached(conversation(300)) == 0


def test_the_host_neither_leaves_blocks_nor_finds_any():
    schedule = exact(blocks=4, host=HostCache(HostTime(1e-3, 0.0, 0.0, 1), 40))
    admitted(schedule, 0.0, conversation(300, 150))
    run(schedule)
    one = admitted(schedule, 0.0, conversation(300, 150))
    assert (one.on_host, one.cached, one.prompt_left) == (True, 0, 300)
    other = schedule.offer(0.0, conversation(300, 150, scope=b"b"))
    assert other.on_host
    run(schedule)
    assert schedule.room.count_cached(conversation(300, 150, scope=b"b")) == 0


def test_shared_blocks_never_make_a_cache_promise_more_than_it_has():
    """Both may need 5 of 8 blocks. Of the 3 that they share, none is free when the first of them ends."""
    room = BlockManager(8)
    first, second = (Generation(300, 341, 0.0, keys=keys(IDS[:300])) for _ in range(2))
    first.rows = [Row(first, 0)]
    room.admit(first)
    room.grow(first.rows[0], 300, ())
    first.rows[0].computed = 300
    room.mark_computed(room.filled(first.rows[0], 0))
    second.cached = room.count_cached(second)
    second.rows = [Row(second, 0)]
    room.admit(second)
    assert (second.cached, room.reserved, room._blocks.free) == (256, 10, 5)
    assert room.likely_blocks((Generation(300, 341, 0.0),)) == 15  # nobody has ended, so all may reach their maximum


def test_a_device_expects_what_its_cache_spares_it():
    schedule = exact()
    for _ in range(200):
        one = conversation(700, 2)
        schedule.offer(0.0, one)
        while one.rows:
            run(schedule)
    typical = schedule.admission.reserve.typical(0.0, schedule.policy)
    assert (typical.prompt_tokens, typical.cached) == (700, 640)
    assert schedule.admission.reserve.typical(0.0, schedule.policy, 500.0).cached == 0
    assert 1.0 <= schedule.state(0.0).first_s < 1.5


@pytest.mark.parametrize("name", ["neo-a10g-llama-3.1-8b", "l4-llama-3.1-8b"])
def test_the_second_turn_of_a_long_conversation_costs_its_new_tokens(name):
    device = EMULATED_ACCELERATORS[name]
    schedule = exact_of(device)
    ids = np.arange(33_000, dtype=np.int32)
    first = admitted(schedule, 0.0, Generation(32_000, 200, 60.0, None, keys=keys(ids[:32_000])))
    while first.first_at is None:
        run(schedule)
    for token in ids[32_000:32_200].tolist():
        first.keys.add(token)
    while first.rows:
        run(schedule)
    second = Generation(32_700, 200, 60.0, None, keys=keys(ids[:32_700]))
    alone_s = device.step_time.seconds(StepLoad().with_chunk(32_200, 500))
    assert schedule.offer(0.0, second).first_s <= 1.3 * alone_s
    took_s = 0.0
    while second.first_at is None:
        run(schedule)
        took_s += schedule.planned_s
    assert took_s <= 1.3 * alone_s < 0.1 * device.step_time.seconds(StepLoad().with_chunk(0, 32_700))


def exact_of(device):
    schedule = StepScheduler(device.step_time, StepPolicy(60.0, 1.0), device.blocks)
    schedule.learning.margin = schedule.scatter.margin = 0.0
    return schedule


# --- a replica --------------------------------------------------------------------------------------------------------


def cached(router, number):
    return sum(tokens for report in router.frames for of, tokens in report.cached if of == number)


@virtual
async def test_a_conversation_finds_its_prompts_and_answers_and_two_conversations_do_not_mix():
    stepper, _ = world()
    router, said = Router(stepper), {b"a": prompt(300, 1), b"b": prompt(300, 1)}
    before = dict.fromkeys(said, 0)
    for turn in range(4):
        numbers = {scope: router.ask(ids, 140, cache_scope=scope) for scope, ids in said.items()}
        await stepper.drained()
        for scope, number in numbers.items():
            answer = router.tokens[number, 0]
            assert answer == answer_to(said[scope], 140)
            assert cached(router, number) == before[scope]
            before[scope] = (len(said[scope]) + 139) // BLOCK * BLOCK  # the last token is never in the cache
            said[scope] = [*said[scope], *answer, *prompt(10 + turn, scope[0])]
    assert stepper.schedule.room._blocks.free == BLOCKS


@virtual
async def test_a_prompt_without_numbers_takes_from_the_cache_only_what_is_its_own(monkeypatch):
    """A client's own rules may leave no token: that must not cost others what is cached for them."""
    stepper, device = world()
    router, step = Router(stepper), device.steps.step
    other, own = prompt(300, 1), prompt(300, 2)
    for ids, scope in ((other, b"a"), (own, b"b")):
        router.ask(ids, 5, cache_scope=scope)
        await stepper.drained()

    def broken(work):  # the probe is well
        return Computed(step(work).logits * (np.nan if work.chunks[0].start == 256 else 1.0))

    monkeypatch.setattr(device.steps, "step", broken)
    bad = router.ask([*own, 1], 5, cache_scope=b"b")
    await stepper.drained()
    monkeypatch.undo()
    assert (cached(router, bad), set(router.failed)) == (256, {bad})
    again = [router.ask(ids, 5, cache_scope=scope) for ids, scope in ((other, b"a"), (own, b"b"))]
    await stepper.drained()
    assert [cached(router, number) for number in again] == [256, 0]
    assert stepper.schedule.room._blocks.free == BLOCKS


@virtual
async def test_answers_stay_right_while_conversations_push_each_other_out():
    stepper, _ = world(blocks=12)
    router, asked = Router(stepper), {}
    for turn in range(12):
        for talk in range(3):
            ids = prompt(900, talk)[: 300 + 50 * turn]
            asked[router.ask(ids, 5, left_s=9.0, cache_scope=b"a")] = ids
            await stepper.drained()
    some = [cached(router, number) for number in asked]
    assert any(some)
    assert not all(some[3:])
    for number, ids in asked.items():
        assert router.tokens[number, 0] == answer_to(ids, 5)


@virtual
async def test_several_answers_leave_their_prompt_and_no_more():
    stepper, _ = world()
    router, ids = Router(stepper), prompt(300)
    for answers, hit in ((3, 0), (3, 256), (1, 256)):
        number = router.ask(ids, 140, answers=answers, cache_scope=b"a")
        await stepper.drained()
        assert cached(router, number) == hit
        assert all(router.tokens[number, answer] == answer_to(ids, 140) for answer in range(answers))


@pytest.mark.parametrize("how", ["raises", "gives no numbers", "a probe", "planned steps", "no scope"])
@virtual
async def test_what_may_be_wrong_or_overwritten_is_not_found_again(how):
    stepper, device = world(blocks=8 if how == "a probe" else BLOCKS)
    router, ids, step = Router(stepper), prompt(300), device.steps.step
    scope = None if how == "no scope" else b"a"
    router.ask(ids, 2, cache_scope=scope)
    await stepper.drained()
    if how == "planned steps":
        await stepper.planned.time(works(PlannedStep(1, 100)), 1)
    elif how == "a probe":
        router.ask(prompt(700, 5), 2)  # takes the blocks without a key
        await asyncio.sleep(0.3)
        assert not stepper.schedule.room._blocks._free
        await stepper.probe()
        await stepper.drained()
    elif how == "raises":
        device.problem = RuntimeError("out of memory")
    elif how == "gives no numbers":  # not to the probe either
        device.steps.step = lambda work: Computed(step(work).logits * np.nan)
    if how in ("raises", "gives no numbers"):
        router.ask(prompt(10, 3), 2)
        await stepper.drained()
        device.steps.step = step
        assert router.failed
    again = router.ask(ids, 5, cache_scope=scope)
    await stepper.drained()
    assert cached(router, again) == (128 if how == "a probe" else 0)
    assert router.tokens[again, 0] == answer_to(ids, 5)
