"""The Router of generation with replicas without Ray: the product's Stepper, emulated devices, virtual time."""

import asyncio
import contextlib
import functools
from collections import Counter
from itertools import chain
from unittest.mock import ANY, Mock

import numpy as np
import pytest

from deployments.admission.fair_share import Tenant
from deployments.admission.quota import Client, Quota
from deployments.errors import (
    Busy,
    DeadlineExceeded,
    EngineBroken,
    EngineFailed,
    InvalidInput,
    OverQuota,
    ReplicaLost,
    SettingsError,
    TimedOut,
    Unavailable,
    WindveError,
)
from deployments.generation import pool as pool_module
from deployments.generation.channel import GenerationChannel
from deployments.generation.engine.emulated_steps import followings
from deployments.generation.engine.steps import Computed
from deployments.generation.planned_steps import PlannedStep
from deployments.generation.replica import Generator
from deployments.generation.request import GenerationRecord, WantedGeneration
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from deployments.generation.scheduler.work import Chunk, load_of
from deployments.generation.text.sampling import Sampling
from deployments.serving import replica_set
from serve_app.generation.group import Generations
from tests.kit import generation_replicas
from tests.kit.generation_replicas import ARGS, EMULATED, VOCABULARY, answer_to, reach_of, router_of

BLOCKS = 32
MODEL = StepTime(0.002, 0.0001, 0.0, 0.00002, 0.0, 4)
CONFIG = {"ttft_s": 1.0, "tpot_s": 0.05}


Replica = functools.partial(generation_replicas.Replica, model=MODEL, blocks=BLOCKS)


@contextlib.asynccontextmanager
async def service(monkeypatch, *pools, args=ARGS, end_tokens=(), **config):
    """A Router, and its pools' replicas: the first pool is the accelerator's."""
    monkeypatch.setattr(pool_module.GenerationPool, "connect", lambda _: None)
    monkeypatch.setattr(replica_set, "reach", reach_of(lambda: chain(*pools)))
    router = router_of(("accelerator", "cpu")[: len(pools)], args, end_tokens)
    await router.reconfigure({**CONFIG, **config})
    for pool, replicas in zip(router.pools.values(), pools, strict=True):
        pool.follow({replica.name: replica.about for replica in replicas}, None)
    await until(lambda: all(pool.live for pool in router.pools.values()))
    try:
        yield router
    finally:
        for pool in router.pools.values():
            pool.follow({}, None)


def asked(length=10, tokens=8, seed=0, **more):
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)
    return WantedGeneration(**{"ids": ids, "most_tokens": tokens, "sampling": Sampling(0.0), **more})


def expected(one):
    return answer_to(one.ids.tolist(), one.most_tokens)


async def read(pieces):
    """(ids, text, finish) of each answer."""
    found = {}
    async for piece in pieces:
        ids, text, _ = found.get(piece.answer, ([], "", None))
        found[piece.answer] = ([*ids, *(one.id for one in piece.tokens)], text + piece.text, piece.finish)
    return [found[answer] for answer in sorted(found)]


def text_of(ids):
    return " ".join(f"w{number}" for number in ids)


async def until(holds):
    async with asyncio.timeout(2):
        while not holds():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.005)


async def freed(*replicas):
    await until(lambda: all(replica.is_free for replica in replicas))


async def test_tokens_come_as_text_and_in_the_order_of_their_answers(monkeypatch):
    replica = Replica("a")
    async with service(monkeypatch, [replica]) as router:
        several = [asked(5 + 60 * seed, 5 + seed, seed) for seed in range(6)]
        got = await asyncio.gather(*[read(await router.begin(one)) for one in several])
        for one, [(ids, text, finish)] in zip(several, got, strict=True):
            assert (ids, text, finish) == (expected(one), text_of(expected(one)), "length")
        many = asked(40, 6, answers=3)
        assert await read(await router.begin(many)) == [(expected(many), text_of(expected(many)), "length")] * 3
        await freed(replica)
        assert router.describe()["pools"]["accelerator"]["live_replicas"] == 1


async def test_the_scores_of_a_prompt_come_with_each_piece_even_from_a_second_replica(monkeypatch):
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first], [second]) as router:
        for dies in (False, True):
            one = asked(1500, 3, answers=2, bulk=True, prompt_logprobs=1)
            begun = await router.begin(one)
            if dies:
                await asyncio.sleep(0.06)  # some steps have ended, with scores
                first.die()
            pieces = [piece async for piece in begun]
            expected = np.stack([one.ids[1:], followings(one.ids[:-1], VOCABULARY)], 1)
            assert {piece.answer for piece in pieces} == {0, 1}
            assert all((piece.scores.ids == expected).all() for piece in pieces)
            assert bool(second.stepper.schedule.steps) == dies
        plain = [piece async for piece in await router.begin(asked(30, 3))]
        assert {piece.scores for piece in plain} == {None}


