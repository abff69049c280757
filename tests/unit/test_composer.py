"""What one step holds, by the seconds that it has. A token of a prompt takes 1/64 s, so that all sums are exact."""

import math

import pytest

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.composer import StepComposer
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.hybrid.planner import HostRow, HybridPlan
from deployments.generation.scheduler.sequences import FIRST, PARKING, SECOND, Generation, Row
from deployments.generation.scheduler.state import MODES, PIPELINED, StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepTime

TOKEN_S = 1 / 64
MODEL = StepTime(1.0, 0.125, 0.0, TOKEN_S, 0.0, 0)
POLICY = StepPolicy(ttft_s=16.0, tpot_s=8.0)  # steps of at most 8 s, and of 4 s with bulk
NOW = 100.0


def step(slow=1.0, policy=POLICY, model=MODEL, waits=()):
    """`waits`: rows that get no block."""
    return StepComposer(model, policy, slow, NOW, lambda row, _: row not in waits)


def answer(due_s=math.inf, length=10, bulk=False):
    """A row whose next token is due in so many seconds."""
    paced = math.isfinite(due_s)
    generation = Generation(length - 2, 500, NOW, 3.0 if paced else None, bulk=bulk)
    generation.first_at = NOW + due_s - 2 * 3.0 if paced else NOW
    row = Row(generation, 0, computed=length - 1, length=length)
    generation.rows = [row]
    return row


def prompt(tokens, due_s=50.0, computed=0, bulk=False):
    generation = Generation(tokens, 500, NOW + due_s, 3.0, bulk=bulk)
    row = Row(generation, 0, computed=computed)
    generation.rows = [row]
    return row


def room_s(composed):
    """The seconds that the step has, for a prompt without end."""
    composed.add_chunks([prompt(10**6)])
    return MODEL.seconds(composed.load)


def tokens_of(composed):
    return [part.tokens for part in composed.chunks]


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "longest_s"), [(16.0, 8.0, 8.0), (16.0, 2.0, 2.0), (16.0, 1.9, 2.0), (0.0, 0.1, 0.1)]
)
def test_the_longest_step(ttft_s, tpot_s, longest_s):
    assert StepPolicy(ttft_s, tpot_s).longest_step_s == longest_s


@pytest.mark.parametrize(
    ("due_s", "bulk", "paced", "at"),
    [(2.0, False, (False, NOW + 2), 2), (math.inf, False, (False, math.inf), 2), (2.0, True, (True, math.inf), 2)],
)
def test_the_order_of_rows(due_s, bulk, paced, at):
    row = answer(due_s, bulk=bulk)
    assert row.picked == at
    assert row.order == paced
    row.generation.first_at = None
    assert row.order == (bulk, row.generation.due)


# --- the accelerator's part -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow", "rows", "on_host", "seconds"),
    [
        (1.0, [], [], 8.0),
        (2.0, [], [], 4.0),
        (1.0, [5.0, 6.0], [], 5.0),  # the row with the least slack bounds the step
        (2.0, [5.0], [], 2.5),
        (1.0, [9.0], [], 8.0),
        (1.0, [math.inf], [], 8.0),
        (1.0, [1.25], [], 1.34375),  # chunks have a fifth of the rows' time at least: 0.225 s, 14 tokens
        (1.0, [-1.0], [], 1.34375),
        (1.0, [1.5], [], 1.5),
        (1.0, [], [6.0], 5.0),  # the weights are read once more
        (2.0, [], [6.0], 2.0),
        (1.0, [], [9.5], 7.0),
        (1.0, [], [7.0, 6.0, 0.0, -1.0], 5.0),  # those that are late already bound nothing
        (1.0, [], [0.0], 7.0),
        (1.0, [], [math.inf], 7.0),
        (1.0, [6.0], [6.5], 5.0),
    ],
)
def test_a_step_lasts_as_long_as_its_rows_allow(slow, rows, on_host, seconds):
    composed = step(slow)
    composed.add_rows([answer(due_s) for due_s in rows], [answer(due_s) for due_s in on_host])
    assert room_s(composed) == seconds - len(on_host) * TOKEN_S  # each displaces a token of a prompt


def test_bulk_of_the_host_keeps_a_slot_but_no_time():
    composed = step(policy=StepPolicy(16.0, 8.0, max_num_batched_tokens=100))
    composed.add_rows([], [answer(2.0, bulk=True)])
    assert room_s(composed) == 1.0 + 99 * TOKEN_S


