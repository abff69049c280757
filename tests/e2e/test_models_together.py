"""Real Ray, two applications on it. One has five models under one URL: bge-m3's answers from one run, a ColBERT model,
jina-embeddings-v2, a decoder that pools its last token, and a reranker that is a language model. The other one is a
cross-encoder in two pools.
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
from openai import NotFoundError, OpenAI
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModel, AutoTokenizer, MistralConfig, Qwen3Config

from deployments.models.text_pairs import Pair
from tests.kit import tei_wire, tiny_tokenizers
from tests.kit.heads_of_models import NORMALIZE, TRANSFORMER, save_causal, save_m3, save_pylate, write
from tests.kit.jina_reference import Jina
from tests.kit.kinds_of_models import PACKAGE, save_model
from tests.kit.published_models import JINA, jina_weights, save_folder
from tests.kit.service import load_yaml, wait_until
from tests.models.test_judges import reference

TEXTS = ["where does the overflow go", "to the CPU: it is told busy!", "the accelerator answers first. " * 6]


def save_last_token(folder):
    """As e5-mistral: a decoder, whose tokenizer's own file has no end token, pooled by the last one."""
    tiny_tokenizers.llama(folder, add_eos_token=True, model_max_length=500)
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 900, "max_position_embeddings": 512, "initializer_range": 0.2}
    AutoModel.from_config(MistralConfig(**shape)).eval().save_pretrained(folder)
    pooling = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    write(folder / "1_Pooling/config.json", {"pooling_mode": "lasttoken"})
    write(folder / "modules.json", [TRANSFORMER, pooling, NORMALIZE])


SAVE = {
    "m3": save_m3,
    "colbert": save_pylate,
    "jina": lambda folder: save_folder(folder, JINA, jina_weights(JINA)),
    "decoder": save_last_token,
    "judge": lambda folder: save_causal(folder, Qwen3Config),
}
QUERY = "where does the overflow go"
PASSAGES = ["to the CPU", "to the moon", "", "it is told busy " * 30, "a reranker reads the query and a text together"]
SLO_S = 30.0
CPU = {"engine": "torch", "dtype": "float32", "num_cpus": 0.1}  # six of them on two cores


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
    templates = {"judge": {"template": "qwen3-reranker"}}
    models = [{"id": str(folders[name]), "name": name, **templates.get(name, {})} for name in SAVE]
    several["args"] = {"cpu": CPU, "models": [{"model": model} for model in models]}
    several["deployments"][0]["user_config"] = {"slo_s": SLO_S, "models": {"decoder": {"slo_s": 20.0}}}
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
def test_colbert_by_jinas_and_vllms_routes(served, folders, role):
    library = MultiVectorEncoder(str(folders["colbert"]), device="cpu")
    wanted = library.encode_query(TEXTS) if role == "query" else library.encode_document(TEXTS)
    jina = ask(served, "/models/colbert/v1/multi-vector", input=TEXTS, input_type=role)["data"]
    vllm = ask(served, "/models/colbert/pooling", input=TEXTS, embedding_mode=role, task="token_embed")["data"]
    for one, other, rows in zip(jina, vllm, wanted, strict=True):
        np.testing.assert_allclose(one["embeddings"], rows.numpy(), atol=2e-5)
        np.testing.assert_allclose(other["data"], rows.numpy(), atol=2e-5)


def test_a_language_model_reranks(served, folders):
    pairs = [Pair(TEXTS[0], text) for text in TEXTS]
    wanted = reference(folders["judge"], "qwen3-reranker", pairs, 1200)[:, 0]
    ranks = ask(served, "/models/judge/rerank", query=TEXTS[0], texts=TEXTS, raw_scores=True)
    found = {rank["index"]: rank["score"] for rank in ranks}
    np.testing.assert_allclose([found[index] for index in range(len(TEXTS))], wanted, atol=1e-4)
    best = ask(served, "/v1/rerank", model="judge", query=TEXTS[0], documents=TEXTS, top_n=1)["results"][0]
    assert best["index"] == int(np.argmax(wanted))
    assert best["relevance_score"] == pytest.approx(1 / (1 + np.exp(-wanted.max())), abs=1e-4)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_jina_without_its_code(served, folders):
    fast, model = FastTokenizer.from_file(str(PACKAGE / "tokenizer.json")), Jina(JINA, jina_weights(JINA))
    fast.no_padding()
    wanted = unit(np.stack([model(np.array(fast.encode(text).ids)).mean(0) for text in TEXTS]))
    np.testing.assert_allclose(ask(served, "/models/jina/embed", inputs=TEXTS), wanted, atol=2e-5)


