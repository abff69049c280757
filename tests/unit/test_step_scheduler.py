"""What the schedule of a device that generates promises, computes and learns."""

from dataclasses import astuple

import pytest

from deployments.generation.scheduler.answer_lengths import AnswerLengths
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.kept_room import KeptRoom
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import Generation
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepTime
from deployments.generation.scheduler.work import Copy

# A step takes a second, and a 64th for each token of a prompt.
SECONDS = StepPolicy(ttft_s=16.0, tpot_s=8.0)


def exact(blocks=200, policy=SECONDS, host=None, **times):
    """It takes as long as it should, and knows it."""
    times = {"beta_s": 1.0, "row_s": 0.0, "kv_token_s": 0.0, "prompt_token_s": 1 / 64, "pair_s": 0.0, **times}
    schedule = StepScheduler(StepTime(**times), policy, blocks, host=host)
    schedule.learning.margin = schedule.scatter.margin = 0.0
    return schedule


def paced(tokens=64, most=50, due=16.0, pace_s=8.0, **more):
    return Generation(tokens, most, due, pace_s, **more)


def admitted(schedule, now, one):
    assert schedule.offer(now, one).admitted
    return one


def begun(schedule, now=0.0, **more):
    """One whose first token is there; its only step has ended."""
    one = admitted(schedule, now, paced(due=now + 16.0, **more))
    schedule.next_step(now)
    schedule.ended(now + schedule.planned_s, schedule.planned_s)
    return one


def test_a_prompt_is_computed_in_chunks_and_then_a_token_a_step():
    schedule, steps = exact(policy=StepPolicy(16.0, 8.0, max_num_batched_tokens=128)), []
    one = admitted(schedule, 0.0, paced(300, 3))
    while one.rows:
        steps.append([(part.start, part.tokens, part.wanted) for part in schedule.next_step(0.0)])
        schedule.ended(0.0, schedule.planned_s)
    assert steps == [[(0, 128, False)], [(128, 128, False)], [(256, 44, True)], [(300, 1, True)], [(301, 1, True)]]
    assert not schedule.next_step(0.0)


@pytest.mark.parametrize(("tokens", "copies"), [(2 * BLOCK + 5, True), (2 * BLOCK, False)])
def test_answers_share_the_full_blocks_of_their_prompt_and_copy_the_last(tokens, copies):
    schedule = exact()
    one = begun(schedule, tokens=tokens, most=10, answers=3)
    schedule.next_step(9.0)
    first, second, third = (row.table for row in one.rows)
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    assert schedule.copies() == [Copy(first[2], second[2]), Copy(first[2], third[2])] * copies
    assert [row.length for row in one.rows] == [tokens + 1] * 3
    assert schedule.room.reserved == 2 + 3


def test_the_earliest_due_is_computed_first():
    schedule = exact(policy=StepPolicy(16.0, 8.0, max_num_batched_tokens=64))
    _, sooner = (admitted(schedule, 0.0, paced(64, due=due)) for due in (40.0, 16.0))
    assert [part.row.generation for part in schedule.next_step(0.0)] == [sooner]


def test_bulk_is_behind_all_others_and_takes_its_share_of_the_blocks():
    schedule = exact(20)
    assert [schedule.offer(0.0, paced(2 * BLOCK, 1, bulk=True)).admitted for _ in range(6)] == [True] * 5 + [False]
    other = admitted(schedule, 0.0, paced())
    assert schedule.next_step(0.0)[0].row.generation is other


@pytest.mark.parametrize("answers", [1, 3])
def test_answers_of_one_token_end_with_their_prompt(answers):
    schedule = exact()
    assert not begun(schedule, most=1, answers=answers).rows
    assert schedule.room._blocks.free == 200


