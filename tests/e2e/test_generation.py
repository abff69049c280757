"""Generation on real Ray: an emulated accelerator and CPU pool whose tokens follow from a rule, and a tiny real model
beside them in an application of its own. Promises are so loose, and caches so small, that no machine is too slow.
"""

import asyncio
import os
import random
import re
import signal
import socket
from contextlib import suppress

import grpc
import openai
import pytest
import torch
from chromium import browser
from test_observed import MARKER, PARENT_ID, by_id
from test_with_keys import session_logs
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from benchmarks.kit.emulated_text import EmulatedText, longer_model
from calibration.load import request_bytes
from serve_app.proto.generation_pb2 import GenerateRequest, GenerateResponse, TokenIds, Usage
from tests.kit.causal_models import causal, check, prompt_of
from tests.kit.otlp_collector import Collector, attributes
from tests.kit.packed_models import VOCABULARY
from tests.kit.service import load_yaml, wait_until

CONTEXT = 16_384
POOLS = {"accelerator": 64, "cpu": 32}  # blocks of each replica; there are two accelerators


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The folder of a Qwen2 with random weights, whose words are numbers, and transformers' model of it."""
    folder, model = tmp_path_factory.mktemp("tiny"), causal("qwen2")
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))
    return folder, model


@pytest.fixture(scope="module")
def collector():
    collector = Collector()
    yield collector
    collector.server.stop(0)


@pytest.fixture(scope="module")
def service(shared, own, collector, tmp_path_factory):
    config = load_yaml("generation_rehearsal.yaml")
    (emulated,) = config["applications"]
    args = emulated["args"]
    args["model"]["id"] = str(longer_model(tmp_path_factory.mktemp("long") / "model", CONTEXT))
    args["limits"] = {"slow_reader_s": 1.0}
    args["accelerator"]["replicas"] = 2
    args["traces"] = {"endpoint": f"http://127.0.0.1:{collector.port}", "sample_ratio": 0.0}
    for pool, blocks in POOLS.items():
        args[pool]["blocks"] = blocks
    loose = {"ttft_s": 20.0, "tpot_s": 2.0}
    emulated["deployments"][0]["user_config"] = {**loose, "access_log": "all"}
    real = {
        "name": "real",
        "route_prefix": "/real",
        "import_path": emulated["import_path"],
        "args": {
            "model": {"id": str(own[0]), "name": "tiny", "tokenizer": "file"},
            "accelerator": {"device": "none"},
            "cpu": {"dtype": "float32", "blocks": 64, "num_cpus": 0.1},
        },
        "deployments": [{"name": "Router", "user_config": loose}],
    }
    config["applications"].append(real)
    return shared.serve(config)


def client(service, route=""):
    return openai.AsyncOpenAI(base_url=f"{service.address}{route}/v1", api_key="none", max_retries=0, timeout=120)


def pools(service, route=""):
    """What /info says of each pool."""
    return service.get(f"{route}/info")["windve"]["pools"]


def is_free(pool):
    return all(
        (one["rows"], one["waiting"], one["free_blocks"]) == (0, 0, one["blocks"]) for one in pool["replicas"].values()
    )


def all_free(service, route=""):
    return all(map(is_free, pools(service, route).values()))


def rows(service):
    """Answers that the accelerator generates."""
    return sum(one["rows"] for one in pools(service)["accelerator"]["replicas"].values())


async def stream(openai_client, model, prompt, tokens, **more):
    """(text, finish, error) of a streamed answer."""
    text, finish = "", None
    asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    try:
        async for event in await openai_client.completions.create(stream=True, **asked):
            text += event.choices[0].text
            finish = event.choices[0].finish_reason or finish
    except openai.APIError as error:
        return text, finish, error
    return text, finish, None


def test_the_page_streams_an_answer(service):
    """Also of an application under a prefix, whose model has no chat template."""
    with browser() as tab:
        tab.open(f"{service.address}/real")
        tab.wait_for("#pools", "blocks of the cache are free")
        assert "a first token within 20 s" in tab.text("#promise")
        tab.write("#text", "w1w2w3")
        tab.click("#go")
        said = tab.wait_for("#said", "First token after")
        assert re.match(r"(w\d+)+\n\nFirst token after ", said)
        tab.wait_for("#totals", "answered by the CPU")


