"""Generation on real Ray: an emulated accelerator and CPU pool whose tokens follow from a rule, and a tiny real model
beside them in an application of its own. Promises are so loose, and caches so small, that no machine is too slow.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
import torch
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from test_observed import MARKER, PARENT_ID, by_id
from test_with_keys import session_logs
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.kit.emulated_text import EmulatedText, longer_model
from calibration.load import request_bytes
from serve_app.proto.generation_pb2 import GenerateRequest, GenerateResponse, TokenIds, Usage
from tests.kit.otlp_collector import Collector, attributes
from tests.kit.packed_models import VOCABULARY
from tests.kit.packed_models import build as build_transformers
from tests.kit.service import load_yaml

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
CONTEXT = 16_384
POOLS = {"accelerator": 64, "cpu": 32}  # blocks
NEAR = 1e-4  # of the two best logits: either token is right


def tiny_model(folder: Path):
    """Qwen2 with random weights, whose words are numbers."""
    own = build_transformers(Qwen2ForCausalLM, Qwen2Config, **SHAPE)
    own.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))
    return own


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_model(folder)


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


def wait_until(holds, timeout_s=60):
    ends = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends, "it does not come to be"
        time.sleep(0.1)


def is_free(pool):
    return all(
        (one["rows"], one["waiting"], one["free_blocks"]) == (0, 0, one["blocks"]) for one in pool["replicas"].values()
    )


def all_free(service, route=""):
    return all(map(is_free, pools(service, route).values()))


def rows(service):
    """{pool: answers that it generates}."""
    return {name: sum(one["rows"] for one in pool["replicas"].values()) for name, pool in pools(service).items()}


async def stream(openai_client, model, prompt, tokens, leave_after=None, **more):
    """(text, finish, error) of a streamed answer; `leave_after`: hang up after so many events."""
    text, finish, events = "", None, 0
    try:
        answer = await openai_client.completions.create(
            model=model, prompt=prompt, max_tokens=tokens, stream=True, temperature=0, **more
        )
        async for event in answer:
            events += 1
            text += event.choices[0].text
            finish = event.choices[0].finish_reason or finish
            if leave_after is not None and events >= leave_after:
                await answer.close()
                return text, "left", None
    except openai.APIError as error:
        return text, finish, error
    return text, finish, None


async def until_room(ask):
    """What `ask` gives once it is not told to come back."""
    while True:
        text, finish, error = await ask()
        if not isinstance(error, openai.RateLimitError):
            return text, finish, error
        await asyncio.sleep(float(error.response.headers["retry-after-ms"]) / 1000)


class Client:
    """One that reads as it likes: a connection with a small buffer."""

    def __init__(self, service, draw):
        self.service, self.draw = service, draw

    async def open(self, prompt, tokens, **more):
        payload = {"model": "emulated", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, (self.service.address.host, self.service.address.port))
        reader, writer = await asyncio.open_connection(sock=own, limit=1024)
        writer.write(request_bytes({**payload, **more}, "/v1/completions"))
        return reader, writer

    async def hangs_up(self, prompt):
        reader, writer = await self.open(prompt, 150)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.draw.random() * 2):
                await reader.read(self.draw.choice([1, 2000]))
        writer.transport.abort()

    async def stops_reading(self, prompt):
        more = {"n": 4, "logprobs": 5} if self.draw.random() < 0.2 else {}
        reader, writer = await self.open(prompt, 120, **more)
        await reader.read(1)
        writer.transport.pause_reading()
        await asyncio.sleep(3)
        writer.transport.abort()

    async def reads_slowly(self, prompt):
        """All that comes, head and chunks, a little at a time."""
        reader, writer = await self.open(prompt, 30)
        came = b""
        while (some := await reader.read(100)) and not (came := came + some).endswith(b"0\r\n\r\n"):
            if b"content-length" in came.lower():  # a refusal
                break
            await asyncio.sleep(0.05)
        writer.transport.abort()
        return came


def events_of(came):
    """Status and events of an answer in chunks, also where it broke off; no event of a refusal."""
    head, _, rest = came.partition(b"\r\n\r\n")
    body = b""
    while (size := rest.partition(b"\r\n")[0]) and b"content-length" not in head.lower():
        start = len(size) + 2
        body += rest[start : start + int(size, 16)]
        rest = rest[start + int(size, 16) + 2 :]
    return int(head.split()[1]), re.findall(r"^data: (.*)$", body.decode(), re.MULTILINE)


def said(events):
    told = [json.loads(one) for one in events if one != "[DONE]"]
    return "".join(one["choices"][0]["text"] for one in told if "error" not in one)


def is_free_by_metrics(service):
    told = service.samples()
    used = [told[name, (("pool", pool),)] for name in ("kv_blocks_used", "in_flight", "waiting") for pool in POOLS]
    free = sum(told["kv_blocks_free", (("pool", pool),)] for pool in POOLS)
    there = [pool for route in ("", "/real") for pool in pools(service, route).values()]
    return not any(used) and free == sum(one["blocks"] for pool in there for one in pool["replicas"].values())


def test_bad_clients_leave_nothing_behind_and_their_neighbour_is_served(service):
    rule, draw = EmulatedText(), random.Random(5)
    bad = Client(service, draw)

    async def some(ask, prompts):
        async def one(prompt):
            await asyncio.sleep(draw.random() * 4)
            return await ask(prompt)

        return await asyncio.gather(*map(one, prompts))

    async def neighbour():
        async with client(service) as to:
            for number in range(12):
                prompt = [draw.randrange(rule.vocabulary) for _ in range(80)]
                found = await until_room(lambda prompt=prompt: stream(to, "emulated", prompt, 10))
                assert found == (rule.text(prompt, 10), "length", None), number

    async def main():
        prompts = [[draw.randrange(rule.vocabulary) for _ in range(draw.choice([5, 130, 300]))] for _ in range(25)]
        *_, slow, _ = await asyncio.gather(
            some(bad.hangs_up, prompts), some(bad.stops_reading, prompts), some(bad.reads_slowly, prompts), neighbour()
        )
        slow = [(status, said(events)) for status, events in map(events_of, slow)]
        for prompt, found in zip(prompts, slow, strict=True):
            assert found in {(200, rule.text(prompt, 30)), (429, "")}
        assert any(status == 200 for status, _ in slow)

    asyncio.run(main())
    wait_until(lambda: all_free(service))
    wait_until(lambda: is_free_by_metrics(service))
    gone = [count for (name, tags), count in service.samples().items() if ("outcome", "cancelled") in tags]
    assert sum(gone) > 0  # who hung up while it was generated for


def generate(service, prompt, tokens, *metadata, timeout=120):
    """The call, as grpcio has it; whoever iterates it gets its messages."""
    channel = grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}")
    ask = channel.unary_stream(
        "/windve.v1.Generation/Generate",
        request_serializer=GenerateRequest.SerializeToString,
        response_deserializer=GenerateResponse.FromString,
    )
    request = GenerateRequest(ids=TokenIds(ids=prompt), max_tokens=tokens, temperature=0)
    return ask(request, timeout=timeout, metadata=[("application", "windve"), *metadata])


def test_the_cpu_takes_what_the_accelerator_has_no_room_for_then_all_are_told_to_come_back(service):
    """Answers that fill the caches and last for minutes; who leaves makes room again."""
    wait_until(lambda: all_free(service))
    calls = []
    while True:
        call = generate(service, [len(calls) + 1] * 50, 4000)
        try:
            next(call)
        except grpc.RpcError:
            break
        calls.append(call)
    assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    told = dict(call.trailing_metadata())
    assert 0 < int(told["retry-after-ms"]) == int(told["grpc-retry-pushback-ms"])
    wait_until(lambda: sum(rows(service).values()) == len(calls))
    assert all(rows(service).values())

    async def main():
        async with client(service) as to:
            _, _, error = await stream(to, "emulated", [3] * 50, 8000)
            assert isinstance(error, openai.RateLimitError)
            assert float(error.response.headers["retry-after-ms"]) > 0
            for call in calls:
                call.cancel()
            answer = EmulatedText().text([3] * 50, 12), "length", None
            assert await until_room(lambda: stream(to, "emulated", [3] * 50, 12)) == answer

    asyncio.run(main())
    wait_until(lambda: all_free(service))


def test_grpc_streams_the_same_tokens_and_its_deadline_counts_for_admission(service):
    rule, prompt = EmulatedText(), list(range(1000, 1100))
    call = generate(service, prompt, 20)
    *messages, last = call
    assert "".join(message.text for message in messages) == rule.text(prompt, 20)
    assert len(messages) > 1
    assert [message.finish_reason for message in messages if message.finish_reason] == ["length"]
    assert last.usage == Usage(prompt_tokens=100, completion_tokens=20)
    told = dict(call.trailing_metadata())
    assert told["x-windve-emulated"] == "true"
    assert told["x-request-id"]
    # By the table the first token of such a prompt takes the accelerator 3.2 s.
    call = generate(service, [7] * 8000, 3, timeout=3)
    with pytest.raises(grpc.RpcError, match=r"takes longer than [0-3]\."):
        list(call)
    assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert list(generate(service, [7] * 8000, 3))[-1].usage.completion_tokens == 3


def test_grpc_health_of_each_application(service):
    channel = grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}")
    health, serving = HealthStub(channel), HealthCheckResponse.SERVING
    for name in ("windve", "real"):
        about = {"metadata": [("application", name)], "timeout": 30}
        assert health.Check(HealthCheckRequest(service="windve.v1.Generation"), **about).status == serving
        watch = health.Watch(HealthCheckRequest(), **about)
        assert next(watch).status == serving
        watch.cancel()


def test_a_generation_is_traced_and_logged_without_its_text(service, collector):
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    about = {"traceparent": f"00-{trace}-{PARENT_ID}-01", "x-request-id": "traced"}

    async def main():
        async with client(service) as to:
            return await stream(to, "emulated", f"{MARKER} goes", 12, extra_headers=about)

    text, finish, _ = asyncio.run(main())
    assert finish == "length"
    inner = ("tokenize", "admission", "first_token", "stream")
    spans, _ = collector.wait_for(trace, "POST /v1/completions", *inner)
    (request,) = spans["POST /v1/completions"]
    assert request.parent_span_id.hex() == PARENT_ID
    for name in inner:
        assert [span.parent_span_id for span in spans[name]] == [request.span_id]
    told = attributes(request)
    assert (told["gen_ai.usage.output_tokens"], told["windve.pools"].values[0].string_value) == (12, "accelerator")
    assert attributes(spans["admission"][0])["windve.admission"] == "admitted"
    assert attributes(spans["stream"][0])["windve.answer_tokens"] == 12
    ends = [spans[name][0].end_time_unix_nano for name in inner]
    assert sorted(ends) == ends
    line = by_id(service, "traced")["traced"]
    assert (line["answer_tokens"], line["offers"], line["pools"]) == (12, 1, ["accelerator"])
    assert line["first_token_s"] == pytest.approx(told["windve.first_token_s"])
    assert 0 < line["pace_s"] < line["actual_s"]
    trace = "0" * 27 + "abcde"
    list(generate(service, [5] * 20, 5, ("traceparent", f"00-{trace}-{PARENT_ID}-01")))
    spans, _ = collector.wait_for(trace, "windve.v1.Generation/Generate", "stream")
    (request,) = spans["windve.v1.Generation/Generate"]
    assert attributes(request)["rpc.response.status_code"] == "OK"
    seen = b"".join(one.SerializeToString() for one in collector.requests)
    logs = b"".join(path.read_bytes() for path in session_logs(service) if path.name.startswith("access_"))
    for secret in (MARKER, text):
        assert secret.encode() not in seen
        assert secret.encode() not in logs


def test_the_tiny_models_greedy_tokens_are_those_of_transformers(service, own):
    model, draw = own[1], np.random.default_rng(1)
    prompts = [draw.integers(0, VOCABULARY, length).tolist() for length in (3, 20, 90, 130, 200)]

    async def main():
        async with client(service, "/real") as to:
            asked = (stream(to, "tiny", prompt, 30, extra_body={"ignore_eos": True}) for prompt in prompts)
            return await asyncio.gather(*asked)

    for prompt, (text, finish, error) in zip(prompts, asyncio.run(main()), strict=True):
        assert (finish, error) == ("length", None)
        tokens = [int(word) for word in text.split("w")[1:]]
        ids = torch.tensor([*prompt, *tokens])
        with torch.inference_mode():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        picked = logits.gather(1, ids[len(prompt) :, None])[:, 0]
        assert len(tokens) == 30
        assert (logits.amax(1) - picked <= NEAR).all()
    wait_until(lambda: all_free(service, "/real"))


def test_a_killed_replica_ends_its_streams_with_one_clear_error_each(service):
    rule, tokens = EmulatedText(), 600
    (replica,) = pools(service)["accelerator"]["replicas"].values()
    prompts = [[number] * 20 for number in range(1, 9)]

    async def kill():
        await asyncio.to_thread(wait_until, lambda: rows(service)["accelerator"] == len(prompts))
        os.kill(replica["pid"], signal.SIGKILL)

    async def main():
        async with client(service) as to:
            return await asyncio.gather(kill(), *(stream(to, "emulated", prompt, tokens) for prompt in prompts))

    for prompt, (text, _, error) in zip(prompts, asyncio.run(main())[1:], strict=True):
        assert rule.text(prompt, tokens).startswith(text)
        assert "lost replica" in str(error)

    def is_back():
        with suppress(OSError):
            accelerator = pools(service)["accelerator"]
            others = all(one["pid"] != replica["pid"] for one in accelerator["replicas"].values())
            return others and accelerator["live_replicas"] == 1 and is_free(accelerator)
        return False

    wait_until(is_back, 120)
    assert is_free(pools(service)["cpu"])

    async def ask():
        async with client(service) as to:
            return await stream(to, "emulated", [7, 8, 9], 10)

    assert asyncio.run(ask()) == (rule.text([7, 8, 9], 10), "length", None)
