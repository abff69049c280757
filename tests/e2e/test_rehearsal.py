"""The whole application over the paper's emulated V100 and Xeon: depths 90 and 18, SLO 2 s."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from loopback import only_loopback
from router_processes import wait_for_routers

from benchmarks.kit.arrivals import burst
from calibration.load import connect, request_bytes
from tests.kit import tei_wire
from tests.kit.service import runs

pytestmark = pytest.mark.alone

V100_LONE_S = 0.0180 + 0.27  # alpha + beta
SLO_S = 2.0
TEXT = "a query of about seventy five tokens, as the paper has them, " * 5


def queries(count):
    return [request_bytes({"input": f"{TEXT}{number}"}) for number in range(count)]


def outcome(replies):
    return Counter(reply.pool if reply.status == 200 else reply.status for reply in replies)


def test_burst_of_200_fills_both_queues_and_the_rest_is_told_busy_at_once(rehearsal, figure):
    """Who answers what; how long it takes is shown here and judged in test_promise.py."""
    rehearsal.wait_until_idle()
    before = runs(rehearsal)
    replies = burst(rehearsal.address, queries(200))
    slowest = max(reply.seconds for reply in replies if reply.status == 200)
    slowest_busy = max(reply.seconds for reply in replies if reply.status == 429)
    batches = {name: count - before[name] for name, count in runs(rehearsal).items()}
    figure(f"burst of 200: {dict(outcome(replies))}, slowest {slowest:.3f} s, busy {slowest_busy:.3f} s, {batches}")
    assert outcome(replies) == {"accelerator": 90, "cpu": 18, 429: 92}
    busy = next(reply for reply in replies if reply.status == 429)
    assert busy.json()["error"]["code"] == "busy"
    assert 0 < int(busy.headers["retry-after-ms"]) <= SLO_S * 1000
    assert int(busy.headers["retry-after"]) >= 1


@pytest.fixture
def loopback_only():
    with only_loopback():
        yield


def test_prometheus_hears_of_a_burst(rehearsal):
    rehearsal.wait_until_idle()
    before = rehearsal.settled_samples()
    burst(rehearsal.address, queries(200))
    told = rehearsal.settled_samples()
    for pool, ended, count in (("accelerator", "ok", 90), ("cpu", "ok", 18), ("none", "busy", 92)):
        name = ("queries_total", (("outcome", ended), ("pool", pool)))
        assert told[name] - before[name] == count
    for pool, depth, alpha_s, beta_s in (("accelerator", 90, 0.0180, 0.27), ("cpu", 18, 0.0858, 0.32)):
        tag = (("pool", pool),)
        assert [told[name, tag] for name in ("depth", "live_replicas", "calibrated")] == [depth, 1, 1]
        assert [told[name, tag] for name in ("alpha_seconds", "beta_seconds")] == [alpha_s, beta_s]
        assert told["in_flight", tag] == told["waiting", tag] == 0
        more = {
            name: told[name, tag] - before[name, tag]
            for name in ("runs_total", "run_queries_total", "run_seconds_total")
        }
        runs, ran, seconds = more.values()
        assert ran == depth
        assert told["queries_per_run_count", tag] - before["queries_per_run_count", tag] == runs
        assert seconds == pytest.approx(alpha_s * depth + beta_s * runs, rel=0.1)  # the drift that alerts go by
        assert told["tokens_total", tag] > before["tokens_total", tag]
        assert told["info", tag] == 1
    assert told["requests_total", ()] - before["requests_total", ()] == 108
    assert told["request_seconds_count", ()] - before["request_seconds_count", ()] == 108
    assert told["slo_seconds", ()] == SLO_S


@contextlib.contextmanager
def occupied(service):
    """Every place of both queues is taken, for about two seconds."""
    service.wait_until_idle()
    depth = sum(pool["queue_depth"] for pool in service.pools().values())
    whole = request_bytes({"input": [f"{TEXT}{number}" for number in range(depth)]})
    with ThreadPoolExecutor(1) as thread:
        reply = thread.submit(burst, service.address, [whole])
        service.wait_for(lambda pools: sum(pool["in_flight"] for pool in pools.values()) == depth)
        yield
        assert reply.result()[0].status == 200


def test_openai_client_comes_back_when_the_busy_answer_says(rehearsal, loopback_only, figure):
    import openai

    asked, answered = [], []
    hooks = {
        "request": [lambda _: asked.append(time.monotonic())],
        "response": [lambda answer: answered.append((time.monotonic(), answer))],
    }
    server = {"base_url": f"http://127.0.0.1:{rehearsal.port}/v1", "api_key": "none"}
    once = openai.OpenAI(**server, max_retries=0)
    patient = openai.OpenAI(**server, max_retries=5, http_client=openai.DefaultHttpxClient(event_hooks=hooks))
    with occupied(rehearsal), once, patient:
        with pytest.raises(openai.RateLimitError, match="leaves no room for 1 more") as refused:
            once.embeddings.create(model="emulated", input=TEXT)
        vector = patient.embeddings.create(model="emulated", input=TEXT).data[0].embedding
    assert (refused.value.code, refused.value.type) == ("busy", "rate_limit_error")
    assert len(vector) == 384
    statuses = [answer.status_code for _, answer in answered]
    told = [int(answer.headers["retry-after-ms"]) / 1000 for _, answer in answered[:-1]]
    waited = [later - at for (at, _), later in zip(answered, asked[1:], strict=False)]
    figure(f"openai's client: {statuses}, told to come back in {told} s, came back after {np.round(waited, 3)} s")
    assert statuses[0] == 429
    assert statuses[-1] == 200
    assert all(wait >= tell for wait, tell in zip(waited, told, strict=True))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # few clients close what they open
def test_clients_built_on_openai_come_back_too(rehearsal, loopback_only):
    import litellm
    from langchain_openai import OpenAIEmbeddings

    address = f"http://127.0.0.1:{rehearsal.port}/v1"
    embeddings = OpenAIEmbeddings(
        model="emulated", base_url=address, api_key="none", check_embedding_ctx_length=False, max_retries=5
    )
    lite = {"model": "openai/emulated", "api_base": address, "api_key": "none", "max_retries": 5}
    for ask in (lambda: embeddings.embed_query(TEXT), lambda: litellm.embedding(input=[TEXT], **lite)):
        ask()  # what a client loads late is loaded by now
        refused = rehearsal.get("/info")["windve"]["busy_answers"]
        with occupied(rehearsal):
            assert ask()
        assert rehearsal.get("/info")["windve"]["busy_answers"] > refused


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_other_clients_say_that_it_is_busy(rehearsal, loopback_only):
    from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPITextEmbedder
    from huggingface_hub import InferenceClient
    from langchain_community.embeddings import InfinityEmbeddings
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    address = f"http://127.0.0.1:{rehearsal.port}"
    haystack = HuggingFaceAPITextEmbedder("text_embeddings_inference", {"url": address})
    infinity = InfinityEmbeddings(model="emulated", infinity_api_url=address)
    llama_index = TextEmbeddingsInference("emulated", base_url=address)
    sentence = "leaves no room for 1 more within 2 s; come back in"
    for ask, said in [
        (lambda: haystack.run(TEXT), sentence),
        (lambda: InferenceClient(address).feature_extraction(TEXT), sentence),
        (lambda: infinity.embed_query(TEXT), f"status 429: .*{sentence}"),
        (lambda: llama_index.get_text_embedding_batch([TEXT]), "'Overloaded'"),  # it looks at no status
    ]:
        ask()
        with occupied(rehearsal), pytest.raises(Exception, match=said):
            ask()


def test_emulation_is_said_aloud(rehearsal):
    reply = burst(rehearsal.address, queries(1))[0]
    assert reply.headers["x-windve-emulated"] == "true"
    assert rehearsal.get("/info")["windve"]["emulated"] is True


def test_clients_that_hang_up_leave_nothing_in_flight(rehearsal, figure):
    rehearsal.wait_until_idle()

    async def hang_up_mid_burst():
        connections = await connect(rehearsal.address, 300)
        asking = [asyncio.create_task(c.ask(r)) for c, r in zip(connections, queries(300), strict=True)]
        await asyncio.sleep(0.6)  # the batches run by now
        for connection in connections:
            connection.hang_up()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(hang_up_mid_burst())
    idle_after_s = rehearsal.wait_until_idle()
    reply = burst(rehearsal.address, queries(1))[0]
    figure(f"300 hung up: in flight 0 after {idle_after_s:.2f} s, the next query answered in {reply.seconds:.3f} s")
    assert idle_after_s < 1.0, "the run that nobody waited for was not called off"
    assert reply.status == 200
    assert reply.seconds < 2 * V100_LONE_S


def test_who_gives_up_while_waiting_frees_the_place_and_no_engine_sees_the_query(rehearsal, figure):
    """40 queries run for a second; of those that come meanwhile 20 have a deadline and 10 hang up, before it ends."""
    rehearsal.wait_until_idle()
    ran = ("run_queries_total", (("pool", "accelerator"),))  # counted where the engine runs
    before = rehearsal.settled_samples()[ran]
    hurried = [
        request_bytes({"input": f"{TEXT} hurried {number}"}, headers=[("x-request-timeout-ms", "200")])
        for number in range(20)
    ]

    async def give_up_while_waiting():
        running = await connect(rehearsal.address, 40)
        waiting, leaving = await connect(rehearsal.address, 20), await connect(rehearsal.address, 10)
        asking = [asyncio.create_task(c.ask(r)) for c, r in zip(running, queries(40), strict=True)]
        await asyncio.sleep(0.3)  # they run by now
        left = [asyncio.create_task(c.ask(r)) for c, r in zip(leaving, queries(10), strict=True)]
        late = [asyncio.create_task(c.ask(r)) for c, r in zip(waiting, hurried, strict=True)]
        await asyncio.sleep(0.1)
        for connection in leaving:
            connection.hang_up()
        late = await asyncio.gather(*late)
        beside = (await asyncio.to_thread(rehearsal.pools))["accelerator"]
        done = await asyncio.gather(*asking)
        await asyncio.gather(*left, return_exceptions=True)
        for connection in (*running, *waiting):
            connection.hang_up()
        return late, beside, done

    late, beside, done = asyncio.run(give_up_while_waiting())
    more = rehearsal.settled_samples()[ran] - before
    figure(f"given up while waiting: {dict(outcome(late))}, {beside['in_flight']} in flight then; run: {more} of 70")
    assert outcome(late) == {504: 20}
    assert late[0].json()["error"]["code"] == "deadline_exceeded"
    assert (beside["in_flight"], beside["waiting"]) == (40, 0)
    assert outcome(done) == {"accelerator": 40}
    assert more == 40


@pytest.fixture
def tei(rehearsal):
    rehearsal.wait_until_idle()
    with tei_wire.connected(rehearsal.grpc_port) as client:
        yield client


def grpc_queries(count):
    return [tei_wire.request("Embed/Embed", inputs=f"{TEXT}{number}") for number in range(count)]


def test_grpc_burst_on_one_connection_is_admitted_by_the_same_rule(tei):
    calls = [tei.unary("Embed/Embed").future(query, timeout=30) for query in grpc_queries(200)]
    outcomes = Counter(dict(call.trailing_metadata()).get("x-windve-pool") or call.code().name for call in calls)
    assert outcomes == {"accelerator": 90, "cpu": 18, "RESOURCE_EXHAUSTED": 92}
    busy = next(call for call in calls if call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED)
    told = dict(busy.trailing_metadata())
    assert 0 < int(told["retry-after-ms"]) <= SLO_S * 1000
    assert told["grpc-retry-pushback-ms"] == told["retry-after-ms"]
    assert busy.details().startswith("busy: what is admitted already leaves no room for 1 more")


def test_grpc_s_own_retries_come_back_when_they_are_told(rehearsal, tei):
    """Backoffs of 10 ms would use up all tries long before a place is free."""
    policy = {"maxAttempts": 5, "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1,
              "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}  # fmt: skip
    config = {"methodConfig": [{"name": [{"service": "tei.v1.Embed"}], "retryPolicy": policy}]}
    filling = [tei.unary("Embed/Embed").future(query, timeout=30) for query in grpc_queries(108)]
    rehearsal.wait_for(lambda pools: sum(pool["in_flight"] for pool in pools.values()) == 108, what="a full house")
    with tei_wire.connected(rehearsal.grpc_port, [("grpc.service_config", json.dumps(config))]) as patient:
        assert len(patient.call("Embed/Embed", inputs="patient").embeddings) == 384
    assert all(call.code() == grpc.StatusCode.OK for call in filling)


def test_grpc_clients_that_cancel_or_whose_deadline_passes_leave_nothing_in_flight(rehearsal, tei):
    calls = [tei.unary("Embed/Embed").future(query, timeout=30) for query in grpc_queries(30)]
    stream = tei.stream("Embed/EmbedStream")(iter(grpc_queries(1000)), timeout=60)  # takes half of each queue
    rehearsal.wait_for(lambda pools: sum(pool["in_flight"] for pool in pools.values()) >= 60, what="a load")
    hurried = [tei.unary("Embed/Embed").future(query, timeout=0.2) for query in grpc_queries(20)]  # beta alone is more
    assert {call.code().name for call in hurried} == {"DEADLINE_EXCEEDED"}
    for call in (*calls, stream):
        call.cancel()
    assert rehearsal.wait_until_idle() < SLO_S, "a run that nobody waited for was not called off"
    assert len(tei.call("Embed/Embed", inputs="next").embeddings) == 384


def test_grpc_time_that_a_client_names_is_kept(tei):
    error = tei.refused("Embed/Embed", inputs="x", metadata=[("x-request-timeout-ms", "50")])
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the 0.05 s that the request allows" in error.details()


def test_bulk_request_is_answered_whole_and_single_queries_go_first(rehearsal, figure):
    """400 texts in one request on depths that add up to 28."""
    change_depths(rehearsal, accelerator=20, cpu=8)

    async def bulk_and_singles():
        connections = await connect(rehearsal.address, 11)
        bulk = asyncio.create_task(connections[0].ask(request_bytes({"input": [f"text {n}" for n in range(400)]})))
        await asyncio.sleep(1.0)
        singles = []
        for connection in connections[1:]:
            singles.append(await connection.ask(queries(1)[0]))
            assert not bulk.done(), "the bulk request was over before the single ones: nothing was shown"
        whole = await bulk
        for connection in connections:
            connection.hang_up()
        return whole, singles

    try:
        whole, singles = asyncio.run(bulk_and_singles())
    finally:
        change_depths(rehearsal, accelerator=90, cpu=18)
    slowest = max(single.seconds for single in singles)
    figure(
        f"bulk of 400: {whole.status} in {whole.seconds:.1f} s; 10 single queries beside it: {slowest:.2f} s at most"
    )
    assert whole.status == 200
    assert [item["index"] for item in whole.json()["data"]] == list(range(400))
    assert whole.headers["x-windve-pool"] == "accelerator,cpu"
    assert {single.status for single in singles} == {200}
    assert slowest <= SLO_S


def change_depths(service, *, typed=False, **depths):
    for pool, depth in depths.items():
        service.router[pool]["queue_depth"] = depth
    (service.type_deploy if typed else service.deploy)()
    service.wait_for(lambda pools: all(pools[name]["queue_depth"] == depth for name, depth in depths.items()), 10)


def replica_ids(service):
    return {name: sorted(pool["replicas"]) for name, pool in service.pools().items()}


def test_depths_change_in_place_and_no_request_is_lost(rehearsal, figure):
    before = replica_ids(rehearsal)

    async def load(stop):
        connections = await connect(rehearsal.address, 12)
        statuses = Counter()

        async def ask(connection):
            while not stop.is_set():
                statuses[(await connection.ask(queries(1)[0])).status] += 1

        await asyncio.gather(*(ask(connection) for connection in connections))
        for connection in connections:
            connection.hang_up()
        return statuses

    async def change_under_load():
        stop = asyncio.Event()
        loading = asyncio.create_task(load(stop))
        await asyncio.sleep(1)
        started = time.monotonic()
        await asyncio.to_thread(change_depths, rehearsal, typed=True, accelerator=30, cpu=9)
        seconds = time.monotonic() - started
        await asyncio.sleep(1)
        stop.set()
        return seconds, await loading

    seconds, statuses = asyncio.run(change_under_load())
    try:
        figure(
            f"new depths in force {seconds:.1f} s after `serve deploy` was typed; answers meanwhile: {dict(statuses)}"
        )
        assert seconds < 5
        assert set(statuses) == {200}
        assert replica_ids(rehearsal) == before
        rehearsal.wait_until_idle()
        assert outcome(burst(rehearsal.address, queries(60))) == {"accelerator": 30, "cpu": 9, 429: 21}
    finally:
        change_depths(rehearsal, accelerator=90, cpu=18)


def test_bad_depths_change_nothing(rehearsal):
    before = {name: pool["queue_depth"] for name, pool in rehearsal.pools().items()}
    rehearsal.router["cpu"]["queue_depth"] = -1
    try:
        rehearsal.deploy()
        rehearsal.wait_for(lambda _: rehearsal.get("/info")["windve"]["config_problem"], 10)
        problem = rehearsal.get("/info")["windve"]["config_problem"]
        assert problem == "user_config.cpu.queue_depth: should be greater than or equal to 0, not -1"
        assert {name: pool["queue_depth"] for name, pool in rehearsal.pools().items()} == before
        assert burst(rehearsal.address, queries(1))[0].status == 200
    finally:
        change_depths(rehearsal, cpu=18)
    rehearsal.wait_for(lambda _: rehearsal.get("/info")["windve"]["config_problem"] is None, 10)


def test_killed_replica_loses_no_request_for_good_and_comes_back(rehearsal, figure):
    rehearsal.wait_until_idle()
    pid = next(iter(rehearsal.pools()["accelerator"]["replicas"].values()))["pid"]

    async def kill_mid_burst():
        connections = await connect(rehearsal.address, 60)
        asking = [asyncio.create_task(c.ask(r)) for c, r in zip(connections, queries(60), strict=True)]
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        replies = await asyncio.gather(*asking)
        for connection in connections:
            connection.hang_up()
        return replies

    replies = asyncio.run(kill_mid_burst())
    back_s = rehearsal.wait_for(
        lambda pools: [r["pid"] for r in pools["accelerator"]["replicas"].values()] not in ([], [pid]),
        what="a new replica",
    )
    slowest = max(reply.seconds for reply in replies)
    figure(f"kill -9 mid-burst: {dict(outcome(replies))}, slowest {slowest:.2f} s, pool back {back_s:.1f} s later")
    assert {reply.status for reply in replies} <= {200, 429, 503}
    assert slowest < 60
    after = burst(rehearsal.address, queries(1))[0]
    assert (after.status, after.pool) == (200, "accelerator")


def test_hung_replica_is_replaced_and_its_queries_are_answered(rehearsal, figure):
    """SIGSTOP: the process is there, and nothing of it answers, as with a hung device."""
    rehearsal.wait_until_idle()
    pid = next(iter(rehearsal.pools()["accelerator"]["replicas"].values()))["pid"]

    async def hang_mid_burst():
        connections = await connect(rehearsal.address, 20)
        asking = [asyncio.create_task(c.ask(r, 90)) for c, r in zip(connections, queries(20), strict=True)]
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1)
        later = await connect(rehearsal.address, 75)
        beside = await asyncio.gather(*(connection.ask(queries(1)[0], 90) for connection in later))
        replies = await asyncio.gather(*asking)
        for connection in [*connections, *later]:
            connection.hang_up()
        return replies, beside

    replies, beside = asyncio.run(hang_mid_burst())
    slowest = max(reply.seconds for reply in replies)
    figure(
        f"hung replica: {dict(outcome(replies))}, slowest {slowest:.1f} s; "
        f"75 queries that came meanwhile: {dict(outcome(beside))}"
    )
    assert {reply.status for reply in replies} <= {200, 429, 503}
    assert slowest < 60
    # 70 wait behind the hung batch and 5 overflow; the 70 are admitted again once the pool is known to be lost.
    assert outcome(beside)["cpu"] >= 5
    assert {reply.status for reply in beside} <= {200, 429, 503}
    rehearsal.wait_for(lambda pools: pools["accelerator"]["live_replicas"] == 1)
    assert burst(rehearsal.address, queries(1))[0].status == 200


def test_heterogeneous_off_leaves_the_cpu_out(rehearsal, figure):
    """Last but one in this file: it redeploys the application."""
    rehearsal.application["args"]["heterogeneous"] = False
    rehearsal.deploy()
    rehearsal.wait_for(lambda pools: list(pools) == ["accelerator"] and pools["accelerator"]["live_replicas"] == 1)
    wait_for_routers(rehearsal, 1)  # the old one finishes what it has beside the new one for a moment
    replies = burst(rehearsal.address, queries(200))
    figure(f"heterogeneous off: {dict(outcome(replies))}")
    assert outcome(replies) == {"accelerator": 90, 429: 110}


def test_a_bad_config_is_refused_by_a_cluster_too(rehearsal):
    """`serve deploy` does not run our checks first: the application refuses, and names the key in its status. Last in
    this file: it is gone then.
    """
    rehearsal.application["args"]["heterogenous"] = True
    rehearsal.type_deploy()
    ends = time.monotonic() + 60
    while (application := rehearsal.status()["applications"]["windve"])["status"] != "DEPLOY_FAILED":
        assert time.monotonic() < ends, application
        time.sleep(0.2)
    assert "args.heterogenous: there is no such setting" in application["message"]
