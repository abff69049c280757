"""The routes of rerankers, classifiers, sparse models and models with a vector of each token."""

import asyncio
import json
from typing import get_args
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
from test_requests import GOOD

from calibration.measure import traffic
from deployments.embedding.request import Request
from deployments.embedding.router import Router
from deployments.errors import WrongKind
from deployments.models.outputs import largest_weights
from deployments.models.text_pairs import Pair
from deployments.settings import Kind
from serve_app.embedding.api import HttpApi
from serve_app.embedding.asking import model_type
from serve_app.embedding.routes import A_MODEL, ROOT, ROUTES, SEVERAL, routes_of
from serve_app.local import console
from tests.kit import asgi_client
from tests.kit.fake_router import MULTI, VECTORS, FakeRouter


def post(router, path, payload):
    return asgi_client.post(HttpApi(router), path, payload)


@pytest.mark.parametrize("path", ["/rerank", "/"])
def test_rerank_as_tei(path):
    router = FakeRouter("reranker")
    asked = {"query": "q", "texts": ["a", "b", ""], "raw_scores": True, "return_text": True, "truncate": True}
    reply = post(router, path, {**asked, "truncation_direction": "Left"})
    pairs = [Pair("q", "a"), Pair("q", "b"), Pair("q", "")]
    assert router.asked == [(pairs, {"kinds": ("reranker",), "truncate": True, "truncation_direction": "left"})]
    ranks = [{"index": 1, "score": 2.25, "text": "b"}, {"index": 2, "score": 0, "text": ""}]
    assert reply.json == [*ranks, {"index": 0, "score": -1.5, "text": "a"}]
    assert reply.headers["x-windve-pool"] == "cpu"
    ranks = post(router, path, {"query": "q", "texts": ["a", "b", "c"]}).json
    assert [set(rank) for rank in ranks] == [{"index", "score"}] * 3
    assert [rank["score"] for rank in ranks] == pytest.approx([1 / (1 + np.exp(-x)) for x in (2.25, 0, -1.5)])


def test_rerank_as_cohere():
    router = FakeRouter("reranker")
    asked = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"], "top_n": 2, "return_documents": True}
    for version in ("1", "2"):
        reply = post(router, f"/v{version}/rerank", asked).json
        assert reply["meta"]["api_version"] == {"version": version}
        assert [(result["index"], result["document"]) for result in reply["results"]] == [
            (1, {"text": "b"}),
            (2, {"text": "c"}),
        ]
        assert reply["results"][0]["relevance_score"] == pytest.approx(1 / (1 + np.exp(-2.25)))
        assert (reply["model"], reply["usage"]["total_tokens"]) == ("m", 7)
        assert reply["id"]
    plain = post(router, "/v2/rerank", {"query": "q", "documents": ["a", "b", "c"]}).json
    assert [set(result) for result in plain["results"]] == [{"index", "relevance_score"}] * 3
    assert post(router, "/v2/rerank", {**asked, "model": "n"}).status == 404


def test_predict():
    router = FakeRouter("classifier")
    one = post(router, "/predict", {"inputs": "a", "raw_scores": True}).json
    assert one == [{"score": 3, "label": "good"}, {"score": 1, "label": "bad"}, {"score": -2, "label": "so so"}]
    shares = np.exp([3, 1, -2]) / np.exp([3, 1, -2]).sum()
    assert [p["score"] for p in post(router, "/", {"inputs": ["a"]}).json] == pytest.approx(shares)
    batch = post(router, "/predict", {"inputs": [["a"], ["b", "c"], "d"]}).json
    assert router.asked[-1][0] == ["a", Pair("b", "c"), "d"]
    assert [len(predictions) for predictions in batch] == [3, 3, 3]
    assert batch[2] == [{"score": 1, "label": "bad"}, {"score": 0, "label": "good"}, {"score": 0, "label": "so so"}]
    post(router, "/predict", {"inputs": ["b", "c"]})
    assert router.asked[-1][0] == [Pair("b", "c")]
    lone = post(FakeRouter("reranker"), "/predict", {"inputs": "a"}).json
    assert lone == [{"score": pytest.approx(1 / (1 + np.exp(1.5))), "label": "LABEL_0"}]


def test_sparse():
    reply = post(FakeRouter("sparse"), "/embed_sparse", {"inputs": ["a", "b"]})
    assert reply.json == [[{"index": 1, "value": 0.1}, {"index": 3, "value": 2}], []]


def _sentence(told):
    """In TEI's shape, Cohere's or OpenAI's."""
    return told["message"] if "message" in told else told["error"] if "error_type" in told else told["error"]["message"]


@pytest.mark.parametrize("kind", ["embedding", "reranker", "classifier", "sparse"])
def test_a_route_for_other_models_says_which_there_are(kind):
    router = FakeRouter(kind)
    has = set(HttpApi(router)._document["paths"])
    tei = {"/embed", "/similarity", "/rerank", "/predict", "/embed_sparse"}
    others = {"/v1/embeddings", "/v2/rerank", "/score", "/v1/classify"}
    assert has & tei
    for path in (tei | others) - has:
        reply = post(router, path, {})
        sentence = _sentence(reply.json)
        assert sentence.startswith(f"{path} does not work with ")
        assert all(route in sentence for route in has & tei)
        assert reply.status == (424 if path in tei else 400)
        assert reply.json.get("error_type", "Backend") == "Backend"


def test_the_router_itself_refuses_what_a_caller_would_not_understand():
    router = Router.__new__(Router)
    router.config, router.card, router.metrics = Mock(), FakeRouter("reranker").card, Mock()
    with pytest.raises(WrongKind, match="this needs a model of the kind embedding; m is reranker"):
        asyncio.run(Router.embed(router, Request(["a"])))


