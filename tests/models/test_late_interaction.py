"""ColBERT models as three libraries save them, against transformers and by sentence-transformers, in float32."""

import string
from functools import cache

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from transformers import AutoModel, AutoTokenizer

from deployments.errors import SettingsError
from deployments.models.encoder import Encoder
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Tokenizer
from tests.kit.engines import FORMS, card_of, engine_of, rows_of
from tests.kit.heads_of_models import GEMMA, LOCAL, save_pylate, save_stanford

EXACT = {"atol": 2e-5, "rtol": 1e-5}
TEXTS = ["to the CPU", "a.", "it is told: busy! " * 12, "word " * 400, "队列 深度 ünïcode", "(the) overflow, " * 9]
SAVED = {
    "pylate": (save_pylate, {}),
    "pylate that sees its mask tokens": (save_pylate, {"attend_to_expansion_tokens": True, "query_length": 12}),
    "pylate without mask tokens": (save_pylate, {"do_query_expansion": False, "skiplist_words": ["a", "the"]}),
    "stanford": (save_stanford, {}),
    "stanford that sees its mask tokens": (save_stanford, {"attend_to_mask_tokens": True, "mask_punctuation": False}),
}


@pytest.fixture(scope="module", params=SAVED)
def colbert(request, tmp_path_factory):
    save, about = SAVED[request.param]
    folder = tmp_path_factory.mktemp("colbert")
    return folder, save(folder, **about), about


@cache
def transformers_own(folder):
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def reference(folder, projection, about, text, role):
    """PyLate's `tokenize` and `encode`, of one text alone."""
    is_stanford = not (folder / "1_Dense").is_dir()
    tokenizer, model = transformers_own(folder)
    lengths = (20, 64) if is_stanford else (about.get("query_length", 32), 180)
    most = lengths[role == "document"]
    ids = tokenizer(text, truncation=True, max_length=most - 1)["input_ids"]
    ids.insert(1, tokenizer.convert_tokens_to_ids(f"[unused{int(role == 'document')}]"))
    seen = [1] * len(ids)
    if role == "query" and about.get("do_query_expansion", True):
        attends = about.get("attend_to_expansion_tokens", about.get("attend_to_mask_tokens", False))
        seen += [int(attends)] * (most - len(ids))
        ids += [tokenizer.mask_token_id] * (most - len(ids))
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([seen])).last_hidden_state[0]
        vectors = torch.nn.functional.normalize(hidden @ projection.T, dim=-1).numpy()
    skipped = about.get("skiplist_words", string.punctuation if about.get("mask_punctuation", True) else ())
    words = set(tokenizer.convert_tokens_to_ids(list(skipped))) if role == "document" else ()
    return vectors[[number not in words for number in ids]]


def served(card, engine, texts, role):
    """What a client gets: a run of all texts, and what the Router makes of each."""
    encoder, tokenizer = Encoder(card, auto_truncate=True), Tokenizer(card)
    ids = tokenizer.encode(texts, Cuts(truncate=True), role=role)
    rows = rows_of(engine, ids, "multi_vector")
    ends = np.cumsum(list(map(len, ids)))[:-1]
    return [
        encoder.rows(one.reshape(-1), tokens, outputs=("multi_vector",), role=role)["multi_vector"]
        for one, tokens in zip(np.split(rows, ends), ids, strict=True)
    ]


def encoded(library, role):
    return library.encode_query(TEXTS) if role == "query" else library.encode_document(TEXTS)


@pytest.mark.parametrize("role", ["query", "document"])
def test_vectors_are_pylates_and_sentence_transformers(colbert, tmp_path, role):
    """And so are those of the model as sentence-transformers saves it."""
    folder, projection, about = colbert
    card = card_of(folder)
    assert (card.kind, card.kinds, card.dimension) == ("multi_vector", ("multi_vector",), len(projection))
    engine = engine_of(card, threads=2, max_batch_tokens=200)
    wanted = [reference(folder, projection, about, text, role) for text in TEXTS]
    together = served(card, engine, TEXTS, role)
    alone = [served(card, engine, [text], role)[0] for text in TEXTS]
    library = MultiVectorEncoder(str(folder), device="cpu")
    library.save(str(tmp_path))
    again = card_of(tmp_path)
    assert again.kind == "multi_vector"
    theirs = [vectors.numpy() for vectors in encoded(library, role)]
    for found in (together, alone, theirs, served(again, engine_of(again), TEXTS, role)):
        for one, exact in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, exact, **EXACT)


@pytest.mark.parametrize("config", [None, GEMMA, LOCAL], ids=["bert", "gemma", "modernbert"])
@pytest.mark.parametrize("sees", [False, True])
def test_both_forms_leave_out_tokens_that_none_attends_to(tmp_path, sees, config):
    save_pylate(tmp_path, config=config, attend_to_expansion_tokens=sees)
    card = card_of(tmp_path)
    tokenizer = Tokenizer(card)
    ids = [*tokenizer.encode(TEXTS, Cuts(truncate=True), role="query"), *tokenizer.encode(TEXTS, Cuts(truncate=True))]
    packed, padded = (rows_of(engine_of(card, form=form), ids, "multi_vector") for form in FORMS)
    np.testing.assert_allclose(packed, padded, **EXACT)


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"query_prefix": "[Q] "}, r"the tokenizer has no token '\[Q\] ', which the model's files name"),
        ({"document_prefix": "[D]"}, r"the tokenizer has no token '\[D\]'"),
    ],
)
def test_a_marker_that_is_no_token_is_refused(tmp_path, about, sentence):
    save_pylate(tmp_path, **about)
    with pytest.raises(SettingsError, match=rf"args\.model\.id: {sentence}"):
        Tokenizer(card_of(tmp_path))