@pytest.mark.parametrize("others", [0, 1])
async def test_a_scored_prompt_whose_first_token_is_overdue_goes_on(monkeypatch, others):
    """Here or on a second replica, which has half of the time that a request may take."""
    first, second, one = Replica("a"), Replica("b"), asked(200, 3, bulk=True, prompt_logprobs=1)
    async with service(monkeypatch, [first], *[[second]][:others], request_timeout_s=10.0) as router:
        first.device.slow = 8.0 / MODEL.seconds(StepLoad(rows=200))
        pieces = await router.begin(one)
        await asyncio.sleep(0.01)
        first.device.slow = 1.0
        found = [piece async for piece in pieces]
        assert [token.id for piece in found for token in piece.tokens] == expected(one)
        assert all((piece.scores.ids[:, 0] == one.ids[1:]).all() for piece in found)
        assert bool(second.stepper.schedule.steps) == bool(others)
        await freed(first, second)


async def test_a_replica_of_a_version_without_scores_says_so(monkeypatch):
    monkeypatch.setattr("deployments.generation.step_loop.StepLoop._scored", lambda *_: None)
    async with service(monkeypatch, [Replica("a")]) as router:
        with pytest.raises(EngineFailed, match="no log probabilities of prompts yet; try again after the upgrade"):
            await read(await router.begin(asked(30, 3, bulk=True, prompt_logprobs=1)))


async def test_a_stop_ends_an_answer_and_frees_its_place(monkeypatch):
    replica = Replica("a")
    async with service(monkeypatch, [replica]) as router:
        one = asked(tokens=400)
        ids = expected(one)
        stopped = asked(tokens=400, stops=(f"w{ids[5]}",))
        [(got, text, finish)] = await read(await router.begin(stopped))
        before = ids[: ids.index(ids[5])]
        assert (got, text.strip(), finish) == ([*before, ids[5]], text_of(before), "stop")
        await freed(replica)


async def test_an_end_token_is_counted_and_is_no_text(monkeypatch):
    replica = Replica("a")
    one = asked(tokens=30)
    ids = expected(one)
    async with service(monkeypatch, [replica], end_tokens=(ids[3],)) as router:
        until = ids.index(ids[3])
        assert await read(await router.begin(one)) == [(ids[: until + 1], text_of(ids[:until]), "stop")]
        ignored = asked(tokens=30, ignore_end=True)
        assert await read(await router.begin(ignored)) == [(ids, text_of(ids), "length")]
        stops = asked(tokens=30, ignore_end=True, stop_tokens=(ids[6],))
        until = ids.index(ids[6])
        assert await read(await router.begin(stops)) == [(ids[: until + 1], text_of(ids[:until]), "stop")]


async def test_neither_end_tokens_nor_stops_end_an_answer_before_its_least_tokens(monkeypatch):
    replica = Replica("a")
    async with service(monkeypatch, [replica], end_tokens=(expected(asked(tokens=30))[0],)) as router:
        for least in (1, 5):
            ((ids, text, _),) = await read(
                await router.begin(asked(tokens=30, sampling=Sampling(0.0, min_tokens=least)))
            )
            assert len(ids) > least
            start = text_of(ids[:least])
            more = {"stops": tuple(start), "sampling": Sampling(0.0, min_tokens=least)}
            ((_, searched, _),) = await read(await router.begin(asked(tokens=30, **more)))
            assert searched.startswith(start)
            assert text.startswith(start)


async def test_who_goes_frees_the_place_even_before_the_first_piece(monkeypatch):
    replica = Replica("a")
    async with service(monkeypatch, [replica]) as router:
        for reads in range(3):
            pieces = await router.begin(asked(tokens=2000))
            for _ in range(reads):
                await anext(pieces)
            assert replica.stepper.in_flight == 1
            await pieces.aclose()
            await freed(replica)


async def test_what_the_accelerator_has_no_room_for_goes_to_the_cpu_and_then_is_busy(monkeypatch):
    first, second = Replica("a", blocks=4), Replica("b", blocks=4)
    async with service(monkeypatch, [first], [second]) as router:
        begun = [await router.begin(asked(100, 400)) for _ in range(2)]
        assert [one.stepper.in_flight for one in (first, second)] == [1, 1]
        with pytest.raises(Busy) as refused:
            await router.begin(asked(100, 400))
        assert refused.value.retry_after_s > 0
        assert router.describe()["refused"] == 1
        for pieces in begun:
            await pieces.aclose()
        await freed(first, second)


async def test_what_no_replica_could_do_names_the_longest_prompt(monkeypatch):
    replica = Replica("a", blocks=2000)
    async with service(monkeypatch, [replica], ttft_s=0.05) as router:
        with pytest.raises(InvalidInput, match=r"send at most \d+ tokens"):
            await router.begin(asked(20_000, 2))
        with pytest.raises(DeadlineExceeded, match=r"at most \d+ tokens"):
            await router.begin(asked(20_000, 2, timeout_s=0.1))
        assert len(await read(await router.begin(asked(20_000, 2, timeout_s=5.0)))) == 1
        with pytest.raises(InvalidInput, match="fewer tokens or fewer answers"):
            await router.begin(asked(10, 300_000))
        long_ago = asyncio.get_running_loop().time() - 0.04
        with pytest.raises(InvalidInput, match=r"send at most \d+ tokens"):  # its own tokenizing is no passing delay
            await router.begin(asked(20_000, 2, received=long_ago, tokenizing_s=0.04))
        with pytest.raises(Busy):
            await router.begin(asked(20_000, 2, received=long_ago))