def test_rows_that_get_no_block_are_left_out():
    waits, goes = answer(2.0), answer(5.0, length=30)
    composed = step(waits=[waits])
    composed.add_rows([waits, goes])
    assert [(part.row, part.start, part.tokens, part.wanted, part.batch) for part in composed.chunks] == [
        (goes, 29, 1, True, FIRST)
    ]
    assert (composed.load.rows, composed.load.kv_tokens) == (1, 30)
    assert room_s(composed) == 5.0


def test_blocks_are_asked_for_up_to_the_last_token():
    asked, row, begun = [], answer(length=30), prompt(40, computed=30)
    composed = StepComposer(MODEL, POLICY, 1.0, NOW, lambda *what: not asked.append(what))
    composed.add_rows([row])
    composed.add_chunks([begun])
    assert asked == [(row, 30), (begun, 40)]


def test_a_step_has_no_more_tokens_than_the_engine_computes():
    composed = step(policy=StepPolicy(16.0, 8.0, max_num_batched_tokens=10))
    composed.add_rows([answer(), answer()], [answer(), answer(), answer(bulk=True)])
    composed.add_chunks([prompt(4), prompt(9)])
    assert tokens_of(composed) == [1, 1, 4, 1]  # places are left for three rows of the host
    composed.add_chunks([prompt(3)])
    composed.add_bulk_rows([answer(bulk=True)])
    assert tokens_of(composed) == [1, 1, 4, 1]


@pytest.mark.parametrize(
    ("due_s", "computed", "tokens"),
    [
        (math.inf, 0, 7 * 32),  # of 8 s, each token takes 1/64 s and its copy as long
        (math.inf, 64, 7 * 32),  # the second that the 64 tokens before it take comes on top
        (math.inf, 64 * 64, 7 * 32),
        (5.0, 64, 92),  # a row is due: 1.125 s for it, 1 s for those before
        (5.0, 64 * 64, 0),
    ],
)
def test_a_chunk_on_the_host_copies_what_is_before_it_where_that_makes_nobody_late(due_s, computed, tokens):
    composed = StepComposer(MODEL, POLICY, 1.0, NOW, lambda *_: True, copy_token_s=TOKEN_S)
    composed.add_rows([answer(due_s)] if math.isfinite(due_s) else [])
    one = prompt(10**6, computed=computed)
    one.generation.on_host = True
    composed.add_chunks([one])
    assert sum(part.tokens for part in composed.chunks if part.row is one) == tokens


def test_chunks_of_prompts():
    waits, begun, ends, goes_on = prompt(9), prompt(40, computed=30), prompt(64), prompt(1000)
    composed = step(waits=[waits])
    composed.add_chunks([waits, begun, ends, goes_on, prompt(5)])
    found = [part[:4] for part in composed.chunks]
    assert found == [(begun, 30, 10, True), (ends, 0, 64, True), (goes_on, 0, 7 * 64 - 74, False)]
    assert composed.load.prompt_tokens == 7 * 64
    assert composed.load.pairs == 10 * 35 + 64 * 32 + 374 * 187


@pytest.mark.parametrize(
    ("slow", "rows", "prompts", "tokens"),
    [
        (1.0, [], [(512, 9.5)], [448]),  # the longest step is 8 s
        (1.0, [], [(512, 8.5)], [416]),  # 8.5 less a step of 1 s
        (2.0, [], [(512, 9.0)], [160]),
        (1.0, [answer()], [(512, 8.5)], [1, 400]),
        (1.0, [], [(256, 6.5), (256, 6.5)], [256, 32]),  # the first ends
        (1.0, [], [(256, 5.5), (256, 5.5)], [224]),  # both end in the next step
        (1.0, [], [(64, 2.0), (512, 2.5)], [64]),  # the first cannot wait for another step
        (1.0, [], [(512, 2.0)], [448]),  # it is late in any case
        (1.0, [], [(512, 8.5, 0, True)], [448]),  # bulk has no deadline
    ],
)
def test_a_step_leaves_time_for_another_one_that_ends_the_prompts_it_does_not(slow, rows, prompts, tokens):
    composed = step(slow)
    composed.add_rows(rows)
    composed.add_chunks([prompt(*one) for one in prompts])
    assert tokens_of(composed) == tokens