# --- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "left_s", "never"),
    [
        (paced(9 * BLOCK, BLOCK), 999.0, False),
        (paced(9 * BLOCK, BLOCK + 2), 999.0, True),  # eleven blocks
        (paced(4 * BLOCK, BLOCK, bulk=True), 0.0, False),
        (paced(4 * BLOCK, BLOCK + 2, bulk=True), 99.0, True),  # more than its half
        (paced(1, 1, answers=8), 16.0, False),
        (paced(1, 1, answers=9), 16.0, True),  # more than are computed in one step
        (paced(64), 8 + 1.0, False),  # in eight steps
        (paced(64), 8 + 0.99, True),
        (paced(8, pace_s=1.0), 2.0, False),
        (paced(8, pace_s=0.99), 2.0, True),
    ],
)
def test_what_an_idle_device_never_does(one, left_s, never):
    assert exact(10, StepPolicy(16.0, 8.0, max_num_batched_tokens=8)).admission.never(one, left_s) is never


def test_what_is_never_in_time_is_refused_for_good():
    schedule = exact()
    assert not schedule.offer(50.0, paced(64, due=51.9)).admitted
    assert schedule.offer(50.0, paced(64, due=52.0)).admitted
    assert schedule.state(50.0).refusals == (0, 1)


@pytest.mark.parametrize("other", [{"most": 200 * BLOCK}, {"tokens": 900, "most": 100, "bulk": True}])
def test_room_is_kept_for_what_is_usual_of_those_that_may_get_a_promise(other):
    """Else it would be for what is too long to fit, and whoever is offered beside it would be refused."""
    schedule = exact(20)
    schedule.remove(0.0, admitted(schedule, 0.0, paced()))
    for _ in range(50):
        schedule.offer(0.0, paced(**other))
    usual = schedule.admission.reserve.typical(0.0, schedule.policy)
    assert (usual.prompt_tokens, usual.most_tokens) == (64, 50)


@pytest.mark.parametrize(("slowdown", "latest_s"), [(1.0, 2.0), (3.0, 2.0), (0.5, 1.0)])
def test_never_is_said_by_how_quick_a_device_is_known_to_be(slowdown, latest_s):
    schedule = exact()
    schedule.learning.slowdown = slowdown
    assert not schedule.admission.never(paced(64), latest_s)
    assert schedule.admission.never(paced(64), latest_s - 0.01)


@pytest.mark.parametrize(
    ("blocks", "left_s", "tokens"), [(200, 3.0, 128), (200, 1.0, 0), (200, 0.5, 0), (2, 99.0, 256)]
)
def test_the_longest_prompt(blocks, left_s, tokens):
    assert exact(blocks).admission.longest_prompt(left_s) == tokens


@pytest.mark.parametrize(("answers", "fits"), [(2, True), (3, False)])
def test_no_more_answers_are_admitted_than_one_step_holds(answers, fits):
    schedule = exact(policy=StepPolicy(16.0, 8.0, max_num_batched_tokens=64))
    begun(schedule, answers=30)
    admitted(schedule, 2.0, paced(answers=32, due=40.0))
    assert schedule.offer(2.0, paced(8, answers=answers, due=40.0)).admitted is fits


def test_when_first_tokens_come_is_predicted_by_what_is_due_before():
    schedule = exact()
    found = [admitted(schedule, 0.0, paced(64, due=due)) for due in (10.0, 5.0, 20.0)]
    assert [one.predicted_s for one in found] == [2.0, 2.0, 4.0]
    schedule.next_step(0.0)  # all three of them
    found = [admitted(schedule, 1.0, paced(128, due=due)) for due in (30.0, 16.0)]
    assert [one.predicted_s for one in found] == [3.0 + 3.0] * 2


def test_what_is_left_of_a_prompt_reads_all_that_comes_before():
    schedule = exact(policy=StepPolicy(64.0, 64.0, max_num_batched_tokens=64), pair_s=1 / 1024)
    assert admitted(schedule, 0.0, paced(128, 1, due=60.0)).predicted_s == 2.0 + 2.0 + 128 * 64 / 1024
    schedule.next_step(0.0)
    schedule.ended(4.0, 4.0)
    assert admitted(schedule, 4.0, paced(64, 1, due=70.0)).predicted_s == 2.0 + 2.0 + 64 * (64 + 32 + 32) / 1024


@pytest.mark.parametrize(
    ("slowdown", "now", "predicted_s"), [(1.0, 1.0, 1.0 + 2.0), (2.0, 1.0, 3.0 + 4.0), (1.0, 9.0, 2.0)]
)
def test_what_comes_while_a_step_runs_waits_for_its_end(slowdown, now, predicted_s):
    schedule = exact()
    admitted(schedule, 0.0, paced(64, 1))
    schedule.next_step(0.0)
    schedule.learning.slowdown = slowdown
    assert schedule.ends_at == slowdown * 2.0
    assert admitted(schedule, now, paced(64, due=now + 16.0)).predicted_s == predicted_s