@pytest.mark.parametrize(("tpot_s", "second", "starts"), [(0.0001, 0.002, False), (0.0001, 1e-5, True)])
async def test_a_service_that_no_answer_could_be_in_time_does_not_start(monkeypatch, caplog, tpot_s, second, starts):
    """It names the setting and the value that would do, as its refusals do."""
    replicas = [Replica("a"), Replica("b", model=StepTime(second, 0.0, 0.0, 1e-6, 0.0, 4))]
    async with service(monkeypatch, *([one] for one in replicas), tpot_s=tpot_s) as router:
        with (
            contextlib.nullcontext() if starts else pytest.raises(SettingsError, match=r"^user_config.tpot_s: .*0022 s")
        ):
            await router.joined()
        assert [record.message for record in caplog.records if "tpot_s: 0.0001" in record.message] == [
            f"the {name} pool: {pool['promise_problem']}"
            for name, pool in router.describe()["pools"].items()
            if pool["promise_problem"] is not None
        ]
        with pytest.raises(InvalidInput, match=r"accelerator: tpot_s: 0.0001 s .* set 0.0022 s"):
            await router.begin(asked(20_000, 2))


async def test_a_replica_that_dies_in_the_middle_ends_its_streams_with_one_error(monkeypatch):
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first], [second]) as router:
        pieces = await router.begin(asked(tokens=2000))
        await anext(pieces)
        first.die()
        with pytest.raises(ReplicaLost, match="lost replica a"):
            await read(pieces)
        await freed(first, second)
        assert len(await read(await router.begin(asked()))) == 1
        second.die()
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable):
            await router.begin(asked())


async def test_it_is_offered_elsewhere_while_no_token_has_come(monkeypatch):
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first], [second]) as router:
        one = asked(2000, 6)
        pieces = await router.begin(one)
        assert first.stepper.in_flight == 1
        first.die()
        assert await read(pieces) == [(expected(one), text_of(expected(one)), "length")]
        await freed(second)


async def test_what_a_hung_step_has_no_token_of_is_answered_elsewhere_in_time(monkeypatch):
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first], [second]) as router:
        first.device.slow = 1e6
        one, began = asked(200, 6, answers=2), asyncio.get_running_loop().time()
        pieces = await router.begin(one)
        first_piece = await anext(pieces)
        assert 0.5 < asyncio.get_running_loop().time() - began < 0.6
        assert first_piece.tokens
        assert first.stepper.in_flight == 0
        assert len(await read(pieces)) == 2


@pytest.mark.parametrize("other", ["none", "refuses", "too late", "hangs"])
async def test_what_a_slow_step_has_stays_there_if_no_other_takes_it(monkeypatch, other):
    """Its first token comes 0.75 s after it was asked for, a quarter later than the others are asked. It does not wait
    for them.
    """
    first, second = Replica("a"), Replica("b", model=StepTime(0.9, 0.0001, 0.0, 0.00002, 0.0, 4))
    async with service(monkeypatch, [first], *[[second]][: other != "none"]) as router:
        second.flooded, second.hung, one = other == "too late", other == "hangs", asked(200, 6)
        first.device.slow = 0.75 / step_s(one)
        began, pieces = asyncio.get_running_loop().time(), await router.begin(one)
        await asyncio.sleep(0.01)
        first.device.slow = 1.0
        assert await read(pieces) == [(expected(one), text_of(expected(one)), "length")]
        assert 0.75 < asyncio.get_running_loop().time() - began < 0.8
        assert router.describe()["refused"] == 0
        assert second.stepper.schedule.steps == 0
        await freed(first)


@pytest.mark.parametrize(
    ("turns", "pool"),
    [
        (["admission", "slow"], "accelerator"),
        (["admission token", "slow"], "cpu"),
        (["slow admission"], "accelerator"),
        (["slow admission token"], "accelerator"),
        (["admission token slow"], "cpu"),
    ],
)
async def test_the_first_token_decides_which_of_two_replicas_is_counted(monkeypatch, turns, pool):
    """The CPU's replica is asked because the other one is slow. Its admission and its tokens are read with the slow
    one's first token, in one turn of the loop or in two.
    """
    first, second, counted, held = Replica("a"), Replica("b"), [], {"slow": [], "admission": [], "token": []}
    hear, record, client = GenerationChannel.hear, GenerationRecord(), Client(Tenant("t"), Quota(1.0, "tokens"))

    def read_together(channel, report):
        is_slow = channel is router.pools["accelerator"].live[0]._channel
        held["slow" if is_slow else "admission" if report.admitted else "token"].append((channel, report))
        if is_slow and report.tokens:
            monkeypatch.setattr(GenerationChannel, "hear", hear)
            for turn in [*turns, "slow admission token"]:  # the last one: what is left
                asyncio.get_running_loop().call_soon(read_turn, turn.split())

    def read_turn(kinds):
        for kind in kinds:
            while held[kind]:
                hear(*held[kind].pop(0))

    async with service(monkeypatch, [first], [second]) as router:
        monkeypatch.setattr(router.metrics, "count", lambda name, step, *tags: counted.append((name, step, *tags)))
        one = asked(200, 6, record=record, client=client)
        first.device.slow = 0.7 / step_s(one)
        pieces = await router.begin(one)
        await asyncio.sleep(0.01)
        first.device.slow = 1.0
        monkeypatch.setattr(GenerationChannel, "hear", read_together)
        assert await read(pieces) == [(expected(one), text_of(expected(one)), "length")]
        assert {tags[0] for name, _, *tags in counted if name != "prompt_tokens"} == {pool}
        assert sum(step for name, step, *_ in counted if name == "answer_tokens") == 6
        assert record.admitted.pool == pool
        assert client.quota._left == pytest.approx(5 - 200 - 6)
        await freed(first, second)


