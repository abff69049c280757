"""Rerankers, classifiers and sparse models against transformers and sentence-transformers, in float32."""

import json
import shutil

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SparseEncoder
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from deployments.engines import pooled_model
from deployments.engines.pooled_model import score_agreement, tolerance
from deployments.errors import SettingsError
from deployments.models.text_pairs import Cuts, Pair
from deployments.models.tokenizer import Tokenizer
from tests.kit.engines import FORMS, card_of, check_rows, engine_of, rows_of
from tests.kit.kinds_of_models import KINDS, save_model

EXACT = {"atol": 2e-5, "rtol": 1e-5}
QUERY = "where does the overflow go"
TEXTS = ["to the CPU", "a", "", "it is told busy " * 12, "word " * 400, "the [SEP] of [SEP] texts", "队列 深度 ünïcode"]
SINGLES = [text for text in TEXTS if text]
PAIRS = [Pair(QUERY, text) for text in TEXTS] + [Pair("long query " * 150, "long text " * 150), Pair("", "no query")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def find(name):
        if name not in made:
            made[name] = save_model(name, tmp_path_factory.mktemp(name.replace(" ", "-")))
        return made[name]

    return find


def load(folder, name):
    return card_of(folder, **({"kind": "sparse"} if "sparse" in name else {}))


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
            found.append((logits.relu().log1p().amax(1) if "sparse" in name else logits).numpy())
    return found


def tokenized(card, queries):
    tokenizer = Tokenizer(card)
    return [
        tokenizer.encode_pairs([query], Cuts(truncate=True))[0]
        if isinstance(query, Pair)
        else tokenizer.encode([query], Cuts(truncate=True))[0]
        for query in queries
    ]


@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_the_librarys_own_alone_and_in_a_batch(saved, name):
    card = load(saved(name), name)
    assert card.kind == name.rpartition(" ")[2]
    queries = SINGLES if card.kind == "sparse" else [*SINGLES, *PAIRS]
    ids, wanted = tokenized(card, queries), reference(saved(name), name, queries)
    built = engine_of(card)
    assert built.form == "packed"
    for form in FORMS:
        built.use(form, "float32")
        check_rows(built, ids, wanted, **EXACT)


def test_scores_are_those_of_sentence_transformers(saved):
    """Which pads, truncates and batches in its own way."""
    name = "xlm-roberta reranker"
    wanted = CrossEncoder(str(saved(name)), device="cpu", max_length=256).predict(
        [(pair.first, pair.second) for pair in PAIRS], activation_fn=torch.nn.Identity(), show_progress_bar=False
    )
    card = load(saved(name), name)
    found = rows_of(engine_of(card, threads=2), tokenized(card, PAIRS))
    np.testing.assert_allclose(found[:, 0], wanted, **EXACT)
    assert np.ptp(wanted) > 0.1  # else they would agree whatever is computed


def test_weights_are_those_of_sentence_transformers(saved, tmp_path):
    """And its folder, which says SpladePooling, needs no setting."""
    encoder = SparseEncoder(str(saved("bert sparse")), device="cpu")
    encoder.save(str(tmp_path))
    wanted = encoder.encode(SINGLES, convert_to_sparse_tensor=False, show_progress_bar=False).numpy()
    card = card_of(tmp_path)
    assert (card.kind, card.pooling) == ("sparse", "splade")
    np.testing.assert_allclose(rows_of(engine_of(card), tokenized(card, SINGLES)), wanted, **EXACT)


def test_a_classifier_without_a_padding_token_is_refused(saved, tmp_path):
    folder = shutil.copytree(saved("bert reranker"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    with pytest.raises(SettingsError, match="gives no pad_token_id"):
        engine_of(card_of(folder))


def test_a_difference_of_logits_counts_by_their_spread():
    exact = np.array([[0.1], [0.2]], np.float32)
    assert score_agreement(exact, exact) == 1
    assert score_agreement(exact, exact + 0.1) == pytest.approx(0.9)  # of 1, since they spread less
    assert score_agreement(exact * 100, exact * 100 + 1) == pytest.approx(0.9)  # of 10
    assert not score_agreement(exact, exact * np.nan) >= 0.95


def test_a_dtype_that_moves_scores_is_not_chosen(saved, monkeypatch):
    card = card_of(saved("bert reranker"))
    assert tolerance(card).least == 0.95
    narrow = engine_of(card, dtype="auto").info
    assert narrow.agreement is None or narrow.agreement >= 0.95
    strict = pooled_model.Tolerance(score_agreement, 0.999999, "agreement of logits with float32")
    monkeypatch.setattr(pooled_model, "tolerance", lambda _: strict)
    assert engine_of(card, dtype="auto").info.dtype == "float32"
