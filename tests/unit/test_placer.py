"""Which replicas a request is offered to, what becomes of its parts, and what it is told if nobody admits it."""

import asyncio

import pytest

from deployments.admission.fair_share import Tenant
from deployments.admission.quota import Client
from deployments.embedding.frames import Answered
from deployments.embedding.placer import Hedges
from deployments.embedding.request import Request, embedded
from deployments.errors import Busy, DeadlineExceeded, EngineBroken, EngineFailed, OverShare, ReplicaLost, Unavailable
from deployments.models.text_pairs import Pair
from tests.kit.scripted_replicas import (
    ScriptedReplica,
    admits,
    answer,
    answers,
    breaks,
    dies,
    fails,
    hangs,
    lapses,
    placer_of,
    refuses,
    request_of,
    says_nothing,
)

TENANT = Tenant("big")
CLIENT = Client(TENANT)
GREEDY = {"under_share_opens_s": 0.1, "over_share": ["big"]}


def replicas(*scripts):
    """One for each script, in this order."""
    return [ScriptedReplica(f"a{rank}", script, rank=rank) for rank, script in enumerate(scripts)]


# --- the way of a request ---------------------------------------------------------------------------------------------


async def test_pool_by_pool_until_one_admits():
    a1, a2 = replicas(refuses, refuses)
    c1 = ScriptedReplica("c1")
    placer = placer_of(a1, a2, cpu=[c1])
    found = await answer(placer, request_of(75))
    assert [pool for pool, _ in found.values()] == ["cpu"]
    offers = [one.heard[0] for one in (a1, a2, c1)]
    assert [offer.left_s for offer in offers] == [pytest.approx(left_s) for left_s in (1.0, 0.99, 0.98)]
    assert [offer.again for offer in offers] == [False, True, False]  # the pool has counted its work
    assert {(offer.partial, offer.bulk, offer.tenant) for offer in offers} == {(False, False, None)}


async def test_a_deadline_that_has_passed_is_no_time_left():
    (a1,) = replicas(refuses)
    placer, request = placer_of(a1), request_of(75, allowed_s=0.4)
    await asyncio.sleep(0.5)
    placer.send(request, a1, [0], partial=False)
    assert a1.heard[0].left_s == 0


async def test_what_is_offered_of_a_bulk_request():
    (a1,) = replicas(refuses)
    placer = placer_of(a1)
    placer.send(request_of(75, 75, bulk=True), a1, [1], partial=True)
    assert a1.heard[0].left_s == pytest.approx(1.0)
    assert (len(a1.heard[0].queries), a1.heard[0].bulk, a1.heard[0].partial) == (1, True, True)


async def test_the_rest_of_a_request_goes_to_the_next_and_all_but_the_last_are_confirmed():
    a1, a2, a3 = replicas(admits(2), admits(1), admits(2))
    found = await answer(placer_of(a1, a2, a3), request_of(1, 2, 3, 4, 5))
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert [[len(ids) for ids in one.heard[0].queries] for one in (a1, a2, a3)] == [[1, 2, 3, 4, 5], [3, 4, 5], [4, 5]]
    assert [one.confirmed for one in (a1, a2, a3)] == [[1], [1], []]
    assert all(one.heard[0].partial for one in (a1, a2, a3))


async def test_what_is_held_is_called_off_when_the_rest_has_no_room():
    a1, a2 = replicas(admits(2, says_nothing), refuses)
    with pytest.raises(Busy):
        await answer(placer_of(a1, a2), request_of(75, 75, 75))
    assert (a1.called_off, a1.confirmed) == ([1], [])


async def test_a_client_that_goes_takes_its_queries_along():
    (a1,) = replicas(says_nothing)
    asked = asyncio.ensure_future(answer(placer_of(a1), request_of(75)))
    await asyncio.sleep(0.1)
    asked.cancel()
    await asyncio.wait([asked])
    assert a1.called_off == [1]


async def test_a_query_whose_replica_dies_is_offered_once_more_after_a_pause():
    a1, a2 = replicas(dies, answers)
    a1.scripts.append(refuses)
    assert len(await answer(placer_of(a1, a2), request_of(75))) == 1
    # 10 ms until it is lost, 50 for the news of others that died with it, 10 until the first refuses.
    assert a2.heard[0].left_s == pytest.approx(1.0 - 0.07, abs=1e-6)


