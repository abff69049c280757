"""Bulk requests wait at the Router, and go to replicas as these have room: with scripted replicas, in virtual time."""

import asyncio

import pytest

from deployments.embedding.bulk import BulkQueue
from deployments.errors import Busy, EngineBroken, EngineFailed, ReplicaLost, Unavailable
from deployments.serving.frames import CUT_BYTES
from tests.kit.scripted_replicas import (
    AFTER_S,
    ScriptedReplica,
    admits,
    breaks,
    dies,
    placer_of,
    refuses,
    request_of,
    says_nothing,
)


def queue_of(*replicas, **how):
    """A replica has room for four queries of 75 tokens."""
    return BulkQueue(placer_of(*replicas, **how))


def begin(queue, *lengths, **how):
    return asyncio.ensure_future(queue.answer(request_of(*lengths, bulk=True, **how)))


def sizes(replica):
    return [len(offer.queries) for offer in replica.heard]


async def test_each_replica_gets_what_it_has_room_for_and_the_rest_waits():
    a1, c1 = ScriptedReplica("a1", says_nothing), ScriptedReplica("c1", says_nothing, bulk_room=0.16)
    asked = begin(queue_of(a1, cpu=[c1]), *[75] * 9)
    await asyncio.sleep(0)
    assert (sizes(a1), sizes(c1)) == ([4], [2])
    assert (a1.bulk_parts, c1.bulk_parts) == (1, 1)
    assert all(offer.partial and offer.bulk for offer in (*a1.heard, *c1.heard))
    asked.cancel()
    await asyncio.wait([asked])
    assert (a1.called_off, c1.called_off, a1.bulk_parts, c1.bulk_parts) == ([1], [1], 0, 0)


@pytest.mark.parametrize(
    ("lengths", "state", "how", "taken"),
    [
        ([100, 200, 1], {}, {}, 2),
        ([1] * 9, {"bulk_room": 0.5, "model": (0.25, 0.0, 0.0, 0.2)}, {}, 2),
        ([302, 1], {}, {}, 1),  # one at least where none of the request's is anywhere
        ([75] * 9, {"bulk_room": 0.0}, {}, 1),
        ([300] * 9, {}, {"admission": "depth"}, 4),  # by count a place is worth a query of 75 tokens
    ],
)
async def test_how_many_have_room(lengths, state, how, taken):
    a1 = ScriptedReplica("a1", says_nothing, **state)
    asked = begin(queue_of(a1, **how), *lengths)
    await asyncio.sleep(0)
    asked.cancel()
    assert sizes(a1) == [taken]


async def test_an_offer_is_no_larger_than_a_frame():
    a1 = ScriptedReplica("a1", says_nothing, bulk_room=1e9)
    half = CUT_BYTES // 2 // 4
    asked = begin(queue_of(a1), half, half, 1)
    await asyncio.sleep(0)
    asked.cancel()
    assert sizes(a1) == [2]


async def test_what_was_not_admitted_is_offered_again_in_its_order():
    a1 = ScriptedReplica("a1", admits(2), admits(1), admits(1))
    found = await queue_of(a1).answer(request_of(10, 20, 30, 40, bulk=True))
    assert [[len(ids) for ids in offer.queries] for offer in a1.heard] == [[10, 20, 30, 40], [30, 40], [40]]
    assert sorted(found) == [0, 1, 2, 3]
    assert a1.times == [0.0, 0.01, 0.02]  # as soon as it is known
    assert a1.bulk_parts == 0


@pytest.mark.parametrize(("slo_s", "after_s"), [(0.5, 0.06), (1.0, 0.11), (2.0, 0.21)])
async def test_who_refused_is_asked_again_after_a_tenth_of_the_slo(slo_s, after_s):
    a1 = ScriptedReplica("a1", refuses, refuses)
    assert len(await queue_of(a1, slo_s=slo_s).answer(request_of(75, bulk=True))) == 1
    assert a1.times == [0.0, pytest.approx(after_s), pytest.approx(2 * after_s)]


@pytest.mark.parametrize("how", ["silent", "later", "closed"])
async def test_who_may_not_answer_is_not_asked(how):
    a1, a2 = ScriptedReplica("a1"), ScriptedReplica("a2")
    queue = queue_of(a1, queue_depth=0, cpu=[a2]) if how == "closed" else queue_of(a1, a2)
    if how == "silent":
        a1.view.asked(0.1)
        await asyncio.sleep(1.2)
    if how == "later":
        a1.bulk_again_at = 5.0
    assert len(await queue.answer(request_of(75, bulk=True))) == 1
    assert (sizes(a1), sizes(a2)) == ([], [1])


async def test_the_first_that_came_is_served_first_and_the_next_as_soon_as_it_has_all():
    a1 = ScriptedReplica("a1", admits(4, after_s=0.5))
    queue = queue_of(a1)
    first, second = begin(queue, *[75] * 6), begin(queue, *[10] * 2)
    await asyncio.gather(first, second)
    assert [[len(ids) for ids in offer.queries] for offer in a1.heard] == [[75] * 4, [75] * 2, [10] * 2]
    assert a1.times[2] == a1.times[1]