@pytest.mark.parametrize(
    ("pace_s", "due", "fits"),
    [
        (2.0, 5.0, True),  # a step for the answer, and one that ends the prompt
        (2.0, 4.99, False),
        (2.01, 4.0, True),  # one step for both is in time
        (2.01, 3.99, False),
        (1.0, 18.0, True),
        (0.99, 18.0, False),
    ],
)
def test_nobody_is_admitted_beside_whom_an_answer_would_be_late(pace_s, due, fits):
    schedule = exact()
    begun(schedule, most=2).tpot_s = pace_s
    assert schedule.offer(2.0, paced(64, 1, due=due)).admitted is fits


@pytest.mark.parametrize(
    ("most", "ahead", "predicted_s"),
    [
        (6, False, 4.0 + 1.0 + 4.0),  # four tokens are due before, every two seconds
        (6, True, 1.0 + 3.0 + 1.0 + 4.0),  # one of them is computed already
        (2, True, 1.0 + 1.0 + 4.0),  # it was the last one
        (2, False, 1.0 + 1.0 + 4.0),
    ],
)
def test_what_the_running_step_computes_counts_as_done(most, ahead, predicted_s):
    schedule = exact()
    begun(schedule, most=most, pace_s=2.0)
    if ahead:
        schedule.next_step(2.0)
    assert admitted(schedule, 2.0, paced(4 * 64, 1, due=50.0)).predicted_s == predicted_s


def test_the_token_that_the_running_step_computes_is_read_by_the_next_one():
    schedule = exact(kv_token_s=1 / 64)
    begun(schedule, pace_s=None)
    schedule.next_step(2.0)
    one = admitted(schedule, 2.0, paced(64, 1, due=50.0))
    assert one.predicted_s == pytest.approx((1.0 + 65 / 64) + (1.0 + 1.0 + 66 / 64))


def test_answers_behind_those_of_bulk_are_to_be_in_time_too():
    schedule = exact()
    begun(schedule, bulk=True)
    begun(schedule, most=2, pace_s=2.0)
    assert not schedule.offer(2.0, paced(64, 1, due=4.99)).admitted
    assert schedule.offer(2.0, paced(64, 1, due=5.0)).admitted


def test_nobody_waits_for_answers_of_bulk():
    schedule = exact(kv_token_s=1 / 64)
    begun(schedule, bulk=True)
    assert admitted(schedule, 2.0, paced(64, 1, due=50.0)).predicted_s == 2.0


def test_answers_whose_prompt_the_running_step_ends_are_due_after_it():
    schedule = exact()
    admitted(schedule, 0.0, paced(64, 6, pace_s=2.0))
    schedule.next_step(0.0)
    assert admitted(schedule, 0.0, paced(4 * 64, 1, due=50.0)).predicted_s == 2.0 + 4.0 + 1.0 + 4.0


# --- what is learned --------------------------------------------------------------------------------------------------


class Heard:
    """In place of `Learning`: writes down what it hears."""

    calibrated = False

    def __init__(self):
        self.slowdown, self.margin, self.works, self.answers = 1.0, 0.0, [], []

    def worked(self, planned_s, seconds, *, least_s, probe):
        self.works.append((planned_s, seconds, least_s, probe))

    def answered(self, *what):
        self.answers.append(what)


def listening(ttft_s):
    schedule = exact(policy=StepPolicy(ttft_s, 8.0), beta_s=4.0, prompt_token_s=0.0)
    schedule.learning, schedule.scatter = Heard(), Heard()
    return schedule