def test_info_says_the_kind_as_tei():
    assert model_type(FakeRouter("sparse").card) == {"embedding": {"pooling": "splade"}}
    assert model_type(FakeRouter("reranker").card) == {
        "reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    }
    found = model_type(FakeRouter("classifier").card)["classifier"]
    assert found["id2label"] == {"0": "bad", "1": "good", "2": "so so"}
    assert found["label2id"] == {"bad": 0, "good": 1, "so so": 2}


# --- a vector of each token, and several kinds of answer --------------------------------------------------------------


def m3():
    return FakeRouter(widths={"tokens": 4, "sparse": 1, "multi_vector": 2})


def colbert():
    return FakeRouter("multi_vector", widths={"multi_vector": 2})


def close(found, wanted):
    return len(found) == len(wanted) and all(np.allclose(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("router", "path"), [(m3(), "/v1/multi-vector"), (colbert(), "/v1/multi-vector"), (colbert(), "/")]
)
def test_multi_vectors_as_jina(router, path):
    reply = post(router, path, {"model": "m", "input": ["a", "b"], "embedding_type": "float"})
    assert router.asked == [(["a", "b"], {"kinds": ("multi_vector",)})]
    assert (reply.json["object"], reply.json["model"]) == ("list", "m")
    assert reply.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(one["object"], one["index"]) for one in reply.json["data"]] == [("embeddings", 0), ("embeddings", 1)]
    assert close([one["embeddings"] for one in reply.json["data"]], MULTI)
    assert reply.headers["x-windve-pool"] == "cpu"
    cut = post(router, path, {"input": "a", "dimensions": 1}).json["data"]
    assert [one["embeddings"] for one in cut] == [[[1], [0], [1]]]
    assert post(router, "/v1/multi-vector", {"input": "a", "model": "n"}).status == 404


def test_multi_vectors_as_vllm():
    router = colbert()
    reply = post(router, "/pooling", {"model": "m", "input": ["a", "b"], "task": "token_embed"}).json
    assert close([one["data"] for one in reply["data"]], MULTI)
    assert [(one["object"], one["index"]) for one in reply["data"]] == [("pooling", 0), ("pooling", 1)]
    assert reply["id"].startswith("pool-")


def test_several_answers_from_one_run_as_flagembedding():
    router = m3()
    everything = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True}
    reply = post(router, "/encode", {"inputs": ["a", "b"], **everything}).json
    assert router.asked[-1][1]["outputs"] == ("text", "sparse", "multi_vector")
    assert close(reply["dense_vecs"], VECTORS)
    assert reply["lexical_weights"] == [{"1": 0.1, "3": 2}, {}]
    assert close(reply["colbert_vecs"], MULTI)
    assert set(post(router, "/encode", {"inputs": "a"}).json) == {"dense_vecs"}
    two = post(router, "/encode", {"inputs": "a", "return_dense": False, "return_sparse": True}).json
    assert two == {"lexical_weights": [{"1": 0.1, "3": 2}]}
    none = post(router, "/encode", {"inputs": "a", "return_dense": False})
    assert (none.status, none.json["error_type"]) == (422, "Validation")


def test_a_model_of_several_kinds_has_the_routes_of_each():
    has = set(HttpApi(m3())._document["paths"])
    assert {"/embed", "/embed_all", "/v1/embeddings", "/embed_sparse", "/v1/multi-vector", "/encode"} <= has
    weights = [{"index": 1, "value": 0.1}, {"index": 3, "value": 2}]
    assert post(m3(), "/embed_sparse", {"inputs": "a"}).json == [weights]
    assert close(post(m3(), "/embed", {"inputs": "a"}).json, VECTORS[:1])
    refused = post(colbert(), "/encode", {"inputs": "a"})
    assert refused.status == 424
    assert "a multi-vector model; use one of /v1/multi-vector, /pooling" in refused.json["error"]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_each_kind_has_routes_of_which_one_is_shown_and_one_measured(kind):
    assert kind in ROOT[kind].kinds
    assert traffic._ROUTES[kind][0] in routes_of((kind,))
    route, body = console._EXAMPLES[kind]
    assert route in routes_of((kind,))
    assert json.loads(body)
    assert kind.split("_")[0] in A_MODEL[kind]


def test_the_largest_weight_of_each_token_id():
    ids = np.array([0, 9, 5, 9, 7, 5, 2], np.int32)
    weights = np.array([3, 0.5, 0.25, 0.75, 0, 0.125, 1], np.float32)
    assert largest_weights(ids, weights, {0, 2}).tolist() == [5, 9, 0.25, 0.75]
    assert largest_weights(ids, weights * 0, ()).tolist() == []


@pytest.mark.parametrize("path", [*ROUTES, SEVERAL, "/"])
def test_the_document_says_what_each_route_takes_and_answers(path):
    for kind in ROUTES[path].kinds if path in ROUTES else ["embedding"]:
        api = HttpApi(m3() if path == SEVERAL else FakeRouter(kind))
        document = json.loads(asgi_client.get(api, "/openapi.json").body)
        about = document["paths"][path]["post"]
        takes = about["requestBody"]["content"]["application/json"]["schema"]
        route = ROOT[kind] if path == "/" else routes_of(api.served[1].kinds)[path]
        for body in map(GOOD.get, route.bodies):
            jsonschema.validate(body, {**takes, "components": document["components"]})
            reply = asgi_client.post(api, path, body)
            assert reply.status == 200, reply.body
            jsonschema.validate(reply.json, about["responses"]["200"]["content"]["application/json"]["schema"])
