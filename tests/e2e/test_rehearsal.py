"""The whole application over emulated devices: who answers what, what a busy answer says, who gives up, who dies."""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from conftest import SLOW
from grpc_health.v1 import health_pb2
from loopback import only_loopback

from calibration.load import burst, connect
from tests.kit import tei_wire
from tests.kit.service import ROUTERS, TEXT, outcome, queries, wait_until

REPLICAS = {"accelerator": 2, "cpu": 1}
FULL = {"accelerator": 20, "cpu": 5}
SLO_MS = 12_000
RAN = "batched_queries_total", (("pool", "accelerator"),)  # counted where the engine runs


@pytest.fixture
def tei(rehearsal):
    rehearsal.wait_until_idle()
    with tei_wire.connected(rehearsal.grpc_port) as client:
        yield client


@pytest.fixture
def loopback_only():
    with only_loopback():
        yield


def in_flight(count):
    return lambda pools: sum(pool["in_flight"] for pool in pools.values()) == count


def runs_alone(count):
    """So many are in a run of the accelerator, and none wait."""
    return lambda pools: (pools["accelerator"]["in_flight"], pools["accelerator"]["waiting"]) == (count, 0)


def test_a_burst_fills_both_queues_and_the_rest_is_told_busy(rehearsal):
    before = rehearsal.settled_samples()
    replies = burst(rehearsal.address, queries(40))
    assert outcome(replies) == {**FULL, 429: 15}
    busy = next(reply for reply in replies if reply.status == 429)
    assert busy.json()["error"]["code"] == "busy"
    assert 0 < int(busy.headers["retry-after-ms"]) <= 2 * SLO_MS  # the line is as long as what was refused
    assert int(busy.headers["retry-after"]) >= 1
    assert next(reply for reply in replies if reply.status == 200).headers["x-windve-emulated"] == "true"
    assert rehearsal.get("/info")["windve"]["emulated"] is True
    wait_until(lambda: count_answered(rehearsal.samples() - before) == 25, "the metrics of 25 answers")
    check_what_prometheus_hears(before, rehearsal.settled_samples())


def count_answered(samples):
    return sum(samples["queries_total", (("outcome", "ok"), ("pool", pool))] for pool in FULL)


def check_what_prometheus_hears(before, told):
    """A Router's metrics and an embedder's."""
    more = told - before
    for pool, count in FULL.items():
        assert more["queries_total", (("outcome", "ok"), ("pool", pool))] == count
    # Where a Router is slow, HAProxy refuses some of them by itself.
    assert 0 < more["queries_total", (("outcome", "busy"), ("pool", "none"))] <= 15
    for pool, count in FULL.items():
        tag, device, replicas = (("pool", pool),), SLOW[pool], REPLICAS[pool]
        # Each Router tells of all replicas, and each replica of itself.
        whole = [ROUTERS * count // replicas, ROUTERS * replicas, 0, 0]
        assert [told[name, tag] for name in ("depth", "live_replicas", "in_flight", "waiting")] == whole
        runs_s = device["beta_s"] * more["batches_total", tag] + device["alpha_s"] * count
        assert more["batch_seconds_total", tag] >= 0.99 * runs_s
    assert more["requests_total", ()] == more["request_seconds_count", ()] == 25


def grpc_queries(count):
    return [tei_wire.request("Embed/Embed", inputs=f"{TEXT}{number}") for number in range(count)]


def test_a_grpc_burst_on_one_connection_is_admitted_by_the_same_rule(tei):
    calls = [tei.unary("Embed/Embed").future(query, timeout=60) for query in grpc_queries(40)]
    outcomes = Counter(dict(call.trailing_metadata()).get("x-windve-pool") or call.code().name for call in calls)
    assert outcomes == {**FULL, "RESOURCE_EXHAUSTED": 15}
    busy = next(call for call in calls if call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED)
    told = dict(busy.trailing_metadata())
    assert 0 < int(told["retry-after-ms"]) <= 2 * SLO_MS  # those who are refused come back one after the other
    assert told["grpc-retry-pushback-ms"] == told["retry-after-ms"]
    assert busy.details().startswith("busy: there is no room for 1 more")


@contextlib.contextmanager
def asking(service, count):
    """So many queries are in flight; the block may await their replies: `.result()`."""
    service.wait_until_idle()
    with ThreadPoolExecutor(1) as thread:
        replies = thread.submit(burst, service.address, queries(count))
        service.wait_for(in_flight(count), what=f"{count} in flight")
        yield replies


def test_openais_client_comes_back_when_the_busy_answer_says(rehearsal, loopback_only):
    import openai

    asked, answered = [], []
    hooks = {
        "request": [lambda _: asked.append(time.monotonic())],
        "response": [lambda answer: answered.append((time.monotonic(), answer))],
    }
    watched = openai.DefaultHttpxClient(event_hooks=hooks)
    server = {"base_url": f"{rehearsal.address}/v1", "api_key": "none", "max_retries": 5, "http_client": watched}
    with openai.OpenAI(**server) as client:
        client.embeddings.create(model="emulated", input=TEXT)  # what a client loads late is loaded by now
        asked.clear(), answered.clear()
        with asking(rehearsal, 25):
            assert len(client.embeddings.create(model="emulated", input=TEXT).data[0].embedding) == 384
    statuses = [answer.status_code for _, answer in answered]
    assert (statuses[0], statuses[-1]) == (429, 200)
    told = [int(answer.headers["retry-after-ms"]) / 1000 for _, answer in answered[:-1]]
    waited = [later - at for (at, _), later in zip(answered, asked[1:], strict=False)]
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
    clients = lambda: embeddings.embed_query(TEXT), lambda: litellm.embedding(input=[TEXT], **lite)
    for ask in clients:
        ask()
    refused = busy_answers(rehearsal)
    with asking(rehearsal, 25), ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda ask: ask(), clients))
    assert busy_answers(rehearsal) >= refused + len(clients)