@pytest.mark.parametrize(("ttft_s", "after"), [(80.0, 2), (81.0, 3)])
def test_the_factor_is_learned_from_each_step_and_the_margin_from_several_in_a_row(ttft_s, after):
    """A twentieth, and a tenth of `ttft_s`; steps are planned as four seconds each."""
    schedule = listening(ttft_s)
    admitted(schedule, 0.0, paced(1, pace_s=None))
    now = 0.0
    for number in range(after + 1):
        schedule.next_step(now)
        now += 5.0
        schedule.ended(now, 5.0)
        schedule.learning.slowdown = 3.0 if number + 1 < after else 2.5
    assert schedule.learning.works == [(4.0, 5.0, 0.05 * ttft_s, False)] * (after + 1)
    assert schedule.scatter.answers[:2] == [(4.0, 5.0, 1.0), (12.0, 5.0, 3.0)]
    together = 4.0 * after  # by the slowdown before the first of them
    assert schedule.learning.answers == [(together, 5.0 * after, 1.0), (10.0, 5.0, 2.5)]
    assert (schedule.steps, schedule.since, schedule.scatter.slowdown) == (after + 1, now, 2.5)


def test_a_device_that_rests_tries_whether_it_is_still_slow_less_and_less_often():
    schedule = exact(policy=StepPolicy(2.0, 2.0))
    schedule.learning.slowdown, schedule.since = 3.0, 5.0
    for after_s in (7.0, 9.0, 13.0, 21.0, 21.0):
        assert not schedule.offer(after_s - 0.01, paced(1, due=after_s + 1.99)).admitted
        probe = admitted(schedule, after_s, paced(1, due=after_s + 2.0))
        assert not schedule.offer(after_s, paced(1, due=after_s + 2.0)).admitted  # it does not rest any more
        schedule.remove(after_s, probe)


@pytest.mark.parametrize(("alone", "probe"), [(True, True), (False, False)])
def test_a_probe_is_told_from_other_work(alone, probe):
    schedule = listening(2.0)
    schedule.admission.probe.promises = 2.0
    for _ in range(1 if alone else 2):
        admitted(schedule, 0.0, paced(1, 2, bulk=True))
    for number in range(2):
        schedule.next_step(float(number))
        schedule.ended(number + 1.0, 1.0)
    assert [work[-1] for work in schedule.learning.works] == [probe, False]
    assert schedule.admission.probe.promises == 1.0


@pytest.mark.parametrize(("whole", "planned_s"), [(False, 4.0), (True, 0.0)])
def test_nothing_is_learned_of_a_step_that_failed_or_that_nobody_planned(whole, planned_s):
    schedule = listening(80.0)
    admitted(schedule, 0.0, paced(1))
    schedule.next_step(0.0)
    schedule.planned_s = planned_s
    schedule.ended(5.0, 5.0, whole=whole)
    assert not schedule.learning.works
    assert schedule.steps == 1


# --- when there is room -----------------------------------------------------------------------------------------------


def test_the_mean_time_between_ends_counts_from_when_the_device_began_to_work():
    schedule, gaps = exact(), []
    for began, ended in ((10.0, 14.0), (20.0, 30.0)):
        for one in [admitted(schedule, began, paced(due=began + 16.0, answers=2)) for _ in range(2)]:
            schedule.remove(ended, one)
            gaps.append(schedule.admission.mean_gap_s)
    assert gaps == pytest.approx([0.2, 0.19, 0.6805, 0.646475])


def test_who_comes_to_a_device_at_work_does_not_count_as_its_beginning():
    schedule = exact()
    one = admitted(schedule, 10.0, paced(due=26.0))
    admitted(schedule, 12.0, paced(due=40.0))
    schedule.remove(14.0, one)
    assert schedule.admission.mean_gap_s == pytest.approx(0.05 * 4.0)


@pytest.mark.parametrize(
    ("blocks", "gap_s", "opens_s"),
    [
        (2, 10.0, 0.0),
        (3, 10.0, 10.0),  # one block is missing, and each of the two has four
        (6, 10.0, 10.0),
        (7, 10.0, 20.0),
        (10, 10.0, 20.0),
        (3, 0.5, 1.0),  # a step at least
    ],
)
def test_there_is_room_when_so_many_have_ended_as_hold_what_is_missing(blocks, gap_s, opens_s):
    schedule = exact(10)
    for _ in range(2):
        admitted(schedule, 0.0, paced(4 * BLOCK, 1, due=99.0))
    schedule.admission.mean_gap_s = gap_s
    one = paced(blocks * BLOCK, 1, due=99.0)
    found = schedule.offer(0.0, one)
    assert (found.admitted, found.opens_s) == (opens_s == 0, opens_s)