async def test_a_query_that_is_lost_twice_is_lost():
    a1, a2 = replicas(dies, answers)
    a1.scripts.append(dies)
    with pytest.raises(ReplicaLost, match="it died"):
        await answer(placer_of(a1, a2), request_of(75))
    assert (len(a1.heard), len(a2.heard)) == (2, 0)


async def test_what_one_of_several_loses_is_offered_again_while_the_others_compute():
    a1, a2 = replicas(admits(2, lambda pending: pending.fail(ReplicaLost("it died"))), admits(3, after_s=0.5))
    a1.scripts.append(refuses)
    found = await answer(placer_of(a1, a2), request_of(1, 2, 3, 4, 5))
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert [len(ids) for ids in a2.heard[1].queries] == [1, 2]
    # Two offers, the loss, the news of others, and an offer that is refused: not half a second later.
    assert a2.times[1] == pytest.approx(4 * 0.01 + 0.05 - 0.01, abs=1e-3)


async def test_a_query_whose_engine_is_broken_is_offered_elsewhere_once_and_at_once():
    a1, a2 = replicas(breaks, answers)
    assert len(await answer(placer_of(a1, a2), request_of(75))) == 1
    assert a2.times == [pytest.approx(0.01)]
    a1, a2, a3 = replicas(breaks, breaks, answers)
    with pytest.raises(EngineBroken, match="no kernel"):
        await answer(placer_of(a1, a2, a3), request_of(75))
    assert (len(a1.heard), len(a2.heard), len(a3.heard)) == (1, 1, 0)


@pytest.mark.parametrize(
    ("scripts", "allowed_s", "error"),
    [
        ([fails, answers], 1.0, EngineFailed),  # by the query's own fault
        ([breaks], 1.0, EngineBroken),  # there is no other
        ([breaks, refuses], 1.0, Busy),
        ([breaks, answers], 0.005, EngineBroken),  # its deadline has passed
    ],
)
async def test_a_failure_that_cannot_be_mended_is_told(scripts, allowed_s, error):
    links = replicas(*scripts)
    with pytest.raises(error) as told:
        await answer(placer_of(*links), request_of(75, allowed_s=allowed_s))
    assert type(told.value) is error
    assert [len(link.heard) for link in links] == [1, *[int(error is Busy)] * (len(links) - 1)]


async def test_a_replica_whose_engine_is_broken_is_ejected_and_asked_again_later(caplog):
    a1, a2 = replicas(*[breaks] * 2)
    placer = placer_of(a1, a2)
    for count in range(1, 7):
        a1.scripts[:], a2.scripts[:] = [breaks], []
        a1.view.outlier.failures = min(count, 5)  # as its reports say
        await answer(placer, request_of(75))
    assert len(a1.heard) == 5
    assert caplog.text.count("a0 for 30 s: its engine has failed or hung 5 times in a row") == 1
    assert placer.pools["accelerator"].ejected() == [a1]
    a2.view.outlier.failures = 5
    a2.scripts[:] = [breaks]
    with pytest.raises(EngineBroken):
        await answer(placer, request_of(75))
    assert placer.pools["accelerator"].ejected() == [a1]  # never the last one
    await asyncio.sleep(30.0)
    await answer(placer, request_of(75))
    assert len(a1.heard) == 6


# --- replicas that hang -----------------------------------------------------------------------------------------------


async def test_what_a_hung_replica_has_is_offered_elsewhere_and_the_first_answer_counts():
    a1, a2 = replicas(hangs, answers)
    assert len(await answer(placer_of(a1, a2), request_of(75))) == 1
    assert (a1.called_off, a2.heard[0].left_s, a2.heard[0].partial) == ([1], pytest.approx(0.99), True)

    def wakes(pending):
        pending.hang()
        asyncio.get_running_loop().call_later(0.02, answers, pending)

    a1, a2 = replicas(wakes, admits(1, says_nothing))
    assert len(await answer(placer_of(a1, a2), request_of(75))) == 1
    assert (a1.called_off, a2.called_off) == ([], [1])


@pytest.mark.parametrize(
    "scripts", [[hangs], [hangs, refuses], [hangs, dies], [hangs, lambda one: one.admit(1) or one.hang()]]
)
async def test_what_hangs_and_has_no_room_elsewhere_is_told_at_its_deadline(scripts):
    links = replicas(*scripts)
    placer = placer_of(*links)
    with pytest.raises(
        DeadlineExceeded, match="made no progress, because its host has no CPU time left or its device hangs"
    ):
        await answer(placer, request_of(75))
    assert asyncio.get_running_loop().time() == pytest.approx(1.0, abs=1e-3)
    assert links[0].called_off == []  # a run that nobody waits for would teach nothing
    assert placer.refused == 0


