"""The way of a query: tokenize, place, answer. Routers and replicas in virtual time."""

import asyncio
import math
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.simulation.device import Device
from deployments.admission.fair_share import Tenant
from deployments.admission.quota import Client, Quota
from deployments.embedding.request import Embedded
from deployments.engines import TokenBatch
from deployments.errors import Busy, DeadlineExceeded, InvalidInput, Unavailable
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Tokenizer
from tests.kit.replica_world import V100, XEON
from tests.kit.router_world import Replica, World, ask, several, text

QUICK = (0.003, 0.004)  # alpha, beta


def kinds(answers):
    return Counter(type(one).__name__ for one in answers)


def pools_of(answers):
    return Counter(pool for one in answers if isinstance(one, Embedded) for pool in one.pools)


async def test_the_accelerator_first_then_the_cpu_then_busy():
    slo_s, pools = 2.0, {"accelerator": [Replica("a", V100)], "cpu": [Replica("c", XEON)]}
    router = await World(pools, slo_s=slo_s).router()
    assert pools_of(await asyncio.gather(*several(router, 60))) == {"accelerator": 60}
    await asyncio.sleep(3)
    answers = await asyncio.gather(*several(router, 150))
    found = pools_of(answers)
    assert 85 <= found["accelerator"] <= 96
    assert 15 <= found["cpu"] <= 19
    busy = [one for one in answers if isinstance(one, Busy)]
    assert len(busy) == 150 - sum(found.values())
    assert all(0 < one.retry_after_s < 2 * slo_s + 0.5 for one in busy)
    assert all(one.total_s <= slo_s for one in answers if isinstance(one, Embedded))


async def test_who_comes_back_when_told_or_has_a_longer_deadline_is_admitted():
    router = await World({"accelerator": [Replica("a")]}).router()
    first = several(router, 60)
    await asyncio.sleep(0.05)
    deferrable = several(router, 1, timeout_s=20.0)
    refused = await ask(router)
    await asyncio.sleep(refused.retry_after_s)
    answers = await asyncio.gather(ask(router), *deferrable, *first)
    assert [isinstance(one, Embedded) for one in answers[:2]] == [True, True]


async def test_a_pool_without_replicas_is_not_live_and_a_closed_one_is_not_counted():
    lost, other = Replica("a"), Replica("c")
    world = World({"accelerator": [lost], "cpu": [other]})
    router = await world.router()
    assert router.live_pools == {"accelerator": True, "cpu": True}
    lost.die()
    await asyncio.sleep(0.1)
    assert router.live_pools == {"accelerator": False, "cpu": True}
    await router.reconfigure({**world.config, "accelerator": {"queue_depth": 0}})
    assert router.live_pools == {"cpu": True}
    other.die()
    await asyncio.sleep(0.1)
    assert isinstance(await ask(router), Unavailable)


async def test_a_reset_connection_does_not_run_a_query_twice_at_once():
    replicas = [Replica("a1"), Replica("a2")]
    world = World({"accelerator": replicas})
    router = await world.router()
    asked = several(router, 20, timeout_s=5.0)
    await asyncio.sleep(0.1)
    busy = max(replicas, key=lambda replica: replica.runner.schedule.in_flight)
    before = {replica.name: sum(replica.engine.runs) for replica in replicas}
    busy.reset()
    await asyncio.sleep(0.2)
    assert {replica.name: sum(replica.engine.runs) for replica in replicas} == before  # it may still run there
    answers = await asyncio.gather(*asked)
    assert kinds(answers) == {"Embedded": 20}
    assert all(replica.runner.schedule.in_flight == 0 for replica in replicas)


async def stream(router, per_s, seconds):
    """Queries that come evenly: (their answers, the longest that one took)."""
    loop, took = asyncio.get_running_loop(), []

    async def one():
        began = loop.time()
        answer = await ask(router)
        took.append(loop.time() - began)
        return answer

    asked = []
    for _ in range(per_s * seconds):
        asked.append(asyncio.ensure_future(one()))
        await asyncio.sleep(1 / per_s)
    return await asyncio.gather(*asked), max(took)


