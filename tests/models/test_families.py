"""Published models of each family against transformers' own classes, and jina-embeddings-v2 against float64."""

import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from deployments.engines import TokenBatch, create_engine, embed
from deployments.engines.packed.attention import Ways
from deployments.engines.packed.families import bert, decoder, distilbert, jina, modernbert, mpnet, rotary_bert
from deployments.engines.pooled_model import PooledModel, agreement
from deployments.engines.torch_engine import TorchEngine
from deployments.errors import SettingsError
from deployments.models.model_files import read_model_card
from deployments.models.pairs import TYPE
from deployments.settings import CpuSettings, ModelSettings
from tests.kit.jina_reference import Jina
from tests.kit.published_models import (
    DISTILBERT,
    FAMILIES,
    JINA,
    JINA_CODE,
    jina_weights,
    published_weights,
    reference,
    save_folder,
)

NEVER = threading.Event()
JINAS = {
    "jina": JINA,
    "jina reglu": JINA | {"feed_forward_type": "reglu"},
    "jina original": JINA | {"feed_forward_type": "original"},
    "jina of six heads": JINA | {"num_attention_heads": 6, "hidden_size": 96},
    "jina code": JINA_CODE,
}
LENGTHS = {"ragged": [300, 45, 130, 4, 1], "alike": [40, 40, 40], "one": [77], "shortest": [1]}
LONG = [700, 513]  # past a local window of 128 on both sides, and past 512
PAST_512 = {"modernbert", "eurobert", "nomic", "gte en", "gte multilingual", *JINAS}
HEAD = {
    "bert.pooler.dense.weight": (64, 64),
    "bert.pooler.dense.bias": 64,
    "classifier.weight": (1, 64),
    "classifier.bias": 1,
}


class Family:
    """One published model in its folder, and what its vectors should be."""

    def __init__(self, name, folder):
        if name in JINAS:
            weights = jina_weights(JINAS[name])
            save_folder(folder, JINAS[name], weights)
            self._model = Jina(JINAS[name], weights)
        else:
            self._model = reference(name)
            save_folder(folder, FAMILIES[name].config, published_weights(name, self._model))
        self.folder = folder
        self._hidden = {}

    def hidden(self, query):
        """The vector of each token [tokens, hidden] of one query alone."""
        if (key := query.tobytes()) not in self._hidden:
            if isinstance(self._model, Jina):
                self._hidden[key] = self._model(query)
            else:
                with torch.inference_mode():
                    ids = torch.from_numpy(query.astype(np.int64))[None]
                    self._hidden[key] = self._model(input_ids=ids).last_hidden_state[0].numpy()
        return self._hidden[key]

    def pooled(self, batch, pooling):
        how = {"cls": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0)}[pooling]
        return np.stack([how(self.hidden(query)) for query in batch.queries()]).astype(np.float32)


@pytest.fixture(scope="module", params=[*FAMILIES, *JINAS])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def family(name, tmp_path_factory):
    return Family(name, tmp_path_factory.mktemp("published") / "model")


def engine_of(family, form, dtype="float32", **settings):
    card = read_model_card(ModelSettings(id=str(family.folder), **settings))
    engine = TorchEngine(card, CpuSettings(engine="torch", dtype=dtype), "cpu", 1)
    engine.use(form, dtype)
    return engine


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_vectors_are_the_models_own(family, name, form, pooling):
    engine = engine_of(family, form, pooling=pooling)
    lengths = LENGTHS | ({"long": LONG} if name in PAST_512 else {})
    for some in lengths.values():
        batch = TokenBatch.random(30000, some, seed=0)
        wanted = family.pooled(batch, pooling)
        alone = np.concatenate([embed(engine, TokenBatch.pack([query]), NEVER) for query in batch.queries()])
        for got in (embed(engine, batch, NEVER), alone):
            assert agreement(wanted, got) >= 0.9999
            np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=1e-4)


ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
RERANKERS = {  # the name that the published class begins with
    "distilbert": ("DistilBert", {}),
    "mpnet": ("MPNet", {}),
    "modernbert": ("ModernBert", {}),  # gte-reranker-modernbert-base: by the mean
    "modernbert by its first token": ("ModernBert", {"classifier_pooling": "cls", "classifier_bias": True}),
    "gte multilingual": ("New", {}),  # gte-multilingual-reranker-base
}


def check_scores(folder, batch, wanted):
    card = read_model_card(ModelSettings(id=str(folder)))
    assert (card.kind, card.dimension) == ("reranker", 1)
    assert np.ptp(wanted) > 0.05  # else they would agree whatever is computed
    engine = TorchEngine(card, CpuSettings(engine="torch", dtype="float32"), "cpu", 1)
    for form in ("packed", "padded"):
        engine.use(form, "float32")
        np.testing.assert_allclose(embed(engine, batch, NEVER), wanted, atol=2e-5, rtol=1e-4)
    return card


