from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.queue_manager import Full, QueueManager


def manager(accelerator=2, cpu=1, pools=("accelerator", "cpu")):
    made = QueueManager(pools)
    for pool, depth in zip(pools, (accelerator, cpu), strict=False):
        made.set_depth(pool, depth)
        made.set_replicas(pool, 1)
    return made


def pools(permits):
    return [permit.pool for permit in permits]


def test_accelerator_first_then_cpu_then_busy():
    queue = manager()
    assert [pools(queue.admit()) for _ in range(3)] == [["accelerator"], ["accelerator"], ["cpu"]]
    assert queue.admit() == Full(asked=1, free=0)


def test_heterogeneous_off_is_one_pool():
    queue = manager(pools=("accelerator",))
    assert pools(queue.admit(2)) == ["accelerator", "accelerator"]
    assert queue.admit() == Full(1, 0)


def test_one_request_is_one_decision():
    queue = manager(accelerator=2, cpu=2)
    assert pools(queue.admit(3)) == ["accelerator", "accelerator", "cpu"]
    assert queue.admit(2) == Full(asked=2, free=1)
    assert queue.in_flight("cpu") == 1  # nothing was kept of the refused request


def test_a_released_place_is_taken_again_accelerator_first():
    queue = manager()
    first, *_ = queue.admit(3)
    first.release()
    assert pools(queue.admit()) == ["accelerator"]


def test_a_second_release_is_a_bug_and_changes_nothing():
    queue = manager()
    (permit,) = queue.admit()
    permit.release()
    with pytest.raises(RuntimeError, match="released twice"):
        permit.release()
    assert queue.in_flight("accelerator") == 0


def test_depth_may_shrink_below_what_is_in_flight():
    queue = manager(accelerator=5, cpu=0)
    permits = queue.admit(5)
    queue.set_depth("accelerator", 2)
    for expected in (4, 3, 2):
        assert queue.admit() == Full(1, 0)
        permits.pop().release()
        assert queue.in_flight("accelerator") == expected
    permits.pop().release()
    assert pools(queue.admit()) == ["accelerator"]


def test_replicas_multiply_the_depth_and_their_loss_closes_the_pool():
    queue = manager(accelerator=2, cpu=1)
    queue.set_replicas("accelerator", 3)
    assert queue.capacity == 7
    queue.set_replicas("accelerator", 0)
    assert pools(queue.admit()) == ["cpu"]
    assert queue.admit() == Full(1, 0)


def test_bulk_leaves_room_for_single_queries():
    queue = manager(accelerator=20, cpu=8)
    assert len(queue.admit_bulk(1000)) == 14
    assert queue.admit_bulk(1000) == []
    assert pools(queue.admit(10)) == ["accelerator"] * 10


def test_bulk_gets_through_the_smallest_depths():
    queue = manager(accelerator=1, cpu=1)
    assert pools(queue.admit_bulk(9)) == ["accelerator"]
    assert queue.admit_bulk(9) == []


def test_release_is_announced():
    told = []
    queue = QueueManager(["cpu"], on_release=lambda: told.append(1))
    queue.set_depth("cpu", 1)
    queue.set_replicas("cpu", 1)
    queue.admit()[0].release()
    assert told == [1]


def test_a_trial_is_admitted_by_its_own_depths():
    queue = manager(accelerator=2, cpu=1)
    queue.set_trial({"accelerator": 4, "cpu": 2})
    assert pools(queue.admit_trial(5)) == ["accelerator"] * 4 + ["cpu"]
    assert queue.admit_trial(2) == Full(asked=2, free=1)
    assert pools(queue.admit_trial()) == ["cpu"]


def test_a_trial_may_try_less_than_the_depths_in_force():
    queue = manager(accelerator=2, cpu=1)
    queue.set_trial({"accelerator": 1})  # the CPU is not named: closed
    assert pools(queue.admit_trial()) == ["accelerator"]
    assert queue.admit_trial() == Full(1, 0)
    assert pools(queue.admit(2)) == ["accelerator", "cpu"]


