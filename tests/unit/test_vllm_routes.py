"""vLLM's routes beside generation, in its own words: vllm/entrypoints/pooling/{scoring,classify}, serve/tokenize and
serve/instrumentator at 055e47c.
"""

import jsonschema
import numpy as np
import pytest

from deployments.models.text_pairs import Pair, TokenBounds
from serve_app.config.models import ByModel
from serve_app.embedding.api import HttpApi
from serve_app.embedding.models_api import ModelsApi
from serve_app.version import VERSION
from tests.kit.asgi_client import get, post
from tests.kit.fake_router import ANSWERS, VECTORS, FakeRouter

LOGITS = ANSWERS["reranker"][:, 0]
SCORES = 1 / (1 + np.exp(-LOGITS.astype(float)))
USAGE = {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
BODIES = {
    "/score": {"model": "m", "text_1": "q", "text_2": ["a", "b"]},
    "/classify": {"model": "m", "input": ["a", "b", "c"]},
    "/tokenize": {"model": "m", "prompt": "a"},
    "/detokenize": {"model": "m", "tokens": [11, 7]},
}


def told(router, path, payload, **more):
    reply = post(HttpApi(router), path, payload, **more)
    assert reply.status == 200, reply.body
    return reply.json


def sentence(reply):
    error = reply.json["error"]
    return error["message"] if isinstance(error, dict) else error


def test_a_score_of_each_pair():
    router = FakeRouter("reranker")
    found = told(router, "/score", BODIES["/score"])
    assert router.asked == [([Pair("q", "a"), Pair("q", "b")], {"kinds": ("reranker", "embedding")})]
    assert [list(one) for one in found["data"]] == [["index", "object", "score"]] * 2
    assert [(one["index"], one["object"]) for one in found["data"]] == [(0, "score"), (1, "score")]
    assert [one["score"] for one in found["data"]] == pytest.approx(SCORES[:2])  # in order, not the best first
    assert (found["object"], found["model"], found["usage"]) == ("list", "m", USAGE)
    assert found["id"].startswith("score-")
    assert isinstance(found["created"], int)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("names", "first", "second", "pairs"),
    [
        (("text_1", "text_2"), "q", "a", [("q", "a")]),
        (("queries", "documents"), ["q"], ["a", "b"], [("q", "a"), ("q", "b")]),
        (("queries", "items"), ["p", "q"], ["a", "b"], [("p", "a"), ("q", "b")]),
        (("data_1", "data_2"), "q", ["a", "", "c"], [("q", "a"), ("q", ""), ("q", "c")]),
    ],
)
def test_the_forms_of_a_score(path, names, first, second, pairs):
    router = FakeRouter("reranker")
    found = told(router, path, dict(zip(names, (first, second), strict=True)))
    assert router.asked[-1][0] == [Pair(*pair) for pair in pairs]
    assert len(found["data"]) == len(pairs)


def test_the_options_of_a_score():
    router = FakeRouter("reranker")
    bounds = {"max_tokens_per_doc": 4, "max_tokens_per_query": 3, "truncate_prompt_tokens": 9}
    found = told(router, "/score", {**BODIES["/score"], "use_activation": False, **bounds, "truncation_side": "left"})
    assert [one["score"] for one in found["data"]] == LOGITS[:2].tolist()
    wanted = router.asked[-1][1]
    assert wanted["bounds"] == TokenBounds(query=9, first=3, second=4)
    assert (wanted["truncate"], wanted["truncation_direction"]) == (True, "left")