async def test_what_had_no_room_elsewhere_is_offered_once_more_when_the_hung_replica_is_dead():
    def dies_later(pending):
        pending.hang()
        asyncio.get_running_loop().call_later(0.3, dies, pending)

    a1, a2 = replicas(dies_later, refuses)
    assert len(await answer(placer_of(a1, a2), request_of(75))) == 1
    assert (len(a1.heard), len(a2.heard)) == (1, 2)


async def test_a_lost_query_whose_second_replica_hangs_undecided_is_answered_by_a_third():
    """Beside the answer to another query of the request."""

    def gives_up(pending):
        lost = ReplicaLost("it makes no progress")
        asyncio.get_running_loop().call_later(
            0.1, lambda: pending.hang() if pending.admitted is None else pending.fail(lost)
        )

    a1, a2 = replicas(admits(1, after_s=0.4), admits(1, dies))
    a1.scripts.append(refuses)
    a2.scripts.append(refuses)
    a3, a4 = ScriptedReplica("a3", gives_up, rank=2), ScriptedReplica("a4", rank=3)
    assert len(await answer(placer_of(a1, a2, a3, a4), request_of(75, 75))) == 2
    assert (len(a3.heard), len(a4.heard)) == (1, 1)


async def test_so_many_may_be_offered_elsewhere():
    a1, a2 = replicas(*[hangs] * 2)
    placer = placer_of(a1, a2)
    placer.hedges.left = 1.59  # and 0.2 for each that is offered
    a1.scripts[:] = [admits(2, hangs)]
    with pytest.raises(DeadlineExceeded):
        await answer(placer, request_of(75, 75))
    assert (len(a2.heard), placer.hedges.left) == (0, pytest.approx(1.99))
    placer.hedges.left = 1.6
    a1.scripts[:], a2.scripts[:] = [admits(2, hangs)], []
    assert len(await answer(placer, request_of(75, 75))) == 2
    hedges = Hedges()
    hedges.earn(5)
    assert hedges.left == 100
    assert [hedges.spend(101), hedges.spend(100), hedges.spend(1)] == [False, True, False]


async def test_what_has_no_room_elsewhere_leaves_the_budget_to_those_that_have():
    a1, a2 = replicas(hangs, refuses)
    placer = placer_of(a1, a2)
    placer.hedges.left = 0.8  # and 0.2 for each that is offered
    with pytest.raises(DeadlineExceeded):
        await answer(placer, request_of(75))
    a1.scripts[:] = [hangs]
    assert len(await answer(placer, request_of(75))) == 1
    assert len(a2.heard) == 2


async def test_parts_are_called_off_where_another_is_lost_while_they_are_placed():
    a1, a2 = replicas(admits(2, says_nothing), dies)
    a1.scripts += [admits(3)]
    found = await answer(placer_of(a1, a2), request_of(1, 2, 3))
    assert a1.called_off == [1]
    assert sorted(found) == [0, 1, 2]


async def test_what_a_replica_refuses_after_all_is_lost():
    (a1,) = replicas(lapses)
    a1.scripts.append(lapses)
    with pytest.raises(ReplicaLost, match="no room for it"):
        await answer(placer_of(a1), request_of(1, 2))


async def test_a_request_that_is_traced_keeps_what_was_offered_and_when_it_would_end():
    a1 = ScriptedReplica("a1", refuses, free_s=0.1)
    a2 = ScriptedReplica("a2", free_s=0.2)
    request = request_of(75, parts=[])
    await answer(placer_of(a1, a2), request)
    assert [(part.link, part.predicted_s) for part in request.parts] == [
        (a1, pytest.approx(0.1 + 0.275)),
        (a2, pytest.approx(0.2 - 0.01 + 0.275)),
    ]


async def test_an_answer_is_predicted_from_its_arrival():
    request, other = request_of(75), request_of(75)
    assert request.predicted_s is None
    await asyncio.sleep(0.25)
    for one in (request, other):
        await answer(placer_of(ScriptedReplica("a1", free_s=0.2)), one)
    found = [request.predicted_s, other.predicted_s]
    assert found == [pytest.approx(0.25 + 0.2 + 0.275), pytest.approx(0.25 + 0.01 + 0.2 + 0.275)]


# --- who is asked -----------------------------------------------------------------------------------------------------


