"""gRPC on the real model, by a client that knows TEI's messages and nothing of windve."""

import base64
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from reference import worst
from texts import TEXTS

from calibration.load import burst, request_bytes
from tests.kit import tei_wire


def ask(service, payload, path="/v1/embeddings"):
    return burst(service.address, [request_bytes(payload, path)])[0]


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


def test_prompts_and_the_side_of_a_cut_are_as_over_http(real, tei):
    long = "the first words " + "and a few more " * 100 + "the last words"
    for asked in ({"prompt_name": "query"}, {"truncation_direction": "left"}, {"truncation_direction": "right"}):
        numbers = ask(real, {"inputs": long, "truncate": True, **asked}, "/embed").json()[0]
        sides = {name: ["right", "left"].index(side) for name, side in asked.items() if name == "truncation_direction"}
        over_grpc = floats(tei.call("Embed/Embed", **{"inputs": long, "truncate": True, **asked, **sides}))
        assert over_grpc.tobytes() == np.array(numbers, np.float32).tobytes(), asked
    plain, prompted = (
        floats(tei.call("Embed/Embed", inputs="a cat", **more)) for more in ({}, {"prompt_name": "query"})
    )
    assert not np.array_equal(plain, prompted)


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
    for call, fields in (("Embed/EmbedSparse", {"inputs": "x"}), ("Predict/Predict", {"inputs": "x"}),
                         ("Rerank/Rerank", {"query": "x", "texts": ["y"]})):  # fmt: skip
        error = tei.refused(call, **fields)
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "all-MiniLM-L6-v2 is embedding" in error.details()
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


def test_vectors_of_tokens_are_those_of_http(real, tei):
    numbers = ask(real, {"inputs": TEXTS[0]}, "/embed_all").json()[0]
    told = tei.call("Embed/EmbedAll", inputs=TEXTS[0]).token_embeddings
    assert np.allclose([list(row.embeddings) for row in told], numbers, atol=1e-5)
    requests = iter([tei_wire.request("Embed/EmbedAllStream", inputs=text) for text in TEXTS[:2]])
    assert [len(one.token_embeddings) > 2 for one in tei.stream("Embed/EmbedAllStream")(requests, timeout=30)] == [
        True
    ] * 2


def test_a_watch_says_at_once_how_it_is(tei):
    watch = tei.watch()
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def random_call(dice):
    """A call and its bytes: fields at random, or bytes at random."""
    call = dice.choice(list(tei_wire.UNARY))
    if dice.random() < 0.2:
        return call, dice.randbytes(dice.randrange(40))
    fields = {}
    for field in tei_wire.CLASSES[tei_wire.UNARY[call][0]].DESCRIPTOR.fields:
        if dice.random() < 0.7:
            several = range(dice.randrange(9))
            fields[field.name] = (
                [random_value(dice, field) for _ in several] if field.is_repeated else random_value(dice, field)
            )
    return call, tei_wire.request(call, **fields).SerializeToString()


def random_value(dice, field):
    if field.name == "ids":
        return dice.choice([0, 101, 30521, 30522, 2**32 - 1, dice.randrange(30522)])
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
    other_kinds = {entry for entry in told if entry[0] == "FAILED_PRECONDITION" and "is embedding" in entry[1]}
    unwanted = {entry for entry in told if entry[0] not in {"OK", "INVALID_ARGUMENT"}} - other_kinds
    assert not unwanted
    assert min(codes["OK"], codes["INVALID_ARGUMENT"]) > 200