async def test_requests_at_once_do_not_get_more_of_a_quota_than_one_after_another(monkeypatch):
    replica, client = Replica("a", blocks=6), Client(Tenant("greedy"), Quota(1.0, "tokens"))
    async with service(monkeypatch, [replica]) as router:
        several = [router.begin(asked(20, 10, seed, client=client)) for seed in range(5)]
        first, *others = await asyncio.gather(*several, return_exceptions=True)
        assert [type(one) for one in others] == [OverQuota] * 4
        await read(first)
        assert client.quota._left == pytest.approx(5 - 20 - 10, abs=0.5)


async def test_the_prompts_of_one_request_are_let_in_by_a_quota_together(monkeypatch):
    replica, client = Replica("a"), Client(Tenant("t"), Quota(1.0, "tokens"))
    async with service(monkeypatch, [replica]) as router:
        generations = Generations(router, 1)
        await generations.begin([asked(20, 10, seed, client=client, let_in=seed > 0) for seed in range(3)])
        assert len([one async for one in generations.pieces()]) >= 3
        assert client.quota._left == pytest.approx(5 - 3 * 30, abs=0.5)
        with pytest.raises(OverQuota):
            await router.begin(asked(20, 10, client=client))


async def test_prompts_that_are_refused_together_cost_nothing_of_a_quota(monkeypatch):
    replica, client = Replica("a", blocks=4), Client(Tenant("t"), Quota(1000.0, "tokens"))
    async with service(monkeypatch, [replica]) as router:
        generations = Generations(router, 1)
        with pytest.raises(Busy):
            await generations.begin([asked(100, 400, client=client), asked(100, 400, client=client, let_in=True)])
        assert client.quota._left == 5000
        await generations.close()
        await freed(replica)


async def test_who_had_come_long_before_it_is_asked_for_gives_nobody_more_of_the_quota(monkeypatch):
    """A chat's template may take seconds; others ask meanwhile."""
    client = Client(Tenant("greedy"), Quota(1.0, "tokens"))
    async with service(monkeypatch, [Replica("a")]) as router:
        await read(await router.begin(asked(20, 10, client=client)))
        before = asyncio.get_running_loop().time() - 100
        for received in (before, None):
            with pytest.raises(OverQuota):
                await router.begin(asked(20, 10, client=client, received=received))


async def test_a_client_without_a_quota_is_counted_as_one_with_it_pays(monkeypatch):
    async with service(monkeypatch, [Replica("a")]) as router:
        used = []
        monkeypatch.setattr(router.metrics.tenants, "used", lambda *_, **told: used.append(told))
        quota = Quota(10.0, "device_seconds")
        for client in (Client(Tenant("free")), Client(Tenant("pays"), quota)):
            await read(await router.begin(asked(20, 10, client=client)))
        assert [told["tokens"] for told in used] == [30, 30]
        assert used[1]["device_s"] == pytest.approx(5 * 10 - quota._left)
        # The prompt at 0.02 ms a token, and ten steps of 2.1 ms and a little, in which it is alone.
        assert used[0]["device_s"] == pytest.approx(used[1]["device_s"], rel=0.5)
        assert 0.01 < used[0]["device_s"] < 0.1


async def test_tokens_that_come_with_the_admission_are_counted_as_all_others(monkeypatch):
    """A busy Router reads several frames in one turn."""
    hear, held, counted = GenerationChannel.hear, [], []

    def together(channel, report):
        held.append(report)
        if report.tokens or not any(one.admitted for one in held):
            for one in held:
                hear(channel, one)
            held.clear()

    client = Client(Tenant("t"), Quota(1.0, "tokens"))
    async with service(monkeypatch, [Replica("a")]) as router:
        monkeypatch.setattr(GenerationChannel, "hear", together)
        monkeypatch.setattr(router.metrics, "count", lambda name, step, *tags: counted.append((name, step, *tags)))
        assert len(await read(await router.begin(asked(20, 10, client=client)))) == 1
        assert client.quota._left == pytest.approx(5 - 20 - 10)
        assert {tags[0] for _, _, *tags in counted} == {"accelerator"}
        assert sum(step for name, step, *_ in counted if name == "prompt_tokens") == 20


