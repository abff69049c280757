"""The routes of embedding models that others have: Cohere's, Ollama's, Hugging Face's; the fields of NIM and vLLM."""

import base64
import json

import numpy as np
import pytest
from test_http_api import VECTORS, FakeRouter, post

from deployments.errors import Busy
from serve_app.http_api import HttpApi
from serve_app.vector_types import quantize

TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def asked(path, payload, router=None):
    """The answer's JSON, and what the Router was asked."""
    router = router or FakeRouter()
    reply = post(HttpApi(router), path, payload)
    assert reply.status == 200, reply.body
    return json.loads(reply.body), router.asked


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
        ({"truncate": "END"}, {"truncate": True}),
        ({"truncate": "START"}, {"truncate": True, "truncation_direction": "left"}),
        ({"truncate": "END", "truncation_direction": "left"}, {"truncate": True}),
        ({"truncate": True, "truncation_direction": "left"}, {"truncate": True, "truncation_direction": "left"}),
        ({"truncate": False}, {"truncate": False}),
    ],
)
def test_what_cohere_and_nim_ask_of_the_router(fields, wanted):
    assert asked("/v2/embed", {"texts": ["a"], **fields})[1] == (["a"], wanted)
    assert asked("/v1/embeddings", {"input": "a", **fields})[1] == (["a"], wanted)


COHERE_PROBLEMS = [
    ({}, 400, "send texts or inputs, one of the two"),
    ({"texts": ["a"], "inputs": [{"content": [{"text": "a"}]}]}, 400, "send texts or inputs, one of the two"),
    ({"images": ["data:image/png;base64,AA=="]}, 400, "only texts are embedded here, no images; send texts"),
    ({"inputs": [{"content": [{"type": "image_url", "image_url": {}}]}]}, 400, "only texts are embedded here, no"),
    ({"inputs": [{"content": []}]}, 400, "inputs[0].content is an empty list"),
    ({"inputs": [{"content": [{"type": "text"}]}]}, 400, "inputs[0].content[0].text is missing; send a string"),
    ({"texts": "a"}, 400, "texts must be a list of strings, not 'a'"),
    ({"texts": ["a", ""]}, 400, "texts[1] is an empty string"),
    ({"texts": ["a"], "model": "n"}, 404, "there is no model 'n' here; this server has 'm'"),
    (
        {"texts": ["a"], "embedding_types": ["int4"]},
        400,
        "embedding_types[0] must be 'float', 'int8', 'uint8', 'binary'",
    ),
    ({"texts": ["a"], "input_type": "image"}, 400, "input_type must be 'search_query', 'search_document', "),
    ({"texts": ["a"], "output_dimension": 5}, 400, "output_dimension must be a whole number from 1 to 4"),
    ({"texts": ["a"], "max_tokens": 3}, 400, "max_tokens is not known here"),
    ({"texts": ["a"], "truncate": "MIDDLE"}, 400, "truncate must be true or false or 'NONE', 'START' or 'END', not"),
    ({"texts": ["a"] * 4}, 400, "texts has 4 items and this server takes 3 in one request"),
]


@pytest.mark.parametrize(("payload", "status", "sentence"), COHERE_PROBLEMS)
def test_cohere_s_errors(payload, status, sentence):
    for path in ("/v1/embed", "/v2/embed"):
        reply = post(HttpApi(FakeRouter()), path, payload)
        told = json.loads(reply.body)
        assert (reply.status, set(told)) == (status, {"message"})
        assert told["message"].startswith(sentence)


def test_a_busy_answer_in_each_shape():
    router = FakeRouter(Busy("busy", retry_after_s=0.25))
    bodies = {
        "/v2/embed": ({"texts": ["a"]}, {"message": "busy"}),
        "/api/embed": ({"input": "a"}, {"error": "busy"}),
        "/api/embeddings": ({"prompt": "a"}, {"error": "busy"}),
    }
    for path, (payload, told) in bodies.items():
        reply = post(HttpApi(router), path, payload)
        assert (reply.status, json.loads(reply.body)) == (429, told)
        assert reply.headers["retry-after-ms"] == "250"


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


def test_vllm_s_narrow_floats_on_openai_s_route():
    half = embeddings(encoding_format="base64", embed_dtype="float16", endianness="big")
    assert np.allclose([np.frombuffer(base64.b64decode(text), ">f2") for text in half], VECTORS, atol=1e-3)
    assert embeddings(embed_dtype="float16", encoding_format="float") == embeddings()  # of base64 alone
    assert np.array_equal([floats(text) for text in embeddings(encoding_format="base64")], VECTORS)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"embedding_type": "int4"},
            "embedding_type must be 'float', 'int8', 'uint8', 'binary' or 'ubinary', not 'int4'",
        ),
        ({"embed_dtype": "fp8_e4m3"}, "embed_dtype must be 'float32', 'float16' or 'bfloat16', not 'fp8_e4m3'"),
        ({"modality": "image"}, "modality must be 'text' or a valid list, not 'image'"),
        ({"modality": ["text", "image"]}, "modality[1] must be 'text', not 'image'"),
        ({"input_type": "image"}, "input_type must be 'search_query', "),
    ],
)
def test_fields_that_say_something_else(fields, sentence):
    reply = post(HttpApi(FakeRouter()), "/v1/embeddings", {"input": "a", **fields})
    assert json.loads(reply.body)["error"]["message"].startswith(sentence)


# --- Hugging Face's and Ollama's ------------------------------------------------------------------------------------


def test_the_root_takes_sentences_to_compare_too():
    sentences = {"source_sentence": "a", "sentences": ["b"]}
    told, (queries, wanted) = asked("/", {"inputs": sentences, "parameters": {"truncate": False}})
    assert (told, queries, wanted) == ([pytest.approx(0.96)], ["a", "b"], {"truncate": False})
    told, (queries, wanted) = asked("/", {"inputs": ["a", "b"], "truncate": False, "normalize": False})
    assert (queries, wanted) == (["a", "b"], {"truncate": False})
    assert np.allclose(told, 2 * VECTORS)
    assert np.allclose(asked("/", {"inputs": [1, 2]})[0], VECTORS[:1])


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"source_sentence": "a"}, "inputs.sentences is missing; send a list of strings"),
        ({"source_sentence": "a", "sentences": ["b"] * 3}, "inputs.sentences has 3 items and this server takes 2"),
        (None, "inputs is missing; send a string, a list of strings, a list of token ids or an object with source_"),
        ("", "inputs is an empty string"),
    ],
)
def test_what_is_wrong_at_the_root(inputs, sentence):
    assert json.loads(post(HttpApi(FakeRouter()), "/", {"inputs": inputs}).body)["error"].startswith(sentence)


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
    reply = post(HttpApi(FakeRouter()), "/api/embed", {"model": "n", "input": "a"})
    assert (reply.status, json.loads(reply.body)) == (404, {"error": "there is no model 'n' here; this server has 'm'"})