@pytest.mark.parametrize(
    ("slow", "bulk", "due_s", "seconds"),
    [(1.0, False, 3.0, 3.0), (2.0, False, 3.0, 1.5), (1.0, False, 9.0, 8.0), (1.0, True, 3.0, 8.0)],
)
def test_a_step_that_ends_a_prompt_is_over_when_its_first_token_is_due(slow, bulk, due_s, seconds):
    composed = step(slow)
    composed.add_chunks([prompt(10, due_s, bulk=bulk)])
    assert room_s(composed) == seconds


@pytest.mark.parametrize(
    ("knee", "before", "length", "tokens"), [(0, 0, 9, 1), (4, 0, 9, 5), (4, 0, 3, 3), (4, 1, 9, 4), (4, 0, 100, 36)]
)
def test_a_device_that_is_too_slow_goes_on_all_the_same(knee, before, length, tokens):
    """A step of it takes a second at least, and should take 0.9 s; or 1.5 s for the long prompt."""
    model = StepTime(1.0, 0.25, 0.0, TOKEN_S, 0.0, knee)
    policy = StepPolicy(0.0, 1.5 if length == 100 else 0.9)
    composed = step(policy=policy, model=model)
    for _ in range(before):
        composed.chunks.append(None)
    composed.add_chunks([prompt(length)])
    assert sum(part.tokens for part in composed.chunks[before:]) == tokens


@pytest.mark.parametrize(
    ("pair_s", "rows", "prompts", "tokens"),
    [
        (0.0, 0, [2, 2, 9], [2, 2, 4]),  # eight in all
        (0.0, 0, [9, 2], [9]),
        (0.0, 5, [2, 9], [2, 1]),
        (0.0, 8, [2], []),
        (0.004, 0, [2, 2], [2, 2]),  # both together 0.8 % of a step for 2 * 2 / 2 pairs
        (0.006, 0, [2, 2], [2, 1]),
    ],
)
def test_a_step_that_is_too_long_takes_along_what_makes_it_hardly_longer(pair_s, rows, prompts, tokens):
    """It takes a second, and should take 0.9 s; eight rows and tokens cost no more."""
    composed = step(policy=StepPolicy(0.0, 0.9), model=StepTime(1.0, 0.25, 0.0, TOKEN_S, pair_s, 8))
    composed.add_rows([answer(0.0) for _ in range(rows)])
    composed._most_s = 0.9
    composed.add_chunks([prompt(one) for one in prompts])
    assert tokens_of(composed)[rows:] == tokens


@pytest.mark.parametrize(
    ("slow", "rows", "on_host", "seconds"),
    [
        (1.0, [20.0], [], 4.0),
        (2.0, [20.0], [], 2.0),
        (1.0, [3.0], [], 3.0),
        (1.0, [-1.0], [], 1.125),  # it is late: nothing is added
        (1.0, [20.0], [3.5], 2.5 - TOKEN_S),
    ],
)
def test_bulk_makes_a_step_with_others_no_longer_than_its_share(slow, rows, on_host, seconds):
    composed = step(slow)
    composed.add_rows([answer(due_s) for due_s in rows], [answer(due_s) for due_s in on_host])
    composed.leave_room()
    assert room_s(composed) == seconds


def test_bulk_alone_has_the_whole_step():
    composed = step()
    composed.leave_room()
    assert room_s(composed) == 8.0


@pytest.mark.parametrize(
    ("rows", "seconds", "added"), [(1, 1.25, 1), (1, 1.249, 0), (0, 0.5, 1), (3, 1.5, 1), (3, 2.0, 5)]
)
def test_rows_of_bulk_have_what_is_left_and_one_always_goes(rows, seconds, added):
    composed = step(policy=StepPolicy(0.0, 2 * seconds))
    composed.add_rows([answer() for _ in range(rows)])
    composed.leave_room()
    composed.add_bulk_rows([answer(bulk=True) for _ in range(9)])
    assert len(composed.chunks) == rows + (added if rows else max(1, int((2 * seconds - 1) / 0.125)))


@pytest.mark.parametrize(("due_s", "bulk_tokens"), [(3.0, 47), (9.0, 111), (math.inf, 111)])
def test_bulk_comes_behind_all_others_in_what_is_left_of_its_share(due_s, bulk_tokens):
    """A row and a chunk take 1.125 s and 1 s, a row of bulk 0.125 s: it has 3 s or less, the share of 4 s at most."""
    composed, rows = step(), [answer(bulk=True), answer(due_s)]
    prompts = [prompt(64), prompt(1000, bulk=True)]
    composed.add_all(rows, prompts, ())
    found = [(chunk.row, chunk.tokens) for chunk in composed.chunks]
    assert found == [(rows[1], 1), (prompts[0], 64), (rows[0], 1), (prompts[1], bulk_tokens + 1)]
    assert composed.alone() == (composed.chunks, composed.load, MODEL.seconds(composed.load), None)


