"""The routes of rerankers, classifiers and sparse models over a Router that answers at once."""

import asyncio
import json
import types
from unittest.mock import Mock

import numpy as np
import pytest

from deployments.errors import InvalidInput, WrongKind
from deployments.models.model_files import ModelCard
from deployments.models.pairs import Pair
from deployments.models.sparse import pack
from deployments.placement.request import Embedded, Wanted
from deployments.router import Router
from deployments.settings import Settings
from serve_app.answers import model_type
from serve_app.fields import Rules
from serve_app.http_api import HttpApi
from serve_app.requests import CohereRerankRequest, PredictRequest, RerankRequest
from tests.kit.asked import asked_of

LABELS = {"embedding": (), "reranker": ("LABEL_0",), "classifier": ("bad", "good", "so so"), "sparse": ()}
ANSWERS = {
    "reranker": np.array([[-1.5], [2.25], [0.0]], np.float32),
    "classifier": np.array([[1, 3, -2], [0, 0, 0], [700, -700, 0]], np.float32),
    "sparse": pack(np.array([[0, 0.1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1]], np.float32)),
}


class FakeRouter:
    settings = Settings.parse({"model": {"id": "m"}, "limits": {"max_inputs_per_request": 3}})

    def __init__(self, kind):
        pooling = "splade" if kind == "sparse" else "none"
        self.card = ModelCard(
            "m", None, None, "bert", 4, 100, 16, pooling, False, False, False, 1, 1, kind=kind, labels=LABELS[kind]
        )
        self.asked = None

    async def embed(self, queries, wanted):
        self.asked = (list(queries), asked_of(wanted))
        vectors = ANSWERS[self.card.kind][: len(queries)]
        return Embedded(vectors, [1.0] * len(queries), ("cpu",), 7, 3, 0.001, 0.002, 0.003, 0.0064)


def post(router, path, payload):
    sent = []

    async def receive():
        return {"type": "http.request", "body": json.dumps(payload).encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    asyncio.run(HttpApi(router)(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return types.SimpleNamespace(status=sent[0]["status"], headers=headers, json=json.loads(sent[1]["body"]))


@pytest.mark.parametrize("path", ["/rerank", "/"])
def test_rerank_as_tei(path):
    router = FakeRouter("reranker")
    asked = {"query": "q", "texts": ["a", "b", ""], "raw_scores": True, "return_text": True, "truncate": True}
    reply = post(router, path, {**asked, "truncation_direction": "Left"})
    assert router.asked[0] == [Pair("q", "a"), Pair("q", "b"), Pair("q", "")]
    assert router.asked[1]["kinds"] == ("reranker",)
    assert (router.asked[1]["truncate"], router.asked[1]["truncation_direction"]) == (True, "left")
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
    assert router.asked[0] == ["a", Pair("b", "c"), "d"]
    assert [len(predictions) for predictions in batch] == [3, 3, 3]
    assert batch[2] == [{"score": 1, "label": "bad"}, {"score": 0, "label": "good"}, {"score": 0, "label": "so so"}]
    post(router, "/predict", {"inputs": ["b", "c"]})
    assert router.asked[0] == [Pair("b", "c")]
    lone = post(FakeRouter("reranker"), "/predict", {"inputs": "a"}).json
    assert lone == [{"score": pytest.approx(1 / (1 + np.exp(1.5))), "label": "LABEL_0"}]


def test_sparse():
    reply = post(FakeRouter("sparse"), "/embed_sparse", {"inputs": ["a", "b"]})
    assert reply.json == [[{"index": 1, "value": 0.1}, {"index": 3, "value": 2}], []]


def _sentence(told):
    """In TEI's shape, Cohere's or OpenAI's."""
    return told["message"] if "message" in told else told["error"] if "error_type" in told else told["error"]["message"]


@pytest.mark.parametrize("kind", LABELS)
def test_a_route_for_other_models_says_which_there_are(kind):
    router = FakeRouter(kind)
    has = set(HttpApi(router)._document["paths"])
    tei, others = {"/embed", "/similarity", "/rerank", "/predict", "/embed_sparse"}, {"/v1/embeddings", "/v2/rerank"}
    for path in (tei | others) - has:
        reply = post(router, path, {})
        sentence = _sentence(reply.json)
        assert sentence.startswith(f"{path} is not for the model that is served, ")
        assert all(route in sentence for route in has & tei)
        assert reply.status == (424 if path in tei else 400)
        assert reply.json.get("error_type", "Backend") == "Backend"
    assert has & tei


def test_the_router_itself_refuses_what_a_caller_would_not_understand():
    router = Router.__new__(Router)
    router.config, router.card, router.metrics = Mock(), FakeRouter("reranker").card, Mock()
    with pytest.raises(WrongKind, match="this is for models of the kind embedding; m is reranker"):
        asyncio.run(Router.embed(router, ["a"], Wanted()))


def test_info_says_the_kind_as_tei():
    assert model_type(FakeRouter("sparse").card) == {"embedding": {"pooling": "splade"}}
    assert model_type(FakeRouter("reranker").card) == {
        "reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    }
    found = model_type(FakeRouter("classifier").card)["classifier"]
    assert found["id2label"] == {"0": "bad", "1": "good", "2": "so so"}
    assert found["label2id"] == {"bad": 0, "good": 1, "so so": 2}


RULES = Rules("m", 1, 3)


@pytest.mark.parametrize(
    ("takes", "body", "sentence"),
    [
        (RerankRequest, {"texts": ["a"]}, "query is missing; send a string"),
        (RerankRequest, {"query": "q"}, "texts is missing; send a list of strings"),
        (RerankRequest, {"query": "q", "texts": []}, "texts is an empty list"),
        (RerankRequest, {"query": "q", "texts": ["a", 1]}, "texts[1] must be a string, not 1"),
        (RerankRequest, {"query": "q", "texts": ["a"] * 4}, "texts has 4 items and this server takes 3"),
        (RerankRequest, {"query": "q", "texts": ["a"], "raw_scores": 1}, "raw_scores must be true or false"),
        (CohereRerankRequest, {"query": "q", "documents": [{"title": "a"}]}, "documents[0].text is missing; send a"),
        (CohereRerankRequest, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n must be a whole number from 1, "),
        (CohereRerankRequest, {"query": "q", "documents": ["a"], "top_n": True}, "top_n must be a whole number from 1"),
        (PredictRequest, {}, "inputs is missing; send a string, a list of one or two strings or a list of such lists"),
        (PredictRequest, {"inputs": []}, "inputs is an empty list"),
        (PredictRequest, {"inputs": ""}, "inputs is an empty string"),
        (PredictRequest, {"inputs": ["a", "b", "c"]}, "inputs is a list of 3 strings, and a pair has 2"),
        (PredictRequest, {"inputs": [["a"], 1]}, "inputs[1] must be a string or a list of one or two strings"),
        (PredictRequest, {"inputs": [["a"], []]}, "inputs[1] is a list of 0 strings"),
    ],
)
def test_bad_input_gets_one_plain_sentence(takes, body, sentence):
    with pytest.raises(InvalidInput) as caught:
        takes.parse(json.dumps(body).encode(), RULES)
    assert caught.value.message.startswith(sentence)