async def test_a_record_tells_where_it_was_offered_and_how_it_came(monkeypatch):
    small, big = Replica("a", blocks=2), Replica("c")
    async with service(monkeypatch, [small], [big]) as router:
        record = GenerationRecord()
        one = asked(300, 8, record=record)
        began = asyncio.get_running_loop().time()
        await read(await router.begin(one))
        ended = asyncio.get_running_loop().time()
        told = [(offer.pool, offer.replica, offer.outcome) for offer in record.offers]
        assert told == [("accelerator", "a", "never"), ("cpu", "c", "admitted")]
        streamed = record.streamed
        assert record.admitted is record.offers[1]
        times = [began, *(at for offer in record.offers for at in (offer.at, offer.decided))]
        assert sorted(times) == times
        assert times[-1] < streamed.first_at < streamed.over_at <= ended
        assert (streamed.tokens, streamed.is_broken) == (8, False)
        assert 0 < streamed.pace_s <= streamed.gap_s
        record = GenerationRecord()
        with pytest.raises(InvalidInput):
            await router.begin(asked(30, 5000, record=record))
        assert [offer.outcome for offer in record.offers] == ["never", "never"]
        assert (record.admitted, record.streamed.first_s, record.streamed.is_late) == (None, None, False)


@pytest.mark.parametrize(("trouble", "ttft_s"), [("hung", 3.0), ("flooded", 2.0)])
async def test_a_replica_that_does_not_decide_is_passed_over_in_time(monkeypatch, trouble, ttft_s):
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first], [second], ttft_s=ttft_s) as router:
        setattr(first, trouble, True)
        assert len(await read(await router.begin(asked()))) == 1
        assert second.stepper.schedule.steps
        assert not first.stepper.schedule.steps


async def test_what_was_offered_too_late_is_told_to_come_back(monkeypatch):
    """The first replica hangs for longer than the promise allows: the second one could have done it in time."""
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first], [second], ttft_s=1.0) as router:
        first.hung = True
        with pytest.raises(Busy):
            await router.begin(asked())
        assert not second.stepper.schedule.steps


async def test_a_replica_that_decides_on_others_all_the_time_is_busy_and_not_lost(monkeypatch):
    replica = Replica("a")
    async with service(monkeypatch, [replica], ttft_s=1.2) as router:
        replica.flooded = True
        with pytest.raises(Busy) as refused:
            await router.begin(asked())
        assert refused.value.retry_after_s > 1.2  # it says that there is room: but not when it would come to that
        replica.flooded = False
        assert len(await read(await router.begin(asked()))) == 1
        await freed(replica)


@pytest.mark.parametrize("unit", ["tokens", "device_seconds"])
async def test_an_engine_that_fails_says_so_once_and_costs_nothing(monkeypatch, unit):
    replica = Replica("a")
    client = Client(Tenant("t"), Quota(1.0, unit))
    async with service(monkeypatch, [replica]) as router:
        pieces = await router.begin(asked(tokens=2000, client=client))
        await anext(pieces)
        assert client.quota._left < 5
        replica.device.problem = RuntimeError("out of memory")
        with pytest.raises(EngineFailed, match="out of memory"):
            await read(pieces)
        assert client.quota._left == pytest.approx(5)
        await freed(replica)


# --- engines that are broken ------------------------------------------------------------------------------------------

BROKEN = RuntimeError("no kernel")
WORKS = 3  # of a prompt that fails: its step, the one that is composed meanwhile, and a probe


async def test_what_a_broken_engine_has_no_token_of_is_answered_elsewhere(monkeypatch):
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first], [second]) as router:
        first.device.broken = BROKEN
        one = asked(200, 6, answers=2)
        assert await read(await router.begin(one)) == [(expected(one), text_of(expected(one)), "length")] * 2
        assert first.stepper.problem == "no kernel"
        await freed(first, second)


async def test_it_is_offered_elsewhere_once_and_only_while_it_may_be_in_time(monkeypatch):
    first, second, third = Replica("a"), Replica("b"), Replica("c")
    async with service(monkeypatch, [first, second, third]) as router:
        for replica in (first, second, third):
            replica.device.broken = BROKEN
        with pytest.raises(EngineBroken, match="no kernel"):
            await read(await router.begin(asked()))
        assert sum(bool(replica.stepper.problem) for replica in (first, second, third)) == 2
        for replica in (first, second, third):
            replica.device.slow = 1000.0
        with pytest.raises(EngineBroken, match="no kernel"):
            await read(await router.begin(asked(timeout_s=0.5)))
        # Its first token is overdue on the first of them, and its deadline passes on the second.
        assert sum(len(replica.device.works) for replica in (first, second, third)) == 4 * WORKS