@pytest.mark.parametrize(("tokens", "due_s", "opens_s"), [(64, 5.0, 1.0), (4 * 64, 14.5, 4.5)])
def test_who_would_be_late_may_come_back_when_it_would_not(tokens, due_s, opens_s):
    """In steps of eight seconds at most: the long one comes in the third, after 3 s for steps and 16 s for prompts."""
    schedule = exact()
    admitted(schedule, 0.0, paced(12 * 64, due=14.0))
    one = paced(tokens, due=due_s)
    found = schedule.offer(0.0, one)
    assert (found.admitted, found.opens_s) == (False, opens_s)
    assert schedule.state(0.0).refusals == (1, 0)


def test_what_routers_are_told():
    schedule = exact(50)
    idle = schedule.state(0.0)
    assert (idle.opens_s, idle.first_s, idle.prompt_token_s) == (0.0, 1.0, 1 / 64)
    begun(schedule, answers=2)
    admitted(schedule, 2.0, paced(128, 2 * BLOCK, due=9.0))
    schedule.learning.slowdown, schedule.learning.margin = 2.0, 0.5
    told = schedule.state(3.0)
    # Prompts have 67 tokens in the mean. One comes in the third step, behind the one that waits, and is late.
    first_s = 3.0 * (3 + (128 + 67) / 64)
    assert told.first_s == pytest.approx(first_s - 67 / 32)
    assert told.opens_s == pytest.approx(first_s - 16.0)
    assert (told.prompt_token_s, told.free_blocks, told.blocks) == (1 / 32, 50 - 2 - 3, 50)
    assert (told.rows, told.waiting, told.steps) == (2, 1, 1)
    assert (told.model, told.slowdown, told.margin) == (astuple(schedule.model), 2.0, 0.5)


# --- for whom room is kept --------------------------------------------------------------------------------------------


class Kept(KeptRoom):
    """Writes down what was decided."""

    def decided(self, now, generation, account, cost_s, may_be_helped, *, admitted):
        self.decision = cost_s, may_be_helped(), admitted


@pytest.mark.parametrize(
    ("running", "answers", "cost_s"),
    [
        (0, 1, 1.0 + 64**2 / 2 / 2048 + 20 * (1.0 + 64 / 128)),
        (3, 2, 1.0 + 64**2 / 2 / 2048 + 2 * 20 * (1.0 / 3 + 64 / 128)),
    ],
)
def test_what_a_generation_costs_beside_others(running, answers, cost_s):
    schedule = exact(kv_token_s=1 / 128, pair_s=1 / 2048)
    if running:
        begun(schedule, answers=running, pace_s=None)
    schedule.admission.reserve = Kept()
    schedule.offer(50.0, paced(64, 20, due=90.0, answers=answers))
    assert schedule.admission.reserve.decision == (pytest.approx(cost_s), True, True)


@pytest.mark.parametrize(
    ("tokens", "margin", "helped"),
    [(6 * 64, 0.0, True), (6 * 64 + 1, 0.0, False), (4 * 64, 0.4, True), (5 * 64, 0.4, False)],
)
def test_nobody_is_helped_who_needs_most_of_an_idle_device(tokens, margin, helped):
    """Seven tenths of the ten seconds until its first token."""
    schedule = exact()
    schedule.learning.margin, schedule.admission.reserve = margin, Kept()
    schedule.offer(50.0, paced(tokens, 1, due=60.0))
    assert schedule.admission.reserve.decision[1] is helped
    schedule.admission.reserve.decision = None
    schedule.offer(50.0, paced(64, bulk=True))
    assert schedule.admission.reserve.decision is None


def test_who_finds_no_room_is_refused_and_nothing_else_is_said_of_it():
    schedule = exact(10)
    admitted(schedule, 0.0, paced(10 * BLOCK, 1, due=99.0))
    schedule.admission.reserve = Kept()
    assert not schedule.offer(0.0, paced(64, 1, due=99.0)).admitted
    assert schedule.admission.reserve.decision[2] is False


# --- steps, and what ends ---------------------------------------------------------------------------------------------


