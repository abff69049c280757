"""The batcher with a clock that the test turns: nothing sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from deployments.batcher import Answer, Batcher, Job, Pacing
from deployments.errors import EngineFailed
from deployments.queue_manager import QueueManager

BETA_S = 0.27
PAUSE_S = 0.022 * BETA_S


@dataclass
class FakeTimer:
    due: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self):
        self.cancelled = True


@dataclass(repr=False)
class Desk:
    """A batcher, its queue manager, a clock, and replicas that answer when the test says."""

    depth: int = 10
    replicas: tuple[str, ...] = ("r1",)
    beta_s: float = BETA_S
    now: float = 0.0
    timers: list[FakeTimer] = field(default_factory=list)
    sent: list[tuple[str, int, asyncio.Future]] = field(default_factory=list)
    queries: list[list[int]] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.queue = QueueManager(["cpu"])
        self.queue.set_depth("cpu", self.depth)
        self.queue.set_replicas("cpu", len(self.replicas))
        self.batcher = Batcher(
            "cpu",
            self.send,
            lambda _replica, batch: self.abandoned.append(batch),
            lambda: self.queue.in_flight("cpu") >= self.queue.capacity_of("cpu"),
            depth=self.depth,
            pacing=Pacing.from_beta(self.beta_s),
            clock=lambda: self.now,
            call_later=self.call_later,
        )
        self.batcher.set_replicas(self.replicas, lambda name: RuntimeError(f"lost {name}"))

    def call_later(self, delay_s, callback):
        timer = FakeTimer(self.now + delay_s, callback)
        self.timers.append(timer)
        return timer

    async def send(self, replica, _batch_id, queries, each_token):
        answer = asyncio.get_running_loop().create_future()
        self.queries.append([int(query[0]) for query in queries])
        self.sent.append((replica, len(queries), answer))
        return await answer

    @property
    def sizes(self):
        return [size for _, size, _ in self.sent]

    async def submit(self, count, *, bulk=False):
        permits = self.queue.admit_bulk(count) if bulk else self.queue.admit(count)
        loop = asyncio.get_running_loop()
        ids = np.array([7 if bulk else 1], np.int32)
        jobs = [Job(ids, permit, loop.create_future()) for permit in permits]
        self.batcher.submit(jobs)
        await settle()
        return jobs

    async def advance(self, seconds, *, late=0.0):
        """Turn the clock; timers that are due fire, `late` seconds after their time."""
        ends = self.now + seconds
        while due := [timer for timer in self.timers if timer.due <= ends and not timer.cancelled]:
            timer = min(due, key=lambda timer: timer.due)
            self.timers.remove(timer)
            self.now = max(self.now, timer.due + late)
            timer.callback()
            await settle()
        self.now = max(self.now, ends)

    async def answer(self, index, compute_s=0.1):
        _, size, future = self.sent[index]
        future.set_result((np.eye(size, 4, dtype=np.float32), np.ones(size, np.float32), compute_s))
        await settle()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def run(test):
    return lambda: asyncio.run(test())


@run
async def test_lone_query_waits_for_a_percent_or_two_of_beta():
    desk = Desk()
    await desk.submit(1)
    assert desk.sizes == []
    await desk.advance(PAUSE_S * 0.99)
    assert desk.sizes == []
    await desk.advance(PAUSE_S * 0.02)
    assert desk.sizes == [1]


@run
async def test_a_burst_goes_as_one_batch():
    desk = Desk(depth=100)
    for _ in range(10):
        await desk.submit(1)
        await desk.advance(0.9 * PAUSE_S)
    assert desk.sizes == []
    await desk.advance(4 * PAUSE_S)
    assert desk.sizes == [10]


@run
async def test_a_burst_that_fills_the_pool_goes_at_once():
    desk = Desk(depth=10)
    await desk.submit(9)
    assert desk.sizes == []
    await desk.submit(1)
    assert desk.sizes == [10]


@run
async def test_a_stream_without_pauses_is_held_back_for_a_quarter_of_beta_at_most():
    desk = Desk(depth=1000)
    while not desk.sizes:
        await desk.submit(1)
        await desk.advance(PAUSE_S / 2)
        assert desk.now <= 0.25 * BETA_S + PAUSE_S
    assert desk.now >= 0.25 * BETA_S


@run
async def test_a_late_timer_means_a_busy_loop_and_no_pause():
    desk = Desk()
    await desk.submit(1)
    await desk.advance(PAUSE_S, late=PAUSE_S)
    assert desk.sizes == []
    await desk.advance(PAUSE_S / 2)
    assert desk.sizes == [1]


@run
async def test_nothing_waits_while_beta_is_unknown():
    desk = Desk(beta_s=0.0)
    await desk.submit(1)
    assert desk.sizes == [1]


@run
async def test_what_comes_while_the_device_runs_goes_together_when_it_is_free():
    desk = Desk()
    await desk.submit(1)
    await desk.advance(PAUSE_S)
    for _ in range(3):
        await desk.submit(2)
        await desk.advance(0.1)
    assert desk.sizes == [1]
    await desk.answer(0)
    assert desk.sizes == [1, 6]


@run
async def test_a_batch_that_nobody_can_join_goes_ahead_of_time():
    desk = Desk(depth=10)
    await desk.submit(6)
    await desk.advance(4 * PAUSE_S)
    await desk.submit(3)
    assert desk.sizes == [6]  # one place is free: the three may still become four
    await desk.submit(1)
    assert desk.sizes == [6, 4]
    await desk.answer(0)
    await desk.submit(6)
    assert desk.sizes == [6, 4, 6]


@run
async def test_a_burst_is_spread_over_idle_replicas():
    desk = Desk(depth=10, replicas=("r1", "r2"))
    await desk.submit(7)
    await desk.advance(4 * PAUSE_S)
    assert sorted(desk.sizes) == [3, 4]
    assert {replica for replica, _, _ in desk.sent} == {"r1", "r2"}


@run
async def test_lone_queries_stay_at_the_preferred_replica_while_it_is_idle():
    desk = Desk(replicas=("far", "near"))
    desk.batcher.set_replicas(["near", "far"], RuntimeError)
    for _ in range(3):
        await desk.submit(1)
        await desk.advance(PAUSE_S)
        await desk.answer(len(desk.sent) - 1)
    assert [replica for replica, _, _ in desk.sent] == ["near"] * 3
    assert desk.batcher.counters.by_replica == {"near": 3}


@run
async def test_a_busy_preferred_replica_does_not_keep_queries_from_idle_ones():
    desk = Desk(replicas=("near", "far"))
    for _ in range(2):
        await desk.submit(1)
        await desk.advance(PAUSE_S)
    assert [replica for replica, _, _ in desk.sent] == ["near", "far"]


@run
async def test_a_burst_is_spread_evenly_whatever_is_preferred():
    desk = Desk(depth=4, replicas=("near", "far", "further"))
    await desk.submit(12)
    assert {replica: size for replica, size, _ in desk.sent} == {"near": 4, "far": 4, "further": 4}
    assert desk.batcher.counters.by_replica == {"near": 4, "far": 4, "further": 4}


@run
async def test_a_replica_without_places_of_this_router_is_passed_over():
    desk = Desk(replicas=("near", "far"))
    desk.batcher.places = {"near": 0, "far": 5}.get
    await desk.submit(1)
    await desk.advance(PAUSE_S)
    assert [replica for replica, _, _ in desk.sent] == ["far"]


@run
async def test_the_order_changes_with_the_members_and_what_runs_goes_on():
    desk = Desk(replicas=("b", "c"))
    first = await desk.submit(1)
    await desk.advance(PAUSE_S)  # runs at b
    desk.batcher.set_replicas(["a", "c"], RuntimeError)  # b drains, a has come and is near
    await desk.submit(1)
    await desk.advance(PAUSE_S)
    assert [replica for replica, _, _ in desk.sent] == ["b", "a"]
    await desk.answer(0)
    assert first[0].answer.result().pool == "cpu"
    assert desk.batcher.counters.by_replica == {"a": 1}


@run
async def test_no_replica_gets_more_than_its_depth():
    desk = Desk(depth=5, replicas=("r1", "r2"))
    await desk.submit(10)
    assert desk.sizes == [5, 5]


@run
async def test_single_queries_go_before_bulk():
    desk = Desk(depth=10)
    await desk.submit(1)
    await desk.advance(PAUSE_S)
    await desk.submit(3, bulk=True)
    await desk.submit(2)
    await desk.advance(0.1)
    await desk.answer(0)
    assert desk.queries == [[1], [1, 1, 7, 7, 7]]


@run
async def test_a_vector_that_is_not_finite_fails_its_query_alone():
    desk = Desk()
    jobs = await desk.submit(2)
    await desk.advance(4 * PAUSE_S)
    _, _, future = desk.sent[0]
    future.set_result((np.eye(2, 4, dtype=np.float32), np.array([np.nan, 1], np.float32), 0.1))
    await settle()
    assert "no finite numbers" in str(jobs[0].answer.exception())
    assert jobs[1].answer.result().norm == 1
    assert desk.queue.in_flight("cpu") == 0


@run
async def test_a_batch_given_up_before_its_task_began_leaves_no_permit_behind():
    desk = Desk()
    permits = desk.queue.admit(10)
    loop = asyncio.get_running_loop()
    jobs = [Job(np.array([1], np.int32), permit, loop.create_future()) for permit in permits]
    desk.batcher.submit(jobs)  # full: dispatched, but the task has not run yet
    desk.batcher.set_replicas([], lambda name: RuntimeError(f"lost {name}"))
    desk.batcher.give_up("r1", RuntimeError("died"))
    await settle()
    assert desk.queue.in_flight("cpu") == 0
    assert {str(job.answer.exception()) for job in jobs} == {"died"}


@run
async def test_answers_reach_their_queries_and_free_their_places():
    desk = Desk()
    jobs = await desk.submit(3)
    await desk.advance(4 * PAUSE_S)
    desk.now += 0.5
    await desk.answer(0, compute_s=0.4)
    answers = [job.answer.result() for job in jobs]
    assert [int(np.argmax(answer.vector)) for answer in answers] == [0, 1, 2]
    assert all(isinstance(answer, Answer) and answer.pool == "cpu" for answer in answers)
    assert answers[0].compute_s == 0.4
    assert answers[0].queue_s == pytest.approx(0.1 + 4 * PAUSE_S)
    assert desk.queue.in_flight("cpu") == 0


@run
async def test_a_client_that_goes_while_waiting_frees_its_place_and_never_reaches_the_device():
    desk = Desk()
    gone, stays = (await desk.submit(1))[0], (await desk.submit(1))[0]
    gone.answer.cancel()
    desk.batcher.leave([gone])
    assert desk.queue.in_flight("cpu") == 1
    assert desk.batcher.waiting == 1
    await desk.advance(4 * PAUSE_S)
    assert desk.sizes == [1]
    await desk.answer(0)
    assert stays.answer.done()


@run
async def test_a_client_that_goes_while_its_query_runs_keeps_the_place_until_the_device_is_done():
    """Else the next burst would be admitted on top of a device that is still busy, and miss the SLO."""
    desk = Desk()
    jobs = await desk.submit(2)
    await desk.advance(4 * PAUSE_S)
    jobs[0].answer.cancel()
    desk.batcher.leave(jobs[:1])
    assert (desk.queue.in_flight("cpu"), desk.abandoned) == (2, [])
    jobs[1].answer.cancel()
    desk.batcher.leave(jobs[1:])
    desk.batcher.leave(jobs)  # again: nothing more happens
    assert (desk.queue.in_flight("cpu"), desk.abandoned) == (2, ["cpu-1"])
    await desk.answer(0)  # cancelled futures do not upset the batcher
    assert desk.queue.in_flight("cpu") == 0
    assert [type(job.answer.exception()) if not job.answer.cancelled() else None for job in jobs] == [None, None]
    await desk.submit(1)
    await desk.advance(PAUSE_S)
    assert desk.sizes == [2, 1]


@run
async def test_an_engine_error_ends_its_batch_alone():
    desk = Desk()
    first = await desk.submit(2)
    await desk.advance(4 * PAUSE_S)
    second = await desk.submit(1)
    desk.sent[0][2].set_exception(ValueError("device"))
    await settle()
    assert [str(job.answer.exception()) for job in first] == ["device", "device"]
    await desk.advance(PAUSE_S)
    assert desk.sizes == [2, 1]
    await desk.answer(1)
    assert second[0].answer.result().pool == "cpu"
    assert (desk.batcher.counters.batches, desk.batcher.counters.failed_batches) == (2, 1)


@run
async def test_a_replica_that_drains_may_finish_and_one_that_died_may_not():
    desk = Desk(depth=2, replicas=("r1", "r2"))
    await desk.submit(4)
    draining, dying = (index for name in ("r1", "r2") for index, (r, _, _) in enumerate(desk.sent) if r == name)
    desk.batcher.set_replicas([], lambda name: RuntimeError(f"lost {name}"))
    desk.batcher.give_up("r2", RuntimeError("died"))
    await settle()
    assert desk.queue.in_flight("cpu") == 2
    await desk.answer(draining)
    assert desk.queue.in_flight("cpu") == 0
    assert desk.sent[dying][2].cancelled()


@run
async def test_a_replica_that_left_and_never_answers_is_given_up_after_its_grace():
    desk = Desk()
    jobs = await desk.submit(1)
    await desk.advance(PAUSE_S)
    desk.batcher.set_replicas([], lambda name: RuntimeError(f"lost {name}"))
    await desk.advance(desk.batcher.grace_s - 1)
    assert not jobs[0].answer.done()
    await desk.advance(2)
    assert str(jobs[0].answer.exception()) == "lost r1"
    assert desk.queue.in_flight("cpu") == 0


@run
async def test_a_pool_without_replicas_ends_what_waits():
    desk = Desk()
    jobs = await desk.submit(1)
    desk.batcher.set_replicas([], lambda name: RuntimeError(f"lost {name}"))
    assert str(jobs[0].answer.exception()) == "lost (all of them)"
    assert desk.queue.in_flight("cpu") == 0


@pytest.mark.parametrize(
    ("beta_s", "pause_s"), [(None, 0), (0.0, 0), (0.27, 0.00594), (0.85, 0.0187), (0.02, 0.001), (0.004, 0.0004)]
)
def test_the_pause_is_a_small_share_of_beta(beta_s, pause_s):
    assert Pacing.from_beta(beta_s).pause_s == pytest.approx(pause_s)


def test_a_batch_is_of_one_kind_and_vectors_of_tokens_go_to_their_queries():
    asked = []

    async def send(_replica, _batch_id, queries, each_token):
        asked.append(([len(query) for query in queries], each_token))
        rows = sum(map(len, queries)) if each_token else len(queries)
        unit = np.tile(np.arange(rows, dtype=np.float32)[:, None], (1, 2))
        norms = np.full(rows, 2, np.float32)
        if each_token:
            norms[-1] = np.nan
        return unit, norms, 0.1

    async def run():
        queue = QueueManager(("cpu",))
        queue.set_depth("cpu", 10)
        queue.set_replicas("cpu", 1)
        batcher = Batcher("cpu", send, lambda *_: None, lambda: False, depth=10)
        batcher.set_replicas(["a"], RuntimeError)
        loop = asyncio.get_running_loop()
        kinds = [(1, False), (2, False), (3, True), (1, True), (2, True), (4, False)]
        jobs = [
            Job(np.ones(length, np.int32), permit, loop.create_future(), each_token)
            for (length, each_token), permit in zip(kinds, queue.admit(len(kinds)), strict=True)
        ]
        batcher.submit(jobs)
        answers = await asyncio.gather(*(job.answer for job in jobs), return_exceptions=True)
        return answers, queue.in_flight("cpu")

    answers, in_flight = asyncio.run(run())
    assert asked == [([1, 2], False), ([3, 1, 2], True), ([4], False)]
    assert answers[2].vector.tolist() == [[0, 0], [2, 2], [4, 4]]  # as the model gave them: the norm put back
    assert answers[3].vector.tolist() == [[6, 6]]
    assert (answers[2].norm, answers[0].norm) == (1, 2)
    assert isinstance(answers[4], EngineFailed)  # one of its tokens has no finite vector
    assert in_flight == 0


@run
async def test_where_there_are_several_replicas_what_waits_goes_to_the_one_with_the_most_room():
    """It is merged there into the next run: whichever replica ends first, nobody waits for two."""
    desk = Desk(depth=10, replicas=("r1", "r2"))
    await desk.submit(7)
    await desk.advance(4 * PAUSE_S)
    await desk.submit(3)
    assert len(desk.sent) == 2
    await desk.advance(3 * PAUSE_S)
    least, most = sorted(
        ("r1", "r2"), key=lambda name: sum(size for replica, size, _ in desk.sent[:2] if replica == name)
    )
    assert [(replica, size) for replica, size, _ in desk.sent[2:]] == [(least, 2), (most, 1)]


@run
async def test_where_the_places_are_shared_what_waits_goes_while_there_are_places():
    desk = Desk(depth=10)
    desk.batcher.places = lambda _: 5
    await desk.submit(3)
    await desk.advance(4 * PAUSE_S)
    await desk.submit(4)
    await desk.advance(4 * PAUSE_S)
    assert desk.sizes == [3, 2]  # the other two wait for places
    await desk.answer(0)
    assert sum(desk.sizes) == 7


@run
async def test_a_stream_without_pauses_reaches_all_idle_replicas_at_once():
    """Who is left after the first batch has waited already, and does not wait again for each replica."""
    desk = Desk(depth=100, replicas=("r1", "r2", "r3", "r4"))
    arrivals = 0
    while not desk.sizes:
        await desk.submit(1)
        arrivals += 1
        await desk.advance(0.3 * PAUSE_S)
    assert len(desk.sizes) == 4
    assert sum(desk.sizes) == arrivals


@run
async def test_what_runs_is_told_apart_from_what_waits_at_the_replica_for_its_next_run():
    desk = Desk(depth=10)
    await desk.submit(7)
    await desk.advance(4 * PAUSE_S)
    await desk.submit(3)  # full: a second batch is sent ahead
    await desk.advance(1.0)
    (told,) = desk.batcher.running()
    assert (told.queries, told.next_queries) == (7, 3)
    await desk.answer(0)
    await desk.advance(0.5)
    (told,) = desk.batcher.running()
    assert (told.queries, told.next_queries) == (3, 0)
    assert told.seconds == pytest.approx(0.5)
    await desk.answer(1)
    assert list(desk.batcher.running()) == []