async def test_a_replica_whose_engine_is_broken_is_ejected_and_asked_again_later(monkeypatch, caplog):
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first], [second]) as router:
        first.device.broken = BROKEN
        for _ in range(8):
            assert len(await read(await router.begin(asked()))) == 1
        assert len(first.device.works) == 5 * WORKS
        assert caplog.text.count("a for 30 s: its engine has failed or hung 5 times in a row") == 1
        assert router.describe()["pools"]["accelerator"]["replicas"]["a"]["ejected_s"] > 29
        first.device.broken = None
        await asyncio.sleep(30.0)
        assert len(await read(await router.begin(asked()))) == 1
        assert first.stepper.problem is None
        assert len(second.device.works) == 8 * 8
        await freed(first, second)


async def test_the_health_check_of_a_broken_engine_fails_until_a_step_succeeds(monkeypatch):
    monkeypatch.setattr(Generator, "__del__", lambda _: None)
    replica, generator = Replica("a"), object.__new__(Generator)
    generator._worker, generator._settings, generator._pool = replica.stepper, Mock(batch_timeout_s=30.0), "cpu"
    async with service(monkeypatch, [replica]) as router:
        await generator.check_health()
        assert len(replica.device.works) == 1  # a few tokens of nobody's
        replica.device.broken = BROKEN
        with pytest.raises(EngineFailed, match="no kernel"):  # nothing was asked of it yet
            await generator.check_health()
        with pytest.raises(EngineBroken):
            await read(await router.begin(asked()))
        with pytest.raises(RuntimeError, match="no kernel: it now fails on inputs that it answered before"):
            await generator.check_health()
        replica.device.broken = None
        await read(await router.begin(asked()))
        await generator.check_health()


async def test_the_only_replica_is_not_ejected_and_says_why(monkeypatch):
    replica = Replica("a")
    async with service(monkeypatch, [replica]) as router:
        replica.device.broken = BROKEN
        for _ in range(7):
            with pytest.raises(EngineBroken, match="no kernel; no other replica takes this"):
                await read(await router.begin(asked()))
        assert router.pools["accelerator"].ejected() == []
        replica.device.broken = None
        assert len(await read(await router.begin(asked()))) == 1


def step_s(one):
    """Seconds of a step of only this prompt."""
    return MODEL.seconds(load_of([Chunk(one.ids, 0, ())]))


async def test_a_replica_that_hangs_is_ejected_and_asked_again_later(monkeypatch, caplog):
    """Without ejection, each prompt is offered to it first. Its step ends after 50 s."""
    first, second, asks = Replica("a"), Replica("b"), Counter()

    async def ask(router, count):
        for seed in range(count):
            record = GenerationRecord()
            assert len(await read(await router.begin(asked(60, 8, seed, record=record)))) == 1
            asks.update(offer.replica for offer in record.offers)
        return asks.pop("a", 0)

    async with service(monkeypatch, [first, second]) as router:
        first.device.slow = 50.0 / step_s(asked(60))
        assert await ask(router, 40) == 5
        assert caplog.text.count("a for 30 s: its engine has failed or hung 5 times in a row") == 1
        await asyncio.sleep(30.0)
        assert await ask(router, 10) == 1
        assert caplog.text.count("a for 60 s: its engine has failed or hung 6 times in a row") == 1
        first.device.slow = 1.0
        await asyncio.sleep(60.0)
        assert await ask(router, 10) > 1
        assert router.pools["accelerator"].links["a"].view.outlier.failures == 0
        await freed(first, second)


async def test_what_runs_on_an_ejected_replica_goes_on(monkeypatch):
    first, second, one = Replica("a"), Replica("b"), asked(tokens=40)
    async with service(monkeypatch, [first, second]) as router:
        pieces = await router.begin(one)
        router.pools["accelerator"].links["a"].view.outlier.eject(asyncio.get_running_loop().time())
        assert await read(pieces) == [(expected(one), text_of(expected(one)), "length")]
        assert second.stepper.schedule.steps == 0


@pytest.mark.parametrize("other", ["full", "ejected"])
async def test_a_replica_that_hangs_is_not_ejected_while_no_other_is_open(monkeypatch, other):
    first, hangs = Replica("a", model=StepTime(0.04, 0.0, 0.0, 0.0, 0.0, 4), blocks=4), Replica("b")
    async with service(monkeypatch, [first], [hangs]) as router:
        hangs.device.slow = 1e9
        async with contextlib.aclosing(await router.begin(asked(100, 400 if other == "full" else 1))):
            await asyncio.sleep(0.01)
            if other == "ejected":
                router.pools["accelerator"].live[0].view.outlier.eject(asyncio.get_running_loop().time())
            for _ in range(8):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await read(await router.begin(asked(300, 1)))
            assert router.pools["cpu"].live[0].view.outlier.failures == 0


async def test_a_prompt_that_only_an_ejected_replica_takes_may_come_again(monkeypatch):
    async with service(monkeypatch, [Replica("a", blocks=2)], [Replica("c")]) as router:
        router.pools["cpu"].links["c"].view.outlier.eject(asyncio.get_running_loop().time())
        with pytest.raises(Busy):
            await router.begin(asked(300, 8))