def asked(placer, request, lengths=(75,)):
    links = placer.candidates(request, lengths)
    return [link.view.replica for link, ask in links if not placer.passes_over(request, link, ask, lengths)]


async def test_who_said_when_it_opens_is_not_asked_before_and_hears_of_the_work_later():
    full = [ScriptedReplica(f"f{rank}", opens_s=0.5, rank=rank) for rank in range(2)]
    a1, c1 = ScriptedReplica("a1"), ScriptedReplica("c1", opens_s=0.2)
    placer, request = placer_of(a1, *full, cpu=[c1]), request_of(75, 25, client=CLIENT)
    assert asked(placer, request, (75, 25)) == ["a1"]
    assert [one.refused for one in (*full, c1)] == [[(pytest.approx(0.1), TENANT)], [], [(pytest.approx(0.1), TENANT)]]
    assert (request.asked, request.last_pool) == (3, "cpu")
    assert asked(placer, request_of(75, deferrable=True)) == ["a1", "f0", "f1", "c1"]  # it waits behind the others
    await asyncio.sleep(0.2)
    assert asked(placer, request_of(75)) == ["a1", "c1"]


async def test_of_one_pool_four_are_asked_and_none_that_has_gone():
    many = [ScriptedReplica(f"a{rank}", rank=rank) for rank in range(6)]
    many[1].is_live = False
    assert asked(placer_of(*many), request_of(75)) == ["a0", "a2", "a3"]


async def test_a_closed_pool_is_not_asked():
    placer = placer_of(ScriptedReplica("a1"), cpu=[ScriptedReplica("c1")], queue_depth=0)
    assert asked(placer, request_of(75)) == ["c1"]


@pytest.mark.parametrize(
    ("how", "request_", "unseen", "is_asked"),
    [
        # More was sent to it than it can ever admit: within the SLO, or what the request allows, or by its depth.
        ({}, {}, (1, 1.1), False),
        ({}, {"allowed_s": 3.0}, (1, 1.1), True),
        ({}, {"allowed_s": 0.5}, (1, 0.9), True),
        ({"queue_depth": 4, "admission": "depth"}, {}, (3, 9.0), True),
        ({"queue_depth": 4, "admission": "depth"}, {}, (4, 0.1), False),
    ],
)
async def test_who_was_sent_enough_is_not_asked(how, request_, unseen, is_asked):
    a1 = ScriptedReplica("a1")
    a1.view.sent(1, *unseen)
    assert asked(placer_of(a1, **how), request_of(75, **request_)) == (["a1"] if is_asked else [])


async def test_it_is_full_where_all_open_pools_are():
    full, a1 = ScriptedReplica("f", opens_s=0.5), ScriptedReplica("a1")
    assert placer_of(full).is_full(request_of(75), 75)
    assert not placer_of(full, a1).is_full(request_of(75), 75)
    assert not placer_of(full, cpu=[a1]).is_full(request_of(75), 75)
    assert placer_of(a1, cpu=[full], queue_depth=0).is_full(request_of(75), 75)
    over_share = ScriptedReplica("g", opens_s=0.5, over_share=["big"])
    clients = (CLIENT, Client(Tenant("small")), None)
    assert [placer_of(over_share).is_full(request_of(75, client=client), 75) for client in clients] == [
        True,
        False,
        False,
    ]


async def test_a_short_query_is_offered_where_a_long_one_is_refused_here():
    state = {"opens_s": 0.05, "opens_cost": 0.15, "room": 0.1, "in_flight": 9, "room_grows": True, "free_s": 0.7}
    a1 = ScriptedReplica("a1", **state)
    placer = placer_of(a1)
    assert [placer.is_full(request_of(tokens), tokens) for tokens in (75, 150)] == [False, True]
    assert len(await answer(placer, request_of(75))) == 1
    with pytest.raises(Busy):
        await answer(placer, request_of(150))
    assert len(a1.heard) == 1
    assert a1.refused == [(pytest.approx(0.15), None)]


# --- what there is ----------------------------------------------------------------------------------------------------