def test_the_next_step_goes_on_where_the_running_one_will_have_ended():
    schedule = exact()
    one = admitted(schedule, 0.0, paced(64, 3, answers=2))
    steps = [[(part.start, part.tokens) for part in schedule.next_step(at)] for at in (0.0, 2.0)]
    assert steps == [[(0, 64)], [(64, 1), (64, 1)]]
    assert (one.first_at, [row.length for row in one.rows]) == (2.0, [65, 65])
    assert schedule.ends_at == 3.0
    schedule.ended(2.5, 2.5)
    assert (one.first_at, schedule.steps) == (2.5, 1)  # so late it was
    assert [(row.computed, row.picked, row.coming) for row in one.rows] == [(64, 1, 1)] * 2
    schedule.ended(3.5, 1.0, one.rows[1:])
    assert [(row.number, row.computed, row.picked, row.coming) for row in one.rows] == [(0, 65, 2, 0)]
    assert [part.start for part in schedule.next_step(3.5)] == [65]
    schedule.ended(4.5, 1.0)
    assert (one.rows, schedule.room.reserved, schedule.admission.mean_gap_s) == ([], 0, pytest.approx(0.05 * 4.5))
    assert schedule.room.lengths.mean(500) < 500  # one ended before it had all that it might have


def test_a_step_leaves_time_for_how_much_single_steps_scatter():
    schedule = exact()
    admitted(schedule, 0.0, paced(1000, due=200.0))
    schedule.learning.slowdown, schedule.scatter.margin = 2.0, 0.25
    (part,) = schedule.next_step(0.0)
    assert part.tokens == int((8.0 / 2.5 - 1.0) * 64)
    assert (schedule.planned_s, schedule.ends_at) == (1.0 + 140 / 64, 2.0 + 280 / 64)


def test_a_row_that_waits_for_a_block_gets_that_of_the_last_admitted_which_is_computed_again(monkeypatch):
    """In the step after next: the one that runs may draw a token of it."""
    monkeypatch.setattr(AnswerLengths, "most_blocks", lambda *_: 0.0)
    schedule = exact(4)
    first, second, last = (begun(schedule, tokens=BLOCK - 1, most=2 * BLOCK, pace_s=None) for _ in range(3))
    assert schedule.room.reserved == 9
    rows = [one.rows[0] for one in (first, second, last)]
    for row in rows:
        row.computed, row.length = BLOCK, BLOCK + 1
    assert [part.row for part in schedule.next_step(9.0)] == rows[:1]
    assert (schedule.stalled, schedule.room._extra, schedule.preemptions) == (rows[1:], 0.1, 0)
    schedule.ended(10.0, 1.0)
    steps = []
    for ends in ((), rows[:1], rows[1:2], (), ()):
        steps.append([(part.row, part.start, part.tokens, part.wanted) for part in schedule.next_step(10.0)])
        schedule.ended(11.0, 1.0, ends)
    assert steps == [
        [(rows[0], BLOCK + 1, 1, True), (rows[1], BLOCK, 1, True)],
        [(rows[0], BLOCK + 2, 1, True), (rows[1], BLOCK + 1, 1, True)],
        [(rows[1], BLOCK + 2, 1, True)],  # each other is to have a block more, when it comes back
        [(rows[2], 0, BLOCK + 1, True)],
        [(rows[2], BLOCK + 1, 1, True)],
    ]
    assert (schedule.preemptions, schedule.running, schedule.preempted) == (1, rows[2:], [])
    schedule.remove(12.0, last)
    assert schedule.is_idle
    assert schedule.room.free == 4


def test_rows_that_all_wait_for_a_block_go_on(monkeypatch):
    """Both need a third block at the same time, the cache has four, and no step runs that could free one."""
    monkeypatch.setattr(AnswerLengths, "most_blocks", lambda *_: 0.0)
    schedule, now = exact(4), 0.0
    both = [Generation(100, 300, 9.0) for _ in range(2)]
    assert all(schedule.offer(now, one).admitted for one in both)
    while schedule.next_step(now):
        schedule.ended(now := now + 0.1, 0.1)
    assert (schedule.is_idle, schedule.preemptions) == (True, 1)


