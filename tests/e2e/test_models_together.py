"""Real Ray, two applications on it. One has three models under one URL: bge-m3's answers from one run, a ColBERT model
and a BERT. The other one is a cross-encoder in two pools.
"""

import os
import signal
import threading
import time
from collections import Counter

import cohere
import numpy as np
import pytest
import torch
from loopback import only_loopback
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

from tests.kit import tei_wire
from tests.kit.heads_of_models import save_bert, save_m3, save_pylate
from tests.kit.kinds_of_models import save_model
from tests.kit.service import load_yaml, wait_until

TEXTS = ["where does the overflow go", "to the CPU: it is told busy!", "the accelerator answers first. " * 6]
SAVE = {"m3": save_m3, "colbert": save_pylate, "bert": save_bert}
QUERY = "where does the overflow go"
PASSAGES = ["to the CPU", "to the moon", "", "it is told busy " * 30, "a reranker reads the query and a text together"]
SLO_S = 30.0
CPU = {"engine": "torch", "dtype": "float32", "num_cpus": 0.1}  # four of them on two cores


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in SAVE}
    for name, save in SAVE.items():
        save(folders[name])
    return {**folders, "reranker": save_model("bert reranker", tmp_path_factory.mktemp("reranker"))}


@pytest.fixture(scope="module")
def served(folders, shared):
    config = load_yaml("two_models.yaml")
    (several,) = config["applications"]
    several["args"] = {"cpu": CPU, "models": [{"model": {"id": str(folders[name]), "name": name}} for name in SAVE]}
    several["deployments"][0]["user_config"] = {"slo_s": SLO_S, "models": {"bert": {"slo_s": 20.0}}}
    (reranker,) = load_yaml("config.yaml")["applications"]
    reranker |= {"name": "reranker", "route_prefix": "/reranker"}
    reranker["args"]["model"] = {"id": str(folders["reranker"]), "name": "small"}
    reranker["args"] |= {"accelerator": {"device": "cpu", "dtype": "float32"}, "cpu": CPU}
    reranker["deployments"][0]["user_config"] = {
        "slo_s": SLO_S, "admission": "depth", "accelerator": {"queue_depth": 4}, "cpu": {"queue_depth": 8},
    }  # fmt: skip
    config["applications"].append(reranker)
    return shared.serve(config)


def ask(service, path, **payload):
    reply = service.ask(path, payload)
    assert reply.status == 200, reply
    return reply.json()


def test_one_run_gives_all_that_bge_m3_can(served, folders):
    wanted = SentenceTransformer(str(folders["m3"]), device="cpu").encode(TEXTS)
    everything = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True}
    found = ask(served, "/models/m3/encode", inputs=TEXTS, **everything)
    np.testing.assert_allclose(found["dense_vecs"], wanted, atol=2e-5)
    np.testing.assert_allclose(ask(served, "/models/m3/embed", inputs=TEXTS), wanted, atol=2e-5)
    sparse = ask(served, "/models/m3/embed_sparse", inputs=TEXTS)
    assert [{str(one["index"]): one["value"] for one in weights} for weights in sparse] == [
        pytest.approx(weights, abs=2e-5) for weights in found["lexical_weights"]
    ]
    assert all(map(len, sparse))
    assert served.get("/models/m3/info")["windve"]["kinds"] == ["embedding", "sparse", "multi_vector"]
    data = ask(served, "/models/m3/v1/multi-vector", input=TEXTS)["data"]
    for one, rows in zip(data, found["colbert_vecs"], strict=True):
        np.testing.assert_allclose(one["embeddings"], rows, atol=2e-5)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("role", ["query", "document"])
def test_colbert_by_its_role(served, folders, role):
    library = MultiVectorEncoder(str(folders["colbert"]), device="cpu")
    wanted = library.encode_query(TEXTS) if role == "query" else library.encode_document(TEXTS)
    data = ask(served, "/models/colbert/v1/multi-vector", input=TEXTS, input_type=role)["data"]
    for one, rows in zip(data, wanted, strict=True):
        np.testing.assert_allclose(one["embeddings"], rows.numpy(), atol=2e-5)


def test_models_under_one_url_have_pools_of_their_own(served):
    info = served.get("/info")
    assert info["model_id"] == "m3"
    assert {name: told["windve"]["slo_s"] for name, told in info["models"].items()} == {
        name: 20.0 if name == "bert" else SLO_S for name in SAVE
    }
    assert served.get("/models/bert/info")["model_id"] == "bert"
    assert len({replica(served, name) for name in SAVE}) == len(SAVE)
    assert served.get("/models/bert/openapi.json")["servers"] == [{"url": "/models/bert"}]


def replica(service, model):
    """Its process, or None."""
    found = service.get(f"/models/{model}/info")["windve"]["pools"]["cpu"]["replicas"]
    return next((about["pid"] for about in found.values()), None)