@pytest.mark.parametrize(("broken", "wanted"), [(1, {"accelerator": 600}), (2, {"cpu": 150})])
async def test_replicas_whose_runs_fail_at_once_do_not_take_everything(broken, wanted):
    accelerators = [Replica(name, V100) for name in ("a1", "a2")]
    router = await World({"accelerator": accelerators, "cpu": [Replica("c", XEON)]}, slo_s=2.0).router()
    for replica in accelerators[:broken]:
        replica.runner.warmed_up(TokenBatch.pack([np.ones(75, np.int32)]))
        replica.engine.device = Device(0.0, 0.001)
        replica.engine.outcome = lambda _: RuntimeError("no kernel image")
    answers, _ = await stream(router, 30, 20)
    found = kinds(answers)
    assert found["EngineBroken"] <= 5 * (broken - 1)
    assert {pool: count for pool, count in pools_of(answers).items() if count < wanted.get(pool, 0)} == {}
    assert found["Embedded"] + found["EngineBroken"] + found["Busy"] == 600
    assert [replica.runner.problem for replica in accelerators[:broken]] == ["no kernel image"] * broken


async def test_a_replica_that_gives_nothing_but_what_is_no_number_is_ejected():
    replicas = [Replica(name, V100) for name in ("a1", "a2")]
    router = await World({"accelerator": replicas}, slo_s=2.0).router()
    replicas[0].runner.warmed_up(TokenBatch.pack([np.ones(75, np.int32)]))
    replicas[0].engine.outcome = lambda _: math.nan
    answers, _ = await stream(router, 20, 10)
    assert kinds(answers) == {"Embedded": 200}
    assert [link.view.replica for link in router.pools["accelerator"].ejected()] == ["a1"]


async def test_an_ejected_replica_is_back_when_the_others_have_gone():
    replicas = [Replica("a"), Replica("b")]
    world = World({"accelerator": replicas})
    router = await world.router()
    for _ in range(4):
        await asyncio.gather(*several(router, 6))
    replicas[0].engine.outcome = lambda _: RuntimeError("no kernel image")
    for _ in range(3):
        await asyncio.gather(*several(router, 8))
    pool = router.pools["accelerator"]
    assert [link.view.replica for link in pool.ejected()] == ["a"]
    replicas[0].engine.outcome = lambda _: None
    replicas[1].die()
    pool.follow(world.members("accelerator"), "b")
    assert pool.ejected() == []
    assert kinds(await asyncio.gather(*several(router, 1))) == {"Embedded": 1}


async def test_an_ejected_replica_is_back_when_the_other_pool_is_closed():
    world = World({"accelerator": [Replica("a")], "cpu": [Replica("c")]})
    router = await world.router()
    router.pools["accelerator"].links["a"].view.outlier.eject(asyncio.get_running_loop().time())
    await router.reconfigure({**world.config, "cpu": {**world.config["cpu"], "queue_depth": 0}})
    assert router.pools["accelerator"].ejected() == []
    assert kinds(await asyncio.gather(*several(router, 1))) == {"Embedded": 1}


async def test_the_only_replica_of_the_open_pools_is_not_ejected():
    replicas = [Replica("a"), Replica("c")]
    closed = {"queue_depth": 0, "alpha_s": 0.018, "beta_s": 0.27}
    router = await World({"accelerator": [replicas[0]], "cpu": [replicas[1]]}, cpu=closed).router()
    replicas[0].engine.outcome = lambda _: RuntimeError("no kernel image")
    for _ in range(3):
        await asyncio.gather(*several(router, 8))
    assert router.pools["accelerator"].ejected() == []


async def test_bulk_goes_elsewhere_when_an_engine_is_broken():
    replicas = [Replica("a"), Replica("b")]
    router = await World({"accelerator": replicas}).router()
    for _ in range(4):
        await asyncio.gather(*several(router, 6))
    first = router.pools["accelerator"].live[0].view.replica
    next(one for one in replicas if one.name == first).engine.outcome = lambda _: RuntimeError("no kernel image")
    answer = await ask(router, *[text()] * 40, bulk=True)
    assert type(answer).__name__ == "Embedded"


async def test_what_a_hung_device_has_is_answered_elsewhere_or_refused_by_its_deadline():
    replicas = [Replica(name, V100) for name in ("a1", "a2")]
    router = await World({"accelerator": replicas}, slo_s=2.0).router()
    asyncio.get_running_loop().call_later(3.0, setattr, replicas[0].engine, "slow", 60.0)
    answers, longest_s = await stream(router, 30, 10)
    assert longest_s <= 2.0 + 0.3
    found = kinds(answers)
    assert found["Embedded"] >= 270
    assert found["Embedded"] + found["DeadlineExceeded"] + found["Busy"] == 300