async def test_capacity_is_what_idle_replicas_take_and_a_request_fits_that_they_take_in_the_time_that_is_left():
    model = (0.001, 0.0, 0.0, 0.0)  # a thousand a second
    placer = placer_of(ScriptedReplica("a1", model=model), cpu=[ScriptedReplica("c1", model=model)])
    await asyncio.sleep(0.2)
    requests = {count: request_of(*[75] * count) for count in (1, 749, 751, 1499, 1501)}
    await asyncio.sleep(0.25)
    assert placer.capacity == pytest.approx(2000)
    assert [count for count, request in requests.items() if placer.fits(request, 75)] == [1, 749, 751, 1499]
    assert [count for count, request in requests.items() if placer.fits(request, 150)] == [1, 749, 751, 1499]
    placer.pools["accelerator"].policy["slo_s"] = placer.pools["cpu"].policy["slo_s"] = 0.3
    assert placer.room_now(0.4, 75) == pytest.approx(600)
    assert 299 < placer.room_now(0.4, 75, 200) < 301  # the first pool is enough
    assert placer.is_idle(0.4)


async def test_how_many_routers_there_are_as_far_as_replicas_know():
    assert placer_of().routers == 1
    one, other, unknown = (ScriptedReplica(str(count), routers=count) for count in (2, 3, 9))
    unknown.view.forget()
    assert placer_of(one, unknown, cpu=[other]).routers == 3
    many = [ScriptedReplica(str(rank), rank=rank, routers=2 + rank // 4) for rank in range(5)]
    assert placer_of(*many).routers == 2  # it does not ask all: a refusal would take as long as there are replicas


@pytest.mark.parametrize(("unit", "first", "answered"), [("tokens", 100, 100), ("device_seconds", 0.1, 0.175)])
async def test_what_a_request_costs(unit, first, answered):
    placer = placer_of(ScriptedReplica("a1"), cpu=[ScriptedReplica("c1", model=(0.0, 0.002, 0.0, 0.2))])
    assert placer.price([75, 25], unit) == pytest.approx(first)
    assert placer.price([75, 25], unit, {0: ("cpu", None), 1: ("accelerator", None)}) == pytest.approx(answered)
    closed = placer_of(ScriptedReplica("a1"), queue_depth=0)
    assert closed.price([75, 25], unit) == (100 if unit == "tokens" else 0)
    assert closed.price([75, 25], unit, {0: ("accelerator", None)}) == pytest.approx(100 if unit == "tokens" else 0.075)


async def test_what_a_draining_pool_answered_has_its_price():
    placer = placer_of(ScriptedReplica("a1"), cpu=[ScriptedReplica("c1", model=(0.0, 0.002, 0.0, 0.2))])
    pool = placer.pools["cpu"]
    pool.links.clear()
    pool.changed()
    assert not pool.is_open
    assert placer.price([75], "device_seconds", {0: ("cpu", None)}) == pytest.approx(0.15)


async def test_who_can_answer():
    assert not placer_of().can_answer
    assert placer_of(ScriptedReplica("a1")).can_answer
    assert not placer_of(ScriptedReplica("a1"), queue_depth=0).can_answer
    assert placer_of(cpu=[ScriptedReplica("c1")]).can_answer


# --- why it is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drawn", "retry_after_s"), [(0.0, 1.0), (0.5, 2.0), (1.0, 3.0)])
async def test_clients_that_are_refused_together_return_one_after_the_other(drawn, retry_after_s):
    placer = placer_of(ScriptedReplica("a1", opens_s=0.502), slo_s=2.0, draw=lambda: drawn)
    with pytest.raises(Busy, match=rf"no room for 1 more within 1 s; retry in {retry_after_s:.2f} s") as refused:
        await answer(placer, request_of(75))
    assert refused.value.retry_after_s == retry_after_s
    assert not isinstance(refused.value, OverShare)
    assert placer.refused == 1


async def test_a_tenant_that_asks_for_more_than_its_share_is_told_so():
    placer = placer_of(ScriptedReplica("a1", opens_s=0.502, **GREEDY), ScriptedReplica("a2", opens_s=0.6))
    with pytest.raises(OverShare, match=r"exceeds its fair share; retry in 0\.50 s"):
        await answer(placer, request_of(75, client=CLIENT))


async def test_early_refusals_count_the_work_as_it_is_estimated():
    a1 = ScriptedReplica("a1", opens_s=0.5)
    placer, request = placer_of(a1), request_of(client=CLIENT)
    request.queries, request.ids = ["x", "y", "z"], []
    error = placer.busy_everywhere(request, [40] * 3)
    assert "no room for 3 more" in str(error)
    assert a1.refused == [(pytest.approx(3 * 0.04), TENANT)]


@pytest.mark.parametrize(
    ("lengths", "states", "tokenizing_s", "sentence"),
    [
        ([800], [{}], 0.0, None),
        ([801], [{}], 0.0, "a query of 801 tokens takes longer than 1 s here, even on an idle device; allow more"),
        ([801], [{}, {"slowdown": 0.9}], 0.0, None),  # one is faster than it was
        ([800], [{"slowdown": 3.0}], 0.0, None),  # it may recover
        ([801], [{"opens_s": 0.5}], 0.0, "a query of 801 tokens takes longer than 1 s here"),  # now it is full too
        ([75, 801], [{}], 0.0, "2 queries of up to 801 tokens take longer than 1 s here"),
        ([400, 401], [{}], 0.0, "2 queries of up to 401 tokens take longer than 1 s here"),
        ([400, 401], [{}, {}], 0.0, None),
        ([850, 10], [{}, {}], 0.0, "2 queries of up to 850 tokens take longer than 1 s here"),  # none takes the longest
        ([10, 850], [{}, {}], 0.0, "2 queries of up to 850 tokens take longer than 1 s here"),
        ([500, 400], [{}, {"model": (0.0, 0.001, 0.0, 2.0)}], 0.0, "2 queries of up to 500 tokens take longer than"),
        ([3], [{}], 0.79, None),
        ([3], [{}], 0.8, "a query of 3 tokens takes longer than 1 s here (0.8 s to tokenize), even on an idle device"),
    ],
)
async def test_what_would_never_be_in_time_is_told_so(lengths, states, tokenizing_s, sentence):
    """Nobody is told to retry what an idle device could not do either: 200 ms a batch and 1 ms a token."""
    placer = placer_of(*[ScriptedReplica(f"a{rank}", refuses, rank=rank, **state) for rank, state in enumerate(states)])
    request = request_of(*lengths)
    request.tokenizing_s = tokenizing_s
    with pytest.raises(DeadlineExceeded if sentence else Busy) as refused:
        await answer(placer, request)
    assert str(refused.value).startswith(sentence or "busy: there is no room")
    assert placer.refused == (sentence is None)


async def test_by_count_no_time_is_promised_and_bulk_waits():
    (a1,) = replicas(refuses)
    placer = placer_of(a1, admission="depth", queue_depth=1)
    assert not placer.is_never(request_of(9000), [9000])
    assert not placer_of(a1).is_never(request_of(9000, bulk=True), [9000])
    assert placer_of(a1).is_never(request_of(9000), [9000])
    a1.view.state = None  # nothing is known of it
    assert not placer_of(a1).is_never(request_of(9000), [9000])


async def test_where_nobody_lives_it_is_unavailable():
    placer = placer_of()
    with pytest.raises(Unavailable, match="no live replica"):
        await answer(placer, request_of(75))


async def test_the_answer_to_a_request():
    request = Request(["abc", Pair("de", "f"), [1, 2]], outputs=("text",), prompt="query: ", started=-0.25)
    assert request.characters == 3 + 3 + 2 + 3 * 7
    request.ids, request.tokenized = [range(3), range(4), range(2)], -0.125
    answers = {
        index: (pool, Answered(1, 0, f"numbers {index}", 1.0 + index, queue_s, compute_s))
        for index, pool, queue_s, compute_s in (
            (2, "cpu", 0.1, 0.3),
            (0, "cpu", 0.2, 0.1),
            (1, "accelerator", 0.0, 0.2),
        )
    }
    await asyncio.sleep(0.5)
    done = embedded(request, answers, None)
    assert (done.vectors, done.norms) == (["numbers 0", "numbers 1", "numbers 2"], [1.0, 2.0, 3.0])
    assert (done.pools, done.tokens, done.characters) == (("accelerator", "cpu"), 9, 6)
    assert (done.tokenization_s, done.queue_s, done.compute_s) == (0.125, 0.2, 0.3)
    assert (done.total_s, done.others) == (pytest.approx(0.75, abs=1e-6), {})
    request.tokenized = 0.35  # the loop's clock lags behind the replica's: no less than the longest part and this
    assert embedded(request, answers, None).total_s == pytest.approx(0.6 + 0.4)
    request.outputs = ("tokens", "sparse")
    done = embedded(request, answers, lambda numbers, ids: {"tokens": (numbers, len(ids)), "sparse": numbers[-1]})
    assert done.vectors == [("numbers 0", 3), ("numbers 1", 4), ("numbers 2", 2)]
    assert done.others == {"sparse": ["0", "1", "2"]}


def test_what_a_client_asks_counts_against_its_tenant():
    request = Request([], client=CLIENT, started=2.0, due=5.0)
    assert (request.tenant, request.quota, request.allowed_s) == (TENANT, None, 3.0)