@pytest.mark.parametrize("which", RERANKERS)
def test_rerankers(tmp_path, which):
    (beginning, changes), name = RERANKERS[which], which.partition(" by")[0]
    config = FAMILIES[name].config | changes | ONE_LABEL
    config |= {"architectures": [f"{beginning}ForSequenceClassification"], "pad_token_id": config["pad_token_id"]}
    model = reference(name, AutoModelForSequenceClassification, **changes, **ONE_LABEL)
    save_folder(tmp_path, config, published_weights(name, model), pooling=None)
    batch = TokenBatch.random(30000, [300, 45, 130, 4, 2], seed=0)
    with torch.inference_mode():
        ids = [torch.from_numpy(query.astype(np.int64))[None] for query in batch.queries()]
        wanted = np.concatenate([model(input_ids=query).logits.numpy() for query in ids])
    check_scores(tmp_path, batch, wanted)


def test_jinas_reranker(tmp_path):
    """jina-reranker-v1: BERT's head over the same encoder, with its two types of tokens."""
    config = JINA | ONE_LABEL | {"architectures": ["JinaBertForSequenceClassification"]}
    inner = jina_weights(JINA)
    random = np.random.default_rng(1)
    heads = {name: random.normal(0, 0.3, shape) for name, shape in HEAD.items()}
    weights = {f"bert.{name}": weight for name, weight in inner.items()}
    weights |= {name: torch.from_numpy(head).float() for name, head in heads.items()}
    save_folder(tmp_path, config, weights, pooling=None)
    batch = TokenBatch.random(30000, [60, 7, 2], seed=0)
    for query in batch.queries():
        query[len(query) // 2 :] += TYPE
    first = np.stack([Jina(JINA, inner)(query % TYPE, query // TYPE)[0] for query in batch.queries()])
    pooled = np.tanh(first @ heads["bert.pooler.dense.weight"].T + heads["bert.pooler.dense.bias"])
    card = check_scores(tmp_path, batch, pooled @ heads["classifier.weight"].T + heads["classifier.bias"])
    assert card.token_types


def test_words_of_distilbert(tmp_path):
    """opensearch-neural-sparse: SPLADE over DistilBERT."""
    model = reference("distilbert", AutoModelForMaskedLM)
    config = DISTILBERT | {"architectures": ["DistilBertForMaskedLM"]}
    save_folder(tmp_path, config, published_weights("distilbert", model), pooling=None)
    card = read_model_card(ModelSettings(id=str(tmp_path), kind="sparse"))
    batch = TokenBatch.random(30000, [300, 45, 4], seed=0)
    with torch.inference_mode():
        ids = [torch.from_numpy(query.astype(np.int64))[None] for query in batch.queries()]
        wanted = np.concatenate([model(input_ids=query).logits.amax(1).relu().log1p().numpy() for query in ids])
    engine = TorchEngine(card, CpuSettings(engine="torch", dtype="float32"), "cpu", 1)
    engine.use("packed", "float32")
    np.testing.assert_allclose(embed(engine, batch, NEVER), wanted, atol=2e-5, rtol=1e-4)


def test_weights_that_the_config_does_not_speak_of_are_refused(tmp_path):
    """The norms of the model for code, under a config that names the other code."""
    save_folder(tmp_path, JINA, jina_weights(JINA) | jina_weights(JINA_CODE))
    card = read_model_card(ModelSettings(id=str(tmp_path)))
    with pytest.raises(SettingsError, match=r"has weights that no jina_bert model has \(encoder\.layer\.0\."):
        PooledModel(card)


@pytest.mark.parametrize("name", ["jina", "modernbert", "gte multilingual"], scope="module")
def test_openvino(family):
    card = read_model_card(ModelSettings(id=str(family.folder)))
    batch = TokenBatch.random(30000, LENGTHS["ragged"], seed=0)
    engine = create_engine(card, CpuSettings(engine="openvino", dtype="float32"), "cpu", 1)
    np.testing.assert_allclose(embed(engine, batch, NEVER), family.pooled(batch, "mean"), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_bfloat16(family, form):
    """Random weights are stronger than trained ones: these lose less."""
    batch = TokenBatch.random(30000, LENGTHS["ragged"], seed=0)
    found = embed(engine_of(family, form, "bfloat16", pooling="mean"), batch, NEVER)
    assert agreement(family.pooled(batch, "mean"), found) >= 0.999


def test_the_attention_of_devices_without_a_kernel_for_lengths(family, name, monkeypatch):
    for module in (bert, decoder, distilbert, jina, modernbert, mpnet, rotary_bert):
        monkeypatch.setattr(module, "attention_for", lambda *how, **more: Ways(*how, **more).by_padding)
    batch = TokenBatch.random(30000, LONG if name in PAST_512 else LENGTHS["ragged"], seed=0)
    got = embed(engine_of(family, "packed", pooling="mean"), batch, NEVER)
    np.testing.assert_allclose(got, family.pooled(batch, "mean"), atol=2e-5, rtol=1e-4)


def test_the_vector_of_each_token(family):
    batch = TokenBatch.random(30000, LENGTHS["ragged"], seed=0)
    queries = list(batch.queries())
    got = embed(engine_of(family, "packed", pooling="mean"), TokenBatch.pack(queries, ("tokens",)), NEVER)
    np.testing.assert_allclose(got, np.concatenate(list(map(family.hidden, queries))), atol=2e-5, rtol=1e-4)