@pytest.mark.parametrize(
    ("queries", "slow", "timeout_s", "ended", "after_s"),
    [
        (85, 1.8, None, "Embedded", 3.24),
        (85, 1.8, 2.0, "DeadlineExceeded", 2.0),
        (8, 60.0, None, "DeadlineExceeded", 2.0),
        (85, 60.0, None, "DeadlineExceeded", 3.75),  # twice the predicted time
    ],
)
async def test_a_late_query_is_answered_unless_its_client_set_a_time_or_its_only_replica_seems_to_hang(
    queries, slow, timeout_s, ended, after_s
):
    """As docs/use.md says of deadlines."""
    replica = Replica("a", (0.018, 0.27))
    router = await World({"accelerator": [replica]}, slo_s=2.0).router()
    replica.engine.slow, began = slow, asyncio.get_running_loop().time()
    late = []
    router.metrics.promised = lambda total_s, allowed_s: late.append(total_s > allowed_s)
    answers = await asyncio.gather(*several(router, queries, timeout_s=timeout_s))
    assert kinds(answers) == {ended: queries}
    assert asyncio.get_running_loop().time() - began == pytest.approx(after_s, abs=0.05)
    assert any(late) is (ended == "Embedded")


@pytest.mark.parametrize(("replicas", "ended"), [(2, "Embedded"), (1, "DeadlineExceeded")])
async def test_what_a_replica_has_that_cannot_be_reached_is_answered_elsewhere_or_refused_by_its_deadline(
    replicas, ended
):
    world = World({"accelerator": [Replica(name, V100) for name in ("a1", "a2")[:replicas]]}, slo_s=2.0)
    router = await world.router()
    began, asked = asyncio.get_running_loop().time(), several(router, 8)
    await asyncio.sleep(0.1)
    world.connect = Mock(side_effect=TimeoutError)
    first = max(world.replicas.values(), key=lambda one: one.runner.schedule.in_flight)
    first.reset()
    assert kinds(await asyncio.gather(*asked)) == {ended: 8}
    assert asyncio.get_running_loop().time() - began <= 2.01


async def test_devices_that_have_become_slow_do_not_fail_for_ever():
    """A run that is overdue ends, and teaches how slow the device is."""
    replicas = [Replica(name, V100) for name in ("a1", "a2")]
    router = await World({"accelerator": replicas}).router()
    for replica in replicas:
        asyncio.get_running_loop().call_later(1.0, setattr, replica.engine, "slow", 2.9)
    await stream(router, 40, 15)
    answers, _ = await stream(router, 40, 15)
    found = kinds(answers)
    assert found["Embedded"] > 30  # a run of one takes 0.83 s
    assert found["Embedded"] + found["Busy"] == 600


async def test_a_request_of_a_thousand_texts_beside_single_queries():
    replicas = [Replica("a1", (0.002, 0.05), 8), Replica("a2", (0.002, 0.05), 8)]
    router = await World({"accelerator": replicas}).router()
    large = asyncio.ensure_future(ask(router, *[text(20 + i % 90) for i in range(1000)]))
    single = []
    for _ in range(100):
        single += several(router, 1)
        await asyncio.sleep(0.02)
    answers = await asyncio.gather(*single)
    assert kinds(answers) == {"Embedded": 100}
    assert all(one.total_s <= 1.0 for one in answers)
    done = await large
    assert len(done.vectors) == 1000
    assert [vector[1] for vector in done.vectors] == [20 + i % 90 for i in range(1000)]  # in their order
    assert all(replica.runner.schedule.in_flight == 0 for replica in replicas)


async def test_a_request_that_is_bulk_for_its_size_has_bulks_time():
    replica = Replica("a", (0.1, 0.1))
    router = await World({"accelerator": [replica]}, request_timeout_s=5.0).router()
    assert len((await ask(router, *[text()] * 100)).vectors) == 100


async def test_too_much_bulk_is_refused_before_it_is_tokenized(monkeypatch):
    router = await World({"accelerator": [Replica("a")]}, bulk={"max_waiting": 2_100}).router()
    told = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, texts, **_: told.append(texts))
    for bulk in (False, True):
        assert isinstance(await ask(router, *[text()] * 2_101, bulk=bulk), Busy)
    assert told == []