def busy_answers(service):
    return sum(info["windve"]["busy_answers"] for info in service.infos())


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
    sentence = "there is no room for 1 more within 12 s; retry in"
    clients = [
        (lambda: haystack.run(TEXT), sentence),
        (lambda: InferenceClient(address).feature_extraction(TEXT), sentence),
        (lambda: infinity.embed_query(TEXT), f"status 429: .*{sentence}"),
        (lambda: llama_index.get_text_embedding_batch([TEXT]), "'Overloaded'"),  # it looks at no status
    ]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda client: client[0](), clients))
    with asking(rehearsal, 25):
        for ask, said in clients:
            with pytest.raises(Exception, match=said):
                ask()


def test_what_nobody_waits_for_is_not_run(rehearsal, tei):
    """A run that nobody waits for is called off, and counts as none."""

    async def hang_up():
        connections = await connect(rehearsal.address, 20)
        asked = [asyncio.create_task(c.ask(r)) for c, r in zip(connections, queries(20), strict=True)]
        await asyncio.to_thread(rehearsal.wait_for, runs_alone(20))
        for connection in connections:
            connection.hang_up()
        await asyncio.gather(*asked, return_exceptions=True)

    before = rehearsal.settled_samples()[RAN]
    asyncio.run(hang_up())
    rehearsal.wait_until_idle()
    calls = [tei.unary("Embed/Embed").future(query, timeout=60) for query in grpc_queries(10)]
    rehearsal.wait_for(runs_alone(10))
    stream = tei.stream("Embed/EmbedStream")(iter(grpc_queries(1000)), timeout=60)  # takes half of each queue
    rehearsal.wait_for(lambda pools: sum(pool["in_flight"] for pool in pools.values()) > 10, what="some of the stream")
    for call in (*calls, stream):
        call.cancel()
    rehearsal.wait_until_idle()
    assert rehearsal.settled_samples()[RAN] == before


def test_a_grpc_clients_deadline_is_kept(tei):
    assert tei.refused("Embed/Embed", inputs="x", timeout=0.2).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    error = tei.refused("Embed/Embed", inputs="x", metadata=[("x-request-timeout-ms", "50")])
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the 0.05 s that the request allows" in error.details()


def test_a_killed_pool_loses_no_request_for_good_and_health_is_degraded_until_it_is_back(rehearsal, figure):
    services = "", "tei.v1.Embed", "windve.accelerator", "windve.cpu"
    seen = []
    with asking(rehearsal, 15) as replies, tei_wire.connected(rehearsal.grpc_port) as client:
        assert rehearsal.get("/health") == {"status": "ok"}
        killed = rehearsal.kill("accelerator", count=2)

        def is_back():
            statuses = [client.health(service) for service in services]
            seen.append((rehearsal.get("/health"), statuses))
            replicas = rehearsal.pools()["accelerator"]["replicas"].values()
            new = {about["pid"] for about in replicas} - killed
            return len(new) == len(replicas) == 2 and seen[-1][0] == {"status": "ok"}

        wait_until(is_back, "new replicas")
        figure(f"kill -9 of both accelerators with 15 in flight: {dict(outcome(replies.result()))}")
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    degraded = {"status": "degraded", "missing": ["accelerator"]}
    assert (degraded, [serving, serving, not_serving, serving]) in seen
    assert {tuple(statuses[:2] + statuses[3:]) for _, statuses in seen} == {(serving,) * 3}
    assert {reply.status for reply in replies.result()} <= {200, 429, 503}
    assert outcome(burst(rehearsal.address, queries(1))) == {"accelerator": 1}


def test_a_hung_replica_is_replaced_and_its_queries_are_answered(rehearsal, figure):
    """SIGSTOP: the process is there, and nothing of it answers, as with a hung device. The other one goes on."""
    with asking(rehearsal, 10) as replies:
        stopped = rehearsal.kill("accelerator", signal.SIGSTOP)
        beside = burst(rehearsal.address, queries(15))
        figure(f"a hung replica: {dict(outcome(replies.result()))}, 15 others: {dict(outcome(beside))}")
    found = outcome([*replies.result(), *beside])
    assert found.keys() <= {"accelerator", "cpu", 429, 503, 504}
    assert found["cpu"] >= FULL["cpu"]

    def is_replaced(ours):
        pids = {about["pid"] for about in ours["pools"]["accelerator"]["replicas"].values()}
        return len(pids) == 2 and pids.isdisjoint(stopped)

    rehearsal.wait_for_each(is_replaced, "a new replica")
    assert outcome(burst(rehearsal.address, queries(1))) == {"accelerator": 1}


def test_a_bad_config_is_refused_by_a_cluster_too(rehearsal):
    """`serve deploy` does not run our checks first: the application refuses, and names the key in its status. Last in
    this file: it is gone then.
    """
    rehearsal.application["args"]["heterogenous"] = True
    rehearsal.type_deploy()

    def application():
        return rehearsal.status()["applications"]["windve"]

    wait_until(lambda: application()["status"] == "DEPLOY_FAILED", "the refusal")
    assert "args.heterogenous: there is no such setting" in application()["message"]