async def test_a_replica_that_is_only_slow_is_not_ejected(monkeypatch):
    """Each first token comes after 0.75 s, and the other replica is too slow to take the prompt after half a second."""
    slow, other = Replica("a"), Replica("b", model=StepTime(0.002, 0.0, 0.0, 0.01, 0.0, 4))
    async with service(monkeypatch, [slow], [other]) as router:
        slow.device.slow = 0.75 / step_s(asked(60))
        for _ in range(8):
            assert len(await read(await router.begin(asked(60, 1)))) == 1
        assert slow.stepper.schedule.steps == 8
        assert router.pools["accelerator"].ejected() == []


async def test_a_replica_that_pauses_is_not_ejected(monkeypatch):
    """For 2 s, in which 40 prompts come."""
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first, second]) as router:
        first.device.slow = 2.0 / step_s(asked(60))
        asyncio.get_running_loop().call_later(0.02, setattr, first.device, "slow", 1.0)
        assert await stream(router, 60, 20.0, 0, []) == {True: 60}
        assert router.pools["accelerator"].ejected() == []
        await freed(first, second)


async def test_an_ejected_replica_is_back_when_the_other_has_gone(monkeypatch):
    first, second = Replica("a"), Replica("b")
    async with service(monkeypatch, [first, second]) as router:
        pool = router.pools["accelerator"]
        pool.links["a"].view.outlier.eject(asyncio.get_running_loop().time())
        assert [link.view.replica for link in pool.soonest(asyncio.get_running_loop().time(), 1)] == ["b"]
        second.die()
        pool.follow({"a": first.about}, "b")
        assert pool.ejected() == []
        assert len(await read(await router.begin(asked()))) == 1


async def stream(router, count, rate_s, break_at, breaks):
    """How many come to which end, of so many generations at that rate; the engines that `breaks` then fail."""

    async def one(number):
        await asyncio.sleep(number / rate_s)
        if number == break_at:
            for replica in breaks:
                replica.device.broken = BROKEN
        try:
            [(ids, _, _)] = await read(await router.begin(asked(60, 8, seed=number)))
        except WindveError as error:
            return type(error)
        return len(ids) == 8

    return Counter(await asyncio.gather(*map(one, range(count))))


async def test_an_engine_that_gives_nothing_but_what_is_no_number_is_broken_too(monkeypatch):
    first, second = Replica("a"), Replica("b")
    step = first.device.steps.step
    monkeypatch.setattr(first.device.steps, "step", lambda work: Computed(step(work).logits * np.nan))
    async with service(monkeypatch, [first, second]) as router:
        assert await stream(router, 40, 20.0, 0, []) == {True: 40}
        assert [link.view.replica for link in router.pools["accelerator"].ejected()] == ["a"]
        assert first.stepper.problem == "the engine gave no finite numbers"
        await freed(first, second)


async def test_when_both_accelerators_break_the_cpu_answers_what_it_can(monkeypatch):
    first, second, cpu = Replica("a"), Replica("b"), Replica("c", model=StepTime(0.02, 0.001, 0.0, 0.0002, 0.0, 4))
    async with service(monkeypatch, [first, second], [cpu]) as router:
        ends = await stream(router, 120, 20.0, 40, [first, second])
        assert ends == {True: 115, EngineBroken: 5}


@pytest.mark.parametrize(
    ("config", "match"), [({"max_buffered_tokens": 20}, "too slowly"), ({"request_timeout_s": 0.2}, "not ended")]
)
async def test_who_reads_too_slowly_or_takes_too_long_is_broken_off(monkeypatch, config, match):
    replica = Replica("a")
    async with service(monkeypatch, [replica], **config) as router:
        pieces = await router.begin(asked(tokens=2000))
        await anext(pieces)
        if "max_buffered_tokens" in config:
            await freed(replica)
        with pytest.raises(TimedOut, match=match):
            await read(pieces)
        await freed(replica)


async def test_a_replica_that_times_planned_steps_is_passed_over_and_says_why_where_it_is_alone(monkeypatch):
    first, second = Replica("a"), Replica("b")
    card = Mock(model=Mock(vocab_size=VOCABULARY), defaults=Sampling(0.0))
    works = [PlannedStep(1, 5).work(BLOCKS, card)] * 40
    async with service(monkeypatch, [first], [second]) as router:
        timing = [asyncio.create_task(first.stepper.planned.time(works, 20))]
        await asyncio.sleep(0.02)
        assert len(await read(await router.begin(asked()))) == 1
        assert second.stepper.schedule.steps
        timing.append(asyncio.create_task(second.stepper.planned.time(works, 20)))
        await asyncio.sleep(0.02)
        with pytest.raises(Busy, match="busy: a calibration is measuring this device; retry in") as refused:
            await router.begin(asked())
        assert 1 < refused.value.retry_after_s < 6
        for task in timing:
            task.cancel()
        views = [link.view for pool in router.pools.values() for link in pool.live]
        await until(lambda: all(view.opens_s(asyncio.get_running_loop().time()) == 0 for view in views))
        assert len(await read(await router.begin(asked()))) == 1


