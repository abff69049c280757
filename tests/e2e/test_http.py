"""HTTP beyond embedding: every route of TEI's and OpenAI's, their errors, and the document that describes them."""

import asyncio
import base64
from collections import Counter

import hypothesis
import numpy as np
import pytest
import schemathesis
from conftest import PROMPTS
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode

from calibration.load import burst, connect, request_bytes

EXAMPLES = 2_000
HEADERS = {"content-type", "x-windve-priority", "x-windve-trial", "x-request-timeout-ms"}
SENTENCES = ["The overflow goes to the CPU.", "Where does the overflow go?", "A cat sat on a mat.", "你好"]


def ask(service, payload, path, headers=()):
    return burst(service.address, [request_bytes(payload, path, headers)])[0]


def get(service, path, method="GET"):
    async def run():
        connection = (await connect(service.address, 1))[0]
        reply = await connection.ask(f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        connection.hang_up()
        return reply

    return asyncio.run(run())


def embed(service, inputs, **fields):
    return np.array(ask(service, {"inputs": inputs, **fields}, "/embed").json(), np.float32)


def test_embed_all_gives_the_vectors_of_tokens(real):
    reply = ask(real, {"inputs": [*SENTENCES, "word " * 400]}, "/embed_all")
    assert reply.status == 200
    tokens = [np.array(one) for one in reply.json()]
    counts = [len(told) for told in ask(real, {"inputs": SENTENCES}, "/tokenize").json()]
    assert [one.shape for one in tokens] == [*((count, 384) for count in counts), (256, 384)]
    pooled = np.stack([one.mean(0) for one in tokens[:4]])  # this model's pooling
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    assert np.min(np.sum(pooled * embed(real, SENTENCES), axis=1)) >= 0.999
    both = burst(
        real.address,
        [request_bytes({"inputs": text}, path) for text in SENTENCES for path in ("/embed", "/embed_all")],
    )
    assert {reply.status for reply in both} == {200}
    for vector, all_of_it in zip(both[::2], both[1::2], strict=True):
        (mean,) = (np.mean(one, axis=0) for one in all_of_it.json())
        assert np.dot(mean / np.linalg.norm(mean), vector.json()[0]) >= 0.999
    refused = ask(real, {"inputs": ["word " * 400] * 50}, "/embed_all")
    assert (refused.status, "send fewer at once" in refused.json()["error"]) == (422, True)


def test_similarity_is_the_cosine_of_what_embed_answers(real):
    source, *others = SENTENCES
    reply = ask(real, {"inputs": {"source_sentence": source, "sentences": others}}, "/similarity")
    vectors = embed(real, SENTENCES)
    assert reply.status == 200
    assert np.allclose(reply.json(), vectors[1:] @ vectors[0], atol=2e-3)
    assert reply.headers["x-windve-pool"]
    assert int(reply.headers["x-compute-characters"]) == sum(map(len, SENTENCES))
    same = {"inputs": {"source_sentence": source, "sentences": [source]}, "parameters": {"truncate": True}}
    assert ask(real, same, "/similarity").json() == pytest.approx([1], abs=1e-5)


def test_similarity_is_one_admission_decision(real):
    """28 places: source and 28 sentences are more, so they are bulk; 27 and the source fill both queues at once."""
    sentences = [f"sentence number {number}" for number in range(27)]
    real.wait_until_idle()
    reply = ask(real, {"inputs": {"source_sentence": "a", "sentences": sentences}}, "/similarity")
    assert reply.headers["x-windve-pool"] == "accelerator,cpu"
    assert len(reply.json()) == 27


def test_tokenize_and_decode(real):
    text = "Where does the überflow go? 你好"
    (tokens,) = ask(real, {"inputs": text}, "/tokenize").json()
    assert (tokens[0], tokens[-1]["text"]) == (
        {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None},
        "[SEP]",
    )
    for token in tokens[1:-1]:
        assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    bare = ask(real, {"inputs": [text, "a"], "add_special_tokens": False}, "/tokenize").json()
    assert bare[0] == tokens[1:-1]
    ids = [token["id"] for token in tokens]
    assert embed(real, [ids]).tolist() == embed(real, text).tolist()
    assert ask(real, {"ids": ids}, "/decode").json() == ["where does the uberflow go?"]  # no Chinese in it: [UNK]
    assert ask(real, {"ids": [ids[:2], ids[-1:]], "skip_special_tokens": False}, "/decode").json() == [
        "[CLS] where",
        "[SEP]",
    ]


def test_prompts_are_put_before_the_text(real):
    plain, prompted = embed(real, "the overflow"), embed(real, "the overflow", prompt_name="query")
    assert prompted.tolist() == embed(real, PROMPTS["query"] + "the overflow").tolist() != plain.tolist()
    assert embed(real, "the overflow", prompt_name="document").tolist() == plain.tolist()
    ids = [101, 1996, 2058, 12314, 102]  # the overflow
    assert embed(real, [ids], prompt_name="query").tolist() == prompted.tolist()
    openai = ask(real, {"input": "the overflow", "prompt_name": "query"}, "/v1/embeddings")
    assert np.allclose(openai.json()["data"][0]["embedding"], prompted[0], atol=1e-6)
    counted = ask(real, {"inputs": "the overflow", "prompt_name": "query"}, "/tokenize").json()[0]
    assert len(counted) == openai.json()["usage"]["prompt_tokens"]


def test_an_unknown_prompt_is_refused_with_those_there_are(real):
    for path, status in (("/embed", 422), ("/tokenize", 422), ("/v1/embeddings", 400)):
        reply = ask(real, {"inputs": "a", "input": "a", "prompt_name": "passage"}, path)
        assert reply.status == status
        assert "there is no prompt named 'passage': only query, document" in reply.body.decode()


def test_a_too_long_text_is_cut_on_the_side_that_is_asked_for(real):
    text = " ".join(str(number) for number in range(100, 600))
    told = ask(real, {"inputs": text, "add_special_tokens": False}, "/tokenize").json()[0]
    ids = [token["id"] for token in told]
    first, last = (embed(real, [[101, *kept, 102]]) for kept in (ids[:254], ids[-254:]))  # 256 is the model's most
    assert np.linalg.norm(first - last) > 0.1
    for side, expected in ((None, first), ("right", first), ("Right", first), ("left", last), ("Left", last)):
        assert np.allclose(embed(real, text, truncation_direction=side), expected, atol=1e-6), side
    refused = ask(real, {"inputs": text, "truncate": False, "truncation_direction": "left"}, "/embed")
    assert (refused.status, refused.json()["error_type"]) == (422, "Validation")


def test_dimensions_are_the_first_numbers_made_unit_again(real):
    whole, cut = embed(real, SENTENCES), embed(real, SENTENCES, dimensions=64)
    assert np.allclose(cut, whole[:, :64] / np.linalg.norm(whole[:, :64], axis=1, keepdims=True), atol=1e-6)
    raw = embed(real, SENTENCES, dimensions=64, normalize=False)
    assert np.allclose(raw, embed(real, SENTENCES, normalize=False)[:, :64], atol=1e-5)
    encoded = ask(real, {"input": SENTENCES, "dimensions": 64, "encoding_format": "base64"}, "/v1/embeddings").json()
    found = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in encoded["data"]]
    assert np.allclose(found, cut, atol=1e-6)