async def until_room(ask):
    """What `ask` gives once it is not told to come back."""
    while True:
        text, finish, error = await ask()
        if not isinstance(error, openai.RateLimitError):
            return text, finish, error
        await asyncio.sleep(float(error.response.headers["retry-after-ms"]) / 1000)


def is_free_by_metrics(service):
    told = service.samples()
    used = [told[name, (("pool", pool),)] for name in ("kv_blocks_used", "in_flight", "waiting") for pool in POOLS]
    free = sum(told["kv_blocks_free", (("pool", pool),)] for pool in POOLS)
    there = [pool for route in ("", "/real") for pool in pools(service, route).values()]
    return not any(used) and free == sum(one["blocks"] for pool in there for one in pool["replicas"].values())


def test_bad_clients_leave_nothing_behind_and_their_neighbour_is_served(service):
    """They hang up, or stop reading with a small buffer."""
    rule, draw = EmulatedText(), random.Random(5)

    async def bad(stops_reading):
        await asyncio.sleep(draw.random() * 4)
        prompt = [draw.randrange(rule.vocabulary) for _ in range(draw.choice([5, 130, 300]))]
        more = {"n": 4, "logprobs": 5} if draw.random() < 0.2 else {}
        payload = {"model": "emulated", "prompt": prompt, "max_tokens": 150, "temperature": 0, "stream": True, **more}
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.connect((service.address.host, service.address.port))
        reader, writer = await asyncio.open_connection(sock=own, limit=1024)
        writer.write(request_bytes(payload, "/v1/completions"))
        if stops_reading:
            await reader.read(1)
            writer.transport.pause_reading()
            await asyncio.sleep(3)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(draw.choice([1, 2000])), draw.random() * 2)
        writer.transport.abort()

    async def neighbour():
        async with client(service) as to:
            for number in range(12):
                prompt = [draw.randrange(rule.vocabulary) for _ in range(80)]
                found = await until_room(lambda prompt=prompt: stream(to, "emulated", prompt, 10))
                assert found == (rule.text(prompt, 10), "length", None), number

    async def main():
        await asyncio.gather(*map(bad, [False, True] * 25), neighbour())

    asyncio.run(main())
    wait_until(lambda: all_free(service), "the end")
    wait_until(lambda: is_free_by_metrics(service), "metrics of the end")
    gone = [count for (name, tags), count in service.samples().items() if ("outcome", "cancelled") in tags]
    assert sum(gone) > 0  # who hung up while it was generated for


def test_grpc_streams_the_same_tokens_and_its_trace_and_its_deadline_count(service, collector):
    rule, prompt, trace = EmulatedText(), list(range(1000, 1100)), "0" * 27 + "abcde"
    channel = grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}")
    ask = channel.unary_stream(
        "/windve.v1.Generation/Generate",
        request_serializer=GenerateRequest.SerializeToString,
        response_deserializer=GenerateResponse.FromString,
    )
    metadata = [("application", "windve"), ("traceparent", f"00-{trace}-{PARENT_ID}-01")]
    call = ask(GenerateRequest(ids=TokenIds(ids=prompt), max_tokens=20, temperature=0), timeout=120, metadata=metadata)
    *messages, last = call
    assert "".join(message.text for message in messages) == rule.text(prompt, 20)
    assert len(messages) > 1
    assert last.usage == Usage(prompt_tokens=100, completion_tokens=20)
    told = dict(call.trailing_metadata())
    assert told["x-windve-emulated"] == "true"
    assert told["x-request-id"]
    spans, _ = collector.wait_for(trace, "windve.v1.Generation/Generate", "stream")
    assert attributes(spans["windve.v1.Generation/Generate"][0])["rpc.response.status_code"] == "OK"
    # By the table the first token of such a prompt takes the accelerator 3.2 s.
    call = ask(GenerateRequest(ids=TokenIds(ids=[7] * 8000), max_tokens=3), timeout=3, metadata=metadata)
    with pytest.raises(grpc.RpcError, match=r"takes longer than [0-3]\."):
        list(call)
    assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_generation_is_traced_and_logged_without_its_text(service, collector):
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    about = {"traceparent": f"00-{trace}-{PARENT_ID}-01", "x-request-id": "traced"}

    async def main():
        async with client(service) as to:
            return await stream(to, "emulated", f"{MARKER} goes", 12, extra_headers=about)

    text, *_ = asyncio.run(main())
    inner = ("tokenize", "admission", "first_token", "stream")
    spans, _ = collector.wait_for(trace, "POST /v1/completions", *inner)
    (request,) = spans["POST /v1/completions"]
    assert request.parent_span_id.hex() == PARENT_ID
    for name in inner:
        assert [span.parent_span_id for span in spans[name]] == [request.span_id]
    line = by_id(service, "traced")["traced"]
    assert (line["answer_tokens"], line["offers"], line["pools"]) == (12, 1, ["accelerator"])
    seen = b"".join(one.SerializeToString() for one in collector.requests)
    logs = b"".join(path.read_bytes() for path in session_logs(service) if path.name.startswith("access_"))
    for secret in (MARKER, text):
        assert secret.encode() not in seen
        assert secret.encode() not in logs