async def test_it_says_what_step_time_is_in_force(monkeypatch):
    async with service(monkeypatch, [Replica("a")], [Replica("b", blocks=9)]) as router:
        host = {"row_s": 0.1, "kv_token_s": 0.0, "copy_token_s": 0.0, "layers": 4}
        found = {"cpu": {"step_time": {"beta_s": 0.5, "knee": 4}}, "accelerator": {"host_time": host}}
        await router.reconfigure({**CONFIG, **found})
        accelerator, cpu = router.describe()["pools"].values()
        assert (accelerator["step_time"], accelerator["blocks"], accelerator["max_num_batched_tokens"]) == (
            None,
            BLOCKS,
            2048,
        )
        rest = dict.fromkeys(("row_s", "kv_token_s", "prompt_token_s", "pair_s"), 0.0)
        assert cpu["step_time"] == {"beta_s": 0.5, "knee": 4, **rest}
        assert cpu["blocks"] == 9
        assert [(pool["host_time"], pool["num_cpu_blocks"]) for pool in (accelerator, cpu)] == [(host, 0), (None, 0)]


async def test_it_says_what_the_host_of_a_replica_did_and_what_time_of_it_is_in_force(monkeypatch):
    times = {"row_s": 1e-4, "kv_token_s": 1e-6}
    emulated = {**EMULATED, "emulated": {"beta_s": 0.002, "host": times}, "num_cpu_blocks": 9}
    with_host, args = Replica("a", host=HostCache(HostTime(**times), 9)), {**ARGS, "accelerator": emulated}
    async with service(monkeypatch, [with_host], [Replica("b")], args=args) as router:
        await read(await router.begin(asked(tokens=5)))
        accelerator, cpu = router.describe()["pools"].values()
        steps = accelerator["replicas"]["a"]["steps"]
        assert accelerator["replicas"]["a"]["host"] == {
            "rows": 0, "parked": 0, "blocks": 9, "free_blocks": 9,
            "steps": {"accelerator": steps, "pipelined": 0, "asynchronous": 0}, "tokens": 0,
            "moved": {"to_accelerator": 0, "to_host": 0}, "gained_tokens": ANY, "gained_share": ANY, "slowdown": 1.0,
        }  # fmt: skip
        assert accelerator["host_time"] is None
        await router.reconfigure({**CONFIG, "accelerator": {"host_time": {"row_s": 0.5, "kv_token_s": 0.0}}})
        in_force = {"row_s": 0.5, "kv_token_s": 0.0, "copy_token_s": 0.0, "layers": 32}
        assert router.describe()["pools"]["accelerator"]["host_time"] == in_force
        assert (accelerator["num_cpu_blocks"], cpu["num_cpu_blocks"]) == (9, 0)
        assert "host" not in cpu["replicas"]["b"]


async def test_a_conversation_finds_its_replica_again(monkeypatch):
    """Replica a is on the Router's node, so a prompt that nobody holds goes there."""
    replicas = [Replica("a"), Replica("b")]
    async with service(monkeypatch, replicas) as router:
        counted = Counter()
        monkeypatch.setattr(router.metrics, "count", lambda name, step, *_: counted.update({name: step}))

        async def turn(ids, scope=b"mine"):
            record = GenerationRecord()
            one = WantedGeneration(ids, 5, Sampling(0.0), client=client, cache_scope=scope, record=record)
            assert (await read(await router.begin(one)))[0][0] == expected(one)
            return record.admitted.replica, record.cached_tokens

        client = Client(Tenant("t"), Quota(1.0, "device_seconds"))
        ids = asked(1000).ids
        link = {link.view.replica: link for link in router.pools["accelerator"].live}
        first, cached = await turn(ids)
        other = "b" if first == "a" else "a"
        assert cached == 0
        whole_s = 5 - client.quota._left
        link[first].view.rank, link[other].view.rank = (True, 1), (False, 0)  # the other is preferred from now on
        assert await turn(ids) == (first, 896)
        assert 5 - client.quota._left < 1.4 * whole_s
        assert await turn(np.concatenate([ids, ids]).astype(np.int32)) == (first, 896)
        assert await turn(ids, b"another") == (other, 0)
        assert await turn(ids, None) == (other, 0)
        assert counted["cached_prompt_tokens"] == 2 * 896
        replicas["ab".index(first)].die()
        assert await turn(ids) == (other, 0)  # it holds these tokens for another scope
        assert await turn(ids) == (other, 896)


def test_a_router_remembers_what_it_sent_last_and_of_each_prompt_the_beginning(monkeypatch):
    monkeypatch.setattr(pool_module, "_MOST_HELD", 5)
    link = object.__new__(pool_module.GenerationLink)
    link._held = {}
    one, other, third = ([b"%d%d" % (talk, place) for place in range(3)] for talk in range(3))
    link.has_got(one)
    link.has_got(other)
    assert [link.likely_cached(keys) // 128 for keys in (one, other, [b"x", *one])] == [2, 3, 0]
    link.has_got(one)
    assert [link.likely_cached(keys) // 128 for keys in (one, other)] == [3, 2]
    link.has_got(third)
    assert [link.likely_cached(keys) // 128 for keys in (one, other, third)] == [2, 0, 3]