async def test_only_the_first_asks_again(monkeypatch):
    queue, looks, advance = queue_of(ScriptedReplica("a1", says_nothing, bulk_room=0.0)), [], BulkQueue._advance
    monkeypatch.setattr(BulkQueue, "_advance", lambda *of: looks.append(of) or advance(*of))
    asked = [begin(queue, 75, 75) for _ in range(100)]
    await asyncio.sleep(0.05)
    looks.clear()
    await asyncio.sleep(1)
    assert len(looks) == 10  # a tenth of the SLO apart
    for one in asked:
        one.cancel()


async def test_where_all_replicas_die_all_that_wait_hear_of_it_at_once():
    a1 = ScriptedReplica("a1", dies, bulk_room=0.0)
    queue = queue_of(a1)
    asked = [begin(queue, 75) for _ in range(3)]
    await asyncio.sleep(0.001)
    queue._placer.pools["accelerator"].live.clear()
    await asyncio.sleep(0.02)
    assert [type(one.exception()) for one in asked] == [Unavailable] * 3


async def test_one_whose_client_goes_makes_way_at_once():
    a1 = ScriptedReplica("a1", says_nothing, bulk_room=0.0)
    queue = queue_of(a1)
    first, second = begin(queue, 75, 75), begin(queue, 10)
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0.001)
    assert [[len(ids) for ids in offer.queries] for offer in a1.heard] == [[75], [10]]
    await second


@pytest.mark.parametrize(
    ("scripts", "is_lost"),  # for two queries
    [
        ([admits(2, dies)], False),
        ([admits(2, dies), admits(2, dies)], True),
        ([admits(1, dies, after_s=0.05), refuses, admits(2, dies)], True),  # one of them twice
        ([refuses, refuses, admits(2, dies)], False),  # what was refused before was no try
        ([refuses, admits(2, dies), admits(2, dies)], True),
    ],
)
async def test_what_a_dead_replica_had_is_offered_once_more(scripts, is_lost):
    a1 = ScriptedReplica("a1", *scripts)
    asked = begin(queue_of(a1), 75, 75)
    await asyncio.wait([asked])
    assert isinstance(asked.exception(), ReplicaLost) == is_lost
    assert is_lost or len(asked.result()) == 2
    assert a1.bulk_parts == 0


async def test_an_engines_failure_ends_the_request():
    a1 = ScriptedReplica("a1", lambda pending: pending.fail(EngineFailed("no")))
    with pytest.raises(EngineFailed):
        await queue_of(a1).answer(request_of(75, 75, bulk=True))


@pytest.mark.parametrize("recovers", [True, False])
async def test_the_last_replica_is_asked_once_more_though_its_engine_failed(recovers):
    """Another had the rest of the request when it failed, and died later."""
    last, died = ScriptedReplica("a", breaks, *([] if recovers else [breaks])), ScriptedReplica("b", admits(4, dies))
    queue = queue_of(last, died)
    first, second = begin(queue, *[75] * 9), begin(queue, 75)
    await asyncio.sleep(1.5 * AFTER_S)
    queue._placer.pools["accelerator"].live.remove(died)
    async with asyncio.timeout(20.0):
        if recovers:
            assert len(await first) == 9
        else:
            with pytest.raises(EngineBroken):
                await first
        assert len(await second) == 1


async def test_where_nobody_lives_it_is_unavailable():
    with pytest.raises(Unavailable, match="no live replica"):
        await queue_of().answer(request_of(75, bulk=True))


@pytest.mark.parametrize(
    ("model", "slo_s", "retry_after_s"),
    [
        ((0.0, 0.001, 0.0, 0.2), 1.0, 9 / (1 / 0.075 * 0.5)),  # what waits, at bulk's share of 13.3 queries a second
        ((0.0, 0.0, 0.0, 0.2), 1.0, 1.0),
    ],
)
async def test_too_much_that_waits_is_refused(model, slo_s, retry_after_s):
    a1 = ScriptedReplica("a1", says_nothing, bulk_room=0.0, model=model)
    a1.view.sent(1, 1, 1.0)
    queue = queue_of(a1, slo_s=slo_s, bulk={"max_waiting": 10, "share": 0.5})
    asked = begin(queue, *[75] * 10)
    await asyncio.sleep(0)
    queue.check(1)
    with pytest.raises(Busy, match=r"9 bulk queries are already waiting \(bulk.max_waiting: 10\)") as refused:
        queue.check(2)
    assert refused.value.retry_after_s == pytest.approx(retry_after_s)
    assert queue._placer.refused == 1
    with pytest.raises(Busy):
        await queue.answer(request_of(75, 75, bulk=True))
    asked.cancel()


@pytest.mark.parametrize(("wanted", "allowed_s"), [(None, 40.0), (20.0, 20.0), (60.0, 40.0)])
async def test_it_has_bulks_time(wanted, allowed_s):
    a1 = ScriptedReplica("a1")
    request = request_of(75, bulk=True, timeout_s=wanted)
    await queue_of(a1, bulk={"timeout_s": 40.0}).answer(request)
    assert request.allowed_s == pytest.approx(allowed_s)