def test_trial_depths_are_for_each_live_replica():
    queue = manager(accelerator=2, cpu=1)
    queue.set_replicas("accelerator", 3)
    queue.set_trial({"accelerator": 4, "cpu": 0})
    assert len(queue.admit_trial(12)) == 12
    assert queue.trial_free() == 0


@pytest.mark.parametrize(
    "never", [lambda queue: None, lambda queue: queue.set_trial({"cpu": 3}) or queue.set_trial(None)]
)
def test_without_trial_depths_no_trial_is_admitted(never):
    queue = manager()
    never(queue)
    assert queue.admit_trial() == Full(1, 0)
    assert len(queue.admit(3)) == 3


def test_others_are_not_let_in_above_the_depths_in_force_by_a_trial():
    queue = manager(accelerator=2, cpu=1)
    queue.set_trial({"accelerator": 10, "cpu": 10})
    first, *others = queue.admit_trial(3)
    assert pools(queue.admit()) == ["cpu"]
    assert queue.admit() == Full(1, 0)
    assert queue.admit_bulk(9) == []
    first.release()
    assert queue.admit() == Full(1, 0)  # two trial queries fill the accelerator still
    others[0].release()
    assert pools(queue.admit()) == ["accelerator"]


def test_others_take_room_from_a_trial():
    queue = manager(accelerator=2, cpu=1)
    queue.admit(3)
    queue.set_trial({"accelerator": 3, "cpu": 1})
    assert queue.trial_free() == 1
    assert queue.admit_trial(2) == Full(2, 1)


def test_claimed_places_come_on_top_of_those_that_are_held_and_never_of_the_depth():
    queue = manager(accelerator=10)
    queue.set_places("accelerator", 2, more=True)
    queue.admit()
    assert (queue.room("accelerator"), queue.room("accelerator", claimed=3)) == (1, 4)
    queue.set_places("accelerator", 0, exact=True)
    assert (queue.room("accelerator"), queue.room("accelerator", claimed=3)) == (0, 3)
    queue.set_places("accelerator", None)  # alone now: what was claimed is among what it holds
    assert queue.room("accelerator", claimed=3) == 9
    queue.set_trial({"accelerator": 12})
    assert queue.room("accelerator", trial=True, claimed=3) == 11


def test_full_is_what_the_trial_depths_say_while_there_are_any():
    queue = manager(accelerator=2, cpu=1)
    queue.admit(2)
    assert queue.is_full("accelerator")
    queue.set_trial({"accelerator": 3})
    assert not queue.is_full("accelerator")
    assert not queue.is_full("cpu")  # closed for the trial, open for the others
    queue.admit_trial()
    assert queue.is_full("accelerator")
    queue.set_trial({"accelerator": 1})
    assert queue.is_full("accelerator")
    queue.set_trial(None)
    assert queue.is_full("accelerator")
    assert not queue.is_full("cpu")


def test_a_permit_of_a_trial_is_released_once_even_after_its_end():
    queue = manager()
    queue.set_trial({"accelerator": 5})
    (permit,) = queue.admit_trial()
    queue.set_trial(None)
    permit.release()
    with pytest.raises(RuntimeError, match="released twice"):
        permit.release()
    assert queue.in_flight("accelerator") == 0


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="at least one pool"):
        QueueManager([])
    with pytest.raises(ValueError, match="cannot be -1"):
        manager().set_depth("cpu", -1)


