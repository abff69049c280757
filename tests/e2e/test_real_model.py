"""The real model in two real pools, against sentence-transformers in float32. Real clients: test_clients.py."""

import asyncio
import base64
from collections import Counter

import numpy as np
import pytest
from reference import worst
from texts import TEXTS

from calibration.load import burst, connect, request_bytes


def ask(service, payload, path="/v1/embeddings", headers=()):
    return burst(service.address, [request_bytes(payload, path, headers)])[0]


def fill_accelerator_and_ask(service, texts):
    """Each text alone, answered by the CPU pool: the accelerator's queue is kept full meanwhile."""
    depth = service.router["accelerator"]["queue_depth"]
    long = "keeps the accelerator pool busy for a while " * 20

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