def test_the_tiny_models_greedy_tokens_are_those_of_transformers(service, own):
    prompts = [prompt_of(length) for length in (3, 20, 90, 130, 200)]

    async def main():
        async with client(service, "/real") as to:
            asked = (stream(to, "tiny", prompt, 30, extra_body={"ignore_eos": True}) for prompt in prompts)
            return await asyncio.gather(*asked)

    for prompt, (text, finish, error) in zip(prompts, asyncio.run(main()), strict=True):
        assert (finish, error) == ("length", None)
        tokens = [int(word) for word in text.split("w")[1:]]
        assert len(tokens) == 30
        check(own[1], [*prompt, *tokens], len(prompt))
    wait_until(lambda: all_free(service, "/real"), "the end")


def test_the_tiny_models_log_probabilities_of_prompts_are_those_of_transformers(service, own):
    """As lm-evaluation-harness asks for them."""
    prompts = [prompt_of(length) for length in (2, 130, 200)]

    async def main():
        async with client(service, "/real") as to:
            return await to.completions.create(
                model="tiny", prompt=prompts, max_tokens=1, echo=True, logprobs=1, temperature=0
            )

    for ids, choice in zip(prompts, asyncio.run(main()).choices, strict=True):
        with torch.inference_mode():
            logprobs = own[1](input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(1)
        first, *found = choice.logprobs.token_logprobs[:-1]
        assert first is None
        assert found == pytest.approx(logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), abs=1e-3)
        best = [max(one.values()) for one in choice.logprobs.top_logprobs[1:-1]]
        assert best == pytest.approx(logprobs.amax(1).tolist(), abs=1e-3)
    wait_until(lambda: all_free(service, "/real"), "the end")


def test_killed_replicas_end_their_streams_with_one_clear_error_each(service):
    rule, tokens = EmulatedText(), 600
    killed = {replica["pid"] for replica in pools(service)["accelerator"]["replicas"].values()}
    prompts = [[number] * 20 for number in range(1, 9)]

    async def kill():
        await asyncio.to_thread(wait_until, lambda: rows(service) == len(prompts), "all of them")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    async def main():
        async with client(service) as to:
            return await asyncio.gather(kill(), *(stream(to, "emulated", prompt, tokens) for prompt in prompts))

    for prompt, (text, _, error) in zip(prompts, asyncio.run(main())[1:], strict=True):
        assert rule.text(prompt, tokens).startswith(text)
        assert "lost replica" in str(error)

    def is_back():
        accelerator = pools(service)["accelerator"]
        others = killed.isdisjoint(one["pid"] for one in accelerator["replicas"].values())
        return others and accelerator["live_replicas"] == len(killed) and is_free(accelerator)

    wait_until(is_back, "new replicas")
    assert is_free(pools(service)["cpu"])

    async def ask():
        async with client(service) as to:
            return await stream(to, "emulated", [7, 8, 9], 10)

    assert asyncio.run(ask()) == (rule.text([7, 8, 9], 10), "length", None)
