"""Rerankers, classifiers and sparse models against transformers and sentence-transformers, in float32."""

import threading

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SparseEncoder
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from deployments.engines import TokenBatch, create_engine, embed
from deployments.engines.pooled_model import score_agreement, tolerance
from deployments.errors import SettingsError
from deployments.models.model_files import read_model_card
from deployments.models.pairs import Pair
from deployments.models.tokenizer import Tokenizer
from deployments.settings import CpuSettings, ModelSettings
from tests.kit.kinds_of_models import KINDS, save_model

NEVER = threading.Event()
EXACT = {"atol": 2e-5, "rtol": 1e-5}
QUERY = "where does the overflow go"
TEXTS = ["to the CPU", "a", "", "it is told busy " * 12, "word " * 400, "the [SEP] of [SEP] texts", "队列 深度 ünïcode"]
PAIRS = [Pair(QUERY, text) for text in TEXTS] + [Pair("long query " * 150, "long text " * 150), Pair("", "no query")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def find(name):
        if name not in made:
            made[name] = save_model(name, tmp_path_factory.mktemp(name.replace(" ", "-")))
        return made[name]

    return find


def load(folder, **settings):
    return read_model_card(ModelSettings(id=str(folder), **settings))


def reference(folder, name, queries):
    """What the transformers library itself makes of each query alone, by its own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = AutoModelForMaskedLM if "sparse" in name else AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for query in queries:
            texts = ([query.first], [query.second]) if isinstance(query, Pair) else ([query],)
            logits = model(**tokenizer(*texts, truncation="longest_first", max_length=256, return_tensors="pt")).logits
            found.append((logits.relu().log1p().amax(1) if "sparse" in name else logits)[0].numpy())
    return np.stack(found)


def tokenised(card, queries):
    tokenizer = Tokenizer(card)
    return [
        tokenizer.encode_pairs([query], truncate=True)[0]
        if isinstance(query, Pair)
        else tokenizer.encode([query], truncate=True)[0]
        for query in queries
    ]


@pytest.mark.parametrize("engine", ["torch", "openvino"])
@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_the_librarys_own_alone_and_in_a_batch(saved, name, engine):
    folder = saved(name)
    card = load(folder, **({"kind": "sparse"} if "sparse" in name else {}))
    assert card.kind == name.rpartition(" ")[2]
    singles = [text for text in TEXTS if text]
    queries = singles if card.kind == "sparse" else [*singles, *PAIRS]
    ids = tokenised(card, queries)
    built = create_engine(card, CpuSettings(engine=engine, dtype="float32"), "cpu", 1)
    wanted = reference(folder, name, queries)
    together = embed(built, TokenBatch.pack(ids), NEVER)
    alone = np.concatenate([embed(built, TokenBatch.pack([query]), NEVER) for query in ids])
    assert together.dtype == np.float32
    np.testing.assert_allclose(together, wanted, **EXACT)
    np.testing.assert_allclose(alone, wanted, **EXACT)
    if engine == "torch":
        assert "packed" in built.info.why
        built.use("padded", "float32")
        np.testing.assert_allclose(embed(built, TokenBatch.pack(ids), NEVER), wanted, **EXACT)


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("name", ["bert reranker", "xlm-roberta reranker", "bert classifier", "bert sparse"])
def test_each_form_by_itself(saved, name, form):
    from deployments.engines.torch_engine import TorchEngine

    card = load(saved(name), **({"kind": "sparse"} if "sparse" in name else {}))
    queries = [text for text in TEXTS if text] if card.kind == "sparse" else PAIRS
    engine = TorchEngine(card, CpuSettings(dtype="float32"), "cpu", 1)
    engine.use(form, "float32")
    found = embed(engine, TokenBatch.pack(tokenised(card, queries)), NEVER)
    np.testing.assert_allclose(found, reference(saved(name), name, queries), **EXACT)


@pytest.mark.parametrize("name", ["bert reranker", "xlm-roberta reranker"])
def test_scores_are_those_of_sentence_transformers(saved, name):
    """Which pads, truncates and batches in its own way."""
    wanted = CrossEncoder(str(saved(name)), device="cpu", max_length=256).predict(
        [(pair.first, pair.second) for pair in PAIRS], activation_fn=torch.nn.Identity(), show_progress_bar=False
    )
    card = load(saved(name))
    engine = create_engine(card, CpuSettings(engine="torch", dtype="float32"), "cpu", 2)
    found = embed(engine, TokenBatch.pack(Tokenizer(card).encode_pairs(PAIRS, truncate=True)), NEVER)
    np.testing.assert_allclose(found[:, 0], wanted, **EXACT)
    assert np.ptp(wanted) > 0.1  # else they would agree whatever is computed


def test_weights_are_those_of_sentence_transformers(saved, tmp_path):
    """And its folder, which says SpladePooling, needs no setting."""
    encoder = SparseEncoder(str(saved("bert sparse")), device="cpu")
    encoder.save(str(tmp_path))
    texts = [text for text in TEXTS if text]
    wanted = encoder.encode(texts, convert_to_sparse_tensor=False, show_progress_bar=False).numpy()
    card = load(tmp_path)
    assert (card.kind, card.pooling) == ("sparse", "splade")
    engine = create_engine(card, CpuSettings(engine="torch", dtype="float32"), "cpu", 1)
    np.testing.assert_allclose(embed(engine, TokenBatch.pack(tokenised(card, texts)), NEVER), wanted, **EXACT)


def test_a_head_that_is_not_there_is_not_made_up(saved, tmp_path):
    import json
    import shutil

    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(saved("bert reranker"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"1 weights of a bert model are missing .*classifier\.weight"):
        create_engine(load(folder), CpuSettings(engine="torch"), "cpu", 1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    shutil.copy(saved("bert reranker") / "model.safetensors", folder)
    with pytest.raises(SettingsError, match="gives no pad_token_id"):
        create_engine(load(folder), CpuSettings(engine="torch"), "cpu", 1)


def test_a_difference_of_logits_counts_by_their_spread():
    exact = np.array([[0.1], [0.2]], np.float32)
    assert score_agreement(exact, exact) == 1
    assert score_agreement(exact, exact + 0.1) == pytest.approx(0.9)  # of 1, since they spread less
    assert score_agreement(exact * 100, exact * 100 + 1) == pytest.approx(0.9)  # of 10
    assert not score_agreement(exact, exact * np.nan) >= 0.95


def test_a_dtype_that_moves_scores_is_not_chosen(saved, monkeypatch):
    card = load(saved("bert reranker"))
    assert tolerance(card).least == 0.95
    narrow = create_engine(card, CpuSettings(engine="torch"), "cpu", 1).info
    assert narrow.agreement is None or narrow.agreement >= 0.95
    from deployments.engines import pooled_model

    strict = pooled_model.Tolerance(score_agreement, 0.999999, "agreement of logits with float32")
    monkeypatch.setattr(pooled_model, "tolerance", lambda _: strict)
    assert create_engine(card, CpuSettings(engine="torch"), "cpu", 1).info.dtype == "float32"
