"""ColBERT models as three libraries save them, against transformers and by sentence-transformers, in float32."""

import string
import threading

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from transformers import AutoModel, AutoTokenizer

from deployments.engines import TokenBatch, create_engine, embed
from deployments.errors import SettingsError
from deployments.models.encoder import Encoder
from deployments.models.model_files import read_model_card
from deployments.models.tokenizer import Tokenizer
from deployments.settings import CpuSettings, ModelSettings
from tests.kit.heads_of_models import GEMMA, LOCAL, save_pylate, save_stanford

NEVER = threading.Event()
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


def load(folder, **settings):
    return read_model_card(ModelSettings(id=str(folder), **settings))


def reference(folder, projection, about, text, role):
    """PyLate's `tokenize` and `encode`, of one text alone."""
    is_stanford = not (folder / "1_Dense").is_dir()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
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
    ids = tokenizer.encode(texts, truncate=True, role=role)
    rows = embed(engine, TokenBatch.pack(ids, ("multi_vector",)), NEVER)
    ends = np.cumsum(list(map(len, ids)))[:-1]
    return [
        encoder.rows(one.reshape(-1), tokens, outputs=("multi_vector",), role=role)["multi_vector"]
        for one, tokens in zip(np.split(rows, ends), ids, strict=True)
    ]


@pytest.mark.parametrize("role", ["query", "document"])
def test_vectors_are_pylates_and_sentence_transformers(colbert, role):
    folder, projection, about = colbert
    card = load(folder)
    assert (card.kind, card.kinds, card.dimension) == ("multi_vector", ("multi_vector",), len(projection))
    engine = create_engine(card, CpuSettings(engine="torch", dtype="float32", max_batch_tokens=200), "cpu", 2)
    wanted = [reference(folder, projection, about, text, role) for text in TEXTS]
    together = served(card, engine, TEXTS, role)
    alone = [served(card, engine, [text], role)[0] for text in TEXTS]
    library = MultiVectorEncoder(str(folder), device="cpu")
    theirs = library.encode_query(TEXTS) if role == "query" else library.encode_document(TEXTS)
    for one, other, exact, their in zip(together, alone, wanted, theirs, strict=True):
        np.testing.assert_allclose(one, exact, **EXACT)
        np.testing.assert_allclose(other, exact, **EXACT)
        np.testing.assert_allclose(one, their.numpy(), **EXACT)


@pytest.mark.parametrize("role", ["query", "document"])
def test_a_model_that_sentence_transformers_has_saved(colbert, tmp_path, role):
    library = MultiVectorEncoder(str(colbert[0]), device="cpu")
    library.save(str(tmp_path))
    card = load(tmp_path)
    assert card.kind == "multi_vector"
    engine = create_engine(card, CpuSettings(engine="torch", dtype="float32"), "cpu", 1)
    theirs = library.encode_query(TEXTS) if role == "query" else library.encode_document(TEXTS)
    for one, their in zip(served(card, engine, TEXTS, role), theirs, strict=True):
        np.testing.assert_allclose(one, their.numpy(), **EXACT)


@pytest.mark.parametrize("config", [None, GEMMA, LOCAL], ids=["bert", "gemma", "modernbert"])
@pytest.mark.parametrize("sees", [False, True])
def test_both_forms_leave_out_tokens_that_none_attends_to(tmp_path, sees, config):
    save_pylate(tmp_path, config=config, attend_to_expansion_tokens=sees)
    card = load(tmp_path)
    engine = create_engine(card, CpuSettings(engine="torch", dtype="float32"), "cpu", 1)
    tokenizer, found = Tokenizer(card), {}
    ids = [*tokenizer.encode(TEXTS, truncate=True, role="query"), *tokenizer.encode(TEXTS, truncate=True)]
    for form in ("packed", "padded"):
        engine.use(form, "float32")
        found[form] = embed(engine, TokenBatch.pack(ids, ("multi_vector",)), NEVER)
    np.testing.assert_allclose(found["packed"], found["padded"], **EXACT)


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
        Tokenizer(load(tmp_path))
