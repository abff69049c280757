"""The routes of models that answer with a vector of each token, and of models of several kinds."""

import json
from typing import get_args

import numpy as np
import pytest
from test_kind_routes import FakeRouter, post

from calibration.measure import trials
from deployments.models.model_files import ModelCard
from deployments.models.sparse import largest_weights
from deployments.placement.request import Embedded
from deployments.settings import Kind
from serve_app import local
from serve_app.http_api import HttpApi
from serve_app.kinds import A_MODEL, ROOT, ROUTES

VECTORS = [np.array([[0.6, 0.8], [0, 1], [1, 0]], np.float32), np.array([[0.8, 0.6]], np.float32)]
DENSE = [np.array([1, 0, 0, 0], np.float32), np.array([0, 1, 0, 0], np.float32)]
SPARSE = [np.array([5, 7, 0.5, 0.25], np.float32), np.array([], np.float32)]
ROWS = {"text": DENSE, "sparse": SPARSE, "multi_vector": VECTORS}


class SeveralRouter(FakeRouter):
    def __init__(self, kind, widths):
        self.card = ModelCard(
            "m", None, None, "bert", 4, 100, 16, "cls", True, False, False, 1, 1, kind=kind, token_widths=widths
        )

    async def embed(self, queries, wanted):
        self.asked = (list(queries), wanted)
        count = len(queries)
        first, *others = wanted.outputs or self.card.outputs_for(next(k for k in wanted.kinds if k in self.card.kinds))
        rest = {output: ROWS[output][:count] for output in others}
        return Embedded(ROWS[first][:count], [2.0] * count, ("cpu",), 7, 3, 0.001, 0.002, 0.003, 0.0064, rest)


def m3():
    return SeveralRouter("embedding", {"tokens": 4, "sparse": 1, "multi_vector": 2})


def colbert():
    return SeveralRouter("multi_vector", {"multi_vector": 2})


def close(found, wanted):
    return len(found) == len(wanted) and all(np.allclose(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("router", [m3, colbert])
@pytest.mark.parametrize("path", ["/v1/multi-vector", "/"])
def test_multi_vectors_as_jina(router, path):
    router = router()
    if path == "/" and router.card.kind == "embedding":
        path = "/v1/multi-vector"
    reply = post(router, path, {"model": "m", "input": ["a", "b"], "embedding_type": "float"})
    assert router.asked[0] == ["a", "b"]
    assert router.asked[1].kinds == ("multi_vector",)
    assert (reply.json["object"], reply.json["model"]) == ("list", "m")
    assert reply.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(one["object"], one["index"]) for one in reply.json["data"]] == [("embeddings", 0), ("embeddings", 1)]
    assert close([one["embeddings"] for one in reply.json["data"]], VECTORS)
    assert reply.headers["x-windve-pool"] == "cpu"
    cut = post(router, path, {"input": "a", "dimensions": 1}).json["data"]
    assert [one["embeddings"] for one in cut] == [[[1], [0], [1]]]
    assert post(router, "/v1/multi-vector", {"input": "a", "model": "n"}).status == 404


def test_multi_vectors_as_vllm():
    router = colbert()
    reply = post(router, "/pooling", {"model": "m", "input": ["a", "b"], "task": "token_embed"}).json
    assert close([one["data"] for one in reply["data"]], VECTORS)
    assert [(one["object"], one["index"]) for one in reply["data"]] == [("pooling", 0), ("pooling", 1)]
    assert reply["id"].startswith("pool-")
    wrong = post(router, "/pooling", {"input": "a", "task": "classify"})
    assert (wrong.status, wrong.json["error"]["message"]) == (400, "task must be 'token_embed', not 'classify'")


def test_several_answers_from_one_run_as_flagembedding():
    router = m3()
    everything = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True}
    reply = post(router, "/encode", {"inputs": ["a", "b"], **everything}).json
    assert router.asked[1].outputs == ("text", "sparse", "multi_vector")
    assert close(reply["dense_vecs"], DENSE)
    assert reply["lexical_weights"] == [{"5": 0.5, "7": 0.25}, {}]
    assert close(reply["colbert_vecs"], VECTORS)
    assert set(post(router, "/encode", {"inputs": "a"}).json) == {"dense_vecs"}
    two = post(router, "/encode", {"inputs": "a", "return_dense": False, "return_sparse": True}).json
    assert two == {"lexical_weights": [{"5": 0.5, "7": 0.25}]}
    none = post(router, "/encode", {"inputs": "a", "return_dense": False})
    assert (none.status, none.json["error_type"]) == (422, "Validation")


def test_a_model_of_several_kinds_has_the_routes_of_each():
    has = set(HttpApi(m3())._document["paths"])
    assert {"/embed", "/embed_all", "/v1/embeddings", "/embed_sparse", "/v1/multi-vector", "/encode"} <= has
    assert post(m3(), "/embed_sparse", {"inputs": "a"}).json == [
        [{"index": 5, "value": 0.5}, {"index": 7, "value": 0.25}]
    ]
    assert post(m3(), "/embed", {"inputs": "a"}).json == [[1, 0, 0, 0]]
    refused = post(colbert(), "/encode", {"inputs": "a"})
    assert refused.status == 424
    assert "a multi-vector model, which has /v1/multi-vector and /pooling" in refused.json["error"]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_each_kind_has_routes_of_which_one_is_shown_and_one_measured(kind):
    assert ROOT[kind] in {"/", *ROUTES[kind]}  # that of embedding models is a route of its own
    assert trials._ROUTES[kind][0] in ROUTES[kind]
    route, body = local._EXAMPLES[kind]
    assert route in ROUTES[kind]
    assert json.loads(body)
    assert kind.split("_")[0] in A_MODEL[kind]


def test_the_largest_weight_of_each_token_id():
    ids = np.array([0, 9, 5, 9, 7, 5, 2], np.int32)
    weights = np.array([3, 0.5, 0.25, 0.75, 0, 0.125, 1], np.float32)
    assert largest_weights(ids, weights, {0, 2}).tolist() == [5, 9, 0.25, 0.75]
    assert largest_weights(ids, weights * 0, ()).tolist() == []