def test_a_decoder_pools_the_end_token_that_its_settings_add(served, folders):
    tokenizer, model = AutoTokenizer.from_pretrained(folders["decoder"]), AutoModel.from_pretrained(folders["decoder"])
    with torch.inference_mode():
        ids = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in TEXTS]  # transformers 5 leaves it out
        wanted = np.stack([model(torch.tensor([one])).last_hidden_state[0, -1].numpy() for one in ids])
    data = ask(served, "/v1/embeddings", model="decoder", input=TEXTS)["data"]
    np.testing.assert_allclose([one["embedding"] for one in data], unit(wanted), atol=2e-5)


def test_models_under_one_url_have_pools_of_their_own(served):
    info = served.get("/info")
    assert info["model_id"] == "m3"
    assert {name: told["windve"]["slo_s"] for name, told in info["models"].items()} == {
        name: 20.0 if name == "decoder" else SLO_S for name in SAVE
    }
    assert served.get("/models/decoder/info")["model_id"] == "decoder"
    assert len({replica(served, name) for name in SAVE}) == len(SAVE)
    assert served.get("/models/decoder/openapi.json")["servers"] == [{"url": "/models/decoder"}]


def replica(service, model):
    """Its process, or None."""
    found = service.get(f"/models/{model}/info")["windve"]["pools"]["cpu"]["replicas"]
    return next((about["pid"] for about in found.values()), None)