def test_grpc_goes_by_the_metadata_model(served):
    with tei_wire.connected(served.grpc_port) as client:
        for name in ("m3", "bert"):
            metadata = [("application", "windve"), ("model", name)]
            found = client.call("Embed/Embed", inputs=TEXTS[0], metadata=metadata).embeddings
            np.testing.assert_allclose(found, ask(served, f"/models/{name}/embed", inputs=TEXTS[0])[0], atol=2e-5)
            assert client.call("Info/Info", metadata=metadata).model_id == name
        refused = client.refused("Embed/Embed", inputs="x", metadata=[("application", "windve"), ("model", "nobody")])
        assert refused.code().name == "NOT_FOUND"


def test_one_models_embedder_dies_while_another_answers(served, figure):
    statuses, stop = {"m3": Counter(), "bert": Counter()}, threading.Event()

    def keep_asking(model):
        while not stop.wait(0.02):
            statuses[model][served.ask("/v1/embeddings", {"input": "x", "model": model}).status] += 1

    threads = [threading.Thread(target=keep_asking, args=(model,)) for model in statuses]
    for thread in threads:
        thread.start()
    killed, health, began = replica(served, "bert"), [], time.monotonic()
    os.kill(killed, signal.SIGKILL)

    def is_back():
        health.append(served.get("/health")["models"])
        return replica(served, "bert") not in {killed, None}

    wait_until(is_back, "a new embedder")
    back_s = time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join()
    figure(f"one of several models killed: {dict(statuses['bert'])}, back in {back_s:.1f} s; another {statuses['m3']}")
    assert set(statuses["m3"]) == {200}
    assert set(statuses["bert"]) <= {200, 429, 503}
    assert {one["m3"]["status"] for one in health} == {"ok"}
    assert {"status": "unavailable", "missing": ["cpu"]} in [one["bert"] for one in health]
    ask(served, "/models/bert/embed", inputs="x")


def test_a_config_for_one_model_applies_in_place(served):
    pid, own = replica(served, "bert"), served.router["models"]["bert"]

    def all_say(model, slo_s, problem=""):
        """Whether each Router has this SLO of the model in force, and says this problem."""
        infos = [info for info in served.infos() if "models" in info]
        found = {info["models"][model]["windve"]["slo_s"] for info in infos}
        problems = [info["windve"]["config_problem"] or "" for info in infos]
        return found == {slo_s} and all(problem in said if problem else not said for said in problems)

    own["slo_s"] = 10.0
    served.deploy()
    wait_until(lambda: all_say("bert", 10.0), "the SLO")
    assert all_say("m3", SLO_S)
    own["cpu"] = {"queue_dept": 3}
    served.deploy()
    wait_until(lambda: all_say("bert", 10.0, "models.bert.cpu.queue_dept: there is no such setting"), "the problem")
    own.clear()
    served.deploy()
    wait_until(lambda: all_say("bert", SLO_S), "what is for all")
    assert replica(served, "bert") == pid


def test_scores_are_those_of_sentence_transformers_from_both_pools(served, folders):
    model = CrossEncoder(str(folders["reranker"]), device="cpu", max_length=256)
    pairs = [(QUERY, text) for text in PASSAGES]
    wanted = model.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    reply = served.ask("/reranker/rerank", {"query": QUERY, "texts": PASSAGES, "raw_scores": True})
    assert reply.pool == "accelerator,cpu"  # 5 pairs on depths 4 and 8, in one decision
    found = {rank["index"]: rank["score"] for rank in reply.json()}
    np.testing.assert_allclose([found[index] for index in range(len(PASSAGES))], wanted, atol=2e-5)
    assert [rank["index"] for rank in reply.json()] == np.argsort(-wanted).tolist()
    with cohere.ClientV2(api_key="none", base_url=f"{served.address}/reranker") as client:
        found = client.rerank(model="small", query=QUERY, documents=PASSAGES, top_n=2)
    assert [result.index for result in found.results] == np.argsort(-wanted)[:2].tolist()
    assert found.results[0].relevance_score == pytest.approx(1 / (1 + np.exp(-wanted.max())), abs=1e-5)
    assert found.meta.tokens.input_tokens > len(PASSAGES)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("provider", ["infinity", "hosted_vllm"])
def test_litellm_gets_the_documents_in_its_provider_s_form(served, provider):
    """It asks Infinity and vLLM alike, and reads strings from one and objects from the other: the base URL decides."""
    documents = [text for text in PASSAGES if text]  # of Infinity's, litellm drops an empty one
    with only_loopback():
        import litellm

        address = f"{served.address}/reranker" + ("/infinity" if provider == "infinity" else "")
        asked = {"query": QUERY, "documents": documents, "api_base": address, "api_key": "none"}
        found = litellm.rerank(model=f"{provider}/small", top_n=2, **asked).results
    assert [one["document"]["text"] for one in found] == [documents[one["index"]] for one in found]
