"""An embedding model and a reranker side by side: two applications on one Serve, each with pools of its own."""

import copy
import json
import urllib.error
import urllib.request

import cohere
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from calibration.load import Address, burst, request_bytes
from tests.kit.kinds_of_models import save_model
from tests.kit.service import load_yaml

QUERY = "where does the overflow go"
TEXTS = ["to the CPU", "to the moon", "", "it is told busy " * 30, "a reranker reads the query and a text together"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model("bert reranker", tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def both(folder, shared):
    config = load_yaml("config.yaml")
    embedder = config["applications"][0]
    embedder["args"]["cpu"] = {"engine": "torch", "num_cpus": 0.5}
    reranker = copy.deepcopy(embedder)
    reranker["args"]["model"] = {"id": str(folder), "name": "small"}
    reranker["args"]["accelerator"] = {"device": "cpu", "dtype": "float32"}
    reranker["args"]["cpu"]["dtype"] = "float32"
    reranker["deployments"][0]["user_config"] |= {
        "admission": "depth", "accelerator": {"queue_depth": 4}, "cpu": {"queue_depth": 8},
    }  # fmt: skip
    for name, application in (("embedder", embedder), ("reranker", reranker)):
        application |= {"name": name, "route_prefix": f"/{name}"}
    config["applications"] = [embedder, reranker]
    return shared.serve(config)


def ask(service, path, payload):
    return burst(Address("127.0.0.1", service.port), [request_bytes(payload, path)])[0]


def test_each_application_has_its_own_model_pools_and_routes(both, folder):
    embedder, reranker = (both.get(f"/{name}/info") for name in ("embedder", "reranker"))
    assert embedder["model_type"] == {"embedding": {"pooling": "mean"}}
    assert reranker["model_type"] == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    assert set(embedder["windve"]["pools"]) == {"cpu"}
    assert {name: pool["queue_depth"] for name, pool in reranker["windve"]["pools"].items()} == {
        "accelerator": 4,
        "cpu": 8,
    }
    vector = ask(both, "/embedder/v1/embeddings", {"input": QUERY}).json()["data"][0]["embedding"]
    assert len(vector) == 384
    for path, payload in (("/embedder/rerank", {"query": "q", "texts": ["a"]}), ("/reranker/embed", {"inputs": "a"})):
        with pytest.raises(urllib.error.HTTPError, match="424") as caught:
            urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{both.port}{path}", json.dumps(payload).encode())
            )
        assert "is not for the model that is served" in json.load(caught.value)["error"]


def test_scores_are_those_of_sentence_transformers_from_both_pools(both, folder):
    model = CrossEncoder(str(folder), device="cpu", max_length=256)
    pairs = [(QUERY, text) for text in TEXTS]
    wanted = model.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    reply = ask(both, "/reranker/rerank", {"query": QUERY, "texts": TEXTS, "raw_scores": True})
    assert reply.pool == "accelerator,cpu"  # 5 pairs on depths 4 and 8, in one decision
    ranks = reply.json()
    found = {rank["index"]: rank["score"] for rank in ranks}
    np.testing.assert_allclose([found[index] for index in range(len(TEXTS))], wanted, atol=2e-5)
    assert [rank["index"] for rank in ranks] == np.argsort(-wanted).tolist()
    for kind in (cohere.ClientV2, cohere.Client):
        with kind(api_key="none", base_url=f"http://127.0.0.1:{both.port}/reranker") as client:
            found = client.rerank(model="small", query=QUERY, documents=TEXTS, top_n=2)
        assert [result.index for result in found.results] == np.argsort(-wanted)[:2].tolist()
        assert found.results[0].relevance_score == pytest.approx(1 / (1 + np.exp(-wanted.max())), abs=1e-5)
        assert found.meta.tokens.input_tokens > len(TEXTS)


def test_a_rerank_of_more_texts_than_the_depths_is_bulk(both):
    texts = [f"text {number}" for number in range(60)]
    ranks = ask(both, "/reranker/rerank", {"query": QUERY, "texts": texts, "return_text": True}).json()
    assert sorted(rank["index"] for rank in ranks) == list(range(60))
    assert all(rank["text"] == texts[rank["index"]] for rank in ranks)
    assert [rank["score"] for rank in ranks] == sorted((rank["score"] for rank in ranks), reverse=True)
