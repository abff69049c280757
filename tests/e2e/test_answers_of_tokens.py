"""Real Ray: bge-m3's kinds of answer from one run, a ColBERT model, and a reranker that is a language model."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import load_yaml, running
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from heads_of_models import save_causal, save_m3, save_pylate
from test_judges import reference
from transformers import Qwen3Config

from benchmarks.kit.arrivals import burst
from calibration.load import Address, request_bytes
from deployments.models.pairs import Pair

TEXTS = ["where does the overflow go", "to the CPU: it is told busy!", "the accelerator answers first. " * 6]
SAVE = {"m3": save_m3, "colbert": save_pylate, "judge": lambda folder: save_causal(folder, Qwen3Config)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in SAVE}
    for name, save in SAVE.items():
        save(folders[name])
    return folders


@pytest.fixture(scope="module")
def served(folders, tmp_path_factory):
    config = load_yaml("config.yaml")
    (first,) = config["applications"]
    config["applications"] = []
    for name, folder in folders.items():
        application = copy.deepcopy(first) | {"name": name, "route_prefix": f"/{name}"}
        model = {"id": str(folder), "name": name} | ({"template": "qwen3-reranker"} if name == "judge" else {})
        application["args"] |= {"model": model, "cpu": {"engine": "torch", "dtype": "float32", "num_cpus": 0.3}}
        config["applications"].append(application)
    with running(config, tmp_path_factory.mktemp("served")) as service:
        yield service


def ask(service, path, **payload):
    reply = burst(Address("127.0.0.1", service.port), [request_bytes(payload, path)])[0]
    assert reply.status == 200, reply
    return reply.json()


def test_one_run_gives_all_that_bge_m3_can(served, folders):
    wanted = SentenceTransformer(str(folders["m3"]), device="cpu").encode(TEXTS)
    everything = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True}
    found = ask(served, "/m3/encode", inputs=TEXTS, **everything)
    np.testing.assert_allclose(found["dense_vecs"], wanted, atol=2e-5)
    np.testing.assert_allclose(ask(served, "/m3/embed", inputs=TEXTS), wanted, atol=2e-5)
    sparse = ask(served, "/m3/embed_sparse", inputs=TEXTS)
    assert [{str(one["index"]): one["value"] for one in weights} for weights in sparse] == [
        pytest.approx(weights, abs=2e-5) for weights in found["lexical_weights"]
    ]
    assert all(map(len, sparse))
    data = ask(served, "/m3/v1/multi-vector", input=TEXTS)["data"]
    for one, rows in zip(data, found["colbert_vecs"], strict=True):
        np.testing.assert_allclose(one["embeddings"], rows, atol=2e-5)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("role", ["query", "document"])
def test_colbert_by_jinas_and_vllms_routes(served, folders, role):
    library = MultiVectorEncoder(str(folders["colbert"]), device="cpu")
    wanted = library.encode_query(TEXTS) if role == "query" else library.encode_document(TEXTS)
    jina = ask(served, "/colbert/v1/multi-vector", input=TEXTS, input_type=role)["data"]
    vllm = ask(served, "/colbert/pooling", input=TEXTS, embedding_mode=role, task="token_embed")["data"]
    for one, other, rows in zip(jina, vllm, wanted, strict=True):
        np.testing.assert_allclose(one["embeddings"], rows.numpy(), atol=2e-5)
        np.testing.assert_allclose(other["data"], rows.numpy(), atol=2e-5)


def test_a_language_model_reranks(served, folders):
    pairs = [Pair(TEXTS[0], text) for text in TEXTS]
    wanted = reference(folders["judge"], "qwen3-reranker", pairs, 1200)[:, 0]
    ranks = ask(served, "/judge/rerank", query=TEXTS[0], texts=TEXTS, raw_scores=True)
    found = {rank["index"]: rank["score"] for rank in ranks}
    np.testing.assert_allclose([found[index] for index in range(len(TEXTS))], wanted, atol=1e-4)
    best = ask(served, "/judge/v1/rerank", model="judge", query=TEXTS[0], documents=TEXTS, top_n=1)["results"][0]
    assert best["index"] == int(np.argmax(wanted))
    assert best["relevance_score"] == pytest.approx(1 / (1 + np.exp(-wanted.max())), abs=1e-4)
