"""Real Ray, five models under one URL: bge-m3's answers from one run, a ColBERT model, jina-embeddings-v2, a decoder
that pools its last token, and a reranker that is a language model.
"""

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoModel, AutoTokenizer, MistralConfig, Qwen3Config

from calibration.load import Address, burst, request_bytes
from deployments.models.pairs import Pair
from tests.kit import tiny_tokenizers
from tests.kit.heads_of_models import NORMALIZE, TRANSFORMER, save_causal, save_m3, save_pylate, write
from tests.kit.jina_reference import Jina
from tests.kit.kinds_of_models import PACKAGE
from tests.kit.published_models import JINA, jina_weights, save_folder
from tests.kit.service import load_yaml
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in SAVE}
    for name, save in SAVE.items():
        save(folders[name])
    return folders


@pytest.fixture(scope="module")
def served(folders, shared):
    config = load_yaml("two_models.yaml")
    (application,) = config["applications"]
    templates = {"judge": {"template": "qwen3-reranker"}}
    application["args"] = {
        "cpu": {"engine": "torch", "dtype": "float32"},
        "models": [
            {"model": {"id": str(folder), "name": name, **templates.get(name, {})}} for name, folder in folders.items()
        ],
    }
    application["deployments"][0]["user_config"] = {"slo_s": 3.0}
    return shared.serve(config)


def ask(service, path, **payload):
    reply = burst(Address("127.0.0.1", service.port), [request_bytes(payload, path)])[0]
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
