"""The routes of embedding models that others have: Cohere's, Ollama's, Hugging Face's; the fields of NIM and vLLM."""

import base64

import numpy as np
import pytest

from deployments.errors import Busy
from serve_app.embedding.api import HttpApi
from serve_app.embedding.output_shapes import quantize
from tests.kit.asgi_client import post
from tests.kit.fake_router import VECTORS, FakeRouter

TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def asked(path, payload):
    """The answer's JSON, and what the Router was asked."""
    router = FakeRouter()
    reply = post(HttpApi(router), path, payload)
    assert reply.status == 200, reply.body
    return reply.json, router.asked[-1]


def floats(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


@pytest.mark.parametrize("version", ["1", "2"])
def test_cohere_s_types(version):
    told, (queries, _) = asked(f"/v{version}/embed", {"model": "m", "texts": ["a", "b"], "embedding_types": TYPES})
    assert queries == ["a", "b"]
    assert list(told["embeddings"]) == TYPES
    for kind in TYPES[1:5]:
        assert told["embeddings"][kind] == quantize(VECTORS, kind).tolist()
    assert np.allclose(told["embeddings"]["float"], VECTORS)
    assert np.array_equal([floats(text) for text in told["embeddings"]["base64"]], VECTORS)
    assert told["texts"] == ["a", "b"]
    assert told["response_type"] == "embeddings_by_type"
    assert told["meta"]["api_version"] == {"version": version}
    assert told["meta"]["billed_units"] == {"input_tokens": 7}
    assert told["id"]


def test_cohere_without_types():
    assert np.allclose(asked("/v2/embed", {"texts": ["a"]})[0]["embeddings"]["float"], VECTORS[:1])
    told, _ = asked("/v1/embed", {"texts": ["a"]})
    assert told["response_type"] == "embeddings_floats"
    assert np.allclose(told["embeddings"], VECTORS[:1])


def test_cohere_inputs_in_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    told, (queries, _) = asked("/v2/embed", {"inputs": [{"content": parts}, {"content": parts[:1]}]})
    assert queries == ["a\nb", "a"]
    assert told["texts"] == []


def test_cohere_output_dimension():
    told, _ = asked("/v2/embed", {"texts": ["a"], "output_dimension": 1, "embedding_types": ["float", "int8"]})
    assert told["embeddings"] == {"float": [[1.0]], "int8": [[127]]}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {}),
        ({"input_type": "search_query"}, {"prompt_name": "query"}),
        ({"input_type": "search_document"}, {"prompt_name": ""}),  # the model has none: none
        ({"input_type": "search_document", "prompt_name": "query"}, {"prompt_name": "query"}),
        ({"truncate": "NONE"}, {"truncate": False}),
        ({"truncate": "END"}, {"truncate": True, "truncation_direction": "right"}),
        ({"truncate": "START"}, {"truncate": True, "truncation_direction": "left"}),
        ({"truncate": "END", "truncation_direction": "left"}, {"truncate": True, "truncation_direction": "right"}),
        ({"truncate": True, "truncation_direction": "left"}, {"truncate": True, "truncation_direction": "left"}),
        ({"truncate": False}, {"truncate": False}),
    ],
)
def test_what_cohere_and_nim_ask_of_the_router(fields, wanted):
    assert asked("/v2/embed", {"texts": ["a"], **fields})[1] == (["a"], wanted)
    assert asked("/v1/embeddings", {"input": "a", **fields})[1] == (["a"], wanted)


@pytest.mark.parametrize(
    ("error", "status", "retry_ms"),
    [(None, 404, None), (Busy("busy", retry_after_s=0.25), 429, "250")],  # None: the model has another name
)
def test_an_error_in_each_shape(error, status, retry_ms):
    bodies = {
        "/v1/embed": ({"texts": ["a"]}, "message"),
        "/v2/embed": ({"texts": ["a"]}, "message"),
        "/api/embed": ({"input": "a"}, "error"),
        "/api/embeddings": ({"prompt": "a"}, "error"),
    }
    for path, (payload, name) in bodies.items():
        reply = post(HttpApi(FakeRouter(error=error)), path, payload if error else {**payload, "model": "n"})
        sentence = "busy" if error else "there is no model 'n' here; this server serves 'm'"
        assert (reply.status, reply.json) == (status, {name: sentence})
        assert reply.headers.get("retry-after-ms") == retry_ms


# --- OpenAI's route -------------------------------------------------------------------------------------------------


def embeddings(**fields):
    told, _ = asked("/v1/embeddings", {"input": ["a", "b"], **fields})
    return [item["embedding"] for item in told["data"]]


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
def test_nim_s_types_on_openai_s_route(kind):
    numbers = quantize(VECTORS, kind)
    assert embeddings(embedding_type=kind) == numbers.tolist()
    encoded = embeddings(embedding_type=kind, encoding_format="base64")
    assert [base64.b64decode(text) for text in encoded] == [row.tobytes() for row in numbers]


def test_voyage_s_names_on_openai_s_route():
    assert embeddings(output_dtype="int8", output_dimension=2) == embeddings(embedding_type="int8", dimensions=2)
    assert len(embeddings(output_dimension=2)[0]) == 2


def test_vllm_s_narrow_floats_on_openai_s_route():
    half = embeddings(encoding_format="base64", embed_dtype="float16", endianness="big")
    assert np.allclose([np.frombuffer(base64.b64decode(text), ">f2") for text in half], VECTORS, atol=1e-3)
    assert embeddings(embed_dtype="float16", encoding_format="float") == embeddings()  # of base64 alone
    assert np.array_equal([floats(text) for text in embeddings(encoding_format="base64")], VECTORS)


# --- Hugging Face's and Ollama's ------------------------------------------------------------------------------------


def test_the_root_takes_sentences_to_compare_too():
    sentences = {"source_sentence": "a", "sentences": ["b"]}
    told, (queries, wanted) = asked("/", {"inputs": sentences, "parameters": {"truncate": False}})
    assert (told, queries, wanted) == ([pytest.approx(0.96)], ["a", "b"], {"truncate": False})
    told, (queries, wanted) = asked("/", {"inputs": ["a", "b"], "truncate": False, "normalize": False})
    assert (queries, wanted) == (["a", "b"], {"truncate": False})
    assert np.allclose(told, 2 * VECTORS)
    assert np.allclose(asked("/", {"inputs": [1, 2]})[0], VECTORS[:1])


def test_ollama():
    told, (queries, wanted) = asked(
        "/api/embed", {"model": "m", "input": ["a", "b"], "keep_alive": "5m", "options": {}}
    )
    assert (queries, wanted) == (["a", "b"], {})
    assert np.allclose(told.pop("embeddings"), VECTORS)
    assert told == {"model": "m", "total_duration": 6_400_000, "load_duration": 0, "prompt_eval_count": 7}
    assert asked("/api/embed", {"input": "a", "dimensions": 1})[0]["embeddings"] == [[1.0]]
    told, (queries, _) = asked("/api/embeddings", {"model": "m", "prompt": "a"})
    assert queries == ["a"]
    assert np.allclose(told["embedding"], VECTORS[0])
