"""The real model in two real pools over HTTP and gRPC: its vectors against sentence-transformers in float32, its
tokens, and the document that describes the routes. Real clients: test_clients.py.
"""

import base64
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import hypothesis
import numpy as np
import pytest
import schemathesis
from conftest import PROMPTS
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from reference import worst
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from texts import TEXTS

from calibration.load import burst, request_bytes
from tests.kit import tei_wire

EXAMPLES = 500
HEADERS = {"content-type", "x-windve-priority", "x-windve-trial", "x-request-timeout-ms"}
SENTENCES = ["The overflow goes to the CPU.", "Where does the overflow go?", "A cat sat on a mat.", "你好"]
LONG = " ".join(str(number) for number in range(100, 600))


def openai_vectors(*replies):
    return np.array([item["embedding"] for reply in replies for item in reply.json()["data"]], dtype=np.float32)


def embed(service, inputs, **fields):
    return np.array(service.ask("/embed", {"inputs": inputs, **fields}).json(), np.float32)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_a_line_of_curl(real):
    reply = real.ask("/v1/embeddings", {"input": "Where does the overflow go?"})
    assert reply.status == 200
    assert np.linalg.norm(openai_vectors(reply)) == pytest.approx(1, abs=1e-5)
    assert reply.json()["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert "x-windve-emulated" not in reply.headers


def test_vectors_agree_with_float32_alone_and_in_mixed_batches_from_both_pools(real, reference, figure):
    def ask(texts):
        return real.ask("/v1/embeddings", {"input": texts})

    alone = [ask(text) for text in TEXTS]
    batches = [ask(TEXTS[first : first + 10]) for first in range(0, 50, 10)]
    # 28 queries fill both queues: 20 go to the accelerator and 8 to the CPU, as two batches of mixed lengths.
    both = [ask(TEXTS[first : first + 28]) for first in (0, 22)]
    set_depth(real, 0)
    on_cpu = [ask(text) for text in TEXTS]
    set_depth(real, 20)
    found = {
        "accelerator": (alone, reference),
        "accelerator, 10 at once": (batches, reference),
        "accelerator,cpu": (both, np.concatenate([reference[:28], reference[22:]])),
        "cpu": (on_cpu, reference),
    }
    for name, (replies, wanted) in found.items():
        assert {reply.pool for reply in replies} == {name.removesuffix(", 10 at once")}
        cosine = worst(openai_vectors(*replies), wanted)
        figure(f"smallest cosine to float32, {name}: {cosine:.6f}")
        assert cosine >= 0.999


def set_depth(service, depth):
    service.router["accelerator"]["queue_depth"] = depth
    service.deploy()
    service.wait_for(lambda pools: pools["accelerator"]["queue_depth"] == depth)


def test_queries_overflow_from_one_real_pool_to_the_other(real):
    replies = burst(real.address, [request_bytes({"input": f"{TEXTS[40]} {number}"}) for number in range(60)])
    pools = Counter(reply.pool or reply.status for reply in replies)
    assert pools["accelerator"] >= 20
    assert pools["cpu"] >= 8


def test_formats_say_the_same(real):
    def ask(given="hello world", **fields):
        return real.ask("/v1/embeddings", {"input": given, **fields}).json()["data"][0]["embedding"]

    plain = np.array(ask(), np.float32)
    nulls = {"model": None, "user": None, "dimensions": None, "encoding_format": None, "truncate": None}
    encoded = np.frombuffer(base64.b64decode(ask(encoding_format="base64")), "<f4")
    ids = [101, 7592, 2088, 102]  # [CLS] hello world [SEP]
    for same in (encoded, ask(**nulls), ask(ids), ask([ids]), embed(real, "hello world")[0]):
        assert np.array_equal(np.array(same, np.float32), plain)
    raw = embed(real, "hello world", normalize=False)[0]
    assert np.linalg.norm(raw) > 2  # the model's own length
    assert np.allclose(unit(raw), plain, atol=1e-5)
    for cut in (ask(dimensions=64), embed(real, "hello world", dimensions=64)[0]):
        assert np.allclose(cut, unit(plain[:64]), atol=1e-6)
    assert np.allclose(embed(real, "hello world", dimensions=64, normalize=False)[0], raw[:64], atol=1e-5)


def test_embed_all_gives_the_vectors_of_tokens(real):
    tokens = [np.array(one) for one in real.ask("/embed_all", {"inputs": [*SENTENCES, "word " * 400]}).json()]
    counts = [len(told) for told in real.ask("/tokenize", {"inputs": SENTENCES}).json()]
    assert [one.shape for one in tokens] == [*((count, 384) for count in counts), (256, 384)]
    pooled = unit(np.stack([one.mean(0) for one in tokens[:4]]))  # this model's pooling
    assert np.min(np.sum(pooled * embed(real, SENTENCES), axis=1)) >= 0.999
    refused = real.ask("/embed_all", {"inputs": ["word " * 400] * 50})
    assert (refused.status, "send fewer at once" in refused.json()["error"]) == (422, True)


def test_similarity_is_the_cosine_of_what_embed_answers(real):
    """In one admission decision: the source and 27 sentences fill both queues."""
    real.wait_until_idle()
    sentences = [*SENTENCES, *(f"sentence number {number}" for number in range(23))]
    reply = real.ask("/similarity", {"inputs": {"source_sentence": SENTENCES[0], "sentences": sentences}})
    vectors = embed(real, sentences)
    assert np.allclose(reply.json(), vectors @ vectors[0], atol=2e-3)
    assert reply.pool == "accelerator,cpu"


def test_tokenize_and_decode(real):
    text = "Where does the überflow go? 你好"
    (tokens,) = real.ask("/tokenize", {"inputs": text}).json()
    assert (tokens[0], tokens[-1]["text"]) == (
        {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None},
        "[SEP]",
    )
    for token in tokens[1:-1]:
        assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    bare = real.ask("/tokenize", {"inputs": [text, "a"], "add_special_tokens": False}).json()
    assert bare[0] == tokens[1:-1]
    ids = [token["id"] for token in tokens]
    assert embed(real, [ids]).tolist() == embed(real, text).tolist()
    assert real.ask("/decode", {"ids": ids}).json() == ["where does the uberflow go?"]  # no Chinese in it: [UNK]
    several = real.ask("/decode", {"ids": [ids[:2], ids[-1:]], "skip_special_tokens": False})
    assert several.json() == ["[CLS] where", "[SEP]"]


def test_prompts_are_put_before_the_text(real):
    plain, prompted = embed(real, "the overflow"), embed(real, "the overflow", prompt_name="query")
    assert prompted.tolist() == embed(real, PROMPTS["query"] + "the overflow").tolist() != plain.tolist()
    assert embed(real, "the overflow", prompt_name="document").tolist() == plain.tolist()
    ids = [101, 1996, 2058, 12314, 102]  # the overflow
    assert embed(real, [ids], prompt_name="query").tolist() == prompted.tolist()
    refused = real.ask("/embed", {"inputs": "a", "prompt_name": "passage"})
    assert refused.status == 422
    assert "there is no prompt named 'passage': only query, document" in refused.json()["error"]


def test_a_too_long_text_is_cut_on_the_side_that_is_asked_for(real):
    told = real.ask("/tokenize", {"inputs": LONG, "add_special_tokens": False}).json()[0]
    ids = [token["id"] for token in told]
    first, last = (embed(real, [[101, *kept, 102]]) for kept in (ids[:254], ids[-254:]))  # 256 is the model's most
    assert np.linalg.norm(first - last) > 0.1
    for side, expected in ((None, first), ("right", first), ("Left", last)):
        assert np.allclose(embed(real, LONG, truncation_direction=side), expected, atol=1e-6), side
    refused = real.ask("/embed", {"inputs": LONG, "truncate": False, "truncation_direction": "left"})
    assert (refused.status, refused.json()["error_type"]) == (422, "Validation")


def test_what_is_told_without_a_query(real):
    info = real.get("/info")
    assert (info["model_id"], info["max_input_length"]) == ("all-MiniLM-L6-v2", 256)
    assert info["max_client_batch_size"] >= 2048
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert {name: pool["queue_depth"] for name, pool in info["windve"]["pools"].items()} == {
        "accelerator": 20,
        "cpu": 8,
    }
    (model,) = real.get("/v1/models")["data"]
    assert real.get("/v1/models/all-MiniLM-L6-v2") == model
    assert [real.fetch(path).status for path in ("/health", "/ping", "/docs", "/v1/models/some%2Fother")] == [
        200,
        200,
        200,
        404,
    ]
    assert (real.fetch("/health", "HEAD").status, real.fetch("/embed").headers["allow"]) == (200, "POST")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_request_ids(real, path):
    for payload in ({"input": "a", "inputs": "a"}, {}):
        assert real.ask(path, payload, [("x-request-id", "mine-1")]).headers["x-request-id"] == "mine-1"
        assert len({real.ask(path, payload).headers["x-request-id"] for _ in range(2)}) == 2


@pytest.mark.parametrize(
    ("payload", "status", "sentence"),
    [
        ({"input": [30522]}, 400, "check_embedding_ctx_length=False"),
        ({"input": "word " * 400, "truncate": False}, 400, "has 402 tokens and the model takes 256"),
        ({"input": "x", "model": "other"}, 404, "there is no model 'other' here"),
        ({"input": ["x"] * 2049}, 400, "takes 2048 in one request"),
        ({"input": "x" * (17 * 2**20)}, 413, "larger than this server takes"),
    ],
    ids=["ids", "long", "model", "many", "large"],
)
def test_bad_input_gets_one_plain_sentence(real, payload, status, sentence):
    reply = real.ask("/v1/embeddings", payload)
    assert reply.status == status
    assert sentence in reply.json()["error"]["message"]
    assert "\n" not in reply.json()["error"]["message"]


def test_a_large_body_and_many_inputs_let_single_queries_through(real):
    assert real.ask("/v1/embeddings", {"input": "x " * 500_000}).status == 200
    many = {"input": [f"item {number} {TEXTS[40]}" for number in range(2048)], "encoding_format": "base64"}
    with ThreadPoolExecutor(1) as thread:
        bulk = thread.submit(real.ask, "/v1/embeddings", many)
        real.wait_for(lambda pools: pools["accelerator"]["in_flight"], what="the bulk request")
        assert real.ask("/v1/embeddings", {"input": "a"}).status == 200
        assert not bulk.done()
    assert [item["index"] for item in bulk.result().json()["data"]] == list(range(2048))


def test_the_document_is_true(real, figure):
    """Examples made from the document, good ones and bad ones, by schemathesis: each answer is one that the document
    has, and no 5xx but the 504 that a client asks for by x-request-timeout-ms.
    """
    load_all_checks()
    checks = schemathesis.checks.CHECKS.get_by_names(
        ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    )
    schema = schemathesis.openapi.from_url(f"{real.address}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    with_body = [operation for operation in operations if operation.method.upper() == "POST"]
    statuses = Counter()

    def check(operation, mode, examples):
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def run(case):
            # Headers of its own making could break HTTP itself, and the proxy would answer.
            case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() in HEADERS}
            response = case.call(base_url=str(real.address))
            statuses[response.status_code] += 1
            assert response.status_code < 500 or (
                response.status_code == 504 and "x-request-timeout-ms" in case.headers
            ), response.text
            case.validate_response(response, checks=checks)

        run()

    for operation in operations:
        if operation in with_body:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                check(operation, mode, -(-EXAMPLES // (2 * len(with_body))))
        else:
            check(operation, GenerationMode.POSITIVE, 5)
    figure(f"{statuses.total()} requests made from the OpenAPI document: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= EXAMPLES
    assert statuses[200] > EXAMPLES / 10


@pytest.fixture
def tei(real):
    with tei_wire.connected(real.grpc_port) as client:
        yield client


def floats(answer):
    return np.array(answer.embeddings, np.float32)


def test_grpc_answers_the_bits_of_http(real, tei):
    for asked in (
        *({"inputs": text, "truncate": True} for text in TEXTS[:10]),
        {"inputs": TEXTS[0], "normalize": False, "dimensions": 100},
        {"inputs": LONG, "truncate": True, "prompt_name": "query"},
    ):
        assert floats(tei.call("Embed/Embed", **asked)).tobytes() == embed(real, **asked)[0].tobytes()
    left = tei.call("Embed/Embed", inputs=LONG, truncate=True, truncation_direction=1)
    assert floats(left).tobytes() == embed(real, LONG, truncate=True, truncation_direction="left")[0].tobytes()
    told = tei.call("Embed/EmbedAll", inputs=TEXTS[0]).token_embeddings
    rows = real.ask("/embed_all", {"inputs": TEXTS[0]}).json()[0]
    assert np.allclose([list(row.embeddings) for row in told], rows, atol=1e-5)


def test_grpc_answer_says_what_it_cost_and_who_answered(tei):
    answer, call = tei.unary("Embed/Embed").with_call(tei_wire.request("Embed/Embed", inputs="hello world"))
    told = answer.metadata
    assert (told.compute_chars, told.compute_tokens) == (11, 4)
    assert told.total_time_ns >= told.queue_time_ns + told.inference_time_ns > 0
    assert dict(call.trailing_metadata())["x-windve-pool"] == "accelerator"


def test_grpc_streams_answer_in_order(tei, reference):
    requests = [tei_wire.request("Embed/EmbedStream", inputs=text, truncate=True) for text in TEXTS]
    answers = tei.stream("Embed/EmbedStream")(iter(requests), timeout=60)
    assert worst(np.array([floats(answer) for answer in answers]), reference) >= 0.999
    requests = iter([tei_wire.request("Embed/EmbedAllStream", inputs=text) for text in TEXTS[:2]])
    assert all(len(one.token_embeddings) > 2 for one in tei.stream("Embed/EmbedAllStream")(requests, timeout=30))


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


def test_grpc_tokens_are_those_of_http(real, tei):
    tokens = tei.call("Tokenize/Tokenize", inputs="Hello wörld", add_special_tokens=True).tokens
    (told,) = real.ask("/tokenize", {"inputs": "Hello wörld"}).json()
    assert [(token.id, token.text, token.special) for token in tokens] == [
        (token["id"], token["text"], token["special"]) for token in told
    ]
    assert [(token.start, token.stop) for token in tokens[1:3]] == [(0, 5), (6, 12)]
    assert not tokens[0].HasField("start")
    ids = [token.id for token in tokens]
    assert tei.call("Tokenize/Decode", ids=ids, skip_special_tokens=True).text == "hello world"


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
    assert [tei.health(service) for service in ("", "tei.v1.Embed")] == [health_pb2.HealthCheckResponse.SERVING] * 2
    watch = tei.watch()
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    offered = ProtoReflectionDescriptorDatabase(tei.channel)
    assert {"tei.v1.Embed", "tei.v1.Info", "tei.v1.Tokenize", "grpc.health.v1.Health"} <= set(offered.get_services())
    file = offered.FindFileContainingSymbol("tei.v1.EmbedRequest")
    assert [message.name for message in file.message_type] == list(tei_wire.MESSAGES)