@pytest.mark.parametrize(("timeout_s", "most"), [(None, 60), (4.0, 120)])  # the latter is deferrable
async def test_of_large_texts_most_are_refused_before_they_are_tokenized(monkeypatch, timeout_s, most):
    router = await World({"accelerator": [Replica("a")]}).router()
    encode, told = Tokenizer.encode, []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, *a, **k: told.append(1) or encode(self, *a, **k))
    answers = await asyncio.gather(*several(router, 200, "hello " * 1000, timeout_s=timeout_s))
    assert len(told) < most
    found = kinds(answers)
    assert found["Busy"] > 200 - most
    assert found["Embedded"] > 0


@pytest.mark.parametrize(
    ("own_s", "error", "sentence"),
    [(1.2, DeadlineExceeded, "takes longer than 1 s here (1.2 s to tokenize)"), (0.1, Busy, "retry in")],
)
async def test_a_text_that_takes_too_long_to_tokenize_is_never_told_to_retry(own_s, error, sentence):
    """Unless it only waited for others' texts. Nor does an idle device take it as a probe."""
    router, found = await World({"accelerator": [Replica("a")]}).router(), []
    router.metrics.failed = lambda *_, late: found.append(late)
    await asyncio.sleep(60.0)

    async def encode(queries, *_, **__):
        await asyncio.sleep(1.2)
        return [np.ones(3, np.int32) for _ in queries], own_s

    router.encoder.encode = encode
    answer = await ask(router, "x" * 10_000_000)
    assert isinstance(answer, error)
    assert sentence in str(answer)
    assert found == [False]


async def test_a_query_that_could_never_be_in_time_is_not_told_to_retry_while_devices_are_full():
    router = await World({"accelerator": [Replica("a", (0.05, 0.1))]}).router()
    several(router, 100)
    await asyncio.sleep(0.05)
    assert isinstance(await ask(router, text(128)), Busy)
    many = await ask(router, *[text()] * 3, timeout_s=0.2)
    assert isinstance(many, DeadlineExceeded)
    assert str(many).startswith("3 queries of up to 75 tokens take longer than 0.2 s here, even on an idle device")


async def test_a_hang_up_frees_its_place_at_once():
    replicas = [Replica("a1"), Replica("a2")]
    router = await World({"accelerator": replicas}).router()
    asked = [*several(router, 30), *several(router, 1, *[text()] * 30)]
    await asyncio.sleep(0.001)
    assert sum(replica.runner.schedule.in_flight for replica in replicas) == 60
    for one in asked:
        one.cancel()
    await asyncio.sleep(0.001)
    for replica in replicas:
        assert replica.runner.schedule.queue.count == 0
        assert replica.runner._run is None or replica.runner._run.stop.is_set()
    assert all(not link._channel.pending for link in router.pools["accelerator"].live)


async def test_a_quota_is_divided_among_the_routers_that_live():
    world = World({"accelerator": [Replica("a", QUICK, 8)]})
    routers = [await world.router("r0"), await world.router("r1")]
    await asyncio.gather(*(ask(router) for router in routers))
    clients = [Client(Tenant("a"), Quota(1500.0, "tokens")) for _ in routers]  # each Router reads the file itself
    answers = []
    for step in range(1000):  # 10 s; each Router is asked 50 times a second, for 75 tokens
        router = step % 2
        answers.append(asyncio.ensure_future(ask(routers[router], text(75), client=clients[router])))
        await asyncio.sleep(0.01)
    answers = await asyncio.gather(*answers)
    tokens = sum(one.tokens for one in answers if isinstance(one, Embedded))
    assert 1500 * 10 <= tokens <= 1500 * 15 + 150
    refused = [one for one in answers if not isinstance(one, Embedded)]
    assert kinds(refused) == {"OverQuota": len(refused)}
    assert "tokens" in refused[0].message


async def test_what_is_refused_costs_no_quota():
    router = await World({"accelerator": [Replica("a")]}).router()
    client = Client(Tenant("a"), Quota(1.0, "device_seconds"))
    first = several(router, 60, client=client)
    await asyncio.sleep(0.05)
    assert isinstance(await ask(router, client=client), Busy)
    answered = sum(isinstance(one, Embedded) for one in await asyncio.gather(*first))
    assert client.quota._left == pytest.approx(5 - 0.018 * answered, abs=0.06)  # it is filled up meanwhile