def test_rows_of_the_host_are_no_part_of_the_accelerators():
    composed, row = step(), answer(5.0)
    row.generation.on_host = True
    composed.add_all([row], [prompt(10**6)], [row])
    assert [chunk.row for chunk in composed.chunks] != [row]
    assert MODEL.seconds(composed.load) == 4.0 - TOKEN_S  # the weights are read once more for it


# --- the host's part --------------------------------------------------------------------------------------------------


class Planner:
    """Writes down what it is asked, and takes rows as it is told."""

    def __init__(self, first=(), second=(), parking=()):
        self.plan = HybridPlan(PIPELINED, 7.0, 1.0, 1.0, 1.0, 1.0, first, second, parking)

    def choose(self, load, rows, **more):
        self.load, self.rows, self.more = load, rows, more
        return self.plan


def planned(composed, planner, waiting=(), host=None):
    return composed.with_host(host or HostCache(HostTime(1e-4, 1e-6), 100), planner, waiting)


@pytest.mark.parametrize(
    ("slow", "due_s", "urgent"),
    [(1.0, 5.624, True), (1.0, 5.625, False), (2.0, 11.24, True), (2.0, 11.25, False), (1.0, -1.0, True)],
)
def test_a_row_of_the_host_is_urgent_five_steps_before_it_is_due(slow, due_s, urgent):
    composed, planner = step(slow), Planner()
    composed.add_rows([answer()], [answer(due_s, length=20), answer(bulk=True, length=30)])
    assert planned(composed, planner).planned_s == 7.0
    assert planner.rows == [HostRow(20, urgent, False), HostRow(30, False, True)]
    assert planner.load == composed.load
    assert composed.was_short_in_vain == urgent


@pytest.mark.parametrize("batch", ["first", "second", "parking"])
def test_a_step_is_not_short_in_vain_where_some_row_takes_part(batch):
    composed = step()
    composed.add_rows([answer()], [answer(1.0), answer(1.0)])
    planned(composed, Planner(**{batch: [1]}))
    assert not composed.was_short_in_vain


@pytest.mark.parametrize(
    ("slow", "due_s", "ends_s", "within_s"),
    [
        (1.0, [math.inf], 50.0, 8.0),
        (2.0, [math.inf], 50.0, 4.0),
        (1.0, [6.0, 7.0], 50.0, 6.0),
        (1.0, [6.0, 1.2], 50.0, 6.0),  # one row is late in any case: the two take 1.25 s and the chunk 0.25 s
        (1.0, [6.0, 1.5], 50.0, 1.5),
        (1.0, [6.0], 4.0, 4.0),
        (2.0, [6.0], 8.0, 3.0),
    ],
)
def test_rows_of_the_host_make_nobody_late(slow, due_s, ends_s, within_s):
    composed, planner = step(slow), Planner()
    composed.add_rows([answer(one) for one in due_s])
    composed.add_chunks([prompt(16, ends_s)])
    planned(composed, planner)
    assert planner.more["within_s"] == within_s


@pytest.mark.parametrize(("due_s", "joins"), [(30.0, True), (1.0, False)])
def test_rows_are_parked_and_pipelined_as_policy_and_host_allow(due_s, joins):
    host, planner = HostCache(HostTime(1e-4, 1e-6), 100), Planner()
    host._passed = 4  # pipelined steps, that parked rows could not join
    host.parked.park(answer(bulk=True))
    composed = step(policy=StepPolicy(16.0, 8.0, modes=MODES[1:]))
    composed.add_rows([answer()], [answer(due_s)])
    planned(composed, planner, host=host)
    assert (planner.more["parked"], planner.more["modes"], planner.more["joins"]) == (1, MODES[1:], joins)