def test_openais_client_by_model(served):
    with OpenAI(base_url=f"{served.address}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == list(SAVE)
        vectors = [client.embeddings.create(model=name, input="x").data[0].embedding for name in ("m3", "decoder")]
        np.testing.assert_allclose(
            vectors, [ask(served, f"/models/{name}/embed", inputs="x")[0] for name in ("m3", "decoder")], atol=2e-5
        )
        with pytest.raises(NotFoundError, match="there is no model 'nobody'"):
            client.embeddings.create(model="nobody", input="x")
    unknown = served.ask("/models/nobody/embed", {"inputs": "x"})
    assert (unknown.status, unknown.json()["error_type"]) == (404, "Validation")


def test_grpc_goes_by_the_metadata_model(served):
    with tei_wire.connected(served.grpc_port) as client:
        for name in ("m3", "decoder"):
            metadata = [("application", "windve"), ("model", name)]
            found = client.call("Embed/Embed", inputs=TEXTS[0], metadata=metadata).embeddings
            np.testing.assert_allclose(found, ask(served, f"/models/{name}/embed", inputs=TEXTS[0])[0], atol=2e-5)
            assert client.call("Info/Info", metadata=metadata).model_id == name
        refused = client.refused("Embed/Embed", inputs="x", metadata=[("application", "windve"), ("model", "nobody")])
        assert refused.code().name == "NOT_FOUND"


def test_one_models_embedder_dies_while_another_answers(served, figure):
    statuses, stop = {"m3": Counter(), "decoder": Counter()}, threading.Event()

    def keep_asking(model):
        while not stop.wait(0.02):
            statuses[model][served.ask("/v1/embeddings", {"input": "x", "model": model}).status] += 1

    threads = [threading.Thread(target=keep_asking, args=(model,)) for model in statuses]
    for thread in threads:
        thread.start()
    killed, health, began = replica(served, "decoder"), [], time.monotonic()
    os.kill(killed, signal.SIGKILL)

    def is_back():
        health.append(served.get("/health")["models"])
        return replica(served, "decoder") not in {killed, None}

    wait_until(is_back, "a new embedder")
    back_s = time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join()
    figure(
        f"one of several models killed: {dict(statuses['decoder'])}, back in {back_s:.1f} s; another {statuses['m3']}"
    )
    assert set(statuses["m3"]) == {200}
    assert set(statuses["decoder"]) <= {200, 429, 503}
    assert {one["m3"]["status"] for one in health} == {"ok"}
    assert {"status": "unavailable", "missing": ["cpu"]} in [one["decoder"] for one in health]
    ask(served, "/models/decoder/embed", inputs="x")


def test_a_config_for_one_model_applies_in_place(served):
    pid, own = replica(served, "decoder"), served.router["models"]["decoder"]

    def slo_s(model):
        return served.get(f"/models/{model}/info")["windve"]["slo_s"]

    def problem():
        return served.get("/info")["windve"]["config_problem"]

    own["slo_s"] = 10.0
    served.deploy()
    wait_until(lambda: slo_s("decoder") == 10.0, "the SLO")
    assert slo_s("m3") == SLO_S
    own["cpu"] = {"queue_dept": 3}
    served.deploy()
    wait_until(
        lambda: problem() == "user_config.models.decoder.cpu.queue_dept: there is no such setting", "the problem"
    )
    assert slo_s("decoder") == 10.0
    own.clear()
    served.deploy()
    wait_until(lambda: slo_s("decoder") == SLO_S and problem() is None, "what is for all")
    assert replica(served, "decoder") == pid


def test_applications_side_by_side_have_routes_and_pools_of_their_own(served):
    info = served.get("/reranker/info")
    assert info["model_type"] == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    depths = {name: pool["queue_depth"] for name, pool in info["windve"]["pools"].items()}
    assert depths == {"accelerator": 4, "cpu": 8}
    for path, payload in (
        ("/models/m3/rerank", {"query": "q", "texts": ["a"]}),
        ("/reranker/embed", {"inputs": "a"}),
    ):
        refused = served.ask(path, payload)
        assert refused.status == 424
        assert "is not for the model that is served" in refused.json()["error"]


def test_scores_are_those_of_sentence_transformers_from_both_pools(served, folders):
    model = CrossEncoder(str(folders["reranker"]), device="cpu", max_length=256)
    pairs = [(QUERY, text) for text in PASSAGES]
    wanted = model.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    reply = served.ask("/reranker/rerank", {"query": QUERY, "texts": PASSAGES, "raw_scores": True})
    assert reply.pool == "accelerator,cpu"  # 5 pairs on depths 4 and 8, in one decision
    found = {rank["index"]: rank["score"] for rank in reply.json()}
    np.testing.assert_allclose([found[index] for index in range(len(PASSAGES))], wanted, atol=2e-5)
    assert [rank["index"] for rank in reply.json()] == np.argsort(-wanted).tolist()
    for kind in (cohere.ClientV2, cohere.Client):
        with kind(api_key="none", base_url=f"{served.address}/reranker") as client:
            found = client.rerank(model="small", query=QUERY, documents=PASSAGES, top_n=2)
        assert [result.index for result in found.results] == np.argsort(-wanted)[:2].tolist()
        assert found.results[0].relevance_score == pytest.approx(1 / (1 + np.exp(-wanted.max())), abs=1e-5)
        assert found.meta.tokens.input_tokens > len(PASSAGES)


def test_a_rerank_of_more_texts_than_the_depths_is_bulk(served):
    texts = [f"text {number}" for number in range(60)]
    ranks = ask(served, "/reranker/rerank", query=QUERY, texts=texts, return_text=True)
    assert sorted(rank["index"] for rank in ranks) == list(range(60))
    assert all(rank["text"] == texts[rank["index"]] for rank in ranks)
    assert [rank["score"] for rank in ranks] == sorted((rank["score"] for rank in ranks), reverse=True)