async def test_requests_at_once_get_no_more_of_a_quota_than_one_after_another():
    router = await World({"accelerator": [Replica("a", QUICK, 8)]}).router()
    client = Client(Tenant("a"), Quota(300.0, "tokens"))  # 1,500 at once: of 500 tokens each, cut to 256
    answers = await asyncio.gather(*several(router, 200, text(500) + "hello " * 300, client=client))
    assert kinds(answers) == {"Embedded": 6, "OverQuota": 194}


@pytest.mark.parametrize(("goes", "paid"), [("hang-up", 75), ("out of time", 75), ("engine fails", 0)])
async def test_who_goes_pays_for_what_a_device_may_have_computed(goes, paid):
    replica, quota = Replica("a"), Quota(1000.0, "tokens")
    router = await World({"accelerator": [replica]}).router()
    replica.engine.slow = 100.0
    if goes == "engine fails":
        replica.engine.outcome = lambda _: MemoryError()
    (asked,) = several(router, 1, client=Client(Tenant("a"), quota), timeout_s=0.4 if goes == "out of time" else None)
    await asyncio.sleep(0.2)
    if goes == "hang-up":
        asked.cancel()
    await asyncio.wait([asked])
    assert quota._left == 5000 - paid


async def test_a_router_that_starts_waits_for_its_first_replica_but_not_for_ever(monkeypatch):
    loop = asyncio.get_running_loop()
    monkeypatch.setattr("deployments.serving.router.time.time", loop.time)
    world = World({"accelerator": [Replica("a")]})
    world.replicas["a"].alive = False
    began = loop.time()
    router = await world.router()
    await router.joined()
    assert loop.time() - began == pytest.approx(600.0, abs=0.05)
    await router.joined()  # a config that changes later does not wait
    assert loop.time() - began == pytest.approx(600.0, abs=0.05)
    world.replicas["a"].alive = True
    second = await world.router("r1")
    began = loop.time()
    await second.joined()
    assert loop.time() == began
    assert second.can_answer


async def test_a_new_config_reaches_every_replica_and_a_bad_one_changes_nothing():
    replica = Replica("a")
    world = World({"accelerator": [replica]})
    router = await world.router()
    await router.reconfigure({**world.config, "admission": "depth", "accelerator": {"queue_depth": 7}})
    await asyncio.sleep(0.01)
    policy = replica.runner.schedule.limits.policy
    assert (policy.admission, policy.depth) == ("depth", 7)
    await router.reconfigure({**world.config, "slo_s": 0})
    assert (router.config.admission, policy.depth) == ("depth", 7)
    assert "slo_s" in router.config_problem


async def test_a_cpu_pool_that_adds_little_is_left_out_until_the_accelerator_is_lost():
    quick = Replica("a", (0.00011, 0.007))
    world = World({"accelerator": [quick], "cpu": [Replica("c", (0.0147, 0.05))]})
    router = await world.router()
    assert router.pools["cpu"].left_out
    assert router.topology_reason.startswith("accelerator only: the CPU would add 0.7%, less than 5%")
    assert pools_of([await ask(router)]) == {"accelerator": 1}
    quick.die()
    await asyncio.sleep(3)
    assert not router.pools["cpu"].left_out
    assert pools_of([await ask(router)]) == {"cpu": 1}


async def test_a_cpu_pool_that_was_left_out_answers_while_the_accelerator_hangs():
    world = World({"accelerator": [Replica("a", (0.00011, 0.007))], "cpu": [Replica("c", (0.0147, 0.05))]})
    router = await world.router()
    assert router.pools["cpu"].left_out
    router.pools["accelerator"].live[0].hangs = True
    await asyncio.sleep(3)
    assert not router.pools["cpu"].left_out


async def test_the_papers_cpu_pool_is_used():
    router = await World({"accelerator": [Replica("a", V100)], "cpu": [Replica("c", XEON)]}).router()
    assert not router.pools["cpu"].left_out


async def test_an_error_is_counted_once():
    world = World({"accelerator": [Replica("a")]})
    router = await world.router()
    counted = []
    router.metrics.failed = lambda error, queries, **_: counted.append((type(error).__name__, queries))
    error = await ask(router, text(10_000), cuts=Cuts(truncate=False))
    router.count_invalid(error)
    router.count_invalid(InvalidInput("not JSON"))
    assert counted == [("InvalidInput", 1), ("InvalidInput", 1)]