@pytest.mark.parametrize(
    ("slow", "rows", "waiting", "within_s"),
    [
        # With one row a step has 1.125 s without prompts, and 6.875 / 8 of the longest for them: 64 tokens take 1 s.
        (1.0, 1, [prompt(64, 5.0)], 5.0 - 1.125 - 1 / (6.875 / 8)),
        (1.0, 1, [prompt(128, 5.0, computed=64)], 5.0 - 1.125 - 1 / (6.875 / 8)),
        (1.0, 1, [prompt(64, 6.0), prompt(64, 6.5)], 6.5 - 1.125 - 2 / (6.875 / 8)),
        (1.0, 1, [prompt(64, 5.0), prompt(64, 9.0)], 5.0 - 1.125 - 1 / (6.875 / 8)),
        (1.0, 1, [prompt(64, 5.0, bulk=True)], 8.0),
        (1.0, 1, [prompt(64, -9.0, computed=64)], 8.0),
        (2.0, 1, [prompt(64, 8.0)], 4.0 - 1.125 - 1 / (1 - 2.25 / 8)),
        (1.0, 24, [prompt(64, 14.0)], 14.0 - 4.0 - 1 / 0.5),
        (1.0, 48, [prompt(64, 14.0)], 1.02 * 7.0),  # prompts have 2 s, but the accelerator alone takes longer
    ],
)
def test_rows_of_the_host_leave_prompts_their_time(slow, rows, waiting, within_s):
    composed, planner = step(slow), Planner()
    composed.add_rows([answer() for _ in range(rows)])
    planned(composed, planner, waiting)
    assert planner.more["within_s"] == pytest.approx(within_s)


def test_what_a_prompt_reads_of_itself_takes_its_time_too():
    model = StepTime(1.0, 0.0, 0.25, 0.0, 2**-10, 0)
    composed, planner, one = step(model=model), Planner(), prompt(80, 12.0, computed=16)
    composed.add_rows([answer(length=4)])
    composed.add_chunks([prompt(16), one])
    del composed.chunks[1]
    composed.chunks[1] = composed.chunks[1]._replace(tokens=32)
    planned(composed, planner, [one])
    # 2 s for the row; 32 tokens are left, which read 48 + 16 in the mean
    assert planner.more["within_s"] == pytest.approx(12.0 - 2.0 - 32 * 64 * 2**-10 / (6 / 8))


def test_rows_that_take_part():
    rows = [answer(due_s, length=20) for due_s in (30.0, 20.0, 40.0)] + [answer(bulk=True, length=50)]
    composed, host = step(policy=StepPolicy(16.0, 8.0, max_num_batched_tokens=9)), HostCache(HostTime(1e-4, 1e-6), 100)
    composed.add_rows([answer()], rows)
    assert planned(composed, Planner([0], [1], [3]), host=host).planned_s == 7.0
    found = [(part.row, part.start, part.tokens, part.wanted, part.batch) for part in composed.chunks[1:]]
    assert found == [(rows[1], 19, 1, True, FIRST), (rows[0], 19, 1, True, SECOND), (rows[3], 49, 1, True, PARKING)]
    assert (host.parked, rows[3].parked, rows[3].coming) == ({}, None, 0)  # it is planned, and nothing has changed
    assert composed.load.rows == 1


def test_where_nothing_but_parked_rows_goes_on_nobody_knows_how_long_it_takes():
    composed = step()
    composed.add_rows([], [answer(bulk=True)])
    assert planned(composed, Planner()).planned_s == 0.0


@pytest.mark.parametrize(("max_num_batched_tokens", "bulk", "offered"), [(4, 1, 3), (3, 1, 2), (9, 1, 4), (4, 4, 3)])
def test_rows_of_the_host_are_offered_as_many_as_the_engine_computes(max_num_batched_tokens, bulk, offered):
    on_host = [answer(due_s=20.0)] * (4 - bulk) + [answer(bulk=True)] * bulk
    composed, planner = step(policy=StepPolicy(16.0, 8.0, max_num_batched_tokens=max_num_batched_tokens)), Planner()
    composed.add_rows([answer()], on_host)
    planned(composed, planner)
    assert len(planner.rows) == offered


def test_rows_of_the_host_that_need_a_block_and_get_none_are_not_offered():
    full, has_room = answer(length=BLOCK + 1), answer(length=BLOCK)
    full.table, has_room.table = [0], [1]
    asked, planner = [], Planner()
    composed = StepComposer(MODEL, POLICY, 1.0, NOW, lambda *what: bool(asked.append(what)))
    composed.add_rows([], [full, has_room])
    planned(composed, planner)
    assert asked == [(full, BLOCK + 1)]
    assert planner.rows == [HostRow(BLOCK, False, False)]