class Interleavings(RuleBasedStateMachine):
    """Any order of requests, releases, depth changes, replicas joining and leaving."""

    def __init__(self):
        super().__init__()
        self.queue = manager(accelerator=3, cpu=2)
        self.held = []

    def check_admission(self, permits, before):
        for pool in self.queue.pools:
            granted = sum(permit.pool == pool for permit in permits)
            assert self.queue.in_flight(pool) == before[pool] + granted
            if granted:
                assert self.queue.in_flight(pool) <= self.queue.capacity_of(pool)
        self.held.extend(permits)

    def before(self):
        return {pool: self.queue.in_flight(pool) for pool in self.queue.pools}

    @rule(queries=st.integers(1, 12))
    def request(self, queries):
        before = self.before()
        free = sum(max(0, self.queue.capacity_of(pool) - before[pool]) for pool in self.queue.pools)
        answer = self.queue.admit(queries)
        if isinstance(answer, Full):
            assert queries > free
            assert self.before() == before
            return
        assert len(answer) == queries <= free
        room = max(0, self.queue.capacity_of("accelerator") - before["accelerator"])
        assert pools(answer).count("accelerator") == min(queries, room)
        self.check_admission(answer, before)

    @rule(queries=st.integers(1, 12))
    def bulk(self, queries):
        before = self.before()
        self.check_admission(self.queue.admit_bulk(queries), before)

    @rule(data=st.data())
    def finish(self, data):
        if self.held:
            self.held.pop(data.draw(st.integers(0, len(self.held) - 1))).release()

    @rule(data=st.data())
    def release_twice(self, data):
        if self.held:
            permit = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            permit.release()
            with pytest.raises(RuntimeError):
                permit.release()

    @rule(pool=st.sampled_from(["accelerator", "cpu"]), depth=st.integers(0, 6))
    def change_depth(self, pool, depth):
        self.queue.set_depth(pool, depth)

    @rule(pool=st.sampled_from(["accelerator", "cpu"]), replicas=st.integers(0, 3))
    def change_replicas(self, pool, replicas):
        self.queue.set_replicas(pool, replicas)

    @invariant()
    def counts_are_what_is_held(self):
        for pool in self.queue.pools:
            assert self.queue.in_flight(pool) == sum(permit.pool == pool for permit in self.held)


Interleavings.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestInterleavings = Interleavings.TestCase


class Trials(RuleBasedStateMachine):
    """Ordinary, bulk and trial queries in any order, under trial depths that come, change and go."""

    depths = {"accelerator": 3, "cpu": 2}  # noqa: RUF012 - never changed
    replicas = 2

    def __init__(self):
        super().__init__()
        self.queue = manager(**self.depths)
        self.tried = {}
        self.ordinary, self.trial = [], []
        for pool in self.depths:
            self.queue.set_replicas(pool, self.replicas)

    def before(self):
        return {pool: self.queue.in_flight(pool) for pool in self.depths}

    def check_admission(self, answer, queries, depths, before):
        """By `depths`, the accelerator first; the granted permits."""
        room = {pool: max(0, depths.get(pool, 0) * self.replicas - before[pool]) for pool in self.depths}
        if queries > sum(room.values()):
            assert answer == Full(queries, sum(room.values()))
            assert self.before() == before
            return []
        first = min(queries, room["accelerator"])
        assert pools(answer) == ["accelerator"] * first + ["cpu"] * (queries - first)
        return answer

    @rule(queries=st.integers(1, 8))
    def request(self, queries):
        before = self.before()
        self.ordinary += self.check_admission(self.queue.admit(queries), queries, self.depths, before)

    @rule(queries=st.integers(1, 30))
    def request_of_a_trial(self, queries):
        before = self.before()
        self.trial += self.check_admission(self.queue.admit_trial(queries), queries, self.tried, before)

    @rule(queries=st.integers(1, 12))
    def bulk(self, queries):
        self.ordinary += self.queue.admit_bulk(queries)

    @rule(depths=st.none() | st.dictionaries(st.sampled_from(["accelerator", "cpu"]), st.integers(0, 12)))
    def change_trial(self, depths):
        self.queue.set_trial(depths)
        self.tried = depths or {}

    @rule(kind=st.sampled_from(["ordinary", "trial"]), data=st.data())
    def finish(self, kind, data):
        held = getattr(self, kind)
        if held:
            held.pop(data.draw(st.integers(0, len(held) - 1))).release()

    @invariant()
    def ordinary_queries_never_exceed_the_depths_in_force(self):
        for pool, depth in self.depths.items():
            ordinary = pools(self.ordinary).count(pool)
            assert ordinary <= depth * self.replicas
            assert self.queue.in_flight(pool) == ordinary + pools(self.trial).count(pool)


Trials.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestTrials = Trials.TestCase