def test_models(real):
    models = get(real, "/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["all-MiniLM-L6-v2"]
    assert get(real, "/v1/models/all-MiniLM-L6-v2").json() == models[0]
    for name in ("other", "some/other", "some%2Fother"):
        reply = get(real, f"/v1/models/{name}")
        assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_request_ids(real):
    for path in ("/v1/embeddings", "/embed"):
        for payload in ({"input": "a", "inputs": "a"}, {}):
            assert ask(real, payload, path, [("x-request-id", "mine-1")]).headers["x-request-id"] == "mine-1"
            made = [ask(real, payload, path).headers["x-request-id"] for _ in range(2)]
            assert all(made)
            assert made[0] != made[1]


def test_errors_have_the_shape_of_their_route(real):
    for path in ("/v1/embeddings", "/embeddings", "/v1/nowhere"):
        error = ask(real, {"input": 1}, path).json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
    for path in ("/embed", "/", "/similarity", "/tokenize", "/decode", "/nowhere"):
        assert set(ask(real, {"inputs": 1}, path).json()) == {"error", "error_type"}
    empty = ask(real, {"inputs": []}, "/tokenize")
    assert (empty.status, empty.json()["error_type"]) == (400, "Empty")
    assert "Ray's" in get(real, "/metrics").json()["error"]
    wrong = get(real, "/embed")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert (get(real, "/health", "HEAD").status, get(real, "/health", "HEAD").body) == (200, b"")


def test_too_much_to_tokenize_is_refused(real):
    reply = ask(real, {"inputs": "a " * 200_000}, "/tokenize")
    assert (reply.status, "send fewer at once" in reply.json()["error"]) == (422, True)


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "soon", "1e3"])
def test_a_bad_timeout_is_refused(real, given):
    reply = ask(real, {"inputs": "a"}, "/embed", [("x-request-timeout-ms", given)])
    assert reply.status == 422
    assert f"should be whole milliseconds from 1, not '{given}'" in reply.json()["error"]


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