def test_a_score_of_an_embedding_model_is_the_cosine():
    router = FakeRouter()
    found = told(router, "/score", {"text_1": "a", "text_2": ["b"], "truncate_prompt_tokens": 9})
    assert router.asked == [
        (["a", "b"], {"kinds": ("reranker", "embedding"), "truncate": True, "bounds": TokenBounds(query=9)})
    ]
    assert [one["score"] for one in found["data"]] == pytest.approx([float(VECTORS[0] @ VECTORS[1])])


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("reranker", {"text_1": ["a", "b"], "text_2": "c"}, "text_1 has 2 texts and text_2 has 1; send one in text_1"),
        ("embedding", {"text_1": ["a"], "text_2": ["b"] * 3}, "text_1 and text_2 have 4 texts and this server"),
        ("embedding", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 4}, "max_tokens_per_doc works only with"),
        ("embedding", {"text_1": "a", "text_2": "b", "model": "n"}, "there is no model 'n' here"),
    ],
)
def test_a_score_that_is_refused(kind, body, words):
    router = FakeRouter(kind)
    reply = post(HttpApi(router), "/score", body)
    assert reply.status == (404 if "model" in body else 400)
    assert sentence(reply).startswith(words)
    assert router.asked == []


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes(path):
    router = FakeRouter("classifier")
    found = told(router, path, BODIES["/classify"])
    logits = ANSWERS["classifier"].astype(float)
    probs = np.exp(logits - logits.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    assert [list(one) for one in found["data"]] == [["index", "label", "probs", "num_classes"]] * 3
    assert [(one["index"], one["label"]) for one in found["data"]] == [(0, "good"), (1, "bad"), (2, "bad")]
    assert [one["probs"] for one in found["data"]] == [pytest.approx(row, abs=1e-6) for row in probs]
    assert {one["num_classes"] for one in found["data"]} == {3}
    assert (found["object"], found["model"], found["usage"]) == ("list", "m", USAGE)
    assert found["id"].startswith("classify-")
    raw = told(router, path, {"input": "a", "use_activation": False})["data"]
    assert [one["probs"] for one in raw] == [[1, 3, -2]]


def test_a_reranker_has_one_class():
    (found,) = told(FakeRouter("reranker"), "/classify", {"input": "a"})["data"]
    assert (found["label"], found["num_classes"], found["probs"]) == ("LABEL_0", 1, pytest.approx(SCORES[:1]))


def test_tokens_of_a_prompt_and_back():
    router = FakeRouter()
    found = told(router, "/tokenize", BODIES["/tokenize"])
    assert found == {"count": 2, "max_model_len": 16, "tokens": [101, 7], "token_strs": None}
    assert router.asked == [(["a"], {"special_tokens": True, "prompt_name": ""})]
    told(router, "/tokenize", {"prompt": "a", "add_special_tokens": False})
    assert router.asked[-1][1]["special_tokens"] is False
    assert isinstance(told(router, "/tokenize", {"inputs": "a"})[0][0], dict)  # TEI's
    assert told(router, "/tokenize", {"inputs": None, "prompt": "a"}) == found  # null is absent
    assert isinstance(told(router, "/tokenize", {"inputs": "a", "prompt": None})[0][0], dict)
    assert told(router, "/detokenize", BODIES["/detokenize"]) == {"prompt": "text"}
    assert router.asked[-1] == ([[11, 7]], {"skip_special_tokens": False})


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {"prompt": "a", "model": "n"}, 404, "there is no model 'n' here"),
        ("/tokenize", {}, 422, "inputs is missing"),
        ("/detokenize", {"tokens": [1], "model": "n"}, 404, "there is no model 'n' here"),
        ("/detokenize", {}, 400, "tokens is missing; send a list of token ids"),
    ],
)
def test_what_is_refused_of_tokens(path, body, status, words):
    reply = post(HttpApi(FakeRouter()), path, body)
    assert (reply.status, sentence(reply)[: len(words)]) == (status, words)


def test_the_version_and_the_load():
    routers = ByModel({name: FakeRouter(name=name) for name in ("a", "b")})
    for api, load in ((HttpApi(FakeRouter()), 3), (ModelsApi(routers), 6)):
        assert get(api, "/version").json == {"version": VERSION}
        assert get(api, "/load").json == {"server_load": load}
        assert get(api, "/models").json == get(api, "/v1/models").json
    assert get(ModelsApi(routers), "/models/b/load").json == {"server_load": 3}


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/score", "/classify"])
def test_an_answer_has_the_name_that_the_request_has(path):
    body = {**BODIES.get(path, {"query": "q", "documents": ["a"]})}
    prefix = {"/score": "score-", "/classify": "classify-"}.get(path, "")
    header = [(b"x-request-id", b"order-7")]
    router = FakeRouter("reranker")
    assert told(router, path, body, headers=header)["id"] == f"{prefix}order-7"
    assert told(router, path, {**body, "request_id": "mine"}, headers=header)["id"] == f"{prefix}mine"
    strange = [told(router, path, body, headers=[(b"x-request-id", b"<b>\xff")])["id"] for _ in range(2)]
    assert len({*strange}) == 2
    assert all(len(one) == len(prefix) + 32 for one in strange)


def test_an_embedding_s_answer_has_a_name_where_it_is_given_one():
    body = {"input": "a"}
    assert told(FakeRouter(), "/v1/embeddings", {**body, "request_id": "mine"})["id"] == "embd-mine"
    assert "id" not in told(FakeRouter(), "/v1/embeddings", body)


def test_a_null_of_another_api_changes_nothing():
    body = {"query": "q", "documents": ["a"], "texts": None}
    assert told(FakeRouter("reranker"), "/rerank", body)["results"]
    body = {"query": "q", "documents": None, "texts": ["a"]}
    assert isinstance(told(FakeRouter("reranker"), "/rerank", body), list)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score"])
def test_a_request_s_name_is_short(path):
    """It is in each part of a stream, too."""
    body = BODIES.get(path, {"input": "a"})
    assert told(FakeRouter(), path, {**body, "request_id": "é" * 128})["id"].endswith("-" + "é" * 128)
    reply = post(HttpApi(FakeRouter()), path, {**body, "request_id": "x" * 129})
    assert (reply.status, sentence(reply)) == (400, "request_id has 129 characters and this server accepts 128")


def test_the_document_takes_a_field_under_each_of_its_names():
    api = HttpApi(FakeRouter("reranker"))
    document = get(api, "/openapi.json").json
    score = {**document["components"]["schemas"]["ScoreRequest"], "components": document["components"]}
    for body in (BODIES["/score"], {"queries": ["q"], "documents": "a"}, {"data_1": "q", "items": "a"}):
        jsonschema.validate(body, score)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"queries": "q"}, score)
    for path in ("/models", "/version", "/load", "/health", "/v1/models"):
        schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(get(api, path).json, schema)