def test_what_is_preempted_counts_among_the_promises():
    """It may end at once, if the running step drew its last token; its tokens are computed before its next is due."""
    schedule = exact(100)
    one = begun(schedule, tokens=3 * BLOCK, most=50, pace_s=60.0)
    schedule.next_step(17.0)
    schedule.running, schedule.preempted = [], list(one.rows)
    schedule.room.preempt(one.rows[0])
    assert [row.to_compute for row in schedule.uncomputed] == [3 * BLOCK + 1]
    assert schedule.uncomputed[0].order == (False, one.first_at + 60.0)
    assert not schedule.is_idle
    prediction = schedule.admission._predicted(20.0, paced(8, due=200.0), [])
    alone = exact(100).admission._predicted(20.0, paced(8, due=200.0), [])
    assert prediction.first_s[0] == alone.first_s[0] + 3 * BLOCK / 64
    schedule.ended(20.0, 1.0, one.rows)
    assert schedule.is_idle


@pytest.mark.parametrize(("cut_off", "learned"), [(True, False), (False, True)])
def test_who_goes_says_how_long_answers_become_unless_it_was_cut_off(cut_off, learned):
    schedule = exact()
    waits, runs = admitted(schedule, 0.0, paced(64, due=40.0)), begun(schedule)
    schedule.remove(3.0, runs, cut_off=cut_off)
    schedule.remove(3.0, waits, cut_off=cut_off)
    assert (schedule.room.lengths.mean(500) < 500) is learned
    assert (schedule.running, schedule.waiting, schedule.room.reserved) == ([], [], 0)


def test_nothing_is_left_when_all_is_cleared():
    schedule = exact()
    schedule.stalled = begun(schedule, answers=2, tokens=5).rows
    admitted(schedule, 2.0, paced(64, due=40.0))
    schedule.next_step(2.0)
    schedule.clear()
    assert (schedule.is_idle, schedule.stalled) == (True, [])
    assert (schedule.copies(), schedule.room.reserved, schedule.next_step(3.0)) == ([], 0, [])
    assert admitted(schedule, 3.0, paced(64, due=50.0)).predicted_s == 2.0


OTHER = StepTime(2.0, 0.0, 0.0, 1 / 64, 0.0)


@pytest.mark.parametrize(
    ("model", "calibrated", "host", "kept"),
    [
        ("same", False, None, "all"),
        ("same", True, None, "host"),
        (OTHER, False, None, "host"),
        ("same", False, HostTime(9.0, 9.0), "steps"),
        (OTHER, True, HostTime(9.0, 9.0), "nothing"),
    ],
)
def test_what_is_forgotten_when_another_model_is_in_force(model, calibrated, host, kept):
    schedule = exact(host=HostCache(HostTime(1e-4, 1e-6), 9))
    admitted(schedule, 0.0, paced(64, due=40.0))
    schedule.next_step(0.0)
    schedule._count(2.0)
    for learning in (schedule.learning, schedule.scatter, schedule.host.learning):
        learning.slowdown = 1.5
    schedule._in_a_row, schedule.admission.probe.promises, schedule.host.accelerator_slowdown = (
        (1.0, 2.0, 3.0),
        4.0,
        1.5,
    )
    model = schedule.model if model == "same" else model
    schedule.configure(model, host, calibrated=calibrated)
    steps, of_host = kept in ("all", "steps"), kept in ("all", "host")
    assert [one.slowdown for one in (schedule.learning, schedule.scatter)] == [1.5 if steps else 1.0] * 2
    assert schedule._in_a_row == ((1.0, 2.0, 3.0) if steps else (0.0, 0.0, 1.0))
    assert (schedule.admission.probe.promises, schedule.host.accelerator_slowdown) == (
        (4.0, 1.5) if steps else (1.0, 1.0)
    )
    assert schedule.host.learning.slowdown == (1.5 if of_host else 1.0)
    assert schedule.host.time == (host or HostTime(1e-4, 1e-6))
    assert (schedule.model, schedule.learning.calibrated) == (model, calibrated and not steps)
    assert schedule.planned_s == (2.0 if model != OTHER else 3.0)
    assert schedule.counted.planned_s == (2.0 if steps else 0.0)
