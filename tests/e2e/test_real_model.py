"""The real model in two real pools over HTTP and gRPC: its vectors against sentence-transformers in float32, and the
document that describes the routes. Real clients: test_clients.py.
"""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import numpy as np
import pytest
import schemathesis
from conftest import PROMPTS
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from reference import worst
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from texts import TEXTS

from tests.kit import tei_wire

EXAMPLES = 300
HEADERS = {"content-type", "x-windve-priority", "x-request-timeout-ms"}
SENTENCES = ["The overflow goes to the CPU.", "Where does the overflow go?", "A cat sat on a mat.", "你好"]
LONG = " ".join(str(number) for number in range(100, 600))


def openai_vectors(*replies):
    return np.array([item["embedding"] for reply in replies for item in reply.json()["data"]], dtype=np.float32)


def embed(service, inputs, **fields):
    return np.array(service.ask_again("/embed", {"inputs": inputs, **fields}).json(), np.float32)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_vectors_agree_with_float32_alone_and_in_mixed_batches_from_both_pools(real, reference, figure):
    def ask(texts):
        return real.ask_again("/v1/embeddings", {"input": texts})

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
        assert {reply.status for reply in replies} == {200}
        assert {reply.pool for reply in replies} == {name.removesuffix(", 10 at once")}
        cosine = worst(openai_vectors(*replies), wanted)
        figure(f"smallest cosine to float32, {name}: {cosine:.6f}")
        assert cosine >= 0.999


def set_depth(service, depth):
    service.router["accelerator"]["queue_depth"] = depth
    service.deploy()
    service.wait_for_each(lambda ours: ours["pools"]["accelerator"]["queue_depth"] == depth, f"the depth {depth}")


def test_embed_all_gives_the_vectors_of_tokens(real):
    tokens = [np.array(one) for one in real.ask_again("/embed_all", {"inputs": [*SENTENCES, "word " * 400]}).json()]
    counts = [len(told) for told in real.ask("/tokenize", {"inputs": SENTENCES}).json()]
    assert [one.shape for one in tokens] == [*((count, 384) for count in counts), (256, 384)]
    pooled = unit(np.stack([one.mean(0) for one in tokens[:4]]))  # this model's pooling
    assert np.min(np.sum(pooled * embed(real, SENTENCES), axis=1)) >= 0.999
    refused = real.ask("/embed_all", {"inputs": ["word " * 400] * 50})
    assert (refused.status, "send fewer at once" in refused.json()["error"]) == (422, True)


def test_prompts_are_put_before_the_text(real):
    plain, prompted = embed(real, "the overflow"), embed(real, "the overflow", prompt_name="query")
    assert prompted.tolist() == embed(real, PROMPTS["query"] + "the overflow").tolist() != plain.tolist()
    ids = [101, 1996, 2058, 12314, 102]  # the overflow
    assert embed(real, [ids], prompt_name="query").tolist() == prompted.tolist()
    refused = real.ask("/embed", {"inputs": "a", "prompt_name": "passage"})
    assert (refused.status, refused.json()["error_type"]) == (422, "Validation")


def test_a_too_long_text_is_cut_on_the_side_that_is_asked_for(real):
    told = real.ask("/tokenize", {"inputs": LONG, "add_special_tokens": False}).json()[0]
    ids = [token["id"] for token in told]
    first, last = (embed(real, [[101, *kept, 102]]) for kept in (ids[:254], ids[-254:]))  # 256 is the model's most
    assert np.linalg.norm(first - last) > 0.1
    for side, expected in ((None, first), ("right", first), ("Left", last)):
        assert np.allclose(embed(real, LONG, truncation_direction=side), expected, atol=1e-6), side
    refused = real.ask("/embed", {"inputs": LONG, "truncate": False, "truncation_direction": "left"})
    assert (refused.status, refused.json()["error_type"]) == (422, "Validation")


def test_a_large_body_and_many_inputs_let_single_queries_through(real):
    assert real.ask_again("/v1/embeddings", {"input": "x " * 500_000}).status == 200
    many = {"input": [f"item {number} {TEXTS[40]}" for number in range(2048)], "encoding_format": "base64"}
    with ThreadPoolExecutor(1) as thread:
        bulk = thread.submit(real.ask, "/v1/embeddings", many)
        real.wait_for(lambda pools: pools["accelerator"]["in_flight"], what="the bulk request")
        assert real.ask_again("/v1/embeddings", {"input": "a"}).status == 200
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
        @hypothesis.settings(max_examples=examples, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        def run(case):
            # Headers of its own making could break HTTP itself, and the proxy would answer.
            case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() in HEADERS}
            response = case.call(base_url=str(real.address))
            statuses[response.status_code] += 1
            is_late = response.status_code == 504 and "x-request-timeout-ms" in case.headers
            assert response.status_code < 500 or is_late, response.text
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
    rows = real.ask_again("/embed_all", {"inputs": TEXTS[0]}).json()[0]
    assert np.allclose([list(row.embeddings) for row in told], rows, atol=1e-5)


def test_grpc_streams_answer_in_order(tei, reference):
    requests = [tei_wire.request("Embed/EmbedStream", inputs=text, truncate=True) for text in TEXTS]
    answers = tei.stream("Embed/EmbedStream")(iter(requests), timeout=60)
    assert worst(np.array([floats(answer) for answer in answers]), reference) >= 0.999


def test_grpc_stream_that_waits_for_each_answer(tei):
    """A conversation: the client sends its next text only when it has the answer to the one before."""
    answered = []

    def texts():
        for number in range(3):
            yield tei_wire.request("Embed/EmbedStream", inputs=f"text {number}")
            while len(answered) == number:
                time.sleep(0.001)

    for answer in tei.stream("Embed/EmbedStream")(texts(), timeout=60):
        answered.append(answer)  # noqa: PERF402 - the texts look at it
    assert len(answered) == 3


def test_reflection(tei):
    offered = ProtoReflectionDescriptorDatabase(tei.channel)
    assert {"tei.v1.Embed", "tei.v1.Info", "tei.v1.Tokenize", "grpc.health.v1.Health"} <= set(offered.get_services())
    file = offered.FindFileContainingSymbol("tei.v1.EmbedRequest")
    assert [message.name for message in file.message_type] == list(tei_wire.MESSAGES)
